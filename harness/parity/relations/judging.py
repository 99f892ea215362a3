"""From what a relation showed to an outcome, with what differed first and by how much."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite

from harness.errors import EngineFailedError, ParityError
from harness.parity.relations.band import Yardstick
from harness.parity.relations.base import NotApplicableError, Pair, Relation
from harness.parity.relations.comparing import Comparison, compare
from harness.parity.relations.laboratory import Laboratory

__all__ = ["Judged", "RelationOutcome", "exit_code_of", "judge"]


class RelationOutcome(StrEnum):
    """What became of a relation; members stand from worst to best."""

    CRASHED = "crashed"
    TIMEOUT = "timeout"
    UNSUPPORTED = "unsupported"
    BROKEN = "broken"
    NEAR_TIE = "near-tie"
    NOT_JUDGED = "not-judged"
    WITHIN_BAND = "within-band"
    BITWISE = "bitwise"
    NOT_APPLICABLE = "not-applicable"


@dataclass(frozen=True, slots=True)
class Judged:
    """A relation with its outcome.

    Attributes:
        outcome: of its worst case.
        reason: one line: what was found, or why it could not be.
        case: which of its cases that was; None where it has one, or none.
        bitwise: whether that case must agree to the last bit.
        comparison: of that case; None where nothing was compared.
        furthest: the tensor that decides it: furthest out of its band; None where no bit differs.
        band: of that tensor; None where there is none.
        cases: how many cases were compared.
        seconds: wall-clock time, the oracle's included.
        failure: how the engine failed; None where it did not.
    """

    outcome: RelationOutcome
    reason: str | None = None
    case: str | None = None
    bitwise: bool | None = None
    comparison: Comparison | None = None
    furthest: str | None = None
    band: float | None = None
    cases: int = 0
    seconds: float = 0.0
    failure: EngineFailedError | None = None


def judge(relation: Relation, lab: Laboratory, yardstick: Yardstick) -> Judged:
    """Try a relation on an engine, each of its cases, and say what became of it.

    A graph may lack the property, whatever runs it: where a case fails and the relation says so, the same
    is tried on the oracle in float64. What fails there as well is not the engine's fault.
    """
    began = time.perf_counter()
    found = _judge(relation, lab, yardstick)
    return replace(found, seconds=time.perf_counter() - began)


def exit_code_of(outcome: RelationOutcome) -> int:
    """Exit status that a relation's outcome stands for."""
    if outcome in _FAILURES:
        return 4
    return 1 if outcome in _FINDINGS else 0


_FAILURES = frozenset({RelationOutcome.CRASHED, RelationOutcome.TIMEOUT, RelationOutcome.UNSUPPORTED})
_FINDINGS = frozenset({RelationOutcome.BROKEN, RelationOutcome.NEAR_TIE, RelationOutcome.NOT_JUDGED})
_FROM_WORST = list(RelationOutcome)


def _judge(relation: Relation, lab: Laboratory, yardstick: Yardstick) -> Judged:
    judged: list[Judged] = []
    try:
        for number, pair in enumerate(relation.observe(lab)):
            found = _case(relation, number, pair, yardstick)
            fails = found.outcome in (RelationOutcome.BROKEN, RelationOutcome.NOT_APPLICABLE)
            if fails or not pair.premise:
                judged.append(found)
            if fails:
                break  # one case is enough to say so
    except NotApplicableError as error:
        judged.append(Judged(RelationOutcome.NOT_APPLICABLE, str(error)))
    except EngineFailedError as error:
        judged.append(_failed(relation, error, yardstick))
    except ParityError as error:
        judged.append(Judged(RelationOutcome.NOT_JUDGED, error.message))
    if not judged:
        return Judged(RelationOutcome.NOT_APPLICABLE, "The engine has no other setting to compare with.")
    worst = min(judged, key=lambda each: _FROM_WORST.index(each.outcome))
    cases = sum(each.comparison is not None for each in judged)
    return replace(worst, cases=cases, case=None if worst.outcome is RelationOutcome.BITWISE else worst.case)


def _case(relation: Relation, number: int, pair: Pair, yardstick: Yardstick) -> Judged:
    """One case; `number` is its place among those of the relation."""
    found = compare(pair.expected, pair.found)
    bare = Judged(
        RelationOutcome.BITWISE, case=pair.label or None, bitwise=pair.bitwise, comparison=found, cases=1
    )
    if found.first is None:
        if found.tokens_part_at is None:
            return bare
        reason = f"The choices part at step {found.tokens_part_at}, on logits that are equal to the bit."
        return replace(bare, outcome=RelationOutcome.BROKEN, reason=reason)
    if pair.bitwise and not relation.graph_may_lack:
        return replace(bare, outcome=RelationOutcome.BROKEN, furthest=found.first.port)
    bands = yardstick.bands()
    if bands is None:
        return replace(
            bare, outcome=RelationOutcome.NOT_JUDGED, reason=yardstick.reason, furthest=found.first.port
        )
    furthest = bands.furthest(found)
    assert furthest is not None
    bare = replace(bare, furthest=furthest, band=None if pair.bitwise else bands.of(furthest))
    if not pair.bitwise and bands.holds(found):
        if found.tokens_part_at is None:
            return replace(bare, outcome=RelationOutcome.WITHIN_BAND)
        reason = f"The logits lie within their band, and the choices part at step {found.tokens_part_at}."
        return replace(bare, outcome=RelationOutcome.NEAR_TIE, reason=reason)
    if relation.graph_may_lack:
        lacking = _lacking(relation, number, yardstick)
        if lacking is not None:
            return replace(bare, outcome=RelationOutcome.NOT_APPLICABLE, reason=lacking)
    return replace(bare, outcome=RelationOutcome.BROKEN)


def _failed(relation: Relation, error: EngineFailedError, yardstick: Yardstick) -> Judged:
    """The engine failed: as the graph makes every engine fail, or by itself."""
    if relation.graph_may_lack or error.ports:
        lacking = _lacking(relation, None, yardstick)
        if lacking is not None:
            return Judged(RelationOutcome.NOT_APPLICABLE, lacking)
    return Judged(RelationOutcome(error.kind), error.message, failure=error)


def _lacking(relation: Relation, case: int | None, yardstick: Yardstick) -> str | None:
    """Why the graph lacks the property, as a sentence; None where the oracle does not say that it does.

    Args:
        relation: what is tried on the oracle in float64.
        case: the case to look at; None for all.
        yardstick: has the oracle.
    """
    lab, bands = yardstick.laboratory(), yardstick.bands()
    if lab is None or bands is None:
        return None
    try:
        for number, pair in enumerate(relation.observe(lab)):
            if case not in (None, number):
                continue
            found = compare(pair.expected, pair.found)
            if not bands.holds(found):
                port = bands.furthest(found)
                assert port is not None
                size = found.largest[port]
                how = f"differs by {size:.3g}" if isfinite(size) else "has another shape, or is not finite"
                return f"The graph itself lacks the property: on the oracle in float64, {port} {how}."
            if case is not None:
                return None
    except NotApplicableError as error:
        return str(error)
    except EngineFailedError as error:
        if error.kind != "unsupported":
            return f"The graph itself does not allow it: {error.message}"
    return None
