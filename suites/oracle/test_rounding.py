"""Rounding to declared types: what the declared precision implies, value by value."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from fixtures.decoders import save_graph
from harness.errors import InputError
from harness.oracle import OracleModel
from harness.oracle.rounding import int8_activations, narrowed

HALF = TensorProto.FLOAT16


def floats(random: np.random.RandomState, *shape: int) -> np.ndarray:
    """Standard normal numbers in fp32."""
    return random.standard_normal(shape).astype(np.float32)


def port(name: str, elem_type: int = HALF, shape: Any = None) -> onnx.ValueInfoProto:
    """A tensor port."""
    return helper.make_tensor_value_info(name, elem_type, shape)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """(x + w) * w in half precision, with w = 1/3 from a Cast of a float32 constant."""
    return save_graph(
        tmp_path / "model.onnx",
        [
            helper.make_node("Cast", ["third"], ["w"], to=HALF),
            helper.make_node("Add", ["x", "w"], ["sum"]),
            helper.make_node("Mul", ["sum", "w"], ["y"]),
        ],
        [port("x", shape=["n"])],
        [port("sum", shape=["n"]), port("y", shape=["n"])],
        {"third": np.array([1 / 3], np.float32)},
    )


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_every_value_is_rounded_as_it_passes_to_the_next_node(precision: Any, chain: Path) -> None:
    """In half precision each sum and product of two halves is the exact one rounded, as numpy gives it."""
    x = np.linspace(-3, 3, 101).astype(np.float16)
    third = np.float16(np.float32(1 / 3))
    results = OracleModel.load(chain, precision=precision, rounding="model").run({"x": x}, ["sum", "y"])
    np.testing.assert_array_equal(results["sum"], (x + third).astype(precision))
    np.testing.assert_array_equal(results["y"], ((x + third) * third).astype(precision))
    assert results["y"].dtype == precision
    unrounded = OracleModel.load(chain, precision=precision).run({"x": x}, ["y"])["y"]
    wide = np.asarray(x, precision)
    third = np.asarray(np.float32(1 / 3), precision)
    np.testing.assert_allclose(unrounded, (wide + third) * third, rtol=1e-6)
    assert not np.array_equal(unrounded, results["y"])


def test_a_feed_in_the_oracles_precision_is_rounded_to_the_port(chain: Path) -> None:
    """States go back in as they came out, wide; a number that no half holds is rounded first."""
    model = OracleModel.load(chain, rounding="model")
    fine, coarse = np.array([1 + 2.0**-12], np.float32), np.array([1.0], np.float16)
    for name, y in model.run({"x": fine}, ["sum", "y"]).items():
        np.testing.assert_array_equal(y, model.run({"x": coarse}, [name])[name])


def test_float32_graphs_are_rounded_where_the_oracle_computes_in_float64(tmp_path: Path) -> None:
    """The declared type of a float32 graph is float32: its sums lose what only float64 holds."""
    path = save_graph(
        tmp_path / "model.onnx",
        [helper.make_node("Add", ["x", "x"], ["twice"]), helper.make_node("Sub", ["twice", "big"], ["y"])],
        [port("x", TensorProto.FLOAT, [1])],
        [port("twice", TensorProto.FLOAT, [1]), port("y", TensorProto.FLOAT, [1])],
        {"big": np.array([2.0**-30], np.float32)},
    )
    x = {"x": np.array([0.5], np.float32)}
    assert OracleModel.load(path, precision="float64").run(x, ["y"])["y"][0] == 1 - 2.0**-30
    assert OracleModel.load(path, precision="float64", rounding="model").run(x, ["y"])["y"][0] == 1


def scan_graph(path: Path) -> Path:
    """A running sum in half precision over the rows of x; its body adds a constant captured from outside."""
    body = helper.make_graph(
        [
            helper.make_node("Add", ["total", "row"], ["plain"]),
            helper.make_node("Add", ["plain", "shift"], ["next"]),
            helper.make_node("Identity", ["next"], ["seen"]),
        ],
        "body",
        [port("total", shape=[3]), port("row", shape=[3])],
        [port("next", shape=[3]), port("seen", shape=[3])],
    )
    return save_graph(
        path,
        [helper.make_node("Scan", ["start", "x"], ["last", "all"], body=body, num_scan_inputs=1)],
        [port("x", shape=["n", 3])],
        [port("last", shape=[3]), port("all", shape=["n", 3])],
        {"start": np.zeros(3, np.float16), "shift": np.full(3, 0.1, np.float16)},
    )


def test_states_in_subgraphs_are_rounded_at_every_step(tmp_path: Path, seeded: np.random.RandomState) -> None:
    """A sum in a Scan in half precision equals numpy's, step by step; without steps it keeps its type."""
    model = OracleModel.load(scan_graph(tmp_path / "model.onnx"), rounding="model")
    x = floats(seeded, 50, 3).astype(np.float16)
    total, seen = np.zeros(3, np.float16), []
    for row in x:
        total = total + row + np.float16(0.1)
        seen.append(total)
    results = model.run({"x": x}, ["last", "all"])
    np.testing.assert_array_equal(results["all"], np.array(seen, np.float32))
    np.testing.assert_array_equal(results["last"], total.astype(np.float32))
    assert model.run({"x": x[:0]}, ["all"])["all"].shape == (0, 3)


