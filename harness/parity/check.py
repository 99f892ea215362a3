"""The main job: decode on the candidate, verify on the oracle, say what was found.

Everything that happens is emitted as events; the return value only closes the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.decode.batch import Continued
from harness.decode.prompts import check_prompt_ids, vocabulary_size
from harness.decode.trace import Trace, TraceFailure
from harness.engines.base import SessionInfo
from harness.engines.placement import require_off_cpu
from harness.engines.registry import EngineSpec
from harness.errors import EngineFailedError, InvalidRunError, NotDrivableError, ParityError
from harness.events import (
    CandidateProcess,
    CheckFinished,
    CheckStarted,
    EngineRole,
    EventSink,
    FailureFacts,
    PromptJudged,
    PromptStarted,
    SessionOpened,
    SourceJudged,
    TokenDecoded,
)
from harness.parity.attribution import attribute, overall_attribution
from harness.parity.candidate import Candidate, CandidateSide, Prompt
from harness.parity.compare import TokenComparison, compare_tokens, compare_with_itself
from harness.parity.reference import OracleMode, Reference
from harness.parity.refusing import refusal_of
from harness.parity.source import SourceModel, SourcePlan
from harness.parity.verdict import Verdict, exit_code_of, worst_verdict
from harness.topology.spec import Topology

__all__ = ["TOP_K", "CheckPlan", "Prompt", "run_check"]

INTERRUPTED = 130
TOP_K = 5
"""Logits kept for each position: enough to see what a near miss was near to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPlan:
    """A check whose inputs are all known to be valid.

    Attributes:
        package: what the user named.
        model: the graph file.
        model_name: how reports name it: its path, or the name of a built-in package, which is the same
            on every machine.
        model_sha256: as `harness.package.model_sha256`.
        topology: of the graph.
        topology_outcome: `derived` or `declared`.
        candidate: the engine under test, or what it did another day.
        oracle: the engine trusted as reference.
        prompts: at least one.
        oracle_mode: one forward pass over prompt and tokens, or a step for each token.
        max_new_tokens: tokens to decode for each prompt, at least one.
        stop_ids: end-of-sequence IDs; the ID that stops is the last token of the decode.
        candidate_process: whether the candidate's sessions live in worker processes.
        strict_placement: whether a node of the candidate on the CPU makes the run invalid.
        source: the model that the package was exported from; None where it is not at hand.
        warnings: what was warned of already, for the report.
    """

    package: str
    model: Path
    model_name: str
    model_sha256: str
    topology: Topology
    topology_outcome: str
    candidate: EngineSpec | CandidateSide
    oracle: EngineSpec
    prompts: Sequence[Prompt]
    max_new_tokens: int
    oracle_mode: OracleMode = "one-pass"
    stop_ids: tuple[int, ...] = ()
    candidate_process: CandidateProcess = "in-process"
    strict_placement: bool = False
    source: SourcePlan | None = None
    warnings: Sequence[str] = ()


def run_check(plan: CheckPlan, emit: EventSink) -> CheckFinished:
    """Run a check and emit what happens; the last event is also returned.

    A failing engine is a verdict, an error of ours or an interruption ends the stream with what was done
    so far. Only defects of this project and failing sinks raise.
    """
    check = _Check(plan, emit)
    try:
        end = check.run()
    except ParityError as error:
        invalid = isinstance(error, InvalidRunError)
        end = CheckFinished(
            verdict=Verdict.INVALID_RUN if invalid else None,
            exit_code=error.exit_code,
            error={"message": error.message, "next": error.next_action},
            refusal=error.refusal if isinstance(error, NotDrivableError) else None,
        )
    except KeyboardInterrupt:
        end = CheckFinished(verdict=None, exit_code=INTERRUPTED, interrupted=True, error=check.interruption())
    emit(end)
    return end


@dataclass(slots=True)
class _Decoded:
    """What the candidate made of a prompt, and what was asked of others about it.

    Attributes:
        index: which prompt.
        prompt: what was decoded.
        trace: the decode; None where there is none.
        judged: the verdict on a decode that there is not.
        own: what the source says of its tokens, once it was asked.
        again: the second decode, or how it failed; None where there was none.
    """

    index: int
    prompt: Prompt
    trace: Trace | None = None
    judged: PromptJudged | None = None
    own: Trace | None = None
    again: Trace | EngineFailedError | None = None


