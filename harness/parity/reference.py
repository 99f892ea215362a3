"""The oracle's side of a check: its logits along the candidate's tokens, and where they decide nothing.

One forward pass over prompt and tokens gives the logits that stepping would give, up to rounding. How much
rounding can matter is measured on the oracle itself: its *spread*, the largest difference between logits
of the same token in float32 and float64, and where it runs in one pass also in one pass and in steps, on a
probe. A position is decided again, in float64, where the margin is within the spread (times a stated factor),
and where a candidate would be blamed; what even float64 cannot separate is undecided. A margin of zero in
float64 is an exact tie, which the lowest ID has.

One pass presumes that a token sees none behind it. A pass over a beginning of the same tokens must give what
the whole one gave there: over the prompt alone, up to one more position that is drawn for each prompt, and up
to each position where a candidate would be blamed. Where it does not, and where the probe in one pass and in
steps differs by more than rounding can, the graph is stepped, now and later. A graph that is not causal
elsewhere alone is not noticed; steps presume nothing.

Several prompts share a pass where they can (`harness.parity.batching`).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Literal, TypeAlias

from harness.decode.batch import Continued
from harness.decode.loop import StepObserver, forced_decode, one_pass_decode
from harness.decode.plan import ExtraFeeds
from harness.decode.trace import Trace
from harness.engines.base import Session, SessionInfo, TopLogits
from harness.engines.registry import EngineSpec
from harness.errors import InputError
from harness.parity.batching import BatchedPasses
from harness.parity.compare import behind
from harness.parity.finite import require_finite, watch
from harness.parity.proving import proof_of, require_proof
from harness.parity.spread import SPREAD_FACTOR, differ_by_rounding, spread_between
from harness.topology.spec import Topology

__all__ = ["OracleMode", "Reference", "ReferenceTrace"]

OracleMode: TypeAlias = Literal["one-pass", "stepwise"]

_COARSE, _FINEST = "float32", "float64"

_FINER_BY = 2.0**-29
"""The rounding of float64, relative to that of float32: 2^-53 against 2^-24."""

_PROBE_PROMPT = 8
"""Prompt tokens of the probe on which the spread is measured, at most."""

_PROBE_STEPS = 3
"""Generated tokens of the probe, at most."""


@dataclass(frozen=True, slots=True)
class ReferenceTrace:
    """The oracle along the candidate's tokens.

    Attributes:
        trace: the largest logits at each position, in float64 where a position was decided again.
        bands: below which margin each position decides nothing; zero where it was not measured.
        undecided: positions whose margin lies within their band, in the finest precision there is.
        mode: how the logits came about.
        rounding: below which margin the oracle's own precision decides nothing: by the probe, and by all of
            these tokens where they were decided again. Zero where it was not measured.
    """

    trace: Trace
    bands: tuple[float, ...]
    undecided: tuple[int, ...]
    mode: OracleMode
    rounding: float = 0.0


class Reference:
    """Verifies candidates of one graph; opens what it needs when it needs it.

    An oracle without an option `precision` has no second precision to measure by, and one that rounds to
    the declared types (`rounding=model`) has no spread that says anything: its roundings are meant, and one
    pass does others than steps do. Both run stepwise, their margins are taken as they are, and nothing is
    undecided.
    """

    def __init__(
        self,
        spec: EngineSpec,
        model: Path,
        topology: Topology,
        *,
        mode: OracleMode,
        top_k: int,
    ) -> None:
        """Load the graph in the oracle's own precision.

        Args:
            spec: the oracle.
            model: the graph file.
            topology: of the graph.
            mode: `one-pass` falls back to `stepwise` where the graph gives the last logits alone.
            top_k: how many of the largest logits to keep.

        Raises:
            EngineFailedError, EngineUnavailableError, InputError: as `harness.engines.base.Engine.open`.
        """
        self._spec = spec
        self._model = model
        self._topology = topology
        self._top_k = top_k
        self._measures = _no_spread(spec) is None
        self.mode: OracleMode = mode if self._measures else "stepwise"
        began = time.perf_counter()
        self._session = spec.open(model)
        self.seconds = time.perf_counter() - began
        self.proof = proof_of(self._session)
        self._precision = str(self._session.info.settings.get("precision", ""))
        self._sessions = {self._precision: self._session}
        self._bands: dict[tuple[OracleMode, str], float] = {}
        self._extra: ExtraFeeds = {}
        self._batched = BatchedPasses(self._session, topology, top_k=top_k)

    @staticmethod
    def check_mode(spec: EngineSpec, mode: OracleMode | None) -> OracleMode:
        """The mode to run in: one-pass where the oracle can measure its own spread.

        Raises:
            InputError: one-pass was asked of an oracle that cannot.
        """
        reason = _no_spread(spec)
        if mode == "one-pass" and reason is not None:
            raise InputError(
                f"--oracle-mode one-pass needs an oracle that can measure its own rounding, and {reason}.",
                next_action="Use --oracle-mode stepwise, or --oracle oracle without rounding.",
            )
        return mode or ("one-pass" if reason is None else "stepwise")

    @property
    def info(self) -> SessionInfo:
        """What runs and how."""
        return self._session.info

    def require_proof(self) -> None:
        """Refuse to go on with an oracle whose proof failed.

        Raises:
            InvalidRunError: as `harness.parity.proving.require_proof`.
        """
        require_proof(self.proof)

    def close(self) -> None:
        """Free every session."""
        for session in self._sessions.values():
            session.close()

    def verify(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        *,
        rivals: Sequence[int] = (),
        extra: ExtraFeeds | None = None,
        on_step: StepObserver | None = None,
    ) -> ReferenceTrace:
        """The oracle's logits along `token_ids`; `extra` is fed at every call.

        `rivals` are another's choices along the same tokens, as many: where the oracle's differ from them, it
        is as sure as where they differ from the tokens.

        Raises:
            InvalidRunError: the oracle failed, or its logits hold NaN.
        """
        self._extra = extra or {}
        found = self._verified(prompt_ids, token_ids, rivals, on_step)
        if found is None:
            self.mode = "stepwise"
            found = self._verified(prompt_ids, token_ids, rivals, on_step)
        assert found is not None, "steps stand for nothing but themselves"
        return found

    def _verified(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        rivals: Sequence[int],
        on_step: StepObserver | None,
    ) -> ReferenceTrace | None:
        """As `verify`, in the mode as it is; None where one pass proves not to stand for steps."""
        trace = self._logits(self._session, prompt_ids, token_ids, on_step)
        if trace is None:
            return None
        if not self._measures:
            return ReferenceTrace(trace, (0.0,) * len(trace.steps), (), self.mode)
        rounding = self._band(self._precision, prompt_ids, token_ids)
        if rounding is None or not all(
            self._begins(self._session, trace, cut, rounding) for cut in self._cuts(prompt_ids, token_ids)
        ):
            return None
        bands = [rounding] * len(trace.steps)
        steps = list(trace.steps)
        decided: set[int] = set()
        finest, finer, fine_band = self._session, trace, rounding
        if self._precision != _FINEST:
            while doubtful := _doubtful(steps, bands, token_ids, rivals) - decided:
                if finer is trace:
                    finest = self._session_in(_FINEST)
                    again = self._logits(finest, prompt_ids, token_ids, None)
                    measured = self._band(_FINEST, prompt_ids, token_ids)
                    if again is None or measured is None:
                        return None
                    finer, fine_band = again, measured
                if any(
                    steps[i].margin > bands[i] and steps[i].argmax != finer.steps[i].argmax for i in doubtful
                ):
                    # Wrong with a margin that should have decided: then no other one does either.
                    doubtful = set(range(len(steps))) - decided
                for i in doubtful:
                    steps[i], bands[i] = finer.steps[i], fine_band
                decided |= doubtful
            if finer is not trace:
                rounding = max(rounding, 2 * SPREAD_FACTOR * spread_between(trace, finer))
        undecided = tuple(i for i, step in enumerate(steps) if 0 < step.margin <= bands[i])
        if self.mode == "one-pass":
            blamed = [_blamed(steps, bands, undecided, chosen) for chosen in (token_ids, rivals)]
            for position in sorted({*blamed[0], *blamed[1]}):
                gap = min(gaps[position] for gaps in blamed if position in gaps)
                allowed = max(gap, bands[position])
                if not self._begins(finest, finer, position + 1, bands[position], at_most=allowed / 2):
                    return None
        if finer is not trace:
            trace = replace(trace, steps=tuple(steps), seconds=trace.seconds + finer.seconds)
        return ReferenceTrace(trace, tuple(bands), undecided, self.mode, rounding)

    def gathers(self, decoded: Sequence[Continued]) -> bool:
        """Whether one more prompt had better be decoded before these are verified, to share their batch.

        Never before the first prompt is verified: on it the spread is measured.

        Args:
            decoded: prompts and their tokens, at least one.
        """
        return self.mode == "one-pass" and self._batched.gathers(decoded)

    def prepare(self, decoded: Sequence[Continued]) -> None:
        """Run the passes that `verify` will ask for, without extra feeds, as rows of one batch.

        Where that cannot be, or proves to be another computation, `verify` runs them one by one.

        Args:
            decoded: prompts and their tokens, at least one token each.
        """
        if len(decoded) < 2 or self.mode != "one-pass":
            self._batched.forget()
            return
        beginnings = [
            [(prompt, tokens[:cut]) for cut in self._cuts(prompt, tokens)] for prompt, tokens in decoded
        ]
        # Wholes, prompts alone, and what is drawn: the first batch has the most positions.
        self._batched.run([decoded, *[[row for row in each if row] for each in zip_longest(*beginnings)]])

    def _cuts(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[int]:
        """How many tokens the beginnings have that one pass is compared with: one, and a number drawn.

        The last logits of the first are those of the prompt alone. All the tokens are no beginning.
        """
        count = len(token_ids)
        if self.mode != "one-pass" or count < 2:
            return []
        if count == 2:
            return [1]
        drawn = random.Random(",".join(map(str, (*prompt_ids, *token_ids))))
        return [1, drawn.randrange(2, count)]

    def _begins(
        self, session: Session, trace: Trace, count: int, rounding: float, *, at_most: float = math.inf
    ) -> bool:
        """Whether a pass over a beginning, up to the choice of token `count`, gives what the whole pass did.

        So a graph is found out whose tokens see later ones, or whose numbers depend on the length of a call:
        there, one pass is another computation than the decode that it stands for.

        Args:
            session: which gave the trace.
            trace: of the whole pass.
            count: how many of its tokens the beginning has.
            rounding: the difference that rounding is known to make.
            at_most: difference of the last logits that changes nothing.
        """
        begun = self._whole(session, trace.prompt_ids, trace.token_ids[:count], filled=at_most == math.inf)
        if begun is None:
            return False
        self._sound(begun, session)
        beginning = replace(trace, token_ids=begun.token_ids, steps=trace.steps[:count])
        ends = [replace(each, steps=each.steps[-1:]) for each in (begun, beginning)]
        return differ_by_rounding(begun, beginning, rounding) and spread_between(*ends) <= at_most

    def _logits(
        self,
        session: Session,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        on_step: StepObserver | None,
    ) -> Trace | None:
        """Along all the tokens, in the mode as it is; None where that is one pass and there is none."""
        if self.mode == "stepwise":
            return self._sound(self._steps(session, prompt_ids, token_ids, on_step), session)
        trace = self._whole(session, prompt_ids, token_ids)
        if trace is None:
            return None
        if on_step is not None and trace.token_ids:
            on_step(len(trace.token_ids) - 1, trace.token_ids[-1])
        return self._sound(trace, session)

    def _steps(
        self,
        session: Session,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        on_step: StepObserver | None = None,
    ) -> Trace:
        watch(session, self._topology, self._extra)
        return forced_decode(
            session,
            self._topology,
            prompt_ids,
            token_ids,
            top_k=self._top_k,
            extra=self._extra,
            on_step=on_step,
        )

    def _whole(
        self, session: Session, prompt_ids: Sequence[int], token_ids: Sequence[int], *, filled: bool = True
    ) -> Trace | None:
        """One pass, or what a row of a batch gave, which may have been `filled` up behind its tokens."""
        watch(session, self._topology, self._extra)
        ahead = self._batched.row(prompt_ids, token_ids) if filled else None
        if ahead is not None and session is self._session and not self._extra:
            return ahead
        return one_pass_decode(
            session, self._topology, prompt_ids, token_ids, top_k=self._top_k, extra=self._extra
        )

    def _band(self, precision: str, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float | None:
        """Below which margin a precision decides nothing; None where one pass is not like steps.

        Measured once, on the start of the first prompt. Steps are compared with steps of the other precision
        alone; their float64 rounds as their float32 does, on a scale so much finer.
        """
        known = self._bands.get((self.mode, precision))
        if known is None:
            known = self._measured(precision, *_probe(prompt_ids, token_ids))
            if known is not None:
                self._bands[self.mode, precision] = known
        return known

    def _measured(self, precision: str, prompt: Sequence[int], tokens: Sequence[int]) -> float | None:
        session, finest = self._session_in(precision), self._session_in(_FINEST)
        exact = self._sound(self._steps(finest, prompt, tokens), finest)
        # A difference of two logits is off by at most twice what one of them is.
        factor = 2 * SPREAD_FACTOR
        if self.mode == "stepwise":
            coarse = self._session_in(_COARSE)
            spread = spread_between(exact, self._sound(self._steps(coarse, prompt, tokens), coarse))
            return factor * spread * (_FINER_BY if precision == _FINEST else 1.0)
        steps = exact if session is finest else self._sound(self._steps(session, prompt, tokens), session)
        rounding = factor * spread_between(exact, steps)
        whole = self._whole(session, prompt, tokens)
        if whole is None or not differ_by_rounding(self._sound(whole, session), steps, rounding):
            return None
        band = max(rounding, factor * spread_between(exact, whole))
        if session is self._session and not self._extra:
            self._batched.prove_by(exact, band)
        return band

    def _session_in(self, precision: str) -> Session:
        if precision not in self._sessions:
            options = {**self._spec.options, "precision": precision}
            spec = replace(self._spec, options=options)
            session = self._sessions[precision] = spec.open(self._model)
            require_proof(proof_of(session))
        return self._sessions[precision]

    def _sound(self, trace: Trace, session: Session) -> Trace:
        return require_finite(trace, session, self._topology, self._extra)


def _no_spread(spec: EngineSpec) -> str | None:
    """Why an oracle cannot measure its own spread, as a clause; None where it can."""
    if "precision" not in spec.engine.options:
        return f"{spec.name} has no option precision"
    if spec.options.get("rounding") == "model":
        return f"{spec.name} with rounding=model rounds on purpose, in one pass otherwise than in steps"
    return None


def _doubtful(steps: Sequence[TopLogits], bands: Sequence[float], *chosen: Sequence[int]) -> set[int]:
    """Positions to decide in a finer precision: within the band, or where a chooser would be blamed first.

    The band is measured on a few tokens, and rounding may matter more behind them.
    """
    close = {i for i, step in enumerate(steps) if step.margin <= bands[i]}
    for token_ids in chosen:
        pairs = zip(token_ids, steps, strict=False)
        close |= {*[i for i, (token, step) in enumerate(pairs) if token != step.argmax][:1]}
    return close


def _blamed(
    steps: Sequence[TopLogits], bands: Sequence[float], undecided: Collection[int], chosen: Sequence[int]
) -> dict[int, float]:
    """Where a chooser differs first, and first by what decides, and how far behind its tokens are there."""
    pairs = enumerate(zip(chosen, steps, strict=False))
    gaps = {i: behind(token, step) for i, (token, step) in pairs if token != step.argmax}
    decided = [i for i, gap in gaps.items() if i not in undecided or gap > bands[i]]
    return {i: gaps[i] for i in (*list(gaps)[:1], *decided[:1])}


def _probe(prompt_ids: Sequence[int], token_ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The few tokens on which the spread is measured: a prompt, and what follows it."""
    prompt, tokens = tuple(prompt_ids)[:_PROBE_PROMPT], tuple(token_ids)[:_PROBE_STEPS]
    if len(prompt) < len(prompt_ids):
        tokens = tuple(prompt_ids)[len(prompt) : len(prompt) + _PROBE_STEPS]
    return prompt, tokens