def test_values_inside_inlined_functions_are_rounded_too(tmp_path: Path) -> None:
    """A function whose body adds and multiplies rounds between them; types come from its call."""
    path = save_graph(
        tmp_path / "model.onnx",
        [helper.make_node("AddMul", ["x", "w"], ["y"], domain="local")],
        [port("x", shape=["n"])],
        [port("y", shape=["n"])],
        {"w": np.array([1 / 3], np.float16)},
    )
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("local", 1))
    opset = [entry for entry in model.opset_import if entry.domain == ""]
    nodes = [helper.make_node("Add", ["a", "b"], ["c"]), helper.make_node("Mul", ["c", "b"], ["d"])]
    model.functions.append(helper.make_function("local", "AddMul", ["a", "b"], ["d"], nodes, opset))
    onnx.save(model, path)
    x = np.linspace(-3, 3, 101).astype(np.float16)
    y = OracleModel.load(path, rounding="model").run({"x": x}, ["y"])["y"]
    third = np.float16(1 / 3)
    np.testing.assert_array_equal(y, ((x + third) * third).astype(np.float32))


def halves(random: np.random.RandomState, *shape: int) -> np.ndarray:
    """Standard normal numbers in half precision."""
    return floats(random, *shape).astype(np.float16)


HALF_OUT, FLOAT_OUT = np.dtype(np.float16), np.dtype(np.float32)
MIXED: dict[str, tuple[str, Callable[[Any], list[Any]], dict[str, Any], list[np.dtype[Any]]]] = {
    "a state of its own type": (
        "LinearAttention",
        lambda r: (
            [halves(r, 1, 3, 8)] * 3 + [floats(r, 1, 2, 4, 4), -abs(halves(r, 1, 3, 2)), halves(r, 1, 3, 2)]
        ),
        {"q_num_heads": 2, "kv_num_heads": 2},
        [HALF_OUT, FLOAT_OUT],
    ),
    "no state, so of the query's type": (
        "LinearAttention",
        lambda r: [halves(r, 1, 3, 8)] * 3 + [None, -abs(halves(r, 1, 3, 2)), halves(r, 1, 3, 2)],
        {"q_num_heads": 2, "kv_num_heads": 2},
        [HALF_OUT, HALF_OUT],
    ),
    "a state that is always float": (
        "GatedDeltaNet",
        lambda r: [halves(r, 1, 3, 2, 4)] * 3 + [None, -abs(floats(r, 1, 3, 2)), floats(r, 1, 3, 2)],
        {},
        [HALF_OUT, FLOAT_OUT],
    ),
    "gates of halves by floats": (
        "LinearAttentionGate",
        lambda r: [halves(r, 1, 3, 4), floats(r, 4), floats(r, 4), halves(r, 1, 3, 4)],
        {},
        [HALF_OUT, HALF_OUT],
    ),
    "the type of the scale": (
        "GatherBlockQuantized",
        lambda r: [r.randint(0, 256, (4, 16)).astype(np.uint8), np.array([1, 3]), abs(halves(r, 4, 1))],
        {"bits": 8, "block_size": 16},
        [HALF_OUT],
    ),
    "the type of the table": (
        "EmbedLayerNormalization",
        lambda r: (
            [np.ones((1, 3), np.int32), None, *(halves(r, 5, 8) for _ in range(2)), None] + [halves(r, 8)] * 2
        ),
        {},
        [HALF_OUT],
    ),
    "norm of halves by a float": (
        "SimplifiedLayerNormalization",
        lambda r: [halves(r, 3, 8), floats(r, 8)],
        {"domain": ""},
        [FLOAT_OUT],
    ),
    "norm of floats by a half": (
        "SimplifiedLayerNormalization",
        lambda r: [floats(r, 3, 8), halves(r, 8)],
        {"domain": ""},
        [HALF_OUT],
    ),
}


