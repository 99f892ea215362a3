"""The parts of an `.onnx` file that can be read without loading the model: ports and file names.

Field numbers are those of `onnx.proto` (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto). The
file is mapped into memory and read through `harness.wire`, so weights are never touched.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness import wire
from harness.errors import InputError

__all__ = ["GraphHeader", "ModelFile", "ValueHeader", "open_model"]

ELEMENT_TYPES = (
    None,
    "float32",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "int32",
    "int64",
    "string",
    "bool",
    "float16",
    "float64",
    "uint32",
    "uint64",
    "complex64",
    "complex128",
    "bfloat16",
    "float8e4m3fn",
    "float8e4m3fnuz",
    "float8e5m2",
    "float8e5m2fnuz",
    "uint4",
    "int4",
    "float4e2m1",
    "float8e8m0",
    "uint2",
    "int2",
    "float6e2m3",
    "float6e3m2",
)
"""`TensorProto.DataType` by number, in numpy's spelling."""

_MODEL_GRAPH, _MODEL_OPSETS, _MODEL_FUNCTIONS = 7, 8, 25
_OPSET_DOMAIN, _OPSET_VERSION = 1, 2
_GRAPH_NODES, _GRAPH_INITIALIZERS, _GRAPH_INPUTS, _GRAPH_OUTPUTS, _GRAPH_SPARSE = 1, 5, 11, 12, 15
_FUNCTION_NODES = 7
_NODE_ATTRIBUTES = 5
_ATTRIBUTE_TENSORS, _ATTRIBUTE_GRAPHS, _ATTRIBUTE_SPARSE = (5, 10), (6, 11), (22, 23)
_TENSOR_NAME, _TENSOR_EXTERNAL_DATA, _TENSOR_DATA_LOCATION = 8, 13, 14
_SPARSE_VALUES, _SPARSE_INDICES = 1, 2
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
_VALUE_NAME, _VALUE_TYPE = 1, 2
_TYPE_TENSOR = 1
_TYPE_OTHERS = {4: "sequence", 5: "map", 7: "opaque", 8: "sparse_tensor", 9: "optional"}
_TENSOR_TYPE_ELEMENT, _TENSOR_TYPE_SHAPE = 1, 2
_SHAPE_AXES = 1
_AXIS_EXTENT, _AXIS_SYMBOL = 1, 2
_EXTERNAL = 1


@dataclass(frozen=True, slots=True)
class ValueHeader:
    """Name, element type and shape of a graph input or output; see `harness.ports.Port`."""

    name: str
    dtype: str | None
    shape: tuple[int | str | None, ...] | None


@dataclass(slots=True)
class GraphHeader:
    """What a graph says about itself outside its nodes and weights.

    Attributes:
        inputs: graph inputs, initialisers that are listed among them included.
        outputs: graph outputs.
        initializers: names of the graph's weights, dense and sparse.
        opsets: version of each operator set, by domain (`""` is the standard one).
    """

    inputs: list[ValueHeader] = field(default_factory=list)
    outputs: list[ValueHeader] = field(default_factory=list)
    initializers: list[str] = field(default_factory=list)
    opsets: dict[str, int] = field(default_factory=dict)


@contextmanager
def open_model(path: Path | str) -> Iterator[ModelFile]:
    """Map the file `path` into memory.

    Raises:
        InputError: there is no such file, it cannot be read, or it is empty.
    """
    try:
        with Path(path).open("rb") as handle:
            if not handle.seek(0, 2):
                raise InputError(f"{path} is empty.", next_action="Export or download the file again.")
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{path} cannot be read: {reason}.", next_action="Check the path.") from error
    with mapped, memoryview(mapped) as view:
        yield ModelFile(view)


