"""The candidate's side of a check: sessions that are opened anew after each failure, and decodes on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from harness.decode.loop import EndObserver, StepObserver, greedy_decode
from harness.decode.plan import ExtraFeeds
from harness.decode.trace import Trace
from harness.engines.base import Session, SessionInfo
from harness.engines.registry import EngineSpec
from harness.ports import PortInventory
from harness.topology.spec import Topology

__all__ = ["Candidate", "CandidateSide", "Prompt"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to continue.

    Attributes:
        token_ids: what the decoder is fed.
        text: what the IDs came from; None for a prompt given as IDs.
        source_ids: what a text encoder is fed, and the decoder goes by; empty for any other model.
        extra: what is fed at every call, by port: what encoders take.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    source_ids: tuple[int, ...] = ()
    extra: ExtraFeeds = field(default_factory=dict)


class CandidateSide(Protocol):
    """What a check asks of its candidate: decodes, whether they happen now or happened another day."""

    @property
    def name(self) -> str:
        """Name of the engine, without options."""

    @property
    def inventory(self) -> PortInventory:
        """The ports as the engine reports them; the first to be asked opens the engine.

        Raises:
            ParityError: as `harness.engines.base.Engine.open`.
        """

    @property
    def info(self) -> SessionInfo:
        """What runs and how."""

    @property
    def seconds(self) -> float:
        """How long it took to open the session."""

    def decode(self, prompt: Prompt, *, on_step: StepObserver | None = None) -> Trace:
        """Continue a prompt, from empty KV and zero states; see `Candidate.decode`."""

    def close(self) -> None:
        """Free what is held."""


class Candidate:
    """Decodes greedily on the engine under test.

    A session that has failed is never used again.
    """

    def __init__(
        self,
        spec: EngineSpec,
        model: Path,
        topology: Topology,
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        top_k: int,
    ) -> None:
        """Nothing is opened yet; arguments as in `harness.decode.loop.greedy_decode`."""
        self._spec = spec
        self._model = model
        self._topology = topology
        self._max_new_tokens = max_new_tokens
        self._stop_ids = tuple(stop_ids)
        self._top_k = top_k
        self._session: Session | None = None
        self._seconds = 0.0

    @property
    def name(self) -> str:
        """Name of the engine, without options."""
        return self._spec.name

    @property
    def inventory(self) -> PortInventory:
        """The ports as the engine reports them; raises as `session`."""
        return self.session.inventory

    @property
    def info(self) -> SessionInfo:
        """What runs and how; raises as `session`."""
        return self.session.info

    @property
    def seconds(self) -> float:
        """How long it took to open the session."""
        return self._seconds

    @property
    def session(self) -> Session:
        """The open session; opened now if there is none.

        Raises:
            ParityError: as `harness.engines.base.Engine.open`.
        """
        if self._session is None:
            began = time.perf_counter()
            self._session = self._spec.open(self._model)
            self._seconds = time.perf_counter() - began
        return self._session

    def decode(
        self, prompt: Prompt, *, on_step: StepObserver | None = None, on_end: EndObserver | None = None
    ) -> Trace:
        """Continue a prompt, from empty KV and zero states; observers as in `greedy_decode`.

        An engine that fails on the way leaves what came before; the next decode gets a new session.

        Raises:
            ParityError: as `harness.engines.base.Engine.open`, where a session must be opened.
            NotDrivableError, InputError: as `harness.decode.loop.greedy_decode`.
        """
        trace = greedy_decode(
            self.session,
            self._topology,
            prompt.token_ids,
            max_new_tokens=self._max_new_tokens,
            stop_ids=self._stop_ids,
            top_k=self._top_k,
            extra=prompt.extra,
            on_step=on_step,
            on_end=on_end,
        )
        if trace.failure is not None:
            self.close()
        return trace

    def close(self) -> None:
        """Free the session, if there is one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
