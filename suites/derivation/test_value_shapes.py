"""Shapes of values and weights, straight from the bytes of a graph."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import TensorProto, helper

from harness.onnx_file import open_model
from harness.wire import WireError, packed


@pytest.mark.parametrize("in_a_row", [True, False])
def test_shapes_of_weights_and_values_are_read_by_name(in_a_row: bool, tmp_path: Path) -> None:
    """Extents one by one or packed, as writers of the format may have them; what is not asked for is left."""
    one_by_one = b"".join(bytes([8, extent]) for extent in (3, 4)) + b"\x08\x81\x01"
    tensor = (b"\x0a\x04\x03\x04\x81\x01" if in_a_row else one_by_one) + b"\x42\x06weight"
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("v", ["b", 7]), ("other", [1]))
    ]
    graph = helper.make_graph([], "g", [], [], value_info=values)
    body = graph.SerializeToString() + b"\x2a" + bytes([len(tensor)]) + tensor
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x3a" + bytes([len(body)]) + body)

    with open_model(path) as model:
        shapes = model.shapes({"weight", "v", "missing"})

    assert shapes == {"weight": (3, 4, 129), "v": ("b", 7)}


def test_packed_integers_are_signed_and_whole() -> None:
    """Two's complement over 64 bits; one that is cut off is an error."""
    assert packed(memoryview(b"\x01\x81\x01" + b"\xff" * 9 + b"\x01"), 0, 13) == [1, 129, -1]
    assert packed(memoryview(b""), 0, 0) == []
    with pytest.raises(WireError):
        packed(memoryview(b"\x81"), 0, 1)
