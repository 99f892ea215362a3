"""Where relations are tried: fresh sessions of one engine on one graph, and the decode they stand against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.decode.feeds import plan_feeds
from harness.decode.plan import ExtraFeeds, FeedPlan
from harness.engines.base import OptionValue, Session, SessionInfo
from harness.engines.registry import EngineSpec
from harness.parity.relations.observation import Follower, Observation, Script
from harness.ports import Port
from harness.topology.spec import Topology

__all__ = ["Laboratory", "Subject"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What relations are tried on.

    Attributes:
        model: the graph file.
        topology: of the graph.
        prompt: token IDs to continue.
        steps: tokens to decode.
        extra: what is fed at every call, by port: what encoders take.
        is_plain: whether the package is one graph, as it stands.
        keeps_first_call: whether a session goes on with values of its latest first call.
        seed: of the made-up prompts that stand beside this one.
    """

    model: Path
    topology: Topology
    prompt: tuple[int, ...]
    steps: int
    extra: ExtraFeeds = field(default_factory=dict)
    is_plain: bool = True
    keeps_first_call: bool = False
    seed: int = 0


class Laboratory:
    """One engine on one subject. Every session is a fresh one, so that a relation finds its own faults."""

    def __init__(self, spec: EngineSpec, subject: Subject, *, tokens: tuple[int, ...] | None = None) -> None:
        """Nothing is opened yet; `tokens` are followed after the prompt, else those the engine chooses."""
        self.spec = spec
        self.subject = subject
        self._script = Script(subject.prompt, subject.steps, tokens)
        self._reference: Observation | None = None
        self._chosen: tuple[int, ...] = ()
        self._info: SessionInfo | None = None

    @property
    def reference(self) -> Observation:
        """The prompt in one call, then token by token, in a session of its own.

        Raises:
            EngineFailedError: the engine failed.
        """
        if self._reference is None:
            with self.session() as session:
                self._info = session.info
                follower = self.follow(session)
                try:
                    self._reference = follower.whole()
                finally:
                    self._chosen = tuple(moment.token for _, moment in sorted(follower.seen.items()))
            if self._script.tokens is None:
                self._script = replace(self._script, tokens=self._chosen)
        return self._reference

    @property
    def script(self) -> Script:
        """What every decode of the subject follows: the tokens of the reference."""
        assert self.reference
        return self._script

    @property
    def tokens(self) -> tuple[int, ...]:
        """What every decode of the subject follows, one token for each step."""
        tokens = self.script.tokens
        assert tokens is not None
        return tokens

    @property
    def chosen(self) -> tuple[int, ...]:
        """What the engine chose in the reference, as far as it got."""
        return self._chosen

    @property
    def info(self) -> SessionInfo | None:
        """What runs the reference, and how; None as long as no session has opened for it."""
        return self._info

    @contextmanager
    def session(self, **changes: OptionValue) -> Iterator[Session]:
        """A fresh session; `changes` are options that differ from those the user asked for.

        Raises:
            EngineFailedError: the engine could not load the graph.
        """
        spec = self.spec
        session = replace(spec, options={**spec.options, **changes}).open(self.subject.model)
        try:
            yield session
        finally:
            session.close()

    def plan(self, session: Session) -> FeedPlan:
        """What each call is fed on this session."""
        subject = self.subject
        return plan_feeds(subject.topology, session.inventory, extra=subject.extra)

    def follow(self, session: Session, script: Script | None = None) -> Follower:
        """A decode on this session that has not begun; of the subject unless another script is given."""
        return Follower(session, self.plan(session), script or self._script)

    def made_up(self, length: int, *, number: int = 0, steps: int | None = None) -> Script:
        """Another decode than the subject's: token IDs drawn with the subject's seed.

        Args:
            length: of its prompt.
            number: which of several.
            steps: of the decode; those of the subject where it is None.
        """
        import numpy as np

        vocabulary = len(self.reference[0].logits)
        steps = self.subject.steps if steps is None else steps
        draw = np.random.default_rng((self.subject.seed, number))
        ids = tuple(int(token) for token in draw.integers(0, vocabulary, length + steps))
        return Script(ids[:length], steps, ids[length:])

    def inputs(self, session: Session) -> dict[str, Port]:
        """The input ports as the file spells them, which says what has a batch axis; else the session's."""
        return {port.name: port for port in (self.subject.topology.inventory or session.inventory).inputs}
