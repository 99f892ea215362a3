"""Known sums of products: with a weight of any kind, and of two inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.oracle.dequantised import Dequantised
from harness.oracle.matrix import WAYS, is_deep
from harness.oracle.precision import Array, is_float
from harness.oracle.sums.probe import BINADES, TERMS, KnownSums, Probe, Site, loud, spread
from harness.oracle.weights import Packed

__all__ = ["blockwise", "gemm", "matmul"]

_LARGE = 1 << 24
"""Multiplications from which products are cut into tiles and shared; see `harness.oracle.matrix`."""

_MOST_ROWS = 1024
_MOST_ELEMENTS = 1 << 21
"""Limits of the inputs with which small weights are made to such products."""

_MANY = 128
"""Most tokens of the product that stands for many."""

_SLICE, _SLICE_ROWS = 1 << 16, 64
"""Elements of the slice of a weight that is multiplied by all numbers of tokens; its fewest rows."""

_BLOCKS = 8
"""Blocks of a token's features in which some are not zero: at most so many."""


def _room(magnitudes: Array, dtype: np.dtype[Any]) -> float:
    """A power of two by which values of `spread` must be multiplied so that no sum with these overflows."""
    most = float(np.max(magnitudes, initial=0.0)) / float(np.finfo(dtype).max) * TERMS * 2.0**BINADES * 4
    return 2.0 ** -max(0, math.frexp(most)[1]) if math.isfinite(most) else 1.0


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Makes tokens of `depth` features, of which at most `TERMS` are not zero: a few in each of some blocks.

    In each block one value is of the largest magnitude, so that whatever is lost in it shows in the sum.

    Attributes:
        depth: K.
        block: neighbours that could share a scale.
        dtype: of the tokens.
        rng: what is drawn from.
    """

    depth: int
    block: int
    dtype: np.dtype[Any]
    rng: np.random.Generator

    def alike(self, count: int) -> Array:
        """[count, K], all in the same features: of the first block, the last one, and others drawn."""
        last = (self.depth - 1) // self.block
        inner = self.rng.permutation(np.arange(1, last))[: _BLOCKS - 2]
        return self._with(np.unique([0, *inner, last])[None], count)

    def drawn(self, count: int) -> Array:
        """[count, K], each in other blocks: one behind the other they take turns at all blocks there are."""
        blocks = -(-self.depth // self.block)
        each = min(_BLOCKS, blocks)
        rounds = -(-count * each // blocks)
        order = self.rng.permuted(np.tile(np.arange(blocks), (rounds, 1)), axis=1)
        return self._with(order.reshape(-1)[: count * each].reshape(count, each), count)

    def _with(self, blocks: Array, count: int) -> Array:
        """Tokens with values in `blocks`, [1 or count, n]."""
        size = min(self.block, self.depth)
        each = TERMS // blocks.shape[1]
        first = np.minimum(blocks * self.block, self.depth - size)[..., None]
        offset = self.rng.integers(size, size=(*blocks.shape, 1))
        places = first + (offset + np.arange(each) * max(1, size // each)) % size
        values = spread(self.rng, (count, *places.shape[1:]), self.dtype)
        values[..., 0] = loud(values[..., 0])
        tokens = np.zeros((count, self.depth), self.dtype)
        # The last block may reach into the one before it: then one of two values stays.
        tokens[np.arange(count)[:, None], places.reshape(len(places), -1)] = values.reshape(count, -1)
        return tokens


@dataclass(frozen=True, slots=True)
class _Weight:
    """`scale x W^T + bias_scale bias` with a weight that is known.

    Attributes:
        rows: N.
        depth: K.
        dtype: of x.
        columns: for features j and some rows their weights [.., len(j), rows], float64.
        block: neighbours that could share a scale.
        flat: whether x has just two axes.
        turned: whether x comes as [K, M].
        stacked: whether there are several matrices, so that all of their rows are multiplied at once.
        scale: see above.
        bias: position among the inputs; -1 without.
        bias_scale: see above.
    """

    rows: int
    depth: int
    dtype: np.dtype[Any]
    columns: Callable[[Array, slice], Array]
    block: int = TERMS
    flat: bool = False
    turned: bool = False
    stacked: bool = False
    scale: float = 1.0
    bias: int = -1
    bias_scale: float = 1.0

    def asked(self, kind: str, site: Site) -> KnownSums | None:
        """All rows, for one token and for as many as make a large product; some of them in all ways.

        Products go other ways for other numbers of tokens (`harness.oracle.matrix.WAYS`): each is asked, for
        a number that is drawn. Those of deep weights are of a kind of their own.
        """
        bias = site.constants[self.bias] if self.bias >= 0 and site.node.has_input(self.bias) else None
        if bias is not None and bias.ndim > 1 and bias.shape[0] != 1:
            return None
        if not self.rows or not self.depth:
            return None
        size = self.rows * self.depth
        many = min(max(8, -(-_LARGE // size)), _MOST_ROWS, max(8, _MOST_ELEMENTS // self.depth))

        def probes(rng: np.random.Generator) -> Iterator[Probe]:
            tokens = _Tokens(self.depth, self.block, self.dtype, rng)
            yield from self._parts(site, tokens.alike(1 + many), [1, many], slice(0, self.rows), rng)
            if not self.stacked:
                few = min(self.rows, max(_SLICE_ROWS, _SLICE // self.depth))
                first = int(rng.integers(self.rows - few + 1))
                counts = _counts(rng)
                x = tokens.drawn(sum(counts))
                yield from self._parts(site, x, counts, slice(first, first + few), rng)

        deep = ", long sums" if is_deep(self.depth) else ""
        return KnownSums(f"{kind}{deep}", size, min(self.depth, TERMS), probes)

    def _parts(
        self, site: Site, tokens: Array, counts: Sequence[int], rows: slice, rng: np.random.Generator
    ) -> Iterator[Probe]:
        """Some rows of the products with so many of the tokens [.., K] in turn."""
        support = np.flatnonzero(tokens.any(axis=0))
        weight = self.columns(support, rows)
        magnitudes = np.abs(weight)
        tokens *= self.dtype.type(_room(magnitudes, self.dtype))
        for x in np.split(tokens, np.cumsum(counts)[:-1]):
            exact = x[:, support].astype(np.float64)
            expected = self.scale * (exact @ weight)
            magnitude = abs(self.scale) * (np.abs(exact) @ magnitudes)
            arguments = site.arguments(x.T if self.turned else x if self.flat else x[None])
            if self.bias >= 0 and site.node.has_input(self.bias):
                bias = site.constants[self.bias]
                if bias is None:
                    bias = arguments[self.bias] = spread(rng, (self.rows,), self.dtype)
                term = self.bias_scale * np.broadcast_to(bias.reshape(-1), self.rows)[rows].astype(np.float64)
                expected, magnitude = expected + term, magnitude + np.abs(term)
            yield Probe(arguments, expected, magnitude, rows=rows)


def _counts(rng: np.random.Generator) -> list[int]:
    """Numbers of tokens, one for each way that products go."""
    return [int(rng.integers(*bounds)) for bounds in itertools.pairwise((*WAYS, _MANY + 1))]


def matmul(site: Site) -> KnownSums | None:
    """MatMul and FusedMatMul."""
    node, weight = site.node, site.constants[1]
    if any(node.integer(f"transBatch{name}", 0) for name in "AB"):
        return None
    flips = [bool(node.integer(f"trans{name}", 0)) for name in "AB"]
    alpha = node.number("alpha", 1.0) if node.op_type == "FusedMatMul" else 1.0
    if 1 in node.streamed:
        return _coded(node.streamed[1]).asked(f"MatMul, {_kind(site)}", site)
    if weight is None or site.constants[0] is not None:
        return _free_product(site, alpha, flips)
    if not is_float(weight.dtype) or weight.ndim < 2:
        return None
    matrix = weight.swapaxes(-1, -2) if flips[1] else weight
    found = _Weight(
        rows=matrix.shape[-1],
        depth=matrix.shape[-2],
        dtype=node.precision.held(weight.dtype),
        columns=lambda support, rows: matrix[..., rows][..., support, :].astype(np.float64),
        flat=flips[0],
        turned=flips[0],
        stacked=matrix.ndim > 2,
        scale=alpha,
    )
    return found.asked(f"{node.op_type}, {weight.dtype.name} weights", site)


def _kind(site: Site) -> str:
    return f"{site.node.streamed[1].codes.dtype.name} weights through DequantizeLinear"


def _coded(weight: Dequantised, *, flipped: bool = False) -> _Weight:
    """A weight B [K, N] of codes ([N, K] if `flipped`), worked out from the bytes element by element."""
    in_rows = weight.turned == flipped  # whether features j are rows of the file
    rows, columns = weight.codes.shape

    def take(support: Array, wanted: slice) -> Array:
        those = np.arange(wanted.start, wanted.stop)
        places = (support[:, None], those) if in_rows else (those[:, None], support)
        zero, scale = at(weight.zero, places, 0.0), at(weight.scale, places, 1.0)
        values: Array = (_decoded(weight.codes, *places) - zero) * scale
        return values if in_rows else values.T

    def at(values: Array | None, places: tuple[Array, Array], absent: float) -> Any:
        if values is None or values.size == 1:
            return absent if values is None else float(values.reshape(()))
        if not weight.block:
            return values[places[weight.axis]].astype(np.float64)
        groups = [
            place // weight.block if axis == weight.axis else place for axis, place in enumerate(places)
        ]
        return values[tuple(groups)].astype(np.float64)

    along_sum = weight.block and in_rows == (weight.axis == 0)
    return _Weight(
        rows=columns if in_rows else rows,
        depth=rows if in_rows else columns,
        dtype=weight.dtype,
        columns=take,
        block=weight.block if along_sum else TERMS,
    )


def _decoded(codes: Packed | Array, rows: Array, columns: Array) -> Array:
    """Elements of a matrix in float64; those of a few bits by their place among the bits of the file."""
    if not isinstance(codes, Packed):
        found: Array = codes[rows, columns]
        return found.astype(np.float64)
    place = (rows * codes.shape[1] + columns) * codes.bits
    code: Array = (codes.data[place // 8] >> (place % 8).astype(np.uint8)) & np.uint8(2**codes.bits - 1)
    if not is_float(codes.dtype):
        half = 2 ** (codes.bits - 1) if codes.dtype.name.startswith("int") else 0
        exact: Array = (code.astype(np.int64) ^ half).astype(np.float64) - half
        return exact
    return code.view(codes.dtype).astype(np.float64)


def _free_product(site: Site, alpha: float, flips: list[bool]) -> KnownSums:
    """A product of two inputs."""
    dtype = site.node.precision.dtype

    def probes(rng: np.random.Generator) -> Iterator[Probe]:
        depth, width = 3 * TERMS + 1, 16
        tokens = _Tokens(depth, TERMS, dtype, rng)
        for count in _counts(rng):
            a = tokens.drawn(2 * count).reshape(2, count, depth)
            b = spread(rng, (2, depth, width), dtype)
            exact = [x.astype(np.float64) for x in (a, b)]
            expected = alpha * (exact[0] @ exact[1])
            magnitude = abs(alpha) * (np.abs(exact[0]) @ np.abs(exact[1]))
            turned = [x.swapaxes(-1, -2) if flip else x for x, flip in zip((a, b), flips, strict=True)]
            yield Probe(site.arguments(turned[0], turned[1]), expected, magnitude)

    return KnownSums(f"{site.node.op_type}, both operands computed", 0, TERMS, probes)


def gemm(site: Site) -> KnownSums | None:
    """Gemm with a constant weight."""
    node, weight = site.node, site.constants[1]
    if 1 in node.streamed:
        found = replace(
            _coded(node.streamed[1], flipped=bool(node.integer("transB", 0))),
            flat=True,
            turned=bool(node.integer("transA", 0)),
            scale=node.number("alpha", 1.0),
            bias=2,
            bias_scale=node.number("beta", 1.0),
        )
        return found.asked(f"Gemm, {_kind(site)}", site)
    if weight is None or not is_float(weight.dtype):
        return None
    matrix = weight.T if node.integer("transB", 0) else weight
    found = _Weight(
        rows=matrix.shape[1],
        depth=matrix.shape[0],
        dtype=node.precision.held(weight.dtype),
        columns=lambda support, rows: matrix[:, rows][support].astype(np.float64),
        flat=True,
        turned=bool(node.integer("transA", 0)),
        scale=node.number("alpha", 1.0),
        bias=2,
        bias_scale=node.number("beta", 1.0),
    )
    return found.asked(f"Gemm, {weight.dtype.name} weights", site)


def blockwise(site: Site) -> KnownSums | None:
    """MatMulNBits: feature j of a row is the code at its bits from j * bits on, lowest first."""
    node = site.node
    packed, scales = site.constants[1], site.constants[2]
    if packed is None or scales is None or site.is_fed(3) or site.is_fed(4):
        return None
    zeros, groups = (site.constants[i] if node.has_input(i) else None for i in (3, 4))
    bits, block, rows = node.integer("bits", 4), node.integer("block_size"), node.integer("N")

    def codes(array: Array, places: Array, wanted: slice) -> Array:
        at = places * bits
        held = array.reshape(rows, -1)[wanted, at // 8]
        return (held >> (at % 8).astype(np.uint8)) & np.uint8(2**bits - 1)

    def columns(support: Array, wanted: slice) -> Array:
        group = support // block if groups is None else groups.reshape(-1)[support].astype(np.int64)
        if zeros is None:
            zero: Any = 2.0 ** (bits - 1)
        elif zeros.dtype == np.uint8:
            zero = codes(zeros, group, wanted).astype(np.float64)
        else:
            zero = zeros.reshape(rows, -1)[wanted, group].astype(np.float64)
        scale = scales.reshape(rows, -1)[wanted, group].astype(np.float64)
        weight: Array = ((codes(packed, support, wanted).astype(np.float64) - zero) * scale).T
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
