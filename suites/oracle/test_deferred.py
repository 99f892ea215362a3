"""An output that is computed part by part says of itself what it is when it is computed whole."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from fixtures.effort import examples
from harness.oracle import DeferredOutput, OracleModel

HIDDEN, VOCAB = 4, 6
RNG = np.random.default_rng(3)
HEAD = RNG.integers(-9, 9, (HIDDEN, VOCAB)).astype(np.float32)
"""Integers, of which sums are exact in any order: parts equal the whole to the bit."""
FLOAT, DOUBLE, INTEGER = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64
DTYPES = {FLOAT: np.float32, DOUBLE: np.float64, INTEGER: np.int64}

STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["Add", "Mul", "Sub", "Div"]), st.integers(0, 4), st.booleans()),
        st.tuples(st.just("Cast"), st.sampled_from([FLOAT, DOUBLE, INTEGER]), st.just(False)),
        st.tuples(
            st.just("Reshape"), st.sampled_from([(-1, VOCAB), (1, -1, VOCAB), (1, 1, -1, VOCAB)]), st.none()
        ),
        st.tuples(st.sampled_from(["Neg", "Identity"]), st.none(), st.none()),
    ),
    max_size=5,
)
"""Steps behind the product: with a constant of some rank, before or behind it; to a type; to a shape."""


def head_with(steps: list[Any], rank: int, precision: Any, folder: str) -> OracleModel:
    """A product with these steps behind it, whose x has `rank` axes."""
    nodes = [helper.make_node("MatMul", ["x", "head"], ["v0"])]
    weights = [numpy_helper.from_array(HEAD, "head")]
    kind = FLOAT
    for index, (op_type, what, swapped) in enumerate(steps):
        names, options = [f"v{index}"], {}
        if op_type == "Cast":
            kind = options["to"] = what
        elif op_type == "Reshape":
            weights.append(numpy_helper.from_array(np.array(what, np.int64), f"c{index}"))
            names.append(f"c{index}")
        elif what is not None:
            number = np.full((1,) * what, 3, DTYPES[kind])
            weights.append(numpy_helper.from_array(number, f"c{index}"))
            names.insert(0 if swapped else 1, f"c{index}")
        nodes.append(helper.make_node(op_type, names, [f"v{index + 1}"], **options))
    graph = helper.make_graph(
        nodes,
        "head",
        [helper.make_tensor_value_info("x", FLOAT, [None] * (rank - 1) + [HIDDEN])],
        [helper.make_tensor_value_info(f"v{len(steps)}", kind, None)],
        weights,
    )
    path = Path(folder) / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return OracleModel.load(path, precision=precision)


@settings(max_examples=examples(150))
@given(steps=STEPS, rank=st.integers(1, 3), precision=st.sampled_from(["float32", "float64"]))
def test_what_waits_has_the_shape_the_type_and_the_parts_of_the_whole(
    steps: list[Any], rank: int, precision: Any
) -> None:
    """Constants with more axes than the product add theirs, and a cast behind it changes the type."""
    with TemporaryDirectory() as folder:
        model = head_with(steps, rank, precision, folder)
        name = model.outputs[0].name
        feeds = {"x": RNG.integers(-9, 9, (1, 3, HIDDEN)[3 - rank :]).astype(np.float32)}
        want = model.run(feeds, [name])[name]
        waits = model.begin(feeds, [name])[name]
        assert isinstance(waits, DeferredOutput)
        assert (waits.shape, waits.dtype) == (want.shape, want.dtype)
        whole = waits.whole()
        assert whole.dtype == want.dtype
        np.testing.assert_array_equal(whole, want)
        rows = want.reshape(-1, VOCAB)
        part = waits.columns(1, 4, [0, len(rows) - 1])
        assert part.dtype == want.dtype
        np.testing.assert_array_equal(part, rows[[0, -1], 1:4])


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_constant_with_more_axes_than_the_logits_and_a_cast(rank: int, tmp_path: Path) -> None:
    """The very case: MatMul, Mul by [[[2]]], Cast to double, of a vector, a matrix and a batch."""
    steps = [("Mul", 3, False), ("Cast", DOUBLE, False)]
    model = head_with(steps, rank, "float32", str(tmp_path))
    waits: Any = model.begin({"x": np.ones((1, 3, HIDDEN)[3 - rank :], np.float32)}, ["v2"])["v2"]
    assert isinstance(waits, DeferredOutput)
    assert (waits.shape, waits.dtype) == ((1, 1 if rank == 1 else 3, VOCAB), np.float64)
    np.testing.assert_allclose(waits.whole()[0, 0], 3 * HEAD.sum(axis=0), rtol=1e-5)
