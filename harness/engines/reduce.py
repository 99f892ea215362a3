"""Reducing logits on the host: the largest few at each position, exactly and quickly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from harness.engines.base import TopLogits
from harness.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["check_logits_shape", "merged", "top_logits_of"]

_BLOCK = 256
"""Logits per block of the threshold search; one block's maximum costs about one vector register."""


def check_logits_shape(shape: Sequence[int]) -> None:
    """See that logits have the form that a reduction takes: [1, positions, vocab] or [1, vocab].

    Raises:
        InputError: another rank, a batch other than 1, or an empty vocabulary.
    """
    if len(shape) not in (2, 3) or shape[0] != 1 or shape[-1] == 0:
        raise InputError(
            f"Logits have shape {list(shape)}; they must be [1, positions, vocab] or [1, vocab].",
            next_action="Export the graph with logits of such a shape; if another of its outputs has them, "
            "name that one under `io.logits_output`.",
        )


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
    check_logits_shape(array.shape)
    import numpy as np

    rows = array[0] if array.ndim == 3 else array
    if positions is not None:
        rows = rows[np.asarray(positions, np.intp)]
    if rows.dtype not in (np.float32, np.float64):
        rows = rows.astype(np.float32)
    if not len(rows):
        return []
    k = min(k, rows.shape[1])
    maxima = _block_maxima(rows)
    if maxima.shape[1] < k or np.isnan(maxima).any():
        return [_top_of_row(row, k) for row in rows]
    return _top_of_rows(rows, maxima, k)


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


def _block_maxima(rows: NDArray[Any]) -> NDArray[Any]:
    """The maxima of blocks of each row, [rows, blocks]; the last block may be shorter."""
    import numpy as np

    whole = rows.shape[1] // _BLOCK * _BLOCK
    maxima = rows[:, :whole].reshape(len(rows), -1, _BLOCK).max(axis=2)
    if whole == rows.shape[1]:
        return cast("NDArray[Any]", maxima)
    return np.concatenate([maxima, rows[:, whole:].max(axis=1, keepdims=True)], axis=1)


def _top_of_rows(rows: NDArray[Any], maxima: NDArray[Any], k: int) -> list[TopLogits]:
    """The `k` largest of each row of shape [rows, vocab], none of which holds NaN, by their `_block_maxima`.

    The k-th largest block maximum is a lower bound of the k-th largest logit, since k blocks reach it;
    only the few logits at or above it are sorted, equal ones in order of ID.
    """
    import numpy as np

    count, vocab = rows.shape
    bounds = np.partition(maxima, maxima.shape[1] - k, axis=1)[:, -k]
    row, block = np.nonzero(maxima >= bounds[:, None])
    # The last block begins earlier if it would reach beyond the row; what it shares is dropped again.
    start = np.minimum(block * _BLOCK, max(vocab - _BLOCK, 0))
    ids = start[:, None] + np.arange(min(_BLOCK, vocab))
    values = rows[row[:, None], ids]
    chosen = (values >= bounds[row][:, None]) & (ids >= (block * _BLOCK)[:, None])
    row, ids, values = np.broadcast_to(row[:, None], ids.shape)[chosen], ids[chosen], values[chosen]
    order = np.lexsort((ids, -values, row))
    first = np.searchsorted(row[order], np.arange(count))
    best = order[first[:, None] + np.arange(k)]
    return [
        TopLogits(token_ids=tuple(some), values=tuple(theirs), has_nan=False)
        for some, theirs in zip(ids[best].tolist(), values[best].tolist(), strict=True)
    ]


def _top_of_row(row: NDArray[Any], k: int) -> TopLogits:
    """The `k` largest of one row of shape [vocab], whatever it holds: NaN sorts last, which is its rank."""
    import numpy as np

    order = np.argsort(-row, kind="stable")[:k]
    return TopLogits(
        token_ids=tuple(order.tolist()), values=tuple(row[order].tolist()), has_nan=bool(np.isnan(row).any())
    )
