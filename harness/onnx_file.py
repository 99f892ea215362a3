"""The parts of an `.onnx` file that can be read without loading the model: ports and file names.

Field numbers are those of `onnx.proto` (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto). The
file is mapped into memory and read through `harness.wire`, so weights are never touched. A file may be
damaged or made to harm: what is kept of it is bounded by its size, and nothing recurses.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

from harness import wire
from harness.errors import InputError

__all__ = ["Budget", "ModelFile", "Shape", "open_model"]

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

_MODEL_GRAPH, _MODEL_FUNCTIONS = 7, 25
_GRAPH_NODES, _GRAPH_INITIALIZERS, _GRAPH_INPUTS, _GRAPH_OUTPUTS, _GRAPH_SPARSE = 1, 5, 11, 12, 15
_GRAPH_VALUES = 13
_FUNCTION_NODES = 7
_NODE_ATTRIBUTES = 5
_ATTRIBUTE_TENSORS, _ATTRIBUTE_GRAPHS, _ATTRIBUTE_SPARSE = (5, 10), (6, 11), (22, 23)
_TENSOR_DIMENSIONS = 1
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
_LOCATION_KEY = b"location"
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

_GRAPH_HEADER = frozenset({_GRAPH_INITIALIZERS, _GRAPH_INPUTS, _GRAPH_OUTPUTS, _GRAPH_SPARSE})
_DEEPEST_MESSAGE = 100  # what protobuf itself allows

Shape: TypeAlias = "tuple[int | str | None, ...] | None"
_ValueT = TypeVar("_ValueT")


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
        yield ModelFile(view, mapped)


class Budget:
    """How much may be kept of a file: many ports in few bytes stand only in a file made to harm.

    A file gets a base and twice its own size. Costs are about what CPython needs, in bytes.
    """

    _BASE = 8 << 20
    _PER_BYTE = 2
    PORT = 160
    AXIS = 8
    OBJECT = 80
    PLACE = 48

    def __init__(self, size: int) -> None:
        self._left = self._BASE + self._PER_BYTE * size
        self._shared: dict[int | str, int | str] = {}

    def spend(self, cost: int) -> None:
        """Account for `cost` bytes."""
        self._left -= cost
        if self._left < 0:
            raise wire.WireError("it describes more than a model of its size can")

    def shared(self, extent: int | str) -> int | str:
        """`extent`, as one object wherever it occurs: symbols and extents repeat from port to port."""
        known = self._shared.get(extent)
        if known is None:
            self.spend(2 * self.OBJECT)
            known = self._shared[extent] = extent
        return known


class ModelFile:
    """An `.onnx` file in memory. Every method raises `wire.WireError` where the bytes are no model."""

    def __init__(self, data: memoryview, mapped: mmap.mmap) -> None:
        self._data = data
        self._mapped = mapped
        self._budget = Budget(len(data))

    @property
    def data(self) -> memoryview:
        """The bytes of the file; dead when the file is closed."""
        return self._data

    @property
    def budget(self) -> Budget:
        """What may be kept of the file, for readers of its other parts."""
        return self._budget

    def ports(self, make: Callable[[str, str | None, Shape], _ValueT]) -> tuple[list[_ValueT], list[_ValueT]]:
        """The main graph's inputs and outputs, in file order, each made of its name, dtype and shape.

        Initialisers that are listed as inputs are left out. Several `graph` fields merge, as protobuf
        has it.
        """
        graphs = [
            (start, end)
            for _, kind, start, end in wire.fields(self._data, 0, len(self._data), only=(_MODEL_GRAPH,))
            if kind == wire.BYTES
        ]
        if not graphs:
            raise wire.WireError("it holds no graph")
        inputs: list[_ValueT] = []
        outputs: list[_ValueT] = []
        names: list[str] = []
        weight_places = array("Q")
        for start, end in graphs:
            for number, kind, first, last in wire.fields(self._data, start, end, only=_GRAPH_HEADER):
                if kind != wire.BYTES:
                    continue
                if number in (_GRAPH_INITIALIZERS, _GRAPH_SPARSE):
                    self._budget.spend(Budget.PLACE)
                    weight_places.extend((number, first, last))
                    continue
                name, dtype, shape = self._value(first, last)
                if number == _GRAPH_OUTPUTS:
                    outputs.append(make(name, dtype, shape))
                else:
                    names.append(name)
                    inputs.append(make(name, dtype, shape))
        weights = self._weights_among(frozenset(names), weight_places)
        if weights:
            inputs = [value for name, value in zip(names, inputs, strict=True) if name not in weights]
        return inputs, outputs

    def shapes(self, names: Collection[str]) -> dict[str, Shape]:
        """Shapes of those values and initialisers of the main graph that are among `names`."""
        found: dict[str, Shape] = {}
        for _, kind, start, end in wire.fields(self._data, 0, len(self._data), only=(_MODEL_GRAPH,)):
            if kind != wire.BYTES:
                continue
            only = (_GRAPH_INITIALIZERS, _GRAPH_VALUES)
            for number, inner, first, last in wire.fields(self._data, start, end, only=only):
                if inner != wire.BYTES:
                    continue
                field = _TENSOR_NAME if number == _GRAPH_INITIALIZERS else _VALUE_NAME
                name = self._string_field(first, last, field)
                if name in names:
                    is_weight = number == _GRAPH_INITIALIZERS
                    found[name] = self._dimensions(first, last) if is_weight else self._value(first, last)[2]
        return found

    def _dimensions(self, start: int, end: int) -> Shape:
        """The shape of a tensor: its numbers stand one by one, or in a row."""
        extents: list[int] = []
        for _, kind, first, last in wire.fields(self._data, start, end, only=(_TENSOR_DIMENSIONS,)):
            if kind == wire.VARINT:
                extents.append(wire.signed(first))
            elif kind == wire.BYTES:
                extents += wire.packed(self._data, first, last)
        self._budget.spend(Budget.AXIS * len(extents))
        return tuple(extents)

    def external_locations(self) -> tuple[str, ...]:
        """Locations of external data, each once, in the order in which the file names them."""
        locations: dict[str, None] = {}
        has_graph = False
        # A stack of readers, one for each open message: a hostile file may nest deeper than Python's own.
        readers = [("model", wire.fields(self._data, 0, len(self._data), only=_NESTED["model"]))]
        while readers:
            message, reader = readers[-1]
            child = next(
                (
                    (_NESTED[message][number], start, end)
                    for number, kind, start, end in reader
                    if kind == wire.BYTES
                ),
                None,
            )
            if child is None:
                readers.pop()
                continue
            kind_of_child, start, end = child
            if kind_of_child == "tensor":
                location = self._external_location(start, end)
                if location is not None and location not in locations:
                    self._budget.spend(2 * Budget.OBJECT + len(location))
                    locations[location] = None
                continue
            has_graph = has_graph or kind_of_child == "graph"
            if kind_of_child == "node" and self._mapped.find(_LOCATION_KEY, start, end) < 0:
                continue  # most nodes hold no tensor, and a search for bytes is much faster than parsing
            if len(readers) == _DEEPEST_MESSAGE:
                raise wire.WireError(f"messages nested more than {_DEEPEST_MESSAGE} deep at offset {start}")
            only = _NESTED[kind_of_child]
            readers.append((kind_of_child, wire.fields(self._data, start, end, only=only)))
        if not has_graph:
            raise wire.WireError("it holds no graph")
        return tuple(locations)

    def weights_among(self, names: frozenset[str]) -> set[str]:
        """Those of `names` that are initialisers of the main graph."""
        places = array("Q")
        for _, kind, start, end in wire.fields(self._data, 0, len(self._data), only=(_MODEL_GRAPH,)):
            if kind != wire.BYTES:
                continue
            only = (_GRAPH_INITIALIZERS, _GRAPH_SPARSE)
            for number, inner, first, last in wire.fields(self._data, start, end, only=only):
                if inner == wire.BYTES:
                    self._budget.spend(Budget.PLACE)
                    places.extend((number, first, last))
        return self._weights_among(names, places)

    def _weights_among(self, names: frozenset[str], places: array[int]) -> set[str]:
        """Those of `names` that are initialisers; `places` has field number, start and end of each."""
        found: set[str] = set()
        for number, first, last in zip(places[::3], places[1::3], places[2::3], strict=True):
            tensors = [(first, last)]
            if number == _GRAPH_SPARSE:
                parts = wire.fields(self._data, first, last, only=(_SPARSE_VALUES,))
                tensors = [(one, two) for _, kind, one, two in parts if kind == wire.BYTES]
            for one, two in tensors:
                name = self._string_field(one, two, _TENSOR_NAME)
                if name in names:
                    found.add(name)
        return found

    def _string_field(self, start: int, end: int, wanted: int) -> str:
        found = ""
        for _, kind, first, last in wire.fields(self._data, start, end, only=(wanted,)):
            if kind == wire.BYTES:
                found = wire.text(self._data, first, last)
        return found

    def _value(self, start: int, end: int) -> tuple[str, str | None, Shape]:
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
        self._budget.spend(Budget.PORT + len(name))
        return name, dtype, None if axes is None else tuple(axes)

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
                        self._budget.spend(2 * Budget.AXIS)
                        axes.append(self._axis(one, two))
        return dtype, axes

    def _axis(self, start: int, end: int) -> int | str | None:
        axis: int | str | None = None
        for number, kind, first, last in wire.fields(self._data, start, end):
            if number == _AXIS_EXTENT and kind == wire.VARINT:
                axis = wire.signed(first)
            elif number == _AXIS_SYMBOL and kind == wire.BYTES:
                axis = wire.text(self._data, first, last) or None
        return None if axis is None else self._budget.shared(axis)

    def _external_location(self, start: int, end: int) -> str | None:
        location: str | None = None
        external = False
        for number, kind, first, last in wire.fields(self._data, start, end):
            if number == _TENSOR_DATA_LOCATION and kind == wire.VARINT:
                external = first == _EXTERNAL
            elif (
                number == _TENSOR_EXTERNAL_DATA
                and kind == wire.BYTES
                and self._string_field(first, last, _ENTRY_KEY) == _LOCATION_KEY.decode()
            ):
                location = self._string_field(first, last, _ENTRY_VALUE)
        return location if external else None
