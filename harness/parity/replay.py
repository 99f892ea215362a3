"""A candidate that decodes nothing: what it did when it was recorded is what it does."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from harness.decode.loop import StepObserver
from harness.decode.trace import Trace
from harness.engines.base import SessionInfo
from harness.engines.ort import CPU_ENGINE, CUDA_ENGINE
from harness.engines.ort_placement import require_on_device
from harness.engines.ort_runtime import CUDA_PROVIDER
from harness.errors import InputError
from harness.parity.candidate import Prompt
from harness.parity.recorded import RecordedDecode, RecordedEngine, Recording
from harness.ports import PortInventory

__all__ = ["Replay", "require_complete", "require_same_model"]


class Replay:
    """The candidate side of a check, from a recording: a `harness.parity.candidate.CandidateSide`."""

    def __init__(self, recording: Recording, inventory: PortInventory) -> None:
        """`inventory` has the ports as the file of the model has them."""
        self._engine = recording.engine
        self._inventory = inventory
        # A check may ask for the same tokens several times: each prompt has decodes of its own.
        self._left: Sequence[tuple[Prompt, deque[RecordedDecode]]] = [
            (each.prompt, deque(each.decodes)) for each in recording.prompts
        ]

    @property
    def name(self) -> str:
        """Name of the engine that was recorded."""
        return self._engine.name

    @property
    def inventory(self) -> PortInventory:
        """The ports of the model.

        Raises:
            EngineFailedError: as the engine did where it never opened.
            InvalidRunError: its nodes ran elsewhere than on what it was asked for.
        """
        if self._engine.failure is not None:
            raise self._engine.failure
        provider = _provider_asked(self._engine)
        if provider is not None:
            # What opens such a session asks the same; a trace may say what no session did.
            require_on_device(provider, {"providers": {}, **(self.info.placement or {})})
        return self._inventory

    @property
    def info(self) -> SessionInfo:
        """What ran and how."""
        assert self._engine.info is not None, "an engine that never opened says nothing of itself"
        return self._engine.info

    @property
    def seconds(self) -> float:
        """How long loading took."""
        return self._engine.seconds

    def decode(self, prompt: Prompt, *, on_step: StepObserver | None = None) -> Trace:
        """The next decode of this very prompt of the recording.

        Raises:
            EngineFailedError: as the engine did where it could not be opened anew.
        """
        decodes = next(left for known, left in self._left if known is prompt)
        decoded = decodes.popleft()
        if decoded.trace is None:
            assert decoded.failure is not None, "a decode without a trace failed"
            raise decoded.failure
        for step, token in enumerate(decoded.trace.token_ids):
            if on_step is not None:
                on_step(step, token)
        return decoded.trace

    def close(self) -> None:
        """Nothing is held."""


def _provider_asked(engine: RecordedEngine) -> str | None:
    """The provider that must have done the work; None where it is the CPU, or an engine without any."""
    if engine.name == CUDA_ENGINE.name:
        return CUDA_PROVIDER
    return str(engine.options.get("provider", "")) or None if engine.name == CPU_ENGINE.name else None


def require_same_model(recording: Recording, *, sha256: str, topology_sha256: str, package: str) -> None:
    """Refuse a recording of another model, or of another reading of this one.

    Raises:
        InputError: naming both hashes.
    """
    recorded = recording.model
    if recorded.sha256 != sha256:
        raise InputError(
            f"The trace is of another model than {package}: its sha256 is {recorded.sha256:.12} "
            f"({recorded.name}), and not {sha256:.12}.",
            next_action="Name the package that was recorded.",
        )
    if recorded.topology_sha256 != topology_sha256:
        raise InputError(
            f"The trace was recorded with another topology of {package}: its sha256 is "
            f"{recorded.topology_sha256:.12}, and not {topology_sha256:.12}.",
            next_action="Use the sidecars that it was recorded with and onnx-parity "
            f"{recording.version}, or record it anew.",
        )


def require_complete(recording: Recording, *, top_k: int, vocabulary: int | None = None) -> None:
    """Refuse a recording that lacks what a check needs, or that no greedy decode gives.

    Args:
        recording: its decodes are looked at.
        top_k: how many of the largest logits a check shows.
        vocabulary: how many IDs the decoder has; None where that is not known.

    Raises:
        InputError: naming the prompt and what is missing.
    """
    if recording.top_k < top_k:
        raise _incomplete(f"keeps {recording.top_k} logits a step, and a check needs {top_k}")
    if not recording.prompts:
        raise _incomplete("has no prompt")
    if recording.max_new_tokens < 1:
        raise _incomplete("asked for no token")
    opened = recording.engine.failure is None
    if opened != (recording.engine.info is not None):
        raise _incomplete(
            "does not say what ran" if opened else "says what ran of an engine that never opened"
        )
    for number, each in enumerate(recording.prompts, 1):
        if not opened:
            if each.decodes:
                raise _incomplete(f"has a decode of prompt {number} by an engine that never opened")
            continue
        if not each.decodes:
            raise _incomplete(f"has no decode of prompt {number}")
        first = each.decodes[0]
        failed = first.trace is None or first.trace.failure is not None
        if not failed and len(each.decodes) < 2:
            raise _incomplete(
                f"has one decode of prompt {number}: whether the engine differs from itself cannot be told"
            )
        for decode in each.decodes:
            if decode.trace is not None:
                _check_length(decode.trace, recording, number)
                _check_logits(decode.trace, recording, number, vocabulary)


def _check_length(trace: Trace, recording: Recording, number: int) -> None:
    """A decode is as long as was asked for, unless it was stopped or the engine failed."""
    count, most = len(trace.token_ids), recording.max_new_tokens
    stopped = [i for i, token in enumerate(trace.token_ids) if token in recording.stop_ids]
    if trace.failure is not None:
        expected = trace.failure.step
    else:
        expected = min(stopped[0] + 1 if stopped else most, most)
    if count != expected or count > most:
        raise _incomplete(f"has {count} tokens of prompt {number} where a decode has {expected}")


def _check_logits(trace: Trace, recording: Recording, number: int, vocabulary: int | None) -> None:
    """Each step has as many logits as were asked for, of IDs that there are."""
    due = recording.top_k if vocabulary is None else min(recording.top_k, vocabulary)
    for index, step in enumerate(trace.steps):
        where = f"at step {index} of prompt {number}"
        if len(step.token_ids) > due or (vocabulary is not None and len(step.token_ids) < due):
            raise _incomplete(f"has {len(step.token_ids)} logits {where}, where {due} are due")
        if vocabulary is not None and max(step.token_ids) >= vocabulary:
            raise _incomplete(
                f"has token ID {max(step.token_ids)} {where}, and the vocabulary has 0 to {vocabulary - 1}"
            )


def _incomplete(what: str) -> InputError:
    return InputError(f"The trace {what}.", next_action="Record it anew with `onnx-parity record`.")
