"""The decode loop: prefill, then one token a call, with every cache threaded by topology.

One loop, two choosers: `greedy_decode` follows the engine's own logits, `forced_decode` follows given
tokens and keeps the logits it saw. `one_pass_decode` sees the same in a single call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from harness.decode.feeds import ExtraFeeds, plan_feeds
from harness.decode.prompts import check_prompt_ids, vocabulary_size
from harness.decode.stepping import Decoding
from harness.decode.trace import Trace, TraceFailure
from harness.engines.answers import largest
from harness.engines.base import Session, TensorHandle, TopLogits
from harness.errors import EngineFailedError, InputError
from harness.topology.spec import Topology

__all__ = ["EndObserver", "StepObserver", "forced_decode", "greedy_decode", "one_pass_decode"]

StepObserver: TypeAlias = Callable[[int, int], None]
"""Called after each step with its index (0 is the prefill) and the token that follows it."""

EndObserver: TypeAlias = Callable[[Session, Mapping[str, TensorHandle]], None]
"""Called with what the last call gave, by output: the logits and every cache. Not where an engine failed."""


def greedy_decode(
    session: Session,
    topology: Topology,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    top_k: int = 5,
    on_step: StepObserver | None = None,
    on_end: EndObserver | None = None,
    extra: ExtraFeeds | None = None,
) -> Trace:
    """Continue a prompt with the token of the largest logit, again and again.

    Every decode starts from empty KV and zero states, whatever the session ran before. An engine that
    fails on the way leaves a trace with what came before, and with the failure.

    Args:
        session: what runs.
        topology: the role of every port.
        prompt_ids: token IDs, at least one.
        max_new_tokens: how many tokens to decode, at least one.
        stop_ids: tokens after which to stop; the one that stops is part of the trace.
        top_k: how many of the largest logits to keep at each step.
        on_step: told of each token.
        on_end: shown the caches; an engine that fails in it has failed after the last step.
        extra: values of inputs that the loop has none for, fed at every call.

    Raises:
        NotDrivableError: the loop cannot feed this graph.
        InputError: the prompt is empty, or an ID lies outside the vocabulary; or `max_new_tokens` is
            below one.
    """
    if max_new_tokens < 1:
        raise InputError(
            f"max_new_tokens={max_new_tokens} must be at least 1.",
            next_action="Ask for at least one new token.",
        )
    return _decode(
        session,
        topology,
        prompt_ids,
        length=max_new_tokens,
        choose=lambda _, top: top.argmax,
        stop_ids=frozenset(stop_ids),
        top_k=top_k,
        on_step=on_step,
        on_end=on_end,
        extra=extra,
    )


def forced_decode(
    session: Session,
    topology: Topology,
    prompt_ids: Sequence[int],
    continuation: Sequence[int],
    *,
    top_k: int = 5,
    on_step: StepObserver | None = None,
    extra: ExtraFeeds | None = None,
) -> Trace:
    """Follow `continuation`, and keep the largest logits before each of its tokens.

    `steps[i]` of the trace is what the engine thought after the prompt and `continuation[:i]`; as long
    as its argmax is `continuation[i]`, this is the engine's own greedy decode.

    Args:
        session: what runs.
        topology: the role of every port.
        prompt_ids: token IDs, at least one.
        continuation: token IDs to follow, at least one; the last is never fed.
        top_k: how many of the largest logits to keep at each step.
        on_step: told of each token.
        extra: values of inputs that the loop has none for, fed at every call.

    Raises:
        NotDrivableError: the loop cannot feed this graph.
        InputError: the prompt or the continuation is empty, or an ID lies outside the vocabulary.
    """
    follow = check_prompt_ids(continuation, vocabulary_size(session.inventory, topology))
    return _decode(
        session,
        topology,
        prompt_ids,
        length=len(follow),
        choose=lambda step, _: follow[step],
        stop_ids=frozenset(),
        top_k=top_k,
        on_step=on_step,
        extra=extra,
    )


def one_pass_decode(
    session: Session,
    topology: Topology,
    prompt_ids: Sequence[int],
    continuation: Sequence[int],
    *,
    top_k: int = 5,
    extra: ExtraFeeds | None = None,
) -> Trace | None:
    """What `forced_decode` does, in one call over the prompt and `continuation[:-1]`.

    A causal decoder sees at each position what it sees step by step. Only the logits are asked for, so
    no cache is kept. An engine that fails leaves a trace without tokens, and with the failure.

    Returns:
        the trace; None where the graph gives the logits of the last position alone, takes fewer tokens a
        call, or keeps its cache otherwise than it computed it (rounded, or a window of it).

    Raises:
        NotDrivableError: the loop cannot feed this graph.
        InputError: the prompt or the continuation is empty, or an ID lies outside the vocabulary.
    """
    vocabulary = vocabulary_size(session.inventory, topology)
    plan = plan_feeds(topology, session.inventory, extra=extra)
    prompt = check_prompt_ids(prompt_ids, vocabulary)
    follow = check_prompt_ids(continuation, vocabulary)
    plan.check_room(len(prompt), len(follow))
    if not plan.one_pass:
        return None
    fed = (*prompt, *follow[:-1])
    began = time.perf_counter()
    try:
        feeds = plan.first_call(session, fed)
        logits = session.run(feeds, (plan.logits,))[plan.logits]
        if len(logits.shape) != 3 or logits.shape[1] != len(fed):
            return None
        steps = largest(session, logits, k=top_k, positions=range(len(prompt) - 1, len(fed)))
    except EngineFailedError as error:
        failure = TraceFailure(error.kind, 0, error.message, error.details)
        return Trace(prompt, (), (), time.perf_counter() - began, session.info, failure)
    return Trace(prompt, follow, tuple(steps), time.perf_counter() - began, session.info)


def _decode(
    session: Session,
    topology: Topology,
    prompt_ids: Sequence[int],
    *,
    length: int,
    choose: Callable[[int, TopLogits], int],
    stop_ids: frozenset[int],
    top_k: int,
    on_step: StepObserver | None,
    extra: ExtraFeeds | None,
    on_end: EndObserver | None = None,
) -> Trace:
    plan = plan_feeds(topology, session.inventory, extra=extra)
    prompt = check_prompt_ids(prompt_ids, vocabulary_size(session.inventory, topology))
    plan.check_room(len(prompt), length)
    decoding = Decoding(session, plan, room=len(prompt) + length - 1)
    tokens: list[int] = []
    steps: list[TopLogits] = []
    failure: TraceFailure | None = None
    new: tuple[int, ...] = prompt
    seconds = 0.0
    given: Mapping[str, TensorHandle] = {}
    for step in range(length):
        began = time.perf_counter()
        given = {}  # no call is made with the logits of the one before still held
        try:
            given = decoding.feed(new)
            (top,) = largest(session, given[plan.logits], k=top_k, positions=(-1,))
        except EngineFailedError as error:
            failure = TraceFailure(error.kind, step, error.message, error.details, error.ports)
            break
        finally:
            seconds += time.perf_counter() - began
        token = choose(step, top)
        tokens.append(token)
        steps.append(top)
        if on_step is not None:
            on_step(step, token)
        if token in stop_ids:
            break
        new = (token,)
    if on_end is not None and failure is None:
        try:
            on_end(session, given)
        except EngineFailedError as error:
            failure = TraceFailure(error.kind, len(tokens), error.message, error.details)
    return Trace(prompt, tuple(tokens), tuple(steps), seconds, session.info, failure)
