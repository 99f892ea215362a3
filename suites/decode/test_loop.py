"""The decode loop: on real engines against references that know no cache, and step by step on a spy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from fixtures.decoders import TinyDecoder, save_graph
from fixtures.sessions import SESSION_KINDS, open_session
from harness.decode.loop import forced_decode, greedy_decode
from harness.decode.trace import Trace
from harness.engines.base import Session, TensorHandle, TopLogits
from harness.errors import EngineFailedError, InputError
from harness.topology.spec import Topology

PROMPT = (1, 2, 3, 4)
TOLERANCE = 1e-3
"""Between float32 on any engine and the float64 reference: three times the worst seen (3.4e-4, `hybrid` on
ONNX Runtime). The logits reach 11, and a lost row or state moves them by more than 0.1."""

kinds = pytest.mark.parametrize("kind", SESSION_KINDS)

# Seeds: on each, no choice of the reference is closer than 1e-3 (`TinyDecoder.greedy` refuses others).
DECODERS = {
    "dense": TinyDecoder("aa", vocab=29, width=8, seed=9),
    "recurrent": TinyDecoder("rr", vocab=29, width=8, seed=17),
    "hybrid": TinyDecoder("rrar", vocab=29, width=8, seed=12),
    "hybrid, outputs in reverse": TinyDecoder("arra", vocab=29, width=8, seed=54, reverse_outputs=True),
    "no mask": TinyDecoder("ara", vocab=29, width=8, seed=48, mask=False),
    "no positions": TinyDecoder("ara", vocab=29, width=8, seed=15, positions=False),
    "neither mask nor positions": TinyDecoder("ra", vocab=29, width=8, seed=50, mask=False, positions=False),
    "logits of the last position": TinyDecoder("ar", vocab=29, width=8, seed=2, last_only=True),
    "int32 IDs": TinyDecoder("ar", vocab=29, width=8, seed=8, id_dtype=TensorProto.INT32),
}


class Spy:
    """A session that notes every call, and can be told to misbehave.

    `fail_at` is the call that raises; `cut` a call and the output that comes back one row short from it.
    """

    def __init__(
        self, inner: Session, *, fail_at: int | None = None, cut: tuple[int, str] | None = None
    ) -> None:
        self._inner = inner
        self._fail_at = fail_at
        self._cut = cut
        self.feeds: list[dict[str, TensorHandle]] = []
        self.outputs: list[dict[str, TensorHandle]] = []
        self.positions: list[Any] = []
        self.copied = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, feeds: Mapping[str, TensorHandle], outputs: Sequence[str]) -> dict[str, TensorHandle]:
        """Note the call, and run it unless it is the one to fail."""
        step = len(self.feeds)
        self.feeds.append(dict(feeds))
        if step == self._fail_at:
            raise EngineFailedError("out of luck", kind="timeout", next_action="Wait.")
        found = self._inner.run(feeds, outputs)
        if self._cut is not None and step == self._cut[0]:
            port = self._cut[1]
            whole = self._inner.copy_out(found[port])
            found[port] = self._inner.place(np.delete(whole, 0, axis=-2 if whole.ndim == 4 else -1))
        self.outputs.append(found)
        return found

    def top_logits(
        self, logits: TensorHandle, *, k: int, positions: Sequence[int] | None = None
    ) -> list[TopLogits]:
        """Note which positions are reduced."""
        self.positions.append(positions)
        return self._inner.top_logits(logits, k=k, positions=positions)

    def copy_out(self, handle: TensorHandle) -> Any:
        """Count what is copied out."""
        self.copied += 1
        return self._inner.copy_out(handle)


def spy_on(decoder: TinyDecoder, folder: Path, **trouble: Any) -> Spy:
    """A spy before ONNX Runtime."""
    return Spy(open_session("ort-cpu", decoder.save(folder / "model.onnx")), **trouble)


def assert_follows_reference(trace: Trace, decoder: TinyDecoder) -> None:
    """Every step holds the reference's largest logits after the tokens before it."""
    ids = (*trace.prompt_ids, *trace.token_ids)
    logits = decoder.logits(ids[:-1])[len(trace.prompt_ids) - 1 :]
    assert len(trace.steps) == len(trace.token_ids) == len(logits)
    for step, row in zip(trace.steps, logits, strict=True):
        ranked = np.argsort(-row, kind="stable")[: len(step.token_ids)]
        assert np.allclose(step.values, row[ranked], atol=TOLERANCE)
        assert np.allclose(row[list(step.token_ids)], row[ranked], atol=2 * TOLERANCE)
        assert not step.has_nan


