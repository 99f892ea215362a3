"""The same tokens in other calls: all at once, in chunks, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from harness.decode.plan import FeedPlan
from harness.parity.relations.base import NotApplicableError, Pair
from harness.parity.relations.laboratory import Laboratory
from harness.parity.relations.observation import Script

__all__ = ["ChunkedPrefill", "Recompute", "TokenByToken"]

_CHUNKS = 3
"""Into how many chunks a prompt is cut at most."""

_LEAST = 2
"""Tokens of a chunk: one is `TokenByToken`'s."""


@dataclass(frozen=True, slots=True)
class ChunkedPrefill:
    """The prompt goes in by chunks of several tokens."""

    name: str = "chunked-prefill"
    statement: str = "a prompt fed in chunks gives what it gives whole"
    graph_may_lack: bool = True

    def observe(self, lab: Laboratory) -> Iterator[Pair]:
        """See `harness.parity.relations.base.Relation`."""
        script = lab.script
        prompt = script.prompt
        count = min(_CHUNKS, len(prompt) // _LEAST)
        if count < 2:
            raise NotApplicableError(
                f"{_tokens(len(prompt))} of prompt cannot be cut into chunks of several."
            )
        bounds = [len(prompt) * number // count for number in range(count + 1)]
        chunks = [prompt[first:end] for first, end in pairwise(bounds)]
        with lab.session() as session:
            _require_any_number(lab.plan(session))
            follower = lab.follow(session, script)
            follower.begin(chunks)
            found = follower.rest()
        yield Pair(
            f"chunks of {', '.join(str(len(chunk)) for chunk in chunks)}", lab.reference, found, bitwise=False
        )


@dataclass(frozen=True, slots=True)
class TokenByToken:
    """The prompt goes in one token a call."""

    name: str = "token-by-token"
    statement: str = "a prompt fed token by token gives what it gives whole"
    graph_may_lack: bool = True

    def observe(self, lab: Laboratory) -> Iterator[Pair]:
        """See `harness.parity.relations.base.Relation`."""
        script = lab.script
        if len(script.prompt) == 1:
            raise NotApplicableError("A prompt of one token is fed token by token already.")
        with lab.session() as session:
            _require_any_number(lab.plan(session))
            follower = lab.follow(session, script)
            follower.begin([(token,) for token in script.prompt])
            found = follower.rest()
        yield Pair("", lab.reference, found, bitwise=False)


@dataclass(frozen=True, slots=True)
class Recompute:
    """The prompt and all tokens after it go in as one call, on fresh caches."""

    name: str = "recompute"
    statement: str = "going on from the caches gives what computing everything anew gives"
    graph_may_lack: bool = True

    def observe(self, lab: Laboratory) -> Iterator[Pair]:
        """See `harness.parity.relations.base.Relation`."""
        script = lab.script
        if script.steps == 1:
            raise NotApplicableError(
                "One new token is computed from the prompt alone, with nothing to go on from."
            )
        assert script.tokens is not None
        whole = Script((*script.prompt, *script.tokens[:-1]), 1)
        with lab.session() as session:
            _require_any_number(lab.plan(session))
            (moment,) = lab.follow(session, whole).whole().values()
        yield Pair("", lab.reference, {script.last: moment}, bitwise=False)


def _require_any_number(plan: FeedPlan) -> None:
    if plan.tokens_a_call is not None:
        raise NotApplicableError(f"The graph takes {_tokens(plan.tokens_a_call)} a call.")


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
