"""What follows from what a graph is fed, before anything runs: values of small integers, and shapes.

Nodes on integers are evaluated one by one by the reference implementation of ONNX, and shapes are inferred
by its schemas. What depends on large weights, on the values of a cache, or on an operator that is not listed
here is not known.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from harness.oracle.names import free_names
from harness.oracle.weights import TensorReader, read_model

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CONTRIB", "DEEPEST", "Fed", "Graph", "Hollow", "Scope", "UnknownError", "Values", "operator_of"]

CONTRIB = "com.microsoft"
DEEPEST = 100
"""Nodes that may stand one behind another between what is known and what is asked."""

_LARGEST = 1 << 22
"""Elements of a value that is computed: masks and positions of the longest contexts have fewer."""

_COMPUTED = frozenset(
    {
        *(
            "Abs",
            "Add",
            "And",
            "ArgMax",
            "Cast",
            "CastLike",
            "Ceil",
            "Clip",
            "Compress",
            "Concat",
            "Constant",
        ),
        *("ConstantOfShape", "CumSum", "Div", "Equal", "Expand", "Flatten", "Floor", "Gather"),
        *(
            "GatherElements",
            "GatherND",
            "Greater",
            "GreaterOrEqual",
            "Identity",
            "Less",
            "LessOrEqual",
            "Max",
        ),
        *(
            "Min",
            "Mod",
            "Mul",
            "Neg",
            "NonZero",
            "Not",
            "Or",
            "Range",
            "ReduceMax",
            "ReduceMin",
            "ReduceProd",
        ),
        *("ReduceSum", "Reshape", "ScatterElements", "ScatterND", "Shape", "Sign", "Size", "Slice", "Split"),
        *("Squeeze", "Sub", "Sum", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor"),
    }
)
"""Standard operators that positions are computed with."""

_ONLY_SHAPE = frozenset({"Shape", "Size"})
_RENAMED = frozenset({"Cast", "CastLike", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators through which an input is still that input."""

_AS_SHAPED = frozenset({"BiasGelu", "FastGelu", "Gelu", "QuickGelu"})
"""Operators of onnxruntime whose output has the shape of their first input, and no schema in onnx."""

_COUNTS = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)


