"""What a decoder carries from call to call: one strategy for each kind of cache, behind one loop.

A strategy is checked against the ports before decoding, says what to feed first, and turns the outputs
of a call into the feeds of the next. It hands handles on as they are and never looks into a tensor.
Growing KV and recurrent states are here; `harness.decode.buffers` has caches of fixed size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from harness.decode.axes import UnfeedableError, batch_axis, is_quantised, known, written
from harness.engines.base import Session, TensorHandle
from harness.ports import Dimension, Port

__all__ = [
    "CacheShapeError",
    "CacheStrategy",
    "GrowingKv",
    "GrowingPair",
    "ReplacedPair",
    "ReplacedStates",
    "growing_pair",
    "replaced_pair",
]

_WINDOW_WORDS = ("sliding", "window")


class CacheShapeError(Exception):
    """An output does not have the shape that its strategy needs; names the port and both shapes."""

    def __init__(self, port: str, *, found: tuple[int, ...], needed: tuple[int, ...], tokens: int) -> None:
        super().__init__(
            f"{port} has shape {list(found)} after {tokens} tokens, where {list(needed)} must come back"
        )
        self.port = port


class CacheStrategy(Protocol):
    """How one kind of cache is carried through a decode."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The ports it feeds."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The ports whose values it needs back."""

    @property
    def one_pass(self) -> bool:
        """Whether tokens fed together see of the cache what they see when they are fed one by one."""

    def start(self, session: Session, *, room: int) -> dict[str, TensorHandle]:
        """What to feed at the first call: a fresh cache, whatever ran on the session before.

        Args:
            session: where it is to live.
            room: how many tokens will be fed at most.
        """

    def advance(
        self, outputs: Mapping[str, TensorHandle], *, fed: Mapping[str, TensorHandle], past: int, tokens: int
    ) -> dict[str, TensorHandle]:
        """What to feed next.

        Args:
            outputs: of the call.
            fed: what it was fed.
            past: tokens seen before it.
            tokens: tokens seen after it.

        Raises:
            CacheShapeError: an output has another shape than it must have.
        """


@dataclass(frozen=True, slots=True)
class GrowingPair:
    """A past/present pair of KV ports: keys, values, both in one tensor, or the scales of either.

    Attributes:
        past: the input.
        present: the output: `past` with the new positions appended.
        dtype: element type of both.
        shape: of the empty past: 0 along `axis`.
        axis: the axis that grows by the number of new tokens.
        windowed: whether the oldest rows may be dropped, once there are as many as the window has.
    """

    past: str
    present: str
    dtype: str
    shape: tuple[int, ...]
    axis: int
    windowed: bool = False


@dataclass(frozen=True, slots=True)
class GrowingKv:
    """KV that starts with length zero and grows by one row for each token.

    Windowed KV grows until its window is full, and keeps that length from then on. How long the window is
    shows at the call that drops rows: from there on another length is an error.
    """

    pairs: tuple[GrowingPair, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The past ports."""
        return tuple(pair.past for pair in self.pairs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The present ports."""
        return tuple(pair.present for pair in self.pairs)

    @property
    def one_pass(self) -> bool:
        """Not where rows are dropped or rounded between two calls."""
        return not any(pair.windowed or is_quantised(pair.dtype) for pair in self.pairs)

    def start(self, session: Session, *, room: int) -> dict[str, TensorHandle]:
        """Empty pasts."""
        return {pair.past: session.zeros(pair.shape, pair.dtype) for pair in self.pairs}

    def advance(
        self, outputs: Mapping[str, TensorHandle], *, fed: Mapping[str, TensorHandle], past: int, tokens: int
    ) -> dict[str, TensorHandle]:
        """Each present, as the past of its pair; it must have a row for each token seen, or in the window."""
        feeds = {}
        for pair in self.pairs:
            present = outputs[pair.present]
            rows = tokens
            if pair.windowed and len(present.shape) == len(pair.shape):
                rows = _rows_in_window(
                    present.shape[pair.axis], before=fed[pair.past].shape[pair.axis], past=past, tokens=tokens
                )
            needed = (*pair.shape[: pair.axis], rows, *pair.shape[pair.axis + 1 :])
            if present.shape != needed:
                raise CacheShapeError(pair.present, found=present.shape, needed=needed, tokens=tokens)
            feeds[pair.past] = present
        return feeds


@dataclass(frozen=True, slots=True)
class ReplacedPair:
    """A recurrent state: its two ports, element type and shape."""

    input: str
    output: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplacedStates:
    """Recurrent states that start with zeros and are replaced whole at each call.

    A window of the last few states, one behind another, is one such state: the graph reads the newest.
    """

    pairs: tuple[ReplacedPair, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The ports that take the states."""
        return tuple(pair.input for pair in self.pairs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The ports that give their next values."""
        return tuple(pair.output for pair in self.pairs)

    @property
    def one_pass(self) -> bool:
        """A recurrence over many tokens is one over each of them in turn, unless the states are rounded."""
        return not any(is_quantised(pair.dtype) for pair in self.pairs)

    def start(self, session: Session, *, room: int) -> dict[str, TensorHandle]:
        """Zero states."""
        return {pair.input: session.zeros(pair.shape, pair.dtype) for pair in self.pairs}

    def advance(
        self, outputs: Mapping[str, TensorHandle], *, fed: Mapping[str, TensorHandle], past: int, tokens: int
    ) -> dict[str, TensorHandle]:
        """Each new state, for the input of its pair; its shape must not change."""
        feeds = {}
        for pair in self.pairs:
            state = outputs[pair.output]
            if state.shape != pair.shape:
                raise CacheShapeError(pair.output, found=state.shape, needed=pair.shape, tokens=tokens)
            feeds[pair.input] = state
        return feeds


def growing_pair(past: Port, present: Port, *, batch: Dimension) -> GrowingPair:
    """The pair, with the axis that grows found by the symbols of both sides.

    The axis is symbolic on both sides and is not the batch axis. Where several are, it is the one whose
    symbol differs between past and present. All others must be concrete on one side: they are equal.

    Args:
        past: the input.
        present: the output.
        batch: the first axis of the token port, by which the batch axis is recognised.

    Raises:
        UnfeedableError: no axis, or no single one, can be the one that grows; or another extent is
            not known; or the dtype is not known.
    """
    dtype, shape = known(past)
    other: tuple[Dimension, ...] = shape if present.shape is None else present.shape
    if len(other) != len(shape):
        raise UnfeedableError(f"its rank is {len(shape)}, and that of {present.name} is {len(other)}")
    counted = batch_axis(shape, batch)
    symbolic = [
        axis
        for axis, extent in enumerate(shape)
        if not isinstance(extent, int) and not isinstance(other[axis], int)
    ]
    free = [axis for axis in symbolic if axis != counted]
    differing = [
        axis
        for axis in free or symbolic
        if None not in (shape[axis], other[axis]) and shape[axis] != other[axis]
    ]
    # An axis that differs and stands alone grows, also in first place: then nothing counts sequences.
    (axis,) = differing if len(differing) == 1 else free if len(free) == 1 else (None,)
    if axis is None:
        why = "has several axes that could grow" if free else "has no symbolic axis that could grow"
        raise UnfeedableError(f"its shape {written(shape)} {why}")
    start = []
    for index, extent in enumerate(shape):
        length = extent if isinstance(extent, int) else other[index]
        if index == axis:
            start.append(0)
        elif isinstance(length, int):
            start.append(length)
        elif index == counted:
            start.append(1)
        else:
            raise UnfeedableError(f"axis {index} of its shape {written(shape)} has no known extent")
    symbols = f"{shape[axis]} {other[axis]}".lower()
    windowed = any(word in symbols for word in _WINDOW_WORDS)
    return GrowingPair(past.name, present.name, dtype, tuple(start), axis, windowed)


def replaced_pair(state: Port, output: str, *, batch: Dimension) -> ReplacedPair:
    """The pair of the state port `state`; only its batch axis (see `axes.batch_axis`) may be symbolic.

    Raises:
        UnfeedableError: another extent, or the dtype, is not known.
    """
    dtype, shape = known(state)
    counted = batch_axis(shape, batch)
    start = []
    for index, extent in enumerate(shape):
        if isinstance(extent, int):
            start.append(extent)
        elif index == counted:
            start.append(1)
        else:
            raise UnfeedableError(
                f"axis {index} of its shape {written(shape)} is symbolic, so zeros have no known shape"
            )
    return ReplacedPair(state.name, output, dtype, tuple(start))


def _rows_in_window(found: int, *, before: int, past: int, tokens: int) -> int:
    """How many rows a windowed cache must have: `found` if that is possible.

    Args:
        found: what came back.
        before: rows that were fed.
        past: tokens seen before the call.
        tokens: tokens seen after it.
    """
    if before < past:
        return before  # rows were dropped before: the window is full, and this long
    return found if max(before, 1) <= found < tokens else tokens
