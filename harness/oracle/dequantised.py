"""Weights behind DequantizeLinear: codes as the file has them, made floats a tile at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.oracle.matrix import ResidentMatrix, multiply_in_chunks, narrow_tile_rows, tile_scratch
from harness.oracle.precision import Array, is_float
from harness.oracle.weights import Packed

if TYPE_CHECKING:
    from harness.oracle.node import Residency, Tensor

__all__ = ["Dequantised", "DequantisedMatrix"]

_MOST_BITS = 16
"""Bits of an integer up to which the difference of two is exact in float32."""


@dataclass(frozen=True, slots=True)
class Dequantised:
    """`(codes - zero) scale`, a matrix that is not computed; the formula is DequantizeLinear's.

    Attributes:
        codes: [R, C] as in the file.
        scale: of one element; [R] or [C]; or [R, C] with ceil(extent / block) on `axis`. In the dtype to
            compute in.
        zero: as scale, integers; None for 0.
        axis: 0 or 1, along which scales change; without meaning where there is one.
        block: neighbours on `axis` that share a scale; 0 where scales are no blocks.
        whole: plans the node that would compute all of it.
        turned: whether this is the transposed matrix, [C, R].
    """

    codes: Packed | Array
    scale: Array
    zero: Array | None
    axis: int
    block: int
    whole: Callable[[], None]
    turned: bool = False
    _kept: dict[bool, ResidentMatrix] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        codes: Packed | Array,
        scale: Array,
        zero: Array | None,
        *,
        axis: int,
        block: int,
        whole: Callable[[], None],
    ) -> Dequantised | None:
        """The matrix that DequantizeLinear makes of constants; None where it is none, or not worth it."""
        if len(codes.shape) != 2 or not -2 <= axis < 2 or block < 0:
            return None
        if isinstance(codes, Packed) and 8 % codes.bits:
            return None
        if is_float(codes.dtype):
            # Zero points of narrow floats are zero by the operator's description.
            if codes.dtype.itemsize > 1 or (zero is not None and zero.astype(np.float32).any()):
                return None
            zero = None
        elif codes.dtype.kind in "iu" and codes.dtype.itemsize * 8 > _MOST_BITS:
            return None
        axis %= 2
        blocks = list(codes.shape)
        if block:
            blocks[axis] = -(-blocks[axis] // block)
        shape = tuple(blocks) if block else (blocks[axis],)
        if (scale.size != 1 and scale.shape != shape) or (zero is not None and zero.shape != scale.shape):
            return None
        return cls(codes, scale, zero, axis, block, whole)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.codes.shape
        return (columns, rows) if self.turned else (rows, columns)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the floats."""
        return self.scale.dtype

    def transposed(self, whole: Callable[[], None]) -> Dequantised:
        """The transposed matrix; `whole` plans what would compute all of it."""
        return replace(self, turned=not self.turned, whole=whole, _kept={})

    def weight(self, residency: Residency, *, in_columns: bool) -> ResidentMatrix:
        """As a weight [N, K] of products, which is this matrix or, `in_columns`, its transposed one."""
        if in_columns not in self._kept:
            matrix = replace(self, turned=self.turned != in_columns)
            self._kept[in_columns] = ResidentMatrix(DequantisedMatrix(matrix), residency)
        return self._kept[in_columns]

    def fill(self, rows: slice, columns: slice, out: Tensor) -> None:
        """Write the floats at `rows` and `columns` to `out`."""
        if self.turned:
            rows, columns, out = columns, rows, out.T
        if isinstance(self.codes, Packed):
            np.take(self._levels(), self.codes.codes((rows, columns)), out=out, mode="clip")
        elif is_float(self.codes.dtype):
            np.take(self._levels(), self.codes.view(np.uint8)[rows, columns], out=out, mode="clip")
        else:
            np.copyto(out, self.codes[rows, columns])
        if self.zero is not None:
            np.subtract(out, self._spread(self.zero, rows, columns).astype(out.dtype), out=out)
        np.multiply(out, self._spread(self.scale, rows, columns), out=out)

    def _levels(self) -> Array:
        """The float of each code, in order: looked up, as types that numpy lacks convert slowly."""
        if isinstance(self.codes, Packed):
            return self.codes.levels().astype(self.dtype)
        return np.arange(256, dtype=np.uint8).view(self.codes.dtype).astype(self.dtype)

    def _spread(self, values: Array, rows: slice, columns: slice) -> Array:
        """Scales or zero points, broadcastable to the codes at `rows` and `columns`."""
        if values.size == 1:
            return values.reshape(())
        along = (rows, columns)[self.axis]
        if not self.block:
            return values[along, None] if self.axis == 0 else values[along]
        groups = np.arange(along.start, along.stop) // self.block
        spread: Array = values[:, columns][groups] if self.axis == 0 else values[rows][:, groups]
        return spread


class DequantisedMatrix:
    """A `harness.oracle.matrix.Matrix` of codes."""

    def __init__(self, source: Dequantised) -> None:
        self._source = source
        self.rows, self.depth = source.shape
        self.dtype = source.dtype
        self.ready = False

    def tile_rows(self, tokens: int) -> int:
        """As of any weight that must be widened."""
        return narrow_tile_rows(self.rows)

    def arranged(self, tokens: Tensor) -> Tensor:
        """In order."""
        return np.ascontiguousarray(tokens.T)

    def scratch(self, rows: int, tokens: int) -> Any:
        """Where a tile is made, and a part of the sum."""
        return tile_scratch(rows, self.depth, tokens, self.dtype, in_columns=self._source.turned)

    def multiply(self, start: int, stop: int, columns: Tensor, out: Tensor, scratch: Any) -> None:
        """Chunk by chunk along the sum."""

        def make(first: int, last: int, tile: Tensor) -> None:
            self._source.fill(slice(start, stop), slice(first, last), tile)

        multiply_in_chunks(make, self.depth, columns, out, scratch)

    def fill(self, start: int, stop: int, out: Tensor) -> None:
        """As floats."""
        self._source.fill(slice(start, stop), slice(0, self.depth), out)