class Hollow(NamedTuple):
    """What is fed to an input whose values are not known, or do not matter.

    Attributes:
        dtype: its element type.
        shape: its extents.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


Fed: TypeAlias = "NDArray[Any] | Hollow"


class UnknownError(Exception):
    """This cannot be computed from what is known."""


class Scope:
    """The names of a graph, within those of the graphs around it.

    Attributes:
        outer: the graph around it; None for the main one.
        outputs: names of its outputs.
        weights: its initialisers.
        makers: for each value the node that gives it.
        nodes: those of the operators that are asked for, if anything needs what they give.
    """

    def __init__(self, graph: onnx.GraphProto, outer: Scope | None, operators: frozenset[str]) -> None:
        self.outer = outer
        self.outputs = [port.name for port in graph.output]
        self.weights = {tensor.name: tensor for tensor in graph.initializer}
        self.makers = {name: node for node in graph.node for name in node.output if name}
        self._ports = {port.name for port in graph.input}
        self._operators = operators
        live = self._live()
        self.nodes = [
            node for node in graph.node if node.op_type in operators and not live.isdisjoint(node.output)
        ]
        self._branches: dict[tuple[str, str], Scope] = {}

    def owner_of(self, name: str) -> Scope:
        """The graph that gives this name its meaning.

        Raises:
            UnknownError: none does.
        """
        scope: Scope | None = self
        while scope is not None:
            if name in scope.makers or name in scope.weights or name in scope._ports:
                return scope
            scope = scope.outer
        raise UnknownError

    def branch(self, node: onnx.NodeProto, name: str) -> Scope:
        """A graph of one of its nodes, by the name of the attribute."""
        key = (node.output[0], name)
        if key not in self._branches:
            graph = next(attribute.g for attribute in node.attribute if attribute.name == name)
            self._branches[key] = Scope(graph, self, self._operators)
        return self._branches[key]

    def _live(self) -> set[str]:
        """The names that its outputs need."""
        live: set[str] = set()
        wanted = list(self.outputs)
        while wanted:
            name = wanted.pop()
            if name not in live:
                live.add(name)
                wanted += free_names(self.makers[name]) if name in self.makers else ()
        return live


class Graph:
    """A parsed graph. Large weights are not touched.

    Attributes:
        path: the file.
        root: the names of the main graph.
        functions: the operators that the model defines itself, by domain and name.
        reader: gives the values of weights.
    """

    def __init__(self, path: Path, operators: frozenset[str]) -> None:
        """Parse the file; the nodes of `operators` are kept at hand.

        Raises:
            InputError: it cannot be read.
        """
        model = read_model(path)
        self.path = path
        self.root = Scope(model.graph, None, operators)
        self.functions = {("" if f.domain == "ai.onnx" else f.domain, f.name) for f in model.functions}
        self.reader = TensorReader(path)
        self._imports = list(model.opset_import)
        self._opset = max((o.version for o in self._imports if o.domain in ("", "ai.onnx")), default=0)
        self._ir_version = model.ir_version
        self._evaluators: dict[tuple[int, str], ReferenceEvaluator] = {}

    def evaluate(
        self, scope: Scope, node: onnx.NodeProto, inputs: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        """What a node gives, by the reference implementation."""
        key = (id(scope), node.output[0])
        outputs = [name for name in node.output if name]
        if key not in self._evaluators:
            takes, gives = ([onnx.ValueInfoProto(name=name) for name in names] for names in (inputs, outputs))
            graph = helper.make_graph([node], "node", takes, gives)
            model = helper.make_model(graph, opset_imports=self._imports, ir_version=self._ir_version)
            self._evaluators[key] = ReferenceEvaluator(model)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            values = self._evaluators[key].run(None, dict(inputs))
        return dict(zip(outputs, map(np.asarray, values), strict=True))

    def infer(
        self,
        node: onnx.NodeProto,
        types: Mapping[str, onnx.TypeProto],
        values: Mapping[str, NDArray[Any]],
    ) -> dict[str, onnx.TypeProto]:
        """The types of what a node gives, as far as they are known to the last extent."""
        found = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, self._opset, ""),
            node,
            dict(types),
            {name: numpy_helper.from_array(value, name) for name, value in values.items()},
            opset_imports=self._imports,
            ir_version=self._ir_version,
        )
        return {name: found_type for name, found_type in found.items() if _is_whole(found_type)}


class Values:
    """What is known at one call of a graph."""

    def __init__(self, graph: Graph, fed: Mapping[str, Fed]) -> None:
        """`fed` has the inputs that are known; more may be added to it before they are asked for."""
        self._graph = graph
        self._fed = fed
        self._known: dict[tuple[Callable[..., Any], int, str], Any] = {}
        self._depth = 0

    def value(self, scope: Scope, name: str) -> NDArray[Any]:
        """The value of a name.

        Raises:
            UnknownError: it is not known.
        """
        return cast("NDArray[Any]", self._find(Values._computed, scope, name))

    def type_of(self, scope: Scope, name: str) -> onnx.TypeProto:
        """Element type and shape of a name, all extents of which are numbers.

        Raises:
            UnknownError: it is not known.
        """
        return cast("onnx.TypeProto", self._find(Values._inferred, scope, name))

    def shape(self, scope: Scope, name: str) -> tuple[int, ...]:
        """The shape of a name.

        Raises:
            UnknownError: it is not known.
        """
        return tuple(dim.dim_value for dim in self.type_of(scope, name).tensor_type.shape.dim)

    def port(self, scope: Scope, name: str) -> str | None:
        """The input of the main graph that a value is, in whatever shape and type; None where it is none."""
        for _ in range(DEEPEST):
            scope = scope.owner_of(name)
            node = scope.makers.get(name)
            if name in scope.weights:
                return None
            if node is None:
                return name if scope.outer is None else None
            if operator_of(node)[0] or node.op_type not in _RENAMED:
                return None
            name = node.input[0]
        return None

    def taken(self, scope: Scope, node: onnx.NodeProto) -> Scope:
        """The branch that an `If` takes.

        Raises:
            UnknownError: it is not known.
        """
        condition = self.value(scope, node.input[0])
        return scope.branch(node, "then_branch" if bool(condition.all()) else "else_branch")

    def taken_output(self, scope: Scope, node: onnx.NodeProto, name: str) -> tuple[Scope, str]:
        """What an `If` gives as `name`: the output of the branch that it takes.

        Raises:
            UnknownError: it is not known.
        """
        branch = self.taken(scope, node)
        return branch, branch.outputs[list(node.output).index(name)]

    def _find(self, find: Callable[[Values, Scope, str], Mapping[str, Any]], scope: Scope, name: str) -> Any:
        """What is known of a value, computed once; what a node gives besides is kept as well."""
        owner = scope.owner_of(name)
        key = (find, id(owner), name)
        if key not in self._known:
            self._known[key] = None  # also what waits for itself, in a graph with a circle
            if self._depth >= DEEPEST:
                raise UnknownError
            self._depth += 1
            try:
                found = find(self, owner, name)
            except UnknownError:
                raise
            except Exception as error:  # the library raises as many kinds as graphs can be wrong
                raise UnknownError from error
            finally:
                self._depth -= 1
            self._known |= {(find, id(owner), given): value for given, value in found.items()}
        if self._known[key] is None:
            raise UnknownError
        return self._known[key]

    def _computed(self, scope: Scope, name: str) -> Mapping[str, NDArray[Any]]:
        """The value of a name of this very graph, and of what is given along with it."""
        if name in scope.weights:
            weight = scope.weights[name]
            if math.prod(weight.dims) > _LARGEST:
                raise UnknownError
            return {name: self._graph.reader.array(weight)}
        node = scope.makers.get(name)
        if node is None:
            fed = self._fed_to(scope, name)
            if isinstance(fed, Hollow) or fed.size > _LARGEST:
                raise UnknownError
            return {name: fed}
        operator = operator_of(node)
        if operator == ("", "If"):
            return {name: self.value(*self.taken_output(scope, node, name))}
        if operator in self._graph.functions or operator[0] or node.op_type not in _COMPUTED:
            raise UnknownError
        if node.op_type in _ONLY_SHAPE:
            shape = self.shape(scope, node.input[0])
            return self._graph.evaluate(scope, node, {node.input[0]: np.broadcast_to(np.int8(0), shape)})
        inputs = {given: self.value(scope, given) for given in node.input if given}
        self._refuse_huge(scope, node)
        return self._graph.evaluate(scope, node, inputs)

    def _refuse_huge(self, scope: Scope, node: onnx.NodeProto) -> None:
        """What would be huge is not computed, as far as its shape is known before."""
        for name in filter(None, node.output):
            try:
                size = math.prod(self.shape(scope, name))
            except UnknownError:
                continue
            if size > _LARGEST:
                raise UnknownError

    def _inferred(self, scope: Scope, name: str) -> Mapping[str, onnx.TypeProto]:
        """The type of a name of this very graph, and of what is given along with it."""
        if name in scope.weights:
            weight = scope.weights[name]
            return {name: helper.make_tensor_type_proto(weight.data_type, list(weight.dims))}
        node = scope.makers.get(name)
        if node is None:
            fed = self._fed_to(scope, name)
            element = helper.np_dtype_to_tensor_dtype(np.dtype(fed.dtype))
            return {name: helper.make_tensor_type_proto(element, list(fed.shape))}
        operator = operator_of(node)
        if operator == ("", "If"):
            return {name: self.type_of(*self.taken_output(scope, node, name))}
        if operator in self._graph.functions:
            raise UnknownError
        if operator[0] == CONTRIB and node.op_type in _AS_SHAPED:
            return {name: self.type_of(scope, node.input[0])}
        if operator[0] or any(attribute.HasField("g") for attribute in node.attribute):
            raise UnknownError
        types = {given: self.type_of(scope, given) for given in node.input if given}
        return self._graph.infer(node, types, dict(self._counts(scope, types)))

    def _counts(self, scope: Scope, types: Mapping[str, onnx.TypeProto]) -> Mapping[str, NDArray[Any]]:
        """Values on which a shape may depend: integers of at most one axis."""
        found = {}
        for name, known in types.items():
            if known.tensor_type.elem_type in _COUNTS and len(known.tensor_type.shape.dim) < 2:
                try:
                    found[name] = self.value(scope, name)
                except UnknownError:
                    continue
        return found

    def _fed_to(self, scope: Scope, name: str) -> Fed:
        if scope.outer is not None or name not in self._fed:
            raise UnknownError
        return self._fed[name]


def operator_of(node: onnx.NodeProto) -> tuple[str, str]:
    """Domain and name of an operator; the standard domain is empty."""
    return ("" if node.domain == "ai.onnx" else node.domain, node.op_type)


def _is_whole(found: onnx.TypeProto) -> bool:
    """Whether every extent is known."""
    tensor = found.tensor_type
    return tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim)