@kinds
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("prompt", [(7,), PROMPT])
def test_greedy_decoding_is_that_of_the_whole_sequence(
    kind: str, name: str, prompt: tuple[int, ...], tmp_path: Path
) -> None:
    """Threading KV and states from call to call gives the tokens and logits of running all at once."""
    decoder = DECODERS[name]
    session = open_session(kind, decoder.save(tmp_path / "model.onnx"))

    trace = greedy_decode(session, decoder.topology, prompt, max_new_tokens=16)

    assert trace.prompt_ids == prompt
    assert trace.token_ids == decoder.greedy(prompt, 16)
    assert trace.token_ids == tuple(step.argmax for step in trace.steps)
    assert trace.failure is None
    assert trace.session == session.info
    assert_follows_reference(trace, decoder)


@pytest.mark.parametrize("name", DECODERS)
def test_the_witnesses_are_worth_their_name(name: str) -> None:
    """A decoder that repeats one token would hide any fault: each says at least four different ones."""
    assert len(set(DECODERS[name].greedy(PROMPT, 16))) >= 4


@kinds
def test_half_precision_is_carried_in_half_precision(kind: str, tmp_path: Path) -> None:
    """A float16 decoder has float16 KV and states, and stays within half precision of the reference."""
    decoder = replace(DECODERS["hybrid"], float_dtype=TensorProto.FLOAT16)
    session = open_session(kind, decoder.save(tmp_path / "model.onnx"))

    trace = greedy_decode(session, decoder.topology, PROMPT, max_new_tokens=8)

    assert trace.failure is None
    ids = (*trace.prompt_ids, *trace.token_ids)
    rows = decoder.logits(ids[:-1])[len(PROMPT) - 1 :]
    for step, row in zip(trace.steps, rows, strict=True):
        # 2**-11 relative a rounding, logits up to 10, some tens of roundings on the way.
        assert np.allclose(step.values, row[list(step.token_ids)], atol=0.1)


def test_a_forced_decode_sees_what_a_greedy_one_saw(tmp_path: Path) -> None:
    """Forced along its own tokens, an engine gives the very same logits at each step."""
    decoder = DECODERS["hybrid"]
    session = open_session("ort-cpu", decoder.save(tmp_path / "model.onnx"))
    greedy = greedy_decode(session, decoder.topology, PROMPT, max_new_tokens=12)

    forced = forced_decode(session, decoder.topology, PROMPT, greedy.token_ids)

    assert (forced.prompt_ids, forced.token_ids) == (greedy.prompt_ids, greedy.token_ids)
    assert forced.steps == greedy.steps


@kinds
def test_a_forced_decode_follows_tokens_that_it_would_not_choose(kind: str, tmp_path: Path) -> None:
    """Step i holds the logits after the prompt and the first i forced tokens."""
    decoder = DECODERS["hybrid"]
    session = open_session(kind, decoder.save(tmp_path / "model.onnx"))
    foreign = (9, 9, 0, 28, 3)
    assert foreign != decoder.greedy(PROMPT, 5)

    trace = forced_decode(session, decoder.topology, PROMPT, foreign, top_k=29)

    assert trace.token_ids == foreign
    assert all(len(step.token_ids) == 29 for step in trace.steps)
    assert_follows_reference(trace, decoder)


def test_each_call_is_fed_what_its_place_demands(tmp_path: Path) -> None:
    """The prompt, then one token a call; a mask of ones over all tokens; positions that count on."""
    decoder = DECODERS["hybrid"]
    spy = spy_on(decoder, tmp_path)

    trace = greedy_decode(spy, decoder.topology, PROMPT, max_new_tokens=3)

    calls = [
        {
            name: spy._inner.copy_out(feeds[name]).tolist()
            for name in ("input_ids", "attention_mask", "position_ids")
        }
        for feeds in spy.feeds
    ]
    first, second, _ = trace.token_ids
    assert calls == [
        {"input_ids": [[*PROMPT]], "attention_mask": [[1] * 4], "position_ids": [[0, 1, 2, 3]]},
        {"input_ids": [[first]], "attention_mask": [[1] * 5], "position_ids": [[4]]},
        {"input_ids": [[second]], "attention_mask": [[1] * 6], "position_ids": [[5]]},
    ]


