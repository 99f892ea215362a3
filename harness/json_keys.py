"""Keys that stand twice in one mapping of JSON: parsers keep the last value, and nobody would notice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["doubled", "unique_keys"]


def unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping of these keys and values, for `json.loads(..., object_pairs_hook=unique_keys)`.

    Raises:
        ValueError: a key stands there twice.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(doubled(key))
        found[key] = value
    return found


def doubled(key: str) -> str:
    """What is said of a key that stands twice."""
    return f"the key {key!r:.60} stands twice in one mapping"
