"""Decoders that answer to an encoder: every form of the same weights decodes the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest

from fixtures.seq2seq import FORMS, TinySeq2Seq
from fixtures.sessions import SESSION_KINDS, open_session
from harness.decode.assembling import Assembly, assemble
from harness.decode.encoder_inputs import SEEDED_LENGTH, given_values
from harness.decode.loop import greedy_decode, one_pass_decode
from harness.decode.parts import decoder_inventory
from harness.decode.wired import WiredSession
from harness.engines.base import Session, TensorHandle
from harness.package import open_package
from harness.topology.resolve import resolve_package

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROMPT = (3, 1)
TOLERANCE = 1e-3
"""Between float32 on any engine and the float64 reference, on logits of up to 10."""

MODEL = TinySeq2Seq(seed=4)
TEXT = TinySeq2Seq(text=True, seed=13)
FRAMES = 5


def assembly_of(folder: Path) -> Assembly:
    """A package's decoder with all its graphs."""
    package = open_package(folder)
    topology = resolve_package(package, decoder_inventory(package)).topology
    assert topology is not None
    return assemble(package, topology)


def open_whole(kind: str, assembly: Assembly) -> Session:
    """A session over all graphs, each on an engine of this kind."""
    steps = assembly.wiring.steps
    return WiredSession(assembly.wiring, {step.name: open_session(kind, step.graph) for step in steps})