def test_presents_become_pasts_by_topology_and_without_a_copy(tmp_path: Path) -> None:
    """The very handle of each present is fed to its past; nothing is copied out; caches grow by the row."""
    decoder = DECODERS["hybrid, outputs in reverse"]
    spy = spy_on(decoder, tmp_path)
    topology = decoder.topology
    pairs = dict(zip(topology.kv_inputs, topology.kv_outputs, strict=True))
    states = {pair.input: pair.output for pair in topology.state_pairs}

    greedy_decode(spy, topology, PROMPT, max_new_tokens=4)

    for step, (given, fed) in enumerate(zip(spy.outputs, spy.feeds[1:], strict=False)):
        for past, present in (pairs | states).items():
            assert fed[past] is given[present]
        assert {fed[past].shape for past in pairs} == {(1, 1, len(PROMPT) + step, decoder.width)}
    assert {spy.feeds[0][past].shape for past in pairs} == {(1, 1, 0, decoder.width)}
    assert all(not spy._inner.copy_out(spy.feeds[0][state]).any() for state in states)
    assert spy.copied == 0


def test_only_the_last_position_of_the_prefill_is_reduced(tmp_path: Path) -> None:
    """The logits of the other prompt positions are nobody's choice."""
    spy = spy_on(DECODERS["dense"], tmp_path)

    greedy_decode(spy, DECODERS["dense"].topology, PROMPT, max_new_tokens=2)

    assert [list(positions) for positions in spy.positions] == [[-1], [-1]]


def test_as_many_calls_as_tokens(tmp_path: Path) -> None:
    """The last token is never fed: nobody reads what would follow."""
    spy = spy_on(DECODERS["dense"], tmp_path)
    greedy_decode(spy, DECODERS["dense"].topology, PROMPT, max_new_tokens=5)
    assert len(spy.feeds) == 5

    forced_decode(spy, DECODERS["dense"].topology, PROMPT, (1, 2, 3))
    assert len(spy.feeds) == 8


def test_a_stop_token_ends_the_decode_and_belongs_to_it(tmp_path: Path) -> None:
    """Decoding ends after the first of the stop tokens."""
    decoder = DECODERS["dense"]
    session = open_session("ort-cpu", decoder.save(tmp_path / "model.onnx"))
    whole = decoder.greedy(PROMPT, 16)
    stop = whole[6]

    trace = greedy_decode(session, decoder.topology, PROMPT, max_new_tokens=16, stop_ids={stop, 10**6})

    assert trace.token_ids == whole[: whole.index(stop) + 1]
    assert len(trace.steps) == len(trace.token_ids)


def test_the_observer_is_told_each_token_in_turn(tmp_path: Path) -> None:
    """Step by step, as it happens: the observer of token i comes before call i + 1."""
    spy = spy_on(DECODERS["dense"], tmp_path)
    told: list[tuple[int, int, int]] = []

    trace = greedy_decode(
        spy,
        DECODERS["dense"].topology,
        PROMPT,
        max_new_tokens=3,
        on_step=lambda step, token: told.append((step, token, len(spy.feeds))),
    )

    assert told == [(i, token, i + 1) for i, token in enumerate(trace.token_ids)]


@pytest.mark.parametrize("fail_at", [0, 1, 5])
def test_a_failing_engine_leaves_what_came_before(tmp_path: Path, fail_at: int) -> None:
    """The trace of a decode that fails at step n holds n tokens, and the failure."""
    decoder = DECODERS["hybrid"]
    spy = spy_on(decoder, tmp_path, fail_at=fail_at)

    trace = greedy_decode(spy, decoder.topology, PROMPT, max_new_tokens=8)

    assert trace.token_ids == decoder.greedy(PROMPT, 8)[:fail_at]
    assert len(trace.steps) == fail_at
    failure = trace.failure
    assert failure is not None
    assert (failure.kind, failure.step, failure.message) == ("timeout", fail_at, "out of luck")


@kinds
def test_a_real_failure_on_the_way_is_a_failure_of_that_step(kind: str, tmp_path: Path) -> None:
    """Learned positions end at 64: a prompt of 60 leaves four more calls, and the fifth fails."""
    decoder = DECODERS["dense"]
    session = open_session(kind, decoder.save(tmp_path / "model.onnx"))

    trace = greedy_decode(session, decoder.topology, (1, 2, 3) * 20, max_new_tokens=9)

    failure = trace.failure
    assert failure is not None
    assert (failure.kind, failure.step, len(trace.token_ids)) == ("crashed", 5, 5)
    assert kind in failure.message


@pytest.mark.parametrize(
    ("port", "shape"),
    [("present.2.key", "[1, 1, 6, 8]"), ("present.0.recurrent_state", "[1, 7]")],
)
def test_a_cache_that_comes_back_short_is_a_failure(tmp_path: Path, port: str, shape: str) -> None:
    """KV or a state that lost a row is named at that step, before anything is decoded from it."""
    decoder = DECODERS["hybrid"]
    spy = spy_on(decoder, tmp_path, cut=(3, port))

    trace = greedy_decode(spy, decoder.topology, PROMPT, max_new_tokens=8)

    assert len(trace.token_ids) == 3
    assert trace.failure is not None
    assert (trace.failure.kind, trace.failure.step) == ("crashed", 3)
    assert f"{port} has shape {shape} after 7 tokens" in trace.failure.message


