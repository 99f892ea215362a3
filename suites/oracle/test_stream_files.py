"""Weights inside the model file are mapped like those beside it."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from harness.errors import InputError
from harness.oracle import OracleModel
from harness.oracle.weights import TensorReader, read_model

ROWS, WIDTH = 4096, 256
TABLE = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)


def one_file(path: Path) -> Path:
    """A 4-MB initialiser, a 4-MB `Constant` inside a branch, and small tensors, all in one file."""
    value = helper.make_tensor_value_info
    branches = {
        name: helper.make_graph(
            [helper.make_node("Constant", [], [name], value=numpy_helper.from_array(TABLE + shift, name))],
            name,
            [],
            [value(name, TensorProto.FLOAT, None)],
        )
        for name, shift in (("then", 1), ("otherwise", 2))
    }
    graph = helper.make_graph(
        [
            helper.make_node(
                "If", ["flag"], ["chosen"], then_branch=branches["then"], else_branch=branches["otherwise"]
            ),
            helper.make_node("Gather", ["table", "rows"], ["picked"]),
            helper.make_node("Gather", ["chosen", "rows"], ["also"]),
        ],
        "g",
        [value("flag", TensorProto.BOOL, []), value("rows", TensorProto.INT64, ["n"])],
        [value(name, TensorProto.FLOAT, None) for name in ("picked", "also")],
        [numpy_helper.from_array(TABLE, "table"), numpy_helper.from_array(np.ones(3, np.float32), "small")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10), path)
    return path


def test_values_inside_the_file_are_mapped_and_never_copied(tmp_path: Path) -> None:
    """Loading 12 MB of weights in one file and gathering from them allocates a fraction of one of them."""
    path = one_file(tmp_path / "model.onnx")
    feeds = {"flag": np.array(False), "rows": np.array([0, ROWS - 1])}
    OracleModel.load(path).run(feeds, ["picked", "also"])
    tracemalloc.start()
    results = OracleModel.load(path).run(feeds, ["picked", "also"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(results["picked"], TABLE[[0, -1]])
    np.testing.assert_array_equal(results["also"], TABLE[[0, -1]] + 2)
    assert peak < TABLE.nbytes / 10


def test_only_large_raw_values_are_left_in_the_file(tmp_path: Path) -> None:
    """The model that is parsed says where each large tensor lies, to the byte; all else is as written."""
    path = one_file(tmp_path / "model.onnx")
    whole, thin = onnx.load(path), read_model(path)
    entries = {entry.key: entry.value for entry in thin.graph.initializer[0].external_data}
    assert entries["location"] == "model.onnx"
    assert int(entries["length"]) == TABLE.nbytes
    assert path.read_bytes()[int(entries["offset"]) :].startswith(TABLE.tobytes())
    assert thin.graph.initializer[1] == whole.graph.initializer[1]
    assert thin.graph.input == whole.graph.input
    assert [node.op_type for node in thin.graph.node] == [node.op_type for node in whole.graph.node]
    constant = thin.graph.node[0].attribute[1].g.node[0].attribute[0].t
    np.testing.assert_array_equal(TensorReader(path).array(constant), TABLE + 1)


def test_the_last_of_repeated_values_counts(tmp_path: Path) -> None:
    """As in protobuf; a tensor that says twice what it holds is read as onnx reads it."""
    path = one_file(tmp_path / "model.onnx")
    model = onnx.load(path)
    again = TensorProto(raw_data=(TABLE + 7).tobytes()).SerializeToString()
    tensor = model.graph.initializer[0].SerializeToString() + again
    model.graph.initializer.pop(0)
    graph = model.graph.SerializeToString() + _field(5, tensor)
    model.ClearField("graph")
    path.write_bytes(model.SerializeToString() + _field(7, graph))
    expected = numpy_helper.to_array(onnx.load(path).graph.initializer[-1])
    np.testing.assert_array_equal(expected, TABLE + 7)
    np.testing.assert_array_equal(TensorReader(path).array(read_model(path).graph.initializer[-1]), TABLE + 7)


def test_a_length_written_the_long_way_is_still_read(tmp_path: Path) -> None:
    """Protobuf allows padded lengths; such a field is parsed along instead of being mapped."""
    path = one_file(tmp_path / "model.onnx")
    model = onnx.load(path)
    tensor = model.graph.initializer.pop(0).SerializeToString()
    graph = model.graph.SerializeToString() + _field(5, tensor, padded=True)
    model.ClearField("graph")
    path.write_bytes(model.SerializeToString() + _field(7, graph, padded=True))
    picked = OracleModel.load(path).run({"rows": np.array([5])}, ["picked"])["picked"]
    np.testing.assert_array_equal(picked, TABLE[[5]])


@pytest.mark.parametrize("keep", [100, 4096, 1 << 20, 5 << 20])
def test_a_cut_file_is_refused(tmp_path: Path, keep: int) -> None:
    """A file cut anywhere is an error of the input that names it."""
    path = one_file(tmp_path / "model.onnx")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"model\.onnx .*truncated"):
        OracleModel.load(path)


def _field(number: int, payload: bytes, *, padded: bool = False) -> bytes:
    """A length-delimited field; `padded` writes its length in five bytes, as many as protobuf takes."""
    size, length = len(payload), bytearray()
    while size > 0x7F or (padded and len(length) < 4):
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes([number << 3 | 2]) + bytes(length) + payload
