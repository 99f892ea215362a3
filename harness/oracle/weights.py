"""Reading an ONNX file: the graph, its initialisers, and the files that hold weights.

Weights are memory-mapped and never copied, whether they lie in external files or in the model file itself;
the arrays are views that the operating system pages in when they are read.
"""

from __future__ import annotations

import math
import mmap
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped] # protobuf has no type hints

from harness import wire
from harness.errors import InputError
from harness.oracle.precision import Array, file_dtype

__all__ = ["Packed", "TensorReader", "attribute_value", "read_model"]


_INSIDE_FROM = 4096
"""Bytes from which raw values are left in the model file; smaller ones are cheaper to parse along."""

_NESTED: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
}
"""Field numbers of `onnx.proto` by message: those that can hold a tensor, with the message that they hold."""

_RAW_DATA, _DATA_LOCATION = 9, 14
_DEEPEST_MESSAGE = 100  # what protobuf itself allows


def read_model(path: Path) -> onnx.ModelProto:
    """Parse the file `path`; large tensors stay where they are.

    Large raw values inside the file come as external data: their location is the file itself. So a model
    of a gigabyte in one file is read as fast as one with external data, and its weights are mapped.

    Raises:
        InputError: the file is missing, unreadable, truncated, or no ONNX model.
    """
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        with memoryview(mapped) as data:
            model = onnx.load_model_from_string(_thinned(data, 0, size, "model", path.name, 0), "protobuf")
    except OSError as error:
        raise InputError(
            f"Cannot read the model {path}: {error.strerror or error}.",
            next_action="Name a directory or an .onnx file that exists.",
        ) from error
    except (DecodeError, wire.WireError) as error:
        raise InputError(
            f"{path} is not a readable ONNX model: it is truncated or damaged.",
            next_action="Export or copy the file again.",
        ) from error
    if not model.graph.output or not model.opset_import:
        raise InputError(
            f"{path} holds no ONNX graph: it is empty or truncated.",
            next_action="Export or copy the file again.",
        )
    return model


def _thinned(data: memoryview, start: int, end: int, message: str, location: str, depth: int) -> bytes:
    """The message at `data[start:end]` with large raw values turned into references to `location`.

    Raises:
        WireError: the bytes are no such message.
    """
    if depth > _DEEPEST_MESSAGE:
        raise wire.WireError(f"messages nested too deep at offset {start}")
    if message == "tensor":
        return _thinned_tensor(data, start, end, location)
    nested = _NESTED[message]
    parts: list[bytes | memoryview] = []
    done = start
    for number, kind, first, last in wire.fields(data, start, end, only=nested):
        if kind != wire.BYTES or last - first < _INSIDE_FROM:
            continue
        inner = _thinned(data, first, last, nested[number], location, depth + 1)
        before = _field_start(data, number, first, last)
        if len(inner) < last - first and before is not None:
            parts += [data[done:before], _header(number, len(inner)), inner]
            done = last
    parts.append(data[done:end])
    return b"".join(parts)


def _thinned_tensor(data: memoryview, start: int, end: int, location: str) -> bytes:
    parts: list[bytes | memoryview] = []
    done = start
    inside = None
    for number, kind, first, last in wire.fields(data, start, end, only=(_RAW_DATA, _DATA_LOCATION)):
        if number == _DATA_LOCATION and kind == wire.VARINT and first == onnx.TensorProto.EXTERNAL:
            return bytes(data[start:end])
        before = _field_start(data, number, first, last)
        if number == _RAW_DATA and kind == wire.BYTES and last - first >= _INSIDE_FROM and before is not None:
            parts.append(data[done:before])
            done, inside = last, (first, last - first)
    parts.append(data[done:end])
    if inside is not None:
        reference = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
        for key, value in (("location", location), ("offset", inside[0]), ("length", inside[1])):
            reference.external_data.add(key=key, value=str(value))
        parts.append(reference.SerializeToString())
    return b"".join(parts)


def _field_start(data: memoryview, number: int, first: int, last: int) -> int | None:
    """Where the field with the payload `data[first:last]` begins.

    None where its header is written in more bytes than it needs, which no writer does: such a field is
    left as it stands.
    """
    header = _header(number, last - first)
    return first - len(header) if data[first - len(header) : first] == header else None


def _header(number: int, size: int) -> bytes:
    """Tag and length that stand before a payload of `size` bytes."""
    header = bytearray()
    for value in (number << 3 | wire.BYTES, size):
        while value > 0x7F:
            header.append(value & 0x7F | 0x80)
            value >>= 7
        header.append(value)
    return bytes(header)


