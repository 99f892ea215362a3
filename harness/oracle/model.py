"""The oracle's public face: load an ONNX model, feed it, read what it computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import numpy as np

from harness.errors import EngineFailedError, InputError
from harness.oracle.blas import one_blas_thread
from harness.oracle.deferred import DeferredOutput, tail_of
from harness.oracle.executor import Body, Program
from harness.oracle.nonfinite import all_finite, first_non_finite
from harness.oracle.planner import Budget, Planner
from harness.oracle.precision import Array, Precision, PrecisionName, RoundingName, file_dtype, type_name
from harness.oracle.proof import Proof, prove
from harness.oracle.weights import TensorReader, read_model
from harness.oracle.workers import processors, workers

if TYPE_CHECKING:
    import onnx

__all__ = ["RESIDENT_LIMIT", "OracleModel", "TensorSpec"]

RESIDENT_LIMIT = 2 << 30
"""Bytes that widened and unpacked weights may take together by default; where they would take more they are
made anew at each use, a tile at a time."""

_Extent: TypeAlias = "int | str | None"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A graph input or output as the graph declares it.

    Attributes:
        name: its name.
        dtype: element type in numpy's spelling (`float32`, `int64`, `bfloat16`, ...); None if undeclared.
        shape: one entry an axis, an int or a symbol or None; None where not even the rank is declared.
    """

    name: str
    dtype: str | None
    shape: tuple[_Extent, ...] | None


