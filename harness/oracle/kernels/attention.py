"""Scaled dot-product attention, and the ONNX operator Attention.

Shapes: B batch, H query heads, N key/value heads (H a multiple of N; query heads h G .. h G + G - 1 with
G = H/N share key/value head h), S queries, T keys, D and E the widths of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from harness.oracle.kernels.registry import kernel
from harness.oracle.node import Compute, Node, Tensor, UnsupportedFeatureError

__all__ = ["capped", "combine", "merge_heads", "scores", "split_heads", "visible", "weigh"]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, S, heads*D] to [B, heads, S, D], a view."""
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).swapaxes(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, heads, S, D] to [B, S, heads*D]."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])


def scores(q: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """`q k^T scale`: [B, H, S, D] and [B, N, T, D] to [B, H, S, T], without repeating k."""
    batch, heads, count, width = q.shape
    grouped = (q * scale).reshape(batch, k.shape[1], heads // k.shape[1] * count, width)
    return np.matmul(grouped, k.swapaxes(-1, -2)).reshape(batch, heads, count, k.shape[2])


def capped(x: Tensor, cap: float) -> Tensor:
    """`cap tanh(x / cap)`, or x where the cap is 0."""
    return cap * np.tanh(x / cap) if cap else x


def visible(
    queries: int, keys: int, offset: Any, *, causal: bool, left: int = -1, right: int = -1
) -> Tensor | None:
    """Which keys each query may look at, [S, T] bool (or [.., S, T] for an array of offsets [.., 1, 1]).

    Query i stands at position p = offset + i: keys up to p when causal, from p - left and up to p + right
    where these are not negative. None when every query may look at every key.
    """
    bounds = [0] if causal else []
    if right >= 0:
        bounds.append(right)
    if not bounds and left < 0:
        return None
    if np.ndim(offset) == 0 and left < 0 and offset + min(bounds) >= keys - 1:
        return None
    position = offset + np.arange(queries)[:, None]
    key = np.arange(keys)
    allowed = np.ones(np.broadcast_shapes(np.shape(position), key.shape), dtype=bool)
    if bounds:
        allowed &= key <= position + min(bounds)
    if left >= 0:
        allowed &= key >= position - left
    return allowed


def weigh(
    x: Tensor, *, bias: Tensor | None = None, allowed: Tensor | None = None, sink: Any = None
) -> Tensor:
    """Softmax of x + bias over the last axis, where masked keys weigh nothing.

    A key is masked where `allowed` is False or `bias` is minus infinity, whatever its score. A query
    without any key weighs all of them zero. `sink` (broadcastable to [.., S, 1]) is a score that takes
    part in the softmax and has no key.
    """
    if bias is not None:
        x = x + bias
        hidden = bias == -np.inf
        if hidden.any():
            # Not the sum: infinity minus infinity is no number.
            x = np.where(hidden, x.dtype.type(-np.inf), x)
    if allowed is not None:
        x = np.where(allowed, x, x.dtype.type(-np.inf))
    top = np.maximum.reduce(x, axis=-1, keepdims=True, initial=-np.inf)
    if sink is not None:
        top = np.maximum(top, sink)
    top = np.where(top == -np.inf, x.dtype.type(0), top)
    weights = np.exp(x - top)
    total = np.add.reduce(weights, axis=-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - top)
    weights /= np.where(total == 0, x.dtype.type(1), total)
    return weights


def combine(weights: Tensor, v: Tensor) -> Tensor:
    """Weighted values: [B, H, S, T] and [B, N, T, E] to [B, H, S, E], without repeating v."""
    batch, heads, count, keys = weights.shape
    grouped = weights.reshape(batch, v.shape[1], heads // v.shape[1] * count, keys)
    return np.matmul(grouped, v).reshape(batch, heads, count, v.shape[3])


@kernel("Attention", (23, 24, 25))
def _attention(node: Node) -> Compute:
    """softmax(softcap(q k^T scale) + mask) v over the past and the new keys and values.

    Q [B, H, S, D], K [B, N, L, D], V [B, N, L, E], or rank 3 with merged heads; past [B, N, P, ..] goes
    before K and V, T = P + L. Query i stands at position offset + i, where the offset is P, or
    nonpad_kv_seqlen - S of each batch, or 0: `is_causal` and the windows (version 25) count from there.
    attn_mask broadcasts to [B, H, S, T], bool (True: look) or added; a shorter last axis is padded with
    "do not look". Outputs: Y as Q, present key and value, and q k^T at the stage `qk_matmul_output_mode`
    (0 scaled, 1 capped, 2 masked, 3 softmax). Source: ONNX Attention 23, 24 (nonpad_kv_seqlen), 25.
    """
    query_heads, kv_heads = node.integer("q_num_heads", 0), node.integer("kv_num_heads", 0)
    causal = node.flag("is_causal")
    left, right = node.integer("left_window_size", -1), node.integer("right_window_size", -1)
    for side, window in (("left", left), ("right", right)):
        if window < -1:
            raise UnsupportedFeatureError(f"{side}_window_size {window}, which is less than -1")
    cap, given_scale = node.number("softcap", 0.0), node.number_or_none("scale")
    mode = node.integer("qk_matmul_output_mode", 0) if node.wants(3) else None
    # Softmax in less than the oracle's precision is not done; in float64 it is.
    double = node.integer("softmax_precision", 1) == 11

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        past_key: Tensor | None = None,
        past_value: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Any, ...]:
        merged = q.ndim == 3
        if merged:
            q, k, v = split_heads(q, query_heads), split_heads(k, kv_heads), split_heads(v, kv_heads)
        offset: Any = 0
        if past_key is not None and past_value is not None:
            offset = past_key.shape[2]
            k, v = np.concatenate((past_key, k), axis=2), np.concatenate((past_value, v), axis=2)
        count, total = q.shape[2], k.shape[2]
        allowed = None
        if lengths is not None:
            ends = lengths.reshape(-1, 1, 1, 1)
            offset = ends - count
            allowed = np.arange(total) < ends
        seen = visible(count, total, offset, causal=causal, left=left, right=right)
        if seen is not None:
            allowed = seen if allowed is None else allowed & seen
        bias = None
        if mask is not None:
            mask = _padded(mask, total)
            if mask.dtype == bool:
                allowed = mask if allowed is None else allowed & mask
            else:
                bias = mask
        scale = 1 / math.sqrt(q.shape[-1]) if given_scale is None else given_scale
        raw = scores(q, k, scale=scale)
        soft = capped(raw, cap)
        weights = weigh(soft.astype(np.float64) if double else soft, bias=bias, allowed=allowed).astype(
            soft.dtype, copy=False
        )
        y = combine(weights, v)
        if merged:
            y = merge_heads(y)
        if mode is None:
            return y, k, v
        stages: list[Callable[[], Tensor]] = [
            lambda: raw,
            lambda: soft,
            lambda: _masked(soft, bias, allowed),
            lambda: weights,
        ]
        return y, k, v, stages[mode]()

    return run


def _padded(mask: Tensor, total: int) -> Tensor:
    """A mask [.., t] with "do not look" behind it up to `total` keys."""
    lacking = total - mask.shape[-1]
    if lacking <= 0:
        return mask
    fill = False if mask.dtype == bool else -np.inf
    return np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, lacking)], constant_values=fill)


def _masked(x: Tensor, bias: Tensor | None, allowed: Tensor | None) -> Tensor:
    """Scores with the bias added and minus infinity where a key is masked."""
    if bias is not None:
        x = x + bias
    return x if allowed is None else np.where(allowed, x, x.dtype.type(-np.inf))
