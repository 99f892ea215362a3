"""Caches that stay where the engine put them, against caches that travel through the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.engines.base import Session, TensorHandle
from harness.parity.relations.base import Pair
from harness.parity.relations.intercepting import Feeds, Intercepted, Names
from harness.parity.relations.laboratory import Laboratory

__all__ = ["CopiedFeeds"]


@dataclass(frozen=True, slots=True)
class CopiedFeeds:
    """What a call gives is copied to the host and handed over anew, as callers without binding do."""

    name: str = "copied-feeds"
    statement: str = "caches that stay bound give what caches copied through the host at each call give"
    graph_may_lack: bool = False

    def observe(self, lab: Laboratory) -> Iterator[Pair]:
        """See `harness.parity.relations.base.Relation`."""
        script = lab.script
        with lab.session() as session:
            copying = Intercepted(session, _run_and_copy)
            found = lab.follow(copying, script).whole()
        yield Pair("", lab.reference, found, bitwise=True)


def _run_and_copy(session: Session, feeds: Feeds, outputs: Names) -> dict[str, TensorHandle]:
    given = session.run(feeds, outputs)
    return {name: session.place(session.copy_out(handle)) for name, handle in given.items()}
