"""A prompt alone against the same prompt in a batch, in any row, and behind padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.decode.plan import FeedPlan
from harness.parity.relations.base import NotApplicableError, Pair
from harness.parity.relations.laboratory import Laboratory
from harness.parity.relations.observation import Observation
from harness.parity.relations.rows import Row, Rows, trimmed

__all__ = ["PADDING", "Batch", "LeftPadding", "written_rows"]

_ROWS = 3
PADDING = 3
"""Tokens of padding, and rows of a cache that are hidden."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The prompt with others beside it, of the same length, in each row in turn."""

    name: str = "batch"
    statement: str = "a prompt alone gives what it gives in any row of a batch"
    graph_may_lack: bool = True

    def observe(self, lab: Laboratory) -> Iterator[Pair]:
        """See `harness.parity.relations.base.Relation`."""
        script = lab.script
        others = [Row(lab.made_up(len(script.prompt), number=number)) for number in range(1, _ROWS)]
        for mine in range(_ROWS):
            rows = [*others[:mine], Row(script), *others[mine:]]
            with lab.session() as session:
                found = Rows(session, lab, rows).decode(mine)
                expected = written_rows(lab, lab.plan(session))
            yield Pair(f"row {mine} of {_ROWS}", expected, found, bitwise=False)


@dataclass(frozen=True, slots=True)
class LeftPadding:
    """The prompt beside a longer one, padded on the left where the mask hides it."""

    name: str = "left-padding"
    statement: str = "a prompt alone gives what it gives behind padding that the mask hides"
    graph_may_lack: bool = True

    def observe(self, lab: Laboratory) -> Iterator[Pair]:
        """See `harness.parity.relations.base.Relation`."""
        script = lab.script
        if lab.subject.topology.attention_mask_input is None:
            raise NotApplicableError("The graph has no attention mask.")
        padded = Row(script, PADDING)
        longer = Row(lab.made_up(len(script.prompt) + PADDING, number=3))
        with lab.session() as session:
            plan = lab.plan(session)
            require_room(lab, plan)
            try:
                rows, label = Rows(session, lab, [longer, padded]), "beside a longer prompt"
            except NotApplicableError:
                rows, label = Rows(session, lab, [padded]), "alone"
            found = rows.decode(1 if label != "alone" else 0)
            expected = written_rows(lab, plan)
        yield Pair(f"{PADDING} tokens of padding, {label}", expected, found, bitwise=False)


def require_room(lab: Laboratory, plan: FeedPlan) -> None:
    """Refuse to hide rows where a cache of fixed size has none to spare.

    Raises:
        NotApplicableError: naming the cache.
    """
    room = plan.room
    if room is not None and lab.script.room + PADDING > room.tokens:
        raise NotApplicableError(
            f"{room.port} holds {room.tokens} tokens, and the decode with {PADDING} more takes "
            f"{lab.script.room + PADDING}."
        )


def written_rows(lab: Laboratory, plan: FeedPlan) -> Observation:
    """The reference, without rows of caches that no token was written to."""
    first = len(lab.script.prompt)
    return {
        step: replace(moment, states=trimmed(plan, moment.states, total=first + step))
        for step, moment in lab.reference.items()
    }
