"""What a trace file holds: the decodes of one engine on one model, and all that a check needs to judge."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from harness.decode.trace import Trace
from harness.engines.base import OptionValue, SessionInfo
from harness.errors import EngineFailedError
from harness.events import CandidateProcess
from harness.parity.candidate import Prompt
from harness.topology.spec import Topology

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "RecordedDecode",
    "RecordedEngine",
    "RecordedModel",
    "RecordedPrompt",
    "RecordedTensor",
    "Recording",
    "canonical_sha256",
    "stored_bytes",
    "tensor_sha256",
    "topology_sha256",
]


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """What an output held after the last call of a decode.

    Attributes:
        dtype: in the vocabulary of `harness.ports.Port.dtype`.
        shape: concrete extents.
        sha256: over its bytes, in C order and little-endian, in hex.
        kept: whether the trace file has it whole.
        array: the tensor itself, before it is written; None when it was not asked for or has been read.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    kept: bool = False
    array: NDArray[Any] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RecordedDecode:
    """One decode, or why there is none.

    Attributes:
        trace: what it produced; None where the engine could not be opened for it.
        failure: why it could not; None where there is a trace.
        outputs: what the last call gave, by port: the logits, and every cache and state. Empty where the
            engine failed on the way.
    """

    trace: Trace | None
    failure: EngineFailedError | None = None
    outputs: Mapping[str, RecordedTensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """A prompt with its decodes: two, the second one to show whether the engine differs from itself.

    A decode that failed is the only one; and there is none where the engine never opened.
    """

    prompt: Prompt
    decodes: tuple[RecordedDecode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedModel:
    """The model that was decoded.

    Attributes:
        name: how a report names it.
        sha256: as `harness.package.model_sha256`.
        topology_sha256: as `topology_sha256`.
        topology_outcome: `derived` or `declared`.
        ignore_declared: whether the topology was derived whatever the sidecars say.
    """

    name: str
    sha256: str
    topology_sha256: str
    topology_outcome: str
    ignore_declared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEngine:
    """The engine that decoded.

    Attributes:
        name: without options.
        options: every option that it has, given or default.
        process: whether its sessions lived in worker processes.
        info: what its first session said of itself; None where it never opened.
        seconds: how long loading took.
        failure: why it never opened; None where it did.
    """

    name: str
    options: Mapping[str, OptionValue]
    process: CandidateProcess
    info: SessionInfo | None
    seconds: float
    failure: EngineFailedError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Everything in a trace file.

    Attributes:
        utc: when it was recorded, as ISO 8601 to the second.
        version: of onnx-parity.
        model: what was decoded.
        engine: by what.
        max_new_tokens: tokens asked for, for each prompt.
        stop_ids: end-of-sequence IDs at which a decode stopped.
        top_k: how many of the largest logits were asked for at each step.
        notes: what the report says of an encoder and its inputs.
        prompts: in the order in which they were decoded.
    """

    utc: str
    version: str
    model: RecordedModel
    engine: RecordedEngine
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    top_k: int
    notes: Mapping[str, str]
    prompts: tuple[RecordedPrompt, ...]

    @property
    def settings_sha256(self) -> str:
        """Over the engine with its options and settings, and how far it decoded: equal for equal runs."""
        info = self.engine.info
        return canonical_sha256(
            {
                "engine": self.engine.name,
                "options": dict(self.engine.options),
                "settings": None if info is None else dict(info.settings),
                "version": None if info is None else info.version,
                "max_new_tokens": self.max_new_tokens,
                "stop_ids": list(self.stop_ids),
                "top_k": self.top_k,
            }
        )


def canonical_sha256(value: Any) -> str:
    """SHA-256, in hex, over JSON with sorted keys and nothing between its tokens."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def topology_sha256(topology: Topology) -> str:
    """SHA-256 over all of a topology that steers a decode, in hex: not over the evidence for it."""
    left_out = {"inventory", "because"}

    def plain(value: Any) -> Any:
        if is_dataclass(value):
            named = [each.name for each in fields(value) if each.name not in left_out]
            return {name: plain(getattr(value, name)) for name in named}
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, frozenset):
            return sorted(plain(item) for item in value)
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value

    return canonical_sha256(plain(topology))


def stored_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of an array in C order and little-endian, without a copy where they stand so already."""
    import numpy as np

    whole = np.require(array, requirements="C")
    if whole.dtype.byteorder == ">" or (whole.dtype.byteorder == "=" and sys.byteorder == "big"):
        whole = whole.byteswap()
    found: NDArray[np.uint8] = whole.reshape(-1).view(np.uint8)
    return found


def tensor_sha256(array: NDArray[Any]) -> str:
    """SHA-256 over `stored_bytes`, in hex."""
    return hashlib.sha256(stored_bytes(array).data).hexdigest()
