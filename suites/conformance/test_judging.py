"""An outcome says what was found and no more: who may be blamed, what may be rounding, what none can tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import pytest

from harness.errors import EngineFailedError, InvalidRunError
from harness.parity.relations.band import BAND_FACTOR, Bands, NoOracle
from harness.parity.relations.base import NotApplicableError, Pair
from harness.parity.relations.judging import Judged, RelationOutcome, exit_code_of, judge
from harness.parity.relations.laboratory import Laboratory
from harness.parity.relations.observation import Moment, Observation

CANDIDATE, ORACLE = (cast("Laboratory", object()) for _ in range(2))
SPREAD = 1e-6


@dataclass(frozen=True)
class Relation:
    """What each place shows: cases, or what is raised instead of the next one."""

    shown: Mapping[int, tuple[Pair | Exception, ...]]
    graph_may_lack: bool = True
    name: str = "relation"
    statement: str = "one equals the other"

    def observe(self, lab: Laboratory) -> Iterator[Pair]:
        """The cases of this place."""
        for case in self.shown[id(lab)]:
            if isinstance(case, Exception):
                raise case
            yield case


@dataclass
class Yardstick:
    """Bands of one spread for the logits; notes whether it was asked."""

    reason: str | None = None
    asked: list[str] = field(default_factory=list)

    def bands(self) -> Bands:
        """As measured."""
        self.asked.append("bands")
        return Bands({"logits": SPREAD})

    def laboratory(self) -> Laboratory:
        """The oracle's."""
        self.asked.append("laboratory")
        return ORACLE


def pair(size: float = 0.0, *, bitwise: bool = False, tokens: tuple[int, int] = (1, 1)) -> Pair:
    """Two steps whose logits differ by `size`; the choices at the last step."""

    def seen(shift: float, token: int) -> Observation:
        logits = np.float64([1.0, 2.0])
        return {0: Moment(1, logits), 1: Moment(token, logits + shift)}

    return Pair(f"by {size}", seen(0, tokens[0]), seen(size, tokens[1]), bitwise)


def judged(
    *cases: Pair | Exception, oracle: tuple[Pair | Exception, ...] = (), graph_may_lack: bool = True
) -> Judged:
    """What becomes of a relation that shows these cases."""
    relation = Relation({id(CANDIDATE): cases, id(ORACLE): oracle}, graph_may_lack)
    return judge(relation, CANDIDATE, Yardstick())


def failed(kind: str) -> EngineFailedError:
    """An engine's failure."""
    return EngineFailedError("it failed", next_action="-", kind=kind)  # type: ignore[arg-type]


FAR = 2 * BAND_FACTOR * SPREAD
NEAR = BAND_FACTOR * SPREAD / 2


def test_no_difference_is_bitwise_and_asks_nobody() -> None:
    """Nobody runs an oracle for what agrees."""
    yardstick = Yardstick()
    relation = Relation({id(CANDIDATE): (pair(), pair())})
    assert judge(relation, CANDIDATE, yardstick).outcome is RelationOutcome.BITWISE
    assert yardstick.asked == []


def test_a_difference_within_the_band_is_within_it() -> None:
    """And the report has both."""
    found = judged(pair(NEAR))
    assert found.outcome is RelationOutcome.WITHIN_BAND
    assert found.band == BAND_FACTOR * SPREAD
    assert found.furthest == "logits"


def test_other_tokens_within_the_band_are_no_pass() -> None:
    """A near tie is reported as such, and nothing rounds it up."""
    found = judged(pair(NEAR, tokens=(1, 0)))
    assert found.outcome is RelationOutcome.NEAR_TIE
    assert exit_code_of(found.outcome) == 1


@pytest.mark.parametrize("bitwise", [True, False])
def test_a_difference_beyond_the_band_is_broken_where_the_oracle_has_the_relation(bitwise: bool) -> None:
    """In float64 it may differ by what rounding makes."""
    found = judged(pair(FAR, bitwise=bitwise), oracle=(pair(1e-12, bitwise=bitwise),))
    assert found.outcome is RelationOutcome.BROKEN


@pytest.mark.parametrize("bitwise", [True, False])
def test_what_the_oracle_breaks_as_well_is_the_graphs(bitwise: bool) -> None:
    """The reason says by how much the oracle differs."""
    found = judged(pair(FAR, bitwise=bitwise), oracle=(pair(0.25, bitwise=bitwise),))
    assert found.outcome is RelationOutcome.NOT_APPLICABLE
    assert found.reason is not None
    assert "0.25" in found.reason


def test_the_oracle_is_asked_about_the_case_that_failed() -> None:
    """Another case that a graph lacks is no excuse for this one."""
    found = judged(pair(), pair(FAR), oracle=(pair(0.25), pair()))
    assert found.outcome is RelationOutcome.BROKEN


def test_a_bitwise_relation_that_no_graph_lacks_needs_no_oracle() -> None:
    """One bit is enough, and the engine's alone."""
    yardstick = Yardstick()
    relation = Relation({id(CANDIDATE): (pair(1e-15, bitwise=True),)}, graph_may_lack=False)
    found = judge(relation, CANDIDATE, yardstick)
    assert found.outcome is RelationOutcome.BROKEN
    assert yardstick.asked == []


