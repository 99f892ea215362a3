"""Comparisons, logic and bits. All broadcast as numpy does; semantics of the ONNX operator specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.oracle.kernels.registry import Kernel, always, kernel, register
from harness.oracle.node import Compute, Node, Tensor

_PLAIN: dict[str, tuple[Compute, tuple[int, ...]]] = {
    "And": (np.logical_and, (7,)),
    "BitwiseAnd": (np.bitwise_and, (18,)),
    "BitwiseNot": (np.bitwise_not, (18,)),
    "BitwiseOr": (np.bitwise_or, (18,)),
    "BitwiseXor": (np.bitwise_xor, (18,)),
    "Equal": (np.equal, (7, 11, 13, 19)),
    "Greater": (np.greater, (7, 9, 13)),
    "GreaterOrEqual": (np.greater_equal, (12, 16)),
    "IsNaN": (np.isnan, (9, 13, 20)),
    "Less": (np.less, (7, 9, 13)),
    "LessOrEqual": (np.less_equal, (12, 16)),
    "Not": (np.logical_not, (1,)),
    "Or": (np.logical_or, (7,)),
    "Where": (np.where, (9, 16)),
    "Xor": (np.logical_xor, (7,)),
}
"""Operators without attributes: the function itself, and the versions it claims."""

for _name, (_function, _since) in _PLAIN.items():
    register(_name, _since, Kernel(always(_function)))


@kernel("IsInf", (10, 20))
def _is_inf(node: Node) -> Compute:
    """Whether x is infinite; `detect_positive` and `detect_negative` choose the sign."""
    positive, negative = node.integer("detect_positive", 1), node.integer("detect_negative", 1)
    if positive and negative:
        return np.isinf
    if positive:
        return np.isposinf
    if negative:
        return np.isneginf
    return lambda x: np.zeros(np.shape(x), dtype=bool)


@kernel("BitShift", (11, 28))
def _bit_shift(node: Node) -> Compute:
    """The input shifted by y bits to the `direction`; on the right shift the sign bit fills up.

    A shift by y outside [0, bits) leaves nothing but that fill.
    """
    left = node.text("direction") == "LEFT"

    def run(x: Any, y: Any) -> Tensor:
        bits = x.dtype.itemsize * 8
        inside = (y >= 0) & (y < bits)
        safe = np.where(inside, y, x.dtype.type(0))
        if left:
            return np.where(inside, np.left_shift(x, safe), x.dtype.type(0))
        fill = np.where(x < 0, ~x.dtype.type(0), x.dtype.type(0))
        return np.where(inside, np.right_shift(x, safe), fill)

    return run
