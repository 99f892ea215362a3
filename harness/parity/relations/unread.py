"""Slots of a cache that must not be read: whatever stands in them, nothing may change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.decode.buffers import Buffer, StaticBuffers
from harness.decode.caches import GrowingKv, GrowingPair
from harness.decode.plan import FeedPlan
from harness.engines.base import Session, TensorHandle
from harness.engines.tensor_types import numpy_dtype
from harness.parity.relations.base import NotApplicableError, Pair
from harness.parity.relations.batching import PADDING, written_rows
from harness.parity.relations.laboratory import Laboratory
from harness.parity.relations.observation import Observation
from harness.parity.relations.rows import Row, Rows

__all__ = ["CANARY", "Canaries"]

CANARY = 64
"""What stands in slots that must not be read: a number that every cache can hold, and that no cache holds.

It is finite, since attention multiplies what a mask hides by a weight of zero."""


@dataclass(frozen=True, slots=True)
class Canaries:
    """Rows that are not written yet, and rows that the mask hides, hold a canary instead of zeros."""

    name: str = "canaries"
    statement: str = "what stands in cache slots that must not be read changes nothing"
    graph_may_lack: bool = True

    def observe(self, lab: Laboratory) -> Iterator[Pair]:
        """See `harness.parity.relations.base.Relation`."""
        with lab.session() as session:
            plan = lab.plan(session)
        buffers = [b for c in plan.caches if isinstance(c, StaticBuffers) for b in c.buffers if not b.rolls]
        growing = [pair for c in plan.caches if isinstance(c, GrowingKv) for pair in c.pairs]
        has_mask = lab.subject.topology.attention_mask_input is not None
        if not buffers and not (growing and has_mask):
            raise NotApplicableError(
                "Its growing caches have no mask that could hide a row."
                if growing
                else "No cache has slots that are not read."
            )
        if buffers:
            yield from _unwritten(lab, buffers)
        if growing and has_mask and not any(pair.windowed for pair in growing):
            yield from _hidden(lab, growing)


def _unwritten(lab: Laboratory, buffers: list[Buffer]) -> Iterator[Pair]:
    """Rows of buffers that no token has been written to."""
    with lab.session() as session:
        plan = lab.plan(session)
        start = plan.start(session, room=lab.script.room)
        start |= {b.input: _full(session, start[b.input].shape, b.dtype, CANARY) for b in buffers}
        found = Rows(session, lab, [Row(lab.script)], caches=start).decode(0)
    yield Pair("rows that are not written yet", written_rows(lab, plan), found, bitwise=True)


def _hidden(lab: Laboratory, pairs: list[GrowingPair]) -> Iterator[Pair]:
    """Rows that stand before the prompt and that the mask hides.

    That zeros there change nothing but rounding shows that the mask hides them; that a canary gives the very
    bits of the zeros shows that nothing reads them.
    """
    with lab.session() as session:
        plan = lab.plan(session)
        zeros = _with_hidden(session, lab, plan, pairs, 0)
        expected = written_rows(lab, plan)
    yield Pair(f"{PADDING} hidden rows of zeros", expected, zeros, bitwise=False, premise=True)
    with lab.session() as session:
        found = _with_hidden(session, lab, plan, pairs, CANARY)
    yield Pair(f"{PADDING} hidden rows of {CANARY}", zeros, found, bitwise=True)


def _with_hidden(
    session: Session, lab: Laboratory, plan: FeedPlan, pairs: list[GrowingPair], value: int
) -> Observation:
    start = plan.start(session, room=lab.script.room + PADDING)
    for pair in pairs:
        shape = (*pair.shape[: pair.axis], PADDING, *pair.shape[pair.axis + 1 :])
        start[pair.past] = _full(session, shape, pair.dtype, value)
    return Rows(session, lab, [Row(lab.script)], hidden=PADDING, caches=start).decode(0)


def _full(session: Session, shape: tuple[int, ...], dtype: str, value: int) -> TensorHandle:
    import numpy as np

    return session.place(np.full(shape, value, dtype=numpy_dtype(dtype)))
