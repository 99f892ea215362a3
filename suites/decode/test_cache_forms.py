"""The same decoder with its caches in other forms decodes the same tokens, on every engine.

Expected are the tokens of `TinyDecoder`, which runs whole sequences in float64 and knows no cache; for
caches that are rounded, those of the plain form with the same rounding. Roles, widths and axes are derived
from each file as they are for a user's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from fixtures.attention_forms import FakeQuantised, Quantised, WithHeads
from fixtures.cache_forms import (
    Fused,
    Lengths,
    Merged,
    OneToken,
    Optional,
    Planes,
    Stacked,
    Static,
    Unbatched,
    Windowed,
)
from fixtures.decoder_graphs import CacheForm
from fixtures.decoders import TinyDecoder
from fixtures.effort import examples
from fixtures.sessions import SESSION_KINDS, open_session
from fixtures.state_forms import GrownState, HalfStates, StateWindow
from harness.decode.diagnose import first_non_finite
from harness.decode.feeds import plan_feeds
from harness.decode.loop import forced_decode, greedy_decode, one_pass_decode
from harness.decode.trace import Trace
from harness.engines.base import Session, TensorHandle
from harness.package import open_package
from harness.ports import read_ports
from harness.topology.resolve import resolve_package
from harness.topology.spec import Topology

PROMPT = (1, 2, 3, 4)
NEW_TOKENS = 16
TOLERANCE = 1e-3
"""As in `test_loop`: float32 on any engine against float64."""

kinds = pytest.mark.parametrize("kind", [kind for kind in SESSION_KINDS if kind != "isolated"])
"""A process in between carries every form's tensors alike: `test_loop` drives the plain one through it."""


@dataclass(frozen=True)
class Case:
    """A decoder, and the form of its caches.

    Attributes:
        decoder: its weights, and its reference.
        form: makes the form.
        plain: makes the plain form that decodes the same.
        one_pass: whether one call over all tokens sees what steps see.
    """

    decoder: TinyDecoder
    form: Callable[[], CacheForm]
    plain: Callable[[], CacheForm] = CacheForm
    one_pass: bool = True


def tiny(layers: str, *, seed: int, mask: bool = True, window: int | None = None) -> TinyDecoder:
    """A decoder; its seed is one on which no choice of the reference is close."""
    return TinyDecoder(layers, vocab=29, width=8, seed=seed, mask=mask, window=window)


CASES = {
    "plain, a window": Case(tiny("aa", seed=0, window=5), CacheForm),
    "plain, convolutions": Case(tiny("cac", seed=0), CacheForm),
    "fused": Case(tiny("aa", seed=2), Fused),
    "stacked": Case(tiny("aa", seed=2), Stacked),
    "static": Case(tiny("aa", seed=2, mask=False), Static),
    "static, heads": Case(tiny("aa", seed=2, mask=False), lambda: Static(heads=True)),
    "static, rows before heads": Case(tiny("aa", seed=2, mask=False), lambda: Static(heads=True, axis=1)),
    "static, any capacity": Case(tiny("aa", seed=2, mask=False), lambda: Static(capacity="capacity")),
    "static, states": Case(tiny("ra", seed=5, mask=False), Static),
    "windowed": Case(tiny("aa", seed=0, window=5), Windowed, one_pass=False),
    "a scale for each row": Case(tiny("aa", seed=2), Quantised, FakeQuantised, one_pass=False),
    "a fixed scale": Case(
        tiny("aa", seed=2), lambda: Quantised(fixed=True), lambda: FakeQuantised(fixed=True), one_pass=False
    ),
    "past length": Case(tiny("aa", seed=2, mask=False), Lengths),
    "total length": Case(
        tiny("aa", seed=2, mask=False),
        lambda: Lengths(past=None, total="total_sequence_length", shape=(), dtype=TensorProto.INT64),
    ),
    "both lengths": Case(
        tiny("ara", seed=3, mask=False),
        lambda: Lengths(past="past_seq_len", total="total_seq_len", shape=("batch", 1)),
    ),
    "three planes of positions": Case(tiny("ara", seed=3), Planes),
    "a window of states": Case(tiny("rar", seed=4), StateWindow),
    "states in half precision": Case(tiny("rar", seed=4), HalfStates, lambda: HalfStates(kept=False)),
    "a state that grows": Case(tiny("cac", seed=0), GrownState, one_pass=False),
    "pure states, one token": Case(tiny("rr", seed=0), OneToken, one_pass=False),
    "one token": Case(tiny("ra", seed=5), OneToken, one_pass=False),
    "one token without a batch": Case(tiny("ra", seed=5), lambda: OneToken(rank=1), one_pass=False),
    "no batch": Case(tiny("ra", seed=5), Unbatched),
    "two branches": Case(tiny("aa", seed=2), Merged),
    "optional input": Case(tiny("ar", seed=0), Optional),
    "a width that is a symbol": Case(tiny("ara", seed=3), WithHeads),
    "buffers that the attention writes": Case(tiny("aa", seed=2), lambda: WithHeads(rows_in=24, rows_out=24)),
    "a window that the attention sees": Case(
        tiny("aa", seed=0, window=5), lambda: WithHeads(rows_in="past_sliding_length"), one_pass=False
    ),
    "a window that rolls": Case(
        tiny("aa", seed=0, window=5),
        lambda: WithHeads(
            rows_in="past_sliding_length", rows_out="total_sliding_length", symbol=True, rolls=True
        ),
    ),
    "a window that rolls, longer than it must be": Case(
        tiny("aa", seed=0, window=5), lambda: WithHeads(rows_in=7, rows_out=7, rolls=True)
    ),
    "rows that the attention rounds": Case(
        tiny("aa", seed=2),
        lambda: WithHeads(quantised=True),
        lambda: FakeQuantised(fixed=True),
        one_pass=False,
    ),
    "the index of the last token": Case(tiny("aa", seed=2, mask=False), lambda: WithHeads(last="seqlens_k")),
    "the index of the last token, called past": Case(
        tiny("aa", seed=2, mask=False), lambda: WithHeads(last="past_seq_len")
    ),
}
LACKING = {
    "nxrt": {
        "a window that rolls",
        "a window that rolls, longer than it must be",
        "rows that the attention rounds",
    }
}
"""Forms that an engine does not know: what its attention is told to roll grows, and rounding is refused."""

