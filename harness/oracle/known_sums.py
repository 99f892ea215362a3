"""Sums that are known: inputs for a node's own kernel, and what it must make of them, in float64.

Each operator that sums products gets inputs of which few are not zero, so that a sum has a few dozen terms of
full precision and of very different magnitudes. What they must give is worked out here from the operator's
description and the bytes of its weights, by other code than the kernel's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from harness.oracle.executor import Step
from harness.oracle.kernels.registry import CONTRIB
from harness.oracle.node import Node
from harness.oracle.precision import Array, is_float

__all__ = ["SUMMING", "KnownSums", "Probe", "Site", "known_sums"]

_TERMS = 32
"""Terms of a sum, where the operator has so many."""

_KEYS = 24
"""Keys of an attention; no power of two, so that a weight of 1/24 is rounded."""

_BINADES = 6
"""Magnitudes lie between 2^-6 and 2^7: in one block of eight bits the small ones vanish."""

_LARGE = 1 << 24
"""Multiplications from which products are cut into tiles and shared; see `harness.oracle.matrix`."""

_MOST_ROWS = 1024
_MOST_ELEMENTS = 1 << 21
"""Limits of the inputs with which small weights are made to such products."""

_SATURATED = 64.0
"""From here on sigmoid is 1 in float64, and silu the identity."""


@dataclass(frozen=True, slots=True)
class Site:
    """A node as it stands in the plan.

    Attributes:
        step: of the plan, with the kernel that runs.
        constants: for each input what the kernel takes, where it is known; else None.
    """

    step: Step
    constants: tuple[Array | None, ...]

    @property
    def node(self) -> Node:
        """As the kernel saw it at planning."""
        return self.step.node

    def arguments(self, **given: Array) -> list[Any]:
        """Constants as they are, and the inputs `given` by position (`_0=x`)."""
        arguments: list[Any] = list(self.constants)
        for name, array in given.items():
            arguments[int(name[1:])] = array
        return arguments

    def is_fed(self, index: int) -> bool:
        """Whether an input is given, and not constant."""
        return self.node.has_input(index) and self.constants[index] is None


@dataclass(frozen=True, slots=True)
class Probe:
    """One call of a kernel, and its result.

    Attributes:
        arguments: of the kernel.
        expected: the sums, float64.
        magnitude: for each sum that of the absolute values of its terms.
        pick: takes from the kernel's first output what is expected; its shape may have axes of 1 more.
    """

    arguments: list[Any]
    expected: Array
    magnitude: Array
    pick: Callable[[Array], Array] = lambda y: y


@dataclass(frozen=True, slots=True)
class KnownSums:
    """What can be asked of a node.

    Attributes:
        kind: what nodes of the same code have in common, in words.
        size: elements of its weight, 0 without.
        terms: of a sum.
        probes: makes the calls; reads no weight before.
    """

    kind: str
    size: int
    terms: int
    probes: Callable[[np.random.Generator], Iterator[Probe]]


def known_sums(site: Site) -> KnownSums | None:
    """What can be asked of a node; None for operators and configurations without a known sum."""
    find = _FAMILIES.get((site.node.domain, site.node.op_type))
    return None if find is None else find(site)


def _spread(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Floats of full precision and either sign, log-uniform over the binades."""
    size = rng.uniform(1, 2, shape) * 2.0 ** rng.integers(-_BINADES, _BINADES + 1, shape)
    values: Array = (size * rng.choice((-1.0, 1.0), shape)).astype(dtype)
    return values


def _room(weight: Array, dtype: np.dtype[Any]) -> float:
    """A power of two by which values of `_spread` must be multiplied so that no sum overflows."""
    most = (
        float(np.max(np.abs(weight), initial=0.0)) / float(np.finfo(dtype).max) * _TERMS * 2.0**_BINADES * 4
    )
    return 2.0 ** -max(0, math.frexp(most)[1]) if math.isfinite(most) else 1.0


