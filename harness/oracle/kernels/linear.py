"""Products: matrices, contractions, convolutions. Weights go to BLAS as they lie, without copies.

Semantics of the ONNX operator specification.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from harness.oracle.kernels.registry import kernel
from harness.oracle.node import Compute, Node, Tensor, UnsupportedFeatureError


@kernel("MatMul", (1, 9, 13))
def _matmul(node: Node) -> Compute:
    """`a @ b` as numpy's matmul: [.., M, K] @ [.., K, N] to [.., M, N], leading axes broadcast.

    With a matrix b all rows of a go into one product. For a constant b these rows are few (tokens).
    """
    constant = node.constant(1)
    if constant is None or constant.ndim != 2:
        return np.matmul
    depth, width = constant.shape

    def run(a: Tensor, b: Tensor) -> Tensor:
        if a.ndim == 2:
            return np.matmul(a, b)
        return np.matmul(a.reshape(-1, depth), b).reshape(*a.shape[:-1], width)

    return run


@kernel("Gemm", (7, 9, 11, 13))
def _gemm(node: Node) -> Compute:
    """`alpha a' @ b' + beta c`, where ' transposes as `transA` and `transB` say; c broadcasts to [M, N]."""
    alpha, beta = node.number("alpha", 1.0), node.number("beta", 1.0)
    flip_a, flip_b = bool(node.integer("transA", 0)), bool(node.integer("transB", 0))

    def run(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        y = np.matmul(a.T if flip_a else a, b.T if flip_b else b)
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

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rank = x.ndim - 2
        kernel_shape = weight.shape[2:]
        steps, gaps = strides or [1] * rank, dilations or [1] * rank
        reach = [(size - 1) * gap + 1 for size, gap in zip(kernel_shape, gaps, strict=True)]
        if auto_pad.startswith("SAME"):
            widths = _same_padding(x.shape[2:], reach, steps, upper=auto_pad == "SAME_UPPER")
        elif pads is None or auto_pad == "VALID":
            widths = [(0, 0)] * rank
        else:
            widths = list(zip(pads[:rank], pads[rank:], strict=True))
        if any(before or after for before, after in widths):
            x = np.pad(x, [(0, 0), (0, 0), *widths])
        positions = [
            (size - span) // step + 1 for size, span, step in zip(x.shape[2:], reach, steps, strict=True)
        ]
        y: Tensor | None = None
        for tap in np.ndindex(*kernel_shape):
            index = [
                slice(offset * gap, offset * gap + step * (count - 1) + 1, step)
                for offset, gap, step, count in zip(tap, gaps, steps, positions, strict=True)
            ]
            term = _tap(x[(..., *index)], weight[(..., *tap)], groups)
            y = term if y is None else np.add(y, term, out=y)
        if y is None:
            raise ValueError(f"the kernel of shape {weight.shape} has no taps")
        return y if bias is None else y + bias.reshape(-1, *[1] * rank)

    return run


def _tap(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    """What one tap of the kernel gives: x [N, C, positions..] and weight [M, C/G] to [N, M, positions..]."""
    batch, channels, *positions = x.shape
    outputs, depth = weight.shape
    if depth == 1 and outputs == channels:
        return x * weight.reshape(outputs, *[1] * len(positions))
    columns = x.reshape(batch, groups, depth, math.prod(positions))
    return np.matmul(weight.reshape(groups, -1, depth), columns).reshape(batch, outputs, *positions)


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