def test_a_cache_that_never_grows_fails_at_the_first_call(tmp_path: Path) -> None:
    """Whether that is the engine's fault or the graph's is not for the loop to say: it names the port."""
    real = TensorProto.FLOAT
    model = save_graph(
        tmp_path / "model.onnx",
        [
            helper.make_node("Gather", ["head", "input_ids"], ["logits"]),
            helper.make_node("Identity", ["past"], ["present"]),
        ],
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "new"]),
            helper.make_tensor_value_info("past", real, ["batch", 1, "past", 2]),
        ],
        [
            helper.make_tensor_value_info("logits", real, ["batch", "new", 5]),
            helper.make_tensor_value_info("present", real, ["batch", 1, "total", 2]),
        ],
        {"head": np.eye(5, dtype=np.float32)},
    )
    topology = Topology(
        token_input="input_ids", logits_output="logits", kv_inputs=("past",), kv_outputs=("present",)
    )

    failure = greedy_decode(open_session("ort-cpu", model), topology, (1, 2, 3), max_new_tokens=2).failure
    assert failure is not None
    assert (failure.step, failure.ports) == (0, ("present",))
    assert "present has shape [1, 1, 0, 2] after 3 tokens" in failure.message


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "prompt is empty"),
        ((1, 29), "Token ID 29 at position 1 is outside the vocabulary \\(0 to 28\\)"),
        ((-1,), "Token ID -1"),
    ],
)
def test_a_prompt_that_is_none_is_bad_input(tmp_path: Path, prompt: tuple[int, ...], message: str) -> None:
    """Said before anything runs, for the tokens to follow as well."""
    decoder = DECODERS["dense"]
    spy = spy_on(decoder, tmp_path)

    with pytest.raises(InputError, match=message):
        greedy_decode(spy, decoder.topology, prompt, max_new_tokens=2)
    with pytest.raises(InputError):
        forced_decode(spy, decoder.topology, PROMPT, prompt)
    assert not spy.feeds


def test_no_tokens_at_all_is_bad_input(tmp_path: Path) -> None:
    """A decode of nothing would be identical to anything."""
    spy = spy_on(DECODERS["dense"], tmp_path)

    with pytest.raises(InputError, match="max_new_tokens=0 must be at least 1"):
        greedy_decode(spy, DECODERS["dense"].topology, PROMPT, max_new_tokens=0)


def test_the_end_of_a_decode_shows_what_its_last_call_gave(tmp_path: Path) -> None:
    """The logits behind the last token, as the reference has them, and every cache after all tokens fed."""
    decoder = DECODERS["hybrid"]
    spy = spy_on(decoder, tmp_path)
    shown: dict[str, Any] = {}

    def look(session: Session, given: Mapping[str, TensorHandle]) -> None:
        shown.update({name: session.copy_out(handle) for name, handle in given.items()})

    trace = greedy_decode(spy, decoder.topology, PROMPT, max_new_tokens=3, on_end=look)

    topology = decoder.topology
    carried = {*topology.kv_outputs, *(pair.output for pair in topology.state_pairs)}
    assert shown.keys() == {"logits", *carried}
    fed = (*PROMPT, *trace.token_ids[:-1])
    np.testing.assert_allclose(shown["logits"][0, -1], decoder.logits(fed)[-1], atol=TOLERANCE)
    assert {shown[name].shape[2] for name in topology.kv_outputs} == {len(fed)}


def test_an_engine_that_fails_when_its_caches_are_read_has_failed_after_its_last_step(tmp_path: Path) -> None:
    """Its tokens stay; an engine that failed before is not read at all."""
    decoder = DECODERS["dense"]
    read: list[int] = []

    def break_down(session: Session, given: Mapping[str, TensorHandle]) -> None:
        read.append(1)
        raise EngineFailedError("gone", kind="crashed", next_action="-")

    trace = greedy_decode(
        spy_on(decoder, tmp_path), decoder.topology, PROMPT, max_new_tokens=3, on_end=break_down
    )
    assert trace.failure is not None
    assert (trace.failure.step, trace.failure.message, len(trace.token_ids)) == (3, "gone", 3)

    spy = spy_on(decoder, tmp_path, fail_at=1)
    trace = greedy_decode(spy, decoder.topology, PROMPT, max_new_tokens=3, on_end=break_down)
    assert trace.failure is not None
    assert (trace.failure.step, len(read)) == (1, 1)
