"""What goes between the two processes: frames on a stream, each a JSON document behind its length.

A document holds plain data alone, so that nothing which a broken engine writes there can do more than be
refused. Tensors do not pass here: see `harness.engines.isolated.arena`. Floats survive to the last bit.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeAlias

from harness.engines.base import SessionInfo, TopLogits
from harness.errors import (
    EngineFailedError,
    EngineUnavailableError,
    InputError,
    InvalidRunError,
    ParityError,
    shown,
)
from harness.ports import PortInventory

__all__ = [
    "ERRORS",
    "Arriving",
    "Document",
    "MalformedError",
    "error_document",
    "framed",
    "info_document",
    "ports_document",
    "receive",
    "shortened",
    "top_document",
]

Document: TypeAlias = dict[str, Any]

_LENGTH = struct.Struct("<Q")
_LONGEST = 1 << 28
"""More than any document is long: what claims to be longer is none."""

_PIECE = 1 << 16

_LONGEST_TEXT = 4096
_ROOM = 40
"""Characters for what `shortened` says."""

ERRORS: dict[str, type[EngineUnavailableError | InputError | InvalidRunError]] = {
    "unavailable": EngineUnavailableError,
    "input": InputError,
    "invalid-run": InvalidRunError,
}
"""Errors of ours that are no failure of the engine, by their names in documents."""


class MalformedError(ValueError):
    """What came is no document, or not the one that was expected; the message says what it lacks."""


class Arriving:
    """A document that arrives in pieces."""

    def __init__(self) -> None:
        self._data = bytearray()

    def read(self, channel: socket.socket) -> Document | None:
        """Take one piece more, if there is one; the document once it is whole.

        Raises:
            MalformedError: it is no document.
            EOFError: there is no more to come.
            OSError: as the socket does.
        """
        try:
            piece = channel.recv(_PIECE)
        except BlockingIOError:
            return None
        if not piece:
            raise EOFError
        self._data += piece
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > _LONGEST:
            raise MalformedError(f"it says that it has {length} bytes")
        missing = _LENGTH.size + length - len(self._data)
        if missing < 0:
            raise MalformedError("more follows where it should end")
        return None if missing else _parsed(self._data[_LENGTH.size :])


def framed(document: Mapping[str, Any]) -> bytes:
    """A document as it goes through the channel. Numbers and arrays of numpy become those of Python.

    Raises:
        TypeError, ValueError, RecursionError: it holds what is no plain data.
    """
    body = json.dumps(document, separators=(",", ":"), default=_plain).encode()
    return _LENGTH.pack(len(body)) + body


def receive(channel: socket.socket) -> Document | None:
    """Wait for a document; None at the end of the stream, also where it ends within a document.

    Raises:
        MalformedError: it is no document.
        OSError: as the socket does.
    """
    arriving = Arriving()
    try:
        while (document := arriving.read(channel)) is None:
            pass
    except EOFError:
        return None
    return document


def shortened(text: str) -> str:
    """A text, or its beginning with the number of characters that are left out."""
    if len(text) <= _LONGEST_TEXT:
        return text
    kept = _LONGEST_TEXT - _ROOM
    return f"{text[:kept]}... ({len(text) - kept} more characters)"


def error_document(error: ParityError) -> Document:
    """An error of ours as plain data."""
    document: Document = {
        "message": shortened(str(error.message)),
        "next": shortened(str(error.next_action)),
    }
    if isinstance(error, EngineFailedError):
        return document | {"kind": error.kind if isinstance(error.kind, str) else _named(error.kind)}
    kinds = (kind for kind, family in ERRORS.items() if isinstance(error, family))
    return document | {"class": next(kinds, "input")}


def info_document(info: SessionInfo) -> Document:
    """What runs, as plain data."""
    return asdict(info) | {"settings": dict(info.settings), "placement": _unwrapped(info.placement)}


def ports_document(inventory: PortInventory) -> Document:
    """Ports as plain data."""
    sides = {"inputs": inventory.inputs, "outputs": inventory.outputs}
    return {side: [[port.name, port.dtype, port.shape] for port in ports] for side, ports in sides.items()}


def top_document(top: TopLogits) -> list[Any]:
    """The largest logits of a position as plain data."""
    return [top.token_ids, top.values, top.has_nan]


def _parsed(body: bytearray) -> Document:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"it is no JSON that can be read: {error}") from error
    if not isinstance(document, dict):
        raise MalformedError(f"it is {shown(document)}, and must be an object")
    return document


def _unwrapped(value: Any) -> Any:
    """Mappings of any class as dictionaries."""
    if isinstance(value, Mapping):
        return {str(key): _unwrapped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_unwrapped(item) for item in value]
    return value


def _plain(value: Any) -> Any:
    """What of numpy has a plain form."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray) and value.dtype.kind in "biuf":
        return value.tolist()
    raise TypeError(_named(value))


def _named(value: Any) -> str:
    """A value and its class, whatever its `repr` does."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        return f"{shown(value)} of class {kind}"
    except Exception:
        return f"an object of class {kind}"
