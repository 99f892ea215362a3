"""Products with weights behind DequantizeLinear: every type and layout of scales, streamed or kept."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from harness.oracle import OracleModel, matrix
from harness.oracle.matrix import Projection

CODES = {
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
    "int8": np.int8,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float4_e2m1fn": ml_dtypes.float4_e2m1fn,
}
SCALES = ["one", "axis 0", "axis 1", "blocks on 0", "blocks on 1"]
BLOCK = 32


def coded(
    path: Path,
    codes: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray | None,
    *,
    form: str = "MatMul",
    external: bool = False,
    **attributes: int,
) -> Path:
    """A graph of x W with W [K, N] behind DequantizeLinear; `form` says how W gets to the product."""
    weights = {"codes": codes, "scale": scale} | ({} if zero is None else {"zero": zero})
    nodes = [helper.make_node("DequantizeLinear", list(weights), ["w"], **attributes)]
    if form == "turned MatMul":
        nodes.append(helper.make_node("Transpose", ["w"], ["b"], perm=[1, 0]))
        nodes.append(helper.make_node("MatMul", ["x", "b"], ["y"], name="product"))
    elif form == "MatMul":
        nodes.append(helper.make_node("MatMul", ["x", "w"], ["y"], name="product"))
    else:
        turned = int(form == "turned Gemm")
        nodes.append(helper.make_node("Gemm", ["x", "w"], ["y"], name="product", transB=turned, alpha=0.5))
    depth = codes.shape[1 if form.startswith("turned") else 0]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", depth])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=12)
    onnx.save(model, path, save_as_external_data=external, size_threshold=4096, location="weights.bin")
    return path


def case(dtype: str, scales: str, shape: tuple[int, int], *, zeros: bool) -> dict[str, Any]:
    """Random codes with scales that change as `scales` says, and zero points where `zeros`."""
    rng = np.random.default_rng(len(dtype) * 7 + SCALES.index(scales))
    if "float" in dtype:
        codes = rng.standard_normal(shape).astype(CODES[dtype])
    else:
        info = ml_dtypes.iinfo(np.dtype(CODES[dtype]))
        codes = rng.integers(info.min, info.max + 1, shape).astype(CODES[dtype])
    kind, _, axis = scales.partition(" ")
    extents = list(shape)
    place = int(scales[-1]) if axis else 0
    extents[place] = -(-extents[place] // BLOCK)
    some = {"one": (), "axis": (shape[place],), "blocks": tuple(extents)}[kind]
    attributes = {} if kind == "one" else {"axis": place}
    if kind == "blocks":
        attributes["block_size"] = BLOCK
    zero = None
    if zeros:
        zero = rng.integers(0, 7, some).astype(CODES[dtype])
    scale = np.asarray(rng.uniform(0.5, 1.5, some), np.float32)
    return {"codes": codes, "scale": scale, "zero": zero, **attributes}


@pytest.mark.parametrize("zeros", [False, True], ids=["no zeros", "zeros"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", CODES)
def test_streamed_and_kept_weights_are_those_of_the_operator(
    dtype: str, scales: str, zeros: bool, tmp_path: Path
) -> None:
    """A unit vector a token gives the weight itself: to the bit what the operator's description makes of it.

    Of more than one tile and chunk; 310 and 1,101 are no multiples of a block, 1,101 not of a byte of codes.
    """
    if zeros and "float" in dtype:
        zeros = False
    for shape in ((310, 1100), (1101, 310), (310, 1101)):
        given = case(dtype, scales, shape, zeros=zeros)
        path = coded(tmp_path / "m.onnx", **given)
        reference = coded_reference(given)
        for limit in (0, 1 << 30):
            model = OracleModel.load(path, resident_limit=limit)
            assert isinstance(model._body.steps[-1].compute, Projection)
            assert len(model._body.steps) == 1
            got = model.run({"x": np.eye(shape[0], dtype=np.float32)[::29]}, ["y"])["y"]
            np.testing.assert_array_equal(got, reference[::29])


def coded_reference(given: dict[str, Any], dtype: Any = np.float32) -> np.ndarray:
    """What DequantizeLinear's description says: (x - zero) scale, each rounded once to `dtype`."""
    codes, scale, zero = given["codes"], given["scale"], given["zero"]
    wide = codes.astype(dtype)

    def spread(values: np.ndarray) -> np.ndarray:
        if values.ndim == 0:
            return values
        axis = given["axis"]
        if "block_size" in given:
            return np.repeat(values, BLOCK, axis=axis).take(range(codes.shape[axis]), axis=axis)
        return values[:, None] if axis == 0 else values

    if zero is not None:
        wide = wide - spread(zero.astype(dtype))
    return wide * spread(scale.astype(dtype))


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("form", ["MatMul", "turned MatMul", "Gemm", "turned Gemm"])
def test_products_of_both_orders_are_exact_to_rounding_and_proven(
    form: str, precision: Any, tmp_path: Path
) -> None:
    """However the weight gets to the product, streamed or kept; the proof asks this very weight."""
    given = case("int4", "blocks on 0", (320, 1100), zeros=True)
    weight = coded_reference(given, np.float64)
    if form.startswith("turned"):
        weight = weight.T
    x = np.random.default_rng(3).standard_normal((5, weight.shape[0])).astype(np.float32)
    expected = x.astype(np.float64) @ weight * (0.5 if "Gemm" in form else 1)
    path = coded(tmp_path / "m.onnx", form=form, **given)
    bound = {"float32": 1e-5, "float64": 1e-13}[precision] * np.abs(expected).max()
    for limit in (0, 1 << 30):
        model = OracleModel.load(path, precision=precision, resident_limit=limit)
        assert np.abs(model.run({"x": x}, ["y"])["y"] - expected).max() <= bound
        proof = model.prove()
        (entry,) = proof.entries
        assert proof.passed
        assert "int4 weights through DequantizeLinear" in entry.kind


