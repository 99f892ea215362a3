"""Short chains of elementwise operators and products that ONNX Runtime fuses into one."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.oracle.kernels.elementwise import gelu, gelu_tanh, sigmoid
from harness.oracle.kernels.registry import CONTRIB, Kernel, always, kernel, register
from harness.oracle.node import Compute, Node, Tensor

register("Gelu", 1, Kernel(always(gelu)), domain=CONTRIB)


@kernel("BiasGelu", domain=CONTRIB)
def _bias_gelu(node: Node) -> Compute:
    """`gelu(x + bias)`, x [.., H], bias [H]. Source: com.microsoft version 1."""
    return lambda x, bias: gelu(x + bias)


@kernel("FastGelu", domain=CONTRIB)
def _fast_gelu(node: Node) -> Compute:
    """The tanh form of gelu, of x + bias where a bias is given. Source: com.microsoft version 1."""
    return lambda x, bias=None: gelu_tanh(x if bias is None else x + bias)


@kernel("QuickGelu", domain=CONTRIB)
def _quick_gelu(node: Node) -> Compute:
    """`x sigmoid(alpha x)`. Source: com.microsoft version 1."""
    alpha = node.number("alpha", 1.702)
    return lambda x: x * sigmoid(alpha * x)


@kernel("GatedAdd", domain=CONTRIB)
def _gated_add(node: Node) -> Compute:
    """`x + y gate`, x and y [.., H], gate [.., 1]. Source: com.microsoft version 1."""
    return lambda x, y, gate: x + y * gate


@kernel("FusedMatMul", domain=CONTRIB)
def _fused_matmul(node: Node) -> Compute:
    """`alpha a' @ b'` as numpy's matmul, where `transA` and `transB` swap the last two axes.

    `transBatchA` and `transBatchB` move the first axis behind the batch axes before that:
    [M, batch.., K] becomes [batch.., M, K]. Source: com.microsoft version 1.
    """
    alpha = node.number("alpha", 1.0)
    flips = [bool(node.integer(f"trans{name}", 0)) for name in "AB"]
    moves = [bool(node.integer(f"transBatch{name}", 0)) for name in "AB"]

    def run(*operands: Tensor) -> Any:
        turned = []
        for x, flip, move in zip(operands, flips, moves, strict=True):
            y = np.moveaxis(x, 0, -2) if move else x
            turned.append(y.swapaxes(-1, -2) if flip and y.ndim > 1 else y)
        product = np.matmul(*turned)
        return product if alpha == 1 else (product * alpha).astype(product.dtype)

    return run
