"""GatedDeltaNet, of which ONNX Runtime has no CPU kernel: against LinearAttention, and against itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

CONTRIB = "com.microsoft"
BATCH, COUNT, QUERY_HEADS, HEADS, WIDTH, VALUE_WIDTH = 2, 5, 2, 4, 8, 6


def floats(random: np.random.RandomState, *shape: int) -> np.ndarray:
    """Standard normal numbers in fp32."""
    return random.standard_normal(shape).astype(np.float32)


def inputs_of(random: np.random.RandomState, *, by_key: bool = False) -> dict[str, np.ndarray]:
    """Seeded inputs in token-major layout, as a batch of sequences of equal length."""
    lead = (BATCH, COUNT)
    return {
        "query": floats(random, *lead, QUERY_HEADS, WIDTH),
        "key": floats(random, *lead, QUERY_HEADS, WIDTH) * np.float32(0.3),
        "value": floats(random, *lead, HEADS, VALUE_WIDTH),
        "cu_seqlens": None,
        "decay": -np.abs(floats(random, *lead, HEADS, *([WIDTH] if by_key else []))),
        "beta": 1 / (1 + np.exp(-floats(random, *lead, HEADS))),
        "initial_state": floats(random, BATCH, HEADS, VALUE_WIDTH, WIDTH),
    }


def run(run_node: Callable[..., list[np.ndarray]], inputs: dict[str, Any], **attributes: Any) -> Any:
    """Output and last state of GatedDeltaNet in float64."""
    return run_node(
        "GatedDeltaNet",
        list(inputs.values()),
        domain=CONTRIB,
        outputs=2,
        precision="float64",
        **attributes,
    )


def flat(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs with all tokens along one axis."""
    return {
        name: x if x is None or name == "initial_state" else x.reshape(-1, *x.shape[2:])
        for name, x in inputs.items()
    }


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_it_is_linear_attention_in_another_layout(
    rule: str, by_key: bool, run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """The same recurrence on merged heads, with keys repeated and the state transposed."""
    inputs = inputs_of(seeded, by_key=by_key)
    y, state = run(run_node, inputs, update_rule=rule, scale=0.4)

    def merged(x: np.ndarray) -> np.ndarray:
        return x.reshape(BATCH, COUNT, -1)

    q, k = (np.repeat(inputs[name], HEADS // QUERY_HEADS, axis=2) for name in ("query", "key"))
    given = [merged(q), merged(k), merged(inputs["value"]), inputs["initial_state"].swapaxes(-1, -2)]
    given += [merged(inputs["decay"]) if "gated" in rule else None]
    given += [merged(inputs["beta"]) if "delta" in rule else None]
    while given[-1] is None:
        given.pop()
    want, last = run_node(
        "LinearAttention",
        given,
        domain=CONTRIB,
        outputs=2,
        precision="float64",
        q_num_heads=HEADS,
        kv_num_heads=HEADS,
        update_rule=rule,
        scale=0.4,
    )
    np.testing.assert_allclose(merged(y), want, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(state.swapaxes(-1, -2), last, rtol=1e-12, atol=1e-13)


def test_gates_are_those_of_the_operator_before_it(
    run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """The fused gates give what LinearAttentionGate gives, and unit vectors what dividing gives."""
    inputs = inputs_of(seeded)
    raw, rate = floats(seeded, BATCH, COUNT, HEADS), floats(seeded, BATCH, COUNT, HEADS)
    a_log, dt_bias = floats(seeded, HEADS), floats(seeded, HEADS)
    options = {"gate_activation": "qwen", "beta_activation": "sigmoid", "qk_l2_norm": 1}
    fused = run(
        run_node, inputs | {"decay": raw, "beta": rate, "a_log": a_log, "dt_bias": dt_bias}, **options
    )
    decay, beta = run_node(
        "LinearAttentionGate", [raw, dt_bias, -np.exp(a_log), rate], domain=CONTRIB, outputs=2
    )
    apart = inputs | {"decay": decay, "beta": beta}
    for name in ("query", "key"):
        x = inputs[name]
        apart[name] = x / np.sqrt((x * x).sum(-1, keepdims=True) + np.float32(1e-6))
    for one, other in zip(fused, run(run_node, apart), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_layouts_hold_the_same_numbers(
    run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """Tokens along one axis or two, queries, keys and values packed or apart, bounds given or not."""
    inputs = inputs_of(seeded)
    y, state = run(run_node, inputs)
    tokens = flat(inputs)
    whole = [tokens[name].reshape(BATCH * COUNT, -1) for name in ("query", "key", "value")]
    packed = tokens | {"query": np.concatenate(whole, axis=1), "key": None, "value": None}
    bounded = tokens | {"cu_seqlens": np.array([0, COUNT, 2 * COUNT], np.int32)}
    for given in (tokens, packed, bounded):
        other, last = run(run_node, given)
        np.testing.assert_array_equal(other.reshape(y.shape), y)
        np.testing.assert_array_equal(last, state)


def test_sequences_of_unequal_lengths_are_each_by_itself(
    run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """Bounds 0, 3, 10 give what two runs over 3 and 7 tokens give."""
    tokens = flat(inputs_of(seeded))
    y, state = run(run_node, tokens | {"cu_seqlens": np.array([0, 3, 10], np.int32)})
    for entry, span in enumerate((slice(0, 3), slice(3, 10))):
        own = {name: None if x is None else x[span] for name, x in tokens.items()}
        own["initial_state"] = tokens["initial_state"][entry : entry + 1]
        part, last = run(run_node, own)
        np.testing.assert_array_equal(part, y[span])
        np.testing.assert_array_equal(last[0], state[entry])


@pytest.mark.parametrize("split", [1, 3])
def test_whole_is_chunks_is_steps(
    split: int, run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """Two runs, the second from the state of the first, equal one run over all positions."""
    inputs = inputs_of(seeded)
    y, end = run(run_node, inputs)
    parts, state = [], inputs["initial_state"]
    for piece in (slice(None, split), slice(split, None)):
        cut = {name: None if x is None else x[:, piece] for name, x in inputs.items()}
        part, state = run(run_node, cut | {"initial_state": np.float64(state)})
        parts.append(part)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), y, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(state, end, rtol=1e-12, atol=1e-13)
