"""Any installed engine, its sessions each in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.engines.base import Availability, Engine, EngineOption, OptionValue, Session
from harness.engines.isolated.answers import opened_in
from harness.engines.isolated.limits import Limits, RunClock
from harness.engines.isolated.process import Worker
from harness.engines.isolated.session import IsolatedSession
from harness.engines.options import complete
from harness.engines.registry import EngineSpec, reference_of
from harness.events import CandidateProcess

__all__ = ["IsolatedEngine", "can_isolate", "isolated", "process_of"]


@dataclass(frozen=True, slots=True)
class IsolatedEngine:
    """An engine whose sessions live in worker processes; everything else is the engine's own.

    Attributes:
        inner: the engine.
        reference: where a worker finds it, as `module:attribute`.
        limits: what it may take.
        clock: what it has taken, over all its sessions.
    """

    inner: Engine
    reference: str
    limits: Limits = field(default_factory=Limits)
    clock: RunClock = field(default_factory=RunClock)

    @property
    def name(self) -> str:
        """Name of the engine."""
        return self.inner.name

    @property
    def description(self) -> str:
        """One line on the engine."""
        return self.inner.description

    @property
    def options(self) -> Mapping[str, EngineOption]:
        """The options of the engine."""
        return self.inner.options

    def availability(self) -> Availability:
        """Whether the engine can be used here; looked at in this process."""
        return self.inner.availability()

    def open(self, model: Path, options: Mapping[str, OptionValue]) -> Session:
        """Load `model` in a new process; see `harness.engines.base.Engine.open`.

        Raises:
            EngineFailedError: also where the process died, took too long or too much memory.
        """
        values = complete(self.name, self.options, options)
        given = {name: values[name] for name in options}
        worker = Worker(self.name, limits=self.limits, clock=self.clock)
        try:
            opened = worker.ask(
                "loading the graph",
                {
                    "ask": "open",
                    "name": self.name,
                    "engine": self.reference,
                    "model": str(model),
                    "options": given,
                },
                opened_in,
            )
            return IsolatedSession(worker, opened)
        except BaseException:
            worker.close()
            raise


def can_isolate() -> bool:
    """Whether this system has what isolation needs: descriptors that a new process inherits, and signals."""
    return sys.platform != "win32"


def isolated(spec: EngineSpec, limits: Limits) -> EngineSpec:
    """The same engine with the same options, each session in a process of its own.

    An engine that no entry point leads to stays as it is: a worker could not find it.
    """
    reference = reference_of(spec.name)
    if reference is None:
        return spec
    return EngineSpec(IsolatedEngine(spec.engine, reference, limits), spec.options)


def process_of(spec: EngineSpec) -> CandidateProcess:
    """Whether the sessions of an engine live in worker processes or in this one."""
    return "isolated" if isinstance(spec.engine, IsolatedEngine) else "in-process"
