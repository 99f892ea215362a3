"""Four-bit weights in the layout of `com.microsoft::MatMulNBits`: blocks, integer zero points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.models.graph import GraphBuilder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "ACCURACY_LEVEL",
    "BLOCK_SIZE",
    "QUANTISATION_RULE",
    "Int4Weight",
    "dequantise",
    "linear_int4",
    "quantise",
]

BLOCK_SIZE = 32
"""Weights that share a scale and a zero point, along the axis that is summed over."""

ACCURACY_LEVEL = 4
"""What exporters set by default: the engine may round activations to int8, block by block."""

QUANTISATION_RULE = (
    "block by block: lo = min(0, least weight), hi = max(0, largest weight), scale = (hi - lo) / 15,"
    " zero point = round(-lo / scale), code = clip(round(weight / scale) + zero point, 0, 15)"
)
"""The rule of `quantise`, for provenance."""

_LARGEST_CODE = 15


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A matrix [N, K] in four bits: `weight = (code - zero_point) * scale`.

    Attributes:
        codes: [N, K/32, 16] uint8, two codes a byte, the even one in the low four bits.
        scales: [N, K/32] float32.
        zero_points: [N, ceil(K/64)] uint8, two a byte, the even block's in the low four bits.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8]


def quantise(weight: NDArray[np.float32]) -> Int4Weight:
    """Round `weight` [N, K] to four bits by `QUANTISATION_RULE`, K a multiple of 32, all finite.

    Every weight moves by at most half a scale: the range of a block spans fifteen steps, and the
    zero point shifts it by at most half a step, which rounding to the nearest code absorbs.
    """
    import numpy as np

    rows, columns = weight.shape
    if columns % BLOCK_SIZE or not np.isfinite(weight).all():
        raise ValueError(f"{columns} columns, finite or not: need a multiple of {BLOCK_SIZE}, all finite.")
    blocks = weight.reshape(rows, columns // BLOCK_SIZE, BLOCK_SIZE)
    low = np.minimum(blocks.min(axis=-1), np.float32(0))
    high = np.maximum(blocks.max(axis=-1), np.float32(0))
    # Below the smallest normal number a scale has hardly any digits; a block that small is zero.
    scales = np.maximum((high - low) / np.float32(_LARGEST_CODE), np.finfo(np.float32).tiny)
    zero_points = np.rint(-low / scales)
    codes = np.rint(blocks / scales[..., None]) + zero_points[..., None]
    return Int4Weight(
        codes=_packed(codes.clip(0, _LARGEST_CODE).astype(np.uint8)),
        scales=scales,
        zero_points=_packed(zero_points.astype(np.uint8)),
    )


def dequantise(weight: Int4Weight) -> NDArray[np.float32]:
    """The matrix [N, K] float32 that an engine computes with."""
    import numpy as np

    rows, blocks = weight.scales.shape
    codes = _unpacked(weight.codes).astype(np.float32)
    zero_points = _unpacked(weight.zero_points)[:, :blocks].astype(np.float32)
    return ((codes - zero_points[..., None]) * weight.scales[..., None]).reshape(rows, blocks * BLOCK_SIZE)


def linear_int4(graph: GraphBuilder, x: str, weight: NDArray[np.float32], *, name: str) -> str:
    """`x @ weight.T` with `weight` [out, in] quantised here."""
    quantised = quantise(weight)
    rows, columns = weight.shape
    return graph.add(
        "MatMulNBits",
        x,
        graph.initializer(f"{name}.weight_codes", quantised.codes),
        graph.initializer(f"{name}.weight_scales", quantised.scales),
        graph.initializer(f"{name}.weight_zero_points", quantised.zero_points),
        name=name,
        domain="com.microsoft",
        K=columns,
        N=rows,
        bits=4,
        block_size=BLOCK_SIZE,
        accuracy_level=ACCURACY_LEVEL,
    )


def _packed(nibbles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two values a byte along the last axis, the even one low; an odd count gets a zero at its end."""
    import numpy as np

    odd = nibbles.shape[-1] % 2
    even = np.pad(nibbles, [(0, 0)] * (nibbles.ndim - 1) + [(0, odd)])
    return np.bitwise_or(even[..., 0::2], np.left_shift(even[..., 1::2], 4), dtype=np.uint8)


def _unpacked(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    import numpy as np

    return np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
