"""One call of a kernel whose result is known, and the terms that its sums are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.oracle.executor import Step
from harness.oracle.node import Node
from harness.oracle.precision import Array

__all__ = ["BINADES", "TERMS", "KnownSums", "Probe", "Site", "loud", "spread"]

TERMS = 32
"""Terms of a sum, where the operator has so many."""

BINADES = 6
"""Magnitudes lie between 2^-6 and 2^7: in one block of eight bits the small ones vanish."""


@dataclass(frozen=True, slots=True)
class Site:
    """A node as it stands in the plan.

    Attributes:
        step: of the plan, with the kernel that runs.
        constants: for each input what the kernel takes, where it is known; else None.
    """

    step: Step
    constants: tuple[Array | None, ...]

    @property
    def node(self) -> Node:
        """As the kernel saw it at planning."""
        return self.step.node

    def arguments(self, *first: Array) -> list[Any]:
        """The `first` inputs as given, constants as they are, and None for all others."""
        return [*first, *self.constants[len(first) :]]

    def is_fed(self, index: int) -> bool:
        """Whether an input is given, and not constant."""
        return self.node.has_input(index) and self.constants[index] is None


@dataclass(frozen=True, slots=True)
class Probe:
    """One call of a kernel, and its result.

    Attributes:
        arguments: of the kernel.
        expected: the sums, float64.
        magnitude: for each sum that of the absolute values of its terms.
        pick: takes from the kernel's first output what is expected; its shape may have axes of 1 more.
        rows: of a product with a weight, those rows of the weight alone; None for all.
        roundings: how often a sum is rounded on the way, beside what its terms cost.
    """

    arguments: list[Any]
    expected: Array
    magnitude: Array
    pick: Callable[[Array], Array] = lambda y: y
    rows: slice | None = None
    roundings: int = 0


@dataclass(frozen=True, slots=True)
class KnownSums:
    """What can be asked of a node.

    Attributes:
        kind: what nodes of the same code have in common, in words.
        size: elements of its weight, 0 without.
        terms: of a sum.
        probes: makes the calls; reads no weight before.
    """

    kind: str
    size: int
    terms: int
    probes: Callable[[np.random.Generator], Iterator[Probe]]


def spread(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Floats of full precision and either sign, log-uniform over the binades."""
    size = rng.uniform(1, 2, shape) * 2.0 ** rng.integers(-BINADES, BINADES + 1, shape)
    values: Array = (size * rng.choice((-1.0, 1.0), shape)).astype(dtype)
    return values


def loud(values: Array) -> Array:
    """The same with the largest magnitude that `spread` gives: what such a value loses shows in any sum."""
    largest: Array = values * 2.0**BINADES / 2.0 ** np.floor(np.log2(np.abs(values)))
    return largest
