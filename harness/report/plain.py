"""Values as JSON can carry them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["finite", "plain"]


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
