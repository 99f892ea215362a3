"""Changes of element type.

Between floats nothing narrows: both sides are held in the oracle's precision (`harness.oracle.precision`).
Source: ONNX operator specification, Cast 9-28, CastLike 15-25.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from harness.oracle.kernels.registry import kernel
from harness.oracle.node import Compute, Node, Tensor, UnsupportedFeatureError

_NARROW_BITS: dict[int, int] = {
    onnx.TensorProto.INT4: 4,
    onnx.TensorProto.UINT4: 4,
    onnx.TensorProto.INT2: 2,
    onnx.TensorProto.UINT2: 2,
}


@kernel("Cast", (9, 13, 19, 21, 23, 24, 25, 28))
def _cast(node: Node) -> Compute:
    """The value in another type: to bool "is not zero", float to integer towards zero, else nearest.

    An integer too wide for its target keeps its low bits (two's complement).
    """
    target = node.integer("to")
    if target == onnx.TensorProto.STRING:
        raise UnsupportedFeatureError("a string type")
    dtype = node.precision.holding(target)
    bits = _NARROW_BITS.get(target)
    if bits is None:
        return lambda x: x.astype(dtype, copy=False)
    signed = dtype == np.int8

    def narrow(x: Any) -> Tensor:
        low = x.astype(np.int64) & (2**bits - 1)
        return (np.where(low >= 2 ** (bits - 1), low - 2**bits, low) if signed else low).astype(dtype)

    return narrow


@kernel("CastLike", (15, 19, 21, 23, 24, 25))
def _cast_like(node: Node) -> Compute:
    """The first input in the type that holds the second."""
    return lambda x, target: x.astype(target.dtype, copy=False)
