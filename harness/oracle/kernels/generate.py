"""Tensors from nothing but shapes and numbers. Semantics of the ONNX operator specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.oracle.kernels.registry import kernel
from harness.oracle.kernels.tensor import number_of
from harness.oracle.node import Compute, Node, Tensor, UnsupportedFeatureError


@kernel("Constant", (1, 9, 11, 12, 13, 19, 21, 23, 24, 25), moves=True)
def _constant(node: Node) -> Compute:
    """The tensor in the attribute that is set."""
    value = _constant_value(node)
    return lambda: value


def _constant_value(node: Node) -> Tensor:
    integers = node.integer_or_none("value_int"), node.integers("value_ints")
    numbers = node.number_or_none("value_float"), node.numbers("value_floats")
    for given, dtype in ((integers, np.int64), (numbers, np.float32)):
        for value in given:
            if value is not None:
                return np.array(value, dtype=dtype)
    tensor = node.tensor("value")
    if tensor is None:
        raise UnsupportedFeatureError("a string or sparse value")
    return tensor


@kernel("ConstantOfShape", (9, 20, 21, 23, 24, 25))
def _constant_of_shape(node: Node) -> Compute:
    """A tensor of the given shape filled with `value` (float32 zero by default)."""
    given = node.tensor("value")
    fill = np.zeros(1, np.float32) if given is None else given
    fill = node.precision.widen(number_of(fill))
    return lambda shape: np.full(shape.tolist(), fill)


@kernel("Range", (11, 27))
def _range(node: Node) -> Compute:
    """start, start + delta, start + 2 delta, .. below limit (above it when delta is negative)."""

    def run(start: Any, limit: Any, delta: Any) -> Tensor:
        dtype = start.dtype
        start, limit, delta = (number_of(value).item() for value in (start, limit, delta))
        if dtype.kind in "iu":
            return np.arange(start, limit, delta, dtype=dtype)
        count = max(0, int(np.ceil((limit - start) / delta)))
        return (start + np.arange(count) * delta).astype(dtype)

    return run


@kernel("EyeLike", (9, 22))
def _eye_like(node: Node) -> Compute:
    """A matrix in the shape of x with ones on its k-th diagonal, in type `dtype` or that of x."""
    k, target = node.integer("k", 0), node.element_type("dtype")
    dtype = None if target is None else node.precision.held(target)

    def run(x: Tensor) -> Tensor:
        rows, columns = x.shape
        return np.eye(rows, columns, k=k, dtype=x.dtype if dtype is None else dtype)

    return run
