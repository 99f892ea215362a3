"""Reductions over axes, running sums, softmax and top-k. Semantics of the ONNX operator specification."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from harness.oracle.kernels.registry import Kernel, kernel, register
from harness.oracle.kernels.tensor import axes_of, number_of
from harness.oracle.node import Compute, Node, Tensor

__all__ = ["softmax"]

Reduction = Callable[[Any, Any, bool], Any]
"""`f(x, axes, keepdims)`, over all axes when `axes` is None."""


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x - max) / sum(exp(x - max)) along `axis`, which may have no elements."""
    exponentials = np.exp(x - _top(x, axis))
    exponentials /= np.add.reduce(exponentials, axis=axis, keepdims=True)
    return exponentials


def _top(x: Tensor, axis: Any) -> Tensor:
    """The largest along `axis`, which is kept with extent 1; minus infinity of none."""
    return np.maximum.reduce(x, axis=axis, keepdims=True, initial=-np.inf)


_add_reduce: Any = np.add.reduce
"""Untyped: numpy's hints know only literal values of `keepdims`."""


def _sum(x: Tensor, axes: Any, keepdims: bool) -> Tensor:
    return _add_reduce(x, axis=axes, dtype=x.dtype, keepdims=keepdims)


def _sum_square(x: Tensor, axes: Any, keepdims: bool) -> Tensor:
    if axes in ((-1,), (x.ndim - 1,)):
        squares = np.vecdot(x, x)
        return squares[..., None] if keepdims else squares
    return _sum(x * x, axes, keepdims)


def _mean(x: Tensor, axes: Any, keepdims: bool) -> Any:
    """The mean; of integers rounded towards zero, and exact however large their sum is."""
    total = _sum(x, axes, keepdims)
    count = x.size // max(1, total.size)
    if x.dtype.kind == "f":
        return total / count
    if not x.size:
        if total.size:
            raise ValueError("the mean of no integers is not defined")
        return total
    wide = np.int64 if x.dtype.kind == "i" else np.uint64
    # Whole parts and remainders by themselves, which do not overflow as the sum may.
    whole, rest = (_sum(part, axes, keepdims) for part in np.divmod(x.astype(wide), wide(count)))
    mean, rest = whole + rest // wide(count), rest % wide(count)
    return (mean + ((mean < 0) & (rest != 0))).astype(x.dtype)


def _log_sum(x: Tensor, axes: Any, keepdims: bool) -> Any:
    return np.log(_sum(x, axes, keepdims))


def _log_sum_exp(x: Tensor, axes: Any, keepdims: bool) -> Any:
    """log(sum(exp(x))), shifted by the largest element so that nothing overflows."""
    if not x.size:
        return _log_sum(x, axes, keepdims)
    top = np.max(x, axis=axes, keepdims=True)
    top = np.where(np.isfinite(top), top, x.dtype.type(0))
    result = np.log(_sum(np.exp(x - top), axes, True)) + top
    return result if keepdims else np.squeeze(result, axis=axes)


def _rounded(reduce: Reduction) -> Reduction:
    """A reduction of floats; of integers computed in float64, and rounded towards zero at the end."""

    def run(x: Tensor, axes: Any, keepdims: bool) -> Any:
        if x.dtype.kind == "f":
            return reduce(x, axes, keepdims)
        return reduce(x.astype(np.float64), axes, keepdims).astype(x.dtype)

    return run


def _extreme(reduce: Callable[..., Any], *, least: bool) -> Reduction:
    """Maximum or minimum; over no elements it is the type's own end of the order."""

    def run(x: Tensor, axes: Any, keepdims: bool) -> Any:
        if x.size:
            return reduce(x, axis=axes, keepdims=keepdims)
        if x.dtype.kind == "f":
            bound: Any = np.inf if least else -np.inf
        elif x.dtype.kind == "b":
            bound = least
        else:
            bound = np.iinfo(x.dtype).max if least else np.iinfo(x.dtype).min
        return reduce(x, axis=axes, keepdims=keepdims, initial=bound)

    return run


_REDUCTIONS: dict[str, tuple[Reduction, tuple[int, ...]]] = {
    "ReduceL1": (lambda x, axes, keep: _sum(np.abs(x), axes, keep), (11, 13, 18)),
    "ReduceL2": (lambda x, axes, keep: np.sqrt(_sum_square(x, axes, keep)).astype(x.dtype), (11, 13, 18)),
    "ReduceLogSum": (_rounded(_log_sum), (11, 13, 18, 28)),
    "ReduceLogSumExp": (_rounded(_log_sum_exp), (11, 13, 18, 28)),
    "ReduceMax": (_extreme(np.max, least=False), (11, 12, 13, 18, 20)),
    "ReduceMean": (_mean, (11, 13, 18)),
    "ReduceMin": (_extreme(np.min, least=True), (11, 12, 13, 18, 20)),
    "ReduceProd": (lambda x, axes, keep: np.prod(x, axis=axes, keepdims=keep, dtype=x.dtype), (11, 13, 18)),
    "ReduceSum": (_sum, (11, 13)),
    "ReduceSumSquare": (_sum_square, (11, 13, 18)),
}
"""Each reduction and the versions it claims. The axes became an input with version 13 of ReduceSum and
version 18 of the others."""


