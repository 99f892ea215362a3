"""Logits that nobody reads whole are never whole: the oracle's session reduces them piece by piece."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from harness.engines import oracle
from harness.engines.base import TopLogits
from harness.engines.oracle import ENGINE, OracleHandle
from harness.engines.reduce import top_logits_of
from harness.errors import EngineFailedError
from harness.oracle import DeferredOutput, OracleModel
from harness.oracle.deferred import tail_of

HIDDEN, VOCAB, POSITIONS = 32, 1000, 7

Nodes = Sequence[onnx.NodeProto]
node = helper.make_node
RNG = np.random.default_rng(5)
HEAD = RNG.standard_normal((HIDDEN, VOCAB)).astype(np.float32)
SHAPE = [node("Shape", ["x"], ["b_s"], end=2), node("Concat", ["b_s", "vocab"], ["shape"], axis=0)]

GRAPHS: dict[str, Nodes] = {
    "a product": [node("MatMul", ["x", "head"], ["logits"])],
    "a cast behind it": [
        node("MatMul", ["x", "head"], ["narrow"]),
        node("Cast", ["narrow"], ["logits"], to=TensorProto.FLOAT),
    ],
    "a soft cap behind it": [
        node("MatMul", ["x", "head"], ["raw"]),
        node("Div", ["raw", "cap"], ["scaled"]),
        node("Tanh", ["scaled"], ["bent"]),
        node("Mul", ["cap", "bent"], ["logits"]),
    ],
    "a tied head as Gemm, reshaped": [
        node("Reshape", ["x", "flat"], ["rows"]),
        node("Gemm", ["rows", "table", "bias"], ["products"], transB=1, alpha=0.5, beta=2.0),
        *SHAPE,
        node("Reshape", ["products", "shape"], ["logits"]),
    ],
    "four bits": [
        node(
            "MatMulNBits",
            ["x", "codes", "scales", "", "", "bias"],
            ["logits"],
            domain="com.microsoft",
            K=HIDDEN,
            N=VOCAB,
            bits=4,
            block_size=16,
        )
    ],
}

WHOLE: dict[str, Nodes] = {
    "a bias that is no number behind it": [
        node("MatMul", ["x", "head"], ["raw"]),
        node("Add", ["raw", "bias"], ["logits"]),
    ],
    "the last axis reshaped": [
        node("MatMul", ["x", "head"], ["raw"]),
        node("Reshape", ["raw", "halves"], ["split"]),
        node("ReduceMax", ["split", "last"], ["logits"], keepdims=0),
    ],
    "a weight that is an input": [node("MatMul", ["x", "y"], ["logits"])],
}


def written(folder: Path, nodes: Nodes, *, vocab: int = VOCAB) -> Path:
    """The graph with what it reads of the weights below; x is [1, positions, 32]."""
    head = HEAD if vocab == VOCAB else RNG.standard_normal((HIDDEN, vocab)).astype(np.float32)
    weights: dict[str, Any] = {
        "head": head,
        "table": np.ascontiguousarray(head.T),
        "bias": np.arange(vocab, dtype=np.float32) % 7,
        "cap": np.array(30, np.float32),
        "flat": np.array([-1, HIDDEN]),
        "vocab": np.array([vocab]),
        "halves": np.array([0, 0, -1, 2]),
        "last": np.array([-1]),
        "codes": RNG.integers(0, 256, (vocab, HIDDEN // 16, 8), dtype=np.uint8),
        "scales": RNG.random((vocab, HIDDEN // 16), dtype=np.float32),
    }
    read = {name for item in nodes for name in item.input}
    graph = helper.make_graph(
        nodes,
        "head",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in {"x": [1, None, HIDDEN], "y": [HIDDEN, vocab]}.items()
            if name in read
        ],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items() if name in read],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "m.onnx")
    return folder / "m.onnx"


@pytest.fixture
def x() -> Any:
    """Hidden states [1, 7, 32]."""
    return np.random.default_rng(1).standard_normal((1, POSITIONS, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("positions", [None, [-1], [3, 0, -2], []])
@pytest.mark.parametrize("piece", [1, 64, 1 << 22], ids=["few at once", "some", "all at once"])
def test_the_largest_are_those_of_the_whole(
    graph: str,
    positions: list[int] | None,
    piece: int,
    tmp_path: Path,
    x: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """IDs are those of the array that `run` gives, values within rounding, however small the pieces."""
    path = written(tmp_path, GRAPHS[graph])
    monkeypatch.setattr(oracle, "_CHUNK", piece)
    session = ENGINE.open(path, {})
    handle = session.run({"x": session.place(x)}, ["logits"])["logits"]
    assert isinstance(handle, OracleHandle)
    assert handle.deferred is not None
    assert (handle.shape, handle.dtype) == ((1, POSITIONS, VOCAB), "float32")
    found = session.top_logits(handle, k=5, positions=positions)
    whole = OracleModel.load(path).run({"x": x}, ["logits"])["logits"]
    expected = top_logits_of(whole, 5, positions)
    assert [top.token_ids for top in found] == [top.token_ids for top in expected]
    for top, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(top.values, wanted.values, rtol=1e-5)
    assert handle.deferred is not None, "nothing asked for the whole"
    np.testing.assert_array_equal(session.copy_out(handle), whole)


@pytest.mark.parametrize("graph", WHOLE)
def test_what_cannot_be_cut_is_computed(graph: str, tmp_path: Path, x: Any) -> None:
    """An output that is not a product with a constant, with elementwise steps behind it, comes as it is."""
    path = written(tmp_path, WHOLE[graph])
    feeds = {"x": x, "y": HEAD}
    model = OracleModel.load(path)
    feeds = {spec.name: feeds[spec.name] for spec in model.inputs}
    result = model.begin(feeds, ["logits"])["logits"]
    assert not isinstance(result, DeferredOutput)
    np.testing.assert_array_equal(result, model.run(feeds, ["logits"])["logits"])


def test_ties_across_pieces_go_to_the_lowest_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All logits are equal, and each piece has a few: the first IDs win."""
    monkeypatch.setattr(oracle, "_CHUNK", 10)
    session = ENGINE.open(written(tmp_path, GRAPHS["a product"]), {})
    zeros = session.place(np.zeros((1, 2, HIDDEN), np.float32))
    logits = session.run({"x": zeros}, ["logits"])["logits"]
    assert session.top_logits(logits, k=3) == [TopLogits((0, 1, 2), (0.0, 0.0, 0.0))] * 2


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("layout", ["columns", "rows"])
@pytest.mark.parametrize("cast", [None, TensorProto.DOUBLE], ids=["", "cast to double"])
@pytest.mark.parametrize(("vocab", "hidden"), [(11, 8), (67, 24), (512, 64), (4099, 64)])
def test_equal_columns_tie_wherever_they_stand(
    vocab: int, hidden: int, cast: int | None, layout: str, precision: Any, tmp_path: Path
) -> None:
    """The second half of a head is the first, the other way round: the first of two equal ones comes first.

    BLAS sums some of a product's entries in another order than others, above all beside one token only. A
    cast behind the product makes it no more precise.
    """
    rng = np.random.default_rng(vocab)
    head = rng.standard_normal((hidden, vocab)).astype(np.float32)
    half = vocab // 2
    head[:, vocab - half :] = head[:, :half][:, ::-1]
    weight = head if layout == "columns" else np.ascontiguousarray(head.T)
    result = "logits" if cast is None else "raw"
    nodes = [
        node("MatMul", ["x", "w"], [result])
        if layout == "columns"
        else node("Gemm", ["x", "w"], [result], transB=1)
    ]
    if cast is not None:
        nodes.append(node("Cast", ["raw"], ["logits"], to=cast))
    graph = helper.make_graph(
        nodes,
        "ties",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, hidden])],
        [helper.make_tensor_value_info("logits", cast or TensorProto.FLOAT, [None, vocab])],
        [numpy_helper.from_array(weight, "w")],
    )
    opsets = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "m.onnx")
    session = ENGINE.open(tmp_path / "m.onnx", {"precision": precision})
    tied = 0
    for _ in range(40):
        x = rng.standard_normal((1, hidden)).astype(np.float32)
        (top,) = session.top_logits(session.run({"x": session.place(x)}, ["logits"])["logits"], k=3)
        twin = vocab - 1 - top.argmax
        if top.argmax != twin and (top.argmax < half or top.argmax >= vocab - half):
            tied += 1
            assert (top.token_ids[:2], top.margin) == ((min(top.argmax, twin), max(top.argmax, twin)), 0)
    assert tied > 20


