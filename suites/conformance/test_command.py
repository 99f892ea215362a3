"""`onnx-parity conform` from the command line: documents, exit codes, what a person reads, and bad usage."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from fixtures.decoders import TinyDecoder, save_graph
from fixtures.planted import planted
from fixtures.seq2seq import FORMS, TinySeq2Seq
from fixtures.unrelated import unrelated
from harness.cli.app import run
from harness.engines import registry
from harness.engines.base import Availability
from harness.engines.ort import OrtCpuEngine
from harness.engines.registry import parse_engine
from harness.parity.conform import CONFORMANT, ConformPlan, run_conform
from harness.parity.relations.catalogue import RELATIONS
from harness.parity.relations.judging import Judged, RelationOutcome
from harness.parity.relations.laboratory import Subject
from harness.relation_events import RelationEvent
from harness.report.conformance import ConformanceDocument

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="isolation needs POSIX signals")

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "reports/schemas/conformance-1.schema.json").read_text(encoding="utf-8"))
PROMPT = ("--prompt-ids", "1,5,3,9,2,7", "--max-new-tokens", "4")
QUICK = ("--relation", "second-generation", "--relation", "batch")
"""One relation that is bitwise, and one that needs a band."""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny decoder with a recurrent layer; broken engines are installed beside real ones."""
    installed = {
        "misbehaving": "fixtures.misbehaving:ENGINE",
        "oracle": "harness.engines.oracle:ENGINE",
        "ort-cpu": "harness.engines.ort:CPU_ENGINE",
        "unrelated": "fixtures.unrelated:ENGINE",
    }
    entries = [EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in installed.items()]
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: entries)
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return TinyDecoder(layers="ar", seed=3).save(tmp_path / "model.onnx")


Conform = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def conform(package: Path, capsys: pytest.CaptureFixture[str]) -> Conform:
    """Runs the command: exit status, document, and what stood on standard error."""

    def conform(*options: str, folder: bool = False) -> tuple[int, dict[str, Any], str]:
        asked = package if package.exists() and not folder else package.parent
        status = run(["conform", str(asked), *options, "--json"])
        out, err = capsys.readouterr()
        document: dict[str, Any] = json.loads(out)
        jsonschema.validate(document, SCHEMA)
        assert document["exit_code"] == status
        assert "Traceback" not in err
        return status, document, err

    return conform


def tiny_plan(package: Path, **changes: Any) -> ConformPlan:
    """A run without an oracle, in this process."""
    given: dict[str, Any] = {"engine": planted(), "process": "in-process", "judges_rounding": False}
    return ConformPlan(
        package="tiny",
        model_name="tiny",
        model_sha256="0" * 64,
        topology_outcome="derived",
        oracle=parse_engine("oracle"),
        subject=Subject(
            model=package, topology=TinyDecoder(layers="ar", seed=3).topology, prompt=(1, 5, 3, 9), steps=3
        ),
        **given | changes,
    )


def outcomes(document: dict[str, Any]) -> dict[str, str]:
    """The outcome of each relation."""
    return {relation["name"]: relation["outcome"] for relation in document["relations"]}


def test_a_good_engine_is_conformant(conform: Conform, tmp_path: Path) -> None:
    """Every relation is tried, in the order of the catalogue, each in a process of its own."""
    status, document, err = conform("--engine", "ort-cpu:threads=1", *PROMPT, "--report-dir", "out")
    assert (status, document["verdict"]) == (0, CONFORMANT)
    assert list(outcomes(document)) == [relation.name for relation in RELATIONS]
    assert outcomes(document)["graph-capture"] == "not-applicable"
    assert document["engine"]["process"] == "isolated"
    assert document["engine"]["settings"]["threads"] == 1
    assert len(document["prompt"]["token_ids"]) == 4
    assert document["band"]["spreads"]["logits"] > 0
    assert json.loads((tmp_path / "out/conformance.json").read_text(encoding="utf-8")) == document
    assert "run-to-run: bitwise" in err


