"""Whose fault it is that a cache came back in a shape in which it cannot be fed again.

An engine may have shaped it so, or the graph has: then any engine does, and the topology does not fit. The
oracle decides, after the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.decode.loop import forced_decode
from harness.decode.plan import ExtraFeeds
from harness.decode.trace import Trace
from harness.engines.registry import EngineSpec
from harness.errors import EngineFailedError, NotDrivableError
from harness.topology.spec import Topology

__all__ = ["refusal_after", "refusal_of"]


def refusal_of(
    trace: Trace, *, oracle: EngineSpec, model: Path, topology: Topology, extra: ExtraFeeds | None = None
) -> NotDrivableError | None:
    """Why the graph of a decode that failed cannot be driven; None where the engine alone is at fault.

    Args:
        trace: the decode.
        oracle: runs in a fresh session, and only where a cache came back in a wrong shape.
        model: the graph file.
        topology: of the graph.
        extra: what is fed at every call, by port.
    """
    if trace.failure is None or not trace.failure.ports:
        return None
    return refusal_after(
        trace.prompt_ids, trace.token_ids, oracle=oracle, model=model, topology=topology, extra=extra
    )


def refusal_after(
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    *,
    oracle: EngineSpec,
    model: Path,
    topology: Topology,
    extra: ExtraFeeds | None = None,
) -> NotDrivableError | None:
    """Why a graph cannot be driven from a prompt along these tokens, and to the next one; None where it can.

    Whatever else keeps the oracle from it says nothing of the graph. Arguments as of `refusal_of`.
    """
    try:
        session = oracle.open(model)
    except EngineFailedError:
        return None
    try:
        follow = (*token_ids, 0)  # the last one is never fed
        failure = forced_decode(session, topology, prompt_ids, follow, top_k=1, extra=extra).failure
    finally:
        session.close()
    if failure is None or not failure.ports:
        return None
    shapes = failure.message.removeprefix(f"{session.info.engine}: ")
    return NotDrivableError(
        f"The decode loop cannot drive this graph: at step {failure.step}, {shapes}",
        next_action="Declare the cache's kind in inference_metadata.yaml, or export it with KV "
        "that grows by one row for each token.",
        ports=failure.ports,
    )
