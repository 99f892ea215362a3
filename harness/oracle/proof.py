"""The oracle's proof: the kernels of this model, as planned, give sums that are known, to its precision.

For each kind of node that sums products the smallest node of the model is asked (`harness.oracle.sums`), for
a token, a few and many, with a cache and without. A sum of n products in floating point, in any order, is off
by at most g(n) times the sum of their magnitudes, with g(n) = n u / (1 - n u) and u the unit roundoff
(Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). What rounds to less than the oracle's
precision on the way (activations in eight bits, half precision, TF32) is off by many times that.

Of a weight that holds NaN or infinity no sum is known, and no bound says anything: its node fails, and the
entry says for which reason. An error that is NaN or infinite fails whatever the bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.oracle.executor import Body
from harness.oracle.matrix import Projection
from harness.oracle.node import Compute
from harness.oracle.precision import Precision, is_float
from harness.oracle.sums import SUMMING, KnownSums, Probe, Site, known_sums

__all__ = ["NotProbed", "Proof", "ProofEntry", "prove"]

_SEED = 20240229

_LEAST = 1 << 14
"""Elements of a weight below which another of its kind is taken if there is one: such small ones are never
cut into tiles."""

_MORE_ROUNDINGS = 4
"""Beside those of products and sum: a code less its zero point, times its scale; the factor of the product;
the bias. An attention's weights have less."""


@dataclass(frozen=True, slots=True)
class ProofEntry:
    """One kind of node, and how its known sums came out.

    Attributes:
        kind: what its nodes have in common.
        operator: operator.
        node: the node that was asked.
        terms: the most terms that a sum has.
        max_error: how far the worst of all sums was off, measured by its bound; may be NaN or infinite.
        bound: how far that one may be off; infinite or NaN where the sum itself is not finite.
        passed: whether every sum was finite, and off by no more than its bound.
        reason: why no sum is known, a weight that is not finite; None for all others, passed or not.
    """

    kind: str
    operator: str
    node: str
    terms: int
    max_error: float
    bound: float
    passed: bool
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class NotProbed:
    """A node that sums products, of a kind for which no sum is known; one a kind of reason."""

    operator: str
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Proof:
    """What the probe found.

    Attributes:
        precision: the oracle's precision.
        unit_roundoff: of that precision.
        passed: whether every entry passed; None where nothing could be asked.
        reason: why nothing was asked; None where something was.
        entries: in order of the plan.
        not_probed: in order of the plan.
        seconds: what it took.
        seed: of the inputs.
    """

    precision: str
    unit_roundoff: float
    passed: bool | None
    reason: str | None = None
    entries: tuple[ProofEntry, ...] = ()
    not_probed: tuple[NotProbed, ...] = ()
    seconds: float = 0.0
    seed: int = _SEED

    def mapping(self) -> dict[str, Any]:
        """As plain data for a report; what is not finite is null."""
        return {
            "precision": self.precision,
            "unit_roundoff": self.unit_roundoff,
            "passed": self.passed,
            "reason": self.reason,
            "entries": [
                {
                    "kind": entry.kind,
                    "operator": entry.operator,
                    "node": entry.node,
                    "terms": entry.terms,
                    "max_error": entry.max_error if math.isfinite(entry.max_error) else None,
                    "bound": entry.bound if math.isfinite(entry.bound) else None,
                    "passed": entry.passed,
                    "reason": entry.reason,
                }
                for entry in self.entries
            ],
            "not_probed": [
                {"operator": node.operator, "node": node.node, "reason": node.reason}
                for node in self.not_probed
            ],
            "seconds": self.seconds,
            "seed": self.seed,
        }


def prove(body: Body, precision: Precision) -> Proof:
    """Ask the kernels of a plan for known sums; to be called in the setting in which the model runs.

    With `rounding` the oracle rounds on purpose, to the declared types: then nothing is asked.
    """
    unit = float(np.finfo(precision.dtype).eps) / 2
    if precision.rounding:
        reason = "not applicable: with rounding=model the oracle rounds values to their declared types"
        return Proof(precision.name, unit, None, reason)
    began = time.perf_counter()
    found = _Found()
    for site in _sites(body):
        found.add(site)
    rng = np.random.default_rng(_SEED)
    entries = []
    for site, sums in found.smallest.values():
        try:
            entry = _entry(site, sums, unit, rng)
        # What is no fault of precision shows when the graph runs, too.
        except Exception as error:
            found.skip(site, _unasked(error))
            continue
        if entry is None:
            found.skip(site, "its outputs are empty")
        else:
            entries.append(entry)
    passed = all(entry.passed for entry in entries) if entries else None
    return Proof(
        precision=precision.name,
        unit_roundoff=unit,
        passed=passed,
        reason=None if entries else "the graph has no node whose sums are known",
        entries=tuple(entries),
        not_probed=tuple(found.skipped.values()),
        seconds=time.perf_counter() - began,
    )


