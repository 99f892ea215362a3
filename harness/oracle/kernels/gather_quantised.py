"""Rows of a table of a few bits, dequantised as they are looked up."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.oracle.kernels.quantised import unpacked
from harness.oracle.kernels.registry import CONTRIB, kernel
from harness.oracle.node import Compute, Node, Tensor, UnsupportedFeatureError


@kernel("GatherBlockQuantized", domain=CONTRIB, raw=(0, 2, 3))
def _gather_block_quantized(node: Node) -> Compute:
    """Gather along `gather_axis` of (q - zero) scale, with blocks of `block_size` along `quantize_axis`.

    q [d0, .., dr] of 4 bits (int4, uint4), or uint8 with codes of `bits` packed along the last axis, lowest
    bits first; scales [.., ceil(d/block), ..], zero points of q's type, packed likewise (0 when absent, for
    uint8 2^(bits-1)). q of fp8 or fp4 has no zero points; its scales may have extent 1 beside
    `quantize_axis`, and block 0 is the whole axis. An index out of range gives zeros.
    Source: com.microsoft version 1.
    """
    bits, block = node.integer("bits", 4), node.integer("block_size", 128)
    gather_axis, block_axis = node.integer("gather_axis", 0), node.integer("quantize_axis", 1)
    if bits not in (2, 4, 8):
        raise UnsupportedFeatureError(f"bits={bits}")
    precision = node.precision

    def run(q: Tensor, indices: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
        axis, along = gather_axis % q.ndim, block_axis % q.ndim
        width = bits if q.dtype == np.uint8 else 8  # other types hold a code an element
        extent = q.shape[axis]
        inside = (indices >= -extent) & (indices < extent)
        where = np.where(inside, indices, 0)
        # Looking up before unpacking reads no more of the table than is asked for.
        codes = unpacked(np.take(q, where, axis=axis), width).astype(precision.dtype)
        shift = indices.ndim - 1 if along > axis else 0
        if along == axis:
            raise ValueError("gather_axis and quantize_axis are the same")

        def spread(x: Tensor) -> Tensor:
            """A value a block as a value an element."""
            if x.shape[axis] > 1:
                x = np.take(x, where, axis=axis)
            elif indices.ndim != 1:
                x = x.reshape(*x.shape[:axis], *[1] * indices.ndim, *x.shape[axis + 1 :])
            place = along + shift
            size = codes.shape[place]
            return (
                x if x.shape[place] == 1 else np.repeat(x, block or size, axis=place).take(range(size), place)
            )

        if zeros is not None:
            # A packed row of zero points may have a code more than there are blocks.
            points = unpacked(zeros, width).take(range(scales.shape[-1]), axis=-1)
            codes -= spread(points.astype(precision.dtype))
        elif q.dtype == np.uint8:
            codes -= 2 ** (bits - 1)
        codes *= precision.widen(spread(scales))
        mask: Any = inside.reshape(*[1] * axis, *indices.shape, *[1] * (q.ndim - 1 - axis))
        return np.where(mask, codes, codes.dtype.type(0))

    return run
