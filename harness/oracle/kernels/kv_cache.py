"""Caches of keys and values that an operator keeps itself: grown, of a window, quantised.

Shapes: B batch, N key/value heads, P rows of the past, S new rows, D width; caches [B, N, rows, D].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from harness.oracle.node import Node, Tensor, UnsupportedFeatureError
from harness.oracle.rounding import narrowed

__all__ = ["Resident", "cache_codec", "grown", "resident_rows", "windowed"]

_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)

_BITS: dict[np.dtype[Any], int] = {np.dtype(np.int8): 8, np.dtype(np.uint8): 4, _FP8: 8}
"""Types of quantised caches, and the bits of their codes."""

Codec = tuple[Callable[[Any, Any, Any], Any], Callable[[Any, Any], Any]]
"""`encode(new rows, scale, past)` to what is stored, and `decode(stored, scale)` to floats."""


def cache_codec(node: Node, attribute: str, declared: np.dtype[Any] | None) -> Codec:
    """How rows are stored: as they are, or as codes x / scale rounded to the nearest, ties to even.

    Codes are int8 in [-128, 127], or of 4 bits in [-8, 7], stored as code + 8 two to a byte of uint8, the
    first in the low half, or fp8 (e4m3fn), whose values the oracle holds as floats and rounds only where it
    keeps to declared types. One scale for all (`PER_TENSOR`), or one for each head and column
    (`PER_CHANNEL`). Source: com.microsoft GroupQueryAttention version 1.

    Args:
        node: the node.
        attribute: which one says how: `k_quant_type` or `v_quant_type`.
        declared: the type of the past, which says how many bits a code has, as `kv_cache_bit_width` does.

    Raises:
        UnsupportedFeatureError: it is quantised in another way, or type and attributes do not agree.
    """
    quant_type, bits = node.text(attribute, "NONE"), node.integer("kv_cache_bit_width", 0)
    if declared is not None and (declared in _BITS) == (quant_type == "NONE"):
        raise UnsupportedFeatureError(f"{attribute} {quant_type} and a cache of {declared}")
    if quant_type == "NONE":
        return (lambda new, scale, past: new), (lambda stored, scale: stored)
    if quant_type not in ("PER_TENSOR", "PER_CHANNEL"):
        raise UnsupportedFeatureError(f"a cache quantised {quant_type}")
    if bits not in (0, 4, 8) or (declared is not None and bits not in (0, _BITS[declared])):
        raise UnsupportedFeatureError(f"kv_cache_bit_width {bits} and a cache of {declared or 'any type'}")
    four = (bits if declared is None else _BITS[declared]) == 4
    precision = node.precision

    def encode(new: Tensor, scale: Tensor, past: Tensor | None) -> Tensor:
        codes = new / _scale(scale, new.shape[1])
        if past is not None and past.dtype.kind == "f":
            return precision.widen(narrowed(codes, _FP8)) if precision.rounding else codes
        if not four:
            return np.clip(np.rint(codes), -128, 127).astype(np.int8)
        halves = (np.clip(np.rint(codes), -8, 7) + 8).astype(np.uint8)
        return halves[..., 0::2] | (halves[..., 1::2] << 4)

    def decode(stored: Tensor, scale: Tensor) -> Tensor:
        if stored.dtype == np.uint8:
            halves = np.stack((stored & 15, stored >> 4), axis=-1).reshape(*stored.shape[:-1], -1)
            stored = halves.astype(np.int8) - np.int8(8)
        return stored.astype(scale.dtype) * _scale(scale, stored.shape[1])

    return encode, decode


def _scale(scale: Tensor, heads: int) -> Tensor:
    """A scale broadcastable to [B, N, rows, D]."""
    return scale.reshape(()) if scale.size == 1 else scale.reshape(1, heads, 1, -1)


def grown(past: Tensor | None, new: Tensor, starts: Tensor, total: int) -> Tensor:
    """The cache with `new` behind the first `starts[b]` rows; zero behind that.

    It is as long as `past`, or as `total` where that is more.
    """
    first = int(starts[0])
    if past is None:
        if new.shape[2] == total and not starts.any():
            return new
        past = new[:, :, :0]
    if past.shape[2] == first and first + new.shape[2] == total and (starts == first).all():
        return np.concatenate((past, new), axis=2)
    output = np.zeros((*new.shape[:2], max(total, past.shape[2]), new.shape[3]), dtype=new.dtype)
    for batch, start in enumerate(starts.tolist()):
        output[batch, :, :start] = past[batch, :, :start]
        output[batch, :, start : start + new.shape[2]] = new[batch]
    return output


def resident_rows(seen: int, capacity: int, window: int) -> int:
    """How many rows a cache of a window holds after `seen` positions.

    All of them up to the capacity C; then T - G ceil((T - C) / G), where G = C - window + 1 rows at a time
    make room. Source: com.microsoft GroupQueryAttention version 1, `sliding_window_cache`.
    """
    if seen <= capacity:
        return seen
    group = capacity - window + 1
    return seen - group * -(-(seen - capacity) // group)


@dataclass(frozen=True, slots=True)
class Resident:
    """What queries can look at in a cache of a window, and the cache that stays.

    Attributes:
        rows: past rows and new ones [B, N, R, D], for each batch entry from its first resident row on.
        positions: the position of each row [B, R], -1 for filling.
        present: the cache [B, N, C, D] after this call; zero behind its resident rows.
    """

    rows: Tensor
    positions: Tensor
    present: Tensor


def windowed(past: Tensor, new: Tensor, starts: Tensor, window: int) -> Resident:
    """`new` behind the resident rows of `past`, of which `starts[b]` positions have been seen."""
    batch, heads, capacity, width = past.shape
    count = new.shape[2]
    if window > capacity:
        raise ValueError(f"a cache of {capacity} rows for a window of {window}")
    held = [resident_rows(start, capacity, window) for start in starts.tolist()]
    longest = max(held) + count
    rows = np.zeros((batch, heads, longest, width), dtype=new.dtype)
    positions = np.full((batch, longest), -1)
    present = np.zeros_like(past)
    for entry, (start, kept) in enumerate(zip(starts.tolist(), held, strict=True)):
        end = kept + count
        rows[entry, :, :kept] = past[entry, :, :kept]
        rows[entry, :, kept:end] = new[entry]
        positions[entry, :end] = np.arange(start - kept, start + count)
        stays = resident_rows(start + count, capacity, window)
        present[entry, :, :stays] = rows[entry, :, end - stays : end]
    return Resident(rows, positions, present)
