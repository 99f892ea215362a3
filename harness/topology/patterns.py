"""Matching of port names against the patterns of conventions, at a cost that grows with the names only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Generic, TypeVar

from harness.topology.conventions import INDEX, STEM

__all__ = ["PatternTable", "StemTable", "layer_of", "skeleton"]

_Entry = TypeVar("_Entry")
_DIGITS = re.compile("[0-9]+")  # ASCII only: a layer index is not a word in another script
_LAYER = re.compile(r"(?:^|[._/:])([0-9]{1,9})(?=$|[._/:])")
_HOLE = "\0"


def skeleton(name: str) -> str:
    """`name` with each run of digits replaced: names that differ in their indices have it in common."""
    return _DIGITS.sub(_HOLE, name)


def layer_of(text: str) -> int | None:
    """The first number that stands alone between separators, None where there is none."""
    found = _LAYER.search(text)
    return int(found.group(1)) if found else None


class PatternTable(Generic[_Entry]):
    """Patterns with at most one `%d`, each with an entry to return. A second one would be literal."""

    def __init__(self, patterns: Iterable[tuple[str, _Entry]]) -> None:
        self._by_skeleton: dict[str, list[tuple[str, str, bool, _Entry]]] = {}
        for pattern, entry in patterns:
            prefix, hole, suffix = pattern.partition(INDEX)
            key = skeleton(prefix + "0" + suffix if hole else pattern)
            self._by_skeleton.setdefault(key, []).append((prefix, suffix, bool(hole), entry))

    def matches(self, name: str) -> list[tuple[_Entry, str]]:
        """All entries whose pattern `name` follows, each with what `%d` stands for ("" without one)."""
        found = []
        for prefix, suffix, indexed, entry in self._by_skeleton.get(skeleton(name), ()):
            middle = name[len(prefix) : len(name) - len(suffix)]
            if name != prefix + middle + suffix:
                continue
            if _DIGITS.fullmatch(middle) if indexed else not middle:
                found.append((entry, middle))
        return found


class StemTable(Generic[_Entry]):
    """Patterns with one `*`, each with an entry to return. A second one would be literal."""

    def __init__(self, patterns: Iterable[tuple[str, _Entry]]) -> None:
        self._patterns: list[tuple[str, str, _Entry]] = []
        for pattern, entry in patterns:
            prefix, _, suffix = pattern.partition(STEM)
            self._patterns.append((prefix, suffix, entry))

    def matches(self, name: str) -> list[tuple[_Entry, str]]:
        """All entries whose pattern `name` follows, each with what `*` stands for in it."""
        return [
            (entry, name[len(prefix) : len(name) - len(suffix)])
            for prefix, suffix, entry in self._patterns
            if len(name) > len(prefix) + len(suffix) and name.startswith(prefix) and name.endswith(suffix)
        ]
