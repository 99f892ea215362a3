"""What a worker answered, looked at where it is read: an engine may have written anything into the channel.

Each function takes a document and gives what it says, or raises `MalformedError` with the field, its value
and what it must be. What is said of a session and of logits is for `harness.engines.answers` to judge, as it
is of engines in this process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from harness.engines.base import SessionInfo, TopLogits
from harness.engines.isolated.protocol import ERRORS, Document, MalformedError, shortened
from harness.errors import EngineFailedError, ParityError, shown
from harness.onnx_file import ELEMENT_TYPES
from harness.ports import Port, PortInventory

__all__ = ["FailureKind", "Kind", "Opened", "Ran", "check_copy", "error_in", "opened_in", "ran_in", "tops_in"]

FailureKind: TypeAlias = Literal["crashed", "timeout", "unsupported"]

Kind: TypeAlias = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor."""

_LONGEST_INFO = 1 << 18
"""Characters of what an engine may say about itself."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The answer to `open`."""

    info: SessionInfo
    inventory: PortInventory


@dataclass(frozen=True, slots=True)
class Ran:
    """The answer to `run`: a kind for each output, and the reduction that came along, if one did."""

    kinds: tuple[Kind, ...]
    tops: list[TopLogits] | None


def opened_in(document: Document) -> Opened:
    """Read the answer to `open`."""
    return Opened(_info(_object(document, "info")), _ports(_object(document, "ports")))


def ran_in(document: Document, outputs: Sequence[str]) -> Ran:
    """Read the answer to `run`, which was asked for `outputs`."""
    kinds = _list(document, "kinds")
    places = _list(document, "outputs")
    _must(len(places) == len(outputs), "`outputs`", places, f"{len(outputs)} numbers")
    made = []
    for name, place in zip(outputs, places, strict=True):
        _must(_is_count(place) and place < len(kinds), "`outputs`", places, "indices of `kinds`")
        made.append(_kind(kinds[place], f"output {shown(name)}"))
    return Ran(tuple(made), tops_in(document) if "tops" in document else None)


def tops_in(document: Document) -> list[TopLogits]:
    """Read the answer to `top`."""
    return [_top(top) for top in _list(document, "tops")]


def check_copy(document: Document, kind: Kind) -> None:
    """See that the answer to `copy` is about the tensor that was asked for."""
    found = _kind([_field(document, "dtype"), _field(document, "shape")], "the copy of a tensor")
    if found != kind:
        raise MalformedError(
            _misfit("the copy of a tensor", [found[0], *found[1]], shown([kind[0], *kind[1]]))
        )


def error_in(document: Document) -> ParityError | None:
    """The error that an answer is, without details; None where it is none."""
    if "error" not in document:
        return None
    error = _object(document, "error")
    message, next_action = (shortened(_text(error, name)) for name in ("message", "next"))
    if "class" in error:
        known = ERRORS.get(name) if isinstance(name := error["class"], str) else None
        if known is None:
            raise MalformedError(_misfit("`class` of an error", name, f"one of {', '.join(ERRORS)}"))
        return known(message, next_action=next_action)
    kind = _field(error, "kind")
    if kind not in get_args(FailureKind):
        kinds = ", ".join(get_args(FailureKind))
        raise MalformedError(
            f"{_misfit('`kind` of an error', kind, f'one of {kinds}')}; it says {shown(message)}"
        )
    return EngineFailedError(message, next_action=next_action, kind=kind)


def _info(document: Document) -> SessionInfo:
    engine, version, mode = (_field(document, name) for name in ("engine", "version", "mode"))
    settings, placement = _object(document, "settings"), _field(document, "placement")
    try:
        json.dumps(placement, allow_nan=False)
    except ValueError as error:
        raise MalformedError(f"`placement` is no JSON: {error}") from error
    length = len(json.dumps(document))
    if length > _LONGEST_INFO:
        raise MalformedError(f"`info` has {length} characters, and may have {_LONGEST_INFO}")
    return SessionInfo(engine, version, settings, placement, mode)


def _ports(document: Document) -> PortInventory:
    sides = ([_port(port, side) for port in _list(document, side)] for side in ("inputs", "outputs"))
    inputs, outputs = map(tuple, sides)
    return PortInventory(inputs, outputs)


def _port(port: Any, side: str) -> Port:
    _must(isinstance(port, list) and len(port) == 3, f"a port of `{side}`", port, "name, dtype and shape")
    name, dtype, shape = port
    _must(isinstance(name, str), f"the name of a port of `{side}`", name, "a text")
    _must(dtype is None or isinstance(dtype, str), f"the dtype of {shown(name)}", dtype, "a text or nothing")
    fits = isinstance(shape, list) and all(
        axis is None or isinstance(axis, str) or _is_int(axis) for axis in shape
    )
    _must(
        shape is None or fits,
        f"the shape of {shown(name)}",
        shape,
        "a list of integers and names, or nothing",
    )
    return Port(name, dtype, None if shape is None else tuple(shape))


def _kind(kind: Any, of: str) -> Kind:
    _must(isinstance(kind, list) and len(kind) == 2, of, kind, "dtype and shape")
    dtype, shape = kind
    _must(
        isinstance(dtype, str) and dtype in ELEMENT_TYPES,
        f"the dtype of {of}",
        dtype,
        "an element type of ONNX",
    )
    fits = isinstance(shape, list) and all(map(_is_count, shape))
    _must(fits, f"the shape of {of}", shape, "a list of integers from 0 on")
    return dtype, tuple(shape)


def _top(top: Any) -> TopLogits:
    fits = isinstance(top, list) and len(top) == 3 and all(isinstance(part, list) for part in top[:2])
    _must(fits, "an entry of `tops`", top, "token IDs, values and a flag")
    ids, values, has_nan = top
    return TopLogits(tuple(ids), tuple(values), has_nan)


def _field(document: Document, name: str) -> Any:
    if name not in document:
        raise MalformedError(f"it lacks `{name}`")
    return document[name]


def _object(document: Document, name: str) -> Document:
    value = _field(document, name)
    _must(isinstance(value, dict), f"`{name}`", value, "an object")
    return dict(value)


def _list(document: Document, name: str) -> list[Any]:
    value = _field(document, name)
    _must(isinstance(value, list), f"`{name}`", value, "a list")
    return list(value)


def _text(document: Document, name: str) -> str:
    value = _field(document, name)
    _must(isinstance(value, str), f"`{name}`", value, "a text")
    return str(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _must(fits: bool, what: str, value: Any, rule: str) -> None:
    if not fits:
        raise MalformedError(_misfit(what, value, rule))


def _misfit(what: str, value: Any, rule: str) -> str:
    return f"{what} is {shown(value)}, and must be {rule}"