@pytest.mark.parametrize(("op_type", "inputs", "attributes", "expected"), MIXED.values(), ids=MIXED)
def test_outputs_have_the_types_that_onnx_runtime_declares(
    op_type: str,
    inputs: Callable[[Any], list[Any]],
    attributes: dict[str, Any],
    expected: list[np.dtype[Any]],
    tmp_path: Path,
    save_one_node: Callable[..., Path],
    seeded: np.random.RandomState,
) -> None:
    """A half is rounded to one, a float keeps what no half holds, whatever the first input's type is."""
    given = inputs(seeded)
    options = {"domain": "com.microsoft"} | attributes
    path = save_one_node(tmp_path / "m.onnx", op_type, given, outputs=len(expected), opset=22, **options)
    feeds = {f"x{i}": x for i, x in enumerate(given) if x is not None}
    names = [f"y{i}" for i in range(len(expected))]
    results = OracleModel.load(path, rounding="model").run(feeds, names)
    for name, dtype in zip(names, expected, strict=True):
        as_half = results[name].astype(np.float16).astype(np.float32)
        assert np.array_equal(as_half, results[name]) == (dtype == HALF_OUT), name


def test_a_function_knows_the_types_of_what_it_is_called_with(tmp_path: Path) -> None:
    """A zero point that is fed says, through the call, to which narrow float the function quantises."""
    eight = TensorProto.FLOAT8E5M2
    path = save_graph(
        tmp_path / "model.onnx",
        [helper.make_node("Narrow", ["x", "zero"], ["y"], domain="local")],
        [port("x", TensorProto.FLOAT, ["n"]), port("zero", eight, [])],
        [port("y", eight, ["n"])],
        {},
    )
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("local", 1))
    nodes = [
        helper.make_node("Constant", [], ["one"], value_float=1.0),
        helper.make_node("QuantizeLinear", ["a", "one", "b"], ["c"]),
    ]
    opset = [entry for entry in model.opset_import if entry.domain == ""]
    model.functions.append(helper.make_function("local", "Narrow", ["a", "b"], ["c"], nodes, opset))
    onnx.save(model, path)
    x = np.array([0.3, 1.1, 70000.0], np.float32)
    want = np.clip(x, None, 57344).astype(ml_dtypes.float8_e5m2).astype(np.float32)
    feeds = {"x": x, "zero": np.zeros((), ml_dtypes.float8_e5m2)}
    for rounding in ("none", "model"):
        y = OracleModel.load(path, rounding=rounding).run(feeds, ["y"])["y"]
        np.testing.assert_array_equal(y, want)


# --- int8 activations


# ONNX Runtime has no float zero points at 8 bits.
CODES = [(bits, zero) for bits in (2, 4, 8) for zero in ("none", "packed", "float")]
CODES.remove((8, "float"))


