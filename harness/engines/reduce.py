"""Reducing logits on the host: the largest few at each position, exactly and quickly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.engines.base import TopLogits
from harness.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["merged", "top_logits_of"]

_BLOCK = 256
"""Logits per block of the threshold search; one block's maximum costs about one vector register."""


def top_logits_of(array: NDArray[Any], k: int, positions: Sequence[int] | None = None) -> list[TopLogits]:
    """The `min(k, vocab)` largest logits at each of `positions`, largest first.

    Equal values stand in order of token ID (-0.0 equals 0.0); NaN ranks below every number, also
    below minus infinity, and sets `has_nan`. Values are compared in the array's own precision; half
    and bfloat16 are widened to float32 first, which is exact.

    Args:
        array: logits of shape [1, positions, vocab] or [1, vocab]; any float dtype.
        k: how many to return at each position, at least 1.
        positions: indices along the position axis (negative ones count from the end); None means all,
            in order. Logits of rank 2 have one position.

    Raises:
        InputError: the array has another rank, a batch other than 1, or an empty vocabulary.
        IndexError: a position lies outside the array.
        ValueError: `k` is below 1.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if array.ndim not in (2, 3) or array.shape[0] != 1 or array.shape[-1] == 0:
        raise InputError(
            f"Logits have shape {list(array.shape)}; they must be [1, positions, vocab] or [1, vocab].",
            next_action="Name the graph's logits output under `io.logits_output`.",
        )
    rows = array[0] if array.ndim == 3 else array
    return [_top_of_row(rows[p], k) for p in (range(len(rows)) if positions is None else positions)]


def merged(first: TopLogits, second: TopLogits, shift: int, k: int) -> TopLogits:
    """The `k` largest of two parts of a row; the IDs of `second`, all behind `first`, count from `shift`."""
    pairs = [
        *zip(first.token_ids, first.values, strict=True),
        *((token + shift, value) for token, value in zip(second.token_ids, second.values, strict=True)),
    ]
    # A stable sort keeps equal values in order of ID; NaN ranks below every number.
    pairs.sort(key=lambda pair: (pair[1] != pair[1], -pair[1] if pair[1] == pair[1] else 0.0))
    return TopLogits(
        token_ids=tuple(token for token, _ in pairs[:k]),
        values=tuple(value for _, value in pairs[:k]),
        has_nan=first.has_nan or second.has_nan,
    )


def _top_of_row(row: NDArray[Any], k: int) -> TopLogits:
    """The `min(k, vocab)` largest of one row of shape [vocab].

    The k-th largest block maximum is a lower bound of the k-th largest logit, since k blocks reach it;
    only the few logits at or above it are sorted, with a stable sort that keeps equal ones in order of ID.
    """
    import numpy as np

    if row.dtype not in (np.float32, np.float64):
        row = row.astype(np.float32)
    k = min(k, row.size)
    whole = row.size - row.size % _BLOCK
    maxima = row[:whole].reshape(-1, _BLOCK).max(axis=1)
    if whole < row.size:
        maxima = np.append(maxima, row[whole:].max())
    has_nan = bool(np.isnan(maxima).any())
    if has_nan or maxima.size < k:
        candidates = np.arange(row.size)
    else:
        bound = np.partition(maxima, maxima.size - k)[maxima.size - k]
        candidates = np.flatnonzero(row >= bound)
    # NaN sorts last, which is just its rank.
    order = np.argsort(-row[candidates], kind="stable")[:k]
    chosen = candidates[order]
    return TopLogits(
        token_ids=tuple(int(i) for i in chosen),
        values=tuple(float(v) for v in row[chosen]),
        has_nan=has_nan,
    )
