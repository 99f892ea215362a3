"""What a worker answered, looked at once and here: an engine may have written anything into the channel.

Each function takes a document and gives what it says, or raises `MalformedError` with the field, its value
and what it must be.
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
    """Read the answer to `top`. What the numbers mean is for others to judge."""
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
    engine, version = _text(document, "engine"), _text(document, "version")
    settings = _object(document, "settings")
    for name, value in settings.items():
        _must(
            isinstance(value, bool | int | str),
            f"setting {shown(name)}",
            value,
            "true, false, an integer or a text",
        )
    placement = _field(document, "placement")
    _must(placement is None or isinstance(placement, dict), "`placement`", placement, "an object or nothing")
    mode = _field(document, "mode")
    _must(mode in ("eager", "captured", None), "`mode`", mode, "eager, captured or nothing")
    try:
        length = len(json.dumps(document, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"`info` is no JSON: {error}") from error
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
    _must(isinstance(top, list) and len(top) == 3, "an entry of `tops`", top, "IDs, values and a flag")
    ids, values, has_nan = top
    _must(isinstance(ids, list) and all(map(_is_int, ids)), "token IDs of `tops`", ids, "integers")
    fits = isinstance(values, list) and all(_is_int(value) or isinstance(value, float) for value in values)
    _must(fits and len(values) == len(ids), "values of `tops`", values, "a number for each token ID")
    _must(isinstance(has_nan, bool), "the flag of `tops`", has_nan, "true or false")
    try:
        return TopLogits(tuple(ids), tuple(map(float, values)), has_nan)
    except OverflowError:
        raise MalformedError(_misfit("values of `tops`", values, "numbers that a float can hold")) from None


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