def test_what_is_warned_of_stands_in_the_report(conform: Conform, package: Path) -> None:
    """As it stands on standard error: a length that is declared, and that the decode goes beyond."""
    assert conform("--engine", "ort-cpu:threads=1", *PROMPT, *QUICK)[1]["warnings"] == []
    (package.parent / "config.json").write_text('{"max_position_embeddings": 3}', encoding="utf-8")
    status, document, err = conform("--engine", "ort-cpu:threads=1", *PROMPT, *QUICK, folder=True)
    said = [line.partition("warning: ")[2] for line in err.splitlines() if "warning: " in line]
    assert (status, document["warnings"]) == (0, said)
    assert "max_position_embeddings is 3" in said[0]


@pytest.mark.parametrize("report", ["--json", "text"])
def test_a_run_that_compared_nothing_is_no_pass(
    conform: Conform, package: Path, capsys: pytest.CaptureFixture[str], report: str
) -> None:
    """The one relation that is asked for does not apply: a verdict of its own, and exit 6."""
    asked = ("--engine", "ort-cpu:threads=1", *PROMPT, "--relation", "graph-capture")
    if report == "text":
        assert run(["conform", str(package), *asked]) == 6
        out, err = capsys.readouterr()
        assert out.rstrip().endswith("verdict: not-applicable")
    else:
        status, document, err = conform(*asked)
        assert (status, document["verdict"]) == (6, "not-applicable")
        assert outcomes(document) == {"graph-capture": "not-applicable"}
        assert "Nothing was compared" in document["error"]["message"]
    assert "Nothing was compared: none of the relations that were tried (1) applies here." in err


@pytest.mark.parametrize("first", RelationOutcome)
@pytest.mark.parametrize("second", RelationOutcome)
def test_a_pass_needs_a_relation_that_was_judged(
    package: Path, monkeypatch: pytest.MonkeyPatch, first: RelationOutcome, second: RelationOutcome
) -> None:
    """Of any two outcomes the worst is the verdict; conformant takes one that holds, and none that fails."""
    given = iter([first, second])
    monkeypatch.setattr("harness.parity.conform.judge", lambda *_: Judged(next(given)))
    document = ConformanceDocument()
    end = run_conform(tiny_plan(package, relations=RELATIONS[:2]), document)
    jsonschema.validate(document.mapping(), SCHEMA)
    holds = {RelationOutcome.BITWISE, RelationOutcome.WITHIN_BAND}
    passes = bool({first, second} & holds) and {first, second} <= holds | {RelationOutcome.NOT_APPLICABLE}
    assert (end.exit_code == 0, end.verdict == CONFORMANT) == (passes, passes)
    if not passes:
        assert end.verdict == min((first, second), key=list(RelationOutcome).index)


def test_two_runs_say_the_same(conform: Conform) -> None:
    """But for the time that they took: whatever is made up comes from a seed."""
    first, second = (conform("--engine", "ort-cpu:threads=1", *PROMPT, *QUICK)[1] for _ in range(2))
    for document in (first, second):
        for relation in document["relations"]:
            relation["seconds"] = 0
    assert first == second


@pytest.mark.parametrize(
    ("act", "relation"), [("keeps-state", "second-generation"), ("leaks-rows", "batch"), ("rewind", "rewind")]
)
def test_a_broken_relation_is_a_finding(conform: Conform, act: str, relation: str) -> None:
    """With what differed first and by how much, from an engine in a process of its own."""
    status, document, _ = conform(
        "--engine", f"unrelated:breaks={act}", *PROMPT, "--relation", relation, "--relation", "copied-feeds"
    )
    assert (status, document["verdict"]) == (1, "broken")
    assert outcomes(document) == {"copied-feeds": "bitwise", relation: "broken"}
    (found,) = (each for each in document["relations"] if each["name"] == relation)
    first = found["first_difference"]
    assert first["differing"] >= 1
    assert first["size"] > 0
    assert found["largest"]["size"] >= first["size"]
    assert found["compared"]["states"] > 0


