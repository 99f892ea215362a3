"""Tensors of integers, or of 8- and 4-bit floats, with scales: QuantizeLinear and DequantizeLinear.

Source: ONNX operator specification, versions 10 to 28.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from harness.oracle.kernels.registry import kernel
from harness.oracle.node import Compute, Node, Tensor
from harness.oracle.precision import Array, is_float
from harness.oracle.rounding import narrowed

_VERSIONS = (10, 13, 19, 21, 23, 24, 25, 28)


def _spread(values: Tensor, x: Tensor, axis: int, block: int) -> Tensor:
    """Scales or zero points broadcastable to x: one for all, one a slice of `axis`, or one a block of it."""
    if values.ndim == 0 or values.size == 1:
        return values.reshape(())
    if block:
        return np.repeat(values, block, axis=axis).take(range(x.shape[axis]), axis=axis)
    return values.reshape([-1 if place == axis % x.ndim else 1 for place in range(x.ndim)])


@kernel("DequantizeLinear", _VERSIONS)
def _dequantize_linear(node: Node) -> Compute:
    """`(x - zero_point) scale`, with one scale for all, one a slice of `axis`, or one a block of it.

    x of any integer or narrow float type; scale [], [d_axis], or x's shape with ceil(d_axis / block_size) on
    `axis`; zero_point as scale, 0 when absent.
    """
    axis, block = node.integer("axis", 1), node.integer("block_size", 0)
    given = node.element_type("output_dtype")
    dtype = None if given is None else node.precision.held(given)

    def run(x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        wide = x.astype(np.int64) if not is_float(x.dtype) else x
        if zero is not None:
            wide = wide - _spread(zero.astype(wide.dtype), x, axis, block)
        y = wide.astype(scale.dtype) * _spread(scale, x, axis, block)
        return y if dtype is None else y.astype(dtype, copy=False)

    return run


@kernel("QuantizeLinear", _VERSIONS)
def _quantize_linear(node: Node) -> Compute:
    """`saturate(round(x / scale) + zero_point)`, ties to even; scale and zero_point as DequantizeLinear's.

    The type is that of zero_point, else `output_dtype`, else uint8. Narrow floats are rounded whatever the
    oracle does with casts, as rounding is what this operator is for; the oracle then holds them in its own
    precision.
    """
    axis, block = node.integer("axis", 1), node.integer("block_size", 0)
    saturate = bool(node.integer("saturate", 1))
    precision = node.precision
    target = node.element_type("output_dtype")
    if target is None:
        target = node.declared(2)
    if target is None and not node.has_input(2):
        target = np.dtype(np.uint8)

    def run(x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        wide = x if is_float(x.dtype) else x.astype(precision.dtype)
        y = wide / _spread(scale, x, axis, block)
        dtype = _of(zero) if target is None else target
        if is_float(dtype):
            if zero is not None:
                y = y + _spread(precision.widen(zero), x, axis, block)
            return precision.widen(narrowed(y, dtype, saturate=saturate))
        y = np.rint(y)
        if zero is not None:
            y = y + _spread(zero.astype(np.int64), x, axis, block)
        low, high = _range(dtype)
        return np.clip(y, low, high).astype(dtype)

    return run


def _of(zero: Array | None) -> np.dtype[Any]:
    """The type of a zero point that the graph computes; of narrow floats planning must know it."""
    if zero is None or is_float(zero.dtype):
        raise ValueError("nothing in the file says which narrow float this is")
    return zero.dtype


def _range(dtype: np.dtype[Any]) -> tuple[int, int]:
    """The smallest and largest integer of a type."""
    info = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call] # it has no type hints
    return int(info.min), int(info.max)