def _reduction(reduce: Reduction) -> Callable[[Node], Compute]:
    def bind(node: Node) -> Compute:
        keep = bool(node.integer("keepdims", 1))
        by_input = node.version >= (13 if node.op_type == "ReduceSum" else 18)
        if not by_input:
            attribute = node.integers("axes")
            fixed = None if attribute is None else tuple(attribute)
            return lambda x: reduce(x, fixed, keep)
        nothing = bool(node.integer("noop_with_empty_axes", 0))
        constant = node.constant(1)
        if constant is not None and constant.size:
            axes = axes_of(constant)
            return lambda x, _: reduce(x, axes, keep)

        def run(x: Tensor, axes: Tensor | None = None) -> Any:
            if axes is not None and axes.size:
                return reduce(x, axes_of(axes), keep)
            # Without axes: over each element by itself, or over all.
            return reduce(x, (), keep) if nothing else reduce(x, None, keep)

        return run

    return bind


for _name, (_function, _since) in _REDUCTIONS.items():
    register(_name, _since, Kernel(_reduction(_function)))


def _arg(find: Callable[..., Any]) -> Callable[[Node], Compute]:
    """The index of the extreme along `axis`, int64; the first of equal ones, or the last if asked for."""

    def bind(node: Node) -> Compute:
        axis, keep = node.integer("axis", 0), bool(node.integer("keepdims", 1))
        last = bool(node.integer("select_last_index", 0))

        def run(x: Tensor) -> Tensor:
            if last:
                flipped = find(np.flip(x, axis), axis=axis, keepdims=keep)
                return np.asarray(x.shape[axis] - 1 - flipped, dtype=np.int64)
            return np.asarray(find(x, axis=axis, keepdims=keep), dtype=np.int64)

        return run

    return bind


register("ArgMax", (11, 12, 13), Kernel(_arg(np.argmax)))
register("ArgMin", (11, 12, 13), Kernel(_arg(np.argmin)))


def _running(accumulate: Callable[..., Any], neutral: int) -> Callable[[Node], Compute]:
    """The running result along an axis: `reverse` from the end, `exclusive` without the element itself."""

    def bind(node: Node) -> Compute:
        exclusive, reverse = node.integer("exclusive", 0), node.integer("reverse", 0)

        def run(x: Tensor, axis_input: Any) -> Tensor:
            axis = int(number_of(axis_input))
            x = np.flip(x, axis) if reverse else x
            if exclusive:
                head = np.moveaxis(x, axis, 0)
                first = np.full((1, *head.shape[1:]), neutral, dtype=x.dtype)
                x = np.moveaxis(np.concatenate([first, head])[: len(head)], 0, axis)
            result = accumulate(x, axis=axis, dtype=x.dtype)
            return np.flip(result, axis) if reverse else result

        return run

    return bind


register("CumSum", (11, 14), Kernel(_running(np.cumsum, 0)))
register("CumProd", 26, Kernel(_running(np.cumprod, 1)))


@kernel("Softmax", 13)
def _softmax(node: Node) -> Compute:
    """Softmax along `axis`."""
    axis = node.integer("axis", -1)
    return lambda x: softmax(x, axis)


@kernel("LogSoftmax", 13)
def _log_softmax(node: Node) -> Compute:
    """`x - max - log(sum(exp(x - max)))` along `axis`."""
    axis = node.integer("axis", -1)

    def run(x: Tensor) -> Tensor:
        shifted = x - _top(x, axis)
        return shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))

    return run


@kernel("Hardmax", 13)
def _hardmax(node: Node) -> Compute:
    """1 at the first of the largest elements along `axis`, else 0."""
    axis = node.integer("axis", -1)

    def run(x: Tensor) -> Tensor:
        if not x.size:
            return x
        steps = np.arange(x.shape[axis]).reshape((-1,) + (1,) * (x.ndim - 1 - axis % x.ndim))
        return (steps == np.argmax(x, axis=axis, keepdims=True)).astype(x.dtype)

    return run


def _coerced(bind: Callable[[Node], Compute]) -> Callable[[Node], Compute]:
    """The form before version 13: over all axes from `axis` (default 1) on, as if they were one."""

    def bind_coerced(node: Node) -> Compute:
        axis = node.integer("axis", 1)
        along_rows = bind(Node(**{**_fields(node), "attributes": {"axis": -1}}))

        def run(x: Tensor) -> Any:
            split = axis % x.ndim
            rows = x.reshape(math.prod(x.shape[:split]), math.prod(x.shape[split:]))
            return along_rows(rows).reshape(x.shape)

        return run

    return bind_coerced


def _fields(node: Node) -> dict[str, Any]:
    return {name: getattr(node, name) for name in Node.__slots__}


register("Softmax", (1, 11), Kernel(_coerced(_softmax)))
register("LogSoftmax", (1, 11), Kernel(_coerced(_log_softmax)))
register("Hardmax", (1, 11), Kernel(_coerced(_hardmax)))


@kernel("TopK", (11, 24))
def _top_k(node: Node) -> Compute:
    """The k largest (or smallest) along `axis` and their indices, in order; equal ones by index."""
    axis, largest = node.integer("axis", -1), bool(node.integer("largest", 1))

    def run(x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        count = int(number_of(k))
        if largest:
            # Sorting the reversed array and reading it backwards keeps equal elements in order.
            order = np.flip(x.shape[axis] - 1 - np.argsort(np.flip(x, axis), axis=axis, kind="stable"), axis)
        else:
            order = np.argsort(x, axis=axis, kind="stable")
        order = np.take(order, np.arange(count), axis=axis)
        return np.take_along_axis(x, order, axis=axis), order.astype(np.int64)

    return run
