"""Known sums of attention and of linear attention: scores are made so that only a sum over values is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from harness.oracle.precision import Array
from harness.oracle.sums.probe import TERMS, KnownSums, Probe, Site, spread

__all__ = ["attention", "group_query", "linear_attention"]

_KEYS = 24
"""Keys of an attention; no power of two, so that a weight of 1/24 is rounded."""


def linear_attention(site: Site) -> KnownSums | None:
    """Keys that are unit vectors, no decay, beta 1: the last query's output is scale sum of q_t v_t."""
    node = site.node
    if node.integer("state_window", 0) or any(x is not None for x in site.constants):
        return None
    queries, heads = node.integer("q_num_heads"), node.integer("kv_num_heads")
    given_scale, most = node.number("scale", 0.0), max(queries, heads)

    def probes(rng: np.random.Generator) -> Iterator[Probe]:
        dtype, count, width = node.precision.dtype, TERMS, 16
        keys = np.repeat(np.eye(count, dtype=dtype)[:, None], heads, axis=1)  # [T, N, D], D = T
        query, value = (
            spread(rng, (count, queries, count), dtype),
            spread(rng, (count, heads, width), dtype),
        )
        rows = {0: query, 1: keys, 2: value, 4: np.zeros((count, heads)), 5: np.ones((count, heads))}
        arguments = site.arguments()
        for index, array in rows.items():
            if node.has_input(index):
                arguments[index] = array.astype(dtype, copy=False).reshape(1, count, -1)
        if node.has_input(3):
            arguments[3] = np.zeros((1, heads, count, width), dtype)
        scale = given_scale or count**-0.5
        # Where heads are fewer on one side, neighbours on the other share them.
        last = scale * query[-1].astype(np.float64).repeat(most // queries, axis=0)
        v = value.astype(np.float64).repeat(most // heads, axis=1)
        expected = np.einsum("nt,tne->ne", last, v)
        magnitude = np.einsum("nt,tne->ne", np.abs(last), np.abs(v))
        yield Probe(arguments, expected, magnitude, lambda y: y[0, -1])

    return KnownSums(f"LinearAttention, rule {node.text('update_rule', 'gated_delta')}", 0, TERMS, probes)


def attention(site: Site) -> KnownSums | None:
    """Attention with scores of zero: the last query's output is the mean of the values that it sees."""
    node = site.node
    if any(x is not None for x in site.constants):
        return None
    heads, kv_heads = node.integer("q_num_heads", 0), node.integer("kv_num_heads", 0)
    merged = heads > 0
    heads, kv_heads = heads or 2, kv_heads or 2
    seen = _seen(node.integer("left_window_size", -1) + 1)

    def probes(rng: np.random.Generator) -> Iterator[Probe]:
        width, dtype = 16, node.precision.dtype
        value = spread(rng, (1, kv_heads, _KEYS, width), dtype)
        rows = [np.zeros((1, n, _KEYS, width), dtype) for n in (heads, kv_heads)] + [value]
        if merged:
            rows = [x.swapaxes(1, 2).reshape(1, _KEYS, -1) for x in rows]
        arguments = site.arguments(rows[0], rows[1], rows[2])
        if node.has_input(3):
            arguments[3] = np.zeros((_KEYS, _KEYS), dtype)
        for index in (4, 5):
            if node.has_input(index):
                arguments[index] = np.zeros((1, kv_heads, 0, width), dtype)
        if node.has_input(6):
            arguments[6] = np.array([_KEYS])
        yield _mean(arguments, value, heads, seen, lambda y: y[0, -1] if merged else y[0, :, -1])

    return KnownSums("Attention, weights by values", 0, seen, probes)


def group_query(site: Site) -> KnownSums | None:
    """As `_attention`; rotation and norm leave zeros what they are."""
    node = site.node
    quantised = any(node.text(f"{name}_quant_type", "NONE") != "NONE" for name in "kv")
    if quantised or node.integer("smooth_softmax", 0) == 1 or node.has_input(11):
        return None
    if node.integer("sliding_window_cache", 0):
        return None
    heads, kv_heads = node.integer("num_heads"), node.integer("kv_num_heads")
    norms = [site.constants[i] for i in (14, 15) if node.has_input(i)]
    tables = site.constants[7] if node.has_input(7) else None
    if (tables is not None and len(tables) < _KEYS) or any(norm is None for norm in norms):
        return None
    seen = _seen(node.integer("local_window_size", -1))

    def probes(rng: np.random.Generator) -> Iterator[Probe]:
        dtype = node.precision.dtype
        width = 16 if tables is None else 2 * tables.shape[-1]
        width = next((norm.size for norm in norms if norm is not None), width)
        value = spread(rng, (1, kv_heads, _KEYS, width), dtype)
        past = np.zeros((1, kv_heads, 0, width), dtype)
        rows = [np.zeros((1, _KEYS, n * width), dtype) for n in (heads, kv_heads)]
        rows.append(value.swapaxes(1, 2).reshape(1, _KEYS, -1))
        if not node.has_input(1):
            rows = [np.concatenate(rows, axis=-1)]
        fed = dict(enumerate(rows)) | {
            3: past,
            4: past,
            5: np.array([_KEYS - 1], np.int32),
            6: np.array([_KEYS], np.int32),
            7: np.ones((_KEYS, width // 2), dtype),
            8: np.zeros((_KEYS, width // 2), dtype),
            9: np.arange(_KEYS)[None],
            10: np.zeros((1, 1, _KEYS, _KEYS), dtype),
        }
        arguments = site.arguments()
        for index, array in fed.items():
            if site.is_fed(index):
                arguments[index] = array
        yield _mean(arguments, value, heads, seen, lambda y: y[0, -1])

    return KnownSums("GroupQueryAttention, weights by values", 0, seen, probes)


def _seen(window: int) -> int:
    """How many keys the last query sees, where a window is given as more than 0."""
    return min(_KEYS, window) if window > 0 else _KEYS


def _mean(arguments: list[Any], value: Array, heads: int, seen: int, pick: Callable[[Array], Array]) -> Probe:
    """The mean of the last `seen` rows of value [1, N, T, E], for each of the query heads."""
    rows = np.repeat(value[0, :, -seen:].astype(np.float64), heads // value.shape[1], axis=0)
    expected, magnitude = rows.sum(axis=1) / seen, np.abs(rows).sum(axis=1) / seen
    return Probe(arguments, expected, magnitude, lambda y: pick(y).reshape(expected.shape))
