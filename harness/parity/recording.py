"""Decode on an engine and keep what a check needs, so that the oracle can judge it elsewhere, another day."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from harness.decode.loop import StepObserver
from harness.decode.prompts import check_prompt_ids, vocabulary_size
from harness.engines.base import OptionValue, Session, TensorHandle
from harness.engines.placement import require_off_cpu
from harness.engines.registry import EngineSpec
from harness.engines.tensor_types import dtype_of_array
from harness.errors import EngineFailedError, NotDrivableError
from harness.events import CandidateProcess
from harness.parity.candidate import Candidate, Prompt
from harness.parity.check import TOP_K
from harness.parity.recorded import (
    RecordedDecode,
    RecordedEngine,
    RecordedModel,
    RecordedPrompt,
    RecordedTensor,
    Recording,
    tensor_sha256,
)
from harness.parity.refusing import refusal_of
from harness.topology.spec import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RecordObserver", "RecordPlan", "record", "refusal_in"]

RecordObserver: TypeAlias = Callable[[int, RecordedDecode], None]
"""Told of each decode, with the index of its prompt, when it is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPlan:
    """A recording whose inputs are all known to be valid.

    Attributes:
        model: the graph file.
        facts: what is said of it.
        topology: of the graph.
        engine: what decodes.
        oracle: says whose fault a cache of a wrong shape is; runs in no other case.
        options: every option of the engine, given or default.
        process: whether its sessions live in worker processes.
        prompts: at least one.
        max_new_tokens: tokens to decode for each prompt, at least one.
        stop_ids: end-of-sequence IDs; the ID that stops is the last token of the decode.
        notes: what the report says of an encoder and its inputs.
        states: whether caches and states are kept whole, of the first decode of each prompt.
        strict_placement: whether a node on the CPU makes the run invalid.
    """

    model: Path
    facts: RecordedModel
    topology: Topology
    engine: EngineSpec
    oracle: EngineSpec
    options: Mapping[str, OptionValue]
    process: CandidateProcess
    prompts: Sequence[Prompt]
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    notes: Mapping[str, str]
    states: bool = False
    strict_placement: bool = False


def record(
    plan: RecordPlan, *, on_decode: RecordObserver | None = None, on_step: StepObserver | None = None
) -> Recording:
    """Decode every prompt, and then every one again, as a check does with what differs from the oracle.

    A decode that failed is not repeated: nothing of it has differed yet. It is recorded as it is: that an
    engine fails is a finding about it, unless it is the graph's fault (`refusal_in`).

    Raises:
        InvalidRunError: the engine does not run as asked; such a run proves nothing and leaves no trace.
        NotDrivableError, InputError: as `harness.decode.loop.greedy_decode`.
    """
    candidate = Candidate(
        plan.engine,
        plan.model,
        plan.topology,
        max_new_tokens=plan.max_new_tokens,
        stop_ids=plan.stop_ids,
        top_k=TOP_K,
    )
    decodes: list[list[RecordedDecode]] = [[] for _ in plan.prompts]
    info, failure = None, None
    try:
        try:
            vocabulary = vocabulary_size(candidate.inventory, plan.topology)
            info, seconds = candidate.info, candidate.seconds
        except EngineFailedError as error:
            failure, vocabulary, seconds = error, None, candidate.seconds
        for prompt in plan.prompts:
            check_prompt_ids(prompt.token_ids, vocabulary)
        if info is not None and plan.strict_placement:
            require_off_cpu(info)
        for keep in (plan.states, False):
            for index, prompt in enumerate(plan.prompts):
                done = decodes[index]
                if failure is not None or (done and (done[0].trace is None or done[0].trace.failure)):
                    continue
                done.append(_decode(candidate, prompt, keep=keep, on_step=on_step))
                if on_decode is not None:
                    on_decode(index, done[-1])
    finally:
        candidate.close()
    return Recording(
        utc=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        version=version("onnx-parity"),
        model=plan.facts,
        engine=RecordedEngine(
            name=plan.engine.name,
            options=plan.options,
            process=plan.process,
            info=info,
            seconds=seconds,
            failure=failure,
        ),
        max_new_tokens=plan.max_new_tokens,
        stop_ids=plan.stop_ids,
        top_k=TOP_K,
        notes=plan.notes,
        prompts=tuple(
            RecordedPrompt(prompt, tuple(done)) for prompt, done in zip(plan.prompts, decodes, strict=True)
        ),
    )


def refusal_in(plan: RecordPlan, recording: Recording) -> NotDrivableError | None:
    """Why the graph of a recording cannot be driven, at the first prompt where it cannot; None where it can.

    The recording says it as well: a check of it asks its own oracle.
    """
    for each in recording.prompts:
        for decode in each.decodes[:1]:
            if decode.trace is not None:
                refusal = refusal_of(
                    decode.trace,
                    oracle=plan.oracle,
                    model=plan.model,
                    topology=plan.topology,
                    extra=each.prompt.extra,
                )
                if refusal is not None:
                    return refusal
    return None


def _decode(
    candidate: Candidate, prompt: Prompt, *, keep: bool, on_step: StepObserver | None
) -> RecordedDecode:
    outputs: dict[str, RecordedTensor] = {}

    def look(session: Session, given: Mapping[str, TensorHandle]) -> None:
        for name, handle in given.items():
            outputs[name] = _recorded(session.copy_out(handle), keep=keep)

    try:
        trace = candidate.decode(prompt, on_step=on_step, on_end=look)
    except EngineFailedError as error:
        return RecordedDecode(None, error)
    return RecordedDecode(trace, outputs={} if trace.failure is not None else outputs)


def _recorded(array: NDArray[Any], *, keep: bool) -> RecordedTensor:
    return RecordedTensor(
        dtype=dtype_of_array(array.dtype),
        shape=array.shape,
        sha256=tensor_sha256(array),
        kept=keep,
        array=array if keep else None,
    )
