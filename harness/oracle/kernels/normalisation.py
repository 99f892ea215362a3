"""Normalisations over the last axes, with their skip forms.

Everything is computed in the oracle's precision, which is at least what `stash_type` asks for.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from harness.oracle.kernels.elementwise import sigmoid, silu
from harness.oracle.kernels.registry import CONTRIB, kernel
from harness.oracle.node import Compute, Node, Tensor, UnsupportedFeatureError

__all__ = ["rms"]


def rms(x: Tensor, epsilon: float, axes: Any = -1) -> Tensor:
    """The root of mean(x^2) + epsilon over `axes`, which are kept with extent 1."""
    if axes == -1:
        return np.sqrt(np.vecdot(x, x)[..., None] / x.shape[-1] + epsilon)
    count = math.prod(x.shape[axis] for axis in axes)
    return np.sqrt(np.add.reduce(x * x, axis=axes, keepdims=True) / count + epsilon)


def _centred(x: Tensor, epsilon: float, axes: Any = -1) -> tuple[Any, Any, Any]:
    """The mean over `axes`, x - mean, and 1 / sqrt(variance + epsilon)."""
    count = x.shape[-1] if axes == -1 else math.prod(x.shape[axis] for axis in axes)
    mean = np.add.reduce(x, axis=axes, keepdims=True) / count
    rest = x - mean
    return mean, rest, 1 / np.sqrt(np.add.reduce(rest * rest, axis=axes, keepdims=True) / count + epsilon)


def _axes(x: Tensor, first: int) -> Any:
    """The axes from `first` on; -1 when that is only the last."""
    return -1 if first in (-1, x.ndim - 1) else tuple(range(first % x.ndim, x.ndim))


@kernel("RMSNormalization", 23)
@kernel("SimplifiedLayerNormalization")
def _rms_normalization(node: Node) -> Compute:
    """`x / sqrt(mean(x^2) + epsilon) scale`, the mean over the axes from `axis` on.

    x [.., normalised..], scale broadcastable to it. SimplifiedLayerNormalization is ONNX Runtime's name for
    the same, in the standard domain; its second output is the factor 1 / sqrt(..).
    """
    axis, epsilon = node.integer("axis", -1), node.number("epsilon", 1e-5)
    if node.wants(1):

        def run(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            root = rms(x, epsilon, _axes(x, axis))
            return x / root * scale, 1 / root

        return run
    return lambda x, scale: x / rms(x, epsilon, _axes(x, axis)) * scale


@kernel("LayerNormalization", (1, 17))
def _layer_normalization(node: Node) -> Compute:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the axes from `axis` on.

    Optional outputs: mean and 1 / sqrt(variance + epsilon), the normalised axes with extent 1.
    """
    axis, epsilon = node.integer("axis", -1), node.number("epsilon", 1e-5)

    def run(x: Tensor, scale: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        mean, rest, inverse = _centred(x, epsilon, _axes(x, axis))
        y = rest * inverse * scale
        return (y if bias is None else y + bias), mean, inverse

    return run


@kernel("SkipSimplifiedLayerNormalization", domain=CONTRIB)
def _skip_rms_normalization(node: Node) -> Compute:
    """With s = x + skip + bias: s / sqrt(mean(s^2) + epsilon) * gamma over the last axis.

    x [.., H]; skip [.., H] broadcasts; gamma and bias [H]. Outputs: the result, two that only training
    uses (refused here), and s. Source: com.microsoft version 1.
    """
    if node.wants(1) or node.wants(2):
        raise UnsupportedFeatureError("outputs for training (mean, inv_std_var)")
    epsilon = node.number("epsilon", 1e-12)

    def run(x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
        total = x + skip
        if bias is not None:
            total = total + bias
        return total / rms(total, epsilon) * gamma, None, None, total

    return run


@kernel("SkipLayerNormalization", domain=CONTRIB)
def _skip_layer_normalization(node: Node) -> Compute:
    """With s = x + skip + bias: (s - mean) / sqrt(variance + epsilon) * gamma + beta over the last axis.

    Shapes and outputs as above, beta [H] optional. Source: com.microsoft version 1.
    """
    if node.wants(1) or node.wants(2):
        raise UnsupportedFeatureError("outputs for training (mean, inv_std_var)")
    epsilon = node.number("epsilon", 1e-12)

    def run(
        x: Tensor, skip: Tensor, gamma: Tensor, beta: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Any, ...]:
        total = x + skip
        if bias is not None:
            total = total + bias
        _, rest, inverse = _centred(total, epsilon)
        y = rest * inverse * gamma
        return (y if beta is None else y + beta), None, None, total

    return run


@kernel("GatedRMSNorm", domain=CONTRIB)
def _gated_rms_norm(node: Node) -> Compute:
    """`x / sqrt(mean(x^2) + epsilon) scale act(gate)`, the mean over groups of C = len(scale) elements.

    x and gate [.., G*C], scale [C]; act is x sigmoid(x) for `silu` and `swish`, or `sigmoid`.
    Source: com.microsoft version 1.
    """
    epsilon, activation = node.number("epsilon", 1e-5), node.text("activation", "silu")
    if activation not in ("silu", "swish", "sigmoid"):
        raise UnsupportedFeatureError(f"activation {activation}")
    act = sigmoid if activation == "sigmoid" else silu

    def run(x: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        grouped = x.reshape(*x.shape[:-1], -1, len(scale))
        return (grouped / rms(grouped, epsilon) * scale).reshape(x.shape) * act(gate)

    return run


@kernel("EmbedLayerNormalization", domain=CONTRIB)
def _embed_layer_normalization(node: Node) -> Compute:
    """LayerNormalization of s = word[input_ids] + position[position_ids] + segment[segment_ids].

    input_ids and segment_ids [B, S]; position_ids [B, S] or [1, S], 0 .. S - 1 when absent; tables
    [entries, H], gamma and beta [H]; mask [B, S]. Outputs: the result [B, S, H]; for each batch the number of
    ones in mask, int32 [B] (zeros without a mask); s. Source: com.microsoft version 1.
    """
    epsilon = node.number("epsilon", 1e-12)

    def run(
        ids: Tensor,
        segment_ids: Tensor | None,
        word: Tensor,
        position: Tensor,
        segment: Tensor | None,
        gamma: Tensor,
        beta: Tensor,
        mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = ids.shape[1]
        total = word[ids] + (position[:count] if position_ids is None else position[position_ids])
        if segment is not None and segment_ids is not None:
            total = total + segment[segment_ids]
        _, rest, inverse = _centred(total, epsilon)
        lengths = np.zeros(len(ids), np.int32) if mask is None else np.sum(mask, axis=1, dtype=np.int32)
        return rest * inverse * gamma + beta, lengths, total

    return run


@kernel("LpNormalization", (1, 22))
def _lp_normalization(node: Node) -> Compute:
    """The input divided by its 1- or 2-norm along `axis`; zero where the norm is zero."""
    axis, order = node.integer("axis", -1), node.integer("p", 2)

    def run(x: Tensor) -> Tensor:
        total = np.add.reduce(np.abs(x) if order == 1 else x * x, axis=axis, keepdims=True)
        norm = total if order == 1 else np.sqrt(total)
        return np.where(norm == 0, x.dtype.type(0), x / norm)

    return run


@kernel("GroupNormalization", 21)
def _group_normalization(node: Node) -> Compute:
    """LayerNormalization within each of `num_groups` groups of channels; x [N, C, ..], scale and bias [C]."""
    groups, epsilon = node.integer("num_groups"), node.number("epsilon", 1e-5)

    def run(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        _, rest, inverse = _centred(x.reshape(len(x), groups, -1), epsilon)
        column = (-1,) + (1,) * (x.ndim - 2)
        return (rest * inverse).reshape(x.shape) * scale.reshape(column) + bias.reshape(column)

    return run