def test_other_tokens_on_equal_logits_are_broken() -> None:
    """Then the engine's own reduction of the logits differs, whatever the shapes."""
    found = judged(pair(tokens=(1, 0)), oracle=(pair(),))
    assert found.outcome is RelationOutcome.BROKEN
    assert found.reason is not None


def test_without_an_oracle_a_difference_is_reported_and_not_judged() -> None:
    """It is a finding, with the reason; what is bitwise by nature is judged all the same."""
    relation = Relation({id(CANDIDATE): (pair(FAR),)})
    found = judge(relation, CANDIDATE, NoOracle("there is none"))
    assert (found.outcome, found.reason) == (RelationOutcome.NOT_JUDGED, "there is none")
    assert found.comparison is not None
    assert found.comparison.first is not None
    assert exit_code_of(found.outcome) == 1
    bitwise = Relation({id(CANDIDATE): (pair(FAR, bitwise=True),)}, graph_may_lack=False)
    assert judge(bitwise, CANDIDATE, NoOracle("-")).outcome is RelationOutcome.BROKEN


@pytest.mark.parametrize("kind", ["crashed", "timeout", "unsupported"])
def test_a_failing_engine_is_an_outcome(kind: str) -> None:
    """Also where an earlier case was fine."""
    found = judged(pair(), failed(kind), oracle=(pair(), pair()))
    assert found.outcome == kind
    assert found.failure is not None
    assert exit_code_of(found.outcome) == 4


def test_what_the_oracle_cannot_run_either_is_not_the_engines() -> None:
    """A graph with a batch of one written into a shape fails on every engine."""
    found = judged(failed("crashed"), oracle=(failed("crashed"),))
    assert found.outcome is RelationOutcome.NOT_APPLICABLE
    lacking = judged(failed("crashed"), oracle=(failed("unsupported"),))
    assert lacking.outcome is RelationOutcome.CRASHED  # an oracle that lacks an operator knows nothing


def test_a_relation_that_no_graph_lacks_blames_the_engine_that_fails() -> None:
    """Nothing that the oracle does could excuse it."""
    assert judged(failed("crashed"), graph_may_lack=False).outcome is RelationOutcome.CRASHED


@pytest.mark.parametrize("graph_may_lack", [True, False])
def test_a_cache_of_a_wrong_shape_is_the_graphs_where_the_oracle_has_it_so_too(graph_may_lack: bool) -> None:
    """Whatever relation feeds it so: a graph that cannot be driven in a way is no engine's fault."""

    def misshapen() -> EngineFailedError:
        return EngineFailedError("present.0.key", next_action="-", kind="crashed", ports=("present.0.key",))

    found = judged(misshapen(), oracle=(misshapen(),), graph_may_lack=graph_may_lack)
    assert found.outcome is RelationOutcome.NOT_APPLICABLE
    assert "present.0.key" in (found.reason or "")
    found = judged(misshapen(), oracle=(pair(),), graph_may_lack=graph_may_lack)
    assert found.outcome is RelationOutcome.CRASHED


def test_a_reason_not_to_try_is_no_outcome_of_what_was_tried() -> None:
    """Before any case the relation is not applicable; after one, that case counts."""
    assert judged(NotApplicableError("Why.")).outcome is RelationOutcome.NOT_APPLICABLE
    assert judged(pair(NEAR), NotApplicableError("Why.")).outcome is RelationOutcome.WITHIN_BAND
    assert judged().outcome is RelationOutcome.NOT_APPLICABLE


def test_a_setting_that_runs_elsewhere_is_not_judged() -> None:
    """An invalid run proves nothing, and ends no other relation."""
    found = judged(InvalidRunError("on the CPU", next_action="-"), graph_may_lack=False)
    assert (found.outcome, found.reason) == (RelationOutcome.NOT_JUDGED, "on the CPU")


def test_the_worst_case_decides_and_is_named() -> None:
    """All of them are counted."""
    found = judged(pair(), pair(NEAR), pair(NEAR / 2))
    assert (found.outcome, found.case, found.cases) == (RelationOutcome.WITHIN_BAND, f"by {NEAR}", 3)


def test_a_premise_counts_only_where_it_fails() -> None:
    """That other shapes round otherwise says nothing of what was asked; that they part beyond it does."""
    near, far = (replace(pair(size, tokens=(1, 0)), premise=True) for size in (NEAR, FAR))
    found = judged(near, pair(bitwise=True), oracle=(pair(), pair()))
    assert (found.outcome, found.cases) == (RelationOutcome.BITWISE, 1)
    assert judged(far, pair(bitwise=True), oracle=(pair(0.25),)).outcome is RelationOutcome.NOT_APPLICABLE
    assert judged(far, pair(bitwise=True), oracle=(pair(),)).outcome is RelationOutcome.BROKEN


def test_a_tensor_that_rounding_does_not_touch_has_a_band_of_zero() -> None:
    """What the oracle gives to the bit in any precision must be given to the bit."""
    assert Bands({"state": 0.0}).of("state") == 0.0
    assert Bands({}).of("another") == 0.0
