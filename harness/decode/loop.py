"""The decode loop: prefill, then one token a call, with every cache threaded by topology.

One loop, two choosers: `greedy_decode` follows the engine's own logits, `forced_decode` follows given
tokens and keeps the logits it saw. `one_pass_decode` sees the same in a single call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from harness.decode.caches import CacheShapeError
from harness.decode.feeds import ExtraFeeds, FeedPlan, plan_feeds
from harness.decode.prompts import check_prompt_ids, vocabulary_size
from harness.decode.trace import Trace, TraceFailure
from harness.engines.base import Session, TensorHandle, TopLogits
from harness.errors import EngineFailedError, InputError, NotDrivableError
from harness.topology.spec import Topology

__all__ = ["StepObserver", "forced_decode", "greedy_decode", "one_pass_decode"]

StepObserver: TypeAlias = Callable[[int, int], None]
"""Called after each step with its index (0 is the prefill) and the token that follows it."""


def greedy_decode(
    session: Session,
    topology: Topology,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    top_k: int = 5,
    on_step: StepObserver | None = None,
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
        steps = session.top_logits(logits, k=top_k, positions=range(len(prompt) - 1, len(fed)))
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
) -> Trace:
    plan = plan_feeds(topology, session.inventory, extra=extra)
    prompt = check_prompt_ids(prompt_ids, vocabulary_size(session.inventory, topology))
    plan.check_room(len(prompt), length)
    run = _Run(session, plan, top_k, room=len(prompt) + length - 1)
    tokens: list[int] = []
    steps: list[TopLogits] = []
    failure: TraceFailure | None = None
    new: tuple[int, ...] = prompt
    seconds = 0.0
    for step in range(length):
        began = time.perf_counter()
        try:
            top = run.feed(new)
        except EngineFailedError as error:
            failure = TraceFailure(error.kind, step, error.message, error.details)
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
    return Trace(prompt, tuple(tokens), tuple(steps), seconds, session.info, failure)


class _Run:
    """One decode in progress: what is carried between two calls."""

    def __init__(self, session: Session, plan: FeedPlan, top_k: int, *, room: int) -> None:
        self._session = session
        self._plan = plan
        self._top_k = top_k
        self._room = room
        self._seen = 0
        self._caches: dict[str, TensorHandle] | None = None
        self._constants: dict[str, TensorHandle] | None = None

    def feed(self, new: Sequence[int]) -> TopLogits:
        """Run the token IDs `new` after all earlier ones, and reduce the logits of the last one.

        A graph that takes a few tokens a call gets them in turn; only the last call gives logits.

        Raises:
            EngineFailedError: the engine failed, or a cache came back in a shape that it cannot have.
            NotDrivableError: the caches do not grow as the topology says, from the first call on.
        """
        plan = self._plan
        most = plan.tokens_a_call or len(new)
        for first in range(0, len(new) - most, most):
            self._call(new[first : first + most], plan.carried)
        outputs = self._call(new[(len(new) - 1) // most * most :], plan.outputs)
        (top,) = self._session.top_logits(outputs[plan.logits], k=self._top_k, positions=(-1,))
        return top

    def _call(self, new: Sequence[int], wanted: Sequence[str]) -> dict[str, TensorHandle]:
        session, plan, past = self._session, self._plan, self._seen
        if self._constants is None:
            self._constants = plan.constants(session)
        if self._caches is None:
            self._caches = plan.start(session, room=self._room)
        fed = self._constants | self._caches | plan.inputs(session, new, past=past)
        outputs = session.run(fed, wanted)
        self._seen += len(new)
        try:
            self._caches = plan.advance(outputs, fed=fed, past=past, tokens=self._seen)
        except CacheShapeError as error:
            if past == 0:
                raise NotDrivableError(
                    f"The decode loop cannot drive this graph: {error}.",
                    next_action="Declare the cache's kind in inference_metadata.yaml, or export it with KV "
                    "that grows by one row for each token.",
                    ports=(error.port,),
                ) from error
            raise EngineFailedError(
                f"{session.info.engine}: {error}.",
                kind="crashed",
                next_action="Run the model on another engine to see which of graph and engine is wrong.",
            ) from error
        return outputs
