"""Shapes, and moving elements without computing: reshape, transpose, slice, join, split, repeat, pad.

Outputs are views of inputs where numpy can give one. Semantics of the ONNX operator specification.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.oracle.kernels.registry import kernel
from harness.oracle.node import Compute, Node, Tensor

__all__ = ["axes_of", "number_of"]

_TYPES_ONLY = (19, 21, 23, 24, 25)
"""Opsets in which shape operators changed by nothing but the types that they take."""


def axes_of(value: Any) -> tuple[int, ...]:
    """A tensor of axes as a tuple of Python integers."""
    return tuple(int(axis) for axis in np.asarray(value).ravel())


def number_of(value: Any) -> Tensor:
    """The only element of an input that stands for a number, as an array of no axes.

    Specifications ask for a scalar here and for a vector of one element there, and runtimes take both for
    either.

    Raises:
        ValueError: it has none, or several.
    """
    array = np.asarray(value)
    if array.size != 1:
        raise ValueError(f"one number is due, and a tensor of shape {list(array.shape)} is given")
    return array.reshape(())


@kernel("Identity", (1, 13, 14, 16, *_TYPES_ONLY), moves=True)
def _identity(node: Node) -> Compute:
    """The input itself."""
    return lambda x: x


@kernel("Shape", (1, 13), moves=True)
@kernel("Shape", (15, *_TYPES_ONLY), moves=True)
def _shape(node: Node) -> Compute:
    """The extents of axes `start` to `end` as int64; bounds beyond the rank are clamped."""
    start, end = node.integer("start", 0), node.integer_or_none("end")
    return lambda x: np.array(np.shape(x)[slice(*slice(start, end).indices(np.ndim(x)))], dtype=np.int64)


@kernel("Size", (1, 13, *_TYPES_ONLY), moves=True)
def _size(node: Node) -> Compute:
    """The number of elements, an int64 scalar."""
    return lambda x: np.array(np.size(x), dtype=np.int64)


@kernel("Reshape", (5, 13, 14, *_TYPES_ONLY), moves=True)
def _reshape(node: Node) -> Compute:
    """The input in another shape: one -1 is inferred, a 0 copies x's extent (unless `allowzero`)."""
    keep_zero = bool(node.integer("allowzero", 0))

    def resolve(x: Tensor, shape: Sequence[int]) -> Tensor:
        if keep_zero or 0 not in shape:
            return x.reshape(shape)
        resolved = [extent or own for extent, own in zip(shape, x.shape, strict=False)]
        resolved += shape[len(resolved) :]
        if -1 in resolved and 0 in resolved:
            # With a zero beside it, -1 stands for what remains of x's other axes.
            known = math.prod(extent for extent in resolved if extent > 0)
            resolved[resolved.index(-1)] = math.prod(extent for extent in x.shape if extent) // known
        return x.reshape(resolved)

    constant = node.constant(1)
    if constant is not None:
        target = axes_of(constant)
        if keep_zero or 0 not in target:
            return lambda x, _: x.reshape(target)
        return lambda x, _: resolve(x, target)
    return lambda x, shape: resolve(x, shape.tolist())


@kernel("Flatten", (1, 9, 11, 13, 21, 23, 24, 25), moves=True)
def _flatten(node: Node) -> Compute:
    """The input as a matrix: the axes before `axis` are rows, the others columns."""
    axis = node.integer("axis", 1)

    def run(x: Tensor) -> Tensor:
        split = axis + x.ndim if axis < 0 else axis
        rows = int(np.prod(x.shape[:split], dtype=np.int64))
        return x.reshape(rows, int(np.prod(x.shape[split:], dtype=np.int64)))

    return run


@kernel("Transpose", (1, 13, 21, 23, 24, 25), moves=True)
def _transpose(node: Node) -> Compute:
    """Axis i of the output is axis `perm[i]` of x; without `perm` the axes are reversed."""
    permutation = node.integers("perm")
    return lambda x: x.transpose(permutation) if x.ndim else x


