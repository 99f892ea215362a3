"""Shapes of a past port and its present port: what may differ, and what must not.

A symbolic axis is unknown: the same name on two ports need not mean the same extent, nor different names
different extents. So a symbol never contradicts anything; only two concrete extents can.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from harness.ports import Dimension, Port

__all__ = [
    "GrowingAxis",
    "Shape",
    "StateShapeMatch",
    "cannot_grow",
    "dynamic_state_axes",
    "growing_axes",
    "mismatch",
]

Shape = tuple[Dimension, ...]

_BATCH_SYMBOLS = frozenset({"b", "n", "bs", "bsz", "nbatch"})
_BATCH_WORD = "batch"


class StateShapeMatch(StrEnum):
    """When the shapes of a state's two ports are accepted as the same shape."""

    EXACT = "exact"
    SYMBOLIC = "symbolic"

    def accepts(self, past: Shape | None, present: Shape | None) -> bool:
        """True if the state can be fed back.

        Exact: both shapes are known and spelled alike, axis by axis. Symbolic: nothing contradicts, that
        is, ranks agree where known and no axis has two different concrete extents.
        """
        if self is StateShapeMatch.EXACT:
            return past is not None and past == present
        return mismatch(past, present) is None


def mismatch(past: Shape | None, present: Shape | None) -> str | None:
    """The contradiction between two shapes that should agree, one phrase; None if there is none."""
    if past is None or present is None:
        return None
    if len(past) != len(present):
        return f"rank {len(past)} against rank {len(present)}"
    for axis, before in enumerate(past):
        after = present[axis]
        if isinstance(before, int) and isinstance(after, int) and before != after:
            return f"extent {before} against {after} on axis {axis}"
    return None


class GrowingAxis(NamedTuple):
    """An axis along which a cache may grow, with its extents on the past and on the present side."""

    axis: int
    before: Dimension
    after: Dimension


def growing_axes(past: Shape | None, present: Shape | None) -> tuple[GrowingAxis, ...]:
    """Axes along which a cache may grow, for shapes of equal rank without contradiction.

    These are the axes that are spelled differently. Where several are, as when the whole present shape is
    renamed, those that are symbolic on the past side and not the leading axis; a cache of fixed size has
    none.
    """
    if past is None or present is None or len(past) != len(present):
        return ()
    differing = tuple(
        GrowingAxis(axis, past[axis], present[axis])
        for axis in range(len(past))
        if past[axis] != present[axis]
    )
    if len(differing) < 2:
        return differing
    return tuple(one for one in differing if one.axis > 0 and not isinstance(one.before, int))


def cannot_grow(past: Shape | None, present: Shape | None, sequence: Dimension) -> str | None:
    """Why a cache that grows by these shapes does not, one phrase; None if it may.

    `sequence` is the length of this call's tokens, as the token port spells it. A present of that length,
    or of a concrete one, holds this call's tokens only, without those of the past. A past of concrete
    length says nothing about growth: where it is empty, this call's tokens are all there is.
    """
    growing = growing_axes(past, present)
    if len(growing) != 1 or isinstance(growing[0].before, int):
        return None
    axis, before, after = growing[0]
    if isinstance(after, int):
        return f"axis {axis} is {before!r} before and always {after} after"
    if after is not None and after == sequence and any(letter.isalpha() for letter in after):
        return f"axis {axis} is as long as this call's tokens, {after!r}, without the past"
    return None


def dynamic_state_axes(port: Port, batch: Dimension) -> tuple[int, ...]:
    """Axes of a state's past port whose extent is not known before the first step, the batch excepted.

    `batch` is the leading symbol of the token port, None where it has none. The batch of a state is its
    leading axis where that is a plain symbol, or else an axis named like a batch (a stack of layers or
    snapshots may stand before it).
    """
    shape = port.shape or ()
    symbolic = [axis for axis, extent in enumerate(shape) if not isinstance(extent, int)]
    if symbolic and _is_batch(shape[symbolic[0]], batch, leading=symbolic[0] == 0):
        symbolic = symbolic[1:]
    return tuple(symbolic)


def _is_batch(extent: Dimension, batch: Dimension, *, leading: bool) -> bool:
    if not isinstance(extent, str):
        return leading
    if any(sign in extent for sign in "*/+-"):
        return False  # an expression of the batch and something else
    if leading or extent == batch:
        return True
    return extent.lower() in _BATCH_SYMBOLS or _BATCH_WORD in extent.lower()