class TensorReader:
    """Turns the tensors of one model into arrays; maps each external file once.

    Attributes:
        path: the model file; external files stand in its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, memoryview] = {}

    def array(self, tensor: onnx.TensorProto) -> Array:
        """The values of `tensor` in the dtype of the file, read-only; 2- and 4-bit types are unpacked.

        Raises:
            InputError: its external file is missing, too short, or outside the model's folder, or the
                tensor has another number of bytes than its shape says.
        """
        if tensor.data_type == onnx.TensorProto.UNDEFINED:
            raise self._broken(tensor, "it has no element type")
        file_dtype(tensor.data_type, of=f"tensor {tensor.name or '(unnamed)'} of {self.path.name}")
        if tensor.data_type == onnx.TensorProto.STRING:
            return self._strings(tensor)
        shape = tuple(tensor.dims)
        data = self._data(tensor)
        if data is not None:
            typed = self._typed(tensor, data, shape)
            return typed.unpacked() if isinstance(typed, Packed) else typed
        try:
            # Values in typed fields are decoded element by element; only small tensors come so.
            return onnx.numpy_helper.to_array(tensor)
        except ValueError as error:
            raise self._broken(tensor, str(error)) from error

    def packed(self, tensor: onnx.TensorProto) -> Packed | None:
        """The values of `tensor` as the file packs them; None where it does not.

        Raises:
            InputError: as `array`.
        """
        if tensor.data_type in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
            return None
        if _packed_bits(file_dtype(tensor.data_type, of=f"tensor {tensor.name}")) is None:
            return None
        data = self._data(tensor)
        typed = None if data is None else self._typed(tensor, data, tuple(tensor.dims))
        return typed if isinstance(typed, Packed) else None

    def _data(self, tensor: onnx.TensorProto) -> memoryview | None:
        """The bytes of a tensor; None where it has values instead."""
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            return self._external(tensor)
        return memoryview(tensor.raw_data) if tensor.HasField("raw_data") else None

    def _strings(self, tensor: onnx.TensorProto) -> Array:
        text = [item.decode("utf-8", "replace") for item in tensor.string_data]
        array = np.empty(len(text), dtype=object)
        array[:] = text
        return array.reshape(tuple(tensor.dims))

    def _typed(self, tensor: onnx.TensorProto, data: memoryview, shape: tuple[int, ...]) -> Array | Packed:
        """`data` as values of the tensor's type and shape, without a copy."""
        count = int(np.prod(shape, dtype=np.int64))
        dtype = file_dtype(tensor.data_type)
        bits = _packed_bits(dtype)
        wanted = count * dtype.itemsize if bits is None else -(-count * bits // 8)
        if len(data) != wanted:
            raise self._broken(tensor, f"it has {len(data)} bytes where its shape asks {wanted}")
        if bits is None:
            return np.frombuffer(data, dtype=dtype).reshape(shape)
        return Packed(np.frombuffer(data, dtype=np.uint8), dtype, shape, bits)

    def _external(self, tensor: onnx.TensorProto) -> memoryview:
        """The bytes of an external tensor, as a view into its mapped file."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        data = self._mapped(tensor, location)
        try:
            offset = int(entries.get("offset", "0"))
            length = int(entries.get("length", str(len(data) - offset)))
        except ValueError as error:
            raise self._broken(tensor, "offset or length of its external data is no number") from error
        if offset < 0 or length < 0 or offset + length > len(data):
            raise InputError(
                f"External file {location} ends at byte {len(data)}, but tensor {tensor.name} of "
                f"{self.path.name} lies at bytes {offset} to {offset + length}.",
                next_action=f"Copy {location} again: it is truncated, or belongs to another export.",
            )
        return data[offset : offset + length]

    def _mapped(self, tensor: onnx.TensorProto, location: str) -> memoryview:
        if location in self._files:
            return self._files[location]
        file = self.path.parent / location
        pure = PurePosixPath(location)
        # A link may lead from the package to a file store beside the model file (download caches do so),
        # but not elsewhere.
        homes = (self.path.parent.resolve(), self.path.resolve().parent)
        inside = any(file.resolve().is_relative_to(home) for home in homes)
        if not location or pure.is_absolute() or ".." in pure.parts or not inside:
            raise InputError(
                f"Tensor {tensor.name} of {self.path.name} keeps its data in {location or 'no file'}, "
                f"which is outside the package folder {self.path.parent}.",
                next_action="Put the file into the package folder and name it there.",
            )
        try:
            with file.open("rb") as stream:
                size = stream.seek(0, 2)
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise InputError(
                f"External file {file}, which holds tensor {tensor.name}, cannot be read: "
                f"{error.strerror or error}.",
                next_action=f"Put {location} beside {self.path.name}.",
            ) from error
        self._files[location] = memoryview(mapped)
        return self._files[location]

    def _broken(self, tensor: onnx.TensorProto, reason: str) -> InputError:
        return InputError(
            f"Tensor {tensor.name or '(unnamed)'} of {self.path.name} cannot be read: {reason}.",
            next_action="Export or copy the file again.",
        )


@dataclass(frozen=True, slots=True)
class Packed:
    """Elements of a few bits as a file packs them, lowest bits first.

    Attributes:
        data: the bytes, flat.
        dtype: of the elements.
        shape: of the tensor.
        bits: of an element.
    """

    data: Array
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    bits: int

    def unpacked(self) -> Array:
        """All of them, an element each."""
        return self._typed(self._codes(0, math.prod(self.shape))).reshape(self.shape)

    def levels(self) -> Array:
        """The element of each code, in order."""
        return self._typed(np.arange(2**self.bits, dtype=np.uint8))

    def codes(self, part: tuple[slice, slice]) -> Array:
        """The codes at some rows and columns of a matrix, uint8, the only ones that are unpacked."""
        rows, columns = (range(extent)[along] for extent, along in zip(self.shape, part, strict=True))
        width, per_byte = self.shape[1], 8 // self.bits
        if width % per_byte or 8 % self.bits:
            # Rows begin anywhere in a byte.
            return self._codes(rows.start * width, len(rows) * width).reshape(-1, width)[:, part[1]]
        first, last = columns.start // per_byte, -(-columns.stop // per_byte)
        packed = self.data.reshape(self.shape[0], -1)[part[0], first:last]
        codes = _codes(packed.reshape(-1), self.bits).reshape(len(rows), -1)
        skip = columns.start - first * per_byte
        return codes[:, skip : skip + len(columns)]

    def _codes(self, start: int, count: int) -> Array:
        first = start * self.bits // 8
        codes = _codes(self.data[first : -(-(start + count) * self.bits // 8)], self.bits)
        skip = start - first * 8 // self.bits
        return codes[skip : skip + count]

    def _typed(self, codes: Array) -> Array:
        if not self.dtype.name.startswith("int"):
            return codes.view(self.dtype)
        # Two's complement: codes with the highest bit are negative.
        values: Array = codes.astype(np.int8) - (codes >> (self.bits - 1)).astype(np.int8) * 2**self.bits
        return values.astype(self.dtype)


def _packed_bits(dtype: np.dtype[Any]) -> int | None:
    """Bits of an element that a file packs (`int4`, `float6_e2m3fn`), None where it has whole bytes."""
    found = re.match(r"(?:u?int|float)([2-7])(?!\d)", dtype.name)
    return int(found[1]) if found else None


def _codes(packed: Array, bits: int) -> Array:
    """Codes of `bits` bits, lowest bits first, as a uint8 each; what is left of the last byte too."""
    if 8 % bits:
        singles = np.unpackbits(packed, bitorder="little")
        whole = singles[: singles.size // bits * bits].reshape(-1, bits)
        joined: Array = whole @ (1 << np.arange(bits, dtype=np.uint8))
        return joined
    codes = np.empty((packed.size, 8 // bits), dtype=np.uint8)
    for place in range(8 // bits):
        # One place at a time, as numpy takes far longer along an axis of two.
        np.right_shift(packed, np.uint8(place * bits), out=codes[:, place])
    np.bitwise_and(codes, np.uint8(2**bits - 1), out=codes)
    return codes.reshape(-1)


def attribute_value(attribute: onnx.AttributeProto, reader: TensorReader) -> Any:
    """An attribute as Python value: number, string, list or array. Graphs are for the planner."""
    kinds = onnx.AttributeProto
    if attribute.type == kinds.STRING:
        return attribute.s.decode("utf-8", "replace")
    if attribute.type == kinds.STRINGS:
        return [item.decode("utf-8", "replace") for item in attribute.strings]
    if attribute.type == kinds.TENSOR:
        return reader.array(attribute.t)
    if attribute.type == kinds.TENSORS:
        return [reader.array(item) for item in attribute.tensors]
    return onnx.helper.get_attribute_value(attribute)
