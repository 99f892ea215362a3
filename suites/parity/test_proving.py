"""No verdict stands on an oracle that computes in less than it says, or in numbers that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from fixtures.decoders import TinyDecoder
from fixtures.planted import planted
from fixtures.planted_kernels import LOSSES, plant_kernel
from harness.decode.diagnose import first_non_finite
from harness.engines.registry import EngineSpec, parse_engine
from harness.errors import InvalidRunError
from harness.events import CheckFinished, Event, PromptJudged, SessionOpened
from harness.parity.check import CheckPlan, Prompt, run_check
from harness.parity.proving import require_proof
from harness.report.document import ParityDocument

DECODER = TinyDecoder(layers="ar", seed=3)
SCHEMA = json.loads(
    (Path(__file__).parents[2] / "reports/schemas/parity-1.schema.json").read_text(encoding="utf-8")
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A hybrid of one attention and one recurrent layer."""
    return DECODER.save(tmp_path / "model.onnx")


def check(model: Path, *, oracle: EngineSpec | None = None) -> tuple[CheckFinished, list[Event], Any]:
    """Run a check; gives its end, its events, and the report."""
    events: list[Event] = []
    plan = CheckPlan(
        package="tiny",
        model=model,
        model_name=str(model),
        model_sha256="0" * 64,
        topology=DECODER.topology,
        topology_outcome="derived",
        candidate=parse_engine("ort-cpu"),
        oracle=oracle or parse_engine("oracle"),
        prompts=(Prompt((1, 2, 3)),),
        max_new_tokens=4,
    )
    end = run_check(plan, events.append)
    document = ParityDocument()
    for event in events:
        document(event)
    report = json.loads(json.dumps(document.mapping(), allow_nan=False))
    jsonschema.validate(report, SCHEMA)
    return end, events, report


def test_the_report_shows_what_was_proven(model: Path) -> None:
    """Each kind of product of the model with its error and its bound, in the oracle's precision."""
    end, events, report = check(model)
    assert end.verdict == "identical"
    proof = report["oracle"]["proof"]
    assert (proof["passed"], proof["precision"], proof["unit_roundoff"]) == (True, "float32", 2.0**-24)
    assert {entry["operator"] for entry in proof["entries"]} == {"MatMul"}
    assert all(0 <= entry["max_error"] <= entry["bound"] for entry in proof["entries"])
    opened = {event.role: event.proof for event in events if isinstance(event, SessionOpened)}
    assert opened["candidate"] is None
    assert opened["oracle"] is not None


