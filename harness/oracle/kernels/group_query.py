"""GroupQueryAttention of ONNX Runtime: attention with its own rotary embedding, cache and mask."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from harness.oracle.kernels.attention import capped, combine, merge_heads, scores, split_heads, visible, weigh
from harness.oracle.kernels.registry import CONTRIB, kernel
from harness.oracle.kernels.rotary import rotate
from harness.oracle.node import Compute, Node, Tensor, UnsupportedFeatureError

_REFUSED = {
    "sliding_window_cache": 0,
    "qk_output": 0,
    "k_quant_type": "NONE",
    "v_quant_type": "NONE",
}
"""Attributes that must have these values: caches of a window or of quantised values, debug outputs."""


@kernel("GroupQueryAttention", domain=CONTRIB)
def _group_query_attention(node: Node) -> Compute:
    """softmax(softcap(q k^T scale) + bias) v, causal by default, over a cache that the operator itself grows.

    query [B, S, H*D] with key and value [B, S, N*D], or all three packed in query [B, S, (H + 2 N) D];
    past and present [B, N, cache, D]. Entry b has seqlens_k[b] + 1 tokens after this call, of which S are
    new, except in a first prompt (S = total_sequence_length), where all are. Its new keys go behind its
    old ones; query i stands at position past_b + i, sees nothing after that position, and with
    `local_window_size` W only the last W positions. With `do_rotary`, q and k are turned at their positions
    (or at position_ids) by tables [positions, R/2]. `smooth_softmax` adds a score of 0 without a key,
    head_sink [H] one for each head. Source: com.microsoft version 1.
    """
    for name, wanted in _REFUSED.items():
        if node.attributes.get(name, wanted) != wanted:
            raise UnsupportedFeatureError(f"{name}={node.attributes[name]}")
    if node.has_input(14) or node.has_input(15):
        raise UnsupportedFeatureError("q_norm_weight and k_norm_weight")
    heads, kv_heads = node.integer("num_heads"), node.integer("kv_num_heads")
    given_scale, cap = node.number("scale", 0.0), node.number("softcap", 0.0)
    turn, interleaved = bool(node.integer("do_rotary", 0)), bool(node.integer("rotary_interleaved", 0))
    causal, window = bool(node.integer("causal", 1)), node.integer("local_window_size", -1)
    smooth = node.integer("smooth_softmax", 0) == 1

    def run(
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        past_key: Tensor | None,
        past_value: Tensor | None,
        last: Tensor,
        total_length: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        position_ids: Tensor | None = None,
        bias: Tensor | None = None,
        head_sink: Tensor | None = None,
        *_scales: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if key is None or value is None:
            width = query.shape[-1] // (heads + 2 * kv_heads)
            query, key, value = np.split(query, [heads * width, (heads + kv_heads) * width], axis=-1)
        q, k, v = split_heads(query, heads), split_heads(key, kv_heads), split_heads(value, kv_heads)
        count, total = q.shape[2], int(np.asarray(total_length).reshape(()))
        lengths = last.reshape(-1).astype(np.int64) + 1
        starts = np.zeros_like(lengths) if count == total else lengths - count
        if turn and cos is not None and sin is not None:
            where = starts[:, None] + np.arange(count) if position_ids is None else position_ids
            table_cos, table_sin = cos[where][:, None], sin[where][:, None]
            q = rotate(q, table_cos, table_sin, interleaved=interleaved)
            k = rotate(k, table_cos, table_sin, interleaved=interleaved)
        k, v = _grown(past_key, k, starts, total), _grown(past_value, v, starts, total)
        allowed = _allowed(starts, lengths, count, total, causal=causal, window=window)
        sink: Any = np.zeros((), q.dtype) if smooth else None
        if head_sink is not None:
            sink = head_sink.reshape(-1, 1, 1)
        scale = given_scale or 1 / math.sqrt(q.shape[-1])
        soft = capped(scores(q, k[:, :, :total], scale=scale), cap)
        weights = weigh(soft, bias=None if bias is None else bias[..., :total], allowed=allowed, sink=sink)
        return merge_heads(combine(weights, v[:, :, :total])), k, v

    return run


def _grown(past: Tensor | None, new: Tensor, starts: Tensor, total: int) -> Tensor:
    """The cache with `new` [B, N, S, D] behind the first `starts[b]` rows; zero behind that.

    It is as long as `past`, or as `total` where that is more.
    """
    first = int(starts[0])
    if past is None:
        if new.shape[2] == total and not starts.any():
            return new
        past = new[:, :, :0]
    if past.shape[2] == first and first + new.shape[2] == total and (starts == first).all():
        return np.concatenate((past, new), axis=2)
    output = np.zeros((*new.shape[:2], max(total, past.shape[2]), new.shape[3]), dtype=new.dtype)
    for batch, start in enumerate(starts.tolist()):
        output[batch, :, :start] = past[batch, :, :start]
        output[batch, :, start : start + new.shape[2]] = new[batch]
    return output


def _allowed(
    starts: Tensor, lengths: Tensor, count: int, total: int, *, causal: bool, window: int
) -> Tensor | None:
    """Which keys each query may look at, broadcastable to [B, 1, S, T]."""
    left = window - 1 if window > 0 else -1
    if (lengths == total).all():
        return visible(count, total, int(starts[0]), causal=causal, left=left)
    offsets = starts.reshape(-1, 1, 1, 1)
    allowed = np.arange(total) < lengths.reshape(-1, 1, 1, 1)
    seen = visible(count, total, offsets, causal=causal, left=left)
    return allowed if seen is None else allowed & seen