def fed(assembly: Assembly, features: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Features for the encoder; what the graph does not look at is made up."""
    own = {each.port.name: features for each in assembly.given if each.name == "audio_features"}
    others = [each for each in assembly.given if each.port.name not in own]
    return {**given_values(others, file=None, seed=0).feeds, **own}


@pytest.mark.parametrize("kind", SESSION_KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_decodes_what_the_reference_does(form: str, kind: str, tmp_path: Path) -> None:
    """Merged or paired, with cross KV or without: the tokens and logits of the whole sequence at once."""
    features = MODEL.features(FRAMES)
    assembly = assembly_of(MODEL.save(tmp_path, form))
    session = open_whole(kind, assembly)

    trace = greedy_decode(
        session, assembly.topology, PROMPT, max_new_tokens=12, extra=fed(assembly, features)
    )

    hidden = MODEL.hidden(features)
    assert trace.failure is None
    assert trace.token_ids == MODEL.greedy(hidden, PROMPT, 12)
    rows = MODEL.logits(hidden, (*PROMPT, *trace.token_ids))[len(PROMPT) - 1 :]
    for step, row in zip(trace.steps, rows, strict=False):
        assert np.allclose(step.values, row[list(step.token_ids)], atol=TOLERANCE)


def test_the_witness_listens_to_its_encoder() -> None:
    """Other features give other tokens, and the tokens of each are not all the same."""
    decodes = [MODEL.greedy(MODEL.hidden(MODEL.features(FRAMES, seed)), PROMPT, 12) for seed in (1, 2)]
    assert decodes[0] != decodes[1]
    assert all(len(set(tokens)) >= 5 for tokens in decodes)


def counting(
    session: Session, shapes: list[dict[str, tuple[int, ...]]] | None = None
) -> list[tuple[str, ...]]:
    """Notes what each call of `session` asks for, in the list that is returned, and the shapes it is fed."""
    calls: list[tuple[str, ...]] = []
    run = session.run

    def noted(feeds: Mapping[str, TensorHandle], outputs: Sequence[str]) -> dict[str, TensorHandle]:
        calls.append(tuple(outputs))
        if shapes is not None:
            shapes.append({name: handle.shape for name, handle in feeds.items()})
        return run(feeds, outputs)

    session.run = noted  # type: ignore[method-assign]
    return calls


def test_the_encoder_runs_once_a_decode(tmp_path: Path) -> None:
    """However many tokens; and once more for the next decode, whose features may be others."""
    assembly = assembly_of(MODEL.save(tmp_path, "merged"))
    encoder, decoder = (open_session("ort-cpu", step.graph) for step in assembly.wiring.steps)
    encoded, decoded = counting(encoder), counting(decoder)
    session = WiredSession(assembly.wiring, {"encoder_model": encoder, "decoder_model_merged": decoder})

    for seed in (1, 2):
        features = MODEL.features(FRAMES, seed)
        extra = fed(assembly, features)
        trace = greedy_decode(session, assembly.topology, PROMPT, max_new_tokens=5, extra=extra)
        assert trace.token_ids == MODEL.greedy(MODEL.hidden(features), PROMPT, 5)

    assert encoded == [("last_hidden_state",)] * 2
    cross = tuple(f"present.{i}.encoder.{kind}" for i in (0, 1) for kind in ("key", "value"))
    own = tuple(f"present.{i}.decoder.{kind}" for i in (0, 1) for kind in ("key", "value"))
    assert [set(call) for call in decoded] == [{"logits", *own, *cross}, *[{"logits", *own}] * 4] * 2


def test_the_pair_takes_turns(tmp_path: Path) -> None:
    """The graph without a cache runs first, and never again; the other one takes its cross KV to the end."""
    assembly = assembly_of(MODEL.save(tmp_path, "pair"))
    sessions = {step.name: open_session("ort-cpu", step.graph) for step in assembly.wiring.steps}
    calls = {name: counting(session) for name, session in sessions.items()}

    trace = greedy_decode(
        WiredSession(assembly.wiring, sessions),
        assembly.topology,
        PROMPT,
        max_new_tokens=5,
        extra=fed(assembly, MODEL.features(FRAMES)),
    )

    assert trace.failure is None
    counts = {name: len(made) for name, made in calls.items()}
    assert counts == {"encoder_model": 1, "decoder_model": 1, "decoder_with_past_model": 4}


def test_a_decoder_that_takes_its_past_needs_no_partner(tmp_path: Path) -> None:
    """Under the name of the first graph of a pair it runs at all calls."""
    MODEL.save(tmp_path, "merged")
    (tmp_path / "decoder_model_merged.onnx").rename(tmp_path / "decoder_model.onnx")
    features = MODEL.features(FRAMES)
    assembly = assembly_of(tmp_path)

    trace = greedy_decode(
        open_whole("ort-cpu", assembly),
        assembly.topology,
        PROMPT,
        max_new_tokens=5,
        extra=fed(assembly, features),
    )

    assert trace.token_ids == MODEL.greedy(MODEL.hidden(features), PROMPT, 5)


def test_a_decoder_without_any_cache_misses_no_partner(tmp_path: Path) -> None:
    """It has nothing that a graph for later calls could take: whether it can be driven its ports say."""
    MODEL.save(tmp_path, "pair")
    (tmp_path / "decoder_with_past_model.onnx").unlink()
    path = tmp_path / "decoder_model.onnx"
    model = onnx.load(path)
    del model.graph.output[1:]
    onnx.save(model, path)

    assert [port.name for port in decoder_inventory(open_package(tmp_path)).outputs] == ["logits"]


@pytest.mark.parametrize(
    ("form", "hidden", "cross"),
    [
        ("merged", [FRAMES, FRAMES, FRAMES], [FRAMES, FRAMES, FRAMES]),
        ("appended", [FRAMES, 0, 0], [0, FRAMES, FRAMES]),
    ],
)
def test_hidden_states_that_are_appended_are_given_once(
    form: str, hidden: list[int], cross: list[int], tmp_path: Path
) -> None:
    """Cross KV that grows by the hidden states starts empty, and gets none of them after the first call."""
    assembly = assembly_of(MODEL.save(tmp_path, form))
    sessions = {step.name: open_session("ort-cpu", step.graph) for step in assembly.wiring.steps}
    fed_shapes: list[dict[str, tuple[int, ...]]] = []
    counting(sessions[assembly.wiring.steps[-1].name], fed_shapes)

    greedy_decode(
        WiredSession(assembly.wiring, sessions),
        assembly.topology,
        PROMPT,
        max_new_tokens=3,
        extra=fed(assembly, MODEL.features(FRAMES)),
    )

    assert [shapes["encoder_hidden_states"][1] for shapes in fed_shapes] == hidden
    assert [shapes["past_key_values.0.encoder.key"][2] for shapes in fed_shapes] == cross


@pytest.mark.parametrize("form", FORMS)
def test_one_pass_sees_what_steps_see(form: str, tmp_path: Path) -> None:
    """A call over all tokens is a first call, whatever was decoded before: the logits of single steps."""
    assembly = assembly_of(MODEL.save(tmp_path, form))
    session = open_whole("oracle", assembly)
    extra = fed(assembly, MODEL.features(FRAMES))
    steps = greedy_decode(session, assembly.topology, PROMPT, max_new_tokens=6, extra=extra)

    whole = one_pass_decode(session, assembly.topology, PROMPT, steps.token_ids, extra=extra)

    assert whole is not None
    for one, other in zip(whole.steps, steps.steps, strict=True):
        assert np.allclose(one.values, other.values, atol=TOLERANCE)
        assert one.argmax == other.argmax


def test_a_text_encoder_takes_a_mask_and_so_does_the_whole(tmp_path: Path) -> None:
    """What must be given are the encoder's tokens and their mask, by the names of the whole."""
    assembly = assembly_of(TEXT.save(tmp_path, "merged"))

    assert {(given.port.name, given.name, given.kind) for given in assembly.given} == {
        ("encoder_model.input_ids", "input_ids", "tokens"),
        ("encoder_model.attention_mask", "attention_mask", "mask"),
    }
    assert assembly.source_tokens is not None
    assert [port.name for port in assembly.wiring.inputs][:1] == ["input_ids"]


@pytest.mark.parametrize("kind", ["ort-cpu", "oracle"])
@pytest.mark.parametrize("form", ["merged", "pair", "hidden states", "cross inputs"])
def test_a_source_text_is_heard_as_far_as_its_mask_goes(form: str, kind: str, tmp_path: Path) -> None:
    """Encoder and decoder are given one mask: what it hides is not there, as if the text were shorter."""
    assembly = assembly_of(TEXT.save(tmp_path, form))
    source, mask = np.array([[5, 2, 9, 4]]), np.array([[1, 1, 0, 0]])
    arrays = {"input_ids": source, "attention_mask": mask}
    extra = {given.port.name: arrays[given.name] for given in assembly.given}

    trace = greedy_decode(
        open_whole(kind, assembly), assembly.topology, PROMPT, max_new_tokens=8, extra=extra
    )

    assert trace.failure is None
    assert trace.token_ids == TEXT.greedy(TEXT.hidden(source[:, :2]), PROMPT, 8)
    heard, whole = (TEXT.logits(TEXT.hidden(ids), PROMPT)[-1] for ids in (source[:, :2], source))
    first = trace.steps[0]
    assert np.allclose(first.values, heard[list(first.token_ids)], atol=TOLERANCE)
    assert not np.allclose(heard, whole, atol=10 * TOLERANCE)


def test_a_lone_decoder_with_a_mask_hears_all_that_it_is_given(tmp_path: Path) -> None:
    """Made up is the cross KV, and the mask is as long as it is, all ones."""
    folder = TEXT.save(tmp_path, "cross inputs")
    (folder / "encoder.onnx").unlink()
    assembly = assembly_of(folder)
    values = given_values(assembly.given, file=None, seed=0)

    trace = greedy_decode(
        open_whole("ort-cpu", assembly), assembly.topology, PROMPT, max_new_tokens=4, extra=values.feeds
    )

    assert trace.failure is None
    assert values.feeds["encoder_attention_mask"].tolist() == [[1] * SEEDED_LENGTH]


def test_a_lone_decoder_must_be_given_what_its_encoder_would_give(tmp_path: Path) -> None:
    """Cross KV for one that only reads it; hidden states for one that makes its own."""
    names = {}
    for form in FORMS:
        if form != "pair":
            folder = MODEL.save(tmp_path / form, form)
            next(folder.glob("encoder*.onnx")).unlink()
            names[form] = {given.port.name for given in assembly_of(folder).given}

    assert names == {
        "merged": {"encoder_hidden_states"},
        "recomputed": {"encoder_hidden_states"},
        "hidden states": {"encoder_hidden_states"},
        "appended": {"encoder_hidden_states"},
        "cross inputs": {f"past_{kind}_cross_{i}" for i in (0, 1) for kind in ("key", "value")},
    }
