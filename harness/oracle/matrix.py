"""Weights as matrices that products read tile by tile, and the products themselves.

A weight W [N, K] takes part in x W^T, whatever its file looks like: in the oracle's precision, narrower, or
in a few bits. What must be widened or unpacked is made anew at each use, a tile at a time, unless the model's
weights fit into the limit of what may stay (`Residency`).

Tiles are multiplied as `W_tile @ xT` with xT [K, M] contiguous, which OpenBLAS does about half as fast again
as `x @ W_tile.T` for the few tokens M of a prompt. For many it does both alike, and the second needs no
turning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from harness.oracle.node import Residency, Tensor
from harness.oracle.workers import Claims, share

__all__ = [
    "WAYS",
    "Deferred",
    "DenseMatrix",
    "Matrix",
    "Projection",
    "ResidentMatrix",
    "is_deep",
    "multiply_in_chunks",
    "multiply_tile",
    "narrow_tile_rows",
    "product",
    "tile_scratch",
    "together",
]

_SHARED_FROM = 1 << 23
"""Multiplications from which a product is worth a helper: some tenths of a millisecond of one processor."""

_WORTH_TWO_TILES = 26
"""Binary logarithm of the multiplications for which two more tiles are made: mostly there are two workers."""

_FEW = 8
"""Tokens up to which a weight that is columns of the file is faster as `x @ B`."""

_MANY = 96
"""Tokens from which turning the product costs more than BLAS gains by it."""

_LANES = 8
"""Columns that BLAS multiplies at a time: most of its kernels take longer for 21 tokens than for 24."""

_FEWEST_PADDED = 5
"""Tokens from which it does: below, each column is a product with a vector."""

_SMALL = 100**3
"""Multiplications up to which OpenBLAS reads both factors where they lie. For more it first rearranges them,
which takes a third of the time where there are few tokens. Source: its `gemm_small_kernel_permit`, SkylakeX.
"""

_FEW_FOR_SMALL = 48
"""Tokens up to which products of that size are faster than one large one."""

WAYS = (1, 2, _FEWEST_PADDED, _FEW + 1, _FEW_FOR_SMALL + 1, _MANY)
"""Tokens from which a product goes another way than for fewer; what proves products asks each of them."""

_SMALL_DEPTH = 640
"""Most terms of a sum in such a product: so it has rows enough for its registers."""

_SMALL_ROWS = 16
"""Its rows are a multiple of this: what registers hold of a column."""

_MOST_COLUMNS = 2048
"""Most rows of a tile where those are columns of the file: two pages of each of its rows."""

_NARROW_DEPTH, _NARROW_ROWS = 256, 1024
"""Most extents of the tile, a megabyte, in which a narrow weight is widened."""

_FILL_ROWS = 256
"""Rows of a weight that are widened or unpacked together to be kept."""


class Matrix(Protocol):
    """A weight [rows, depth] in tiles of rows.

    Attributes:
        rows: N, the features that come out.
        depth: K, the features that go in.
        dtype: what products are computed in.
        ready: whether its elements lie in memory, or in a mapped file, just as BLAS takes them.
    """

    @property
    def rows(self) -> int: ...  # noqa: D102 (described above)
    @property
    def depth(self) -> int: ...  # noqa: D102
    @property
    def dtype(self) -> np.dtype[Any]: ...  # noqa: D102
    @property
    def ready(self) -> bool: ...  # noqa: D102

    def tile_rows(self, tokens: int) -> int:
        """How many rows to multiply at once by `tokens` tokens."""

    def arranged(self, tokens: Tensor) -> Tensor:
        """Tokens [M, depth] as contiguous columns [any, M] in the order in which tiles are summed over."""

    def scratch(self, rows: int, tokens: int) -> Any:
        """What a worker needs for tiles of `rows` rows; handed back to `multiply`."""

    def multiply(self, start: int, stop: int, columns: Tensor, out: Tensor, scratch: Any) -> None:
        """Write rows `start` to `stop` of the product, [stop - start, M], to `out`."""

    def fill(self, start: int, stop: int, out: Tensor) -> None:
        """Write rows `start` to `stop` of the weight itself, [stop - start, depth], to `out`."""


def product(matrix: Matrix, tokens: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    """`tokens @ weight[start:stop].T` for tokens [M, K]: [M, stop - start], contiguous.

    How it is cut into tiles does not depend on how many workers share them, and so neither does any bit.
    """
    stop = matrix.rows if stop is None else stop
    if isinstance(matrix, DenseMatrix) and matrix.ready:
        return _float_products([matrix.array[start:stop]], tokens)[0]
    columns = matrix.arranged(_padded(tokens))
    count = columns.shape[1]
    y = np.empty((stop - start, count), dtype=matrix.dtype)
    rows = matrix.tile_rows(count)

    def work(claims: Claims) -> None:
        scratch = matrix.scratch(rows, count)
        for job in claims:
            first = start + job * rows
            last = min(first + rows, stop)
            matrix.multiply(first, last, columns, y[first - start : last - start], scratch)

    _share(-(-(stop - start) // rows), work, (stop - start) * matrix.depth * count)
    return np.ascontiguousarray(y[:, : len(tokens)].T)


def _padded(tokens: Tensor) -> Tensor:
    """Tokens and as many of zeros as make them a multiple of `_LANES`; few tokens stay as they are."""
    count = len(tokens)
    missing = -count % _LANES if count >= _FEWEST_PADDED else 0
    return np.pad(tokens, ((0, missing), (0, 0))) if missing else tokens


def products(matrices: Sequence[Matrix], tokens: Tensor) -> list[Tensor]:
    """`product` of each of them with the same tokens; small ones then share the way to the workers."""
    floats = [matrix.array for matrix in matrices if isinstance(matrix, DenseMatrix) and matrix.ready]
    if len(floats) == len(matrices):
        return _float_products(floats, tokens)
    return [product(matrix, tokens) for matrix in matrices]


class _FloatProduct:
    """`tokens @ weight.T` for a weight [N, K] that BLAS takes as it lies, in tiles.

    Attributes:
        jobs: how many tiles, of about `tile` multiplications each.
        y: [M, N], when all jobs are done.
    """

    def __init__(self, weight: Tensor, tokens: Tensor, columns: Tensor, tile: int) -> None:
        (rows, depth), count = weight.shape, len(tokens)
        self._weight, self._tokens, self._columns = weight, tokens, columns
        in_columns = weight.strides[0] < weight.strides[1]
        self._turned = 1 < count < _MANY and not (count <= _FEW and in_columns)
        self.y = np.empty((count, rows), dtype=weight.dtype)
        self._size = _in_tiles(rows, max(1, -(-rows * depth * count // tile)), 32)
        if in_columns:
            wide = -(-rows // _MOST_COLUMNS)
            self._size = max(self._size, _in_tiles(rows, wide + wide % 2, 32))
        self.jobs = -(-rows // self._size)

    def do(self, job: int) -> None:
        """Multiply a tile."""
        tile = slice(job * self._size, (job + 1) * self._size)
        if self._turned:
            rows = self._weight[tile]
            out = np.empty((len(rows), self._columns.shape[1]), rows.dtype)
            multiply_tile(rows, self._columns, out)
            self.y[:, tile] = out.T
        else:
            np.matmul(self._tokens, self._weight[tile].T, out=self.y[:, tile])


def _float_products(weights: Sequence[Tensor], tokens: Tensor) -> list[Tensor]:
    tokens = np.ascontiguousarray(tokens)
    columns = np.ascontiguousarray(tokens.T) if 1 < len(tokens) < _MANY else tokens
    multiplications = len(tokens) * sum(weight.size for weight in weights)
    # Two tiles, or four, ...: mostly there are two workers.
    tile = max(_SHARED_FROM, multiplications) // (2 * max(1, multiplications >> _WORTH_TWO_TILES))
    parts = [_FloatProduct(weight, tokens, columns, tile) for weight in weights]
    tiles = [(part, job) for part in parts for job in range(part.jobs)]

    def work(claims: Claims) -> None:
        for claim in claims:
            part, job = tiles[claim]
            part.do(job)

    _share(len(tiles), work, multiplications)
    return [part.y for part in parts]


def _share(jobs: int, work: Callable[[Claims], None], multiplications: int) -> None:
    """Do `jobs` jobs, with helpers where there is enough to do."""
    if multiplications >= _SHARED_FROM:
        share(jobs, work)
    else:
        work(Claims(jobs))


class DenseMatrix:
    """A weight of floats as it lies in the file: rows or, as `MatMul` has them, columns contiguous."""

    def __init__(self, array: Tensor, dtype: np.dtype[Any]) -> None:
        self.array = array
        self.rows: int = array.shape[0]
        self.depth: int = array.shape[1]
        self.dtype = dtype
        # BLAS takes no floats that start between words, as in the middle of an ONNX file: numpy would copy
        # the whole weight at each use.
        self.ready = array.dtype == dtype and array.flags.aligned

    def tile_rows(self, tokens: int) -> int:
        """Of those that must be widened."""
        return narrow_tile_rows(self.rows)

    def arranged(self, tokens: Tensor) -> Tensor:
        """In order."""
        return np.ascontiguousarray(tokens.T)

    def scratch(self, rows: int, tokens: int) -> Any:
        """Where a tile is widened, and a part of the sum."""
        in_columns = self.array.strides[0] < self.array.strides[1]
        return tile_scratch(rows, self.depth, tokens, self.dtype, in_columns=in_columns)

    def multiply(self, start: int, stop: int, columns: Tensor, out: Tensor, scratch: Any) -> None:
        """Chunk by chunk along the sum, each widened; what need not be, `product` multiplies by itself."""

        def make(first: int, last: int, tile: Tensor) -> None:
            widen_into(self.array[start:stop, first:last], tile)

        multiply_in_chunks(make, self.depth, columns, out, scratch)

    def fill(self, start: int, stop: int, out: Tensor) -> None:
        """Widened."""
        widen_into(self.array[start:stop], out)


def narrow_tile_rows(rows: int) -> int:
    """Rows of the tiles in which a weight of `rows` rows is widened."""
    return min(_NARROW_ROWS, _in_tiles(rows, 4))


def tile_scratch(
    rows: int, depth: int, tokens: int, dtype: np.dtype[Any], *, in_columns: bool
) -> tuple[Tensor, Tensor]:
    """Where a tile of `rows` rows is widened, and a part of its sum, for `multiply_in_chunks`.

    The tile's columns are contiguous where they are in the file, that is, `in_columns`.
    """
    order: Any = "F" if in_columns else "C"
    return np.empty((rows, min(depth, _NARROW_DEPTH)), dtype, order), np.empty((rows, tokens), dtype)


def multiply_in_chunks(
    make: Callable[[int, int, Tensor], None],
    depth: int,
    columns: Tensor,
    out: Tensor,
    scratch: tuple[Tensor, Tensor],
) -> None:
    """Write the product of a tile with `columns` [depth, M] to `out`, chunk by chunk along the sum.

    `make(first, last, tile)` writes the columns `first` to `last` of the tile.
    """
    wide, part = scratch
    count = len(out)
    for first in range(0, depth, _NARROW_DEPTH):
        last = min(first + _NARROW_DEPTH, depth)
        tile = wide[:count, : last - first]
        make(first, last, tile)
        if first == 0:
            multiply_tile(tile, columns[first:last], out)
        else:
            multiply_tile(tile, columns[first:last], part[:count])
            out += part[:count]


def multiply_tile(tile: Tensor, columns: Tensor, out: Tensor) -> None:
    """Write `tile @ columns` for a tile [n, K] and columns [K, M] to `out` [n, M], contiguous.

    For few tokens in many small products, which are one call: they hold no lock of the interpreter.
    """
    (rows, depth), count = tile.shape, columns.shape[1]
    parts = _small_parts(depth)
    group = min(rows, _SMALL // (depth // parts * count) // _SMALL_ROWS * _SMALL_ROWS)
    whole = rows // group * group if 1 < count <= _FEW_FOR_SMALL and group else 0
    if whole:
        shape = (whole // group, group, count)
        if parts == 1:
            np.matmul(tile[:whole].reshape(*shape[:2], depth), columns, out=out[:whole].reshape(shape))
        else:
            pieces = tile[:whole].reshape(*shape[:2], parts, -1).swapaxes(1, 2)
            sums = np.matmul(pieces, columns.reshape(parts, -1, count))
            np.add.reduce(sums, axis=1, out=out[:whole].reshape(shape))
    if whole < rows:
        np.matmul(tile[whole:], columns, out=out[whole:])


def is_deep(depth: int) -> bool:
    """Whether a sum of `depth` terms goes another way than a shorter one; what proves products asks both."""
    return depth > _SMALL_DEPTH


@functools.cache
def _small_parts(depth: int) -> int:
    """Into how many parts of one length a sum of `depth` terms is cut for small products."""
    fewest = -(-depth // _SMALL_DEPTH)
    return next((parts for parts in range(fewest, 2 * fewest + 1) if depth % parts == 0), 1)


def _in_tiles(rows: int, count: int, unit: int = 64) -> int:
    """Rows of a tile where there are about `count` of them, a multiple of `unit`."""
    return max(unit, -(-rows // (unit * count)) * unit)


def widen_into(narrow: Tensor, out: Tensor) -> None:
    """Copy `narrow` to the wider `out`, exactly. Half precision goes by its bits, as numpy takes ages.

    A half is s eeeee mmmmmmmmmm; moved to the places of a float32 its exponent is 112 too small, also where
    it is subnormal. Only infinities and NaN, whose exponent is 31, need numpy.
    """
    if narrow.dtype != np.float16 or narrow.size < 256:
        np.copyto(out, narrow)
        return
    bits = narrow.view(np.int16)
    if np.max(bits & 0x7FFF) >= 0x7C00:
        np.copyto(out, narrow)
        return
    spread = bits.astype(np.int32)
    np.left_shift(spread, 13, out=spread)
    # Three copies of the sign stand where the exponent of a half does not reach.
    np.bitwise_and(spread, np.int32(~0x70000000), out=spread)
    np.multiply(spread.view(np.float32), np.float32(2.0**112), out=out)


class ResidentMatrix:
    """A weight that is widened or unpacked once, at its first use, if the model's weights fit in memory."""

    def __init__(self, matrix: Matrix, residency: Residency) -> None:
        self._matrix = matrix
        if not matrix.ready:
            self._granted = residency.claim(matrix.rows * matrix.depth * matrix.dtype.itemsize)

    def now(self) -> Matrix:
        """The matrix to use: the kept copy, or the one that makes its tiles anew."""
        source = self._matrix
        if not source.ready and self._granted():
            whole = np.empty((source.rows, source.depth), dtype=source.dtype)

            def work(claims: Claims) -> None:
                for job in claims:
                    start, stop = job * _FILL_ROWS, min((job + 1) * _FILL_ROWS, source.rows)
                    source.fill(start, stop, whole[start:stop])

            share(-(-source.rows // _FILL_ROWS), work)
            self._matrix = DenseMatrix(whole, source.dtype)
        return self._matrix


@dataclass(frozen=True, slots=True)
class Deferred:
    """`scale x W^T + bias`, not computed yet: any part of it can be asked for.

    Attributes:
        x: [.., K].
        matrix: W [N, K].
        scale: a factor.
        bias: None, or broadcastable to [.., N].
    """

    x: Tensor
    matrix: Matrix
    scale: float = 1.0
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole: [.., N]."""
        return (*self.x.shape[:-1], self.matrix.rows)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the whole."""
        return self.matrix.dtype

    def columns(self, start: int, stop: int, positions: Sequence[int] | None = None) -> Tensor:
        """Columns `start` to `stop` at `positions` of all leading axes taken as one (all by default)."""
        tokens = self.x.reshape(-1, self.matrix.depth)
        if positions is not None:
            tokens = tokens[list(positions)]
        y = product(self.matrix, tokens, start, stop)
        if self.scale != 1:
            y *= self.scale
        if self.bias is None:
            return y
        if self.bias.ndim < 2:
            return y + (self.bias if self.bias.size == 1 else self.bias[start:stop])
        bias = np.broadcast_to(self.bias, self.shape)[:, start:stop]
        return y + (bias if positions is None else bias[list(positions)])

    def whole(self) -> Tensor:
        """All of it."""
        y = product(self.matrix, self.x.reshape(-1, self.matrix.depth)).reshape(self.shape)
        if self.scale != 1:
            y *= self.scale
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, slots=True)
class Projection:
    """A product with a weight, as what computes a node.

    Attributes:
        matrix: the weight; or, where the graph computes it, what makes it of the node's inputs.
        scale: a factor.
        turned: whether the first input comes as [K, M].
        bias: position of the bias among the inputs.
        bias_scale: a factor of the bias.
    """

    matrix: ResidentMatrix | Callable[..., Matrix]
    scale: float = 1.0
    turned: bool = False
    bias: int | None = None
    bias_scale: float = 1.0

    def later(self, *inputs: Any) -> Deferred:
        """The node's output, not computed yet."""
        matrix = self.matrix.now() if isinstance(self.matrix, ResidentMatrix) else self.matrix(*inputs)
        x = inputs[0].T if self.turned else inputs[0]
        if x.shape[-1] != matrix.depth:
            raise ValueError(f"{x.shape[-1]} features meet a weight of {matrix.depth}")
        bias = None
        if self.bias is not None and len(inputs) > self.bias and self.bias_scale != 0:
            bias = inputs[self.bias]
        if bias is not None:
            bias = bias.astype(matrix.dtype, copy=False)
            if self.bias_scale != 1:
                bias = (bias * self.bias_scale).astype(matrix.dtype, copy=False)
        return Deferred(x, matrix, self.scale, bias)

    def __call__(self, *inputs: Any) -> Tensor:
        """The node's output."""
        return self.later(*inputs).whole()

    def is_plain(self, inputs: Sequence[int], absent: int) -> bool:
        """Whether it is `x @ W.T` and nothing else for inputs in these slots."""
        biased = self.bias is not None and len(inputs) > self.bias and inputs[self.bias] != absent
        return isinstance(self.matrix, ResidentMatrix) and self.scale == 1 and not (self.turned or biased)


def together(projections: Sequence[Projection]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The outputs of plain projections of the same x, in order."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        matrices = [
            projection.matrix.now()
            for projection in projections
            if isinstance(projection.matrix, ResidentMatrix)
        ]
        for matrix in matrices:
            if x.shape[-1] != matrix.depth:
                raise ValueError(f"{x.shape[-1]} features meet a weight of {matrix.depth}")
        results = products(matrices, x.reshape(-1, x.shape[-1]))
        return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in results)

    return run