def test_without_rounding_differences_are_reported_and_not_judged(conform: Conform) -> None:
    """There is no oracle then, and no band; what is bitwise is judged all the same."""
    status, document, _ = conform(
        "--engine", "unrelated:breaks=batch,by=bit", *PROMPT, *QUICK, "--rounding", "none"
    )
    assert (status, document["verdict"], document["band"]) == (1, "not-judged", None)
    assert outcomes(document) == {"second-generation": "bitwise", "batch": "not-judged"}
    batch = document["relations"][1]
    assert batch["first_difference"]["size"] > 0
    assert "--rounding model" in batch["reason"]


def test_an_engine_that_fails_at_once_fails_the_run(conform: Conform) -> None:
    """There is nothing to compare with; the report says how it died."""
    status, document, _ = conform("--engine", "misbehaving:does=segfault,at=1", *PROMPT)
    assert (status, document["verdict"], document["relations"]) == (4, "crashed", [])
    assert document["engine"]["failure"]["signal"] == "SIGSEGV"
    assert document["engine"]["failure"]["step"] == 1


def test_an_engine_that_fails_in_one_relation_fails_that_one(conform: Conform) -> None:
    """Its fifth run is the first of a second decode; a run of four tokens never gets there."""
    status, document, _ = conform("--engine", "misbehaving:does=segfault,at=4", *PROMPT, *QUICK)
    assert (status, document["verdict"]) == (4, "crashed")
    found = {relation["name"]: relation for relation in document["relations"]}
    assert outcomes(document) == {"second-generation": "crashed", "batch": "bitwise"}
    assert found["second-generation"]["failure"]["signal"] == "SIGSEGV"
    assert document["engine"]["failure"] is None


def test_numbers_that_are_none_prove_nothing(conform: Conform, package: Path) -> None:
    """NaN equals NaN to the bit: who gives nothing else has every relation, so the run is invalid."""
    model = onnx.load(package)
    (head,) = (weight for weight in model.graph.initializer if weight.name == "head")
    nan = numpy_helper.to_array(head).copy()
    nan[:, 3] = np.nan  # one logit of eleven
    head.CopyFrom(numpy_helper.from_array(nan, "head"))
    onnx.save(model, package)
    status, document, err = conform("--engine", "ort-cpu:threads=1", *PROMPT, *QUICK)
    assert (status, document["verdict"], document["relations"]) == (6, "invalid-run", [])
    assert "NaN" in document["error"]["message"]
    assert "step 0" in err


def test_an_interruption_leaves_what_was_judged(package: Path) -> None:
    """Ctrl-C while the second relation is tried: the first stands in a document that is valid."""
    runs = 0

    def interrupt(_: int) -> None:
        nonlocal runs
        runs += 1
        if runs > 3 + 6 + 1:  # the reference, the first relation, one run of the second
            raise KeyboardInterrupt

    document = ConformanceDocument()
    end = run_conform(tiny_plan(package, engine=planted(run=interrupt)), document)
    mapping = document.mapping()
    jsonschema.validate(mapping, SCHEMA)
    assert (end.exit_code, end.interrupted, mapping["verdict"]) == (130, True, None)
    assert outcomes(mapping) == {"run-to-run": "bitwise"}


def test_every_state_of_a_report_is_valid(package: Path) -> None:
    """A process that is killed leaves the last one: it reads as interrupted until the end has come."""
    plan = tiny_plan(package, relations=RELATIONS[:3])
    document = ConformanceDocument()
    codes = []

    def look(event: RelationEvent) -> None:
        document(event)
        mapping = document.mapping()
        jsonschema.validate(mapping, SCHEMA)
        codes.append(mapping["exit_code"])

    run_conform(plan, look)
    assert codes == [130] * (len(codes) - 1) + [0]


