"""Weights of a few bits, dequantised by block."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from harness.oracle.kernels.registry import CONTRIB, kernel
from harness.oracle.node import Compute, Node, Tensor, UnsupportedFeatureError
from harness.oracle.precision import Precision

_TILE_ROWS = 256
"""Output features that are dequantised together."""


@kernel("MatMulNBits", domain=CONTRIB, raw=(1, 2, 3, 5))
def _matmul_n_bits(node: Node) -> Compute:
    """A W^T + bias with W[n, k] = (q[n, k] - zero[n, k div block]) scale[n, k div block].

    A [.., K]; q packed in B [N, blocks, block*bits/8] uint8, lowest bits first; scales [N, blocks]; zero
    points [N, blocks] as floats, or packed like B in uint8 [N, ceil(blocks*bits/8)], 2^(bits-1) when
    absent; bias [N]. `accuracy_level` asks other engines for less than what is computed here. The
    dequantised W stays in memory while the budget lasts, else it is made anew, tile by tile.
    Source: com.microsoft version 1.
    """
    bits, block = node.integer("bits", 4), node.integer("block_size")
    rows, depth = node.integer("N"), node.integer("K")
    if bits not in (2, 4, 8):
        raise UnsupportedFeatureError(f"bits={bits}")
    if node.integer("weight_prepacked", 0):
        raise UnsupportedFeatureError("weight_prepacked")
    if node.has_input(4):
        raise UnsupportedFeatureError("g_idx")
    precision = node.precision
    blocks = -(-depth // block)
    dequantise = functools.partial(
        _dequantised, bits=bits, blocks=blocks, block=block, depth=depth, precision=precision
    )
    fixed = all(node.constant(index) is not None for index in range(1, 4) if node.has_input(index))
    keeps = fixed and node.residency.reserve(rows * depth * precision.dtype.itemsize)
    kept: list[Tensor] = []

    def run(
        a: Tensor,
        packed: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        _group: Any = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        tokens = a.reshape(-1, depth)
        packed = packed.reshape(rows, blocks, -1)
        scales = scales.reshape(rows, blocks)
        zeros = None if zeros is None else zeros.reshape(rows, -1)

        def tiles() -> Iterator[tuple[slice, Tensor]]:
            """Rows of the weight, a few at a time so that they stay in the processor's cache."""
            for start in range(0, rows, _TILE_ROWS):
                tile = slice(start, start + _TILE_ROWS)
                yield tile, dequantise(packed[tile], scales[tile], None if zeros is None else zeros[tile])

        if keeps and not kept:
            kept.append(np.empty((rows, depth), dtype=precision.dtype))
            for tile, weight in tiles():
                kept[0][tile] = weight
        if keeps:
            y = np.matmul(tokens, kept[0].T)
        else:
            y = np.empty((len(tokens), rows), dtype=precision.dtype)
            for tile, weight in tiles():
                y[:, tile] = np.matmul(tokens, weight.T)
        if bias is not None:
            y = y + precision.widen(bias)
        return y.reshape(*a.shape[:-1], rows)

    return run


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Codes of `bits` bits from the bytes of the last axis, lowest bits first: [.., n] to [.., n*8/bits]."""
    if bits == 8:
        return packed
    per_byte = 8 // bits
    codes = np.empty((*packed.shape, per_byte), dtype=np.uint8)
    for position in range(per_byte):
        codes[..., position] = (packed >> (position * bits)) & (2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)


def _dequantised(
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    bits: int,
    blocks: int,
    block: int,
    depth: int,
    precision: Precision,
) -> Tensor:
    """Weights [rows, K] of packed codes [rows, blocks, bytes]; see `_matmul_n_bits`."""
    if zeros is None:
        zero: Any = 2 ** (bits - 1)
    elif zeros.dtype == np.uint8:
        zero = unpacked(zeros, bits)[:, :blocks, None].astype(precision.dtype)
    else:
        zero = precision.widen(zeros)[:, :blocks, None]
    weight = unpacked(packed, bits).astype(precision.dtype).reshape(len(packed), blocks, block)
    weight -= zero
    weight *= precision.widen(scales)[:, :, None]
    return weight.reshape(len(packed), -1)[:, :depth]
