"""Changes of element type.

Between floats nothing narrows: both sides are held in the oracle's precision (`harness.oracle.precision`).
Source: ONNX operator specification, Cast 9-28, CastLike 15-25.
"""

from __future__ import annotations

import onnx

from harness.oracle.kernels.registry import kernel
from harness.oracle.node import Compute, Node, UnsupportedFeatureError


@kernel("Cast", (9, 13, 19, 21, 23, 24, 25, 28))
def _cast(node: Node) -> Compute:
    """The value in another type: to bool "is not zero", float to integer towards zero, else nearest.

    An integer too wide for its target keeps its low bits (two's complement), down to 4 and 2 of them.
    """
    if node.integer("to") == onnx.TensorProto.STRING:
        raise UnsupportedFeatureError("a string type")
    target = node.element_type("to")
    if target is None:
        raise UnsupportedFeatureError("an undefined type")
    dtype = node.precision.held(target)
    return lambda x: x.astype(dtype, copy=False)


@kernel("CastLike", (15, 19, 21, 23, 24, 25))
def _cast_like(node: Node) -> Compute:
    """The first input in the type that holds the second."""
    return lambda x, target: x.astype(target.dtype, copy=False)
