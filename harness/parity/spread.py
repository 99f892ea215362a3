"""How far two runs along the same tokens are apart, and whether that may be rounding."""

from __future__ import annotations

import math

from harness.decode.trace import Trace
from harness.engines.base import TopLogits

__all__ = ["SPREAD_FACTOR", "differ_by_rounding", "spread_between"]

SPREAD_FACTOR = 4.0
"""How many times the measured spread a margin must exceed to decide, as a probe sees few positions: with
tolerances of four times the worst of clean engines, held-out prompts raised no false alarm."""

_ROUNDING_AT_MOST = 1e-3
"""Difference of two runs, relative to how far the largest logits lie apart, that may be rounding: thousands
of times that of float32, and far less than what another computation makes. A constant that is added to all
logits changes no choice, and so counts for nothing here."""


def spread_between(one: Trace, other: Trace) -> float:
    """The largest difference between the logits of the same token at the same position of two traces.

    Of a token that is among the largest of one alone, the other logit is known to be no larger than the
    least of those kept: it differs by so much at least.
    """
    differences = [
        abs(value - theirs[token]) if token in theirs else value - min(theirs.values())
        for a, b in zip(one.steps, other.steps, strict=True)
        for mine, theirs in [(_finite(a), _finite(b)), (_finite(b), _finite(a))]
        for token, value in mine.items()
        if theirs
    ]
    return max((0.0, *differences))


def differ_by_rounding(one: Trace, other: Trace, rounding: float) -> bool:
    """Whether two traces differ by what may be rounding.

    That is what was measured of it, or a thousandth of how far the largest logit is above the middle one of
    those kept, which a mask over all other tokens leaves as it is.

    Args:
        one: a trace.
        other: of the same positions.
        rounding: the difference that was measured; a flat position may have a larger one than its logits say.
    """
    kept = [list(_finite(step).values()) for step in (*one.steps, *other.steps)]
    apart = max((values[0] - values[len(values) // 2] for values in kept if values), default=0.0)
    return spread_between(one, other) <= max(rounding, _ROUNDING_AT_MOST * apart)


def _finite(step: TopLogits) -> dict[int, float]:
    """The finite ones of the largest logits, by token."""
    pairs = zip(step.token_ids, step.values, strict=True)
    return {token: value for token, value in pairs if math.isfinite(value)}
