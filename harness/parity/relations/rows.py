"""Decodes side by side in one batch, or behind rows that the mask hides: what the loop never feeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.decode.axes import batch_axis, written
from harness.decode.buffers import StaticBuffers
from harness.decode.caches import GrowingKv
from harness.decode.calls import Call, CallInput
from harness.decode.plan import FeedPlan
from harness.engines.base import Session, TensorHandle
from harness.engines.reduce import top_logits_of
from harness.errors import EngineFailedError
from harness.parity.relations.base import NotApplicableError
from harness.parity.relations.laboratory import Laboratory
from harness.parity.relations.observation import Moment, Observation, Script, keeps_states
from harness.ports import Dimension, Port

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Row", "Rows", "row_axes", "trimmed"]


@dataclass(frozen=True, slots=True)
class Row:
    """One of the decodes of a batch.

    Attributes:
        script: what it decodes; its tokens are given.
        padding: tokens fed before the prompt, which the mask hides and positions do not count.
    """

    script: Script
    padding: int = 0


class Rows:
    """Decodes of equal length, padding included, that run side by side."""

    def __init__(
        self,
        session: Session,
        lab: Laboratory,
        rows: Sequence[Row],
        *,
        hidden: int = 0,
        caches: Mapping[str, TensorHandle] | None = None,
    ) -> None:
        """Nothing runs yet.

        Args:
            session: what runs.
            lab: knows the graph.
            rows: at least one; several need a batch axis on every port.
            hidden: rows that stand in the caches before the first call, which the mask hides.
            caches: what the first call is fed instead of fresh caches.

        Raises:
            NotApplicableError: a port takes one sequence alone.
        """
        topology = lab.subject.topology
        self._session = session
        self._plan = lab.plan(session)
        self._rows = tuple(rows)
        self._hidden = hidden
        self._mask, self._positions = topology.attention_mask_input, topology.position_ids_input
        self._axes: Mapping[str, int | None] = _batch_axes(lab, session, self._plan) if len(rows) > 1 else {}
        self._given = caches

    def decode(self, watched: int) -> Observation:
        """Decode all rows, and say what row `watched` showed. Growing caches come without hidden rows."""
        session, plan, script = self._session, self._plan, self._rows[watched].script
        hidden = self._hidden + self._rows[watched].padding
        caches = dict(self._given) if self._given is not None else self._fresh(script.room + hidden)
        constants = plan.constants(session)
        seen: dict[int, Moment] = {}
        past = self._hidden
        for step in range(script.steps):
            new = [self._tokens(row, step) for row in self._rows]
            for call in self._calls(new, past):
                fed = {**constants, **caches, **self._inputs(call)}
                outputs = session.run(fed, plan.outputs)
                caches = {
                    name: outputs[given]
                    for cache in plan.caches
                    for name, given in zip(cache.inputs, cache.outputs, strict=True)
                }
            past += len(new[0])
            seen[step] = self._look(outputs, watched, step, total=past - hidden, hidden=hidden)
        return seen

    def _tokens(self, row: Row, step: int) -> tuple[int, ...]:
        script = row.script
        assert script.tokens is not None
        if step:
            return (script.tokens[step - 1],)
        return (*script.prompt[:1] * row.padding, *script.prompt)

    def _calls(self, new: Sequence[tuple[int, ...]], past: int) -> list[list[Call]]:
        """The calls of a step: each has one for each row."""
        length = len(new[0])
        most = self._plan.tokens_a_call or length
        return [
            [Call(tokens[first : first + most], past + first) for tokens in new]
            for first in range(0, length, most)
        ]

    def _inputs(self, calls: Sequence[Call]) -> dict[str, TensorHandle]:
        feeds = {}
        for each in self._plan.calls:
            arrays = [self._array(each, call, row) for call, row in zip(calls, self._rows, strict=True)]
            feeds[each.name] = self._session.place(self._side_by_side(each.name, arrays))
        return feeds

    def _array(self, each: CallInput, call: Call, row: Row) -> NDArray[Any]:
        """What one row is fed, as if it were alone."""
        import numpy as np

        array, hidden = each.array(call), self._hidden + row.padding
        if not hidden:
            return array
        if each.name == self._mask:
            array = array.copy()
            array[..., :hidden] = 0
        elif each.name == self._positions:
            array = np.maximum(array - hidden, 0).astype(array.dtype)
        return array

    def _side_by_side(self, name: str, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        import numpy as np

        if len(arrays) == 1:
            return arrays[0]
        axis = self._axes[name]
        if axis is not None:
            return np.concatenate(arrays, axis=axis)
        if any(not np.array_equal(arrays[0], other) for other in arrays[1:]):
            raise NotApplicableError(
                f"{name} is one for the whole batch, and its rows need different values."
            )
        return arrays[0]

    def _fresh(self, room: int) -> dict[str, TensorHandle]:
        """Fresh caches, once for each row."""
        session, count = self._session, len(self._rows)
        start = self._plan.start(session, room=room)
        if count == 1:
            return start
        return {
            name: session.place(self._side_by_side(name, [session.copy_out(handle)] * count))
            for name, handle in start.items()
        }

    def _look(
        self, outputs: Mapping[str, TensorHandle], watched: int, step: int, *, total: int, hidden: int
    ) -> Moment:
        session, plan = self._session, self._plan
        logits = session.copy_out(self._of_all_rows(plan.logits, outputs[plan.logits], 0))
        last = logits[watched] if logits.ndim == 2 else logits[watched, -1]
        (top,) = top_logits_of(last[None], 1)
        states = {}
        carried = {name: outputs[name] for name in plan.carried}
        if keeps_states(step, self._rows[watched].script, carried):
            inputs = {
                given: name for c in plan.caches for name, given in zip(c.inputs, c.outputs, strict=True)
            }
            for name, handle in carried.items():
                axis = self._axes.get(inputs[name])
                array = session.copy_out(handle if axis is None else self._of_all_rows(name, handle, axis))
                states[name] = array if axis is None else array.take([watched], axis=axis)
            states = trimmed(plan, states, total=total, hidden=hidden)
        return Moment(top.argmax, last, states)

    def _of_all_rows(self, name: str, handle: TensorHandle, axis: int) -> TensorHandle:
        """The output `name`, which must have a row for each decode along `axis`.

        Raises:
            EngineFailedError: it has not.
        """
        shape, count = handle.shape, len(self._rows)
        if axis < len(shape) and shape[axis] == count:
            return handle
        engine = self._session.info.engine
        raise EngineFailedError(
            f"{engine}: {name} has shape {list(shape)}, and {count} rows were fed, along axis {axis}.",
            kind="crashed",
            next_action="Run the model on another engine to see which of graph and engine is wrong.",
        )


def trimmed(
    plan: FeedPlan, states: Mapping[str, NDArray[Any]], *, total: int, hidden: int = 0
) -> dict[str, NDArray[Any]]:
    """States without the rows that nothing was written to, or that the mask hides.

    Args:
        plan: which states have rows.
        states: of one sequence, by output.
        total: tokens seen that count.
        hidden: rows before them that do not.
    """
    axes = row_axes(plan)
    kept = {}
    for name, array in states.items():
        axis, rolls = axes.get(name, (None, False))
        if axis is None or rolls:
            kept[name] = array
        else:
            kept[name] = array.take(
                range(min(hidden, array.shape[axis]), min(hidden + total, array.shape[axis])), axis
            )
    return kept


def row_axes(plan: FeedPlan) -> dict[str, tuple[int, bool]]:
    """The axis of the rows of each cache that has a row for a token, by output; and whether old rows go."""
    axes: dict[str, tuple[int, bool]] = {}
    for cache in plan.caches:
        if isinstance(cache, GrowingKv):
            axes |= {pair.present: (pair.axis, pair.windowed) for pair in cache.pairs}
        elif isinstance(cache, StaticBuffers):
            axes |= {buffer.output: (buffer.axis, buffer.rolls) for buffer in cache.buffers}
    return axes


def _batch_axes(lab: Laboratory, session: Session, plan: FeedPlan) -> dict[str, int | None]:
    """The axis of each input that counts sequences; None for what all of them share.

    Raises:
        NotApplicableError: there is none, or it has a fixed length.
    """
    if not lab.subject.is_plain:
        raise NotApplicableError("The package's graphs work together for one sequence.")
    if plan.extra:
        raise NotApplicableError(f"{next(iter(plan.extra))} is given for one sequence.")
    ports = lab.inputs(session)
    token = lab.subject.topology.token_input or ""
    shape = ports[token].shape or ()
    if len(shape) < 2 or isinstance(shape[0], int):
        raise NotApplicableError(f"{token} takes one sequence: its shape is {written(shape)}.")
    axes = {each.name: _axis_of_call(each, ports[each.name], shape[0]) for each in plan.calls}
    rows = {name: axis for name, (axis, _) in row_axes(plan).items()}
    for cache in plan.caches:
        for name, output in zip(cache.inputs, cache.outputs, strict=True):
            extents = ports[name].shape or ()
            axis = batch_axis(extents, shape[0])
            if axis is None or axis == rows.get(output) or isinstance(extents[axis], int):
                raise NotApplicableError(f"{name} holds one sequence: its shape is {written(extents)}.")
            axes[name] = axis
    return axes


def _axis_of_call(each: CallInput, port: Port, batch: Dimension) -> int | None:
    """The axis of what is fed at a call that counts sequences: open in the graph, and not its tokens."""
    shape = port.shape if port.shape is not None and len(port.shape) == len(each.shape) else ()
    free = [
        axis
        for axis, (extent, fed) in enumerate(zip(shape, each.shape, strict=False))
        if fed == 1 and not isinstance(extent, int)
    ]
    named = [axis for axis in free if shape[axis] == batch]
    return next(iter(named or free), None)
