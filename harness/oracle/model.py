"""The oracle's public face: load an ONNX model, feed it, read what it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import numpy as np

from harness.errors import EngineFailedError, InputError
from harness.oracle.blas import blas_threads
from harness.oracle.executor import Body, Program
from harness.oracle.planner import Budget, Planner
from harness.oracle.precision import Array, Precision, PrecisionName, file_dtype, type_name
from harness.oracle.weights import TensorReader, read_model

if TYPE_CHECKING:
    import onnx

__all__ = ["RESIDENT_LIMIT", "OracleModel", "TensorSpec"]

RESIDENT_LIMIT = 2 << 30
"""Bytes that widened and dequantised weights may take together by default; beyond it they are made anew
at each use."""

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
    """

    def __init__(self, *, body: Body, graph: onnx.GraphProto, precision: Precision, threads: int) -> None:
        initialised = {tensor.name for tensor in graph.initializer}
        ports = [port for port in graph.input if port.name not in initialised]
        self.inputs = tuple(_spec(port) for port in ports)
        self.outputs = tuple(_spec(port) for port in graph.output)
        self.precision = precision.name
        self._body = body
        self._threads = threads
        self._feeds = [_Feed.of(port, spec, precision) for port, spec in zip(ports, self.inputs, strict=True)]
        self._names = frozenset(spec.name for spec in self.inputs)
        self._slots = {spec.name: slot for spec, slot in zip(self.outputs, body.outputs, strict=True)}
        self._programs: dict[tuple[str, ...], Program] = {}

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        precision: PrecisionName = "float32",
        inline_functions: bool = False,
        resident_limit: int = RESIDENT_LIMIT,
        threads: int = 1,
    ) -> OracleModel:
        """Read and plan the graph at `path`.

        Args:
            path: an `.onnx` file; external data stands in its folder.
            precision: what narrower floats are computed in.
            inline_functions: inline model-local functions also where there is a native kernel.
            resident_limit: bytes that derived copies of weights may take together.
            threads: of the BLAS behind numpy while a graph runs; 0 leaves the number to BLAS.

        Raises:
            InputError: the file or its external data cannot be used.
            EngineFailedError: the graph needs operators that the oracle lacks (kind `unsupported`).
        """
        if precision not in get_args(PrecisionName):
            raise InputError(
                f"precision={precision} is not a precision of the oracle.",
                next_action="Use precision=float32 or precision=float64.",
            )
        path = Path(path)
        model = read_model(path)
        held = Precision(precision)
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
        key = tuple(outputs)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._body.program(self._slot(name) for name in key)
        unknown = feeds.keys() - self._names
        if unknown:
            raise InputError(
                f"{min(unknown)} is fed, but it is no input of the graph.",
                next_action=f"Feed only {', '.join(feed.name for feed in self._feeds[:8])}.",
            )
        arguments = [
            feed.accept(feeds.get(feed.name)) if slot in program.needed else None
            for feed, slot in zip(self._feeds, self._body.inputs, strict=True)
        ]
        with np.errstate(all="ignore"), blas_threads(self._threads):
            results = self._body.run(program, arguments)
        return {name: _given(name, value) for name, value in zip(key, results, strict=True)}

    def _slot(self, name: str) -> int:
        if name not in self._slots:
            raise InputError(
                f"{name} is no output of the graph.",
                next_action=f"Ask for {', '.join(list(self._slots)[:8])}.",
            )
        return self._slots[name]


@dataclass(frozen=True, slots=True)
class _Feed:
    """What may be fed to one input: `held` is the dtype it is computed in, `declared` that of the port."""

    name: str
    declared: np.dtype[Any] | None
    held: np.dtype[Any] | None
    shape: tuple[_Extent, ...] | None

    @classmethod
    def of(cls, port: onnx.ValueInfoProto, spec: TensorSpec, precision: Precision) -> _Feed:
        elem_type = port.type.tensor_type.elem_type
        if not elem_type:
            return cls(spec.name, None, None, spec.shape)
        return cls(spec.name, file_dtype(elem_type), precision.holding(elem_type), spec.shape)

    def accept(self, array: Array | None) -> Array:
        """The fed array in the dtype that holds it."""
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
        if self.held is None or array.dtype == self.held:
            return array
        if array.dtype != self.declared and not (
            self.held.kind == "f" and array.dtype.kind in "fV" and np.can_cast(array.dtype, self.held)
        ):
            raise InputError(
                f"Input {self.name} is fed as {array.dtype}, but the graph declares {self.declared}.",
                next_action=f"Feed {self.declared}.",
            )
        return array.astype(self.held)


def _given(name: str, value: Any) -> Array:
    if value is None:
        raise EngineFailedError(
            f"The graph has an output {name}, but its node does not give it in this configuration.",
            next_action="Do not ask for it, or export the graph without it.",
            kind="unsupported",
        )
    return np.asarray(value)


def _spec(port: onnx.ValueInfoProto) -> TensorSpec:
    tensor = port.type.tensor_type
    shape = tuple(_extent(dim) for dim in tensor.shape.dim) if tensor.HasField("shape") else None
    return TensorSpec(port.name, type_name(tensor.elem_type) if tensor.elem_type else None, shape)


def _extent(dim: onnx.TensorShapeProto.Dimension) -> _Extent:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return dim.dim_param or None
