"""What a decoder carries from call to call: one strategy for each kind of cache, behind one loop.

A strategy is checked against the ports before decoding, says what to feed first, and turns the outputs
of a call into the feeds of the next. It hands handles on as they are and never looks into a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from harness.engines.base import Session, TensorHandle
from harness.ports import Dimension, Port

__all__ = [
    "CacheShapeError",
    "CacheStrategy",
    "GrowingKv",
    "GrowingPair",
    "ReplacedPair",
    "ReplacedStates",
    "UnfeedableError",
    "growing_pair",
    "replaced_pair",
]

_PACKED = frozenset({"int4", "uint4", "int2", "uint2", "float4e2m1"})


class UnfeedableError(Exception):
    """The strategy cannot carry this pair of ports; the text says why, as a clause."""


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

    def start(self, session: Session) -> dict[str, TensorHandle]:
        """What to feed at the first call: a fresh cache, whatever ran on the session before."""

    def advance(self, outputs: Mapping[str, TensorHandle], *, tokens: int) -> dict[str, TensorHandle]:
        """What to feed next, from the outputs of a call after which `tokens` tokens have been seen.

        Raises:
            CacheShapeError: an output has another shape than it must have.
        """


@dataclass(frozen=True, slots=True)
class GrowingPair:
    """A past/present pair of KV ports.

    Attributes:
        past: the input.
        present: the output: `past` with the new positions appended.
        dtype: element type of both.
        shape: of the empty past: 0 along `axis`.
        axis: the axis that grows by the number of new tokens.
    """

    past: str
    present: str
    dtype: str
    shape: tuple[int, ...]
    axis: int


@dataclass(frozen=True, slots=True)
class GrowingKv:
    """KV that starts with length zero and grows by one row for each token."""

    pairs: tuple[GrowingPair, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The past ports."""
        return tuple(pair.past for pair in self.pairs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The present ports."""
        return tuple(pair.present for pair in self.pairs)

    def start(self, session: Session) -> dict[str, TensorHandle]:
        """Empty pasts."""
        return {pair.past: session.zeros(pair.shape, pair.dtype) for pair in self.pairs}

    def advance(self, outputs: Mapping[str, TensorHandle], *, tokens: int) -> dict[str, TensorHandle]:
        """Each present, as the past of its pair; it must have a row for each token seen."""
        feeds = {}
        for pair in self.pairs:
            present = outputs[pair.present]
            needed = (*pair.shape[: pair.axis], tokens, *pair.shape[pair.axis + 1 :])
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
    """Recurrent states that start with zeros and are replaced whole at each call."""

    pairs: tuple[ReplacedPair, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The ports that take the states."""
        return tuple(pair.input for pair in self.pairs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The ports that give their next values."""
        return tuple(pair.output for pair in self.pairs)

    def start(self, session: Session) -> dict[str, TensorHandle]:
        """Zero states."""
        return {pair.input: session.zeros(pair.shape, pair.dtype) for pair in self.pairs}

    def advance(self, outputs: Mapping[str, TensorHandle], *, tokens: int) -> dict[str, TensorHandle]:
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
    dtype, shape = _known(past)
    other: tuple[Dimension, ...] = shape if present.shape is None else present.shape
    if len(other) != len(shape):
        raise UnfeedableError(f"its rank is {len(shape)}, and that of {present.name} is {len(other)}")
    batch_axis = _batch_axis(shape, batch)
    symbolic = [
        axis
        for axis, extent in enumerate(shape)
        if not isinstance(extent, int) and not isinstance(other[axis], int) and axis != batch_axis
    ]
    differing = [
        axis for axis in symbolic if None not in (shape[axis], other[axis]) and shape[axis] != other[axis]
    ]
    (axis,) = differing if len(differing) == 1 else symbolic if len(symbolic) == 1 else (None,)
    if axis is None:
        why = "has no symbolic axis that could grow" if not symbolic else "has several axes that could grow"
        raise UnfeedableError(f"its shape {_written(shape)} {why}")
    start = []
    for index, extent in enumerate(shape):
        known = extent if isinstance(extent, int) else other[index]
        if index == axis:
            start.append(0)
        elif isinstance(known, int):
            start.append(known)
        elif index == batch_axis:
            start.append(1)
        else:
            raise UnfeedableError(f"axis {index} of its shape {_written(shape)} has no known extent")
    return GrowingPair(past.name, present.name, dtype, tuple(start), axis)


def replaced_pair(state: Port, output: str, *, batch: Dimension) -> ReplacedPair:
    """The pair of the state port `state`; only its batch axis (see `growing_pair`) may be symbolic.

    Raises:
        UnfeedableError: another extent, or the dtype, is not known.
    """
    dtype, shape = _known(state)
    batch_axis = _batch_axis(shape, batch)
    start = []
    for index, extent in enumerate(shape):
        if isinstance(extent, int):
            start.append(extent)
        elif index == batch_axis:
            start.append(1)
        else:
            raise UnfeedableError(
                f"axis {index} of its shape {_written(shape)} is symbolic, so zeros have no known shape"
            )
    return ReplacedPair(state.name, output, dtype, tuple(start))


def _known(port: Port) -> tuple[str, tuple[Dimension, ...]]:
    if port.dtype is None or port.shape is None:
        raise UnfeedableError("the graph does not say its dtype and rank")
    if port.dtype in _PACKED:
        raise UnfeedableError(f"its dtype {port.dtype} packs several elements into a byte")
    return port.dtype, port.shape


def _batch_axis(shape: tuple[Dimension, ...], batch: Dimension) -> int:
    """The axis that counts sequences.

    It is the one with the token port's symbol, else the first one, unless that is concrete and another
    calls itself a batch (a stack of layers may stand before it).
    """
    alike = [axis for axis, extent in enumerate(shape) if isinstance(batch, str) and extent == batch]
    if len(alike) == 1:
        return alike[0]
    if shape and isinstance(shape[0], int):
        named = [axis for axis, extent in enumerate(shape) if isinstance(extent, str) and "batch" in extent]
        if len(named) == 1:
            return named[0]
    return 0


def _written(shape: tuple[Dimension, ...]) -> str:
    return "[" + ", ".join("?" if extent is None else str(extent) for extent in shape) + "]"
