"""Mixtures of experts: a few small networks a token, chosen and weighed by a router.

Shapes: R rows (tokens), E experts, K = hidden size, I = inner size; F is 2 where gate and linear half of
SwiGLU stand in one matrix, else 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from harness.oracle.kernels.elementwise import gelu_tanh, sigmoid, silu
from harness.oracle.kernels.quantised import unpacked
from harness.oracle.kernels.reduction import softmax
from harness.oracle.kernels.registry import CONTRIB, kernel
from harness.oracle.node import Compute, Node, Tensor, UnsupportedFeatureError
from harness.oracle.precision import Precision

_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": gelu_tanh,
    "silu": silu,
    "identity": lambda x: x,
}

_Weights = Callable[[int], tuple[Any, Any]]
"""Matrix [out, in] and bias [out] (or None) of one expert."""


def _swiglu(node: Node) -> Callable[[Any, Any], Any]:
    """`G sigmoid(alpha G) (L + beta)` with G = min(g, limit) and L = l clamped to [-limit, limit]."""
    alpha, beta = node.number("activation_alpha", 1.0), node.number("activation_beta", 0.0)
    limit = node.number("swiglu_limit", math.inf)

    def run(gate: Tensor, linear: Tensor) -> Tensor:
        gate = np.minimum(gate, limit)
        return gate * sigmoid(alpha * gate) * (np.clip(linear, -limit, limit) + beta)

    return run


def _inner(node: Node) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The activation: from the first product [R, F*I], and the third [R, I] where there is one, to [R, I]."""
    name, fusion = node.text("activation_type", "relu"), node.integer("swiglu_fusion", 0)
    if name == "swiglu":
        combine = _swiglu(node)
        if fusion == 1:
            return lambda first, _: combine(first[:, 0::2], first[:, 1::2])
        if fusion == 2:
            return lambda first, _: combine(*np.split(first, 2, axis=-1))
        return combine
    if name not in _ACTIVATIONS:
        raise UnsupportedFeatureError(f"activation_type {name}")
    act = _ACTIVATIONS[name]
    return lambda first, third: act(first) if third is None else act(first) * third


