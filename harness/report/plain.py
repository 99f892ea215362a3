"""Values as JSON, and as a terminal, can carry them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["finite", "legible", "plain", "visible"]


def finite(value: float | None) -> float | None:
    """A number; None for what is none, as JSON has no NaN or infinity."""
    return value if value is not None and math.isfinite(value) else None


def plain(value: Any) -> Any:
    """Nested mappings and sequences as dicts and lists."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def visible(text: str) -> str:
    """Text on one line: what a terminal would obey, and what it shows nothing of, is spelled out.

    What comes from an engine, a model or a file may hold anything. Whatever a person is shown of it passes
    here.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def legible(value: Any) -> Any:
    """A document with all of its text, keys too, as `visible` has it."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {legible(key): legible(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [legible(item) for item in value]
    return value