def test_nan_ranks_last_and_is_told(tmp_path: Path, x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN anywhere in the row marks it, whichever piece it is in."""
    monkeypatch.setattr(oracle, "_CHUNK", 700)
    path = written(tmp_path, GRAPHS["four bits"])
    model = onnx.load(path)
    scales = numpy_helper.to_array(
        model.graph.initializer[2 if len(model.graph.initializer) > 2 else 1]
    ).copy()
    by_name = {tensor.name: tensor for tensor in model.graph.initializer}
    scales = numpy_helper.to_array(by_name["scales"]).copy()
    scales[3] = np.nan
    by_name["scales"].CopyFrom(numpy_helper.from_array(scales, "scales"))
    onnx.save(model, path)
    session = ENGINE.open(path, {})
    tops = session.top_logits(session.run({"x": session.place(x)}, ["logits"])["logits"], k=2)
    assert all(top.has_nan and 3 not in top.token_ids for top in tops)


def test_a_long_pass_keeps_no_array_of_positions_by_vocabulary(tmp_path: Path) -> None:
    """512 positions of 40,000 logits would be 82 MB; their largest cost a fraction of that.

    What is allowed is four pieces of logits: the last one, one as BLAS writes it, the same turned, and some.
    """
    vocab, positions = 40_000, 512
    path = written(tmp_path, GRAPHS["a product"], vocab=vocab)
    session = ENGINE.open(path, {"threads": 1})
    hidden = session.place(np.ones((1, positions, HIDDEN), np.float32))
    session.top_logits(session.run({"x": hidden}, ["logits"])["logits"], k=2, positions=[0])
    tracemalloc.start()
    tops = session.top_logits(session.run({"x": hidden}, ["logits"])["logits"], k=2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(tops) == positions
    assert peak < 4 * oracle._CHUNK * 4 < positions * vocab * 4 / 2


def test_a_product_that_does_not_fit_fails_by_name(tmp_path: Path) -> None:
    """The failure of a product that waits names its node, as any other does."""
    nodes = [
        node("Transpose", ["x"], ["turned"], perm=[0, 2, 1]),
        node("MatMul", ["turned", "head"], ["logits"]),
    ]
    nodes[1].name = "the_head"
    session = ENGINE.open(written(tmp_path, nodes), {})
    with pytest.raises(EngineFailedError, match="MatMul the_head"):
        session.run({"x": session.place(np.zeros((1, 3, HIDDEN), np.float32))}, ["logits"])


def test_the_tail_of_an_output_that_is_an_input_is_none(tmp_path: Path) -> None:
    """A graph may hand an input through, and nothing is there to wait for."""
    model = OracleModel.load(written(tmp_path, [node("Identity", ["x"], ["logits"])]))
    assert tail_of(model._body, model._body.outputs[0]) is None
