"""Weights of a few bits: every layout against its formula, kept, streamed, in numpy and in vector code."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from harness.errors import EngineFailedError
from harness.oracle import OracleModel
from harness.oracle.kernels import quantised
from harness.oracle.kernels.quantised import BlockwiseMatrix
from harness.oracle.precision import Precision

CASES = st.fixed_dictionaries(
    {
        "bits": st.sampled_from([2, 4, 8]),
        "block": st.sampled_from([4, 12, 16, 32, 64, 128]),
        "depth": st.integers(1, 150),
        "rows": st.integers(1, 70),
        "zeros": st.sampled_from(["none", "packed", "float"]),
        "grouped": st.booleans(),
        "dtype": st.sampled_from([np.float32, np.float16]),
        "seed": st.integers(0, 999),
    }
)


def drawn(
    *, bits: int, block: int, depth: int, rows: int, zeros: str, grouped: bool, dtype: Any, seed: int
) -> dict[str, Any]:
    """Inputs B, scales, zero points and g_idx of a MatMulNBits node, and the weight that they stand for.

    The weight [N, K] float64 is worked out code by code from the operator's description.
    """
    rng = np.random.default_rng(seed)
    blocks = -(-depth // block)
    size = block * bits // 8
    packed = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    scales = rng.uniform(0.5, 2, (rows, blocks)).astype(dtype)
    points = None
    meant = np.full((rows, blocks), float(2 ** (bits - 1)))
    if zeros == "packed":
        points = rng.integers(0, 256, (rows, -(-blocks * bits // 8)), dtype=np.uint8)
        spread = np.unpackbits(points, axis=1, bitorder="little").reshape(rows, -1, bits)
        meant = (spread[:, :blocks] * 2.0 ** np.arange(bits)).sum(-1)
    elif zeros == "float":
        points = rng.uniform(0, 2**bits, (rows, blocks)).astype(dtype)
        meant = points.astype(np.float64)
    groups = rng.integers(0, blocks, depth).astype(np.int32) if grouped else None
    group = np.arange(depth) // block if groups is None else groups
    codes = np.unpackbits(packed.reshape(rows, -1), axis=1, bitorder="little").reshape(rows, -1, bits)
    codes = (codes[:, :depth] * 2.0 ** np.arange(bits)).sum(-1)
    weight = (codes - meant[:, group]) * scales.astype(np.float64)[:, group]
    return {"packed": packed, "scales": scales, "zeros": points, "groups": groups, "weight": weight}


def saved(path: Path, inputs: list[Any], **attributes: int) -> Path:
    """One MatMulNBits node, all but A initialisers."""
    names = ["a", "b", "scales", "zeros", "groups", "bias"]
    given_names = [name if x is not None else "" for name, x in zip(names, inputs, strict=False)]
    node = helper.make_node(
        "MatMulNBits", given_names, ["y"], name="the_node", domain="com.microsoft", **attributes
    )
    elem = helper.np_dtype_to_tensor_dtype(inputs[0].dtype)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("a", elem, [None] * inputs[0].ndim)],
        [helper.make_tensor_value_info("y", elem, None)],
        [
            numpy_helper.from_array(x, name)
            for name, x in zip(names[1:], inputs[1:], strict=False)
            if x is not None
        ],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


@settings(deadline=None)
@given(case=CASES, tokens=st.integers(1, 3), resident=st.sampled_from([0, 1 << 20]))
def test_every_layout_is_its_formula(
    case: dict[str, Any], tokens: int, resident: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A W^T + bias with W code by code, whatever bits, block, zero points and groups; within 1e-12 in fp64.

    The bound is a thousand times the rounding of sums of at most 150 products below 1e3 in float64.
    """
    parts = drawn(**case)
    rng = np.random.default_rng(case["seed"])
    a = rng.standard_normal((tokens, case["depth"])).astype(case["dtype"])
    bias = rng.standard_normal(case["rows"]).astype(case["dtype"])
    path = saved(
        tmp_path_factory.mktemp("q") / "m.onnx",
        [a, parts["packed"], parts["scales"], parts["zeros"], parts["groups"], bias],
        bits=case["bits"],
        block_size=case["block"],
        N=case["rows"],
        K=case["depth"],
    )
    y = OracleModel.load(path, precision="float64", resident_limit=resident).run({"a": a}, ["y"])["y"]
    expected = a.astype(np.float64) @ parts["weight"].T + bias
    scale = np.abs(a).astype(np.float64) @ np.abs(parts["weight"]).T + 1
    assert (np.abs(y - expected) <= 1e-12 * scale).all()


