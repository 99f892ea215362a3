"""Source models of transformers, their exports, and runtimes: every planted fault is laid at its maker's.

The same five faults are planted twice: in the graph, which the runtime then computes right, and in the
runtime, which computes them on a right graph. No other witness than the source could tell these two apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from fixtures.exported import Family, Fault, TinySource, export
from fixtures.planted import planted
from harness.cli.app import run
from harness.decode.parts import decoder_inventory
from harness.engines.base import Availability, EngineOption, OptionValue, Session, TopLogits
from harness.engines.registry import EngineSpec, parse_engine
from harness.events import CheckFinished, Event, PromptJudged, SourceJudged
from harness.package import open_package
from harness.parity.check import CheckPlan, Prompt, run_check
from harness.parity.source import SourcePlan
from harness.pytest_plugin.checks import Parity
from harness.topology.resolve import resolve_package

pytestmark = pytest.mark.hf

FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")
PROMPTS = (Prompt((1, 2, 3)), Prompt((9,)), Prompt((40, 5, 40, 5, 17)))
NEW_TOKENS = 32


@dataclass(frozen=True)
class Package:
    """A source and what was exported from it: the right graph, and one with each fault."""

    source: Path
    graphs: Mapping[Fault | None, Path]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Package]:
    """One for each family; weights are drawn from a seed."""
    made: dict[Family, Package] = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        source = TinySource(family, seed=1, tied=family == "qwen3").save(folder / "source")
        graphs: dict[Fault | None, Path] = {}
        for fault in (None, *Fault):
            place = folder / (fault or "right").replace(" ", "-")
            place.mkdir()
            graphs[fault] = export(source, place / "model.onnx", fault=fault)
        made[family] = Package(source, graphs)
    return made


def check(
    graph: Path, source: Path, *, candidate: EngineSpec | None = None, engine: str = "hf"
) -> tuple[CheckFinished, list[PromptJudged]]:
    """Decode on the candidate, in this process, and ask oracle and source."""
    package = open_package(graph)
    topology = resolve_package(package, decoder_inventory(package)).topology
    assert topology is not None
    events: list[Event] = []
    plan = CheckPlan(
        package="tiny",
        model=graph,
        model_name=str(graph),
        model_sha256="0" * 64,
        topology=topology,
        topology_outcome="derived",
        candidate=candidate or parse_engine("ort-cpu"),
        oracle=parse_engine("oracle"),
        prompts=PROMPTS,
        max_new_tokens=NEW_TOKENS,
        source=SourcePlan(spec=parse_engine(engine), folder=source, vocabulary=TinySource().vocab),
    )
    end = run_check(plan, events.append)
    assert end.error is None, end.error
    return end, [event for event in events if isinstance(event, PromptJudged)]


def witnessed(judged: PromptJudged) -> SourceJudged:
    """What the source said of a prompt."""
    assert judged.source is not None
    return judged.source


@dataclass(frozen=True)
class Miscompiling:
    """A runtime that computes another graph than it is given: what a defect in its kernels comes to."""

    graph: Path
    name: str = "ort-cpu"  # as what it opens says
    description: str = "a real engine on a wrong graph"
    options: Mapping[str, EngineOption] = field(default_factory=lambda: MappingProxyType({}))

    def availability(self) -> Availability:
        """Always usable."""
        return Availability(usable=True, version="0")

    def open(self, model: Path, options: Mapping[str, OptionValue]) -> Session:
        """Load the other graph."""
        return parse_engine("ort-cpu").open(self.graph)


@pytest.mark.parametrize("engine", ["hf", "hf:precision=float64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_export_on_a_right_runtime_is_identical_three_ways(
    packages: dict[Family, Package], family: Family, engine: str
) -> None:
    """32 tokens of three prompts: all three sides have the same, in either precision of the source."""
    package = packages[family]
    end, judged = check(package.graphs[None], package.source, engine=engine)
    assert (end.verdict, end.exit_code, end.attribution) == ("identical", 0, None)
    assert len(judged) == len(PROMPTS)
    for prompt in judged:
        assert len(prompt.candidate_ids) == NEW_TOKENS
        assert prompt.candidate_ids == prompt.oracle_ids == witnessed(prompt).source_forced_ids


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fault_of_the_exporter_is_laid_at_its_door(
    packages: dict[Family, Package], family: Family, fault: Fault
) -> None:
    """Oracle and runtime agree on the wrong graph: every token is the same, and the source tells."""
    package = packages[family]
    end, judged = check(package.graphs[fault], package.source)
    assert (end.verdict, end.exit_code, end.attribution) == ("divergent", 1, "exporter")
    for prompt in judged:
        assert prompt.candidate_ids == prompt.oracle_ids
        assert prompt.first_divergence is None
    found = [witnessed(prompt).first_divergence for prompt in judged]
    for each in filter(None, found):
        # Far beyond what rounding explains: measured, and not a matter of taste.
        assert each.noise_band is not None
        assert each.gap > each.noise_band > 0


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_fault_of_a_runtime_is_laid_at_the_runtimes(
    packages: dict[Family, Package], family: Family, fault: Fault
) -> None:
    """The graph is right: source and oracle agree along whatever the runtime makes of it."""
    package = packages[family]
    runtime = EngineSpec(Miscompiling(package.graphs[fault]), {})
    end, judged = check(package.graphs[None], package.source, candidate=runtime)
    assert (end.verdict, end.exit_code, end.attribution) == ("divergent", 1, "runtime")
    assert all(witnessed(prompt).verdict == "identical" for prompt in judged)


def _swapped(top: TopLogits) -> TopLogits:
    first, second, *others = top.token_ids
    return replace(top, token_ids=(second, first, *others))


RUNTIME_FAULTS: dict[str, Callable[[int, TopLogits], TopLogits]] = {
    "a wrong first token": lambda step, top: _swapped(top) if step == 0 else top,
    "a wrong token in the middle": lambda step, top: _swapped(top) if step == 9 else top,
    "a wrong last token": lambda step, top: _swapped(top) if step == NEW_TOKENS - 1 else top,
    "wrong tokens throughout": lambda step, top: _swapped(top),
    "NaN among the logits": lambda step, top: replace(top, has_nan=step == 3),
    "the smallest logit taken for the largest": lambda step, top: TopLogits(
        top.token_ids[::-1], tuple(-value for value in top.values[::-1])
    ),
}


@pytest.mark.parametrize("fault", RUNTIME_FAULTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fault_planted_in_a_runtime_is_laid_at_its_door(
    packages: dict[Family, Package], family: Family, fault: str
) -> None:
    """What it does to the logits, at some steps or all of them."""
    package, change = packages[family], RUNTIME_FAULTS[fault]
    runtime = planted(logits=lambda run, tops: [change(run % NEW_TOKENS, top) for top in tops])
    end, judged = check(package.graphs[None], package.source, candidate=runtime)
    assert (end.verdict, end.attribution) == ("divergent", "runtime")
    assert all(witnessed(prompt).verdict == "identical" for prompt in judged)


def test_a_choice_that_rounding_decides_is_nobodys(packages: dict[Family, Package], tmp_path: Path) -> None:
    """Two tokens have equal rows in the head, but for 2^-20: one leads in the source, the other in the graph.

    Weights may differ by so little for many reasons, and no decode in float32 can tell.
    """
    import numpy as np
    from safetensors.numpy import load_file, save_file

    right = packages["llama"]
    _, judged = check(right.graphs[None], right.source)
    seen = {token for prompt in judged for token in prompt.candidate_ids}
    twin, token = min(set(range(TinySource().vocab)) - seen), judged[0].candidate_ids[0]
    weights = dict(load_file(right.source / "model.safetensors"))
    tilted = {}
    for name, tilt in (("source", -1), ("graph", 1)):
        head = weights["lm_head.weight"].copy()
        head[twin] = head[token] * np.float32(1 + tilt * 2.0**-20)
        tilted[name] = tmp_path / name
        tilted[name].mkdir()
        (tilted[name] / "config.json").write_bytes((right.source / "config.json").read_bytes())
        save_file(
            weights | {"lm_head.weight": head}, tilted[name] / "model.safetensors", metadata={"format": "pt"}
        )
    end, judged = check(export(tilted["graph"], tmp_path / "model.onnx"), tilted["source"])
    assert (end.verdict, end.exit_code, end.attribution) == ("inconclusive", 1, None)
    found = witnessed(judged[0]).first_divergence
    assert found is not None
    assert (found.source_token, found.oracle_token) == (token, twin)
    assert found.noise_band is not None
    assert 0 < found.gap < found.noise_band


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[dict[str, Any], str]]:
    """Runs `onnx-parity check --json`; gives its document and what stands on standard error."""

    def call(*arguments: str | Path) -> tuple[dict[str, Any], str]:
        run(["check", "--json", *map(str, arguments)])
        out, err = capsys.readouterr()
        return json.loads(out), err

    return call


def test_the_command_names_the_exporter(
    packages: dict[Family, Package], parity: Parity, command: Any, tmp_path: Path
) -> None:
    """In a process of its own the source is asked; its engine, folder and choices stand in the report."""
    package = packages["qwen2"]
    asked = ["--source", package.source, "--prompt-ids", "1,2,3", "--report-dir", tmp_path]
    document, _ = command(package.graphs[Fault.ROPE_BASE], *asked)
    assert (document["verdict"], document["attribution"]) == ("divergent", "exporter")
    source = document["source"]
    assert (source["engine"], source["path"]) == ("hf", str(package.source))
    assert source["settings"]["attention"] == "eager"
    result = parity.check(
        package.graphs[None], source=package.source, prompts=[1, 2, 3], max_new_tokens=NEW_TOKENS
    )
    assert result.document["source"]["prompts"][0]["verdict"] == "identical"


def test_a_source_that_is_no_model_ends_the_command_with_one_line(
    packages: dict[Family, Package], command: Any, tmp_path: Path
) -> None:
    """Through the process of its own: bad input is bad input, and leaves no report."""
    package = packages["llama"]
    (tmp_path / "empty").mkdir()
    document, err = command(
        package.graphs[None],
        "--source",
        tmp_path / "empty",
        "--prompt-ids",
        "1",
        "--report-dir",
        tmp_path / "r",
    )
    assert document["exit_code"] == 2
    assert "has no config.json" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "r").exists()
