"""The same decode once more: nothing that ran before, or runs in between, may show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from harness.engines.base import Session, TensorHandle
from harness.parity.relations.base import NotApplicableError, Pair
from harness.parity.relations.intercepting import Feeds, Intercepted, Names
from harness.parity.relations.laboratory import Laboratory
from harness.parity.relations.observation import Moment

__all__ = ["InterleavedPrompts", "ReusedBuffers", "Rewind", "RunToRun", "SecondGeneration"]

_SHORT = 2
"""Tokens of the short prompt that runs before."""


@dataclass(frozen=True, slots=True)
class SecondGeneration:
    """A session is asked for the same decode twice."""

    name: str = "second-generation"
    statement: str = "the second decode of a prompt on a session equals the first: states are reset"
    graph_may_lack: bool = False

    def observe(self, lab: Laboratory) -> Iterator[Pair]:
        """See `harness.parity.relations.base.Relation`."""
        script = lab.script
        with lab.session() as session:
            first = lab.follow(session, script).whole()
            second = lab.follow(session, script).whole()
        yield Pair("", first, second, bitwise=True)


@dataclass(frozen=True, slots=True)
class RunToRun:
    """Every call is run twice on the very same tensors."""

    name: str = "run-to-run"
    statement: str = "the same call on the same tensors gives the same bits"
    graph_may_lack: bool = False

    def observe(self, lab: Laboratory) -> Iterator[Pair]:
        """See `harness.parity.relations.base.Relation`."""
        script = lab.script
        firsts: dict[int, Moment] = {}
        latest: Mapping[str, TensorHandle] = {}

        def run_twice(session: Session, feeds: Feeds, outputs: Names) -> dict[str, TensorHandle]:
            nonlocal latest
            latest = session.run(feeds, outputs)
            return session.run(feeds, outputs)

        with lab.session() as session:
            follower = lab.follow(Intercepted(session, run_twice), script)
            for step in range(script.steps):
                if step:
                    follower.step(step)
                else:
                    follower.begin()
                firsts[step] = follower.look(latest, step)
        yield Pair("", firsts, follower.seen, bitwise=True)


@dataclass(frozen=True, slots=True)
class InterleavedPrompts:
    """Two decodes take turns on one session."""

    name: str = "interleaved-prompts"
    statement: str = "a decode is the same with the calls of another prompt between its own"
    graph_may_lack: bool = False

    def observe(self, lab: Laboratory) -> Iterator[Pair]:
        """See `harness.parity.relations.base.Relation`."""
        if lab.subject.keeps_first_call:
            raise NotApplicableError(
                "The package's graphs keep values of the first call: a session has one decode at a time."
            )
        script = lab.script
        with lab.session() as session:
            mine = lab.follow(session, script)
            other = lab.follow(session, lab.made_up(len(script.prompt)))
            mine.begin()
            other.begin()
            for step in range(1, script.steps):
                mine.step(step)
                other.step(step)
        yield Pair("", lab.reference, mine.seen, bitwise=True)


@dataclass(frozen=True, slots=True)
class ReusedBuffers:
    """Buffers that an engine keeps have been longer, and shorter, than they must be now."""

    name: str = "reused-buffers"
    statement: str = "a decode is the same after a longer and a shorter one on its session"
    graph_may_lack: bool = False

    def observe(self, lab: Laboratory) -> Iterator[Pair]:
        """See `harness.parity.relations.base.Relation`."""
        script = lab.script
        if script.room == len(script.prompt):
            raise NotApplicableError("One new token leaves no room for a prompt that is longer.")
        with lab.session() as session:
            # As long as the decode will be: every cache and every table of positions has room for that.
            lab.follow(session, lab.made_up(script.room, number=1, steps=1)).whole()
            short = min(_SHORT, len(script.prompt))
            lab.follow(session, lab.made_up(short, number=2, steps=script.steps)).whole()
            found = lab.follow(session, script).whole()
        yield Pair("", lab.reference, found, bitwise=True)


@dataclass(frozen=True, slots=True)
class Rewind:
    """A decode goes astray, and back to where it had been."""

    name: str = "rewind"
    statement: str = "a decode that is rewound to a snapshot after a detour goes on as if nothing had been"
    graph_may_lack: bool = False

    def observe(self, lab: Laboratory) -> Iterator[Pair]:
        """See `harness.parity.relations.base.Relation`."""
        script = lab.script
        if script.steps == 1:
            raise NotApplicableError("One new token leaves nothing to go back to.")
        detour = lab.made_up(1).tokens or ()
        with lab.session() as session:
            follower = lab.follow(session, script)
            follower.begin()
            start = follower.decoding.snapshot()
            for token in detour[: script.last]:
                follower.decoding.feed((token,))
            follower.decoding.rewind(start)
            found = follower.rest()
        yield Pair("", lab.reference, found, bitwise=True)
