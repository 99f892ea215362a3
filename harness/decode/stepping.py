"""One decode in progress: tokens go in, call by call, and what is carried between two calls stays here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.decode.caches import CacheShapeError
from harness.decode.feeds import FeedPlan
from harness.engines.base import Session, TensorHandle
from harness.errors import EngineFailedError

__all__ = ["Decoding", "Snapshot"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where a decode stood: what its next call would have been fed.

    Attributes:
        past: tokens fed so far.
        caches: by input; None before the first call.
    """

    past: int
    caches: Mapping[str, TensorHandle] | None


class Decoding:
    """A decode of one sequence, from fresh caches, whatever the session ran before."""

    def __init__(self, session: Session, plan: FeedPlan, *, room: int) -> None:
        """Nothing runs yet.

        Args:
            session: what runs.
            plan: what each call is fed.
            room: how many tokens will be fed at most.
        """
        self._session = session
        self._plan = plan
        self._room = room
        self._past = 0
        self._caches: Mapping[str, TensorHandle] | None = None
        self._constants: dict[str, TensorHandle] | None = None

    def feed(self, new: Sequence[int]) -> dict[str, TensorHandle]:
        """Run the token IDs `new`, at least one, after all earlier ones.

        A graph that takes a few tokens a call gets them in turn; only the last call gives logits.

        Returns:
            what the last call gave: the logits, and every output that is fed back.

        Raises:
            EngineFailedError: the engine failed, or a cache came back in a shape in which it cannot be fed
                again; that may be the graph's fault (`harness.parity.refusing`).
        """
        plan = self._plan
        most = plan.tokens_a_call or len(new)
        for first in range(0, len(new) - most, most):
            self._call(new[first : first + most], plan.carried)
        return self._call(new[(len(new) - 1) // most * most :], plan.outputs)

    def snapshot(self) -> Snapshot:
        """Where the decode stands now. Nothing is copied: an engine never changes what it gave."""
        return Snapshot(self._past, self._caches)

    def rewind(self, snapshot: Snapshot) -> None:
        """Go on from where the decode once stood."""
        self._past, self._caches = snapshot.past, snapshot.caches

    def _call(self, new: Sequence[int], wanted: Sequence[str]) -> dict[str, TensorHandle]:
        session, plan, past = self._session, self._plan, self._past
        if self._constants is None:
            self._constants = plan.constants(session)
        if self._caches is None:
            self._caches = plan.start(session, room=self._room)
        fed = {**self._constants, **self._caches, **plan.inputs(session, new, past=past)}
        outputs = session.run(fed, wanted)
        self._past += len(new)
        try:
            self._caches = plan.advance(outputs, fed=fed, past=past, tokens=self._past)
        except CacheShapeError as error:
            raise EngineFailedError(
                f"{session.info.engine}: {error}.",
                kind="crashed",
                next_action="Run the model on another engine to see which of graph and engine is wrong.",
                ports=(error.port,),
            ) from error
        return outputs
