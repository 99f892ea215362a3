"""The candidate's side of a check: sessions that are opened anew after each failure, and decodes on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from harness.decode.loop import StepObserver, greedy_decode
from harness.decode.plan import ExtraFeeds
from harness.decode.trace import Trace
from harness.engines.base import Session
from harness.engines.registry import EngineSpec
from harness.topology.spec import Topology

__all__ = ["Candidate"]


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
        self.seconds = 0.0
        """How long it took to open the session."""

    @property
    def session(self) -> Session:
        """The open session; opened now if there is none.

        Raises:
            ParityError: as `harness.engines.base.Engine.open`.
        """
        if self._session is None:
            began = time.perf_counter()
            self._session = self._spec.open(self._model)
            self.seconds = time.perf_counter() - began
        return self._session

    def decode(
        self,
        prompt_ids: Sequence[int],
        *,
        extra: ExtraFeeds | None = None,
        on_step: StepObserver | None = None,
    ) -> Trace:
        """Continue a prompt, from empty KV and zero states; `extra` is fed at every call.

        An engine that fails on the way leaves what came before; the next decode gets a new session.

        Raises:
            ParityError: as `harness.engines.base.Engine.open`, where a session must be opened.
            NotDrivableError, InputError: as `harness.decode.loop.greedy_decode`.
        """
        trace = greedy_decode(
            self.session,
            self._topology,
            prompt_ids,
            max_new_tokens=self._max_new_tokens,
            stop_ids=self._stop_ids,
            top_k=self._top_k,
            extra=extra,
            on_step=on_step,
        )
        if trace.failure is not None:
            self.close()
        return trace

    def close(self) -> None:
        """Free the session, if there is one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
