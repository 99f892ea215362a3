"""Each relation finds the engine that breaks it, and no other relation does.

The engines are `fixtures.unrelated`: real sessions with one fault, which acts under the condition that one
relation makes. A fault that another relation finds as well shows that the two overlap, and one that none
finds that a relation does not look.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.decoders import TinyDecoder
from fixtures.unrelated import FAULTS, unrelated
from harness.engines.registry import EngineSpec, parse_engine
from harness.parity.relations.band import Oracle
from harness.parity.relations.catalogue import RELATIONS
from harness.parity.relations.judging import Judged, RelationOutcome, judge
from harness.parity.relations.laboratory import Laboratory, Subject

PROMPT = (1, 5, 3, 9, 2, 7, 4)
STEPS = 5
LONG = len(PROMPT) + STEPS - 1
"""Tokens of the whole decode: what `recompute` feeds in one call, and no other relation compares."""

GREEN = {RelationOutcome.BITWISE, RelationOutcome.WITHIN_BAND}
BITWISE = {
    "run-to-run",
    "second-generation",
    "interleaved-prompts",
    "reused-buffers",
    "rewind",
    "copied-feeds",
    "canaries",
    "graph-capture",
}
"""Relations between computations of the same shape: there is no reason for a bit to differ."""


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Two layers of attention with a mask and positions, so that every relation applies."""
    decoder = TinyDecoder(layers="aa")
    model = decoder.save(tmp_path_factory.mktemp("tiny") / "model.onnx")
    return Subject(model=model, topology=decoder.topology, prompt=PROMPT, steps=STEPS)


@pytest.fixture(scope="module")
def oracle(subject: Subject) -> Oracle:
    """One for all engines, as each decodes the same tokens."""
    tokens = Laboratory(parse_engine("ort-cpu:threads=1"), subject).tokens
    return Oracle(parse_engine("oracle"), subject, lambda: tokens)


def outcomes(spec: EngineSpec, subject: Subject, oracle: Oracle) -> dict[str, Judged]:
    """What becomes of every relation on an engine."""
    lab = Laboratory(spec, subject)
    return {relation.name: judge(relation, lab, oracle) for relation in RELATIONS}


def test_there_is_a_fault_for_every_relation() -> None:
    """The table of faults and the catalogue name the same relations."""
    assert set(FAULTS) - {"none"} == {relation.name for relation in RELATIONS}


def test_an_engine_without_a_fault_has_every_relation(subject: Subject, oracle: Oracle) -> None:
    """All of them apply to it, so that none can pass by not being tried."""
    found = outcomes(unrelated(long=LONG), subject, oracle)
    assert {name: judged.outcome for name, judged in found.items() if judged.outcome not in GREEN} == {}
    assert all(judged.comparison is not None and judged.comparison.tokens for judged in found.values())
    for name in BITWISE:
        assert found[name].outcome is RelationOutcome.BITWISE


@pytest.mark.parametrize("where", ["logits", "states"])
@pytest.mark.parametrize("name", [name for name in FAULTS if name != "none"])
def test_a_fault_breaks_its_relation_and_it_alone(
    name: str, where: str, subject: Subject, oracle: Oracle
) -> None:
    """Numbers that are off by one are found in the logits (which keep their order) and in the states."""
    spec = unrelated(breaks=name, where=where, long=LONG)
    found = outcomes(spec, subject, oracle)
    assert {each: judged.outcome for each, judged in found.items() if judged.outcome not in GREEN} == {
        name: RelationOutcome.BROKEN
    }
    comparison = found[name].comparison
    assert comparison is not None
    assert comparison.tokens_part_at is None or where == "states"
    sizes = [size for port, size in comparison.largest.items() if (port == "logits") == (where == "logits")]
    assert max(sizes) >= 0.999  # what the fault adds, less what rounding may take


@pytest.mark.parametrize("name", sorted(BITWISE))
def test_one_step_of_the_type_breaks_a_bitwise_relation(name: str, subject: Subject, oracle: Oracle) -> None:
    """There is no tolerance where the shapes are the same."""
    lab = Laboratory(unrelated(breaks=name, by="bit"), subject)
    (relation,) = (relation for relation in RELATIONS if relation.name == name)
    judged = judge(relation, lab, oracle)
    assert judged.outcome is RelationOutcome.BROKEN
    assert judged.bitwise


@pytest.mark.parametrize("name", sorted(set(FAULTS) - BITWISE - {"none"}))
def test_one_step_of_the_type_is_within_the_band_of_any_other(
    name: str, subject: Subject, oracle: Oracle
) -> None:
    """A sum in another order may give it: it is reported, with the band, and is no finding."""
    lab = Laboratory(unrelated(breaks=name, by="bit", long=LONG), subject)
    (relation,) = (relation for relation in RELATIONS if relation.name == name)
    judged = judge(relation, lab, oracle)
    assert judged.outcome is RelationOutcome.WITHIN_BAND
    assert judged.comparison is not None
    assert judged.band is not None
    assert 0 < judged.comparison.largest[judged.furthest or ""] <= judged.band


@pytest.mark.parametrize(("act", "name"), [("keeps-state", "second-generation"), ("leaks-rows", "batch")])
def test_what_real_engines_do_is_found(act: str, name: str, tmp_path: Path) -> None:
    """States that are not reset, and rows that mix, are found by the relations that are named after them."""
    decoder = TinyDecoder(layers="ar")
    subject = Subject(
        model=decoder.save(tmp_path / "model.onnx"), topology=decoder.topology, prompt=PROMPT, steps=STEPS
    )
    lab = Laboratory(unrelated(breaks=act), subject)
    judged = judge(
        next(relation for relation in RELATIONS if relation.name == name),
        lab,
        Oracle(parse_engine("oracle"), subject, lambda: lab.tokens),
    )
    assert judged.outcome is RelationOutcome.BROKEN


def test_an_engine_that_runs_eager_whatever_is_asked_has_no_capture_to_compare(
    subject: Subject, oracle: Oracle
) -> None:
    """Eager equals eager: that must not pass for a relation that holds."""
    spec = unrelated(breaks="graph-capture", captures="no")
    (relation,) = (relation for relation in RELATIONS if relation.name == "graph-capture")
    judged = judge(relation, Laboratory(spec, subject), oracle)
    assert judged.outcome is RelationOutcome.NOT_APPLICABLE
    assert "runs this graph eager" in (judged.reason or "")