class ModelFile:
    """An `.onnx` file in memory. Every method raises `wire.WireError` where the bytes are no model."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def graph_header(self) -> GraphHeader:
        """Read the main graph's header. Several `graph` fields merge, as protobuf has it."""
        header = GraphHeader()
        found = False
        for number, kind, start, end in wire.fields(self._data, 0, len(self._data)):
            if number == _MODEL_GRAPH and kind == wire.BYTES:
                found = True
                self._read_graph(header, start, end)
            elif number == _MODEL_OPSETS and kind == wire.BYTES:
                domain, version = self._opset(start, end)
                header.opsets[domain] = version
        if not found:
            raise wire.WireError("it holds no graph")
        return header

    def external_locations(self) -> tuple[str, ...]:
        """Locations of external data, each once, in the order in which the file names them."""
        data = self._data
        locations: dict[str, None] = {}
        pending: list[tuple[str, int, int]] = [("model", 0, len(data))]
        found = False
        # An explicit stack: a hostile file may nest deeper than Python's own.
        while pending:
            message, start, end = pending.pop()
            if message == "tensor":
                location = self._external_location(start, end)
                if location is not None:
                    locations.setdefault(location)
                continue
            nested = _NESTED[message]
            children = [
                (nested[number], first, last)
                for number, kind, first, last in wire.fields(data, start, end)
                if kind == wire.BYTES and number in nested
            ]
            found = found or any(child == "graph" for child, _, _ in children)
            pending.extend(reversed(children))
        if not found:
            raise wire.WireError("it holds no graph")
        return tuple(locations)

    def _read_graph(self, header: GraphHeader, start: int, end: int) -> None:
        for number, kind, first, last in wire.fields(self._data, start, end):
            if kind != wire.BYTES or number == _GRAPH_NODES:
                continue
            if number == _GRAPH_INPUTS:
                header.inputs.append(self._value(first, last))
            elif number == _GRAPH_OUTPUTS:
                header.outputs.append(self._value(first, last))
            elif number == _GRAPH_INITIALIZERS:
                header.initializers.append(self._string_field(first, last, _TENSOR_NAME))
            elif number == _GRAPH_SPARSE:
                for inner, inner_kind, one, two in wire.fields(self._data, first, last):
                    if inner == _SPARSE_VALUES and inner_kind == wire.BYTES:
                        header.initializers.append(self._string_field(one, two, _TENSOR_NAME))

    def _opset(self, start: int, end: int) -> tuple[str, int]:
        domain, version = "", 0
        for number, kind, first, last in wire.fields(self._data, start, end):
            if number == _OPSET_DOMAIN and kind == wire.BYTES:
                domain = wire.text(self._data, first, last)
            elif number == _OPSET_VERSION and kind == wire.VARINT:
                version = wire.signed(first)
        return domain, version

    def _string_field(self, start: int, end: int, wanted: int) -> str:
        found = ""
        for number, kind, first, last in wire.fields(self._data, start, end):
            if number == wanted and kind == wire.BYTES:
                found = wire.text(self._data, first, last)
        return found

    def _value(self, start: int, end: int) -> ValueHeader:
        name = ""
        dtype: str | None = None
        axes: list[int | str | None] | None = None
        for number, kind, first, last in wire.fields(self._data, start, end):
            if kind != wire.BYTES:
                continue
            if number == _VALUE_NAME:
                name = wire.text(self._data, first, last)
            elif number == _VALUE_TYPE:
                for inner, inner_kind, one, two in wire.fields(self._data, first, last):
                    if inner_kind != wire.BYTES:
                        continue
                    if inner in _TYPE_OTHERS:
                        dtype, axes = _TYPE_OTHERS[inner], None
                    elif inner == _TYPE_TENSOR:
                        dtype, axes = self._tensor_type(one, two, dtype, axes)
        return ValueHeader(name=name, dtype=dtype, shape=None if axes is None else tuple(axes))

    def _tensor_type(
        self, start: int, end: int, dtype: str | None, axes: list[int | str | None] | None
    ) -> tuple[str | None, list[int | str | None] | None]:
        """Read a tensor type on top of `dtype` and `axes`, what an earlier field of the same kind said."""
        if dtype in _TYPE_OTHERS.values():
            dtype, axes = None, None
        for number, kind, first, last in wire.fields(self._data, start, end):
            if number == _TENSOR_TYPE_ELEMENT and kind == wire.VARINT:
                dtype = ELEMENT_TYPES[first] if first < len(ELEMENT_TYPES) else f"type{wire.signed(first)}"
            elif number == _TENSOR_TYPE_SHAPE and kind == wire.BYTES:
                axes = [] if axes is None else axes
                for inner, inner_kind, one, two in wire.fields(self._data, first, last):
                    if inner == _SHAPE_AXES and inner_kind == wire.BYTES:
                        axes.append(self._axis(one, two))
        return dtype, axes

    def _axis(self, start: int, end: int) -> int | str | None:
        axis: int | str | None = None
        for number, kind, first, last in wire.fields(self._data, start, end):
            if number == _AXIS_EXTENT and kind == wire.VARINT:
                axis = wire.signed(first)
            elif number == _AXIS_SYMBOL and kind == wire.BYTES:
                axis = wire.text(self._data, first, last) or None
        return axis

    def _external_location(self, start: int, end: int) -> str | None:
        location: str | None = None
        external = False
        for number, kind, first, last in wire.fields(self._data, start, end):
            if number == _TENSOR_DATA_LOCATION and kind == wire.VARINT:
                external = first == _EXTERNAL
            elif (
                number == _TENSOR_EXTERNAL_DATA
                and kind == wire.BYTES
                and self._string_field(first, last, _ENTRY_KEY) == "location"
            ):
                location = self._string_field(first, last, _ENTRY_VALUE)
        return location if external else None


_NESTED: dict[str, dict[int, str]] = {
    "model": {_MODEL_GRAPH: "graph", _MODEL_FUNCTIONS: "function"},
    "graph": {_GRAPH_NODES: "node", _GRAPH_INITIALIZERS: "tensor", _GRAPH_SPARSE: "sparse"},
    "function": {_FUNCTION_NODES: "node"},
    "node": {_NODE_ATTRIBUTES: "attribute"},
    "attribute": {
        **dict.fromkeys(_ATTRIBUTE_TENSORS, "tensor"),
        **dict.fromkeys(_ATTRIBUTE_GRAPHS, "graph"),
        **dict.fromkeys(_ATTRIBUTE_SPARSE, "sparse"),
    },
    "sparse": {_SPARSE_VALUES: "tensor", _SPARSE_INDICES: "tensor"},
}
"""Fields of each message that can hold tensors, with the message that they hold."""
