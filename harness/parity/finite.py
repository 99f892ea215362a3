"""What the oracle computes must be finite: its logits, and what it carries from call to call."""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.decode.diagnose import first_non_finite
from harness.decode.feeds import plan_feeds
from harness.decode.plan import ExtraFeeds
from harness.decode.trace import Trace
from harness.engines.base import Session, WatchingSession
from harness.errors import InvalidRunError
from harness.topology.spec import Topology

__all__ = ["not_finite", "require_finite", "watch"]


def watch(session: Session, topology: Topology, extra: ExtraFeeds | None = None) -> None:
    """Let the next runs look at what is carried from call to call, whether or not it is asked for."""
    if isinstance(session, WatchingSession):
        session.watch(plan_feeds(topology, session.inventory, extra=extra).carried)


def not_finite(session: Session) -> Sequence[str]:
    """The outputs that were looked at and are not finite."""
    return session.not_finite() if isinstance(session, WatchingSession) else ()


def require_finite(
    trace: Trace, session: Session, topology: Topology, extra: ExtraFeeds | None = None
) -> Trace:
    """The trace, of runs that were watched, if it can be trusted.

    Raises:
        InvalidRunError: the oracle failed, or something is not finite: with the first node to make it so.
    """
    if trace.failure is not None:
        raise InvalidRunError(
            f"The oracle failed at step {trace.failure.step}: {trace.failure.message}",
            next_action="Choose another oracle with --oracle, or report what it lacks.",
        )
    for position, step in enumerate(trace.steps):
        if step.has_nan or not math.isfinite(step.values[0]):
            fed = (*trace.prompt_ids, *trace.token_ids[:position])
            node = first_non_finite(session, topology, fed, extra=extra)
            raise _error(f"logits are not finite at generated position {position}", node)
    for name in not_finite(session):
        fed = (*trace.prompt_ids, *trace.token_ids[:-1])
        node = first_non_finite(session, topology, fed, extra=extra, output=name)
        raise _error(f"{name} is not finite behind generated position {len(fed) - 1}", node)
    return trace


def _error(what: str, node: str | None) -> InvalidRunError:
    first = "" if node is None else f" The first node to make it so is {node}."
    return InvalidRunError(
        f"The oracle's {what}: such an oracle proves nothing.{first}",
        next_action="Check the exported weights for overflow; try oracle:precision=float64.",
    )
