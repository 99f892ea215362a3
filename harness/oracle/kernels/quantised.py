"""Weights of a few bits, unpacked by block as products go."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from harness.oracle.kernels.registry import CONTRIB, kernel
from harness.oracle.matrix import Projection, ResidentMatrix, multiply_tile
from harness.oracle.node import Compute, Node, Tensor, UnsupportedFeatureError
from harness.oracle.precision import Precision
from harness.oracle.workers import own_memory

__all__ = ["BlockwiseMatrix", "unpacked"]

_LINE = 64
"""Bytes of a line of the cache."""


@kernel("MatMulNBits", domain=CONTRIB, raw=(1, 2, 3, 4, 5))
def _matmul_n_bits(node: Node) -> Compute:
    """A W^T + bias with W[n, k] = (q[n, k] - zero[n, g(k)]) scale[n, g(k)] and g(k) = k div block.

    A [.., K]; q packed in B [N, blocks, block*bits/8] uint8, lowest bits first; scales [N, blocks]; zero
    points [N, blocks] as floats, or packed like B in uint8 [N, ceil(blocks*bits/8)], 2^(bits-1) when
    absent; g_idx [K] gives g instead; bias [N]. `accuracy_level` asks other engines for less than what is
    computed here. Source: com.microsoft version 1.
    """
    bits, block = node.integer("bits", 4), node.integer("block_size")
    rows, depth = node.integer("N"), node.integer("K")
    if bits not in (2, 4, 8):
        raise UnsupportedFeatureError(f"bits={bits}")
    if node.integer("weight_prepacked", 0):
        raise UnsupportedFeatureError("weight_prepacked")

    def matrix(
        _a: Any,
        packed: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        groups: Tensor | None = None,
        *_: Any,
    ) -> BlockwiseMatrix:
        blocks = -(-depth // block)
        return BlockwiseMatrix(
            packed=packed.reshape(rows, blocks, -1),
            scales=scales.reshape(rows, -1),
            zeros=None if zeros is None else zeros.reshape(rows, -1),
            groups=None if groups is None else groups.reshape(-1),
            depth=depth,
            bits=bits,
            precision=node.precision,
        )

    weights = [node.constant(index) for index in range(5)]
    fixed = all(weights[index] is not None for index in range(1, 5) if node.has_input(index))
    source: Any = matrix
    if fixed:
        # Weights of another size than N and K say fail when they are used, by the name of the node.
        with contextlib.suppress(ValueError):
            source = ResidentMatrix(matrix(*weights), node.residency)
    return Projection(source, bias=5)


@dataclass(frozen=True, slots=True)
class BlockwiseMatrix:
    """A weight [N, K] of packed codes, each block of which has a scale and a zero point.

    A byte holds 8/bits neighbours. Their sums may be in any order, so tiles are unpacked into planes, one
    for each place in a byte, and the tokens are put into the same order instead: no code is moved.

    Attributes:
        packed: [N, blocks, bytes] uint8.
        scales: [N, groups], in the dtype of the file.
        zeros: [N, groups] floats, or codes packed in uint8 [N, ceil(groups*bits/8)]; None for 2^(bits-1).
        groups: for each of the K its group; None where the groups are the blocks.
        depth: K; the last block may reach beyond it.
        bits: of a code: 2, 4 or 8.
        precision: what is computed in.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor | None
    depth: int
    bits: int
    precision: Precision

    @property
    def rows(self) -> int:
        """N."""
        return int(self.packed.shape[0])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of products."""
        return self.precision.dtype

    @property
    def ready(self) -> bool:
        """Never: there are only codes."""
        return False

    @property
    def _planes(self) -> int:
        return 8 // self.bits

    @property
    def _bytes(self) -> int:
        """Bytes of a row."""
        return int(self.packed.shape[1] * self.packed.shape[2])

    def tile_rows(self, tokens: int) -> int:
        """Few enough that a tile is multiplied while it is in the cache; more for many tokens.

        BLAS rearranges the tokens anew for each tile, which must not outweigh the product.
        """
        return 64 if tokens <= 64 else 128

    def arranged(self, tokens: Tensor) -> Tensor:
        """Columns in the order of the planes; zeros where the last block reaches beyond K."""
        planes, count = self._planes, len(tokens)
        columns = np.zeros((planes, self._bytes, count), dtype=self.dtype)
        for plane in range(planes):
            part = tokens[:, plane::planes]
            columns[plane, : part.shape[1]] = part.T
        return columns.reshape(-1, count)

    def scratch(self, rows: int, tokens: int) -> _Scratch:
        """Where the planes of a tile go."""
        rows, planes, size = min(rows, self.rows), self._planes, self._bytes
        blocks = self.packed.shape[1]
        shapes = ((rows, planes, size), (rows, *self.packed.shape[1:]), (rows, blocks), (planes, rows, size))
        tile, spread, zeros, codes = _carved(shapes, (self.dtype,) * 3 + (np.dtype(np.uint8),))
        zeros[...] = 2 ** (self.bits - 1)
        return _Scratch(tile, codes, spread, zeros)

    def multiply(self, start: int, stop: int, columns: Tensor, out: Tensor, scratch: _Scratch) -> None:
        """Unpack and multiply."""
        tile = self._unpack(start, stop, scratch)
        multiply_tile(tile.reshape(stop - start, -1), columns, out)

    def fill(self, start: int, stop: int, out: Tensor) -> None:
        """Unpacked, in the order of K."""
        tile = self._unpack(start, stop, self.scratch(stop - start, 0))
        for plane in range(self._planes):
            part = out[:, plane :: self._planes]
            part[...] = tile[:, plane, : part.shape[1]]

    def _unpack(self, start: int, stop: int, scratch: _Scratch) -> Tensor:
        """Rows `start` to `stop` as planes [rows, 8/bits, bytes of a row]; they lie in `scratch`."""
        packed = self.packed[start:stop]
        scales = np.ascontiguousarray(self.precision.widen(self.scales[start:stop]))
        zeros = None if self.zeros is None else self._zero_points(start, stop)
        given = scratch.of(stop - start)
        if self.groups is None and (unpack := vector_unpacker(self.bits)) is not None:
            zeros = given.zeros if zeros is None else zeros.astype(self.dtype, copy=False)
            unpack(packed, zeros, scales, given.tile)
        else:
            self._unpack_in_numpy(packed.reshape(len(packed), -1), zeros, scales, given)
        return given.tile

    def _zero_points(self, start: int, stop: int) -> Tensor:
        """Zero points [rows, groups]: floats in the oracle's precision, or codes in uint8."""
        assert self.zeros is not None
        zeros = self.zeros[start:stop]
        if zeros.dtype == np.uint8:
            return np.ascontiguousarray(unpacked(zeros, self.bits)[:, : self.scales.shape[1]])
        return np.ascontiguousarray(self.precision.widen(zeros))

    def _unpack_in_numpy(
        self, packed: Tensor, zeros: Tensor | None, scales: Tensor, scratch: _Scratch
    ) -> None:
        """As the vector code does it, to the bit: convert, subtract, multiply, each rounded by itself.

        Codes and zero points of up to four bits are subtracted as bytes, which is exact as well. All calls
        but the last few work on bytes, and none allocates: two workers would wait for each other.
        """
        tile, codes, bits = scratch.tile, scratch.codes, self.bits
        mask, top = np.uint8(2**bits - 1), self._planes - 1
        for plane in range(self._planes):
            part = np.right_shift(packed, np.uint8(plane * bits), out=codes[plane]) if plane else packed
            if plane < top or not plane:
                np.bitwise_and(part, mask, out=codes[plane])
        lifts = None if zeros is None else self._spread(zeros, np.empty(scratch.spread.shape, zeros.dtype))
        # Where bytes are subtracted, they wrap around to what, read as a signed byte, is the difference.
        if lifts is None:
            np.subtract(codes, np.uint8(2 ** (bits - 1)), out=codes)
            np.copyto(tile, codes.view(np.int8).swapaxes(0, 1))
        else:
            for plane in range(self._planes):
                lift = lifts(plane)
                if lift.dtype == np.uint8 and bits < 8:
                    np.subtract(codes[plane], lift, out=codes[plane])
                    np.copyto(tile[:, plane], codes[plane].view(np.int8))
                else:
                    np.subtract(codes[plane], lift, out=tile[:, plane], dtype=tile.dtype, casting="unsafe")
        spread = self._spread(scales, scratch.spread)
        if self.groups is None:
            np.multiply(tile, spread(0)[:, None], out=tile)
        else:
            for plane in range(self._planes):
                np.multiply(tile[:, plane], spread(plane), out=tile[:, plane])

    def _spread(self, values: Tensor, scratch: Tensor) -> Callable[[int], Tensor]:
        """What gives [rows, bytes of a row], for each byte of a plane the value of its group."""
        if self.groups is None:
            # Once for all planes: neighbours in a byte are of one block.
            np.copyto(scratch, values[:, :, None])
            whole = scratch.reshape(len(scratch), -1)
            return lambda plane: whole
        groups = np.zeros(self._planes * self._bytes, dtype=np.int64)
        groups[: self.depth] = self.groups
        return lambda plane: values[:, groups[plane :: self._planes]]