def _support(depth: int, block: int, rng: np.random.Generator) -> Array:
    """Which of `depth` features are not zero: half of them in one block, the others in the last one."""
    first = int(rng.integers(0, max(1, depth // block))) * block
    spans = [range(first, min(first + block, depth)), range((depth - 1) // block * block, depth)]
    chosen: set[int] = set()
    for span in spans:
        rest = sorted(set(span) - chosen)
        some = rng.choice(rest, min(len(rest), _TERMS // 2), replace=False) if rest else ()
        chosen.update(int(index) for index in some)
    return np.array(sorted(chosen))


@dataclass(frozen=True, slots=True)
class _Weight:
    """`scale x W^T + bias_scale bias` with a weight that is known.

    Attributes:
        rows: N.
        depth: K.
        dtype: of x.
        columns: for features j the float64 weights [.., len(j), N].
        block: neighbours that could share a scale.
        flat: whether x has just two axes.
        turned: whether x comes as [K, M].
        scale: see above.
        bias: position among the inputs; -1 without.
        bias_scale: see above.
    """

    rows: int
    depth: int
    dtype: np.dtype[Any]
    columns: Callable[[Array], Array]
    block: int = _TERMS
    flat: bool = False
    turned: bool = False
    scale: float = 1.0
    bias: int = -1
    bias_scale: float = 1.0

    def asked(self, kind: str, site: Site) -> KnownSums | None:
        """For one row, and for as many as make a large product where the weight is not too small."""
        bias = site.constants[self.bias] if self.bias >= 0 and site.node.has_input(self.bias) else None
        if bias is not None and bias.ndim > 1 and bias.shape[0] != 1:
            return None
        if not self.rows or not self.depth:
            return None
        size = self.rows * self.depth
        rows = min(max(8, -(-_LARGE // size)), _MOST_ROWS, max(8, _MOST_ELEMENTS // self.depth))

        def probes(rng: np.random.Generator) -> Iterator[Probe]:
            support = _support(self.depth, self.block, rng)
            weight = self.columns(support)
            room = _room(weight, self.dtype)
            for count in (1, rows):
                values = _spread(rng, (count, len(support)), self.dtype) * self.dtype.type(room)
                x = np.zeros((count, self.depth), self.dtype)
                x[:, support] = values
                exact = values.astype(np.float64)
                expected = self.scale * (exact @ weight)
                magnitude = abs(self.scale) * (np.abs(exact) @ np.abs(weight))
                arguments = site.arguments(_0=x.T if self.turned else x if self.flat else x[None])
                if bias is not None:
                    term = self.bias_scale * bias.astype(np.float64)
                    expected, magnitude = expected + term, magnitude + np.abs(term)
                elif self.bias >= 0 and site.node.has_input(self.bias):
                    arguments[self.bias] = np.zeros((1, 1), self.dtype)
                yield Probe(arguments, expected, magnitude)

        return KnownSums(kind, size, min(self.depth, _TERMS), probes)


def _matmul(site: Site) -> KnownSums | None:
    """MatMul and FusedMatMul."""
    node, weight = site.node, site.constants[1]
    if any(node.integer(f"transBatch{name}", 0) for name in "AB"):
        return None
    flips = [bool(node.integer(f"trans{name}", 0)) for name in "AB"]
    alpha = node.number("alpha", 1.0) if node.op_type == "FusedMatMul" else 1.0
    if weight is None or site.constants[0] is not None:
        return _free_product(site, alpha, flips)
    if not is_float(weight.dtype) or weight.ndim < 2:
        return None
    matrix = weight.swapaxes(-1, -2) if flips[1] else weight
    found = _Weight(
        rows=matrix.shape[-1],
        depth=matrix.shape[-2],
        dtype=node.precision.held(weight.dtype),
        columns=lambda support: matrix[..., support, :].astype(np.float64),
        flat=flips[0],
        turned=flips[0],
        scale=alpha,
    )
    return found.asked(f"{node.op_type}, {weight.dtype.name} weights", site)


def _free_product(site: Site, alpha: float, flips: list[bool]) -> KnownSums:
    """A product of two inputs."""
    dtype = site.node.precision.dtype

    def probes(rng: np.random.Generator) -> Iterator[Probe]:
        for count in (1, 8):
            a, b = _spread(rng, (2, count, _TERMS), dtype), _spread(rng, (2, _TERMS, 16), dtype)
            exact = [x.astype(np.float64) for x in (a, b)]
            expected = alpha * (exact[0] @ exact[1])
            magnitude = abs(alpha) * (np.abs(exact[0]) @ np.abs(exact[1]))
            turned = [x.swapaxes(-1, -2) if flip else x for x, flip in zip((a, b), flips, strict=True)]
            yield Probe(site.arguments(_0=turned[0], _1=turned[1]), expected, magnitude)

    return KnownSums(f"{site.node.op_type}, both operands computed", 0, _TERMS, probes)


def _gemm(site: Site) -> KnownSums | None:
    node, weight = site.node, site.constants[1]
    if weight is None or not is_float(weight.dtype):
        return None
    matrix = weight.T if node.integer("transB", 0) else weight
    found = _Weight(
        rows=matrix.shape[1],
        depth=matrix.shape[0],
        dtype=node.precision.held(weight.dtype),
        columns=lambda support: matrix[support].astype(np.float64),
        flat=True,
        turned=bool(node.integer("transA", 0)),
        scale=node.number("alpha", 1.0),
        bias=2,
        bias_scale=node.number("beta", 1.0),
    )
    return found.asked(f"Gemm, {weight.dtype.name} weights", site)


def _blockwise(site: Site) -> KnownSums | None:
    """MatMulNBits: feature j of a row is the code at its bits from j * bits on, lowest first."""
    node = site.node
    packed, scales = site.constants[1], site.constants[2]
    if packed is None or scales is None or site.is_fed(3) or site.is_fed(4):
        return None
    zeros, groups = (site.constants[i] if node.has_input(i) else None for i in (3, 4))
    bits, block, rows = node.integer("bits", 4), node.integer("block_size"), node.integer("N")

    def codes(array: Array, places: Array) -> Array:
        at = places * bits
        return (array.reshape(rows, -1)[:, at // 8] >> (at % 8).astype(np.uint8)) & np.uint8(2**bits - 1)

    def columns(support: Array) -> Array:
        group = support // block if groups is None else groups.reshape(-1)[support].astype(np.int64)
        if zeros is None:
            zero: Any = 2.0 ** (bits - 1)
        elif zeros.dtype == np.uint8:
            zero = codes(zeros, group).astype(np.float64)
        else:
            zero = zeros.reshape(rows, -1)[:, group].astype(np.float64)
        scale = scales.reshape(rows, -1)[:, group].astype(np.float64)
        weight: Array = ((codes(packed, support).astype(np.float64) - zero) * scale).T
        return weight

    level = node.integer("accuracy_level", 0)
    points = "no" if zeros is None else "packed" if zeros.dtype == np.uint8 else "float"
    kind = f"MatMulNBits, {bits} bits in blocks of {block}, {points} zero points, accuracy_level {level}"
    found = _Weight(
        rows=rows,
        depth=node.integer("K"),
        dtype=node.precision.dtype,
        columns=columns,
        block=block,
        bias=5,
    )
    return found.asked(kind, site)


def _conv(site: Site) -> KnownSums | None:
    """Conv along one axis."""
    node, weight = site.node, site.constants[1]
    if weight is None or weight.ndim != 3 or node.text("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    groups, (outputs, depth, taps) = node.integer("group", 1), weight.shape
    gap, stride = (node.integers("dilations") or [1])[0], (node.integers("strides") or [1])[0]
    pads = node.integers("pads") or [0, 0]
    extent = (taps - 1) * gap + 1
    used = max(1, min(depth, _TERMS // taps))

    def probes(rng: np.random.Generator) -> Iterator[Probe]:
        x = np.zeros((1, groups * depth, extent + 3 * stride), node.precision.dtype)
        by_group = x.reshape(groups, depth, -1)
        by_group[:, :used] = _spread(rng, (groups, used, x.shape[-1]), x.dtype)
        padded = np.pad(by_group.astype(np.float64), [(0, 0), (0, 0), (pads[0], pads[1])])
        positions = np.arange(0, padded.shape[-1] - extent + 1, stride)
        w = weight.astype(np.float64).reshape(groups, -1, depth, taps)
        windows = padded[:, :, positions[:, None] + np.arange(taps) * gap]  # [G, C/G, positions, taps]
        expected = np.einsum("gmct,gcpt->gmp", w, windows)
        magnitude = np.einsum("gmct,gcpt->gmp", np.abs(w), np.abs(windows))
        arguments = site.arguments(_0=x)
        shape = (outputs, -1)
        expected, magnitude = expected.reshape(shape), magnitude.reshape(shape)
        if (bias := site.constants[2] if node.has_input(2) else None) is not None:
            term = bias.astype(np.float64).reshape(-1, 1)
            expected, magnitude = expected + term, magnitude + np.abs(term)
        elif node.has_input(2):
            arguments[2] = np.zeros(outputs, x.dtype)
        yield Probe(arguments, expected, magnitude, lambda y: y[0])

    return KnownSums(f"Conv, {taps} taps, {depth} channels a group", weight.size, used * taps, probes)


def _causal_conv(site: Site) -> KnownSums | None:
    """CausalConvWithState, with sums so large that silu leaves them as they are."""
    node, weight = site.node, site.constants[1]
    if weight is None or weight.ndim != 3 or site.is_fed(2) or node.integer("channels_last", 0):
        return None
    if node.integer("state_window", 0) or node.integer("dilation", 1) != 1:
        return None
    channels, _, taps = weight.shape

    def probes(rng: np.random.Generator) -> Iterator[Probe]:
        w = weight.astype(np.float64)[:, 0]
        rows = np.abs(_spread(rng, (channels, taps + 2), node.precision.dtype)) * 2**12
        # In the middle position all terms are positive, whatever the signs of the weights.
        rows[:, 1 : taps + 1] *= np.where(w < 0, -1, 1)
        past, x = rows[None, :, : taps - 1], rows[None, :, taps - 1 :]
        exact = rows[:, 1 : taps + 1].astype(np.float64)
        expected, magnitude = (w * exact).sum(axis=1), np.abs(w * exact).sum(axis=1)
        if (bias := site.constants[2] if node.has_input(2) else None) is not None:
            expected, magnitude = expected + bias, magnitude + np.abs(bias.astype(np.float64))
        loud = expected > _SATURATED
        arguments = site.arguments(_0=x)
        if node.has_input(3):
            arguments[3] = past
            at = 1
        else:
            arguments[0], at = rows[None], taps
        yield Probe(arguments, expected[loud], magnitude[loud], lambda y: y[0, loud, at])

    return KnownSums(f"CausalConvWithState, {taps} taps", weight.size, taps, probes)


def _linear_attention(site: Site) -> KnownSums | None:
    """Keys that are unit vectors, no decay, beta 1: the last query's output is scale sum of q_t v_t."""
    node = site.node
    if node.integer("state_window", 0) or any(x is not None for x in site.constants):
        return None
    queries, heads = node.integer("q_num_heads"), node.integer("kv_num_heads")
    given_scale, most = node.number("scale", 0.0), max(queries, heads)

    def probes(rng: np.random.Generator) -> Iterator[Probe]:
        dtype, count, width = node.precision.dtype, _TERMS, 16
        keys = np.repeat(np.eye(count, dtype=dtype)[:, None], heads, axis=1)  # [T, N, D], D = T
        query, value = (
            _spread(rng, (count, queries, count), dtype),
            _spread(rng, (count, heads, width), dtype),
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

    return KnownSums(f"LinearAttention, rule {node.text('update_rule', 'gated_delta')}", 0, _TERMS, probes)


def _attention(site: Site) -> KnownSums | None:
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
        value = _spread(rng, (1, kv_heads, _KEYS, width), dtype)
        rows = [np.zeros((1, n, _KEYS, width), dtype) for n in (heads, kv_heads)] + [value]
        if merged:
            rows = [x.swapaxes(1, 2).reshape(1, _KEYS, -1) for x in rows]
        arguments = site.arguments(_0=rows[0], _1=rows[1], _2=rows[2])
        if node.has_input(3):
            arguments[3] = np.zeros((_KEYS, _KEYS), dtype)
        for index in (4, 5):
            if node.has_input(index):
                arguments[index] = np.zeros((1, kv_heads, 0, width), dtype)
        if node.has_input(6):
            arguments[6] = np.array([_KEYS])
        yield _mean(arguments, value, heads, seen, lambda y: y[0, -1] if merged else y[0, :, -1])

    return KnownSums("Attention, weights by values", 0, seen, probes)


def _group_query(site: Site) -> KnownSums | None:
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
        value = _spread(rng, (1, kv_heads, _KEYS, width), dtype)
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


_Find: TypeAlias = Callable[[Site], KnownSums | None]

_FAMILIES: Mapping[tuple[str, str], _Find] = {
    ("", "MatMul"): _matmul,
    (CONTRIB, "FusedMatMul"): _matmul,
    ("", "Gemm"): _gemm,
    (CONTRIB, "MatMulNBits"): _blockwise,
    ("", "Conv"): _conv,
    ("", "CausalConvWithState"): _causal_conv,
    (CONTRIB, "CausalConvWithState"): _causal_conv,
    ("", "LinearAttention"): _linear_attention,
    (CONTRIB, "LinearAttention"): _linear_attention,
    ("", "Attention"): _attention,
    (CONTRIB, "GroupQueryAttention"): _group_query,
}

SUMMING = frozenset(_FAMILIES) | {
    ("", "Einsum"),
    (CONTRIB, "Attention"),
    (CONTRIB, "GatedDeltaNet"),
    (CONTRIB, "MoE"),
    (CONTRIB, "MultiHeadAttention"),
    (CONTRIB, "QMoE"),
}
"""Operators that sum products; those of them without a known sum are listed as not probed."""
