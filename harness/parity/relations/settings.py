"""Settings of an engine that change how it computes, and must not change what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.engines.base import OptionValue
from harness.engines.options import Choice
from harness.parity.relations.base import NotApplicableError, Pair
from harness.parity.relations.laboratory import Laboratory
from harness.parity.relations.observation import Observation

__all__ = ["GraphCapture", "Optimisation", "Threads"]

_THREADS = (1, 2, 3)
_EAGER, _CAPTURED = "eager", "captured"
_UNTIL_REPLAYED = 3


@dataclass(frozen=True, slots=True)
class Threads:
    """Other numbers of threads, which may cut a sum otherwise."""

    name: str = "threads"
    statement: str = "any number of threads gives the same"
    graph_may_lack: bool = False

    def observe(self, lab: Laboratory) -> Iterator[Pair]:
        """See `harness.parity.relations.base.Relation`."""
        current = _current(lab, "threads")
        for count in _THREADS:
            if count != current:
                yield _with(lab, "threads", count, bitwise=False)


@dataclass(frozen=True, slots=True)
class Optimisation:
    """Every other level of graph optimisation, which may fuse operators into others."""

    name: str = "optimisation"
    statement: str = "every level of graph optimisation gives the same"
    graph_may_lack: bool = False

    def observe(self, lab: Laboratory) -> Iterator[Pair]:
        """See `harness.parity.relations.base.Relation`."""
        current = _current(lab, "opt")
        option = lab.spec.engine.options["opt"]
        for level in option.choices if isinstance(option, Choice) else ():
            if level != current:
                yield _with(lab, "opt", level, bitwise=False)


@dataclass(frozen=True, slots=True)
class GraphCapture:
    """Work that is recorded once and replayed, against work that is launched anew at each call."""

    name: str = "graph-capture"
    statement: str = "a captured graph gives what eager launches give"
    graph_may_lack: bool = False

    def observe(self, lab: Laboratory) -> Iterator[Pair]:
        """See `harness.parity.relations.base.Relation`."""
        _current(lab, "graph")
        seen: dict[str, Observation] = {}
        for mode in (_EAGER, _CAPTURED):
            with lab.session(graph=mode) as session:
                if mode == _CAPTURED and session.info.mode != _CAPTURED:
                    raise NotApplicableError(
                        f"{lab.spec.name} was asked to capture, and runs this graph eager."
                    )
                # The first run of some shapes is eager, the second is captured, the third replayed.
                for _ in range(_UNTIL_REPLAYED):
                    seen[mode] = lab.follow(session, lab.script).whole()
        yield Pair("", seen[_EAGER], seen[_CAPTURED], bitwise=True)


def _current(lab: Laboratory, option: str) -> OptionValue:
    """What an option is set to.

    Raises:
        NotApplicableError: the engine has no such option.
    """
    declared = lab.spec.engine.options.get(option)
    if declared is None:
        raise NotApplicableError(f"{lab.spec.name} has no option {option!r}.")
    return lab.spec.options.get(option, declared.default)


def _with(lab: Laboratory, option: str, value: OptionValue, *, bitwise: bool) -> Pair:
    """The decode with another value of an option, against the one as it was asked for."""
    script = lab.script
    with lab.session(**{option: value}) as session:
        found = lab.follow(session, script).whole()
    return Pair(f"{option}={value}", lab.reference, found, bitwise=bitwise)