def _carved(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> list[Tensor]:
    """Arrays in the worker's own memory, each from the start of a line of the cache."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    starts = [0, *itertools.accumulate(-(-size // _LINE) * _LINE for size in sizes)]
    memory = np.frombuffer(own_memory(starts[-1] + _LINE), np.uint8)
    memory = memory[-memory.ctypes.data % _LINE :]
    return [
        memory[start : start + size].view(dtype).reshape(shape)
        for start, size, shape, dtype in zip(starts, sizes, shapes, dtypes, strict=False)
    ]


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What a worker needs for a tile.

    Attributes:
        tile: the planes, [rows, 8/bits, bytes of a row].
        codes: a byte for each code, [8/bits, rows, bytes of a row].
        spread: a scale for each byte, [rows, blocks, bytes of a block].
        zeros: the zero points of blocks that give none, [rows, blocks].
    """

    tile: Tensor
    codes: Tensor
    spread: Tensor
    zeros: Tensor

    def of(self, rows: int) -> _Scratch:
        """As much of it as `rows` rows take."""
        return _Scratch(self.tile[:rows], self.codes[:, :rows], self.spread[:rows], self.zeros[:rows])


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Codes of `bits` bits from the bytes of the last axis, lowest bits first: [.., n] to [.., n*8/bits]."""
    if bits == 8:
        return packed
    per_byte = 8 // bits
    codes = np.empty((*packed.shape, per_byte), dtype=np.uint8)
    for position in range(per_byte):
        codes[..., position] = (packed >> (position * bits)) & (2**bits - 1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * per_byte)


@functools.cache
def vector_unpacker(bits: int) -> Callable[[Any, Any, Any, Any], None] | None:
    """What unpacks in vector code; None without the extra `fast`."""
    if find_spec("numba") is None:
        return None
    from harness.oracle.kernels._vector import unpacker

    return unpacker(bits)
