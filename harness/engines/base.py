"""What every engine offers: the session protocol that decoding stands on.

A session is one loaded graph on one engine. It owns every tensor: callers hold opaque handles, which
may stand for memory on a device or in another process, and ask for the reductions they need. Nothing
is copied out unless `copy_out` is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from harness.ports import PortInventory

__all__ = [
    "Availability",
    "BatchingSession",
    "DiagnosingSession",
    "Engine",
    "EngineOption",
    "OptionValue",
    "ProvingSession",
    "Session",
    "SessionInfo",
    "TensorHandle",
    "TopLogits",
    "WatchingSession",
]

OptionValue: TypeAlias = bool | int | str
"""A parsed engine option, as written after the engine's name (`ort-cpu:threads=1`)."""


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The largest logits at one position, largest first; equal values stand in order of token ID.

    Attributes:
        token_ids: vocabulary indices, at least one.
        values: the logits of `token_ids`, in the graph's own scale, widened to float.
        has_nan: True when any logit at this position is NaN. NaN ranks below every number.
    """

    token_ids: tuple[int, ...]
    values: tuple[float, ...]
    has_nan: bool = False

    @property
    def argmax(self) -> int:
        """The greedy choice: the lowest ID among those with the largest logit."""
        return self.token_ids[0]

    @property
    def margin(self) -> float:
        """Largest logit minus the second largest; infinity for a vocabulary of one."""
        return self.values[0] - self.values[1] if len(self.values) > 1 else float("inf")


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What ran: goes into the report as evidence.

    Attributes:
        engine: name of the engine, without options.
        version: version of the runtime behind it.
        settings: every setting that can change results, requested or pinned.
        placement: where the nodes run, for engines that can say so: provider name to node counts by
            operator, under `providers`; None for engines that have no placement.
        mode: `eager` or `captured` (graph capture); None where the engine knows no such thing.
    """

    engine: str
    version: str
    settings: Mapping[str, OptionValue] = field(default_factory=dict)
    placement: Mapping[str, Any] | None = None
    mode: str | None = None


class TensorHandle(Protocol):
    """A tensor that lives where its session keeps it; only shape and dtype are known here."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Concrete extents; a zero is a legal extent."""

    @property
    def dtype(self) -> str:
        """Element type in the vocabulary of `harness.ports.Port.dtype`, such as `float32`."""


class Session(Protocol):
    """One loaded graph on one engine. Not safe for use from two threads at once."""

    @property
    def inventory(self) -> PortInventory:
        """The ports as the engine itself reports them."""

    @property
    def info(self) -> SessionInfo:
        """What runs and how; complete from the moment the session exists."""

    def place(self, array: NDArray[Any]) -> TensorHandle:
        """Hand a host array to the session; any strides. The caller must not write to it afterwards."""

    def zeros(self, shape: Sequence[int], dtype: str) -> TensorHandle:
        """A tensor of zeros where the engine keeps its states; extents may be zero.

        The handle may be fed any number of times: no run writes to what it is fed.
        """

    def run(self, feeds: Mapping[str, TensorHandle], outputs: Sequence[str]) -> dict[str, TensorHandle]:
        """Run the graph once.

        `feeds` has a handle for every graph input; each comes from this session (`place`, `zeros`, or
        an output of an earlier `run`) and stays valid and unchanged. Returns a handle for each name in
        `outputs`; what is not asked for need not be computed.

        Raises:
            EngineFailedError: the engine failed; the session must not be used any more.
        """

    def top_logits(
        self, logits: TensorHandle, *, k: int, positions: Sequence[int] | None = None
    ) -> list[TopLogits]:
        """Reduce logits of shape [1, positions, vocab] or [1, vocab] where they are.

        Returns the `min(k, vocab)` largest at each of `positions` (default: all of them, in order;
        negative positions count from the end). Of equal logits the lowest ID comes first.
        """

    def copy_out(self, handle: TensorHandle) -> NDArray[np.generic]:
        """Copy a tensor to the host. For evidence and tests; decoding never needs it."""

    def close(self) -> None:
        """Free what the session holds; its handles are dead afterwards. May be called twice."""


