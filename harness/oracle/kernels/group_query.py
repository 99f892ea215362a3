"""GroupQueryAttention of ONNX Runtime: attention with its own rotary embedding, cache and mask."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from harness.oracle.kernels.attention import capped, combine, merge_heads, scores, split_heads, visible, weigh
from harness.oracle.kernels.kv_cache import cache_codec, grown, windowed
from harness.oracle.kernels.normalisation import rms
from harness.oracle.kernels.registry import CONTRIB, kernel
from harness.oracle.kernels.rotary import rotate
from harness.oracle.kernels.tensor import number_of
from harness.oracle.node import Compute, Node, Tensor, UnsupportedFeatureError


@kernel("GroupQueryAttention", domain=CONTRIB)
def _group_query_attention(node: Node) -> Compute:
    """softmax(softcap(q k^T scale) + bias) v, causal by default, over a cache that the operator itself grows.

    query [B, S, H*D] with key and value [B, S, N*D], or all three packed in query [B, S, (H + 2 N) D];
    past and present [B, N, cache, D]. Entry b has seqlens_k[b] + 1 tokens after this call, of which S are
    new, except in a first prompt (S = total_sequence_length), where all are. Its new keys go behind its
    old ones; keys and values of no rows are those of an earlier layer, whose present is then the past.
    Query i stands at position past_b + i, sees nothing after that position, and with `local_window_size` W
    only the last W positions. q_norm_weight and k_norm_weight [D] first scale q and k to unit root mean
    square. With `do_rotary`, q and k are then turned at their positions by tables [positions, R/2]: those in
    position_ids [B, S] if given, of which a first prompt uses the first element and counts from there.
    `smooth_softmax` adds a score of 0 without a key, head_sink [H]
    one for each head. Caches may be quantised (`cache_codec`), or of a window (`windowed`). Outputs:
    [B, S, H*D], present key and value, and with `qk_output` the capped scores and bias (1) or the weights
    (2), zero where a query may not look. Source: com.microsoft version 1.
    """
    heads, kv_heads = node.integer("num_heads"), node.integer("kv_num_heads")
    given_scale, cap = node.number("scale", 0.0), node.number("softcap", 0.0)
    causal, window = node.flag("causal", True), node.integer("local_window_size", -1)
    smooth = node.integer("smooth_softmax", 0) == 1
    rolls, shown = node.flag("sliding_window_cache"), node.integer("qk_output", 0)
    if window < 1 and window != -1:
        raise UnsupportedFeatureError(f"local_window_size {window}, which is neither -1 nor at least 1")
    if not causal and window != -1:
        raise UnsupportedFeatureError(f"causal 0 and local_window_size {window}, which must then be -1")
    if shown not in (0, 1, 2):
        raise UnsupportedFeatureError(f"qk_output {shown}, which is none of 0, 1 and 2")
    if rolls and window <= 0:
        raise UnsupportedFeatureError("sliding_window_cache without a local_window_size")
    if rolls and shown:
        raise UnsupportedFeatureError("qk_output of a cache of a window")
    encode_key, decode_key = cache_codec(node, "k_quant_type", node.declared(3))
    encode_value, decode_value = cache_codec(node, "v_quant_type", node.declared(4))
    place = _placing(node)

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
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
    ) -> tuple[Any, ...]:
        if key is None or value is None:
            width = query.shape[-1] // (heads + 2 * kv_heads)
            query, key, value = np.split(query, [heads * width, (heads + kv_heads) * width], axis=-1)
        q, k, v = split_heads(query, heads), split_heads(key, kv_heads), split_heads(value, kv_heads)
        count, total = q.shape[2], int(number_of(total_length))
        lengths = last.reshape(-1).astype(np.int64) + 1
        first_prompt = count == total
        starts = np.zeros_like(lengths) if first_prompt else lengths - count
        tables = None
        if cos is not None and sin is not None:
            where = position_ids
            if where is None or first_prompt:
                begin = starts if where is None else np.repeat(where.reshape(-1)[:1], len(starts))
                where = begin[:, None] + np.arange(count)
            tables = (cos[where][:, None], sin[where][:, None])
        q = place(q, query_norm, tables)
        # Without rows of its own it reads a cache that an earlier layer has grown by this call's rows.
        reads_only = k.shape[2] == 0
        k = k if reads_only else place(k, key_norm, tables)
        k, v = encode_key(k, key_scale, past_key), encode_value(v, value_scale, past_value)
        if bias is not None:
            bias = bias[..., :total]
        if rolls and past_key is not None and past_value is not None:
            rows, values = windowed(past_key, k, starts, window), windowed(past_value, v, starts, window)
            allowed: Tensor | None = _in_window(rows.positions, starts, count, window)
            bias = None if bias is None else _at_positions(bias, rows.positions)
            k, v, present = rows.rows, values.rows, (rows.present, values.present)
        else:
            kept = lengths if reads_only else starts
            k, v = grown(past_key, k, kept, total), grown(past_value, v, kept, total)
            present = (k, v)
            k, v = k[:, :, :total], v[:, :, :total]
            allowed = _allowed(starts, lengths, count, total, causal=causal, window=window)
        k, v = decode_key(k, key_scale), decode_value(v, value_scale)
        sink: Any = np.zeros((), q.dtype) if smooth else None
        if head_sink is not None:
            sink = head_sink.reshape(-1, 1, 1)
        soft = capped(scores(q, k, scale=given_scale or 1 / math.sqrt(q.shape[-1])), cap)
        weights = weigh(soft, bias=bias, allowed=allowed, sink=sink)
        y = merge_heads(combine(weights, v))
        if not shown:
            return y, *present
        if shown == 1:
            weights = soft if bias is None else soft + bias
        return y, *present, weights if allowed is None else np.where(allowed, weights, weights.dtype.type(0))

    return run


def _placing(node: Node) -> Any:
    """What happens to queries and keys before they meet: norm, then rotation."""
    turn, interleaved = node.flag("do_rotary"), node.flag("rotary_interleaved")
    epsilon = node.number("qk_norm_epsilon", 1e-6)

    def run(x: Tensor, norm: Tensor | None, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        if norm is not None:
            x = x / rms(x, epsilon) * norm
        if turn and tables is not None:
            x = rotate(x, *tables, interleaved=interleaved)
        return x

    return run


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


def _in_window(positions: Tensor, starts: Tensor, count: int, window: int) -> Tensor:
    """Which rows at `positions` [B, R] the queries behind `starts` [B] may look at, [B, 1, S, R]."""
    row = positions[:, None, None]
    query = starts.reshape(-1, 1, 1, 1) + np.arange(count)[:, None]
    return (row >= 0) & (row <= query) & (row > query - window)


def _at_positions(bias: Tensor, positions: Tensor) -> Tensor:
    """The columns of a bias [B or 1, H or 1, S, T] at `positions` [B, R]."""
    batch = len(positions)
    whole = np.broadcast_to(bias, (batch, *bias.shape[1:]))
    return np.take_along_axis(whole, np.maximum(positions, 0)[:, None, None], axis=-1)
