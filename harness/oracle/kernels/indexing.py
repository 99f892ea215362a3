"""Picking and placing elements by index. Semantics of the ONNX operator specification.

Negative indices count from the end. Indices out of range are an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from harness.oracle.kernels.registry import kernel
from harness.oracle.kernels.tensor import number_of
from harness.oracle.node import Compute, Node, Tensor, UnsupportedFeatureError

_SCATTER: dict[str, Callable[..., None]] = {
    "add": np.add.at,
    "mul": np.multiply.at,
    "max": np.maximum.at,
    "min": np.minimum.at,
}
"""How an element and its updates become one, in the order of the updates."""


@kernel("Gather", (1, 11, 13), moves=True)
def _gather(node: Node) -> Compute:
    """Slices of x along `axis`: output[.., i.., ..] = x[.., indices[i..], ..]. Reads only these slices."""
    axis = node.integer("axis", 0)
    constant = node.constant(1)
    if constant is not None and constant.ndim == 0:
        # One slice: a view.
        index = int(constant)
        if axis == 0:
            return lambda x, _: x[index]
    if axis == 0:
        return lambda x, indices: x[indices]
    return lambda x, indices: np.take(x, indices, axis=axis)


@kernel("GatherElements", (11, 13), moves=True)
def _gather_elements(node: Node) -> Compute:
    """output[i, j, ..] = x[i, indices[i, j, ..], ..] with the index in place of `axis`; shape of indices."""
    axis = node.integer("axis", 0)

    def run(x: Tensor, indices: Tensor) -> Tensor:
        return x[_element_index(indices, axis % x.ndim, x.shape[axis])]

    return run


def _element_index(indices: Tensor, axis: int, extent: int) -> tuple[Tensor, ...]:
    """Full coordinates of elements whose coordinate along `axis` is given, in the shape of `indices`."""
    grid = list(np.indices(indices.shape, sparse=True))
    if indices.size and (indices.min() < -extent or indices.max() >= extent):
        raise IndexError(f"an index is outside [-{extent}, {extent})")
    grid[axis] = indices
    return tuple(grid)


@kernel("GatherND", (11, 12, 13), moves=True)
def _gather_nd(node: Node) -> Compute:
    """output[b.., i..] = x[b.., *indices[b.., i..]]: the last axis of indices holds coordinates.

    The first `batch_dims` axes belong together in both.
    """
    batch = node.integer("batch_dims", 0)

    def run(x: Tensor, indices: Tensor) -> Tensor:
        where = [indices[..., column] for column in range(indices.shape[-1])]
        lead = np.indices(indices.shape[:batch], sparse=True)
        rest = indices.ndim - 1 - batch
        return x[tuple(axis.reshape(axis.shape + (1,) * rest) for axis in lead) + tuple(where)]

    return run


@kernel("ScatterElements", (11, 13, 16, 18))
def _scatter_elements(node: Node) -> Compute:
    """The input with elements replaced, or combined by `reduction`, at coordinates as in GatherElements."""
    axis, place = node.integer("axis", 0), _placer(node)

    def run(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        output = np.array(x)
        place(output, _element_index(indices, axis % x.ndim, x.shape[axis]), updates)
        return output

    return run


@kernel("ScatterND", (11, 13, 16, 18))
def _scatter_nd(node: Node) -> Compute:
    """The input with slices replaced, or combined by `reduction`, at coordinates as in GatherND."""
    place = _placer(node)

    def run(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        output = np.array(x)
        place(output, tuple(indices[..., column] for column in range(indices.shape[-1])), updates)
        return output

    return run


def _placer(node: Node) -> Callable[[Tensor, Any, Tensor], None]:
    reduction = node.text("reduction", "none")
    if reduction == "none":
        return lambda output, where, updates: output.__setitem__(where, updates)
    if reduction not in _SCATTER:
        raise UnsupportedFeatureError(f"reduction {reduction}")
    return _SCATTER[reduction]


@kernel("TensorScatter", 24)
def _tensor_scatter(node: Node) -> Compute:
    """The cache with `update` [B, .., S, ..] written from `write_indices[b]` on along `axis`.

    In `circular` mode positions wrap around at the cache's end; else they must fit.
    """
    axis, circular = node.integer("axis", -2), node.text("mode", "linear") == "circular"

    def run(cache: Tensor, update: Tensor, write_indices: Tensor | None = None) -> Tensor:
        output = np.array(cache)
        length, room = update.shape[axis], cache.shape[axis]
        first = np.zeros(len(cache), np.int64) if write_indices is None else write_indices
        for batch, start in enumerate(first.tolist()):
            if not circular and start + length > room:
                raise IndexError(f"positions {start} to {start + length} do not fit into {room}")
            where = (np.arange(length) + start) % room
            target = np.moveaxis(output[batch], axis % cache.ndim - 1, 0)
            target[where] = np.moveaxis(update[batch], axis % cache.ndim - 1, 0)
        return output

    return run


@kernel("Compress", (9, 11, 28))
def _compress(node: Node) -> Compute:
    """The slices along `axis` (of the flattened x without one) whose condition is true."""
    axis = node.integer_or_none("axis")
    return lambda x, condition: np.compress(condition, x, axis=axis)


@kernel("NonZero", (9, 13))
def _non_zero(node: Node) -> Compute:
    """Coordinates of the elements that are not zero, int64 [rank, count], in row-major order."""

    def run(x: Tensor) -> Tensor:
        # A scalar has no coordinates, unlike with numpy: [0, 1], or [0, 0] where it is zero.
        return np.array(np.nonzero(np.atleast_1d(x)), dtype=np.int64)[: np.ndim(x)]

    return run


@kernel("OneHot", (9, 11, 28))
def _one_hot(node: Node) -> Compute:
    """`values[1]` where the coordinate along the new `axis` is the index, else `values[0]`."""
    axis = node.integer("axis", -1)

    def run(indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
        count = int(number_of(depth))
        position = axis + indices.ndim + 1 if axis < 0 else axis
        wanted = np.expand_dims(np.where(indices < 0, indices + count, indices), position)
        steps = np.arange(count).reshape((-1,) + (1,) * (indices.ndim - position))
        return np.where(wanted == steps, values[1], values[0])

    return run
