"""A plan of what is fed at each call of a decode, and of what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from harness.decode.caches import CacheStrategy
from harness.decode.calls import Call, CallInput
from harness.engines.base import Session, TensorHandle
from harness.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ExtraFeeds", "FeedPlan", "Room"]

ExtraFeeds: TypeAlias = "Mapping[str, NDArray[Any] | TensorHandle]"
"""Values of inputs that are the same at every call, by port: host arrays, or handles of the session."""


@dataclass(frozen=True, slots=True)
class Room:
    """How many tokens a cache of fixed size takes, and the port that says so."""

    tokens: int
    port: str


@dataclass(frozen=True, slots=True)
class FeedPlan:
    """What to feed at each call and what to ask for.

    Attributes:
        calls: inputs whose value follows from the tokens of a call: token IDs, mask, positions, lengths.
        caches: what is carried from call to call.
        logits: the output that chooses the next token.
        tokens_a_call: how many tokens the graph takes at once; None for any number.
        room: what the smallest cache of fixed size takes; None where caches grow.
        extra: what is fed at every call and never fed back.
    """

    calls: tuple[CallInput, ...]
    caches: tuple[CacheStrategy, ...]
    logits: str
    tokens_a_call: int | None = None
    room: Room | None = None
    extra: ExtraFeeds = field(default_factory=dict)

    @property
    def carried(self) -> tuple[str, ...]:
        """The outputs that are fed back."""
        return tuple(name for cache in self.caches for name in cache.outputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Every output that a call must give."""
        return (self.logits, *self.carried)

    @property
    def one_pass(self) -> bool:
        """Whether one call over many tokens computes what the same tokens compute one by one."""
        return self.tokens_a_call is None and all(cache.one_pass for cache in self.caches)

    def check_room(self, prompt: int, new: int) -> None:
        """Check that a decode fits into the caches. The last new token is never fed.

        Args:
            prompt: tokens of the prompt.
            new: tokens to decode after it.

        Raises:
            InputError: it does not.
        """
        room = self.room
        if room is None or prompt + new - 1 <= room.tokens:
            return
        most = room.tokens - prompt + 1
        raise InputError(
            f"The static cache holds {room.tokens} tokens ({room.port}), and a prompt of {prompt} with {new} "
            f"new ones takes {prompt + new - 1}: all but the last are stored.",
            next_action=(f"Ask for at most {most} new tokens" if most > 0 else "Give a shorter prompt")
            + ", or export the model with a larger cache.",
        )

    def constants(self, session: Session) -> dict[str, TensorHandle]:
        """What every call is fed alike; to be asked for once a decode, as arrays are copied in."""
        return {
            name: session.place(cast("NDArray[Any]", value)) if hasattr(value, "__array__") else value
            for name, value in self.extra.items()
        }

    def start(self, session: Session, *, room: int) -> dict[str, TensorHandle]:
        """Fresh caches for the first call of a decode that feeds `room` tokens at most."""
        return {
            name: handle for cache in self.caches for name, handle in cache.start(session, room=room).items()
        }

    def first_call(self, session: Session, token_ids: Sequence[int]) -> dict[str, TensorHandle]:
        """Everything that one call over `token_ids` is fed, on fresh caches."""
        fresh = self.start(session, room=len(token_ids))
        return self.constants(session) | fresh | self.inputs(session, token_ids, past=0)

    def advance(
        self, outputs: Mapping[str, TensorHandle], *, fed: Mapping[str, TensorHandle], past: int, tokens: int
    ) -> dict[str, TensorHandle]:
        """The caches for the next call; see `CacheStrategy.advance`."""
        return {
            name: handle
            for cache in self.caches
            for name, handle in cache.advance(outputs, fed=fed, past=past, tokens=tokens).items()
        }

    def inputs(self, session: Session, new: Sequence[int], *, past: int) -> dict[str, TensorHandle]:
        """The inputs of a call with the token IDs `new` after `past` earlier ones."""
        call = Call(tuple(new), past)
        return {feed.name: session.place(feed.array(call)) for feed in self.calls}
