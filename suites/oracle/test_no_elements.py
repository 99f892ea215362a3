"""Products and what surrounds them where an axis has no elements, as of a call without tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

CONTRIB = "com.microsoft"
PRODUCTS = [
    ((2, 0), (0, 3)),
    ((0, 4), (4, 3)),
    ((2, 4), (4, 0)),
    ((2, 0, 4), (4, 3)),
    ((0, 2, 4), (4, 3)),
    ((2, 2, 0), (0, 3)),
    ((0,), (0, 3)),
    ((4,), (4, 0)),
]


def ones(*shape: int) -> np.ndarray:
    """Of fp32."""
    return np.ones(shape, np.float32)


@pytest.mark.parametrize("constant", [True, False], ids=["weight", "input"])
@pytest.mark.parametrize(("left", "right"), PRODUCTS, ids=str)
def test_products(
    left: tuple[int, ...], right: tuple[int, int], constant: bool, against_ort: Callable[..., None]
) -> None:
    """No tokens give none, no columns none, and a sum of no terms is zero, or the bias."""
    constants = (1,) if constant else ()
    against_ort("MatMul", [ones(*left), ones(*right)], domain="", constants=constants)
    if len(left) == 2:
        bias = ones(right[1])
        against_ort("Gemm", [ones(*left), ones(*right), bias], domain="", constants=constants)
        against_ort("Gemm", [ones(*left), ones(*right).T, bias], domain="", constants=constants, transB=1)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 2)], ids=str)
@pytest.mark.parametrize(
    "op_type", ["RotaryEmbedding", "MatMulNBits", "SkipSimplifiedLayerNormalization", "QuickGelu"]
)
def test_operators_of_onnx_runtime_without_tokens(
    op_type: str, shape: tuple[int, ...], against_ort: Callable[..., None]
) -> None:
    """What a decoder applies to each of its tokens gives nothing of nothing."""
    x = ones(*(1,) * (2 - len(shape)), *shape, 32)
    inputs: list[Any] = [x]
    options: dict[str, Any] = {}
    if op_type == "RotaryEmbedding":
        inputs += [np.zeros(x.shape[:2], np.int64), ones(4, 8), ones(4, 8)]
        options = {"num_heads": 2}
    elif op_type == "MatMulNBits":
        inputs += [np.zeros((8, 1, 16), np.uint8), ones(8, 1)]
        options = {"constants": (1, 2), "bits": 4, "block_size": 32, "N": 8, "K": 32, "accuracy_level": 1}
    elif op_type == "SkipSimplifiedLayerNormalization":
        inputs += [x, ones(32)]
    against_ort(op_type, inputs, **options)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("op_type", ["LayerNormalization", "RMSNormalization"])
def test_norms_of_nothing(
    op_type: str, shape: tuple[int, ...], run_node: Callable[..., list[np.ndarray]]
) -> None:
    """An empty tensor of the same shape; ONNX Runtime refuses some of them."""
    (y,) = run_node(op_type, [ones(*shape), ones(shape[-1])])
    assert (y.shape, y.dtype) == (shape, np.float32)
