"""A session over several graphs on one engine, and the engine that opens it.

The decode loop drives it as it drives a single graph. Tensors that pass from one graph to another are
copied through the host, which no engine can get wrong; caches stay where their graph keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from harness.decode.wiring import Feed, Fill, Kept, Mask, Output, Source, Step, Wiring
from harness.engines.base import (
    Availability,
    DiagnosingSession,
    Engine,
    EngineOption,
    OptionValue,
    ProvingSession,
    Session,
    SessionInfo,
    TensorHandle,
    TopLogits,
)
from harness.engines.registry import EngineSpec
from harness.engines.tensor_types import dtype_of_array, numpy_dtype
from harness.errors import EngineFailedError, InputError
from harness.ports import Port, PortInventory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["WiredEngine", "WiredSession", "wired"]


class WiredHandle:
    """A tensor that any of the graphs may be fed: each gets it where it keeps its own."""

    __slots__ = ("_array", "_at", "_dtype", "_owner", "_shape", "is_fresh")

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str,
        *,
        array: NDArray[Any] | None = None,
        owner: Session | None = None,
        handle: TensorHandle | None = None,
    ) -> None:
        """A host `array`, or a `handle` that the session `owner` gave; without either, fresh zeros."""
        self._shape, self._dtype, self._array = shape, dtype, array
        self._owner = owner
        self._at: dict[int, TensorHandle] = {} if owner is None or handle is None else {id(owner): handle}
        self.is_fresh = array is None and handle is None

    @property
    def shape(self) -> tuple[int, ...]:
        """Concrete extents."""
        return self._shape

    @property
    def dtype(self) -> str:
        """Element type in the vocabulary of `harness.ports.Port.dtype`."""
        return self._dtype

    @property
    def owner(self) -> Session | None:
        """The session that gave it; None for what came from the host."""
        return self._owner

    def at(self, session: Session) -> TensorHandle:
        """The tensor as a handle of `session`, copied there once if it is somewhere else."""
        if id(session) not in self._at:
            self._at[id(session)] = (
                session.zeros(self._shape, self._dtype) if self.is_fresh else session.place(self.array())
            )
        return self._at[id(session)]

    def array(self) -> NDArray[Any]:
        """The tensor on the host."""
        import numpy as np

        if self._array is None:
            if self._owner is not None:
                self._array = self._owner.copy_out(self._at[id(self._owner)])
            else:
                self._array = np.zeros(self._shape, numpy_dtype(self._dtype))
        return self._array


class WiredSession:
    """A `harness.engines.base.Session` over the graphs of a wiring."""

    def __init__(self, wiring: Wiring, sessions: Mapping[str, Session]) -> None:
        """`sessions` has one for each step, by name; they are closed with this one."""
        self._wiring = wiring
        self._sessions = sessions
        self._kept: dict[Kept, WiredHandle] = {}
        self._once: dict[str, tuple[tuple[WiredHandle, ...], dict[str, WiredHandle]]] = {}

    @property
    def inventory(self) -> PortInventory:
        """The ports of the whole; those that a graph has under the same name as its session reports them."""
        inputs = {
            wire.first.name: port
            for step in self._wiring.steps
            for port in self._sessions[step.name].inventory.inputs
            if isinstance((wire := step.wires[port.name]).first, Feed)
        }
        outputs = {
            Output(step.name, port.name): port
            for step in self._wiring.steps
            for port in self._sessions[step.name].inventory.outputs
        }
        return PortInventory(
            tuple(_as_named(port, inputs.get(port.name)) for port in self._wiring.inputs),
            tuple(
                _as_named(port, outputs.get(self._wiring.outputs[port.name][-1]))
                for port in self._wiring.ports
            ),
        )

    @property
    def info(self) -> SessionInfo:
        """What runs and how: the settings of the engine, the graphs, and what the wiring notes."""
        infos = [session.info for session in self._sessions.values()]
        notes = {"graphs": ", ".join(step.graph.name for step in self._wiring.steps), **self._wiring.notes}
        placements = [info.placement for info in infos if info.placement is not None]
        return replace(
            infos[-1],
            settings={**infos[-1].settings, **notes},
            placement=_merged_placement(placements) if placements else None,
        )

    def place(self, array: NDArray[Any]) -> WiredHandle:
        """Hand over a host array; the graphs that are fed it get it then."""
        return WiredHandle(array.shape, dtype_of_array(array.dtype), array=array)

    def zeros(self, shape: Sequence[int], dtype: str) -> WiredHandle:
        """Zeros, which the graphs that are fed them make for themselves."""
        return WiredHandle(tuple(shape), dtype)

    def run(self, feeds: Mapping[str, TensorHandle], outputs: Sequence[str]) -> dict[str, TensorHandle]:
        """Run the graphs in their order; see `harness.engines.base.Session.run`."""
        call = _Call(self, cast("Mapping[str, WiredHandle]", feeds))
        for step, asked in call.plan(outputs):
            call.run(step, asked)
        return {name: call.produced[call.giver(name)] for name in outputs}

    def top_logits(
        self, logits: TensorHandle, *, k: int, positions: Sequence[int] | None = None
    ) -> list[TopLogits]:
        """Reduce logits where they are; see `harness.engines.base.Session.top_logits`."""
        handle = cast("WiredHandle", logits)
        owner = handle.owner or next(iter(self._sessions.values()))
        return owner.top_logits(handle.at(owner), k=k, positions=positions)

    def copy_out(self, handle: TensorHandle) -> NDArray[np.generic]:
        """A copy of a tensor."""
        copy: NDArray[np.generic] = cast("WiredHandle", handle).array().copy()
        return copy

    def close(self) -> None:
        """Close every graph's session."""
        self._kept.clear()
        self._once.clear()
        for session in self._sessions.values():
            session.close()