@pytest.mark.parametrize(("bits", "zero"), CODES)
@pytest.mark.parametrize("block", [32, 64])
def test_level_4_is_what_onnx_runtime_computes(
    bits: int,
    block: int,
    zero: str,
    tmp_path: Path,
    save_one_node: Callable[..., Path],
    seeded: np.random.RandomState,
) -> None:
    """Int8 activations per block: ONNX Runtime's result to 2e-6, from which fp32 is a thousand times farther.

    With zero points that are floats ONNX Runtime computes in fp32 whatever the level, and so does the oracle.
    """
    k, n = 80, 24
    blocks = -(-k // block)
    x = floats(seeded, 3, k)
    inputs: list[Any] = [x, seeded.randint(0, 256, (n, blocks, block * bits // 8)).astype(np.uint8)]
    inputs.append(np.abs(floats(seeded, n, blocks)) + np.float32(0.1))
    if zero == "packed":
        inputs.append(seeded.randint(0, 256, (n, -(-blocks * bits // 8))).astype(np.uint8))
    if zero == "float":
        inputs.append((seeded.random_sample((n, blocks)) * 2**bits).astype(np.float32))
    path = save_one_node(
        tmp_path / "m.onnx",
        "MatMulNBits",
        inputs,
        domain="com.microsoft",
        opset=22,
        constants=tuple(range(1, len(inputs))),
        bits=bits,
        block_size=block,
        N=n,
        K=k,
        accuracy_level=4,
    )
    (want,) = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x0": x})

    def error(rounding: Any) -> float:
        y = OracleModel.load(path, rounding=rounding).run({"x0": x}, ["y0"])["y0"]
        return float(np.abs(y - want).max() / np.abs(want).max())

    assert error("model") < 2e-6
    assert error("none") < 2e-6 if zero == "float" else error("none") > 1e-3


def test_with_groups_in_another_order_no_activation_is_rounded(
    tmp_path: Path, save_one_node: Callable[..., Path], seeded: np.random.RandomState
) -> None:
    """With g_idx there are no blocks along the activations: ONNX Runtime computes in fp32 at level 4 too."""
    k, n, block = 64, 24, 32
    x = floats(seeded, 3, k)
    inputs = [x, seeded.randint(0, 256, (n, 2, 16)).astype(np.uint8), np.abs(floats(seeded, n, 2))]
    inputs += [None, seeded.permutation(np.arange(k) // block).astype(np.int32)]
    path = save_one_node(
        tmp_path / "m.onnx",
        "MatMulNBits",
        inputs,
        domain="com.microsoft",
        opset=22,
        constants=(1, 2, 4),
        bits=4,
        block_size=block,
        N=n,
        K=k,
        accuracy_level=4,
    )
    (want,) = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x0": x})
    y = OracleModel.load(path, rounding="model").run({"x0": x}, ["y0"])["y0"]
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=70), st.sampled_from([16, 32]))
def test_activations_are_multiples_of_their_blocks_scale(values: list[float], block: int) -> None:
    """Each is within half a scale of what it was, the largest stays, and zeros stay zeros."""
    x = np.array([values], np.float64)
    y = int8_activations(x, block)
    assert y.shape == x.shape
    for start in range(0, x.shape[1], block):
        before, after = x[0, start : start + block], y[0, start : start + block]
        scale = np.abs(before).max() / 127
        assert np.abs(after - before).max() <= scale * 0.5000001
        assert np.abs(after).max() == pytest.approx(np.abs(before).max())
        if scale:
            np.testing.assert_allclose(after / scale, np.rint(after / scale), atol=1e-9)


# --- casts to narrow floats


@given(st.floats(width=32))
def test_narrow_floats_saturate_or_do_not(value: float) -> None:
    """Beyond the largest e4m3fn: that one, or NaN; beyond the largest e5m2: that one, or infinity."""
    for dtype, overflow in ((ml_dtypes.float8_e4m3fn, math.nan), (ml_dtypes.float8_e5m2, math.inf)):
        top = float(ml_dtypes.finfo(dtype).max)
        kept = float(narrowed(np.array(value), np.dtype(dtype)))
        free = float(narrowed(np.array(value), np.dtype(dtype), saturate=False))
        if math.isnan(value):
            assert math.isnan(kept)
            assert math.isnan(free)
        elif abs(value) <= top:
            assert kept == free
            assert abs(kept - value) <= max(abs(value) / 8, 2.0**-10)
        else:
            assert kept == math.copysign(top, value)
            half_step = top * 2.0**-3
            if abs(value) > top + half_step:
                assert free == math.copysign(overflow, value) or (math.isnan(free) and math.isnan(overflow))


@given(st.floats(2.0**-126, 2.0**126, width=32))
def test_scales_of_powers_of_two_round_as_asked(value: float) -> None:
    """E8M0: the power of two not below, not above, or nearest in the mantissa."""
    dtype = np.dtype(ml_dtypes.float8_e8m0fnu)
    up, down, nearest = (
        float(narrowed(np.array(value), dtype, mode=mode)) for mode in ("up", "down", "nearest")
    )
    assert down <= value <= up <= 2 * down
    assert nearest == (up if value >= 1.5 * down else down)
    assert math.isnan(float(narrowed(np.array(0.0), dtype, saturate=False)))
    assert math.isnan(float(narrowed(np.array(math.inf), dtype, saturate=False)))


# --- a model in half precision


@pytest.fixture
def half_block(tmp_path: Path, seeded: np.random.RandomState) -> Path:
    """A gated feed-forward block with norm and residual in half precision, twice."""
    width, inner = 64, 128
    nodes, weights, x = [], {}, "x"
    for layer in range(2):
        shapes = {"norm": (width,), "gate": (width, inner), "up": (width, inner), "down": (inner, width)}
        for name, shape in shapes.items():
            scale = 1 if name == "norm" else shape[0] ** -0.5
            weights[f"{name}{layer}"] = (floats(seeded, *shape) * scale).astype(np.float16)
        n = [f"{name}_{layer}" for name in ("normed", "g", "s", "silu", "u", "h", "d", "sum")]
        nodes += [
            helper.make_node("LayerNormalization", [x, f"norm{layer}"], [n[0]]),
            helper.make_node("MatMul", [n[0], f"gate{layer}"], [n[1]]),
            helper.make_node("Sigmoid", [n[1]], [n[2]]),
            helper.make_node("Mul", [n[1], n[2]], [n[3]]),
            helper.make_node("MatMul", [n[0], f"up{layer}"], [n[4]]),
            helper.make_node("Mul", [n[3], n[4]], [n[5]]),
            helper.make_node("MatMul", [n[5], f"down{layer}"], [n[6]]),
            helper.make_node("Add", [x, n[6]], [n[7]]),
        ]
        x = n[7]
    return save_graph(
        tmp_path / "model.onnx",
        nodes,
        [port("x", shape=["n", width])],
        [port(x, shape=["n", width])],
        weights,
    )


def on_ort(path: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The only output of a graph on ONNX Runtime, without optimisation."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def test_node_by_node_an_engine_in_half_precision_gives_the_rounded_values(
    half_block: Path, tmp_path: Path, seeded: np.random.RandomState
) -> None:
    """Each node alone, on the oracle's own inputs: the same half but where a sum lies beside a tie.

    The whole graph is no such comparison, as ONNX Runtime keeps float32 from one node to the next.
    """
    model = onnx.load(half_block)
    names = [output for node in model.graph.node for output in node.output]
    for name in names[:-1]:
        model.graph.output.append(port(name))
    onnx.save(model, half_block)
    x = floats(seeded, 20, 64).astype(np.float16)
    values = OracleModel.load(half_block, rounding="model").run({"x": x}, names)
    free = OracleModel.load(half_block).run({"x": x}, names)
    values = {"x": x} | {name: y.astype(np.float16) for name, y in values.items()}
    values |= {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    equal: list[np.ndarray] = []
    for node in model.graph.node:
        inputs = [port(name, shape=list(values[name].shape)) for name in node.input]
        path = save_graph(tmp_path / "node.onnx", [node], inputs, [port(node.output[0])])
        want = on_ort(path, {name: values[name] for name in node.input})
        got = values[node.output[0]]
        np.testing.assert_allclose(
            got.astype(np.float64), want.astype(np.float64), rtol=2.0**-10, atol=2.0**-11
        )
        equal.append((got == want).ravel())
    assert np.concatenate(equal).mean() > 0.99
    assert (free[names[-1]] == values[names[-1]]).mean() < 0.1


@pytest.mark.parametrize("rounding", ["none", "model"])
def test_a_graph_in_half_precision_is_close_to_an_engine(
    rounding: Any, half_block: Path, seeded: np.random.RandomState
) -> None:
    """Whichever way it rounds, the oracle is within three units of the last place of the largest output."""
    x = floats(seeded, 20, 64).astype(np.float16)
    want = on_ort(half_block, {"x": x}).astype(np.float64)
    model = OracleModel.load(half_block, rounding=rounding)
    y = model.run({"x": x}, [model.outputs[0].name])[model.outputs[0].name]
    assert np.abs(y - want).max() < 3 * 2.0**-11 * np.abs(want).max()


def test_an_unknown_rounding_is_refused(chain: Path) -> None:
    """Only `none` and `model` exist."""
    with pytest.raises(InputError, match="rounding=half is not a rounding"):
        OracleModel.load(chain, rounding="half")  # type: ignore[arg-type]