cases = pytest.mark.parametrize("name", CASES)


def saved(case: Case, folder: Path) -> tuple[Path, Topology]:
    """The graph in its form, and what is derived of it."""
    folder.mkdir(exist_ok=True)
    model = case.decoder.save(folder / "model.onnx", case.form())
    derivation = resolve_package(open_package(model), read_ports(model))
    assert derivation.topology is not None, derivation.refusal
    return model, derivation.topology


def plain(case: Case, kind: str, prompt: tuple[int, ...], folder: Path) -> Trace:
    """The decode of the plain form."""
    folder.mkdir(exist_ok=True)
    model = case.decoder.save(folder / "plain.onnx", case.plain())
    return greedy_decode(open_session(kind, model), case.decoder.topology, prompt, max_new_tokens=NEW_TOKENS)


def assert_alike(one: Trace, other: Trace) -> None:
    """Same tokens, and the same largest logits up to rounding."""
    assert one.failure is None
    assert one.token_ids == other.token_ids
    for step, its in zip(one.steps, other.steps, strict=True):
        assert np.allclose(step.values, its.values, atol=TOLERANCE)


@kinds
@cases
@pytest.mark.parametrize("prompt", [(7,), PROMPT])
def test_another_form_decodes_the_same_tokens(
    kind: str, name: str, prompt: tuple[int, ...], tmp_path: Path
) -> None:
    """All roles derived, each call fed as the form demands: tokens and logits are those of the plain form."""
    if name in LACKING.get(kind, ()):
        pytest.skip(f"{kind} does not know {name}")
    case = CASES[name]
    model, topology = saved(case, tmp_path / "form")

    trace = greedy_decode(open_session(kind, model), topology, prompt, max_new_tokens=NEW_TOKENS)

    assert_alike(trace, plain(case, kind, prompt, tmp_path / "plain"))
    if case.plain is CacheForm:
        assert trace.token_ids == case.decoder.greedy(prompt, NEW_TOKENS)


FREE_FORMS: dict[str, tuple[Callable[[], CacheForm], bool]] = {
    "fused": (Fused, True),
    "static": (lambda: Static(capacity=40), False),
    "static, heads": (lambda: Static(capacity="capacity", heads=True), False),
    "lengths": (lambda: Lengths(total="total_seq_len"), False),
    "planes": (Planes, True),
    "a window of states": (StateWindow, True),
    "a state that grows": (GrownState, True),
    "one token": (OneToken, True),
    "no batch": (Unbatched, True),
    "two branches": (Merged, True),
    "a width that is a symbol": (WithHeads, True),
}
"""Forms that any decoder can have, each with whether it has a mask."""

tokens = st.lists(st.integers(0, 28), min_size=1, max_size=9)


