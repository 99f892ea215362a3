"""What a decode showed: at each step the token, the logits behind it, and every state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from harness.decode.plan import FeedPlan
from harness.decode.stepping import Decoding
from harness.engines.answers import largest
from harness.engines.base import Session, TensorHandle
from harness.engines.tensor_types import numpy_dtype
from harness.errors import EngineFailedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Follower", "Moment", "Observation", "Script", "keeps_states"]

_MOST_STATES = 1 << 25
"""Bytes of states that are kept at every step; of more, those after the prompt and at the last step are."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What one step showed.

    Attributes:
        token: the greedy choice, as the engine's own reduction of the logits has it.
        logits: at the last position, [vocab], in the engine's dtype.
        states: every output that is fed back, by port; empty at steps where they are not kept.
    """

    token: int
    logits: NDArray[Any]
    states: Mapping[str, NDArray[Any]] = field(default_factory=dict)


Observation: TypeAlias = Mapping[int, Moment]
"""What a decode showed, by step: step 0 has seen the prompt, step i also the first i tokens after it."""


@dataclass(frozen=True, slots=True)
class Script:
    """What is decoded.

    Attributes:
        prompt: token IDs, at least one.
        steps: tokens to choose, at least one; the last is never fed.
        tokens: which are fed after the prompt, `steps` of them; None for those that the engine chooses.
    """

    prompt: tuple[int, ...]
    steps: int
    tokens: tuple[int, ...] | None = None

    @property
    def room(self) -> int:
        """How many tokens are fed."""
        return len(self.prompt) + self.steps - 1

    @property
    def last(self) -> int:
        """The last step."""
        return self.steps - 1


class Follower:
    """A decode along a script that keeps what it sees."""

    def __init__(self, session: Session, plan: FeedPlan, script: Script) -> None:
        """Nothing runs yet."""
        self._session = session
        self._plan = plan
        self._script = script
        self._seen: dict[int, Moment] = {}
        self.decoding = Decoding(session, plan, room=script.room)

    @property
    def seen(self) -> Observation:
        """What has been seen so far."""
        return self._seen

    def begin(self, chunks: Sequence[Sequence[int]] | None = None) -> None:
        """Feed the prompt: in one call, or in `chunks`, which make it up in their order."""
        with _at(0):
            for chunk in chunks or (self._script.prompt,):
                outputs = self.decoding.feed(chunk)
            self._seen[0] = self.look(outputs, 0)

    def step(self, step: int) -> None:
        """Feed the token that is followed at `step`, from 1."""
        given = self._script.tokens
        token = self._seen[step - 1].token if given is None else given[step - 1]
        with _at(step):
            self._seen[step] = self.look(self.decoding.feed((token,)), step)

    def rest(self, first: int = 1) -> Observation:
        """Feed all tokens from step `first` on, and say what has been seen."""
        for step in range(first, self._script.steps):
            self.step(step)
        return self._seen

    def whole(self) -> Observation:
        """The decode from its beginning to its end."""
        self.begin()
        return self.rest()

    def look(self, outputs: Mapping[str, TensorHandle], step: int) -> Moment:
        """What the outputs of a call show."""
        session, plan = self._session, self._plan
        logits = outputs[plan.logits]
        (top,) = largest(session, logits, k=1, positions=(-1,))
        array = session.copy_out(logits)
        carried = {name: outputs[name] for name in plan.carried}
        keeps = keeps_states(step, self._script, carried)
        states = {name: session.copy_out(handle) for name, handle in carried.items()} if keeps else {}
        return Moment(top.argmax, array[0] if array.ndim == 2 else array[0, -1], states)


def keeps_states(step: int, script: Script, states: Mapping[str, TensorHandle]) -> bool:
    """Whether the states of a step are worth their memory."""
    size = sum(prod(handle.shape) * numpy_dtype(handle.dtype).itemsize for handle in states.values())
    return size <= _MOST_STATES or step in (0, script.last)


@contextmanager
def _at(step: int) -> Iterator[None]:
    """Say in an engine's failure at which step it came."""
    try:
        yield
    except EngineFailedError as error:
        error.step = step
        raise