class _Call:
    """One call of the whole: which graphs run, and what they have given so far."""

    def __init__(self, whole: WiredSession, feeds: Mapping[str, WiredHandle]) -> None:
        self._whole = whole
        self._wiring = whole._wiring
        self._feeds = feeds
        caches = [feeds[name] for name in self._wiring.caches if name in feeds]
        self._is_first = not caches or any(cache.is_fresh or 0 in cache.shape for cache in caches)
        self.produced: dict[Output, WiredHandle] = {}

    def giver(self, output: str) -> Output:
        """Which graph gives an output of the whole at this call."""
        running = {step.name for step in self._wiring.steps if self._runs(step)}
        return next(giver for giver in self._wiring.outputs[output] if giver.step in running)

    def plan(self, outputs: Sequence[str]) -> Iterator[tuple[Step, tuple[str, ...]]]:
        """The graphs that run, with what each is asked for: what is wanted of the whole, and by others."""
        wanted = {self.giver(name) for name in outputs}
        steps = [step for step in self._wiring.steps if self._runs(step)]
        for step in self._wiring.steps:
            for wire in step.wires.values():
                if self._is_first and isinstance(wire.later, Kept):
                    wanted.add(Output(wire.later.step, wire.later.port))
                if self._runs(step):
                    wanted.update(_outputs_behind(wire.first if self._is_first else wire.later))
        for step in steps:
            asked = tuple(
                port.name for port in step.inventory.outputs if Output(step.name, port.name) in wanted
            )
            if asked:
                yield step, asked

    def run(self, step: Step, asked: Sequence[str]) -> None:
        """Run one graph, unless it has run on the same feeds and needs to only once."""
        fed = self.feeds_of(step)
        once = self._whole._once.get(step.name) if step.when == "once" else None
        if once is not None and len(once[0]) == len(fed) and all(map(_same, once[0], fed.values())):
            given = once[1]
        else:
            session = self._whole._sessions[step.name]
            with _named(step, several=len(self._wiring.steps) > 1):
                handles = session.run({name: fed[name].at(session) for name in fed}, asked)
            given = {
                port: WiredHandle(handle.shape, handle.dtype, owner=session, handle=handle)
                for port, handle in handles.items()
            }
            if step.when == "once":
                self._whole._once[step.name] = (tuple(fed.values()), given)
        for port, handle in given.items():
            self.produced[Output(step.name, port)] = handle
            if self._is_first and step.when != "once":
                self._whole._kept[Kept(step.name, port)] = handle

    def feeds_of(self, step: Step) -> dict[str, WiredHandle]:
        """What the graph is fed at this call."""
        return {
            name: self._value(wire.first if self._is_first else wire.later)
            for name, wire in step.wires.items()
        }

    def _runs(self, step: Step) -> bool:
        return step.when in ("always", "once", "first" if self._is_first else "later")

    def _value(self, source: Source) -> WiredHandle:
        match source:
            case Feed():
                return self._feeds[source.name]
            case Output():
                return self.produced[source]
            case Kept():
                return self._whole._kept[source]
            case Fill():
                length = self._value(source.like).shape[1] if source.like is not None else 0
                shape = tuple(length if extent is None else extent for extent in source.shape)
                return self._constant(shape, source.dtype, source.value)
            case Mask():
                length = self._value(source.over).shape[source.axis]
                given = self._feeds.get(source.given.name) if source.given is not None else None
                fits = given is not None and given.shape == (1, length) and given.dtype == source.dtype
                return given if given is not None and fits else self._constant((1, length), source.dtype, 1)

    def _constant(self, shape: tuple[int, ...], dtype: str, value: int) -> WiredHandle:
        import numpy as np

        return self._whole.place(np.full(shape, value, dtype=numpy_dtype(dtype)))