@kernel("Squeeze", (13, 21, 23, 24, 25), moves=True)
def _squeeze(node: Node) -> Compute:
    """The input without the given axes, or without all axes of extent 1."""
    constant = node.constant(1)
    if constant is not None:
        fixed = axes_of(constant)
        return lambda x, _: x.squeeze(fixed)
    return lambda x, axes=None: np.squeeze(x, axis=None if axes is None else axes_of(axes))


@kernel("Squeeze", (1, 11), moves=True)
def _squeeze_1(node: Node) -> Compute:
    """As above, with the axes as attribute."""
    axes = node.integers("axes")
    return lambda x: np.squeeze(x, axis=None if axes is None else tuple(axes))


@kernel("Unsqueeze", (13, 21, 23, 24, 25), moves=True)
def _unsqueeze(node: Node) -> Compute:
    """The input with axes of extent 1 inserted, so that they stand at the given positions of the output."""
    constant = node.constant(1)
    if constant is not None:
        fixed = axes_of(constant)
        return lambda x, _: _inserted(x, fixed)
    return lambda x, axes: _inserted(x, axes_of(axes))


@kernel("Unsqueeze", (1, 11), moves=True)
def _unsqueeze_1(node: Node) -> Compute:
    """As above, with the axes as attribute."""
    axes = tuple(node.integers("axes") or ())
    return lambda x: _inserted(x, axes)


def _inserted(x: Tensor, axes: Sequence[int]) -> Tensor:
    """The input with axes of extent 1 at positions `axes` of the output."""
    if len(axes) == 1:
        axis = axes[0]
        return (
            x[(..., None, *(slice(None),) * (-axis - 1))] if axis < 0 else x[(slice(None),) * axis + (None,)]
        )
    rank = np.ndim(x) + len(axes)
    new = {axis % rank for axis in axes}
    return np.asarray(x)[tuple(None if axis in new else slice(None) for axis in range(rank))]


@kernel("Expand", (8, 13), moves=True)
def _expand(node: Node) -> Compute:
    """The input broadcast against the shape, both ways: where the shape says 1, x keeps its extent."""
    constant = node.constant(1)
    if constant is not None:
        fixed = axes_of(constant)
        return lambda x, _: _expanded(x, fixed)
    return lambda x, shape: _expanded(x, axes_of(shape))