def _router(node: Node) -> Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]:
    """The k experts of each row and their weights, both [R, k], from router scores [R, E].

    Weights are those of a softmax over all experts, or the given ones [R, E]; with
    `normalize_routing_weights` those of the k chosen experts are divided by their sum. Of equal scores the
    lower expert is chosen.
    """
    count, normalise = node.integer("k", 1), bool(node.integer("normalize_routing_weights", 0))
    if node.integer("use_sparse_mixer", 0):
        raise UnsupportedFeatureError("use_sparse_mixer")

    def run(router: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        chosen = np.argsort(-router, axis=-1, kind="stable")[:, :count]
        weights = np.take_along_axis(softmax(router) if given is None else given, chosen, axis=-1)
        if normalise:
            weights = weights / np.sum(weights, axis=-1, keepdims=True)
        return chosen, weights

    return run


def _mixed(
    x: Tensor, chosen: Tensor, weights: Tensor, *, parts: tuple[_Weights, _Weights, _Weights | None], act: Any
) -> Tensor:
    """The weighed sum of what each row's experts give: x [R, K] to [R, K], expert by expert."""
    up, down, third = parts
    y = np.zeros_like(x)
    for expert in np.unique(chosen).tolist():
        rows, place = np.nonzero(chosen == expert)
        inner = act(_affine(x[rows], up, expert), None if third is None else _affine(x[rows], third, expert))
        y[rows] += weights[rows, place, None] * _affine(inner, down, expert)
    return y


def _affine(x: Tensor, weights: _Weights, expert: int) -> Tensor:
    matrix, bias = weights(expert)
    y = np.matmul(x, matrix.T)
    return y if bias is None else y + bias


@kernel("MoE", domain=CONTRIB)
def _moe(node: Node) -> Compute:
    """The sum over the chosen experts e of w_e (act(x W1_e^T + b1_e) [* (x W3_e^T + b3_e)] W2_e^T + b2_e).

    x [R, K] or [B, S, K], router scores [R, E], W1 [E, F*I, K], W2 [E, K, I], W3 [E, I, K], biases
    [E, out] or absent. SwiGLU with `swiglu_fusion` 1 reads gate and linear half from even and odd rows of W1,
    with 2 from its halves, with 0 from W1 and W3; gelu is the tanh form. Source: com.microsoft version 1.
    """
    route, act = _router(node), _inner(node)

    def run(
        x: Tensor,
        router: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None = None,
        w3: Tensor | None = None,
        b3: Tensor | None = None,
    ) -> Tensor:
        def plain(w: Tensor, b: Tensor | None) -> _Weights:
            return lambda expert: (w[expert], None if b is None else b[expert])

        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = route(router, None)
        parts = (plain(w1, b1), plain(w2, b2), None if w3 is None else plain(w3, b3))
        return _mixed(rows, chosen, weights, parts=parts, act=act).reshape(x.shape)

    return run


@kernel("QMoE", domain=CONTRIB, raw=(2, 3, 5, 6, 8, 9, 11, 12, 13))
def _qmoe(node: Node) -> Compute:
    """MoE with weights W[e, n, k] = (q[e, n, k] - zero) scale of `expert_weight_bits`, dequantised at use.

    q packed in uint8 [E, out, in*bits/8], lowest bits first; scales and zero points a row [E, out], or a
    block of `block_size` inputs [E, out, in/block]; zero points packed like q along their last axis,
    2^(bits-1) when absent. `router_weights` [R, E] replace the softmax where given. The default
    `weights_prepacked` -1 is read as ONNX Runtime's CPU kernel does: not prepacked.
    Source: com.microsoft version 1.
    """
    if node.text("quant_type", "int") != "int":
        raise UnsupportedFeatureError(f"quant_type {node.text('quant_type')}")
    if node.integer("weights_prepacked", -1) == 1:
        raise UnsupportedFeatureError("weights_prepacked")
    route, act = _router(node), _inner(node)
    common, block = node.integer("expert_weight_bits", 4), node.integer("block_size", 0)
    bits = [node.integer(f"fc{part}_expert_weight_bits", common) for part in (1, 2, 3)]
    if any(width not in (2, 4, 8) for width in bits):
        raise UnsupportedFeatureError(f"{max(bits)} bits a weight")
    dequantise = functools.partial(_expert, block=block, precision=node.precision)

    def run(x: Tensor, router: Tensor, *rest: Tensor | None) -> Tensor:
        given = [*rest, *[None] * (19 - len(rest))]

        def quantised(part: int) -> _Weights | None:
            q, scales, bias = given[3 * part : 3 * part + 3]
            zeros = given[9 + part]
            if q is None or scales is None:
                return None
            return lambda expert: (
                dequantise(q[expert], scales[expert], None if zeros is None else zeros[expert], bits[part]),
                None if bias is None else bias[expert],
            )

        up, down, third = (quantised(part) for part in range(3))
        if up is None or down is None:
            raise ValueError("weights of fc1 or fc2 are missing")
        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = route(router, given[12])
        return _mixed(rows, chosen, weights, parts=(up, down, third), act=act).reshape(x.shape)

    return run


def _expert(
    q: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, *, block: int, precision: Precision
) -> Tensor:
    """The matrix [out, in] of one expert; see `_qmoe`."""
    codes = unpacked(q, bits).astype(precision.dtype)
    blocks = codes.reshape(len(codes), -1, block or codes.shape[-1])
    zero: Any = 2 ** (bits - 1)
    if zeros is not None:
        zero = unpacked(zeros, bits)[..., : blocks.shape[1] if block else len(codes)]
        zero = zero.astype(precision.dtype).reshape(len(codes), -1, 1)
    return ((blocks - zero) * precision.widen(scales).reshape(len(codes), -1, 1)).reshape(codes.shape)
