"""What a relation is: a way to compute the same thing twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from harness.parity.relations.laboratory import Laboratory
from harness.parity.relations.observation import Observation

__all__ = ["NotApplicableError", "Pair", "Relation"]


class NotApplicableError(Exception):
    """An engine or a graph cannot do what a relation asks for; the text says why, as a sentence."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two observations that must agree, at the steps that both have.

    Attributes:
        label: which of several cases of the relation it is; empty where there is one.
        expected: what the plainer of the two ways gave.
        found: what the other one gave.
        bitwise: whether they must agree to the last bit. Else both are computed in other shapes or orders,
            and may differ by what rounding does.
        premise: whether it only shows that the cases behind it mean something: it need not be reported where
            it does not fail.
    """

    label: str
    expected: Observation
    found: Observation
    bitwise: bool
    premise: bool = False


class Relation(Protocol):
    """A property that an engine must have on any package, whatever the weights."""

    @property
    def name(self) -> str:
        """One word, as reports have it."""

    @property
    def statement(self) -> str:
        """What must be equal to what, one clause."""

    @property
    def graph_may_lack(self) -> bool:
        """Whether a graph can be without the property, whatever runs it: then the oracle is asked."""

    def observe(self, lab: Laboratory) -> Iterator[Pair]:
        """Compute both sides, each case when it is asked for.

        Raises:
            NotApplicableError: the engine, the graph or the prompt does not allow it.
            EngineFailedError: the engine failed.
        """
