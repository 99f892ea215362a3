"""Several sequences as rows of one batch: one call sees for each what it would see alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

from harness.decode.feeds import FeedPlan, plan_feeds
from harness.decode.prompts import check_prompt_ids, vocabulary_size
from harness.decode.trace import Trace
from harness.engines.answers import largest_of_rows
from harness.engines.base import BatchingSession, Session
from harness.errors import EngineFailedError
from harness.ports import PortInventory
from harness.topology.spec import Topology

__all__ = ["Continued", "one_pass_batch"]

Continued: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Token IDs of a prompt, and of what is to follow it; each at least one."""


def one_pass_batch(
    session: Session, topology: Topology, rows: Sequence[Continued], *, top_k: int = 5
) -> list[Trace] | None:
    """What `harness.decode.loop.one_pass_decode` does, for several prompts in one call.

    Shorter rows are filled up on the right with their own last token. A causal decoder sees nothing of that
    at the positions before; whether a graph is one, and keeps its rows apart, is for the caller to prove.

    Args:
        session: what runs.
        topology: the role of every port.
        rows: at least one.
        top_k: how many of the largest logits to keep at each step.

    Returns:
        a trace for each row, of its share of the time; None where the session knows no batches, where a port
        does not say which of its axes is the batch, where one pass gives no logits of all positions, and
        where the engine failed: why it did shows when the rows run one by one.

    Raises:
        NotDrivableError: the loop cannot feed this graph.
        InputError: a row is empty, an ID lies outside the vocabulary, or a cache has no room.
    """
    plan = plan_feeds(topology, session.inventory)
    axes = _batch_axes(plan, topology, session.inventory)
    if not isinstance(session, BatchingSession) or axes is None or not plan.one_pass:
        return None
    vocabulary = vocabulary_size(session.inventory, topology)
    checked = [
        (check_prompt_ids(prompt, vocabulary), check_prompt_ids(follow, vocabulary))
        for prompt, follow in rows
    ]
    for prompt, follow in checked:
        plan.check_room(len(prompt), len(follow))
    fed = [(*prompt, *follow[:-1]) for prompt, follow in checked]
    longest = max(len(tokens) for tokens in fed)
    places = [
        (row, position)
        for row, (prompt, _) in enumerate(checked)
        for position in range(len(prompt) - 1, len(fed[row]))
    ]
    began = time.perf_counter()
    try:
        padded = [(*tokens, *tokens[-1:] * (longest - len(tokens))) for tokens in fed]
        feeds = plan.first_call(session, padded[0])
        for name, handle in feeds.items():
            axis = axes[name]
            if name == topology.token_input:
                parts = [plan.inputs(session, tokens, past=0)[name] for tokens in padded]
                feeds[name] = session.stacked(parts, 0)
            elif axis is not None:
                feeds[name] = session.stacked([handle] * len(padded), axis)
        logits = session.run(feeds, (plan.logits,))[plan.logits]
        if tuple(logits.shape[:-1]) != (len(fed), longest):
            return None
        engine = session.info.engine
        steps = iter(largest_of_rows(session, logits, k=top_k, places=places, engine=engine))
    except EngineFailedError:
        return None
    a_token = (time.perf_counter() - began) / sum(len(tokens) for tokens in fed)
    return [
        Trace(prompt, follow, tuple(next(steps) for _ in follow), a_token * len(tokens), session.info)
        for (prompt, follow), tokens in zip(checked, fed, strict=True)
    ]


def _batch_axes(plan: FeedPlan, topology: Topology, inventory: PortInventory) -> dict[str, int | None] | None:
    """For each input the axis that counts rows, None for one that is the same for all of them.

    None where the graph does not take any number of rows, or does not say in which axis. Lengths and
    positions may have none, as all rows are equally long; a cache without one would mix them.
    """
    ports = {port.name: port.shape for port in (*inventory.inputs, *inventory.outputs)}
    token = ports.get(topology.token_input or "")
    symbol = token[0] if token is not None and len(token) == 2 else None
    if not isinstance(symbol, str):
        return None
    shared = {call.name for call in plan.calls}
    caches = [name for cache in plan.caches for name in (*cache.inputs, *cache.outputs)]
    axes: dict[str, int | None] = {}
    for name in (*shared, *caches, plan.logits):
        shape = ports.get(name)
        if shape is None or shape.count(symbol) > 1:
            return None
        axes[name] = shape.index(symbol) if symbol in shape else None
        if axes[name] is None and (name not in shared or None in shape):
            return None
    return axes
