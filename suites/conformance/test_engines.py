"""What holds on real engines, and the smallest decoders on which one of them is known to fail.

The reports of those failures are samples (`reports/samples/conformance-*`). Each is found again here on the
engine as it is installed, so that a version which can do it shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fixtures.decoders import TinyDecoder
from fixtures.engine_limits import LIMITS
from harness.engines.registry import parse_engine
from harness.parity.conform import ConformPlan, run_conform
from harness.parity.relations.judging import RelationOutcome, exit_code_of
from harness.parity.relations.laboratory import Subject
from harness.report.conformance import ConformanceDocument

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "reports/schemas/conformance-1.schema.json").read_text(encoding="utf-8"))
SAMPLES = sorted((ROOT / "reports/samples").glob("*/conformance.json"))
LIMITED = TinyDecoder("a", mask=False, positions=False)
PROMPT = (1, 5, 3, 9)


def usable(engine: str) -> None:
    """Skip by name where an engine that is an extra is missing."""
    state = parse_engine(engine).engine.availability()
    if not state.usable:
        pytest.skip(f"{state.reason} {state.next_action}")


def conform(model: Path, decoder: TinyDecoder, engine: str, *, oracle: bool = True) -> dict[str, Any]:
    """The document of an engine on a decoder, in this process."""
    document = ConformanceDocument()
    run_conform(
        ConformPlan(
            package="tiny",
            model_name="tiny",
            model_sha256="0" * 64,
            topology_outcome="derived",
            engine=parse_engine(engine),
            process="in-process",
            subject=Subject(model=model, topology=decoder.topology, prompt=PROMPT, steps=3),
            oracle=parse_engine("oracle"),
            judges_rounding=oracle,
        ),
        document,
    )
    return document.mapping()


@pytest.mark.parametrize("layers", ["aa", "ar", "ca"])
@pytest.mark.parametrize("engine", ["ort-cpu", "nxrt", "oracle:threads=2"])
def test_real_engines_are_conformant(engine: str, layers: str, tmp_path: Path) -> None:
    """Attention, a recurrence and a convolution: every relation that applies holds."""
    usable(engine)
    decoder = TinyDecoder(layers)
    document = conform(decoder.save(tmp_path / "model.onnx"), decoder, engine)
    jsonschema.validate(document, SCHEMA)
    assert document["verdict"] == "conformant", document["relations"]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("engine", ["ort-cpu", "oracle"])
def test_what_one_engine_lacks_others_do(engine: str, limit: str, tmp_path: Path) -> None:
    """So that a failure there is the engine's and not the graph's."""
    model = LIMITED.save(tmp_path / "model.onnx", LIMITS[limit])
    document = conform(model, LIMITED, engine)
    assert document["verdict"] == "conformant"


@pytest.mark.parametrize("limit", LIMITS)
def test_the_failure_of_a_sample_is_found_again(limit: str, tmp_path: Path) -> None:
    """The same kind, from the same node; a version that can do it makes the sample history."""
    usable("nxrt")
    (path,) = (path for path in SAMPLES if path.parent.name == f"conformance-nxrt-{limit}")
    sample = json.loads(path.read_text(encoding="utf-8"))
    document = conform(LIMITED.save(tmp_path / "model.onnx", LIMITS[limit]), LIMITED, "nxrt", oracle=False)
    assert document["verdict"] == sample["verdict"]
    assert document["engine"]["failure"]["message"] == sample["engine"]["failure"]["message"]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.parent.name)
def test_a_sample_is_consistent_in_itself(path: Path) -> None:
    """Schema, verdict and exit status agree: no hand edited it, and no machine shows."""
    document = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(document, SCHEMA)
    assert not Path(document["model"]["path"]).is_absolute()
    outcomes = [RelationOutcome(relation["outcome"]) for relation in document["relations"]]
    if document["engine"]["failure"] is not None:
        assert outcomes == []
        assert (document["exit_code"], document["verdict"]) == (4, document["engine"]["failure"]["kind"])
    else:
        worst = min(outcomes, key=list(RelationOutcome).index)
        assert (document["exit_code"], document["verdict"]) == (exit_code_of(worst), worst)
    for relation in document["relations"]:
        largest = relation["largest"]
        if relation["outcome"] == "near-tie":
            assert largest["size"] <= largest["band"]
            assert relation["tokens_part_at"] is not None
    assert "/root/" not in path.read_text(encoding="utf-8")
