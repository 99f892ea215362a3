"""Multi-head attention of ONNX Runtime from before Attention was standard: heads are not shared.

Shapes: B batch, H heads, S queries, P past and L new keys, T = P + L, D and E the widths of a head of keys
and values. Masks weigh by adding `mask_filter_value` (-10000) to scores, not minus infinity, so that a query
whose keys are all masked looks at all of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from harness.oracle.kernels.attention import combine, merge_heads, scores, split_heads, weigh
from harness.oracle.kernels.registry import CONTRIB, kernel
from harness.oracle.node import Compute, Node, Tensor, UnsupportedFeatureError

_LOWEST = float(np.finfo(np.float32).min)
"""What ONNX Runtime adds to scores of keys behind the query."""


def _key_mask(mask: Tensor, batch: int, total: int) -> Tensor:
    """Which keys a mask leaves, bool broadcastable to [B, 1, S, T].

    int [B, T] or [B, S, T]: 0 is masked; [B]: the number of keys; [2 B]: the ends, then the first keys.
    """
    if mask.ndim == 2:
        return mask[:, None, None] > 0
    if mask.ndim == 3:
        return mask[:, None] > 0
    if mask.shape not in ((batch,), (2 * batch,)):
        raise ValueError(f"a mask of shape {list(mask.shape)} belongs to packed or 4-axis forms")
    column = np.arange(total)
    left = column < mask[:batch].reshape(-1, 1, 1, 1)
    return left if len(mask) == batch else left & (column >= mask[batch:].reshape(-1, 1, 1, 1))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None,
    bias: Tensor | None,
    past: int | None,
    fill: float,
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, H, S, D] over k [B, H, T, D], v [B, H, T, E]: output [B, S, H*E], masked scores.

    With `past`, the number P of past keys, it is causal: query i sees keys up to P + i, and the last one all,
    as with ONNX Runtime's CPU kernel. The two differ where queries and new keys are not as many, which the
    operator's documentation leaves open.
    """
    count, total = q.shape[2], k.shape[2]
    x = scores(q, k, scale=scale or 1 / math.sqrt(q.shape[-1]))
    if mask is not None:
        x = x + np.where(_key_mask(mask, len(q), total), x.dtype.type(0), x.dtype.type(fill))
    if bias is not None:
        x = x + bias
    if past is not None:
        seen = np.tri(count, total, past, dtype=bool)
        seen[-1:] = True
        x = x + np.where(seen, x.dtype.type(0), x.dtype.type(_LOWEST))
    return merge_heads(combine(weigh(x), v)), x


@kernel("MultiHeadAttention", domain=CONTRIB)
def _multi_head_attention(node: Node) -> Compute:
    """softmax(q k^T scale + mask + attention_bias) v over past and new keys.

    query [B, S, H*D] with key [B, L, H*D] and value [B, L, H*E], or with both [B, H, L, ..] (cross attention:
    already projected), or all packed in query [B, S, H, 3, D], or key and value in key [B, L, H, 2, D];
    bias [2 H D + H E] is added to the projections (not to those of rank 4); key_padding_mask as in
    `_key_mask`; attention_bias broadcasts to [B, H, S, T]; past [B, H, P, ..]. `unidirectional` as in
    `_attend`. Outputs: [B, S, H*E], present key and value, and the masked scores [B, H, S, T].
    Source: com.microsoft version 1.
    """
    heads, scale = node.integer("num_heads"), node.number("scale", 0.0)
    causal, fill = node.flag("unidirectional"), node.number("mask_filter_value", -10000.0)
    if node.has_input(8) or node.has_input(9):
        raise UnsupportedFeatureError("a cache shared by beams (past_sequence_length, cache_indirection)")

    def run(
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        attention_bias: Tensor | None = None,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        if query.ndim == 5:
            q, k, v = (query[:, :, :, part].swapaxes(1, 2) for part in range(3))
        elif key is not None and key.ndim == 5:
            q = split_heads(query, heads)
            k, v = (key[:, :, :, part].swapaxes(1, 2) for part in range(2))
        elif key is not None and value is not None:
            q = split_heads(query, heads)
            k, v = (x if x.ndim == 4 else split_heads(x, heads) for x in (key, value))
        else:
            raise ValueError("key or value is missing")
        if bias is not None:
            width = heads * q.shape[-1]
            projected = key is None or key.ndim != 4
            parts = [part.reshape(heads, 1, -1) for part in np.split(bias, [width, 2 * width])]
            q = q + parts[0]
            k, v = (k + parts[1], v + parts[2]) if projected else (k, v)
        past = 0
        if past_key is not None and past_value is not None:
            past = past_key.shape[2]
            k, v = np.concatenate((past_key, k), axis=2), np.concatenate((past_value, v), axis=2)
        seen = past if causal else None
        y, masked = _attend(q, k, v, scale=scale, mask=mask, bias=attention_bias, past=seen, fill=fill)
        return y, k, v, masked

    return run


@kernel("Attention", domain=CONTRIB)
def _packed_attention(node: Node) -> Compute:
    """MultiHeadAttention behind its own projection: [q, k, v] = x W + b.

    x [B, S, C], W [C, 2 H D + H E], b [2 H D + H E]; mask as in `_key_mask`; past and present
    [2, B, H, .., D], keys first; attention_bias broadcasts to [B, H, S, T]. `qkv_hidden_sizes` is
    (H D, H D, H E) where E differs from D, and there is then neither past nor present.
    Source: com.microsoft version 1.
    """
    heads, scale = node.integer("num_heads"), node.number("scale", 0.0)
    causal, fill = node.flag("unidirectional"), node.number("mask_filter_value", -10000.0)
    sizes = node.integers("qkv_hidden_sizes")
    if node.integer("do_rotary", 0):
        raise UnsupportedFeatureError("do_rotary")
    if node.integer("past_present_share_buffer", 0):
        raise UnsupportedFeatureError("past_present_share_buffer")
    unequal = sizes is not None and sizes[1] != sizes[2]
    if unequal and (node.has_input(4) or node.wants(1)):
        raise UnsupportedFeatureError(f"one cache of keys and values that differ in width ({sizes})")

    def run(
        x: Tensor,
        weight: Tensor,
        b: Tensor | None = None,
        mask: Tensor | None = None,
        past: Tensor | None = None,
        attention_bias: Tensor | None = None,
        _past_length: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        seen = None if not causal else 0 if past is None else past.shape[3]
        merged = np.matmul(x, weight)
        if b is not None:
            merged = merged + b
        width = merged.shape[-1] // 3 if sizes is None else sizes[0]
        q, k, v = (split_heads(part, heads) for part in np.split(merged, [width, 2 * width], axis=-1))
        if past is not None:
            k, v = np.concatenate((past[0], k), axis=2), np.concatenate((past[1], v), axis=2)
        y, _ = _attend(q, k, v, scale=scale, mask=mask, bias=attention_bias, past=seen, fill=fill)
        return y, None if unequal else np.stack((k, v))

    return run
