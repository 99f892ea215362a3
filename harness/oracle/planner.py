"""Planning a graph: names become slots, nodes become bound kernels, constants are computed once.

Model-local functions are inlined, unless there is a native kernel for the operator that they define.
Every operator that is missing is found here, before anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import onnx

from harness.errors import EngineFailedError, InputError, ParityError
from harness.oracle.declared import keeping_types
from harness.oracle.dequantised import Dequantised
from harness.oracle.executor import ABSENT, DISCARD, Body, Step
from harness.oracle.functions import Functions
from harness.oracle.kernels import LEFT_OUT, find, operator_version
from harness.oracle.kernels.registry import Kernel
from harness.oracle.names import domain_of, free_names, label_of, ordered, resolved
from harness.oracle.node import Compute, Node, UnsupportedFeatureError
from harness.oracle.precision import Array, Precision, file_dtype
from harness.oracle.scope import Constant, Draft, Scope, Value
from harness.oracle.weights import TensorReader, attribute_value

__all__ = ["Budget", "Planner"]

_SMALL = 1 << 16
"""Bytes up to which a constant is widened or computed at planning without being counted."""


class Budget:
    """How much memory weights may take that are not views of the file: widened, dequantised, computed.

    What a plan needs at once is reserved. Weights of products are claimed: either all of them stay, or
    none does and each is made anew at each use, as a model of which a part stays is bound by the rest.
    """

    def __init__(self, limit: int) -> None:
        self.left = limit
        self._claimed = 0

    def reserve(self, nbytes: int) -> bool:
        """Whether `nbytes` more may stay; they count against the budget when so."""
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True

    def claim(self, nbytes: int) -> Callable[[], bool]:
        """Count `nbytes` among what is claimed; gives what tells, once all is planned, whether it fits."""
        self._claimed += nbytes
        return lambda: self._claimed <= self.left


class Planner:
    """Plans the graphs of one model."""

    def __init__(
        self,
        model: onnx.ModelProto,
        reader: TensorReader,
        *,
        precision: Precision,
        budget: Budget,
        inline_functions: bool,
    ) -> None:
        self._model = model
        self._reader = reader
        self._precision = precision
        self._budget = budget
        self._functions = Functions(model, reader.path.name, inline_all=inline_functions)
        self._missing: dict[str, list[str]] = {}

    def plan(self) -> Body:
        """The main graph as a body.

        Raises:
            InputError: the graph is not well-formed, a tensor cannot be read, or there are too many nodes in
                functions (`harness.oracle.functions`).
            EngineFailedError: operators are missing (`unsupported`).
        """
        opsets = {domain_of(entry.domain): entry.version for entry in self._model.opset_import}
        body = self._body(self._model.graph, Scope(Draft(), opsets))
        if self._missing:
            lines = [
                f"{what} at {places[0]}" + (f" and {len(places) - 1} more" if len(places) > 1 else "")
                for what, places in self._missing.items()
            ]
            raise EngineFailedError(
                f"The oracle lacks what this graph needs: {'; '.join(lines)}.",
                next_action="Check against another oracle (`--oracle`), or export the graph without it.",
                kind="unsupported",
            )
        return body

    def _body(self, graph: onnx.GraphProto, scope: Scope) -> Body:
        draft = scope.draft
        if graph.sparse_initializer:
            self._lack("sparse weights", f"initialiser {graph.sparse_initializer[0].values.name}")
        for tensor in graph.initializer:
            packed = self._reader.packed(tensor)
            scope.names[tensor.name] = Constant(self._reader.array(tensor) if packed is None else packed)
        scope.declare([*graph.input, *graph.value_info, *graph.output])
        inputs = []
        for port in graph.input:
            kind = port.type.WhichOneof("value")
            if kind not in (None, "tensor_type"):
                self._lack(f"values of type {kind}", f"input {port.name}")
            if port.name not in scope.names:
                inputs.append(draft.new_slot())
                scope.names[port.name] = inputs[-1]
        self._nodes(graph.node, scope, [port.name for port in graph.output])
        outputs = [self._slot(port.name, scope) for port in graph.output]
        return Body(
            inputs=[*inputs, *draft.captures.values()],
            outputs=outputs,
            steps=draft.steps,
            constants=draft.constants,
            slot_count=draft.slot_count,
            capture_count=len(draft.captures),
            blanks=[self._blank(port) for port in graph.output],
        )

    def _blank(self, port: onnx.ValueInfoProto) -> Array | None:
        """An array as a port declares it, with extent 0 where it has no number; see `Body.blanks`."""
        tensor = port.type.tensor_type
        if not tensor.elem_type or not tensor.HasField("shape"):
            return None
        shape = [max(0, axis.dim_value) for axis in tensor.shape.dim]
        return np.empty(shape, dtype=self._precision.carried(file_dtype(tensor.elem_type)))

    def _nodes(self, nodes: Sequence[onnx.NodeProto], scope: Scope, results: Iterable[str]) -> None:
        """Plan the nodes of a graph or function, whose outputs are `results`."""
        read = {name for node in nodes for name in free_names(node)}.union(results)
        for node in ordered(nodes, scope):
            domain = domain_of(node.domain)
            version = operator_version(domain, node.op_type, scope.opsets.get(domain, 1))
            # Operators have no overloads.
            entry = None if node.overload else find(domain, node.op_type, version)
            function = self._functions.called_by(node, scope.opsets)
            if function is not None:
                self._inline(node, function, scope)
            elif entry is None:
                opset = scope.opsets.get(domain)
                since = (
                    f"opset {opset}, operator version {version}" if opset is not None else "no opset imported"
                )
                overload = f", overload {node.overload}," if node.overload else ""
                what = f"operator {node.op_type}{overload} of domain {domain or 'ai.onnx'} ({since})"
                if (domain, node.op_type) in LEFT_OUT:
                    what += f", left out as it needs {LEFT_OUT[domain, node.op_type]},"
                self._lack(what, f"node {label_of(node, scope)}")
                self._placeholders(node, scope)
            else:
                plan = partial(self._bind, node, domain, version, entry, scope, read)
                standard = domain == "" and len(node.output) == 1 and node.output[0]
                weight = self._dequantised(node, scope, plan) if standard else None
                if weight is None:
                    plan()
                else:
                    scope.names[node.output[0]] = weight

    def _dequantised(
        self, node: onnx.NodeProto, scope: Scope, plan: Callable[[], None]
    ) -> Dequantised | None:
        """What DequantizeLinear makes of constants, or that turned: planned only where it is read whole."""
        if self._precision.rounding or node.op_type not in ("DequantizeLinear", "Transpose"):
            return None
        given = [scope.find(name) if name else ABSENT for name in node.input]
        found = list(resolved(node.attribute, scope))
        if node.op_type == "Transpose":
            weight = given[0] if given else None
            turned = all(list(item.ints) == [1, 0] for item in found)
            return weight.transposed(plan) if isinstance(weight, Dequantised) and turned else None
        numbers = {item.name: item.i for item in found if item.type == onnx.AttributeProto.INT}
        constant = all(isinstance(value, Constant) or value == ABSENT for value in given)
        if len(given) < 2 or not constant or len(numbers) < len(found):
            return None
        codes, scale, zero = [*given, ABSENT][:3]
        if not isinstance(codes, Constant) or not isinstance(scale, Constant):
            return None
        dtype = self._precision.held(scale.stored.dtype)
        named = numbers.get("output_dtype", 0)
        size = math.prod(codes.stored.shape) * dtype.itemsize
        if size <= _SMALL or (named and self._precision.holding(named) != dtype):
            return None
        return Dequantised.of(
            codes.stored,
            self._precision.widen(scale.array),
            zero.array if isinstance(zero, Constant) else None,
            axis=numbers.get("axis", 1),
            block=numbers.get("block_size", 0),
            whole=plan,
        )

    def _inline(self, node: onnx.NodeProto, function: onnx.FunctionProto, scope: Scope) -> None:
        """Plan the nodes of a function in place of the node that calls it."""
        self._functions.reserve(function, label_of(node, scope))
        given = {attribute.name: attribute for attribute in resolved(node.attribute, scope)}
        defaults = {attribute.name: attribute for attribute in function.attribute_proto}
        inner = Scope(
            scope.draft,
            {domain_of(entry.domain): entry.version for entry in function.opset_import},
            attributes=defaults | given,
            path=f"{label_of(node, scope)}/",
        )
        for index, name in enumerate(function.input):
            actual = node.input[index] if index < len(node.input) else ""
            inner.names[name] = self._value(actual, scope, label_of(node, scope)) if actual else ABSENT
            declared = scope.type_of(actual) if actual else None
            if declared is not None:
                inner.types[name] = declared
        inner.declare(function.value_info)
        self._nodes(function.node, inner, function.output)
        for name, formal in zip(node.output, function.output, strict=False):
            if name:
                scope.names[name] = self._value(formal, inner, label_of(node, scope))

    def _bind(
        self,
        node: onnx.NodeProto,
        domain: str,
        version: int,
        entry: Kernel,
        scope: Scope,
        read: Set[str],
    ) -> None:
        """Plan one node: the one place where a node becomes a function.

        Whatever looks at or changes the values that nodes produce (rounding, measuring) wraps that
        function here, so that it costs nothing where it is not asked for.
        """
        label = label_of(node, scope)
        streamed = {
            index: value
            for index in entry.streams
            if index < len(node.input) and isinstance(value := scope.find(node.input[index]), Dequantised)
        }
        values = [
            self._value(name, scope, label) if name and index not in streamed else ABSENT
            for index, name in enumerate(node.input)
        ]
        attributes, captured = self._attributes(node, scope, label)
        # Kernels that do not compute pass values on as they are carried, which bodies expect too.
        passes = entry.moves or (self._precision.rounding and _has_body(attributes))
        known: dict[int, Array] = {}
        late: list[int] = []
        for index, value in enumerate(values):
            if isinstance(value, Constant):
                as_stored = passes or index in entry.raw
                array = value.array if as_stored else self._widened(value)
                if array is None:
                    late.append(index)
                else:
                    known[index] = array
        view = Node(
            domain=domain,
            op_type=node.op_type,
            version=version,
            label=label,
            precision=self._precision,
            residency=self._budget,
            attributes=attributes,
            present=[value != ABSENT or index in streamed for index, value in enumerate(values)],
            wanted=[name in read for name in node.output],
            constants=known,
            types=[scope.type_of(name) if name else None for name in node.input],
            names=tuple(node.input),
            streamed=streamed,
        )
        rounds = self._precision.rounding and not passes
        try:
            compute = entry.bind(view)
            if rounds:
                compute, late = keeping_types(compute, view, entry.raw), []
        except ParityError:
            raise
        except UnsupportedFeatureError as error:
            self._lack(
                f"operator {node.op_type} of domain {domain or 'ai.onnx'} with {error}", f"node {label}"
            )
            self._placeholders(node, scope)
            return
        # As when it runs: attributes and constants can be wrong in as many ways.
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise EngineFailedError(
                f"The oracle cannot plan {node.op_type} {label}: {reason}.",
                next_action="Check the graph with `onnx.checker`.",
                kind="crashed",
            ) from error
        if entry.pure and not captured and len(known) == sum(view.present):
            folded = self._folded(compute, [known.get(index) for index in range(len(values))])
            if folded is not None:
                scope.names.update(zip(node.output, folded, strict=False))
                return
        if late:
            compute = _widening(compute, late, self._precision)
        if entry.moves and any(
            self._precision.carried(array.dtype) != array.dtype for array in known.values()
        ):
            compute = _widening_result(compute, self._precision)
        draft = scope.draft
        inputs = [
            draft.slot_of(known.get(index, value.array)) if isinstance(value, Constant) else value
            for index, value in enumerate(values)
        ]
        self._placeholders(node, scope)
        outputs = [self._slot(name, scope) if name else DISCARD for name in node.output]
        bodies = tuple(value for value in attributes.values() if isinstance(value, Body))
        step = Step(
            compute, tuple(inputs + captured), tuple(outputs), f"{node.op_type} {label}", view, bodies
        )
        draft.steps.append(step)

    def _attributes(self, node: onnx.NodeProto, scope: Scope, label: str) -> tuple[dict[str, Any], list[int]]:
        """Attribute values, and the slots here that subgraphs capture, subgraph by subgraph."""
        attributes: dict[str, Any] = {}
        captured: list[int] = []
        for attribute in resolved(node.attribute, scope):
            if attribute.type == onnx.AttributeProto.UNDEFINED:
                raise InputError(
                    f"Node {label}: the attribute `{attribute.name}` of {node.op_type} has no type.",
                    next_action="Export the graph again, or run `onnx.checker` on it.",
                )
            if attribute.type == onnx.AttributeProto.GRAPH:
                draft = Draft()
                inner = Scope(draft, scope.opsets, scope, scope.attributes, f"{label}.{attribute.name}/")
                attributes[attribute.name] = self._body(attribute.g, inner)
                captured.extend(draft.captures)
            else:
                attributes[attribute.name] = attribute_value(attribute, self._reader)
        return attributes, captured

    def _folded(self, compute: Compute, arguments: Sequence[Array | None]) -> list[Constant] | None:
        """The outputs of a node of constants, or None where they must be computed at each run."""
        try:
            with np.errstate(all="ignore"):
                result = compute(*arguments)
        # Where it fails it must fail when it runs, and only if it runs (a branch may never be taken).
        except Exception:
            return None
        arrays = [np.asarray(item) for item in (result if isinstance(result, tuple) else (result,))]
        given = {id(array) for array in arguments}
        owned = sum(
            array.nbytes
            for array in arrays
            if array.base is None and array.nbytes > _SMALL and id(array) not in given
        )
        if owned and not self._budget.reserve(owned):
            return None
        return [Constant(array) for array in arrays]

    def _widened(self, constant: Constant) -> Array | None:
        """The constant in the dtype that holds it, or None where that copy is beyond the budget."""
        if constant.wide is None:
            held = self._precision.held(constant.array.dtype)
            if held == constant.array.dtype:
                constant.wide = constant.array
            else:
                nbytes = constant.array.size * held.itemsize
                if nbytes <= _SMALL or self._budget.reserve(nbytes):
                    constant.wide = self._precision.widen(constant.array)
        return constant.wide

    def _slot(self, name: str, scope: Scope) -> int:
        """The slot of a named value; a constant gets one, in the dtype that holds it."""
        value = self._value(name, scope, "the graph's outputs")
        if isinstance(value, int):
            return value
        if self._precision.rounding:
            return scope.draft.slot_of(value.array)
        wide = self._widened(value)
        return scope.draft.slot_of(self._precision.widen(value.array) if wide is None else wide)

    def _value(self, name: str, scope: Scope, reader: str) -> Value:
        value = scope.find(name)
        if isinstance(value, Dequantised):
            value.whole()
            value = scope.find(name)
        if value is None or isinstance(value, Dequantised):
            raise InputError(
                f"Value {name} is read by {reader}, but no node, input or initialiser of "
                f"{self._reader.path.name} produces it.",
                next_action="Export the graph again, or run `onnx.checker` on it.",
            )
        return value

    def _placeholders(self, node: onnx.NodeProto, scope: Scope) -> None:
        """Give a slot to each named output of a node."""
        scope.names.update({name: scope.draft.new_slot() for name in node.output if name})

    def _lack(self, what: str, where: str) -> None:
        self._missing.setdefault(what, []).append(where)


def _has_body(attributes: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Body) for value in attributes.values())


def _widening(compute: Compute, late: Sequence[int], precision: Precision) -> Compute:
    """`compute` with the inputs at `late` widened at each run, for weights beyond the budget."""

    def run(*inputs: Any) -> Any:
        widened = list(inputs)
        for index in late:
            widened[index] = precision.widen(widened[index])
        return compute(*widened)

    return run


def _widening_result(compute: Compute, precision: Precision) -> Compute:
    """`compute` with its result widened, where it moves elements of a constant as the file has them."""

    def run(*inputs: Any) -> Any:
        result = compute(*inputs)
        if isinstance(result, tuple):
            return tuple(precision.widen(item) for item in result)
        return precision.widen(result)

    return run