def test_an_oracle_with_int8_activations_makes_the_run_invalid(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 6 before a single token is judged; the message names node, error and bound, the report has all."""
    plant_kernel(monkeypatch, "MatMul", LOSSES["int8 activations"])
    end, events, report = check(model)
    assert (end.verdict, end.exit_code) == ("invalid-run", 6)
    assert not any(isinstance(event, PromptJudged) for event in events)
    proof = report["oracle"]["proof"]
    assert proof["passed"] is False
    failed = next(entry for entry in proof["entries"] if not entry["passed"])
    assert end.error is not None
    message = end.error["message"]
    assert f"{failed['operator']} {failed['node']}" in message
    assert f"{failed['max_error']:.2e}" in message
    assert f"{failed['bound']:.2e}" in message


def test_the_second_precision_proves_itself_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is re-decided in float64 is decided by an oracle that shows float64; float32 is not enough."""

    def lose(compute: Any, inputs: Any) -> Any:
        y = compute(*inputs)
        return y.astype(np.float32).astype(y.dtype)

    plant_kernel(monkeypatch, "MatMul", lose)
    end, _, report = check(model)
    assert report["oracle"]["proof"]["passed"] is True
    assert (end.verdict, end.exit_code) == ("invalid-run", 6)
    assert "float64 allows" in (end.error or {})["message"]


def test_an_oracle_without_a_proof_is_taken_at_its_word(model: Path) -> None:
    """Other engines have none: the report says null."""
    end, _, report = check(model, oracle=planted(inner="ort-cpu"))
    assert end.verdict == "identical"
    assert report["oracle"]["proof"] is None


def test_the_node_that_overflows_is_named(model: Path) -> None:
    """Logits that are not finite: the message says which node made them so, not which passed them on."""
    graph = onnx.load(model)
    (head,) = (node for node in graph.graph.node if "logits" in node.output)
    head.output[0] = "small"
    graph.graph.initializer.append(numpy_helper.from_array(np.float32(1e37), "huge"))
    for given, output in (("small", "large"), ("large", "too_large"), ("too_large", "logits")):
        graph.graph.node.append(helper.make_node("Mul", [given, "huge"], [output], name=f"to_{output}"))
    onnx.save(graph, model)
    end, _, _ = check(model)
    assert (end.verdict, end.exit_code) == ("invalid-run", 6)
    message = (end.error or {})["message"]
    assert "not finite at generated position 0" in message
    assert "Mul to_too_large" in message


def spoil(model: Path, name: str, place: int, value: float) -> None:
    """Write one value into a weight of the file."""
    graph = onnx.load(model)
    (weight,) = (tensor for tensor in graph.graph.initializer if tensor.name == name)
    array = numpy_helper.to_array(weight).copy()
    array.flat[place] = value
    weight.CopyFrom(numpy_helper.from_array(array, name))
    onnx.save(graph, model)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_a_weight_that_is_not_finite_makes_the_run_invalid(model: Path, value: float) -> None:
    """Exit 6 before a token is judged; one line names node and weight, and the report keeps to its schema."""
    (head,) = (node for node in onnx.load(model).graph.node if "logits" in node.output)
    spoil(model, head.input[1], 0, value)
    end, events, report = check(model)
    assert (end.verdict, end.exit_code) == ("invalid-run", 6)
    assert not any(isinstance(event, PromptJudged) for event in events)
    message = (end.error or {})["message"]
    assert "\n" not in message
    assert f"{head.op_type} {head.name or head.op_type}" in message
    assert f"its input 1, {head.input[1]}, holds a value that is NaN or infinite" in message
    (failed,) = (entry for entry in report["oracle"]["proof"]["entries"] if not entry["passed"])
    assert failed["max_error"] is None
    assert failed["reason"] in message


def test_a_weight_of_no_sum_that_is_not_finite_names_the_node_that_reads_it(model: Path) -> None:
    """An embedding of a prompt's token: no product reads it first."""
    (gather,) = (node for node in onnx.load(model).graph.node if "embedding" in node.input)
    spoil(model, "embedding", DECODER.width, np.nan)  # token 1
    end, _, report = check(model)
    assert (end.verdict, end.exit_code) == ("invalid-run", 6)
    assert report["oracle"]["proof"]["passed"] is True
    assert f"Gather Gather({gather.output[0]})" in (end.error or {})["message"]


@pytest.mark.parametrize("error", [None, 0.5])
@pytest.mark.parametrize("bound", [None, 0.25])
def test_a_failed_proof_has_a_message_whatever_of_it_is_null(
    error: float | None, bound: float | None
) -> None:
    """JSON has no NaN: null for error or bound is part of the schema, and of an engine's own proof too."""
    entry = {"operator": "MatMul", "node": "n", "max_error": error, "bound": bound, "passed": False}
    with pytest.raises(InvalidRunError) as caught:
        require_proof({"precision": "float32", "passed": False, "entries": [entry]})
    message = caught.value.message
    assert "MatMul n " in message
    assert ("NaN or infinity" if error is None else "5.00e-01") in message
    assert ("no finite bound" if bound is None else "2.50e-01") in message


def test_engines_that_cannot_look_inside_name_nothing(model: Path) -> None:
    """The question is put only to sessions that answer it, and finite logits have no culprit."""
    for engine in ("ort-cpu", "oracle"):
        session = parse_engine(engine).open(model)
        assert first_non_finite(session, DECODER.topology, (1, 2)) is None
        session.close()