@settings(deadline=None)
@given(case=CASES, precision=st.sampled_from(["float32", "float64"]))
def test_vector_code_is_numpy_to_the_bit(case: dict[str, Any], precision: Any) -> None:
    """Both unpack the same bits: the extra `fast` changes no result."""
    pytest.importorskip("numba", reason="install onnx-parity[fast] to compare the vector code")
    parts = drawn(**{**case, "grouped": False})
    matrix = BlockwiseMatrix(
        packed=parts["packed"],
        scales=parts["scales"],
        zeros=parts["zeros"],
        groups=None,
        depth=case["depth"],
        bits=case["bits"],
        precision=Precision(precision),
    )
    assert quantised.vector_unpacker(case["bits"]) is not None
    # A copy, as the next tile goes to the same memory.
    fast = matrix._unpack(0, case["rows"], matrix.scratch(case["rows"], 1)).copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised, "vector_unpacker", lambda bits: None)
        plain = matrix._unpack(0, case["rows"], matrix.scratch(case["rows"], 1))
    np.testing.assert_array_equal(fast.view(np.uint8), plain.view(np.uint8))


@settings(deadline=None)
@given(case=CASES)
def test_filled_rows_are_the_weight(case: dict[str, Any]) -> None:
    """What is kept is the weight in the order of K, to the last bit of float64."""
    parts = drawn(**case)
    matrix = BlockwiseMatrix(
        packed=parts["packed"],
        scales=parts["scales"],
        zeros=parts["zeros"],
        groups=parts["groups"],
        depth=case["depth"],
        bits=case["bits"],
        precision=Precision("float64"),
    )
    whole = np.empty((case["rows"], case["depth"]))
    matrix.fill(0, case["rows"], whole)
    np.testing.assert_array_equal(whole, parts["weight"])


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", ["none", "packed"])
def test_onnxruntime_reads_the_same_weights(bits: int, zeros: str, tmp_path: Path) -> None:
    """The CPU provider, in fp32, multiplies with the weights that the formula gives: within 1e-5."""
    sizes = {"bits": bits, "block": 32, "depth": 96, "rows": 40}
    parts = drawn(**sizes, zeros=zeros, grouped=False, dtype=np.float32, seed=3)
    a = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    path = saved(
        tmp_path / "m.onnx",
        [a, parts["packed"], parts["scales"], parts["zeros"]],
        bits=bits,
        block_size=32,
        N=40,
        K=96,
        accuracy_level=1,
    )
    theirs = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"a": a})[0]
    ours = OracleModel.load(path).run({"a": a}, ["y"])["y"]
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


def test_a_weight_beyond_the_limit_is_never_whole(tmp_path: Path) -> None:
    """A product with 4 M weights, 16 MB in fp32, takes two workers' tiles of 64 rows and little more."""
    rows, depth = 4096, 1024
    parts = drawn(
        bits=4, block=32, depth=depth, rows=rows, zeros="none", grouped=False, dtype=np.float32, seed=1
    )
    a = np.ones((8, depth), np.float32)
    path = saved(
        tmp_path / "m.onnx", [a, parts["packed"], parts["scales"]], bits=4, block_size=32, N=rows, K=depth
    )
    model = OracleModel.load(path, resident_limit=rows * depth * 4 - 1, threads=2)
    model.run({"a": a}, ["y"])
    tracemalloc.start()
    y = model.run({"a": a}, ["y"])["y"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_allclose(y, (a @ parts["weight"].T), rtol=1e-3, atol=1e-2)
    tile = 64 * depth * 4
    # For each worker a tile, its scales spread over half of it, and codes of a byte; x and y twice.
    assert peak < 2 * 2 * tile + 2 * (a.nbytes + y.nbytes) + (1 << 18) < rows * depth * 4 / 2


def test_weights_of_another_size_fail_by_name(tmp_path: Path) -> None:
    """A graph whose initialiser does not fit N and K is a failure of that node, when it runs."""
    a = np.ones((1, 64), np.float32)
    path = saved(
        tmp_path / "m.onnx",
        [a, np.zeros((3, 2, 16), np.uint8), np.ones((3, 2), np.float32)],
        bits=4,
        block_size=32,
        N=4,
        K=64,
    )
    with pytest.raises(EngineFailedError, match="MatMulNBits the_node"):
        OracleModel.load(path).run({"a": a}, ["y"])