@settings(max_examples=examples(30), deadline=None)
@given(
    name=st.sampled_from(sorted(FREE_FORMS)),
    layers=st.tuples(st.text("arc", max_size=2), st.text("arc", max_size=1)).map("a".join),
    seed=st.integers(0, 2**16),
    prompt=tokens,
    follow=tokens,
)
def test_any_decoder_sees_in_another_form_what_it_sees_in_the_plain_one(
    name: str, layers: str, seed: int, prompt: list[int], follow: list[int], tmp_path_factory: Any
) -> None:
    """Whatever its layers and weights, and whatever tokens it is made to follow: the same logits at each.

    In float64, where no weights make rounding visible.
    """
    make, mask = FREE_FORMS[name]
    case = Case(tiny(layers, seed=seed, mask=mask), make)
    folder = tmp_path_factory.mktemp("any")
    model, topology = saved(case, folder / "form")
    plain_model = case.decoder.save(folder / "plain.onnx")

    traces = [
        forced_decode(open_session("oracle:precision=float64", graph), roles, prompt, follow, top_k=29)
        for graph, roles in ((model, topology), (plain_model, case.decoder.topology))
    ]

    assert traces[0].failure is None
    for one, other in zip(traces[0].steps, traces[1].steps, strict=True):
        assert one.token_ids == other.token_ids
        assert np.allclose(one.values, other.values, atol=1e-9)


@cases
def test_one_pass_is_right_or_is_not_done(name: str, tmp_path: Path) -> None:
    """What the oracle sees in one pass is what it sees in steps; where it could not be, there is no pass."""
    case = CASES[name]
    model, topology = saved(case, tmp_path / "form")
    session = open_session("oracle", model)
    steps = greedy_decode(session, topology, PROMPT, max_new_tokens=NEW_TOKENS)

    whole = one_pass_decode(session, topology, PROMPT, steps.token_ids)

    assert (whole is not None) == case.one_pass
    if whole is not None:
        assert_alike(whole, steps)


@cases
def test_a_prompt_at_once_is_a_prompt_in_steps(name: str, tmp_path: Path) -> None:
    """Whatever a form does with several tokens a call, it does with each of them in turn."""
    case = CASES[name]
    model, topology = saved(case, tmp_path / "form")
    session = open_session("ort-cpu", model)

    at_once = greedy_decode(session, topology, PROMPT, max_new_tokens=1)
    in_steps = forced_decode(session, topology, PROMPT[:1], (*PROMPT[1:], 0))

    assert np.allclose(at_once.steps[-1].values, in_steps.steps[-1].values, atol=TOLERANCE)


@cases
def test_every_decode_starts_afresh(name: str, tmp_path: Path) -> None:
    """A second decode on the session is the first one again, after another has run."""
    case = CASES[name]
    model, topology = saved(case, tmp_path / "form")
    session = open_session("ort-cpu", model)

    first = greedy_decode(session, topology, PROMPT, max_new_tokens=8)
    greedy_decode(session, topology, (9, 9, 9), max_new_tokens=8)
    again = greedy_decode(session, topology, PROMPT, max_new_tokens=8)

    assert again.steps == first.steps


class Spy:
    """A session that notes what each call is fed, what it is asked for and what it gives."""

    def __init__(self, inner: Session) -> None:
        self._inner = inner
        self.calls: list[tuple[Mapping[str, TensorHandle], Sequence[str], dict[str, TensorHandle]]] = []

    def __getattr__(self, name: str) -> Any:
        assert name != "copy_out", "a decode copies nothing out"
        return getattr(self._inner, name)

    def run(self, feeds: Mapping[str, TensorHandle], outputs: Sequence[str]) -> dict[str, TensorHandle]:
        """Run, and note."""
        found = self._inner.run(feeds, outputs)
        self.calls.append((feeds, outputs, found))
        return found


@cases
def test_what_a_call_gives_is_what_the_next_is_fed(name: str, tmp_path: Path) -> None:
    """The very handle of each cache goes back to its port: nothing is copied, whatever the kind."""
    case = CASES[name]
    model, topology = saved(case, tmp_path / "form")
    spy: Any = Spy(open_session("ort-cpu", model))
    plan = plan_feeds(topology, read_ports(model))
    back = {
        source: target
        for cache in plan.caches
        for source, target in zip(cache.inputs, cache.outputs, strict=True)
    }

    greedy_decode(spy, topology, PROMPT, max_new_tokens=4)

    assert back
    for (_, _, came), (fed, _, _) in zip(spy.calls, spy.calls[1:], strict=False):
        for source, target in back.items():
            assert fed[source] is came[target]


def test_a_prompt_that_is_fed_in_turn_gives_logits_once(tmp_path: Path) -> None:
    """Only the last of its calls is asked for them; after that every call is."""
    model, topology = saved(CASES["one token"], tmp_path / "form")
    spy: Any = Spy(open_session("ort-cpu", model))

    trace = greedy_decode(spy, topology, PROMPT, max_new_tokens=3)

    assert len(trace.steps) == 3
    asked = ["logits" in outputs for _, outputs, _ in spy.calls]
    assert asked == [False] * (len(PROMPT) - 1) + [True] * 3


def test_where_one_call_takes_one_token_no_pass_is_looked_into(tmp_path: Path) -> None:
    """Looking for the first node that is not finite takes one pass; here there is none."""
    model, topology = saved(CASES["one token"], tmp_path / "form")

    assert first_non_finite(open_session("oracle", model), topology, PROMPT) is None