def _expanded(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    own = np.shape(x)
    if own == shape:
        return x
    if len(own) <= len(shape):
        # Where the shape says 1, x decides.
        tail = zip(shape[len(shape) - len(own) :], own, strict=True)
        shape = shape[: len(shape) - len(own)] + tuple(b if a == 1 else a for a, b in tail)
    else:
        shape = np.broadcast_shapes(own, shape)
    return np.broadcast_to(x, shape)


@kernel("Tile", (6, 13), moves=True)
def _tile(node: Node) -> Compute:
    """The input repeated `repeats[i]` times along axis i."""
    return lambda x, repeats: np.tile(x, axes_of(repeats))


@kernel("Concat", (4, 11, 13))
def _concat(node: Node) -> Compute:
    """The inputs one behind the other along `axis`."""
    axis = node.integer("axis")
    return lambda *values: np.concatenate(values, axis=axis)


@kernel("Split", (2, 11, 13, 18), moves=True)
def _split(node: Node) -> Compute:
    """The input in parts along `axis`: of the given lengths, or as many equal ones as there are outputs.

    Where equal parts do not go up, all are rounded up and the last is smaller.
    """
    axis = node.integer("axis", 0)
    parts = node.integer("num_outputs", len(node.wanted))
    attribute = node.integers("split")
    fixed = node.constant(1)
    lengths = attribute if attribute is not None else None if fixed is None else axes_of(fixed)

    def run(x: Tensor, given: Tensor | None = None) -> tuple[Tensor, ...]:
        if lengths is not None:
            sizes: Sequence[int] = lengths
        elif given is not None:
            sizes = axes_of(given)
        else:
            sizes = [-(-x.shape[axis] // parts)] * parts
        ends = list(itertools.accumulate(sizes))
        pieces = zip([0, *ends], ends, strict=False)
        return tuple(x[_one_slice(axis, slice(start, end))] for start, end in pieces)

    return run


@kernel("Slice", (10, 11, 13), moves=True)
def _slice(node: Node) -> Compute:
    """`x[start:end:step]` along each given axis; negative bounds count from the end, then all are clamped.

    To [0, extent] where the step is positive, else start to [0, extent - 1] and end to [-1, extent - 1].
    """
    given = [node.constant(index) for index in range(1, 5)]
    if all(value is not None or not node.has_input(index) for index, value in enumerate(given, 1)):
        starts, ends, axes, steps = (None if value is None else axes_of(value) for value in given)
        if starts is not None and ends is not None:
            plan = _slice_plan(starts, ends, axes, steps)
            if len(plan) == 1 and plan[0][1].step > 0:
                index = _one_slice(*plan[0])
                return lambda x, *_: x[index]
            return lambda x, *_: x[_slice_index(x, plan)]

    def run(
        x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None
    ) -> Tensor:
        plan = _slice_plan(
            axes_of(starts),
            axes_of(ends),
            None if axes is None else axes_of(axes),
            None if steps is None else axes_of(steps),
        )
        return x[_slice_index(x, plan)]

    return run


def _slice_plan(
    starts: Sequence[int], ends: Sequence[int], axes: Sequence[int] | None, steps: Sequence[int] | None
) -> list[tuple[int, slice]]:
    """An axis and a slice for each entry; the slices hold wherever an extent reaches them."""
    if axes is None:
        axes = range(len(starts))
    if steps is None:
        steps = [1] * len(starts)
    return [
        (axis, slice(start, end, step))
        for axis, start, end, step in zip(axes, starts, ends, steps, strict=True)
    ]


def _one_slice(axis: int, item: slice) -> tuple[Any, ...]:
    """The index for numpy of one forward slice, whatever the rank."""
    whole = slice(None)
    return (whole,) * axis + (item,) if axis >= 0 else (..., item, *(whole,) * (-axis - 1))


def _slice_index(x: Tensor, plan: list[tuple[int, slice]]) -> tuple[slice, ...]:
    """The index for numpy, which takes forward slices as ONNX does, but clamps backward ones otherwise."""
    index = [slice(None)] * x.ndim
    for axis, item in plan:
        index[axis] = item if item.step > 0 else _backward(item, x.shape[axis])
    return tuple(index)


def _backward(item: slice, extent: int) -> slice:
    """A slice of negative step over `extent` elements, its bounds clamped; those of no elements are none."""
    start, end = (bound + extent if bound < 0 else bound for bound in (item.start, item.stop))
    end = min(max(end, -1), extent - 1)
    # An end before the first element is None to numpy, as -1 counts from the end.
    return slice(min(max(start, 0), extent - 1) if extent else 0, None if end < 0 else end, item.step)


@kernel("Pad", (11, 13, 18, 19, 21, 23, 24, 25))
def _pad(node: Node) -> Compute:
    """The input with elements added before and behind each axis (removed where a pad is negative).

    `mode`: a constant (default 0), the edge's value, a reflection, or the other side (wrap).
    """
    mode: Any = node.text("mode", "constant")

    def run(x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None) -> Tensor:
        amounts = axes_of(pads)
        chosen = range(x.ndim) if axes is None else axes_of(axes)
        widths = [(0, 0)] * x.ndim
        for position, axis in enumerate(chosen):
            widths[axis] = (amounts[position], amounts[position + len(amounts) // 2])
        bounds = zip(widths, x.shape, strict=True)
        cropped = x[tuple(slice(max(0, -before), size - max(0, -after)) for (before, after), size in bounds)]
        widths = [(max(0, before), max(0, after)) for before, after in widths]
        if mode == "constant":
            fill = 0 if value is None else number_of(value)
            return np.pad(cropped, widths, constant_values=fill)
        return np.pad(cropped, widths, mode=mode)

    return run


@kernel("Trilu", 14)
def _trilu(node: Node) -> Compute:
    """The upper (or lower) triangle of each matrix, from the k-th diagonal on; zero elsewhere."""
    keep = np.triu if node.integer("upper", 1) else np.tril

    def run(x: Tensor, k: Tensor | None = None) -> Tensor:
        return keep(x, 0 if k is None else int(number_of(k)))

    return run
