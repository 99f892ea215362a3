"""Typed access to the plain mappings that sidecar files are read into."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from harness.errors import InputError, shown

__all__ = [
    "integer",
    "known_keys",
    "mapping",
    "misfit",
    "optional_string",
    "section",
    "string",
    "strings",
]

_PRIVATE = "x-"


def misfit(place: str, wanted: str, value: object) -> InputError:
    """The error for a field that has not the form it must have. `place` is its path in the sidecar."""
    return InputError(
        f"{place} must be {wanted}, not {shown(value)}.",
        next_action="Correct the sidecar, or pass --ignore-declared to derive the topology from the ports.",
    )


def mapping(value: object, place: str) -> Mapping[str, Any]:
    """`value`, which must be a mapping.

    Raises:
        InputError: it is none.
    """
    if not isinstance(value, Mapping):
        raise misfit(place, "a mapping", value)
    return value


def known_keys(parent: Mapping[str, Any], known: Collection[str], place: str) -> None:
    """Check that `parent` has no keys but those in `known`, and private ones, which begin with `x-`.

    A misspelt key would otherwise declare nothing, and nobody would notice.

    Raises:
        InputError: a key is unknown; the message names it, and the one that may be meant.
    """
    for key in parent:
        if isinstance(key, str) and (key in known or key.startswith(_PRIVATE)):
            continue
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Known are {', '.join(sorted(known))}."
        raise InputError(
            f"{place} has the key {key!r:.60}, which means nothing there. {hint}",
            next_action=f"Correct the key; one that is meant for another tool begins with {_PRIVATE}.",
        )


def section(parent: Mapping[str, Any], key: str, place: str) -> Mapping[str, Any]:
    """The mapping at `key`; an empty one where it is absent or null.

    Raises:
        InputError: it is something else.
    """
    value = parent.get(key)
    return {} if value is None else mapping(value, place)


def string(value: object, place: str) -> str:
    """`value`, which must be a port name.

    Raises:
        InputError: it is no string, or empty.
    """
    if not isinstance(value, str) or not value:
        raise misfit(place, "a port name", value)
    return value


def optional_string(parent: Mapping[str, Any], key: str, place: str) -> str | None:
    """The port name at `key`; None where it is absent or null.

    Raises:
        InputError: it is something else.
    """
    value = parent.get(key)
    return None if value is None else string(value, place)


def strings(value: object, place: str) -> tuple[str, ...]:
    """`value`, which must be a list of port names.

    Raises:
        InputError: it is none.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise misfit(place, "a list of port names", value)
    return tuple(string(item, f"{place}[{index}]") for index, item in enumerate(value))


def integer(value: object, place: str) -> int:
    """`value`, which must be an integer.

    Raises:
        InputError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise misfit(place, "an integer", value)
    return value