@pytest.mark.parametrize("form", ["MatMul", "turned MatMul"])
@pytest.mark.parametrize("dtype", ["int4", "int8", "float8_e4m3fn"])
def test_coded_weights_beyond_the_limit_are_never_whole(dtype: str, form: str, tmp_path: Path) -> None:
    """6 M weights, 24 MB in fp32 and 3 or 6 in the file: planning and a product take a few tiles."""
    shape = (1536, 4096)
    given = case(dtype, "blocks on 1", shape, zeros=dtype != "float8_e4m3fn")
    path = coded(tmp_path / "m.onnx", form=form, external=True, **given)
    x = np.ones((4, shape[form.startswith("turned")]), np.float32)
    OracleModel.load(path, resident_limit=0, threads=2).run({"x": x}, ["y"])
    tracemalloc.start()
    model = OracleModel.load(path, resident_limit=0, threads=2)
    planned = tracemalloc.get_traced_memory()[1]
    model.run({"x": x}, ["y"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tile = matrix._NARROW_ROWS * matrix._NARROW_DEPTH * 4
    assert planned < shape[0] * shape[1] / 2
    # A worker has the tile, its scales, zero points and codes.
    assert peak < 2 * 4 * tile + (1 << 20) < shape[0] * shape[1] * 4 / 2


def test_whoever_reads_the_weight_whole_gets_it(tmp_path: Path) -> None:
    """A weight that is also gathered from, as tied embeddings are, is what it was; so is a graph output."""
    given = case("int8", "axis 0", (310, 300), zeros=True)
    path = coded(tmp_path / "m.onnx", **given)
    model = onnx.load(path)
    model.graph.node.append(helper.make_node("Gather", ["w", "ids"], ["rows"]))
    model.graph.input.append(helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["m"]))
    model.graph.output.append(helper.make_tensor_value_info("rows", onnx.TensorProto.FLOAT, None))
    model.graph.output.append(helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, None))
    onnx.save(model, path)
    weight = coded_reference(given)
    x = np.eye(310, dtype=np.float32)
    for limit in (0, 1 << 30):
        feeds = {"x": x, "ids": np.array([3, 309])}
        got = OracleModel.load(path, resident_limit=limit).run(feeds, ["y", "rows", "w"])
        np.testing.assert_array_equal(got["y"], weight)
        np.testing.assert_array_equal(got["rows"], weight[[3, 309]])
        np.testing.assert_array_equal(got["w"], weight)