def _sites(body: Body) -> Iterator[Site]:
    """Every node that sums products, those of subgraphs included."""
    for step in body.steps:
        if (step.node.domain, step.node.op_type) in SUMMING:
            yield Site(step, tuple(body.constant(slot) for slot in step.inputs))
        for inner in step.bodies:
            yield from _sites(inner)


@dataclass(slots=True)
class _Found:
    """For each kind of node the one to ask, and what cannot be asked."""

    smallest: dict[str, tuple[Site, KnownSums]] = field(default_factory=dict)
    skipped: dict[tuple[str, str], NotProbed] = field(default_factory=dict)

    def add(self, site: Site) -> None:
        try:
            sums = known_sums(site)
        # What a node lacks shows when the graph runs, by the name of the node.
        except Exception as error:
            self.skip(site, _unasked(error))
            return
        if sums is None:
            self.skip(site, "no sum is known for it in this configuration")
            return
        best = self.smallest.get(sums.kind)
        if best is None or _cost(sums) < _cost(best[1]):
            self.smallest[sums.kind] = site, sums

    def skip(self, site: Site, reason: str) -> None:
        node = NotProbed(site.node.op_type, site.node.label, reason)
        self.skipped.setdefault((node.operator, reason), node)


def _unasked(error: Exception) -> str:
    return f"it could not be asked: {' '.join(str(error).split()) or type(error).__name__}"


def _cost(sums: KnownSums) -> tuple[bool, int]:
    small = sums.size < _LEAST
    return small, -sums.size if small else sums.size


def _entry(site: Site, sums: KnownSums, unit: float, rng: np.random.Generator) -> ProofEntry | None:
    """Run a node's kernel on all its probes; None where they have no sum to look at."""

    def factor(probe: Probe) -> float:
        count = sums.terms + probe.roundings + _MORE_ROUNDINGS
        # What is expected is a sum in float64 itself.
        return _gamma(count, unit) + _gamma(count, float(np.finfo(np.float64).eps) / 2)

    worst = _worst(_differences(site, probe, factor(probe)) for probe in sums.probes(rng))
    if worst is None:
        return None
    error, bound = worst
    # Both are compared as numbers: infinity keeps to no bound, an infinite one included.
    passed = math.isfinite(bound) and error <= bound
    return ProofEntry(
        kind=sums.kind,
        operator=site.node.op_type,
        node=site.node.label,
        terms=sums.terms,
        max_error=error,
        bound=bound,
        passed=passed,
        reason=None if math.isfinite(error) and math.isfinite(bound) else _not_finite(site, bound),
    )


def _not_finite(site: Site, bound: float) -> str | None:
    """Which constant of a node holds NaN or infinity, so that its sums do; None where all is finite."""
    for index, array in enumerate(site.constants):
        if array is None or not is_float(array.dtype):
            continue
        count = array.size - int(np.count_nonzero(np.isfinite(site.node.precision.widen(array))))
        if count:
            name = site.node.names[index] if index < len(site.node.names) else ""
            values = "a value that is" if count == 1 else f"{count} values that are"
            return f"its input {index}, {name or 'a constant'}, holds {values} NaN or infinite"
    return None if math.isfinite(bound) else "what it must give is not finite itself"


def _gamma(count: int, unit: float) -> float:
    return count * unit / (1 - count * unit)


def _differences(site: Site, probe: Probe, factor: float) -> tuple[Any, Any]:
    """How far each sum is off, and how far it may be."""
    sums = probe.pick(np.asarray(_result(site.step.compute, probe))).astype(np.float64)
    error = np.abs(sums.reshape(probe.expected.shape) - probe.expected)
    # What is too small for the exponent is rounded by itself.
    tiny = float(np.finfo(site.node.precision.dtype).tiny) * _MORE_ROUNDINGS
    return error, factor * probe.magnitude + tiny


def _result(compute: Compute, probe: Probe) -> Any:
    """The kernel's first output, or of a product the rows that are asked, and no others where that can be."""
    rows = probe.rows
    if rows is not None and isinstance(compute, Projection):
        product = compute.later(*probe.arguments)
        if rows.stop - rows.start < product.matrix.rows:
            return product.columns(rows.start, rows.stop)
    result = compute(*probe.arguments)
    first = result[0] if isinstance(result, tuple) else result
    return first if rows is None else first[..., rows]


def _worst(differences: Iterable[tuple[Any, Any]]) -> tuple[float, float] | None:
    """The error that is largest measured by its bound, and that bound; None of no differences at all."""
    worst, found = -1.0, None
    for error, bound in differences:
        if not error.size:
            continue
        # A sum that is no number is worse than any; one that must be nothing may not be off at all.
        ratio = np.divide(error, bound, out=np.where(error > 0, np.inf, 0.0), where=bound > 0)
        ratio = np.where(np.isfinite(error) & np.isfinite(bound), ratio, np.inf)
        at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
        if ratio[at] > worst:
            worst, found = float(ratio[at]), (float(error[at]), float(bound[at]))
    return found
