"""Try every relation on one engine and one package, and say what holds.

Everything that happens is emitted as events; the return value only closes the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from harness.engines.base import SessionInfo
from harness.engines.placement import require_off_cpu
from harness.engines.registry import EngineSpec
from harness.errors import EngineFailedError, InvalidRunError, NotDrivableError, ParityError
from harness.events import FailureFacts
from harness.parity.refusing import refusal_after
from harness.parity.relations.band import BAND_FACTOR, NoOracle, Oracle
from harness.parity.relations.base import Relation
from harness.parity.relations.catalogue import RELATIONS
from harness.parity.relations.judging import Judged, RelationOutcome, exit_code_of, judge
from harness.parity.relations.laboratory import Laboratory, Subject
from harness.parity.verdict import first_exit_code
from harness.relation_events import (
    BandsMeasured,
    FirstDifference,
    ReferenceDecoded,
    RelationEvent,
    RelationJudged,
    RelationsFinished,
    RelationSink,
    RelationsStarted,
    RelationStarted,
)

__all__ = ["CONFORMANT", "ConformPlan", "run_conform"]

CONFORMANT = "conformant"
"""The verdict where no relation is broken, and each that applies, at least one, was judged."""

_PROVES_NOTHING = 6

_INTERRUPTED = 130
_NO_ORACLE = "Without --rounding model there is no band to judge by."


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformPlan:
    """Relations to try, with inputs that are all known to be valid.

    Attributes:
        package: what the user named.
        model_name: how reports name the graph.
        model_sha256: as `harness.package.model_sha256`.
        topology_outcome: `derived` or `declared`.
        engine: the engine under test.
        process: where its sessions live, as in `harness.relation_events.RelationsStarted`.
        subject: what is decoded.
        text: of the prompt; None for one given as token IDs.
        oracle: says whose fault a cache of a wrong shape is, and measures how far rounding reaches.
        judges_rounding: whether it does the latter, or differences are reported without a judgement.
        relations: those to try, in order.
        strict_placement: whether a node on the CPU makes the run invalid.
        warnings: what was warned of already, for the report.
    """

    package: str
    model_name: str
    model_sha256: str
    topology_outcome: str
    engine: EngineSpec
    process: str
    subject: Subject
    text: str | None = None
    oracle: EngineSpec
    judges_rounding: bool = True
    relations: Sequence[Relation] = RELATIONS
    strict_placement: bool = False
    warnings: Sequence[str] = ()


def run_conform(plan: ConformPlan, emit: RelationSink) -> RelationsFinished:
    """Try the relations and emit what happens; the last event is also returned.

    A failing engine is an outcome, an error of ours or an interruption ends the stream with what was done so
    far. Only defects of this project and failing sinks raise.
    """
    judged: list[RelationJudged] = []

    def noted(event: RelationEvent) -> None:
        if isinstance(event, RelationJudged):
            judged.append(event)
        emit(event)

    try:
        end = _run(plan, noted)
    except EngineFailedError as error:
        end = RelationsFinished(error.kind, error.exit_code, failure=_facts(error))
    except ParityError as error:
        end = RelationsFinished(
            "invalid-run" if isinstance(error, InvalidRunError) else None,
            error.exit_code,
            error={"message": error.message, "next": error.next_action},
            refusal=error.refusal if isinstance(error, NotDrivableError) else None,
        )
    except KeyboardInterrupt:
        end = RelationsFinished(None, _INTERRUPTED, error=_interruption(bool(judged)), interrupted=True)
    emit(end)
    return end


def _interruption(judged: bool) -> Mapping[str, str]:
    left = "; the report holds what was judged before" if judged else " before any of them was judged"
    return {"message": f"The relations were interrupted{left}.", "next": "Run it again to try all of them."}


def _run(plan: ConformPlan, emit: RelationSink) -> RelationsFinished:
    lab = Laboratory(plan.engine, plan.subject)
    try:
        reference = _decode_reference(plan, lab)
    except (EngineFailedError, InvalidRunError) as error:
        emit(_start(plan))  # both are findings; anything else is bad input, and leaves no report
        if lab.info is not None:
            emit(_reference(lab.info, lab.chosen))
        if isinstance(error, EngineFailedError) and error.ports:
            _require_drivable(plan, lab.chosen)
        raise
    emit(_start(plan))
    emit(reference)
    oracle = Oracle(plan.oracle, plan.subject, lambda: lab.tokens) if plan.judges_rounding else None
    is_told = False
    outcomes: list[RelationOutcome] = []
    for relation in plan.relations:
        emit(RelationStarted(relation.name))
        judged = judge(relation, lab, oracle or NoOracle(_NO_ORACLE))
        outcomes.append(judged.outcome)
        if oracle is not None and oracle.was_asked and not is_told:
            emit(_bands(oracle))
            is_told = True
        emit(_event(relation, judged))
    return _end(outcomes)


def _end(outcomes: Sequence[RelationOutcome]) -> RelationsFinished:
    """The worst outcome decides; where none applies, nothing was compared, and that is never a pass."""
    if all(outcome is RelationOutcome.NOT_APPLICABLE for outcome in outcomes):
        return RelationsFinished(
            RelationOutcome.NOT_APPLICABLE.value,
            _PROVES_NOTHING,
            error={
                "message": f"Nothing was compared: none of the relations that were tried ({len(outcomes)}) "
                "applies here.",
                "next": "The reasons stand in the report. Name other relations with --relation, leave the "
                "option out to try all, or choose another engine or prompt.",
            },
        )
    worst = min(outcomes, key=list(RelationOutcome).index)
    code = first_exit_code(map(exit_code_of, outcomes))
    return RelationsFinished(worst.value if code else CONFORMANT, code)


def _start(plan: ConformPlan) -> RelationsStarted:
    subject, topology = plan.subject, plan.subject.topology
    return RelationsStarted(
        package=plan.package,
        model_path=plan.model_name,
        model_sha256=plan.model_sha256,
        topology_outcome=plan.topology_outcome,
        kv_inputs=len(topology.kv_inputs),
        state_pairs=len(topology.state_pairs),
        engine=plan.engine.name,
        process=plan.process,
        text=plan.text,
        prompt_ids=subject.prompt,
        max_new_tokens=subject.steps,
        relations=tuple(relation.name for relation in plan.relations),
        seed=subject.seed,
        warnings=tuple(plan.warnings),
    )


def _decode_reference(plan: ConformPlan, lab: Laboratory) -> ReferenceDecoded:
    """The decode that all relations stand against.

    Raises:
        EngineFailedError: the engine failed.
        InvalidRunError: its logits are not finite, so that what equals them proves nothing; or a node ran
            where none may.
    """
    import numpy as np

    for step, moment in lab.reference.items():
        if not np.isfinite(moment.logits.astype(np.float64)).any() or np.isnan(moment.logits).any():
            raise InvalidRunError(
                f"{lab.spec.name}: the logits hold NaN, or nothing finite, at step {step}: that two decodes "
                "agree on them proves nothing.",
                next_action="See `onnx-parity check`, which says where they begin.",
            )
    assert lab.info is not None
    if plan.strict_placement:
        require_off_cpu(lab.info)
    return _reference(lab.info, lab.tokens)


def _require_drivable(plan: ConformPlan, chosen: Sequence[int]) -> None:
    """See that a cache of a wrong shape came from the engine alone, after the tokens that it chose.

    Raises:
        NotDrivableError: it does from the oracle as well.
    """
    subject = plan.subject
    refusal = refusal_after(
        subject.prompt,
        chosen,
        oracle=plan.oracle,
        model=subject.model,
        topology=subject.topology,
        extra=subject.extra,
    )
    if refusal is not None:
        raise refusal


def _reference(info: SessionInfo, token_ids: tuple[int, ...]) -> ReferenceDecoded:
    return ReferenceDecoded(info.version, info.settings, info.placement, info.mode, token_ids)


def _bands(oracle: Oracle) -> BandsMeasured:
    bands = oracle.bands()
    return BandsMeasured(oracle.name, BAND_FACTOR, {} if bands is None else bands.spreads, oracle.reason)


def _event(relation: Relation, judged: Judged) -> RelationJudged:
    found = judged.comparison
    first = None if found is None else found.first
    return RelationJudged(
        name=relation.name,
        statement=relation.statement,
        outcome=judged.outcome.value,
        reason=judged.reason,
        case=judged.case,
        must=None if judged.bitwise is None else "bitwise" if judged.bitwise else "band",
        cases=judged.cases,
        tokens=0 if found is None else found.tokens,
        states=0 if found is None else found.states,
        tokens_part_at=None if found is None else found.tokens_part_at,
        first=None if first is None else FirstDifference(**asdict(first)),
        port=judged.furthest,
        size=None if found is None or judged.furthest is None else found.largest[judged.furthest],
        band=judged.band,
        seconds=judged.seconds,
        failure=None if judged.failure is None else _facts(judged.failure),
    )


def _facts(error: EngineFailedError) -> FailureFacts:
    return FailureFacts(error.kind, error.message, error.step, **asdict(error.details))
