"""Three witnesses, and one of them wrong: the blame must be laid where the fault was planted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from fixtures.decoders import TinyDecoder
from harness.engines.registry import EngineSpec, parse_engine
from harness.parity.check import CheckPlan, Prompt, run_check
from harness.report.document import ParityDocument
from suites.exporters.attribution import attribute
from suites.exporters.checking import check_package, decode_facts, source_facts

Weights = dict[str, np.ndarray]
PROMPTS = ((1, 5, 3), (7, 2, 9, 4))
TOKENS = 8
DECODER = TinyDecoder(vocab=31, width=8, seed=3)


def transposed_projection(weights: Weights) -> Weights:
    """The output projection of the second layer, the wrong way round."""
    return weights | {"1.o": weights["1.o"].T}


def other_positions(weights: Weights) -> Weights:
    """Every position one too far."""
    return weights | {"position_table": np.roll(weights["position_table"], -1, axis=0)}


def swapped_layers(weights: Weights) -> Weights:
    """Both layers, in the other order."""
    return weights | {f"{i}.{part}": weights[f"{1 - i}.{part}"] for i in (0, 1) for part in "qkvo"}


def missing_scale(weights: Weights) -> Weights:
    """What the second layer adds, four times too much."""
    return weights | {"1.o": 4 * weights["1.o"]}


FAULTS = [transposed_projection, other_positions, swapped_layers, missing_scale]


def faulty(path: Path, to: Path, fault: Callable[[Weights], Weights]) -> Path:
    """The graph with other weights."""
    model = onnx.load(path)
    weights = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    changed = fault(weights)
    assert any(not np.array_equal(changed[name], weights[name]) for name in weights), (
        "a fault that changes nothing"
    )
    for each in model.graph.initializer:
        each.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(changed[each.name]), each.name))
    onnx.save(model, to)
    return to


def witness(decoder: TinyDecoder) -> dict[str, Any]:
    """What the source model says: the reference that knows no cache, in float64."""
    prompts = []
    for prompt in PROMPTS:
        tokens: list[int] = []
        top = []
        for _ in range(TOKENS):
            row = decoder.logits([*prompt, *tokens])[-1]
            order = np.argsort(-row, kind="stable")[:5]
            tokens.append(int(order[0]))
            top.append([[int(i), float(row[i])] for i in order])
        prompts.append({"prompt_ids": list(prompt), "token_ids": tokens, "top": top})
    return {"kind": "decoder", "engine": "numpy", "prompts": prompts, "cache": {"kv": [0, 1], "states": []}}


def build_folder(folder: Path, fault: Callable[[Weights], Weights] | None = None) -> Path:
    """What an exporter would have built, with a faulty graph or a right one."""
    package, source = folder / "packages" / "tiny-plain", folder / "sources" / "tiny"
    for each in (package, source, folder / "records"):
        each.mkdir(parents=True)
    graph = DECODER.save(package / "model.onnx")
    if fault is not None:
        faulty(graph, graph, fault)
    (source / "witness.json").write_text(json.dumps(witness(DECODER)), encoding="utf-8")
    recipe = {
        "exporter": "dynamo",
        "source": {"name": "tiny", "family": "dense"},
        "variant": "plain",
        "precision": "fp32",
        "options": {},
    }
    record = {"recipe": recipe, "distributions": {}, "error": None}
    (folder / "records" / "tiny-plain.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


def test_three_witnesses_that_agree_blame_nobody(tmp_path: Path) -> None:
    """Derived, as the source model's cache has it, identical to the oracle, and to the source."""
    row = check_package(build_folder(tmp_path), "tiny-plain")

    assert (row["attribution"], row["evidence"]) == (None, "")
    assert row["topology"]["kv_inputs"] == 4
    assert row["layers"]["agrees"] is True
    assert row["decode"]["verdict"] == "identical"
    assert (row["source"]["agrees"], row["source"]["tokens"]) == (True, len(PROMPTS) * TOKENS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_graph_that_is_not_its_source_is_the_exporters(
    tmp_path: Path, fault: Callable[[Weights], Weights]
) -> None:
    """Oracle and runtime agree on what the exporter wrote, and the source model says something else."""
    row = check_package(build_folder(tmp_path, fault), "tiny-plain")

    assert row["decode"]["verdict"] == "identical"
    assert row["source"]["agrees"] is False
    assert row["attribution"] == "exporter"
    assert "source model" in row["evidence"]


class _Faulty:
    """ONNX Runtime, which computes with other weights than those of the file."""

    name, description, options = "ort-cpu", "a runtime with a fault", parse_engine("ort-cpu").engine.options

    def __init__(self, fault: Callable[[Weights], Weights], folder: Path) -> None:
        self._fault, self._folder = fault, folder

    def availability(self) -> Any:
        return parse_engine("ort-cpu").engine.availability()

    def open(self, model: Path, options: Any) -> Any:
        return parse_engine("ort-cpu").engine.open(
            faulty(model, self._folder / "f.onnx", self._fault), options
        )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_runtime_that_computes_something_else_is_to_blame(
    tmp_path: Path, fault: Callable[[Weights], Weights]
) -> None:
    """Source and oracle agree on the graph, and the runtime does not."""
    row = check_package(build_folder(tmp_path), "tiny-plain")
    document = ParityDocument()
    graph = tmp_path / "packages" / "tiny-plain" / "model.onnx"
    plan = CheckPlan(
        package="tiny",
        model=graph,
        model_name="tiny",
        model_sha256="",
        topology=DECODER.topology,
        topology_outcome="derived",
        candidate=EngineSpec(_Faulty(fault, tmp_path), {}),
        oracle=parse_engine("oracle"),
        prompts=[Prompt(token_ids=prompt) for prompt in PROMPTS],
        max_new_tokens=TOKENS,
    )
    run_check(plan, document)
    report = document.mapping()
    row |= {
        "decode": decode_facts(report),
        "source": source_facts(report, witness(DECODER), precision="fp32"),
    }

    assert row["decode"]["verdict"] == "divergent"
    blame, evidence = attribute(row)
    assert blame == "runtime"
    assert evidence.startswith("divergent at")


def row_of(candidate: list[int], oracle: list[int], source: list[int], lead: float) -> dict[str, Any]:
    """The row of one prompt, by what each side chooses along the candidate's tokens; the source by `lead`."""
    parted = next((i for i, (c, o) in enumerate(zip(candidate, oracle, strict=True)) if c != o), None)
    divergence = (
        parted
        if parted is None
        else {
            "index": parted,
            "candidate_token": candidate[parted],
            "oracle_token": oracle[parted],
            "oracle_margin": 1.0,
            "oracle_top": [[oracle[parted], 1.0], [candidate[parted], 0.0]],
            "candidate_top": [[candidate[parted], 1.0]],
            "noise_band": 0.1,
            "cause": None,
            "evidence": "",
        }
    )
    prompt = {
        "prompt_ids": [7],
        "candidate_ids": candidate,
        "oracle_ids": oracle if parted is None else oracle[: parted + 1],
        "oracle_forced_ids": oracle,
        "verdict": "identical" if parted is None else "divergent",
        "min_margin": 1.0,
        "first_divergence": divergence,
    }
    report = {"verdict": prompt["verdict"], "exit_code": 0, "prompts": [prompt]}
    top = [[[token, 1.0], *([other, 1.0 - lead] for other in range(4) if other != token)] for token in source]
    told = {"engine": "any", "prompts": [{"prompt_ids": [7], "token_ids": source, "top": top}]}
    return {
        "exporter": "dynamo",
        "package": "x",
        "precision": "fp32",
        "build_error": None,
        "topology": {"outcome": "derived"},
        "configuration": None,
        "layers": None,
        "peer": None,
        "decode": decode_facts(report),
        "source": source_facts(report, told, precision="fp32"),
    }


def by_position(candidate: list[int], oracle: list[int], source: list[int]) -> str | None:
    """The rule, written out: the source's tokens count until they leave the candidate's."""
    for c, o, s in zip(candidate, oracle, source, strict=True):
        if c == o == s:
            continue
        return "runtime" if o == s else "unknown" if c == s else "exporter"
    return None


SIDES = st.integers(1, 5).flatmap(
    lambda length: st.tuples(*[st.lists(st.integers(0, 3), min_size=length, max_size=length)] * 3)
)


@given(SIDES)
def test_three_witnesses_are_judged_by_the_rules_of_a_check(
    sides: tuple[list[int], list[int], list[int]],
) -> None:
    """Over every way in which they can agree and differ: the first position at which not all do decides."""
    assert attribute(row_of(*sides, lead=0.5))[0] == by_position(*sides)


@given(SIDES)
def test_a_source_within_rounding_blames_nobody_and_stays_open(
    sides: tuple[list[int], list[int], list[int]],
) -> None:
    """Candidate and oracle agree, and the source differs by less than float32 may explain."""
    agreed, _, source = sides

    blame, evidence = attribute(row_of(agreed, agreed, source, lead=1e-6))

    assert blame == (None if source == agreed else "unknown")
    assert ("within 1e-06 of each other" in evidence) == (source != agreed)


def test_the_committed_attributions_follow_from_their_rows() -> None:
    """So `table` writes the same again, and every fact that an attribution stands on is in its row."""
    matrix = json.loads((Path(__file__).parents[2] / "docs" / "exporters.json").read_text(encoding="utf-8"))
    assert matrix["rows"]
    assert [attribute(each) for each in matrix["rows"]] == [
        (each["attribution"], each["evidence"]) for each in matrix["rows"]
    ]


def test_an_exporter_that_raises_and_a_source_that_cannot_be_made() -> None:
    """The first is the exporter's; the second is a recipe of ours."""
    row = {"exporter": "dynamo", "package": "x", "precision": "fp32"}
    error = {"type": "ValueError", "message": "no such layer", "where": "exporter.py:3"}

    assert attribute({**row, "build_error": {**error, "stage": "export"}})[0] == "exporter"
    assert attribute({**row, "build_error": {**error, "stage": "source"}})[0] == "us"
