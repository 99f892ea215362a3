"""Caches of fixed size: buffers that the graph writes in place, and scales that stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.decode.axes import UnfeedableError, batch_axis, is_quantised, known, written
from harness.decode.caches import CacheShapeError, ReplacedPair
from harness.engines.base import Session, TensorHandle
from harness.ports import Dimension, Port

__all__ = ["Buffer", "FixedScales", "StaticBuffers", "buffer_of"]

_SEQUENCE_AXIS = -2
"""Where `TensorScatter` writes unless it says otherwise: rows of [batch, heads, rows, width], for example."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of a static cache.

    Attributes:
        input: the port that takes it.
        output: the port that gives it back, with the rows of the call written.
        dtype: element type of both.
        shape: of both; 0 along `axis` where the graph leaves the number of rows open.
        axis: the axis of the rows.
        rolls: whether new rows replace the oldest, so that it is never full.
    """

    input: str
    output: str
    dtype: str
    shape: tuple[int, ...]
    axis: int
    rolls: bool = False

    @property
    def capacity(self) -> int | None:
        """How many tokens it has room for; None for as many as are asked for."""
        return None if self.rolls else self.shape[self.axis] or None


@dataclass(frozen=True, slots=True)
class StaticBuffers:
    """KV in buffers of fixed size: zeros at first, and fed back whole.

    Where to write and how many rows count is said by ports of their own (`harness.decode.calls`), or the
    operator that attends knows by the number of tokens. The loop asks for no more tokens than there are rows.
    """

    buffers: tuple[Buffer, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The ports that take the buffers."""
        return tuple(buffer.input for buffer in self.buffers)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The ports that give them back."""
        return tuple(buffer.output for buffer in self.buffers)

    @property
    def one_pass(self) -> bool:
        """Rows stay where they were written: tokens fed together see the same, unless rows are rounded."""
        return not any(is_quantised(buffer.dtype) for buffer in self.buffers)

    @property
    def smallest(self) -> Buffer | None:
        """The buffer with the fewest rows; None where all have as many as are asked for."""
        fixed = [(buffer.capacity, index) for index, buffer in enumerate(self.buffers) if buffer.capacity]
        return self.buffers[min(fixed)[1]] if fixed else None

    def start(self, session: Session, *, room: int) -> dict[str, TensorHandle]:
        """Zeros in every row."""
        return {
            buffer.input: session.zeros(_with_rows(buffer, buffer.shape[buffer.axis] or room), buffer.dtype)
            for buffer in self.buffers
        }

    def advance(
        self, outputs: Mapping[str, TensorHandle], *, fed: Mapping[str, TensorHandle], past: int, tokens: int
    ) -> dict[str, TensorHandle]:
        """Each buffer, for the input that it came from; its shape must not change."""
        feeds = {}
        for buffer in self.buffers:
            written_to, needed = outputs[buffer.output], fed[buffer.input].shape
            if written_to.shape != needed:
                raise CacheShapeError(buffer.output, found=written_to.shape, needed=needed, tokens=tokens)
            feeds[buffer.input] = written_to
        return feeds


@dataclass(frozen=True, slots=True)
class FixedScales:
    """Scales of a quantised cache that do not grow with it: one at first, then as the graph gives them back.

    Before the first token nothing is stored that they could scale. One and not zero, since graphs divide by
    them.
    """

    pairs: tuple[ReplacedPair, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The ports that take the scales."""
        return tuple(pair.input for pair in self.pairs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The ports that give their next values."""
        return tuple(pair.output for pair in self.pairs)

    @property
    def one_pass(self) -> bool:
        """What is stored is rounded, and rounded anew at each call."""
        return False

    def start(self, session: Session, *, room: int) -> dict[str, TensorHandle]:
        """Ones."""
        import numpy as np

        from harness.engines.tensor_types import numpy_dtype

        return {
            pair.input: session.place(np.ones(pair.shape, dtype=numpy_dtype(pair.dtype)))
            for pair in self.pairs
        }

    def advance(
        self, outputs: Mapping[str, TensorHandle], *, fed: Mapping[str, TensorHandle], past: int, tokens: int
    ) -> dict[str, TensorHandle]:
        """Each new scale, for the input of its pair; its shape must not change."""
        feeds = {}
        for pair in self.pairs:
            scale = outputs[pair.output]
            if scale.shape != pair.shape:
                raise CacheShapeError(pair.output, found=scale.shape, needed=pair.shape, tokens=tokens)
            feeds[pair.input] = scale
        return feeds


def buffer_of(
    source: Port, output: Port, *, batch: Dimension, axis: int | None = None, window: int | None = None
) -> Buffer:
    """The buffer of a static cache between two ports.

    Args:
        source: the input.
        output: the output.
        batch: the first axis of the token port.
        axis: the axis of the rows; None for the one that `TensorScatter` writes along by default.
        window: how many rows a query sees of a buffer that rolls; None for one that does not.

    Raises:
        UnfeedableError: it has no such axis, or an extent or the dtype is not known.
    """
    dtype, shape = known(source)
    other = output.shape if output.shape is not None and len(output.shape) == len(shape) else shape
    if len(shape) < 2:
        raise UnfeedableError(f"its shape {written(shape)} has no axis for rows")
    rows = (_SEQUENCE_AXIS if axis is None else axis) % len(shape)
    counted = batch_axis(shape, batch)
    extents = []
    for index, extent in enumerate(shape):
        length = extent if isinstance(extent, int) else other[index]
        if isinstance(length, int):
            extents.append(length)
        elif index == rows:
            extents.append(window or 0)
        elif index == counted:
            extents.append(1)
        else:
            raise UnfeedableError(f"axis {index} of its shape {written(shape)} has no known extent")
    return Buffer(source.name, output.name, dtype, tuple(extents), rows, rolls=window is not None)


def _with_rows(buffer: Buffer, rows: int) -> tuple[int, ...]:
    return (*buffer.shape[: buffer.axis], rows, *buffer.shape[buffer.axis + 1 :])
