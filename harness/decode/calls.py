"""Inputs whose value follows from the tokens of a call: IDs, mask, positions, lengths, and zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from harness.decode.axes import UnfeedableError, written
from harness.ports import Dimension, Port

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "Call",
    "CallInput",
    "control_input",
    "mask_input",
    "positions_input",
    "token_input",
    "total_input",
    "write_index_input",
    "zero_input",
]

Extent: TypeAlias = int | Literal["new", "total"]
"""One axis of what is fed: a number, the tokens of this call, or all tokens up to this call."""

_INTEGERS = frozenset({"int32", "int64"})
_INTEGERS_AND_FLAGS = _INTEGERS | {"bool"}


@dataclass(frozen=True, slots=True)
class Call:
    """The token IDs of one call, and how many were fed before it."""

    new: tuple[int, ...]
    past: int

    @property
    def total(self) -> int:
        """Tokens seen after the call."""
        return self.past + len(self.new)


@dataclass(frozen=True, slots=True)
class CallInput:
    """An input with a value of its own at each call.

    Attributes:
        name: the port.
        dtype: its element type.
        shape: of what is fed; the values are those of the last axis, and all rows are equal.
        values: a number, or one for each element of the last axis.
    """

    name: str
    dtype: str
    shape: tuple[Extent, ...]
    values: Callable[[Call], Any]

    def array(self, call: Call) -> NDArray[Any]:
        """What to feed at `call`."""
        import numpy as np

        lengths = {"new": len(call.new), "total": call.total}
        extents = tuple(extent if isinstance(extent, int) else lengths[extent] for extent in self.shape)
        return np.broadcast_to(np.asarray(self.values(call), dtype=self.dtype), extents)


def token_input(port: Port, *, rows: Dimension = None) -> tuple[CallInput, int | None]:
    """The port of the token IDs, [1, tokens] or [tokens], and how many it takes a call; None for any number.

    Without a batch axis only one token a call is fed: what it gives has then one row, whichever axis that
    is (`harness.engines.base.Session.top_logits`).

    Args:
        port: the port.
        rows: the first axis of logits that have no axis for positions: as many as tokens are sequences.

    Raises:
        UnfeedableError: the port takes something else.
    """
    _check(port, _INTEGERS, ranks=(1, 2))
    shape = port.shape or ("batch", "sequence")
    _one_sequence(port, shape[:-1])
    last = shape[-1]
    if len(shape) == 1 and rows == last:
        _one_sequence(port, shape)
    if isinstance(last, int) and last != 1:
        raise UnfeedableError(f"takes exactly {last} tokens a call, and the loop feeds any number or one")
    one = last == 1 or len(shape) == 1
    feed = CallInput(port.name, str(port.dtype), (*(1 for _ in shape[:-1]), "new"), lambda call: call.new)
    return feed, 1 if one else None


def mask_input(port: Port, *, capacity: int | None) -> CallInput:
    """The mask over all tokens, [1, total] or [total]: ones.

    One as long as a static cache of `capacity` rows has ones where rows were written, from the left.

    Raises:
        UnfeedableError: the port takes something else.
    """
    _check(port, _INTEGERS_AND_FLAGS, ranks=(1, 2))
    shape = port.shape or ("batch", "total")
    _one_sequence(port, shape[:-1])
    ones = (1,) * (len(shape) - 1)
    last = shape[-1]
    if not isinstance(last, int):
        return CallInput(port.name, str(port.dtype), (*ones, "total"), lambda _: 1)
    if last != capacity:
        raise UnfeedableError(f"has the fixed length {last}, and a mask is as long as all tokens")
    return CallInput(port.name, str(port.dtype), (*ones, last), lambda call: _first(call.total, last))


def positions_input(port: Port) -> CallInput:
    """The positions of the tokens of a call: [1, tokens], [tokens], or [planes, 1, tokens].

    Of three axes, the planes (time, height, width) are the concrete one: for text all planes are equal.

    Raises:
        UnfeedableError: the port takes something else.
    """
    _check(port, _INTEGERS, ranks=(1, 2, 3))
    shape = port.shape or ("batch", "sequence")
    leading: tuple[int, ...] = (1,) * (len(shape) - 1)
    if len(shape) == 3:
        planes = [axis for axis in (0, 1) if isinstance(shape[axis], int) and shape[axis] != 1]
        if len(planes) != 1:
            raise UnfeedableError(
                f"has the shape {written(shape)}, and which axis counts planes is not known"
            )
        leading = tuple(int(shape[axis] or 1) if axis in planes else 1 for axis in (0, 1))
    else:
        _one_sequence(port, shape[:-1])
    return CallInput(port.name, str(port.dtype), (*leading, "new"), lambda call: range(call.past, call.total))


def control_input(port: Port, *, last_token: bool = False) -> CallInput:
    """A control port by its name: a length, positions to write at, the branch to take, logits to keep.

    Args:
        port: the port.
        last_token: whether the graph reads it as the index of the last token, whatever it is called.

    Raises:
        UnfeedableError: nothing is known about a port of that name, or it has another form.
    """
    if last_token:
        return _scalar(port, _INTEGERS, _LENGTHS["seqlens_k"])
    if port.name in _POSITIONS:
        return positions_input(port)
    if port.name in _LENGTHS:
        return _scalar(port, _INTEGERS, _LENGTHS[port.name])
    if port.name == _BRANCH:
        return _scalar(port, _INTEGERS_AND_FLAGS, lambda call: call.past > 0)
    raise UnfeedableError("is a control input, and there is no value to give it")


def total_input(port: Port) -> CallInput:
    """How many tokens there are after the call: the valid length of a static cache.

    Raises:
        UnfeedableError: the port takes no single number.
    """
    return _scalar(port, _INTEGERS, lambda call: call.total)


def write_index_input(port: Port, *, sequence: Dimension) -> CallInput:
    """Where the tokens of the call go: the first of them, or each, where the port is as long as they are.

    Args:
        port: the control port of a static cache.
        sequence: how the token port spells the tokens of a call.

    Raises:
        UnfeedableError: the port takes neither.
    """
    shape = port.shape or ()
    if shape and isinstance(shape[-1], str) and (len(shape) == 2 or shape[-1] == sequence):
        return positions_input(port)
    return _scalar(port, _INTEGERS, lambda call: call.past)


def zero_input(port: Port, *, batch: Dimension, sequence: Dimension) -> CallInput:
    """An optional input, left at zero.

    Args:
        port: its axes are numbers, the batch, or the tokens of a call.
        batch: how the token port spells its batch.
        sequence: how the token port spells the tokens of a call.

    Raises:
        UnfeedableError: an axis is none of these.
    """
    if port.dtype is None or port.shape is None:
        raise UnfeedableError("is an optional input whose dtype or rank the graph does not say")
    extents: list[Extent] = []
    for axis, extent in enumerate(port.shape):
        if isinstance(extent, int):
            extents.append(extent)
        elif extent is not None and extent == sequence:
            extents.append("new")
        elif extent == batch or axis == 0:
            extents.append(1)
        else:
            raise UnfeedableError(
                f"is an optional input, and axis {axis} of its {written(port.shape)} is open"
            )
    return CallInput(port.name, port.dtype, tuple(extents), lambda _: 0)


_LENGTHS: Mapping[str, Callable[[Call], int]] = {
    **dict.fromkeys(
        (
            "cache_length",
            "cache_lengths",
            "past_key_values_length",
            "past_len",
            "past_length",
            "past_seq_len",
            "past_sequence_length",
        ),
        lambda call: call.past,
    ),
    **dict.fromkeys(
        ("total_seq_len", "total_sequence_len", "total_sequence_length"), lambda call: call.total
    ),
    # GroupQueryAttention takes the index of the last token (onnxruntime, its schema).
    "seqlens_k": lambda call: call.total - 1,
    # None at all means all of them (transformers, `logits_to_keep`).
    **dict.fromkeys(("logits_to_keep", "num_logits_to_keep"), lambda _: 0),
    # Which sequence each goes on from: there is one (OpenVINO, its stateful models).
    "beam_idx": lambda _: 0,
}
"""What a control port of that name takes; names that could mean two lengths are left out."""

_POSITIONS = frozenset({"cache_position", "cache_positions"})
_BRANCH = "use_cache_branch"
"""True takes the branch that reads the past (Optimum, merged decoders)."""


def _scalar(port: Port, dtypes: frozenset[str], values: Callable[[Call], Any]) -> CallInput:
    _check(port, dtypes, ranks=(0, 1, 2))
    shape = port.shape or ()
    _one_sequence(port, shape)
    return CallInput(port.name, str(port.dtype), (1,) * len(shape), values)


def _first(count: int, length: int) -> list[int]:
    return [1] * min(count, length) + [0] * (length - count)


def _check(port: Port, dtypes: frozenset[str], *, ranks: tuple[int, ...]) -> None:
    if port.dtype not in dtypes:
        allowed = " and ".join(sorted(dtypes & _INTEGERS))
        raise UnfeedableError(f"has dtype {port.dtype}, and only {allowed} can be fed")
    if port.shape is not None and len(port.shape) not in ranks:
        allowed = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
        raise UnfeedableError(f"has rank {len(port.shape)}, and only ranks {allowed} can be fed")


def _one_sequence(port: Port, leading: tuple[Dimension, ...]) -> None:
    for extent in leading:
        if isinstance(extent, int) and extent != 1:
            raise UnfeedableError(f"takes a batch of {extent}, and the loop decodes one sequence")
