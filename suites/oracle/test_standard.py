"""Standard operators where onnx's node tests are few: against ONNX Runtime, or against numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from harness.oracle import OracleModel


def floats(random: np.random.RandomState, *shape: int) -> np.ndarray:
    """Standard normal numbers in fp32."""
    return random.standard_normal(shape).astype(np.float32)


CONV_CASES: dict[str, dict[str, Any]] = {
    "causal depthwise": {"channels": 6, "outputs": 6, "group": 6, "pads": [3, 0]},
    "depthwise twice as wide": {"channels": 4, "outputs": 8, "group": 4},
    "grouped": {"channels": 6, "outputs": 9, "group": 3, "pads": [1, 1]},
    "dense": {"channels": 3, "outputs": 5, "pads": [1, 2]},
    "strided and dilated": {"channels": 4, "outputs": 4, "group": 2, "strides": [2], "dilations": [3]},
    "same, odd pad at the end": {
        "channels": 2,
        "outputs": 3,
        "auto_pad": "SAME_UPPER",
        "strides": [2],
        "taps": (3,),
    },
    "same, odd pad at the start": {
        "channels": 2,
        "outputs": 3,
        "auto_pad": "SAME_LOWER",
        "strides": [2],
        "taps": (3,),
    },
    "valid": {"channels": 2, "outputs": 3, "auto_pad": "VALID"},
    "two axes": {
        "channels": 4,
        "outputs": 6,
        "group": 2,
        "extents": (7, 9),
        "taps": (3, 2),
        "pads": [1, 0, 2, 1],
        "strides": [2, 1],
        "dilations": [1, 2],
    },
}


@pytest.mark.parametrize("constant", [True, False], ids=["weight", "input"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("case", CONV_CASES.values(), ids=CONV_CASES)
def test_conv(
    case: dict[str, Any],
    bias: bool,
    constant: bool,
    against_ort: Callable[..., None],
    seeded: np.random.RandomState,
) -> None:
    """Groups, strides, dilations and each way to pad, in one and two dimensions."""
    case = dict(case)
    channels, outputs = case.pop("channels"), case.pop("outputs")
    extents, taps = case.pop("extents", (12,)), case.pop("taps", (4,))
    x = floats(seeded, 2, channels, *extents)
    weight = floats(seeded, outputs, channels // case.get("group", 1), *taps)
    inputs = [x, weight] + ([floats(seeded, outputs)] if bias else [])
    constants = tuple(range(1, len(inputs))) if constant else ()
    against_ort("Conv", inputs, domain="", constants=constants, kernel_shape=list(taps), **case)


@pytest.mark.parametrize("backwards", [[0, 0], [1, 0], [0, 1]])
@pytest.mark.parametrize(("axes", "out_axis"), [([0, 0], 0), ([1, 2], 1), ([-1, -3], -1)])
def test_scan_reads_and_stacks_along_any_axis_in_both_directions(
    axes: list[int], out_axis: int, backwards: list[int], tmp_path: Path, seeded: np.random.RandomState
) -> None:
    """A running sum of products equals the same loop in numpy, for each axis and direction."""
    steps, width = 4, 3
    items = [floats(seeded, steps, width, 2) for _ in range(2)]
    body = helper.make_graph(
        [
            helper.make_node("Mul", ["a", "b"], ["product"]),
            helper.make_node("Add", ["sum", "product"], ["next"]),
            helper.make_node("Identity", ["next"], ["out"]),
        ],
        "body",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("sum", "a", "b")],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [width, 2]) for name in ("next", "out")],
    )
    scan = helper.make_node(
        "Scan",
        ["start", "x", "y"],
        ["last", "all"],
        body=body,
        num_scan_inputs=2,
        scan_input_axes=axes,
        scan_input_directions=backwards,
        scan_output_axes=[out_axis],
        scan_output_directions=[backwards[1]],
    )
    placed = [np.moveaxis(item, 0, axis) for item, axis in zip(items, axes, strict=True)]
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, list(array.shape))
        for name, array in (("start", items[0][0]), ("x", placed[0]), ("y", placed[1]))
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("last", "all")]
    path = tmp_path / "m.onnx"
    graph = helper.make_graph([scan], "g", ports, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10), path)

    start = floats(seeded, width, 2)
    results = OracleModel.load(path).run({"start": start, "x": placed[0], "y": placed[1]}, ["last", "all"])

    a, b = (item[::-1] if back else item for item, back in zip(items, backwards, strict=True))
    total, expected = start, []
    for left, right in zip(a, b, strict=True):
        total = total + left * right
        expected.append(total)
    if backwards[1]:
        expected.reverse()
    np.testing.assert_array_equal(results["last"], total)
    np.testing.assert_array_equal(results["all"], np.stack(expected, axis=out_axis))


ATTENTION_CASES: dict[str, dict[str, Any]] = {
    "first prompt": {"past": 0, "is_causal": 1},
    "chunk behind a past": {"is_causal": 1},
    "one step": {"new": 1, "is_causal": 1},
    "bool mask": {"mask": "bool"},
    "added mask and softcap": {"mask": "float", "softcap": 1.5},
    "mask shorter than the keys": {"mask": "float", "shorter": 2},
    "rank 4, other value width": {"rank": 4, "value_width": 24},
    "multi-query": {"kv_heads": 1, "is_causal": 1},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("case", ATTENTION_CASES.values(), ids=ATTENTION_CASES)
def test_attention(
    case: dict[str, Any], run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """Attention over past and new keys equals the definition, written with repeated heads in float64."""
    case = dict(case)
    batch, heads, width, past, new = 2, 4, 16, case.pop("past", 5), case.pop("new", 3)
    kv_heads, value_width = case.pop("kv_heads", 2), case.pop("value_width", 16)
    q = floats(seeded, batch, heads, new, width)
    k, past_k = (floats(seeded, batch, kv_heads, n, width) for n in (new, past))
    v, past_v = (floats(seeded, batch, kv_heads, n, value_width) for n in (new, past))
    kind, shorter = case.pop("mask", None), case.pop("shorter", 0)
    mask: np.ndarray | None = None
    if kind:
        shape = (batch, 1, new, past + new - shorter)
        mask = seeded.random_sample(shape) < 0.7 if kind == "bool" else floats(seeded, *shape)
        if kind == "bool":
            mask[0, 0, 1] = False  # a query that may look at nothing gives zeros
    rank = case.pop("rank", 3)
    given = [q, k, v] if rank == 4 else [x.swapaxes(1, 2).reshape(batch, new, -1) for x in (q, k, v)]
    if rank == 3:
        case |= {"q_num_heads": heads, "kv_num_heads": kv_heads}
    got = run_node("Attention", [*given, mask, past_k, past_v], outputs=3, precision="float64", **case)

    keys, values = np.concatenate([past_k, k], axis=2), np.concatenate([past_v, v], axis=2)
    repeat = heads // kv_heads
    scores = np.float64(q) @ np.float64(keys).repeat(repeat, axis=1).swapaxes(-1, -2)
    scores *= np.float32(case["scale"]) if "scale" in case else width**-0.5
    if "softcap" in case:
        scores = case["softcap"] * np.tanh(scores / case["softcap"])
    hidden = np.zeros((batch, 1, new, past + new), bool)
    if case.get("is_causal"):
        hidden |= np.arange(past + new) > past + np.arange(new)[:, None]
    hidden[..., past + new - shorter :] = True
    if kind == "bool":
        hidden |= ~mask
    elif kind == "float":
        scores[..., : past + new - shorter] += mask
    weights = np.where(hidden, 0, np.exp(scores))
    total = weights.sum(-1, keepdims=True)
    y = (weights / np.where(total == 0, 1, total)) @ np.float64(values).repeat(repeat, axis=1)
    if rank == 3:
        y = y.swapaxes(1, 2).reshape(batch, new, -1)
    np.testing.assert_allclose(got[0], y, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(got[1], keys)
    np.testing.assert_array_equal(got[2], values)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)], ids=str)
def test_coordinates_have_a_row_for_each_axis(
    shape: tuple[int, ...], run_node: Callable[..., list[np.ndarray]]
) -> None:
    """Of a scalar none, in which NonZero differs from numpy by specification."""
    for value in (0, 1):
        (y,) = run_node("NonZero", [np.full(shape, value, np.float32)])
        assert (y.shape, y.dtype) == ((len(shape), value * int(np.prod(shape))), np.int64)


@pytest.mark.parametrize("counts", [(2, 0, 0), (0, 2, 0), (2, 0, 3), (0, 0, 3), (0, 0, 0)])
@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("causal", [0, 1])
def test_attention_without_queries_or_keys(
    causal: int, rank: int, counts: tuple[int, int, int], run_node: Callable[..., list[np.ndarray]]
) -> None:
    """No query gives nothing; a query without any key gives zeros, as one whose keys are all masked does."""
    new, keys, past = counts
    shapes = [(1, 4, new, 8), (1, 2, keys, 8), (1, 2, keys, 6)]
    given = [np.ones(shape, np.float32) for shape in shapes]
    options: dict[str, Any] = {"is_causal": causal}
    if rank == 3:
        given = [x.swapaxes(1, 2).reshape(1, x.shape[2], x.shape[1] * x.shape[3]) for x in given]
        options |= {"q_num_heads": 4, "kv_num_heads": 2}
    caches = [np.ones((1, 2, past, width), np.float32) for width in (8, 6)]
    y, *present = run_node("Attention", [*given, None, *caches], outputs=3, **options)
    assert y.shape == ((1, 4, new, 6) if rank == 4 else (1, new, 24))
    np.testing.assert_array_equal(y, 1 if keys + past else 0)
    assert [x.shape for x in present] == [(1, 2, keys + past, width) for width in (8, 6)]


@pytest.mark.parametrize(
    ("shape", "target", "expected"),
    [
        ((2, 3, 4), (0, 0, -1), (2, 3, 4)),
        ((2, 3, 4), (0, -1), (2, 12)),
        ((2, 0, 4), (0, 0, 2, 2), (2, 0, 2, 2)),
        ((2, 0, 4), (0, 0, -1), (2, 0, 4)),
        ((2, 3, 4), (6, -1), (6, 4)),
    ],
)
@pytest.mark.parametrize("constant", [True, False])
def test_reshape_copies_extents_and_infers_one(
    shape: tuple[int, ...],
    target: tuple[int, ...],
    expected: tuple[int, ...],
    constant: bool,
    run_node: Callable[..., list[np.ndarray]],
) -> None:
    """A 0 copies the input's extent and -1 takes what is left, also where a copied extent is zero."""
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    (y,) = run_node("Reshape", [x, np.array(target)], constants=(1,) if constant else ())
    assert y.shape == expected
    np.testing.assert_array_equal(y.ravel(), x.ravel())