class _ProvingSession(WiredSession):
    """A session whose graphs can all be asked for a proof, and looked into."""

    def proof(self) -> Mapping[str, Any]:
        """See `harness.engines.base.ProvingSession`: the entries of all graphs, each node with its graph."""
        proofs = {name: cast("ProvingSession", session).proof() for name, session in self._sessions.items()}
        several = len(proofs) > 1
        merged = dict(next(iter(proofs.values())))
        passed = [proof["passed"] for proof in proofs.values()]
        merged["passed"] = False if False in passed else True if True in passed else None
        merged["reason"] = None if merged["passed"] is not None else merged["reason"]
        for key in ("entries", "not_probed"):
            merged[key] = [
                {**entry, "node": f"{name}: {entry['node']}"} if several and "node" in entry else entry
                for name, proof in proofs.items()
                for entry in proof.get(key, ())
            ]
        return merged

    def first_non_finite(self, feeds: Mapping[str, TensorHandle], outputs: Sequence[str]) -> str | None:
        """See `harness.engines.base.DiagnosingSession`: of the first graph in which it happens."""
        call = _Call(self, cast("Mapping[str, WiredHandle]", feeds))
        for step, asked in call.plan(outputs):
            session = self._sessions[step.name]
            fed = {name: handle.at(session) for name, handle in call.feeds_of(step).items()}
            found = cast("DiagnosingSession", session).first_non_finite(fed, asked)
            if found is not None:
                return f"{found} of {step.graph.name}"
            call.run(step, asked)
        return None


@dataclass(frozen=True, slots=True)
class WiredEngine:
    """An engine that opens all graphs of a wiring as one session."""

    engine: Engine
    wiring: Wiring

    @property
    def name(self) -> str:
        """That of the engine."""
        return self.engine.name

    @property
    def description(self) -> str:
        """That of the engine."""
        return self.engine.description

    @property
    def options(self) -> Mapping[str, EngineOption]:
        """Those of the engine."""
        return self.engine.options

    def availability(self) -> Availability:
        """That of the engine."""
        return self.engine.availability()

    def open(self, model: Path, options: Mapping[str, OptionValue]) -> Session:
        """Open every graph of the wiring; `model` only names them all. See `harness.engines.base.Engine`."""
        sessions: dict[str, Session] = {}
        try:
            for step in self.wiring.steps:
                with _named(step, several=len(self.wiring.steps) > 1):
                    sessions[step.name] = EngineSpec(self.engine, options).open(step.graph)
        except BaseException:
            for session in sessions.values():
                session.close()
            raise
        can_show = all(
            isinstance(session, ProvingSession) and isinstance(session, DiagnosingSession)
            for session in sessions.values()
        )
        return (_ProvingSession if can_show else WiredSession)(self.wiring, sessions)


def wired(spec: EngineSpec, wiring: Wiring) -> EngineSpec:
    """The engine as asked for, opening the graphs of `wiring`; as it is for a single graph as it stands."""
    if wiring.is_plain and not wiring.notes:
        return spec
    return replace(spec, engine=WiredEngine(spec.engine, wiring))


@contextmanager
def _named(step: Step, *, several: bool) -> Iterator[None]:
    """Say in errors which of several graphs it is."""
    try:
        yield
    except (EngineFailedError, InputError) as error:
        if several:
            error.message = f"{step.name} ({step.graph.name}): {error.message}"
        raise


def _outputs_behind(source: Source) -> Iterator[Output]:
    """The outputs of this call whose values `source` needs."""
    match source:
        case Output():
            yield source
        case Fill(like=Output() as like):
            yield like
        case Mask(over=Output() as over):
            yield over


def _same(one: WiredHandle, other: WiredHandle) -> bool:
    return one is other


def _as_named(port: Port, reported: Port | None) -> Port:
    """A port of the whole with dtype and shape as the engine reports them."""
    return port if reported is None else Port(port.name, reported.dtype, reported.shape)


def _merged_placement(placements: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Node counts of all graphs together."""
    providers: dict[str, dict[str, int]] = {}
    for placement in placements:
        for provider, operators in placement.get("providers", {}).items():
            counts = providers.setdefault(provider, {})
            for operator, count in operators.items():
                counts[operator] = counts.get(operator, 0) + count
    return {**placements[-1], "providers": providers}
