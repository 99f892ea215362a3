"""What goes between the two processes: frames on a stream, each a JSON document behind its length.

A document holds plain data alone, so that nothing which a broken engine writes there can do more than be
refused. Tensors do not pass here: see `harness.engines.isolated.arena`. Floats survive to the last bit.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal, TypeAlias

from harness.engines.base import SessionInfo, TopLogits
from harness.errors import (
    EngineFailedError,
    EngineUnavailableError,
    InputError,
    InvalidRunError,
    ParityError,
)
from harness.ports import Port, PortInventory

__all__ = [
    "Document",
    "MalformedError",
    "error_document",
    "error_from",
    "info_document",
    "info_from",
    "ports_document",
    "ports_from",
    "receive",
    "send",
    "top_document",
    "top_from",
]

Document: TypeAlias = dict[str, Any]

_LENGTH = struct.Struct("<Q")
_LONGEST = 1 << 28
"""More than any document is long: what claims to be longer is none."""

_ERRORS: dict[str, type[EngineUnavailableError | InputError | InvalidRunError]] = {
    "unavailable": EngineUnavailableError,
    "input": InputError,
    "invalid-run": InvalidRunError,
}

FailureKind: TypeAlias = Literal["crashed", "timeout", "unsupported"]


class MalformedError(ValueError):
    """What came is no document, or not the one that was expected."""


def send(channel: socket.socket, document: Mapping[str, Any]) -> None:
    """Write one document. Raises OSError as the socket does."""
    body = json.dumps(document, separators=(",", ":")).encode()
    channel.sendall(_LENGTH.pack(len(body)) + body)


def receive(channel: socket.socket) -> Document | None:
    """Read one document; None at the end of the stream, also where it ends within a document.

    Raises:
        MalformedError: it is no document.
        OSError: as the socket does.
    """
    head = _exactly(channel, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > _LONGEST:
        raise MalformedError(f"a document of {length} bytes")
    body = _exactly(channel, length)
    if body is None:
        return None
    try:
        document = json.loads(body)
    except ValueError as error:
        raise MalformedError(str(error)) from error
    if not isinstance(document, dict):
        raise MalformedError("a document that is no object")
    return document


def _exactly(channel: socket.socket, length: int) -> bytearray | None:
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        count = channel.recv_into(view[done:])
        if not count:
            return None
        done += count
    return data


def error_document(error: ParityError) -> Document:
    """An error of ours as plain data."""
    document: Document = {"message": error.message, "next": error.next_action}
    if isinstance(error, EngineFailedError):
        return document | {"kind": error.kind}
    kinds = (kind for kind, family in _ERRORS.items() if isinstance(error, family))
    return document | {"class": next(kinds, "input")}


def error_from(document: Mapping[str, Any]) -> ParityError:
    """The error that `error_document` wrote, without details."""
    message, next_action = str(document["message"]), str(document["next"])
    if "class" in document:
        return _ERRORS[document["class"]](message, next_action=next_action)
    kind: FailureKind = document["kind"]
    return EngineFailedError(message, next_action=next_action, kind=kind)


def info_document(info: SessionInfo) -> Document:
    """What runs, as plain data."""
    return asdict(info) | {"settings": dict(info.settings), "placement": _plain(info.placement)}


def info_from(document: Mapping[str, Any]) -> SessionInfo:
    """What `info_document` wrote."""
    return SessionInfo(**document)


def ports_document(inventory: PortInventory) -> Document:
    """Ports as plain data."""
    sides = {"inputs": inventory.inputs, "outputs": inventory.outputs}
    return {side: [[port.name, port.dtype, port.shape] for port in ports] for side, ports in sides.items()}


def ports_from(document: Mapping[str, Any]) -> PortInventory:
    """What `ports_document` wrote."""
    return PortInventory(*(tuple(_port(*port) for port in document[side]) for side in ("inputs", "outputs")))


def top_document(top: TopLogits) -> list[Any]:
    """The largest logits of a position as plain data."""
    return [top.token_ids, top.values, top.has_nan]


def top_from(document: list[Any]) -> TopLogits:
    """What `top_document` wrote."""
    ids, values, has_nan = document
    return TopLogits(tuple(ids), tuple(values), has_nan)


def _port(name: str, dtype: str | None, shape: list[Any] | None) -> Port:
    return Port(name, dtype, None if shape is None else tuple(shape))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
