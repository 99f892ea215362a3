"""Protobuf wire format, as far as ONNX files need it: fields are found, nothing else is decoded.

A message is a sequence of fields, each a tag (field number and wire type) and a payload. Payloads that
nobody asks for are stepped over by their length, so a graph's nodes and weights cost nothing but the
few bytes of their headers. Encoding: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import TypeAlias

__all__ = ["BYTES", "Field", "VARINT", "WireError", "fields", "packed", "signed", "text"]


class WireError(ValueError):
    """The bytes are not a protobuf message. The message says what is wrong, and at which offset."""


Field: TypeAlias = tuple[int, int, int, int]
"""Field number, wire type, and two integers: the varint's value and 0, or start and end of the payload."""

VARINT = 0
FIXED64 = 1
BYTES = 2
START_GROUP = 3
END_GROUP = 4
FIXED32 = 5

_FIXED_SIZE = {FIXED64: 8, FIXED32: 4}
_LONGEST_VARINT = 10
_MAX_FIELD_NUMBER = (1 << 29) - 1
_UINT64 = (1 << 64) - 1
_DEEPEST_GROUP = 100  # what protobuf itself allows


def fields(data: memoryview, start: int, end: int, *, only: Container[int] | None = None) -> Iterator[Field]:
    """Yield the fields of the message that stands at `data[start:end]`, in file order.

    `only` names the field numbers to yield; the others are checked and stepped over, which is faster
    than yielding them. Groups (a form of nesting that ONNX does not use) are checked and stepped over.

    Raises:
        WireError: a field is cut off, or is none.
    """
    position = start
    open_groups: list[int] = []
    while position < end:
        tag = data[position]
        if tag < 0x80:  # nearly all tags and many lengths are one byte: not worth a call
            position += 1
        else:
            tag, position = _varint(data, position, end)
        number, wire_type = tag >> 3, tag & 7
        if not 1 <= number <= _MAX_FIELD_NUMBER:
            raise WireError(f"field number {number} at offset {position}")
        if wire_type == VARINT:
            value, position = _varint(data, position, end)
            field = (number, VARINT, value, 0)
        elif wire_type == START_GROUP:
            if len(open_groups) == _DEEPEST_GROUP:
                raise WireError(f"groups nested more than {_DEEPEST_GROUP} deep at offset {position}")
            open_groups.append(number)
            continue
        elif wire_type == END_GROUP:
            if not open_groups or open_groups.pop() != number:
                raise WireError(f"group {number} closed but not open at offset {position}")
            continue
        else:
            if wire_type == BYTES:
                if position < end and (size := data[position]) < 0x80:
                    position += 1
                else:
                    size, position = _varint(data, position, end)
            elif wire_type in _FIXED_SIZE:
                size = _FIXED_SIZE[wire_type]
            else:
                raise WireError(f"wire type {wire_type} at offset {position}")
            if size > end - position:
                raise WireError(
                    f"field {number} at offset {position} claims {size} bytes of {end - position}"
                )
            field = (number, wire_type, position, position + size)
            position += size
        if not open_groups and (only is None or number in only):
            yield field
    if open_groups:
        raise WireError(f"group {open_groups[-1]} is never closed")


def _varint(data: memoryview, position: int, end: int) -> tuple[int, int]:
    """Read a base-128 integer of at most 64 bits; returns it and the offset behind it."""
    value = shift = 0
    for offset in range(position, min(end, position + _LONGEST_VARINT)):
        byte = data[offset]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _UINT64, offset + 1
        shift += 7
    if end - position < _LONGEST_VARINT:
        raise WireError(f"integer cut off at offset {position}")
    raise WireError(f"integer of more than {_LONGEST_VARINT} bytes at offset {position}")


def packed(data: memoryview, start: int, end: int) -> list[int]:
    """The integers of a packed repeated field whose payload stands at `data[start:end]`.

    Raises:
        WireError: one is cut off.
    """
    values = []
    while start < end:
        value, start = _varint(data, start, end)
        values.append(signed(value))
    return values


def signed(value: int) -> int:
    """The two's complement reading of a 64-bit varint, as `int64` fields have it."""
    return value - (1 << 64) if value >> 63 else value


def text(data: memoryview, start: int, end: int) -> str:
    """The UTF-8 text of a string field.

    Raises:
        WireError: the bytes are not UTF-8.
    """
    try:
        return str(data[start:end], "utf-8")
    except UnicodeDecodeError as error:
        raise WireError(f"text at offset {start} is not UTF-8") from error
