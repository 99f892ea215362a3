"""Products: matrices, contractions, convolutions. Weights go to BLAS as they lie, without copies.

Semantics of the ONNX operator specification.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.oracle.kernels.registry import kernel
from harness.oracle.matrix import DenseMatrix, Projection, ResidentMatrix
from harness.oracle.node import Compute, Node, Tensor, UnsupportedFeatureError


@kernel("MatMul", (1, 9, 13), raw=(1,), streams=(1,))
def _matmul(node: Node) -> Compute:
    """`a @ b` as numpy's matmul: [.., M, K] @ [.., K, N] to [.., M, N], leading axes broadcast.

    With a constant matrix b all rows of a go into one product, as numpy would make one a batch.
    """
    if 1 in node.streamed:
        return Projection(node.streamed[1].weight(node.residency, in_columns=True))
    constant = node.constant(1)
    if constant is None:
        return np.matmul
    dtype = node.precision.held(constant.dtype)
    if constant.ndim != 2 or dtype.kind != "f" or not constant.size:
        stays = node.residency.reserve(constant.size * dtype.itemsize) if dtype != constant.dtype else True
        kept = node.precision.widen(constant) if stays else None
        return lambda a, b: np.matmul(a, node.precision.widen(b) if kept is None else kept)
    return Projection(ResidentMatrix(DenseMatrix(constant.T, dtype), node.residency))


@kernel("Gemm", (7, 9, 11, 13), raw=(1,), streams=(1,))
def _gemm(node: Node) -> Compute:
    """`alpha a' @ b' + beta c`, where ' transposes as `transA` and `transB` say; c broadcasts to [M, N]."""
    alpha, beta = node.number("alpha", 1.0), node.number("beta", 1.0)
    flip_a, flip_b = bool(node.integer("transA", 0)), bool(node.integer("transB", 0))
    if 1 in node.streamed:
        streamed = node.streamed[1].weight(node.residency, in_columns=not flip_b)
        return Projection(streamed, alpha, flip_a, 2, beta)
    constant = node.constant(1)
    if constant is not None and constant.ndim != 2:
        raise UnsupportedFeatureError(f"a B of rank {constant.ndim}, where a matrix is due")
    if constant is not None and constant.size and node.precision.held(constant.dtype).kind == "f":
        weight = DenseMatrix(constant if flip_b else constant.T, node.precision.held(constant.dtype))
        return Projection(ResidentMatrix(weight, node.residency), alpha, flip_a, 2, beta)

    def run(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        y = np.matmul(a.T if flip_a else a, node.precision.widen(b.T if flip_b else b))
        if alpha != 1:
            y = (y * alpha).astype(y.dtype)
        if c is None or beta == 0:
            return y
        return y + (c if beta == 1 else (c * beta).astype(c.dtype))

    return run


@kernel("Einsum", (12, 28))
def _einsum(node: Node) -> Compute:
    """The contraction that `equation` describes; terms may contain an ellipsis."""
    equation = node.text("equation").replace(" ", "")
    return lambda *values: np.einsum(equation, *values, optimize=len(values) > 2)


@kernel("Conv", (1, 11, 22))
def _conv(node: Node) -> Compute:
    """y[n, m, p..] = bias[m] + sum over c, k.. of w[m, c, k..] x[n, g C/G + c, p s + k d - pad ..].

    x [N, C, spatial..], w [M, C/G, kernel..]; g = m div (M/G) is the group of output channel m; s, d and
    pad are `strides`, `dilations` and `pads` of each axis.
    """
    groups = node.integer("group", 1)
    strides, dilations = node.integers("strides"), node.integers("dilations")
    pads, auto_pad = node.integers("pads"), node.text("auto_pad", "NOTSET")
    if auto_pad not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
        raise UnsupportedFeatureError(f"auto_pad {auto_pad}")
    if pads is not None and not any(pads):
        pads = None
    constant = node.constant(1)
    fixed = None if constant is None else _taps(constant, groups, dilations)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        taps = fixed or _taps(weight, groups, dilations)
        steps = strides or [1] * (x.ndim - 2)
        if auto_pad.startswith("SAME"):
            widths = _same_padding(x.shape[2:], taps.reach, steps, upper=auto_pad == "SAME_UPPER")
            x = np.pad(x, [(0, 0), (0, 0), *widths])
        elif pads is not None and auto_pad == "NOTSET":
            x = np.pad(x, [(0, 0), (0, 0), *zip(pads[: len(steps)], pads[len(steps) :], strict=True)])
        sizes = zip(x.shape[2:], taps.reach, steps, strict=True)
        spans = [(size - reach) // step * step + 1 for size, reach, step in sizes]
        y: Tensor = 0 if bias is None else bias.reshape(-1, *[1] * len(steps))
        for offsets, matrix in taps.items:
            places = zip(offsets, spans, steps, strict=True)
            part = x[(..., *[slice(first, first + span, step) for first, span, step in places])]
            y = y + (part * matrix if taps.depthwise else _grouped(part, matrix))
        return y

    return run


@dataclass(frozen=True, slots=True)
class _Taps:
    """A kernel tap by tap.

    Attributes:
        items: for each tap its offset along each axis, and what it multiplies by: [C, 1..] when depthwise,
            else [G, M/G, C/G].
        reach: extent of the kernel along each axis, gaps between taps included.
        depthwise: each channel has its own kernel and gives one channel.
    """

    items: list[tuple[tuple[int, ...], Tensor]]
    reach: list[int]
    depthwise: bool


def _taps(weight: Tensor, groups: int, dilations: Sequence[int] | None) -> _Taps:
    outputs, depth, *extents = weight.shape
    gaps = dilations or [1] * len(extents)
    depthwise = depth == 1 and outputs == groups
    shape = (outputs, *[1] * len(extents)) if depthwise else (groups, -1, depth)
    items = [
        (tuple(i * gap for i, gap in zip(tap, gaps, strict=True)), weight[(..., *tap)].reshape(shape))
        for tap in np.ndindex(*extents)
    ]
    reach = [(extent - 1) * gap + 1 for extent, gap in zip(extents, gaps, strict=True)]
    return _Taps(items, reach, depthwise)


def _grouped(part: Tensor, matrix: Tensor) -> Tensor:
    """Channels mixed within each group: [N, C, positions..] by [G, M/G, C/G] to [N, M, positions..]."""
    batch, _, *positions = part.shape
    groups, _, depth = matrix.shape
    columns = part.reshape(batch, groups, depth, math.prod(positions))
    return np.matmul(matrix, columns).reshape(batch, -1, *positions)


def _same_padding(
    extents: Sequence[int], reach: Sequence[int], steps: Sequence[int], *, upper: bool
) -> list[tuple[int, int]]:
    """Pads for ceil(extent / stride) output positions; an odd one goes to the end when `upper`."""
    widths = []
    for extent, size, step in zip(extents, reach, steps, strict=True):
        total = max(0, (-(-extent // step) - 1) * step + size - extent)
        small, large = total // 2, total - total // 2
        widths.append((small, large) if upper else (large, small))
    return widths
