"""How far two correct computations of a graph may be apart: measured on the oracle, tensor by tensor.

The oracle decodes the same tokens with every value rounded to the type that the model declares, and in
float64. The largest difference of a tensor is its *spread*: what rounding makes of it in this very decode. It
is looked for in calls of the shapes that relations make: a prompt whole and token by token, steps, and one
pass over all tokens, whose logits at every position count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from harness.engines.registry import EngineSpec
from harness.errors import ParityError
from harness.parity.proving import proof_of, require_proof
from harness.parity.relations.comparing import LOGITS, Comparison, largest_difference
from harness.parity.relations.laboratory import Laboratory, Subject
from harness.parity.relations.observation import Moment, Observation
from harness.parity.spread import SPREAD_FACTOR

__all__ = ["BAND_FACTOR", "Bands", "NoOracle", "Oracle", "Yardstick", "spreads_between"]

BAND_FACTOR = 2 * SPREAD_FACTOR
"""How many spreads a difference may have: each side is off by one, times what a spread measured on few
positions must be exceeded by."""


@dataclass(frozen=True, slots=True)
class Bands:
    """What a difference may be at most.

    Attributes:
        spreads: the oracle's, by port; 0 for a tensor that rounding does not touch.
    """

    spreads: Mapping[str, float] = field(default_factory=dict)

    def of(self, port: str) -> float:
        """The band of a tensor, in its own scale."""
        return BAND_FACTOR * self.spreads.get(port, 0.0)

    def holds(self, found: Comparison) -> bool:
        """Whether every difference lies within the band of its tensor."""
        return all(size <= self.of(port) for port, size in found.largest.items())

    def furthest(self, found: Comparison) -> str | None:
        """The tensor that lies furthest out of its band, or nearest to its edge; None where none differs."""

        def reach(port: str) -> float:
            band = self.of(port)
            return found.largest[port] / band if band else float("inf")

        return max(found.largest, key=reach, default=None)


class Yardstick(Protocol):
    """Says how far two computations may be apart, and whether a graph has a property at all."""

    @property
    def reason(self) -> str | None:
        """Why there is none; None where there is one. Known once it has been asked for."""

    def bands(self) -> Bands | None:
        """What a difference may be at most; None where there is no measure."""

    def laboratory(self) -> Laboratory | None:
        """Where a relation can be tried without rounding: in float64; None where there is no such place."""


@dataclass(frozen=True, slots=True)
class NoOracle:
    """No yardstick: differences are reported, and not judged."""

    reason: str | None

    def bands(self) -> Bands | None:
        """None."""
        return None

    def laboratory(self) -> Laboratory | None:
        """None."""
        return None


class Oracle:
    """The oracle along the candidate's tokens; runs when it is asked for, and once."""

    def __init__(self, spec: EngineSpec, subject: Subject, tokens: Callable[[], tuple[int, ...]]) -> None:
        """Nothing is opened yet.

        Args:
            spec: the oracle, with options `precision` and `rounding`.
            subject: what is decoded.
            tokens: gives the candidate's, which are followed.
        """
        self.name = spec.name
        """The oracle's."""
        self._spec = spec
        self._subject = subject
        self._tokens = tokens
        self._exact: Laboratory | None = None
        self._bands: Bands | None = None
        self._asked = False
        self.reason: str | None = None
        """Why there is none; None where there is one."""

    @property
    def was_asked(self) -> bool:
        """Whether anything has been measured, or tried in vain."""
        return self._asked

    def bands(self) -> Bands | None:
        """See `Yardstick`."""
        self._ask()
        return self._bands

    def laboratory(self) -> Laboratory | None:
        """See `Yardstick`."""
        self._ask()
        return self._exact

    def _ask(self) -> None:
        if self._asked:
            return
        self._asked = True
        tokens = self._tokens()
        exact = Laboratory(self._in("float64", "none"), self._subject, tokens=tokens)
        rounded = Laboratory(self._in("float32", "model"), self._subject, tokens=tokens)
        try:
            with exact.session() as session:
                require_proof(proof_of(session))
            spreads = _measured(exact, rounded)
        except ParityError as error:
            self.reason = f"The oracle cannot tell: {error.message}"
            return
        if not all(math.isfinite(spread) for spread in spreads.values()):
            self.reason = "The oracle cannot tell: its own numbers are not finite."
            return
        self._exact, self._bands = exact, Bands(spreads)

    def _in(self, precision: str, rounding: str) -> EngineSpec:
        return EngineSpec(
            self._spec.engine, {**self._spec.options, "precision": precision, "rounding": rounding}
        )


def _measured(exact: Laboratory, rounded: Laboratory) -> dict[str, float]:
    """The spread of each tensor, over calls of every shape."""
    found = [spreads_between(exact.reference, rounded.reference)]
    with rounded.session() as session:
        if rounded.plan(session).tokens_a_call is None:
            stepped = rounded.follow(session, rounded.script)
            stepped.begin([(token,) for token in rounded.script.prompt])
            found += [
                spreads_between(exact.reference, stepped.rest()),
                spreads_between(_one_pass(exact), _one_pass(rounded)),
            ]
    return {port: max(spreads.get(port, 0.0) for spreads in found) for port in found[0]}


def _one_pass(lab: Laboratory) -> Observation:
    """All tokens in one call, as one moment: the logits at every position, and the states after the last."""
    script = lab.script
    fed = (*script.prompt, *lab.tokens[:-1])
    with lab.session() as session:
        plan = lab.plan(session)
        outputs = session.run(plan.first_call(session, fed), plan.outputs)
        states = {name: session.copy_out(outputs[name]) for name in plan.carried}
        return {script.last: Moment(lab.tokens[-1], session.copy_out(outputs[plan.logits]), states)}


def spreads_between(one: Observation, other: Observation) -> dict[str, float]:
    """The largest difference of each tensor of two decodes of the same steps, over all steps, by port.

    Both may be in precisions of their own.
    """
    spreads: dict[str, float] = {}
    for step, moment in one.items():
        pairs = [(LOGITS, moment.logits, other[step].logits)]
        pairs += [(name, state, other[step].states[name]) for name, state in moment.states.items()]
        for name, mine, theirs in pairs:
            spreads[name] = max(spreads.get(name, 0.0), largest_difference(mine, theirs))
    return spreads