@runtime_checkable
class ProvingSession(Protocol):
    """A session that can show in which precision it computes. An optional part of a session."""

    def proof(self) -> Mapping[str, Any]:
        """Plain data for the report, among it: `passed`, a bool, or None where nothing could be shown.

        `reason` says why nothing could. `entries` has a mapping for each kind of product, with `operator`,
        `node`, `max_error`, `bound` and `passed`.
        """


@runtime_checkable
class BatchingSession(Protocol):
    """A session that can run several sequences as rows of one batch. An optional part of a session."""

    def stacked(self, parts: Sequence[TensorHandle], axis: int) -> TensorHandle:
        """One tensor of several that have extent 1 along `axis`, in order. What is equal may be shared."""

    def top_logits_of_rows(
        self, logits: TensorHandle, *, k: int, places: Sequence[tuple[int, int]]
    ) -> list[TopLogits]:
        """As `Session.top_logits`, of logits [rows, positions, vocab], at pairs of row and position.

        Raises:
            EngineFailedError: as `Session.run`.
        """


@runtime_checkable
class WatchingSession(Protocol):
    """A session that can look at outputs which nobody asks for. An optional part of a session."""

    def watch(self, outputs: Sequence[str]) -> None:
        """From now on compute `outputs` at every run, and look whether they are finite."""

    def not_finite(self) -> Sequence[str]:
        """Those of the watched outputs that held NaN or infinities since `watch`, in its order."""


@runtime_checkable
class DiagnosingSession(Protocol):
    """A session that can look at what is inside of a graph. An optional part of a session."""

    def first_non_finite(self, feeds: Mapping[str, TensorHandle], outputs: Sequence[str]) -> str | None:
        """Operator and node that first made one of `outputs` infinite or NaN; None if all are finite.

        Runs the graph once more, with every value looked at.

        Raises:
            EngineFailedError: as `Session.run`.
        """


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether an engine can be used on this machine.

    Attributes:
        usable: True when `open` can be expected to work.
        version: version of the runtime, None when it is not installed.
        reason: why it is not usable, one line; None when it is.
        next_action: what would make it usable; None when it is.
        placement: the provider that its nodes run on; None where it has no placement, or is not usable.
    """

    usable: bool
    version: str | None = None
    reason: str | None = None
    next_action: str | None = None
    placement: str | None = None


class EngineOption(Protocol):
    """What may stand behind an engine's name; `harness.engines.options` has the usual kinds."""

    @property
    def help(self) -> str:
        """One line for `onnx-parity engines`."""

    @property
    def default(self) -> OptionValue:
        """Its value where the user gives none."""

    @property
    def expected(self) -> str:
        """What it may be, in words that follow "must be"."""

    def read(self, value: OptionValue) -> OptionValue | None:
        """The value that was given, as a value or in text; None where it cannot be taken."""


@runtime_checkable
class Engine(Protocol):
    """A way to run graphs, found through the entry-point group `onnx_parity.engines`."""

    @property
    def name(self) -> str:
        """Name on the command line, such as `ort-cpu`."""

    @property
    def description(self) -> str:
        """One line for `onnx-parity engines`."""

    @property
    def options(self) -> Mapping[str, EngineOption]:
        """The options it takes, by name."""

    def availability(self) -> Availability:
        """Whether it can be used here. Cheap, never raises, and writes nothing anywhere."""

    def open(self, model: Path, options: Mapping[str, OptionValue]) -> Session:
        """Load the graph `model`. Options that are not given have their defaults.

        Raises:
            EngineUnavailableError: not usable on this machine.
            EngineFailedError: the engine could not load this graph.
            InputError: an option has a value that it cannot take, or the file is no ONNX model.
            InvalidRunError: it loaded, but would not run as asked (on another device, for example).
        """
