"""The graph builder writes what it is told, and the blocks compute what they say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from harness.models import blocks
from harness.models.graph import IR_VERSION, OPSET, GraphBuilder

if TYPE_CHECKING:
    from numpy.typing import NDArray


def _run(graph: GraphBuilder, folder: Path, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    path = graph.save(folder / "model.onnx")
    evaluator = ReferenceEvaluator(str(path))
    return dict(zip(evaluator.output_names, evaluator.run(None, feeds), strict=True))


def _small(array: NDArray[Any]) -> GraphBuilder:
    graph = GraphBuilder("small")
    x = graph.input("x", "float32", ("batch", array.shape[-1]))
    with graph.scope("layers.0"):
        graph.add("Mul", x, graph.initializer("scale", array), name="scaled", output="y")
    graph.output("y", "float32", ("batch", array.shape[-1]))
    return graph


def test_versions_are_pinned(tmp_path: Path) -> None:
    """Opset and file format are those that every supported runtime loads, whatever onnx is installed."""
    proto = onnx.load(_small(np.ones(3, np.float32)).save(tmp_path / "model.onnx"))
    assert (OPSET, IR_VERSION) == (24, 10)
    assert [(opset.domain, opset.version) for opset in proto.opset_import] == [("", 24)]
    assert proto.ir_version == 10


def test_names_say_where_a_node_stands(tmp_path: Path) -> None:
    """Nodes and weights carry their scope; ports carry their own name and nothing else."""
    proto = onnx.load(_small(np.ones(3, np.float32)).save(tmp_path / "model.onnx"))
    (node,) = proto.graph.node
    assert node.name == "layers.0/scaled"
    assert list(node.input) == ["x", "layers.0/scale"]
    assert list(node.output) == ["y"]


@pytest.mark.parametrize("external", [True, False])
def test_weights_come_back_bit_for_bit(tmp_path: Path, external: bool) -> None:
    """What is read back is what was handed over, in the graph or beside it, also from a strided array."""
    array = (np.arange(1024, dtype=np.float32) * np.float32(1 / 3))[::2]
    path = _small(array).save(tmp_path / "model.onnx", external=external)
    assert (tmp_path / "model.onnx.data").exists() == external
    (tensor,) = onnx.load(path).graph.initializer
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), array)


def test_external_tensors_are_aligned(tmp_path: Path) -> None:
    """Each tensor in the data file starts at a multiple of 64 bytes, and small ones stay in the graph."""
    graph = GraphBuilder("aligned")
    x = graph.input("x", "float32", (1,))
    sizes = {"a": 301, "b": 257, "c": 3}
    for name, size in sizes.items():
        x = graph.add("Add", x, graph.initializer(name, np.ones(size, np.float32)), name=f"add_{name}")
        x = graph.add("ReduceSum", x, graph.ints(0), name=f"sum_{name}", keepdims=1)
    graph.output(x, "float32", (1,))
    proto = onnx.load(graph.save(tmp_path / "model.onnx"), load_external_data=False)
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    places = {name: {entry.key: entry.value for entry in tensors[name].external_data} for name in sizes}
    assert [places[name].get("offset") for name in sizes] == ["0", "1216", None]
    assert [places[name].get("length") for name in sizes] == ["1204", "1028", None]


def test_the_same_graph_gives_the_same_bytes(tmp_path: Path) -> None:
    """Nothing in the files depends on the run: no time, no path, no order of a set."""
    files = []
    for run in ("first", "second"):
        folder = tmp_path / run
        folder.mkdir()
        _small(np.ones(512, np.float32)).save(folder / "model.onnx", metadata={"b": "2", "a": "1"})
        files.append([path.read_bytes() for path in sorted(folder.iterdir())])
    assert files[0] == files[1]


def test_a_scalar_stays_a_scalar() -> None:
    """Rank 0 is kept: some runtimes refuse a Range between tensors of shape [1]."""
    graph = GraphBuilder("scalars")
    graph.scalar(0, "int64")
    (tensor,) = graph.graph().initializer
    assert list(tensor.dims) == []


def test_a_name_is_given_once() -> None:
    """Two values of one name are a defect of the caller, reported at the second one."""
    graph = GraphBuilder("twice")
    x = graph.input("x", "float32", (1,))
    graph.add("Neg", x, name="y")
    with pytest.raises(ValueError, match="'y' is already taken"):
        graph.add("Abs", x, name="y")


def test_a_broken_graph_is_not_handed_out(tmp_path: Path) -> None:
    """`save` runs the checker with type inference: a node of the wrong type does not pass."""
    graph = GraphBuilder("broken")
    x = graph.input("x", "float32", (1,))
    graph.output(graph.add("And", x, x, name="y"), "bool", (1,))
    with pytest.raises(onnx.shape_inference.InferenceError):
        graph.save(tmp_path / "model.onnx")


def test_scan_carries_its_state(tmp_path: Path) -> None:
    """A running sum: the state goes from step to step, the results are stacked along axis 0."""
    body = GraphBuilder("body", prefix="step")
    state = body.input(body.scoped("state"), "float32", (2,))
    item = body.input(body.scoped("item"), "float32", (2,))
    total = body.add("Add", state, item, name="total")
    body.output(total, "float32", (2,))
    body.output(body.add("Identity", total, name="result"), "float32", (2,))
    graph = GraphBuilder("scan")
    start = graph.input("start", "float32", (2,))
    items = graph.input("items", "float32", ("steps", 2))
    graph.output("last", "float32", (2,))
    graph.output("all", "float32", ("steps", 2))
    graph.scan(body, states=(start,), sequences=(items,), name="sum", outputs=("last", "all"))
    feeds = {"start": np.array([1, 2], np.float32), "items": np.arange(6, dtype=np.float32).reshape(3, 2)}
    given = _run(graph, tmp_path, feeds)
    expected = feeds["start"] + feeds["items"].cumsum(axis=0)
    np.testing.assert_array_equal(given["all"], expected)
    np.testing.assert_array_equal(given["last"], expected[-1])


def test_rms_norm_and_swiglu_follow_their_formulas(tmp_path: Path) -> None:
    """Norm: x / sqrt(mean(x^2) + eps) * scale; MLP: down(silu(gate(x)) * up(x)), in float64."""
    random = np.random.RandomState(0)
    x = random.standard_normal((1, 3, 8)).astype(np.float32)
    scale = random.standard_normal(8).astype(np.float32)
    weights = {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in {"gate_proj": (8, 12), "up_proj": (8, 12), "down_proj": (12, 8)}.items()
    }
    graph = GraphBuilder("mlp")
    port = graph.input("x", "float32", (1, "sequence_len", 8))
    normed = blocks.rms_norm(graph, port, scale, name="norm", epsilon=1e-2)
    mixed = blocks.swiglu(graph, normed, lambda v, name: blocks.linear(graph, v, weights[name], name=name))
    graph.output(mixed, "float32", (1, "sequence_len", 8))
    (given,) = _run(graph, tmp_path, {"x": x}).values()
    wide = x.astype(np.float64)
    hidden = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-2) * scale
    gate = hidden @ weights["gate_proj"]
    expected = (gate / (1 + np.exp(-gate)) * (hidden @ weights["up_proj"])) @ weights["down_proj"]
    np.testing.assert_allclose(given, expected, atol=1e-5)


def test_rotation_is_multiplication_by_a_unit_complex_number(tmp_path: Path) -> None:
    """The number x[i] + j x[i + D/2] is turned by position * inverse_frequency[i] (Su et al., 2021)."""
    random = np.random.RandomState(0)
    x = random.standard_normal((2, 3, 4, 6)).astype(np.float32)
    positions = np.array([[0, 1, 2, 9], [5, 6, 7, 30]], np.int64)
    frequencies = np.array([1, 0.5, 0.125], np.float32)
    graph = GraphBuilder("rotary")
    port = graph.input("x", "float32", ("batch", 3, "sequence_len", 6))
    ids = graph.input("position_ids", "int64", ("batch", "sequence_len"))
    rotated = blocks.rotate(graph, port, blocks.rotary_tables(graph, ids, frequencies), name="rotated")
    graph.output(rotated, "float32", ("batch", 3, "sequence_len", 6))
    (given,) = _run(graph, tmp_path, {"x": x, "position_ids": positions}).values()
    turned = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * positions[:, None, :, None] * frequencies)
    np.testing.assert_allclose(given, np.concatenate([turned.real, turned.imag], axis=-1), atol=1e-5)


@pytest.mark.parametrize("past", [0, 3])
def test_attention_sees_the_cache_and_itself_and_nothing_later(tmp_path: Path, past: int) -> None:
    """Head by head and query by query in float64, with a hole in the mask and a cache of either length."""
    random = np.random.RandomState(past)
    heads, kv_heads, width, new = 6, 2, 4, 3
    total = past + new
    feeds = {
        "query": random.standard_normal((2, heads, new, width)),
        "key": random.standard_normal((2, kv_heads, new, width)),
        "value": random.standard_normal((2, kv_heads, new, width)),
        "past_key_values.5.key": random.standard_normal((2, kv_heads, past, width)),
        "past_key_values.5.value": random.standard_normal((2, kv_heads, past, width)),
    }
    mask = np.ones((2, total), np.int64)
    mask[1, past and past - 1] = 0
    graph = GraphBuilder("attention")
    tokens = graph.input("input_ids", "int64", ("batch", "sequence_len"))
    visible = graph.input("attention_mask", "int64", ("batch", blocks.ALL_POSITIONS))
    counts = {"query": heads, "key": kv_heads, "value": kv_heads}
    query, key, value = (
        graph.input(name, "float32", ("batch", count, "sequence_len", width))
        for name, count in counts.items()
    )
    bias = blocks.causal_bias(graph, tokens, visible)
    attended = blocks.attention(
        graph, query, key, value, bias, layer=5, heads=heads, kv_heads=kv_heads, width=width
    )
    graph.output(attended.context, "float32", ("batch", heads, "sequence_len", width))
    narrow = {name: array.astype(np.float32) for name, array in feeds.items()}
    integers = {"input_ids": np.zeros((2, new), np.int64), "attention_mask": mask}
    given = _run(graph, tmp_path, {**integers, **narrow})
    keys, values = (
        np.concatenate([feeds[f"past_key_values.5.{kind}"], feeds[kind]], axis=2) for kind in ("key", "value")
    )
    np.testing.assert_array_equal(given["present.5.key"], keys.astype(np.float32))
    np.testing.assert_array_equal(given["present.5.value"], values.astype(np.float32))
    for row in range(2):
        for head in range(heads):
            group = head // (heads // kv_heads)
            for index in range(new):
                seen = [i for i in range(past + index + 1) if mask[row, i]]
                if not seen:
                    continue  # nothing to look at: any mixture is as good as another
                scores = keys[row, group, seen] @ feeds["query"][row, head, index] / np.sqrt(width)
                shares = np.exp(scores) / np.exp(scores).sum()
                np.testing.assert_allclose(
                    given[attended.context][row, head, index], shares @ values[row, group, seen], atol=1e-5
                )
