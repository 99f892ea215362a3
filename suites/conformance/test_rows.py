"""What is fed to a batch, behind padding, and behind rows that are hidden, is what a reference expects of it.

The reference is the decoder's own, in float64 over one sequence at a time (`fixtures.decoders`): it knows
neither batches nor caches.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fixtures.cache_forms import Fused, Lengths, OneToken, Planes, Stacked, Static, Unbatched
from fixtures.decoder_graphs import CacheForm
from fixtures.decoders import TinyDecoder
from fixtures.sessions import open_session
from fixtures.unrelated import unrelated
from harness.engines.base import Session, TensorHandle
from harness.engines.registry import EngineSpec, parse_engine
from harness.errors import EngineFailedError
from harness.package import open_package
from harness.parity.relations.band import Oracle
from harness.parity.relations.base import NotApplicableError
from harness.parity.relations.batching import PADDING, require_room
from harness.parity.relations.catalogue import RELATIONS
from harness.parity.relations.intercepting import Feeds, Intercepted, Names
from harness.parity.relations.judging import Judged, RelationOutcome, judge
from harness.parity.relations.laboratory import Laboratory, Subject
from harness.parity.relations.observation import Observation, Script
from harness.parity.relations.rows import Row, Rows
from harness.ports import read_ports
from harness.topology.resolve import resolve_package

PROMPTS = ((1, 5, 3, 2), (2, 2, 7, 0), (9, 4, 6, 6))
TOKENS = ((3, 8, 1), (5, 0, 2), (7, 7, 7))
SCRIPTS = tuple(Script(prompt, 3, tokens) for prompt, tokens in zip(PROMPTS, TOKENS, strict=True))
TOLERANCE = 1e-4
"""Absolute, on logits of at most 8: float32 on any engine against float64."""

kinds = pytest.mark.parametrize("kind", ["ort-cpu", "isolated", "nxrt", "oracle"])


def laboratory(decoder: TinyDecoder, folder: Path, spec: EngineSpec | None = None) -> Laboratory:
    """A place for a decoder in its plain form."""
    model = decoder.save(folder / "model.onnx")
    subject = Subject(model=model, topology=decoder.topology, prompt=PROMPTS[0], steps=3)
    return Laboratory(spec or parse_engine("ort-cpu:threads=1"), subject, tokens=TOKENS[0])


def off(decoder: TinyDecoder, seen: Observation, script: Script) -> float:
    """How far the logits of a decode are from the reference, at most."""
    assert script.tokens is not None
    expected = decoder.logits((*script.prompt, *script.tokens[:-1]))[len(script.prompt) - 1 :]
    return max(float(np.abs(seen[step].logits - row).max()) for step, row in enumerate(expected))


@kinds
@pytest.mark.parametrize("layers", ["aa", "ar", "ca"])
def test_every_row_of_a_batch_is_the_decode_of_its_own_prompt(kind: str, layers: str, tmp_path: Path) -> None:
    """Different prompts and tokens stand side by side, and none sees another."""
    decoder = TinyDecoder(layers)
    lab = laboratory(decoder, tmp_path)
    session: Session = open_session(kind, lab.subject.model)
    rows = Rows(session, lab, [Row(script) for script in SCRIPTS])
    for number, script in enumerate(SCRIPTS):
        assert off(decoder, rows.decode(number), script) < TOLERANCE
    session.close()


@kinds
def test_padding_on_the_left_counts_for_nothing(kind: str, tmp_path: Path) -> None:
    """The mask hides it, and positions begin behind it, in a batch and alone."""
    decoder = TinyDecoder("aa")
    lab = laboratory(decoder, tmp_path)
    session = open_session(kind, lab.subject.model)
    longer = Script((4, 4, *PROMPTS[1]), 3, TOKENS[1])
    rows = Rows(session, lab, [Row(longer), Row(SCRIPTS[0], padding=2)])
    assert off(decoder, rows.decode(0), longer) < TOLERANCE
    assert off(decoder, rows.decode(1), SCRIPTS[0]) < TOLERANCE
    assert off(decoder, Rows(session, lab, [Row(SCRIPTS[0], 2)]).decode(0), SCRIPTS[0]) < TOLERANCE
    session.close()


def test_the_states_of_a_row_are_those_of_the_decode_alone(tmp_path: Path) -> None:
    """Without the rows of the padding, of the other prompts, and in the same shape."""
    lab = laboratory(TinyDecoder("aa"), tmp_path)
    with lab.session() as session:
        found = Rows(session, lab, [Row(Script((1, 1, *PROMPTS[1]), 3, TOKENS[1])), Row(SCRIPTS[0], 2)])
        seen = found.decode(1)
    for step, moment in lab.reference.items():
        assert seen[step].states.keys() == moment.states.keys()
        for name, state in moment.states.items():
            np.testing.assert_allclose(seen[step].states[name], state, atol=1e-5)


def test_an_engine_that_gives_fewer_rows_than_the_batch_has_failed(tmp_path: Path) -> None:
    """Its shapes are no index error of ours."""
    lab = laboratory(TinyDecoder("aa"), tmp_path)

    def first_row(session: Session, feeds: Feeds, outputs: Names) -> dict[str, TensorHandle]:
        given = session.run(feeds, outputs)
        return {name: session.place(session.copy_out(handle)[:1]) for name, handle in given.items()}

    with lab.session() as session:
        rows = Rows(Intercepted(session, first_row), lab, [Row(script) for script in SCRIPTS])
        with pytest.raises(EngineFailedError, match="logits has shape") as failed:
            rows.decode(1)
    assert failed.value.kind == "crashed"


def outcomes(folder: Path, form: CacheForm, spec: EngineSpec, *, mask: bool = False) -> dict[str, Judged]:
    """What becomes of every relation on a decoder whose caches have a form."""
    decoder = TinyDecoder("aa", mask=mask)
    model = decoder.save(folder / "model.onnx", form)
    derivation = resolve_package(open_package(folder), read_ports(model))
    assert derivation.topology is not None, derivation.refusal
    subject = Subject(model=model, topology=derivation.topology, prompt=(1, 5, 3, 9, 2, 7, 4), steps=4)
    lab = Laboratory(spec, subject)
    oracle = Oracle(parse_engine("oracle"), subject, lambda: lab.tokens)
    return {relation.name: judge(relation, lab, oracle) for relation in RELATIONS}


ALWAYS = {"graph-capture": "has no option 'graph'"}
MASKLESS = {"left-padding": "no attention mask", "canaries": "no mask that could hide a row"}
FORMS: dict[str, tuple[CacheForm, dict[str, str]]] = {
    "both in one": (Fused(), MASKLESS),
    "all layers in one": (Stacked(), MASKLESS),
    "lengths": (Lengths(), MASKLESS),
    "planes": (Planes(), MASKLESS),
    # Its graph writes a batch of one into a shape.
    "static": (
        Static(),
        {"left-padding": "no attention mask", "batch": "The graph itself does not allow it"},
    ),
    "no batch axis": (Unbatched(), MASKLESS | {"batch": "holds one sequence"}),
    "one token a call": (
        OneToken(),
        MASKLESS | dict.fromkeys(("chunked-prefill", "token-by-token", "recompute"), "takes 1 token a call"),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_a_form_of_caches_does_not_allow_is_not_applicable_with_the_reason(
    form: str, tmp_path: Path
) -> None:
    """And everything else is green, on a real engine."""
    made, reasons = FORMS[form]
    found = outcomes(tmp_path, made, parse_engine("ort-cpu:threads=1"))
    expected = ALWAYS | reasons
    for name, judged in found.items():
        if name in expected:
            assert judged.outcome is RelationOutcome.NOT_APPLICABLE, name
            assert expected[name] in (judged.reason or ""), name
        else:
            assert judged.outcome in (RelationOutcome.BITWISE, RelationOutcome.WITHIN_BAND), (name, judged)


def test_rows_of_a_static_cache_that_are_not_written_hold_a_canary(tmp_path: Path) -> None:
    """An engine that minds them is found, and by no other relation."""
    found = outcomes(tmp_path, Static(), unrelated(breaks="canaries"))
    broken = {name for name, judged in found.items() if judged.outcome is RelationOutcome.BROKEN}
    assert broken == {"canaries"}
    assert found["canaries"].case == "rows that are not written yet"


def test_a_static_cache_without_room_for_padding_is_said_so(tmp_path: Path) -> None:
    """The decode fits, and with hidden tokens it would not."""
    decoder = TinyDecoder("aa", mask=False)
    model = decoder.save(tmp_path / "model.onnx", Static(capacity=7 + 4 - 1 + PADDING - 1))
    derivation = resolve_package(open_package(tmp_path), read_ports(model))
    assert derivation.topology is not None
    subject = Subject(model=model, topology=derivation.topology, prompt=(1, 5, 3, 9, 2, 7, 4), steps=4)
    lab = Laboratory(parse_engine("ort-cpu:threads=1"), subject)
    with lab.session() as session, pytest.raises(NotApplicableError, match="holds 12 tokens"):
        require_room(lab, lab.plan(session))


def test_a_recurrent_layer_that_no_mask_stops_lacks_left_padding(tmp_path: Path) -> None:
    """The graph feeds padding into the state: the oracle differs as much, and no engine is to blame."""
    found = outcomes_of_layers(tmp_path, "ar")["left-padding"]
    assert found.outcome is RelationOutcome.NOT_APPLICABLE
    assert "The graph itself lacks the property" in (found.reason or "")


def outcomes_of_layers(folder: Path, layers: str) -> dict[str, Judged]:
    """What becomes of the relations on a decoder of these layers, with a mask."""
    lab = laboratory(TinyDecoder(layers), folder)
    oracle = Oracle(parse_engine("oracle"), lab.subject, lambda: lab.tokens)
    return {relation.name: judge(relation, lab, oracle) for relation in RELATIONS}
