"""Newer standard operators, which no ONNX Runtime here loads in all versions, against onnx's reference.

onnx's node tests pin a case or two of each attribute; these are seeded random cases over their combinations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from harness.oracle import OracleModel


def floats(random: np.random.RandomState, *shape: int) -> np.ndarray:
    """Standard normal numbers in fp32."""
    return random.standard_normal(shape).astype(np.float32)


@pytest.fixture
def against_reference(tmp_path: Path, save_one_node: Callable[..., Path]) -> Callable[..., None]:
    """Runs a node on onnx's reference and on the oracle, in both precisions, and compares all outputs."""

    def run(op_type: str, inputs: list[Any], *, opset: int, outputs: int = 1, **attributes: Any) -> None:
        while inputs[-1] is None:
            inputs = inputs[:-1]
        path = save_one_node(
            tmp_path / "node.onnx", op_type, inputs, outputs=outputs, opset=opset, **attributes
        )
        feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
        names = [f"y{i}" for i in range(outputs)]
        expected = ReferenceEvaluator(onnx.load(path)).run(names, feeds)
        for precision in ("float32", "float64"):
            got = OracleModel.load(path, precision=precision).run(feeds, names)
            for name, want in zip(names, expected, strict=True):
                assert got[name].shape == want.shape, name
                scale = float(np.abs(want).max(initial=1e-30))
                assert float(np.abs(got[name] - want).max(initial=0.0)) <= 1e-5 * scale, name

    return run


RULES = ("linear", "gated", "delta", "gated_delta")
LINEAR = [
    (rule, heads, by_key, past)
    for rule, heads, by_key, past in itertools.product(RULES, ((2, 2), (4, 2)), (False, True), (False, True))
    if "gated" in rule or not by_key
]


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize(("rule", "heads", "by_key", "past"), LINEAR)
def test_linear_attention(
    rule: str,
    heads: tuple[int, int],
    by_key: bool,
    past: bool,
    count: int,
    against_reference: Callable[..., None],
    seeded: np.random.RandomState,
) -> None:
    """Opset 27: every rule, shared heads, both shapes of decay, with and without a state."""
    (query_heads, kv_heads), batch, width, value_width = heads, 2, 8, 6
    inputs = [
        floats(seeded, batch, count, query_heads * width),
        floats(seeded, batch, count, kv_heads * width) * np.float32(0.3),
        floats(seeded, batch, count, kv_heads * value_width),
        floats(seeded, batch, kv_heads, width, value_width) if past else None,
        -np.abs(floats(seeded, batch, count, kv_heads * (width if by_key else 1)))
        if "gated" in rule
        else None,
        1 / (1 + np.exp(-floats(seeded, batch, count, kv_heads))) if "delta" in rule else None,
    ]
    against_reference(
        "LinearAttention",
        inputs,
        opset=27,
        outputs=2,
        q_num_heads=query_heads,
        kv_num_heads=kv_heads,
        update_rule=rule,
        scale=0.4 if past else 0.0,
    )


CONV = list(itertools.product(("none", "silu", "swish"), (False, True), (False, True), (1, 2, 7)))


@pytest.mark.parametrize(("activation", "bias", "past", "count"), CONV)
def test_causal_conv_with_state(
    activation: str,
    bias: bool,
    past: bool,
    count: int,
    against_reference: Callable[..., None],
    seeded: np.random.RandomState,
) -> None:
    """Opset 27: activations, bias and state; fewer positions than taps too."""
    batch, channels, taps = 2, 5, 4
    inputs = [
        floats(seeded, batch, channels, count),
        floats(seeded, channels, 1, taps),
        floats(seeded, channels) if bias else None,
        floats(seeded, batch, channels, taps - 1) if past else None,
    ]
    against_reference("CausalConvWithState", inputs, opset=27, outputs=2, activation=activation)


WINDOWS = list(itertools.product((0, 1), (-1, 0, 2), (-1, 0, 2), (0, 4)))


@pytest.mark.parametrize(("causal", "left", "right", "past"), WINDOWS)
def test_windows_of_attention(
    causal: int,
    left: int,
    right: int,
    past: int,
    against_reference: Callable[..., None],
    seeded: np.random.RandomState,
) -> None:
    """Attention 25: windows to both sides, causal or not, with and without a past, softcap and mask."""
    batch, heads, kv_heads, width, new = 2, 4, 2, 8, 5
    q, k, v = (floats(seeded, batch, n, new, width) for n in (heads, kv_heads, kv_heads))
    mask = floats(seeded, new, past + new)
    caches = [floats(seeded, batch, kv_heads, past, width) if past else None for _ in range(2)]
    against_reference(
        "Attention",
        [q, k, v, mask, *caches],
        opset=26,
        outputs=3,
        is_causal=causal,
        left_window_size=left,
        right_window_size=right,
        softcap=2.0,
    )


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("axis", [1, 2, -2])
def test_tensor_scatter(
    mode: str, axis: int, against_reference: Callable[..., None], seeded: np.random.RandomState
) -> None:
    """Rows written at each batch entry's own index, around the end where that is asked for."""
    cache, update = floats(seeded, 2, 6, 6, 4), floats(seeded, 2, 6, 6, 4)
    update = np.take(update, range(3), axis=axis)
    indices = np.array([1, 5 if mode == "circular" else 3])
    against_reference("TensorScatter", [cache, update, indices], opset=24, axis=axis, mode=mode)