class _Check:
    """One run of a plan: the two sides and the stream."""

    def __init__(self, plan: CheckPlan, emit: EventSink) -> None:
        self._plan = plan
        self._emit = emit
        self._candidate: CandidateSide = (
            Candidate(
                plan.candidate,
                plan.model,
                plan.topology,
                max_new_tokens=plan.max_new_tokens,
                stop_ids=plan.stop_ids,
                top_k=TOP_K,
            )
            if isinstance(plan.candidate, EngineSpec)
            else plan.candidate
        )
        self._source: SourceModel | None = None
        self._blamed: dict[int, str | None] = {}
        self._waiting: list[_Decoded] = []
        self._in_one_pass: list[_Decoded] = []
        self._verdicts: dict[int, Verdict] = {}

    def interruption(self) -> Mapping[str, str]:
        """What ended a run that was interrupted."""
        if self._verdicts:
            left = "; the report holds what was judged before"
        else:
            left = " before any prompt was judged"
        return {
            "message": f"The check was interrupted{left}.",
            "next": "Run it again to judge every prompt.",
        }

    def run(self) -> CheckFinished:
        plan = self._plan
        # All sides are opened before anything is said: what turns out to be bad input leaves no report.
        oracle = self._open_oracle()
        failure = None
        try:
            if plan.source is not None:
                self._source = SourceModel(plan.source, top_k=TOP_K)
            try:
                inventory = self._candidate.inventory
                for prompt in plan.prompts:
                    check_prompt_ids(prompt.token_ids, vocabulary_size(inventory, plan.topology))
            except (EngineFailedError, InvalidRunError) as error:
                failure = error
            self._announce(oracle, opened=failure is None)
            oracle.require_proof()
            if isinstance(failure, InvalidRunError):
                raise failure
            if plan.strict_placement and failure is None:
                require_off_cpu(self._candidate.info)
            for index, prompt in enumerate(plan.prompts):
                asked = prompt.source_ids or prompt.token_ids
                self._emit(PromptStarted(index, prompt.text, asked, plan.max_new_tokens))
                try:
                    self._decode(index, prompt, failure)
                except (KeyboardInterrupt, ParityError):
                    # What was decoded before is not lost. A second interruption ends this, too.
                    self._judge_waiting(oracle)
                    raise
                rows = self._rows()
                last = index == len(plan.prompts) - 1
                if last or prompt.extra or not rows or not oracle.gathers(rows):
                    self._judge_waiting(oracle)
        finally:
            oracle.close()
            self._candidate.close()
            if self._source is not None:
                self._source.close()
        verdict = worst_verdict(list(self._verdicts.values()))
        blamed = overall_attribution(list(self._blamed.values()))
        return CheckFinished(verdict=verdict, exit_code=exit_code_of(verdict), attribution=blamed)

    def _decode(self, index: int, prompt: Prompt, failure: EngineFailedError | None) -> None:
        """Let the candidate decode one prompt; what comes of it then waits to be judged."""
        decoded = _Decoded(index, prompt)
        try:
            if failure is not None:
                raise failure
            progress = self._progress(index, "candidate")
            trace = decoded.trace = self._candidate.decode(prompt, on_step=progress)
            self._require_drivable(prompt, trace)
        except EngineFailedError as error:
            decoded.judged = _failed(index, _facts(error), 0.0)
        self._waiting.append(decoded)

    def _require_drivable(self, prompt: Prompt, trace: Trace) -> None:
        """See that no cache came back in a wrong shape from the candidate, or from it alone.

        Raises:
            NotDrivableError: it does from the oracle as well.
        """
        plan = self._plan
        refusal = refusal_of(
            trace, oracle=plan.oracle, model=plan.model, topology=plan.topology, extra=prompt.extra
        )
        if refusal is not None:
            raise refusal

    def _rows(self) -> list[Continued]:
        """What waits and can be a row of a batch."""
        return [
            (decoded.trace.prompt_ids, decoded.trace.token_ids)
            for decoded in self._waiting
            if decoded.trace is not None and decoded.trace.token_ids and not decoded.prompt.extra
        ]

    def _judge_waiting(self, oracle: Reference) -> None:
        """Judge what waits, in order; each verdict is out before the next one is looked for."""
        oracle.prepare(self._rows())
        while self._waiting:
            for judged in self._judgements(self._waiting.pop(0), oracle):
                self._verdicts[judged.index] = Verdict(judged.verdict)
                self._emit(judged)

    def _judgements(self, decoded: _Decoded, oracle: Reference) -> list[PromptJudged]:
        """The verdict on what was decoded; where it takes the first steps, behind new ones on those before.

        What shows at one prompt that a graph must be stepped holds at all of them: no report mixes the two.
        """
        if decoded.trace is None:
            assert decoded.judged is not None, "neither a decode nor a reason why there is none"
            return [decoded.judged]
        judged = self._judge(decoded, decoded.trace, oracle)
        if judged.oracle_mode == "one-pass":
            self._in_one_pass.append(decoded)
        if judged.oracle_mode != "stepwise":
            return [judged]
        before, self._in_one_pass = self._in_one_pass, []
        again = [self._judge(each, each.trace, oracle) for each in before if each.trace is not None]
        return [*again, judged]

    def _open_oracle(self) -> Reference:
        plan = self._plan
        try:
            return Reference(plan.oracle, plan.model, plan.topology, mode=plan.oracle_mode, top_k=TOP_K)
        except EngineFailedError as error:
            raise InvalidRunError(
                f"The oracle cannot run this graph, so nothing can be verified: {error.message}",
                next_action=error.next_action,
            ) from error

    def _announce(self, oracle: Reference, *, opened: bool) -> None:
        plan = self._plan
        self._emit(
            CheckStarted(
                package=plan.package,
                model_path=plan.model_name,
                model_sha256=plan.model_sha256,
                topology_outcome=plan.topology_outcome,
                kv_inputs=len(plan.topology.kv_inputs),
                state_pairs=len(plan.topology.state_pairs),
                candidate=plan.candidate.name,
                oracle=plan.oracle.name,
                oracle_mode=plan.oracle_mode,
                prompts=len(plan.prompts),
                candidate_process=plan.candidate_process,
                source=None if plan.source is None else plan.source.spec.name,
                source_path=None if plan.source is None else str(plan.source.folder),
                warnings=tuple(plan.warnings),
            )
        )
        if self._source is not None:
            self._emit(_opened_event("source", self._source.info, self._source.seconds))
        self._emit(_opened_event("oracle", oracle.info, oracle.seconds, oracle.proof))
        if opened:
            candidate = self._candidate
            self._emit(_opened_event("candidate", candidate.info, candidate.seconds))

    def _judge(self, decoded: _Decoded, trace: Trace, oracle: Reference) -> PromptJudged:
        index, prompt = decoded.index, decoded.prompt
        facts = None if trace.failure is None else _facts(trace.failure)
        if not trace.token_ids:
            assert facts is not None, "a decode without tokens and without a failure"
            return _failed(index, facts, trace.seconds)
        progress = self._progress(index, "oracle")
        try:
            own = decoded.own = decoded.own or self._ask_source(index, trace)
            rivals = () if own is None else [step.argmax for step in own.steps]
            reference = oracle.verify(
                trace.prompt_ids, trace.token_ids, rivals=rivals, extra=prompt.extra, on_step=progress
            )
            compared = None if own is None or self._source is None else self._source.compare(own, reference)
        except InvalidRunError as error:
            where = f"Prompt {index + 1}: {error.message}"
            raise InvalidRunError(where, next_action=error.next_action) from error
        found = compare_tokens(trace, reference.trace, bands=reference.bands, undecided=reference.undecided)
        if facts is None and found.first_divergence is not None:
            found, facts = self._repeat(decoded, trace, found)
        verdicts = [found.verdict if facts is None else Verdict(facts.kind)]
        source = None
        if compared is not None:
            verdicts.append(compared.verdict)
            source = SourceJudged(
                verdict=compared.verdict,
                source_forced_ids=compared.source_ids,
                first_divergence=compared.first_divergence,
                attribution=attribute(found, compared),
                seconds=compared.seconds,
            )
            self._blamed[index] = source.attribution
        return PromptJudged(
            index=index,
            verdict=worst_verdict(verdicts),
            candidate_ids=trace.token_ids,
            oracle_ids=found.oracle_ids,
            oracle_forced_ids=found.oracle_forced_ids,
            min_margin=found.min_margin,
            candidate_seconds=trace.seconds,
            oracle_seconds=reference.trace.seconds,
            undecided=reference.undecided,
            oracle_mode=reference.mode,
            first_divergence=found.first_divergence,
            failure=facts,
            source=source,
        )

    def _ask_source(self, index: int, trace: Trace) -> Trace | None:
        """What the source says of the candidate's tokens; None where there is none."""
        if self._source is None:
            return None
        own = self._source.along(trace.prompt_ids, trace.token_ids)
        self._progress(index, "source")(len(own.token_ids) - 1, own.token_ids[-1])
        return own

    def _repeat(
        self, decoded: _Decoded, trace: Trace, found: TokenComparison
    ) -> tuple[TokenComparison, FailureFacts | None]:
        """Decode a prompt that differs from the oracle once more: does it differ from itself?

        Twice and no more: a recording holds no third decode.
        """
        if decoded.again is None:
            try:
                decoded.again = self._candidate.decode(decoded.prompt)
            except EngineFailedError as error:
                decoded.again = error
        again = decoded.again
        if isinstance(again, EngineFailedError):
            return found, _facts(again)
        facts = None if again.failure is None else _facts(again.failure)
        return compare_with_itself(found, trace, again), facts

    def _progress(self, index: int, role: EngineRole) -> _Progress:
        return _Progress(self._emit, index, role)


def _opened_event(
    role: EngineRole, info: SessionInfo, seconds: float, proof: Mapping[str, Any] | None = None
) -> SessionOpened:
    return SessionOpened(
        role=role,
        engine=info.engine,
        version=info.version,
        settings=info.settings,
        placement=info.placement,
        mode=info.mode,
        seconds=seconds,
        proof=proof,
    )


@dataclass(frozen=True, slots=True)
class _Progress:
    emit: EventSink
    index: int
    role: EngineRole

    def __call__(self, step: int, token_id: int) -> None:
        self.emit(TokenDecoded(self.index, self.role, step, token_id))


def _facts(failure: EngineFailedError | TraceFailure) -> FailureFacts:
    return FailureFacts(failure.kind, failure.message, failure.step, **asdict(failure.details))


def _failed(index: int, facts: FailureFacts, seconds: float) -> PromptJudged:
    return PromptJudged(
        index=index,
        verdict=facts.kind,
        candidate_ids=(),
        oracle_ids=(),
        oracle_forced_ids=(),
        min_margin=None,
        candidate_seconds=seconds,
        oracle_seconds=0.0,
        failure=facts,
    )
