"""Known sums of the operators that attend: which configurations are a `Softmax`, and what kernels take."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from harness.oracle.precision import Array
from harness.oracle.sums.probe import KnownSums, Site, spread
from harness.oracle.sums.softmax import KEYS, WIDTH, Fed, Rotation, Softmax

__all__ = ["attention", "group_query", "multi_head"]

_PROMPT, _BEHIND = (KEYS, 0), ((1, KEYS - 1), (5, KEYS - 5))
"""Queries, and keys from the cache, of which there are some for a token and for a part of a prompt."""

_SEED = 20240229
"""Of what a node is told once, as the tables of its rotation."""


def attention(site: Site) -> KnownSums | None:
    """Attention, with heads merged where it says how many there are."""
    node = site.node
    if any(x is not None for x in site.constants) or node.has_input(4) != node.has_input(5):
        return None
    heads, kv_heads = node.integer("q_num_heads", 0), node.integer("kv_num_heads", 0)
    merged, dtype = heads > 0, node.precision.dtype
    left = node.integer("left_window_size", -1)
    looks = node.declared(3) == np.dtype(bool)
    forms = [_PROMPT]
    if node.has_input(4):
        forms.extend(_BEHIND)
    elif node.has_input(6) or not (node.integer("is_causal", 0) or left >= 0):
        forms.append((1, 0))

    def feed(fed: Fed) -> list[Any]:
        rows = [_merged(x) if merged else x[None] for x in (fed.q, fed.k, fed.v)]
        arguments = site.arguments(*rows)
        mask = np.ones(fed.bias.shape, bool) if looks else fed.bias
        for index, value in {3: mask, 4: fed.past_k[None], 5: fed.past_v[None], 6: np.array([KEYS])}.items():
            if node.has_input(index):
                arguments[index] = value
        return arguments

    scale = node.number_or_none("scale")
    return Softmax(
        operator=node.op_type,
        dtype=dtype,
        heads=heads or 2,
        kv_heads=kv_heads or 2,
        width=WIDTH,
        scale=1 / math.sqrt(WIDTH) if scale is None else scale,
        feed=feed,
        pick=lambda y: y[0, -1] if merged else y[0, :, -1],
        forms=tuple(forms),
        cap=node.number("softcap", 0.0),
        window=left + 1,
        biased=node.has_input(3) and not looks,
    ).sums()


def group_query(site: Site) -> KnownSums | None:
    """GroupQueryAttention with a cache of floats, of all positions."""
    node = site.node
    quantised = any(node.text(f"{name}_quant_type", "NONE") != "NONE" for name in "kv")
    if quantised or node.flag("sliding_window_cache"):
        return None
    told = (7, 8, 11, 14, 15)
    if any(x is not None for index, x in enumerate(site.constants) if index not in told):
        return None
    tables = [site.constants[index] if node.has_input(index) else None for index in (7, 8)]
    norms = [site.constants[index] if node.has_input(index) else None for index in (14, 15)]
    if any(site.is_fed(index) for index in (14, 15)) or site.is_fed(7) != site.is_fed(8):
        return None
    if tables[0] is not None and len(tables[0]) < KEYS:
        return None
    width = next((norm.size for norm in norms if norm is not None), WIDTH)
    if tables[0] is not None and not any(norm is not None for norm in norms):
        width = max(2 * tables[0].shape[-1], KEYS)
    rng, dtype = np.random.default_rng(_SEED), node.precision.dtype
    if site.is_fed(7):
        angles = rng.uniform(-math.pi, math.pi, (KEYS, width // 2))
        tables = [np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)]
    cos, sin = tables
    heads, kv_heads = node.integer("num_heads"), node.integer("kv_num_heads")
    sink = np.zeros(heads, dtype) if node.integer("smooth_softmax", 0) == 1 else None
    if node.has_input(11):
        given = site.constants[11]
        sink = rng.uniform(-2, 2, heads).astype(dtype) if given is None else given

    def feed(fed: Fed) -> list[Any]:
        rows = [_merged(x) for x in (fed.q, fed.k, fed.v)]
        if not node.has_input(1):
            rows = [np.concatenate(rows, axis=-1)]
        count = fed.q.shape[1]
        everything = dict(enumerate(rows)) | {
            3: fed.past_k[None],
            4: fed.past_v[None],
            5: np.array([KEYS - 1], np.int32),
            6: np.array([KEYS], np.int32),
            7: cos,
            8: sin,
            9: np.arange(KEYS - count, KEYS)[None],
            10: fed.bias[None, None],
            11: sink,
        }
        arguments = site.arguments()
        for index, value in everything.items():
            if site.is_fed(index):
                arguments[index] = value
        return arguments

    rotation = None
    if node.flag("do_rotary") and cos is not None and sin is not None:
        rotation = Rotation.of(cos, sin, interleaved=node.flag("rotary_interleaved"))
    return Softmax(
        operator=node.op_type,
        dtype=dtype,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        scale=node.number("scale", 0.0) or 1 / math.sqrt(width),
        feed=feed,
        pick=lambda y: y[0, -1],
        forms=(_PROMPT, *_BEHIND) if site.is_fed(3) and site.is_fed(4) else (_PROMPT,),
        cap=node.number("softcap", 0.0),
        window=max(0, node.integer("local_window_size", -1)),
        biased=node.has_input(10),
        sink=sink,
        norms=(norms[0], norms[1]),
        epsilon=node.number("qk_norm_epsilon", 1e-6),
        rotation=rotation,
    ).sums()


def multi_head(site: Site) -> KnownSums | None:
    """MultiHeadAttention with query, key and value apart."""
    node = site.node
    if any(x is not None for index, x in enumerate(site.constants) if index != 3):
        return None
    if not (node.has_input(1) and node.has_input(2)) or node.has_input(6) != node.has_input(7):
        return None
    heads, dtype = node.integer("num_heads"), node.precision.dtype
    shift = site.constants[3] if node.has_input(3) else None
    width = WIDTH if shift is None else shift.size // (3 * heads)
    if shift is not None and shift.size != 3 * heads * width:
        return None
    if site.is_fed(3):
        shift = spread(np.random.default_rng(_SEED), (3 * heads * width,), dtype)
    forms = [_PROMPT]
    if node.has_input(6):
        forms.extend(_BEHIND)
    elif not node.flag("unidirectional"):
        forms.append((1, 0))

    def feed(fed: Fed) -> list[Any]:
        arguments = site.arguments(*(_merged(x) for x in (fed.q, fed.k, fed.v)))
        everything = {
            3: shift,
            4: np.ones((1, KEYS), np.int32),
            5: fed.bias[None, None],
            6: fed.past_k[None],
            7: fed.past_v[None],
        }
        for index, value in everything.items():
            if site.is_fed(index):
                arguments[index] = value
        return arguments

    parts = None if shift is None else tuple(shift.reshape(3, heads, 1, width))
    return Softmax(
        operator=node.op_type,
        dtype=dtype,
        heads=heads,
        kv_heads=heads,
        width=width,
        scale=node.number("scale", 0.0) or 1 / math.sqrt(width),
        feed=feed,
        pick=lambda y: y[0, -1],
        forms=tuple(forms),
        biased=node.has_input(5),
        shifts=None if parts is None else (parts[0], parts[1], parts[2]),
    ).sums()


def _merged(x: Array) -> Array:
    """[H, S, D] to [1, S, H*D]."""
    return x.swapaxes(0, 1).reshape(1, x.shape[1], -1)
