"""Small graphs with a known answer, and with the fault that each makes visible.

R1, "state carried over": s = 0.97 * past + E[id], logits = tanh(s) @ W; vocabulary 7, width 5. Decoded twice
on one session, the second time without zeroing the state, the first token already differs.
R4, "silent mis-pairing": a decoder of two one-head attention layers, vocabulary 11, width 4. With layers
swapped, or key and value swapped, on the way from present to past, tokens part within the first steps.
Both were observed on ONNX Runtime 1.32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from fixtures.decoders import TinyDecoder, save_graph
from fixtures.sessions import SESSION_KINDS, open_session
from harness.decode.loop import greedy_decode
from harness.engines.base import Session, TensorHandle
from harness.topology.spec import StatePair, Topology

kinds = pytest.mark.parametrize("kind", SESSION_KINDS)

VOCAB, WIDTH, FADE = 7, 5, 0.97
R1_TOPOLOGY = Topology(
    token_input="input_ids", logits_output="logits", state_pairs=(StatePair("past", "present"),)
)


def r1_weights() -> tuple[np.ndarray, np.ndarray]:
    """The embedding [7, 5] and the head [5, 7]."""
    rng = np.random.RandomState(4)
    return (
        rng.standard_normal((VOCAB, WIDTH)).astype(np.float32),
        rng.standard_normal((WIDTH, VOCAB)).astype(np.float32),
    )


def r1_graph(path: Path) -> Path:
    """The recipe, one token a call: tokens of a call are summed with equal weight, so feed one."""
    embedding, head = r1_weights()
    real = TensorProto.FLOAT
    return save_graph(
        path,
        [
            helper.make_node("Gather", ["embedding", "input_ids"], ["x"]),
            helper.make_node("ReduceSum", ["x", "axis"], ["fed"], keepdims=0),
            helper.make_node("Mul", ["past", "fade"], ["faded"]),
            helper.make_node("Add", ["faded", "fed"], ["present"]),
            helper.make_node("Tanh", ["present"], ["squashed"]),
            helper.make_node("MatMul", ["squashed", "head"], ["logits"]),
        ],
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "new"]),
            helper.make_tensor_value_info("past", real, ["batch", WIDTH]),
        ],
        [
            helper.make_tensor_value_info("logits", real, ["batch", VOCAB]),
            helper.make_tensor_value_info("present", real, ["batch", WIDTH]),
        ],
        {
            "embedding": embedding,
            "head": head,
            "fade": np.array(FADE, np.float32),
            "axis": np.array([1], np.int64),
        },
    )


def r1_tokens(first: int, count: int, state: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The recipe in numpy, float64: the tokens after `first` from `state`, and the state they leave."""
    embedding, head = (array.astype(np.float64) for array in r1_weights())
    token, tokens = first, []
    for _ in range(count):
        state = FADE * state + embedding[token]
        token = int((np.tanh(state) @ head).argmax())
        tokens.append(token)
    return tokens, state


class LeakySession:
    """R1's fault: a session whose fresh state is what the last decode left."""

    def __init__(self, inner: Session) -> None:
        self._inner = inner
        self._left: TensorHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def zeros(self, shape: Sequence[int], dtype: str) -> TensorHandle:
        """Not zeros."""
        return self._inner.zeros(shape, dtype) if self._left is None else self._left

    def run(self, feeds: Any, outputs: Any) -> dict[str, TensorHandle]:
        """Run, and keep the state."""
        found = self._inner.run(feeds, outputs)
        self._left = found["present"]
        return found


@kinds
def test_r1_every_decode_starts_from_zero(kind: str, tmp_path: Path) -> None:
    """The same prompt on the same session gives the same tokens, whatever was decoded before."""
    session = open_session(kind, r1_graph(tmp_path / "model.onnx"))
    for first in (4, 0, 4, 5, 4):
        expected, _ = r1_tokens(first, 12, np.zeros(WIDTH))
        assert list(greedy_decode(session, R1_TOPOLOGY, (first,), max_new_tokens=12).token_ids) == expected


def test_r1_a_state_carried_over_shows_at_the_first_token(tmp_path: Path) -> None:
    """The recipe tells a leaking session from a clean one: the fault parts at token 0."""
    session: Any = LeakySession(open_session("ort-cpu", r1_graph(tmp_path / "model.onnx")))
    clean, left = r1_tokens(4, 12, np.zeros(WIDTH))
    leaked, _ = r1_tokens(4, 12, left)
    assert clean[0] != leaked[0]

    first, second = (greedy_decode(session, R1_TOPOLOGY, (4,), max_new_tokens=12).token_ids for _ in range(2))

    assert list(first) == clean
    assert list(second) == leaked


R4 = TinyDecoder("aa", vocab=11, width=4, seed=0)
R4_PROMPTS = ((1, 2, 3), (4, 5), (9, 0, 7, 7), (10,), (6, 2, 8))


def layers_swapped(presents: Sequence[str]) -> tuple[str, ...]:
    """Layer 0 gets layer 1's present and the other way round."""
    return (*presents[2:], *presents[:2])


def kinds_swapped(presents: Sequence[str]) -> tuple[str, ...]:
    """Keys become values and values keys, within each layer."""
    return (presents[1], presents[0], presents[3], presents[2])


@kinds
def test_r4_pairing_by_topology_is_right(kind: str, tmp_path: Path) -> None:
    """Threaded as the topology says, all prompts decode as the reference does."""
    session = open_session(kind, R4.save(tmp_path / "model.onnx"))

    for prompt in R4_PROMPTS:
        trace = greedy_decode(session, R4.topology, prompt, max_new_tokens=12)
        assert trace.token_ids == R4.greedy(prompt, 12)


@pytest.mark.parametrize("swap", [layers_swapped, kinds_swapped])
def test_r4_a_wrong_pairing_is_seen(swap: Callable[[Sequence[str]], tuple[str, ...]], tmp_path: Path) -> None:
    """No engine raises: only the comparison tells. The prefill is right, and tokens part soon after."""
    session = open_session("ort-cpu", R4.save(tmp_path / "model.onnx"))
    swapped = replace(R4.topology, kv_outputs=swap(R4.topology.kv_outputs))

    parted = []
    for prompt in R4_PROMPTS:
        trace = greedy_decode(session, swapped, prompt, max_new_tokens=12)
        right = R4.greedy(prompt, 12)
        assert trace.failure is None
        assert trace.token_ids[0] == right[0]
        differing = [i for i, token in enumerate(right) if trace.token_ids[i] != token]
        parted += differing[:1]
    assert parted
    assert min(parted) <= 2
