"""What one decode produced, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from harness.engines.base import SessionInfo, TopLogits
from harness.errors import FailureDetails

__all__ = ["Trace", "TraceFailure"]


@dataclass(frozen=True, slots=True)
class TraceFailure:
    """How an engine failed in the middle of a decode.

    Attributes:
        kind: as in `harness.errors.EngineFailedError`.
        step: the step that failed; 0 is the prefill. As many tokens stand in the trace.
        message: what the engine said, one line.
        details: how its process ended, as far as it is known.
        ports: as in `harness.errors.EngineFailedError`.
    """

    kind: Literal["crashed", "timeout", "unsupported"]
    step: int
    message: str
    details: FailureDetails = field(default_factory=FailureDetails)
    ports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """One decode.

    `steps[i]` holds the logits that chose (or, in a forced decode, stood against) `token_ids[i]`:
    step 0 is the prefill of the prompt, step i has seen the prompt and `token_ids[:i]`. Both have the
    same length, also when the engine failed: then they hold what came before.

    Attributes:
        prompt_ids: token IDs of the prompt, at least one.
        token_ids: the tokens decoded, or forced.
        steps: the largest logits at each step.
        seconds: wall-clock time of the runs and reductions, without the observer's.
        session: what ran.
        failure: None where the decode came to its end.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    steps: tuple[TopLogits, ...]
    seconds: float
    session: SessionInfo
    failure: TraceFailure | None = None