def test_the_band_stands_beside_the_first_relation_that_is_judged_by_it(package: Path) -> None:
    """An interruption behind it leaves a report that says what its numbers are held against."""
    plan = tiny_plan(
        package,
        engine=unrelated(breaks="chunked-prefill", by="bit"),
        judges_rounding=True,
        relations=[relation for relation in RELATIONS if relation.name in ("rewind", "chunked-prefill")],
    )
    document = ConformanceDocument()
    bands = []

    def look(event: RelationEvent) -> None:
        document(event)
        bands.append((len(document.mapping()["relations"]), document.mapping()["band"] is not None))

    run_conform(plan, look)
    assert bands[-1] == (2, True)
    assert {known for count, known in bands if count == 1} == {False, True}
    assert (2, False) not in bands


def test_a_person_reads_what_differed_first(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each relation, and for a broken one the step, the tensor and both numbers."""
    status = run(
        ["conform", str(package), "--engine", "unrelated:breaks=rewind", *PROMPT, "--relation", "rewind"]
    )
    out, _ = capsys.readouterr()
    assert status == 1
    text = " ".join(out.split())
    assert "rewind broken 1 0 logits" in text
    assert "first: step 1, logits[0]: " in text
    assert "11 of 11 elements differ, by 1 at most" in text
    assert text.endswith("verdict: broken")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--relation", "batches"), "no relation named 'batches'"),
        (("--engine", "ort-cpuu"), "no engine named 'ort-cpuu'"),
        (("--prompt", "a", "--prompt-ids", "1"), "give two"),
        (("--prompt-ids", "99"), "99"),
        (("--prompt-ids", "1", "--max-new-tokens", "0"), "max-new-tokens"),
    ],
)
def test_bad_usage_is_one_line_and_leaves_no_report(
    conform: Conform, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """Exit 2, and a document with the error."""
    status, document, err = conform(*options)
    assert status == 2
    assert message in document["error"]["message"]
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "reports").exists()


def test_an_engine_that_is_not_there_is_said_so(conform: Conform, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 5: never another engine instead."""
    gone = Availability(usable=False, reason="it was taken away.", next_action="Bring it back.")
    monkeypatch.setattr(OrtCpuEngine, "availability", lambda engine: gone)
    status, document, err = conform("--engine", "ort-cpu", *PROMPT)
    assert (status, document["verdict"]) == (5, None)
    assert "it was taken away" in document["error"]["message"]
    assert "Bring it back." in err


def test_strict_placement_makes_a_run_on_the_cpu_invalid(conform: Conform) -> None:
    """Exit 6, with the nodes."""
    status, document, _ = conform("--engine", "ort-cpu:threads=1", *PROMPT, *QUICK, "--strict-placement")
    assert (status, document["verdict"], document["relations"]) == (6, "invalid-run", [])
    assert "CPUExecutionProvider" in document["error"]["message"]


@pytest.mark.parametrize("form", FORMS)
def test_a_package_of_several_graphs_has_the_relations_of_one_sequence(
    conform: Conform, form: str, package: Path
) -> None:
    """Its graphs pass tensors on that are of one sequence; where they keep any, a session has one decode."""
    package.unlink()
    TinySeq2Seq(seed=4).save(package.parent, form, config={"decoder_start_token_id": 3})
    status, document, _ = conform(
        "--engine", "ort-cpu:threads=1", "--in-process", "--prompt-ids", "3,1,2,5", "--max-new-tokens", "4"
    )
    assert (status, document["verdict"]) == (0, CONFORMANT)
    found = outcomes(document)
    assert found["second-generation"] == found["rewind"] == found["run-to-run"] == "bitwise"
    assert found["batch"] == "not-applicable"


def test_a_refused_topology_is_said_so(conform: Conform, package: Path) -> None:
    """Exit 3, with the refusal."""
    save_graph(
        package,
        [onnx.helper.make_node("Identity", ["x"], ["y"])],
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])],
    )
    status, document, _ = conform()
    assert status == 3
    assert document["refusal"]["code"].startswith("E_")
