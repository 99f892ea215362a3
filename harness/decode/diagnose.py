"""Where in a graph a number went wrong, asked of sessions that can look inside."""

from __future__ import annotations

from collections.abc import Sequence

from harness.decode.feeds import ExtraFeeds, plan_feeds
from harness.engines.base import DiagnosingSession, Session
from harness.errors import EngineFailedError
from harness.topology.spec import Topology

__all__ = ["first_non_finite"]


def first_non_finite(
    session: Session,
    topology: Topology,
    token_ids: Sequence[int],
    *,
    extra: ExtraFeeds | None = None,
    output: str | None = None,
) -> str | None:
    """Operator and node that first made an output infinite or NaN, in one pass over `token_ids`.

    None where the session cannot tell, where one pass fails, or where that output is finite: those of
    single steps may differ.

    Args:
        session: what ran.
        topology: the role of every port.
        token_ids: at least one.
        extra: values of inputs that the loop has none for.
        output: which one; the logits by default.

    Raises:
        NotDrivableError: the loop cannot feed this graph.
    """
    if not isinstance(session, DiagnosingSession):
        return None
    plan = plan_feeds(topology, session.inventory, extra=extra)
    if plan.tokens_a_call is not None and len(token_ids) > plan.tokens_a_call:
        return None
    feeds = plan.first_call(session, token_ids)
    try:
        return session.first_non_finite(feeds, (output or plan.logits,))
    except EngineFailedError:
        return None