class OracleModel:
    """An ONNX graph, planned once and run as often as wanted, on numpy alone.

    Every float narrower than the precision is computed in it; integers are exact. Not safe for use from
    two threads at once.

    Attributes:
        inputs: the inputs that must be fed; initialisers that are also listed as inputs are left out.
        outputs: what can be asked for.
        precision: `float32` or `float64`.
        rounding: `none` or `model`; see `load`.
    """

    def __init__(self, *, body: Body, graph: onnx.GraphProto, precision: Precision, threads: int) -> None:
        initialised = {tensor.name for tensor in graph.initializer}
        ports = [port for port in graph.input if port.name not in initialised]
        self.inputs = tuple(_spec(port) for port in ports)
        self.outputs = tuple(_spec(port) for port in graph.output)
        self.precision = precision.name
        self.rounding: RoundingName = "model" if precision.rounding else "none"
        self._precision = precision
        self._body = body
        self._threads = threads or processors()
        self._feeds = [_Feed.of(port, spec, precision) for port, spec in zip(ports, self.inputs, strict=True)]
        self._names = frozenset(spec.name for spec in self.inputs)
        self._slots = {spec.name: slot for spec, slot in zip(self.outputs, body.outputs, strict=True)}
        tails = {name: tail_of(body, slot) for name, slot in self._slots.items()}
        self._tails = {name: tail for name, tail in tails.items() if tail is not None}
        self._programs: dict[tuple[int, ...], Program] = {}
        self._watched: tuple[str, ...] = ()
        self._not_finite: set[str] = set()

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        precision: PrecisionName = "float32",
        inline_functions: bool = False,
        resident_limit: int = RESIDENT_LIMIT,
        threads: int = 1,
        rounding: RoundingName = "none",
    ) -> OracleModel:
        """Read and plan the graph at `path`.

        Args:
            path: an `.onnx` file; external data stands in its folder.
            precision: what narrower floats are computed in.
            inline_functions: inline model-local functions also where there is a native kernel.
            resident_limit: bytes that derived copies of weights may take together.
            threads: how many workers share large products, each with numpy's BLAS on one thread; 0 for
                as many as there are processors. Results do not depend on it.
            rounding: `none` drops the model's narrowing casts; `model` rounds every value to its declared
                type as it passes from node to node, and activations to int8 where the model allows that.

        Raises:
            InputError: the file or its external data cannot be used.
            EngineFailedError: the graph needs operators that the oracle lacks (kind `unsupported`).
        """
        if precision not in get_args(PrecisionName):
            raise InputError(
                f"precision={precision} is not a precision of the oracle.",
                next_action="Use precision=float32 or precision=float64.",
            )
        if rounding not in get_args(RoundingName):
            raise InputError(
                f"rounding={rounding} is not a rounding of the oracle.",
                next_action="Use rounding=none or rounding=model.",
            )
        path = Path(path)
        model = read_model(path)
        held = Precision(precision, rounding == "model")
        planner = Planner(
            model,
            TensorReader(path),
            precision=held,
            budget=Budget(resident_limit),
            inline_functions=inline_functions,
        )
        return cls(body=planner.plan(), graph=model.graph, precision=held, threads=threads)

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """Compute `outputs` from `feeds`, and nothing that they do not need.

        A fed float may be of the declared dtype or anything narrower than what holds it; a fed integer
        or bool must be of the declared dtype. Outputs come in the dtype that holds their declared type
        (`float32` for a `float16` port at precision float32), may share memory with feeds and weights,
        and must not be written to.

        Raises:
            InputError: an output is unknown, or a feed is missing, unknown, or of another dtype or shape.
            EngineFailedError: the graph failed at a node, which the message names.
        """
        slots = tuple(self._slot(name) for name in outputs)
        results = self._run(feeds, slots)
        given = zip(outputs, results, strict=True)
        return {name: _given(name, value, self._precision) for name, value in given}

    def begin(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array | DeferredOutput]:
        """As `run`, but outputs that can be computed in parts later are not computed yet.

        So nothing of the size of the logits of a long pass comes to be, if only their largest are wanted.
        """
        tails = {name: self._tails[name] for name in outputs if name in self._tails}
        slots = {name: tails[name].needs if name in tails else (self._slot(name),) for name in outputs}
        values = iter(self._run(feeds, tuple(slot for some in slots.values() for slot in some)))
        results: dict[str, Array | DeferredOutput] = {}
        for name, some in slots.items():
            given = [next(values) for _ in some]
            if name in tails:
                results[name] = DeferredOutput.of(tails[name], given, self._setting)
            else:
                results[name] = _given(name, given[0], self._precision)
        return results

    def watch(self, outputs: Sequence[str]) -> None:
        """From now on compute `outputs` at every run, wanted or not, and look whether they are finite.

        What nobody wants is freed as ever. `not_finite` says what was found, from here on.

        Raises:
            InputError: an output is unknown.
        """
        self._not_finite.clear()
        if tuple(outputs) != self._watched:
            for name in outputs:
                self._slot(name)
            self._watched = tuple(outputs)
            self._programs.clear()

    def not_finite(self) -> tuple[str, ...]:
        """Those of the watched outputs that held NaN or infinities since `watch`, in its order."""
        return tuple(name for name in self._watched if name in self._not_finite)

    def first_non_finite(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> str | None:
        """Operator and node that first made one of `outputs` infinite or NaN; None if all are finite.

        Runs the graph once more and looks at every value; see `harness.oracle.nonfinite`.

        Raises:
            InputError, EngineFailedError: as `run`.
        """
        # Node by node, each under its own name.
        program = self._body.program(self._slot(name) for name in outputs)
        arguments = self._arguments(feeds, program)
        with self._setting():
            return first_non_finite(self._body, program, arguments, [feed.name for feed in self._feeds])

    def prove(self) -> Proof:
        """Ask the kernels of this very plan for sums that are known; see `harness.oracle.proof`."""
        with self._setting():
            return prove(self._body, self._precision)

    @contextmanager
    def _setting(self) -> Iterator[None]:
        """What kernels run in."""
        with np.errstate(all="ignore"), one_blas_thread(), workers(self._threads):
            yield

    def _run(self, feeds: Mapping[str, Array], slots: tuple[int, ...]) -> list[Any]:
        """The values of `slots`."""
        program, arguments = self._prepared(feeds, slots)
        with self._setting():
            return self._body.run(program, arguments)

    def _prepared(
        self, feeds: Mapping[str, Array], slots: tuple[int, ...]
    ) -> tuple[Program, list[Array | None]]:
        """The program that computes `slots`, and its arguments."""
        program = self._programs.get(slots)
        if program is None:
            looks = {self._slots[name]: partial(self._look, name) for name in self._watched}
            program = self._programs[slots] = self._body.program(slots, gathered=True, looks=looks)
        return program, self._arguments(feeds, program)

    def _look(self, name: str, value: Any) -> None:
        if not all_finite(value):
            self._not_finite.add(name)

    def _arguments(self, feeds: Mapping[str, Array], program: Program) -> list[Array | None]:
        """The feeds that a program needs, checked, in the order of the graph's inputs."""
        unknown = feeds.keys() - self._names
        if unknown:
            raise InputError(
                f"{min(unknown)} is fed, but it is no input of the graph.",
                next_action=f"Feed only {', '.join(feed.name for feed in self._feeds[:8])}.",
            )
        return [
            feed.accept(feeds.get(feed.name)) if slot in program.needed else None
            for feed, slot in zip(self._feeds, self._body.inputs, strict=True)
        ]

    def _slot(self, name: str) -> int:
        if name not in self._slots:
            raise InputError(
                f"{name} is no output of the graph.",
                next_action=f"Ask for {', '.join(list(self._slots)[:8])}.",
            )
        return self._slots[name]


@dataclass(frozen=True, slots=True)
class _Feed:
    """What may be fed to one input.

    Attributes:
        name: of the input.
        declared: the dtype of the port.
        held: the dtype it is computed in.
        carried: the dtype in which it goes to the nodes.
        shape: as the port declares it.
    """

    name: str
    declared: np.dtype[Any] | None
    held: np.dtype[Any] | None
    carried: np.dtype[Any] | None
    shape: tuple[_Extent, ...] | None

    @classmethod
    def of(cls, port: onnx.ValueInfoProto, spec: TensorSpec, precision: Precision) -> _Feed:
        elem_type = port.type.tensor_type.elem_type
        if not elem_type:
            return cls(spec.name, None, None, None, spec.shape)
        declared = file_dtype(elem_type)
        return cls(spec.name, declared, precision.held(declared), precision.carried(declared), spec.shape)

    def accept(self, array: Array | None) -> Array:
        """The fed array in the dtype that carries it."""
        if array is None:
            raise InputError(
                f"Input {self.name} is not fed, and the outputs asked for need it.",
                next_action=f"Feed {self.name}.",
            )
        if self.shape is not None and (
            array.ndim != len(self.shape)
            or any(
                type(want) is int and want != got for want, got in zip(self.shape, array.shape, strict=True)
            )
        ):
            raise InputError(
                f"Input {self.name} is fed with shape {list(array.shape)}, "
                f"but the graph declares {list(self.shape)}.",
                next_action="Feed the shape that the graph declares.",
            )
        if self.held is None or array.dtype == self.carried:
            return array
        if array.dtype not in (self.declared, self.held) and not (
            self.held.kind == "f" and array.dtype.kind in "fV" and np.can_cast(array.dtype, self.held)
        ):
            raise InputError(
                f"Input {self.name} is fed as {array.dtype}, but the graph declares {self.declared}.",
                next_action=f"Feed {self.declared}.",
            )
        return array.astype(self.carried)


def _given(name: str, value: Any, precision: Precision) -> Array:
    if value is None:
        raise EngineFailedError(
            f"The graph has an output {name}, but its node does not give it in this configuration.",
            next_action="Do not ask for it, or export the graph without it.",
            kind="unsupported",
        )
    return precision.widen(np.asarray(value))


def _spec(port: onnx.ValueInfoProto) -> TensorSpec:
    tensor = port.type.tensor_type
    shape = tuple(_extent(dim) for dim in tensor.shape.dim) if tensor.HasField("shape") else None
    return TensorSpec(port.name, type_name(tensor.elem_type) if tensor.elem_type else None, shape)


def _extent(dim: onnx.TensorShapeProto.Dimension) -> _Extent:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return dim.dim_param or None
