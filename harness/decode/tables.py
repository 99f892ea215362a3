"""Which rows of its tables a graph reads at a call: positions, rotary caches, embeddings of tokens.

Whether a call reads behind the end of a table is computed, not guessed: the few nodes on integers between the
ports and the table are evaluated on what the call would be fed, and shapes are inferred where nothing but a
shape is asked. What cannot be computed so, since it depends on weights or on an operator that is not listed
here, says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from harness.oracle.names import free_names
from harness.oracle.weights import TensorReader, read_model

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Added", "Looked", "Reading", "Table", "Tables"]

_CONTRIB = "com.microsoft"
_LARGEST = 1 << 22
"""Elements of a value that is computed: masks and positions of the longest contexts have fewer."""

_DEEPEST = 100
"""Nodes that may stand one behind another between what is known and what is asked."""

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

_MOVED = frozenset({"Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
_KEPT = frozenset({"Cast", "CastLike", "DequantizeLinear", "Identity"})
"""Operators through which a table is still that table, in part or whole."""

_RENAMED = frozenset({"Cast", "CastLike", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators through which an input is still that input."""

_AS_SHAPED = frozenset({"BiasGelu", "FastGelu", "Gelu", "QuickGelu"})
"""Operators of onnxruntime whose output has the shape of their first input, and no schema in onnx."""

_LOOKS: Mapping[tuple[str, str], Sequence[tuple[int, int]]] = {
    ("", "Gather"): ((0, 1),),
    (_CONTRIB, "GatherBlockQuantized"): ((0, 1),),
    ("", "RotaryEmbedding"): ((1, 3),),
    (_CONTRIB, "RotaryEmbedding"): ((2, 1),),
    (_CONTRIB, "MRotaryEmbedding"): ((2, 1),),
    (_CONTRIB, "EmbedLayerNormalization"): ((2, 0), (3, 8)),
}
"""Operators that look rows up: input positions of a table, and of the rows (ONNX and onnxruntime schemas)."""

_AXES = {"Gather": "axis", "GatherBlockQuantized": "gather_axis"}
_GROUPED = (_CONTRIB, "GroupQueryAttention")
_TOTAL, _COS, _POSITIONS = 6, 7, 9
"""Where `GroupQueryAttention` takes the number of all tokens, its table of cosines, and positions."""

_ADDED = frozenset({"Add", "Mul", "Sub"})


@dataclass(frozen=True, slots=True)
class Table:
    """A weight that is read in part.

    Attributes:
        name: in the graph.
        shape: all of it.
    """

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Looked:
    """Rows that a call looks up in a table.

    Attributes:
        table: where.
        rows: how many there are.
        lowest: the first that is looked up; negative ones count from the end.
        highest: the last.
        port: the input of the graph whose elements are the rows; None where they are computed.
    """

    table: Table
    rows: int
    lowest: int
    highest: int
    port: str | None

    @property
    def fits(self) -> bool:
        """Whether the table has all of them."""
        return -self.rows <= self.lowest and self.highest < self.rows

    @property
    def missing(self) -> int:
        """A row that it has not, where it does not fit."""
        return self.highest if self.highest >= self.rows else self.lowest


@dataclass(frozen=True, slots=True)
class Added:
    """A table, or a slice of it, that is added to or multiplied with as many places.

    Attributes:
        table: which.
        rows: those that the call takes.
        places: how many it is added to.
        fits: whether that can be done.
    """

    table: Table
    rows: int
    places: int
    fits: bool


Reading: TypeAlias = Looked | Added


class Tables:
    """The tables of one graph, and what calls read of them. Weights are not touched.

    Attributes:
        graph: the file.
    """

    def __init__(self, graph: Path) -> None:
        """Parse the file `graph`.

        Raises:
            InputError: it cannot be read.
        """
        model = read_model(graph)
        self.graph = graph
        self.reader = TensorReader(graph)
        self.opsets = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in model.opset_import}
        self.opset_imports = list(model.opset_import)
        self.ir_version = model.ir_version
        self.functions = {("" if f.domain == "ai.onnx" else f.domain, f.name) for f in model.functions}
        self.root = _Scope(model.graph, None)
        self._evaluators: dict[tuple[int, str], ReferenceEvaluator] = {}

    def read(self, fed: Mapping[str, NDArray[Any]]) -> list[Reading]:
        """What a call reads, as far as it can be computed.

        Args:
            fed: inputs by name, those that are known; of caches only the shape is looked at.
        """
        return list(_Call(self, fed).readings(self.root))

    def appended(self, ports: Collection[str], fed: Mapping[str, NDArray[Any]]) -> dict[str, tuple[int, ...]]:
        """The shapes of what a call joins to inputs, such as new keys to a cache, as far as they show.

        Args:
            ports: the inputs, which are taken for empty along the axis of joining.
            fed: the other inputs that are known.
        """
        known = dict(fed)
        call = _Call(self, known)
        found: dict[str, tuple[int, ...]] = {}
        for node in self.root.nodes:  # in order: what a layer appends follows from the caches before it
            if node.op_type == "Concat" and len(node.input) == 2 and node.domain in ("", "ai.onnx"):
                for own, other in (node.input, node.input[::-1]):
                    port = call.port(self.root, own)
                    if port is None or port not in ports or port in known:
                        continue
                    shape = call.shape(self.root, other)
                    axis = _integer(node, "axis", 0)
                    if shape is not None and -len(shape) <= axis < len(shape):
                        found[port] = shape
                        empty = list(shape)
                        empty[axis] = 0
                        known[port] = np.zeros(empty, np.float32)
        return found

    def evaluator(self, scope: _Scope, node: onnx.NodeProto) -> ReferenceEvaluator:
        """The reference implementation of a node, by itself."""
        key = (id(scope), node.output[0])
        if key not in self._evaluators:
            inputs, outputs = (
                [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names) if name]
                for names in (node.input, node.output)
            )
            graph = helper.make_graph([node], "node", inputs, outputs)
            model = helper.make_model(graph, opset_imports=self.opset_imports, ir_version=self.ir_version)
            self._evaluators[key] = ReferenceEvaluator(model)
        return self._evaluators[key]

    def of_length(self, rows: int) -> Table | None:
        """A matrix of as many rows among the weights of the graph; None where there is none."""
        matrices = (Table(w.name, tuple(w.dims)) for w in self.root.weights.values() if len(w.dims) == 2)
        return next((table for table in matrices if table.shape[0] == rows), None)


class _UnknownError(Exception):
    """This cannot be computed from what is known."""


class _Scope:
    """The names of a graph, within those of the graphs around it."""

    def __init__(self, graph: onnx.GraphProto, outer: _Scope | None) -> None:
        self.outer = outer
        self.ports = {port.name for port in graph.input}
        self.outputs = [port.name for port in graph.output]
        self.weights = {tensor.name: tensor for tensor in graph.initializer}
        self.makers = {name: node for node in graph.node for name in node.output if name}
        live = self._live()
        self.nodes = [
            node for node in graph.node if node.op_type in _INTERESTING and not live.isdisjoint(node.output)
        ]
        self._branches: dict[tuple[str, str], _Scope] = {}

    def _live(self) -> set[str]:
        """The names that its outputs need: what nobody needs is not run."""
        live: set[str] = set()
        wanted = list(self.outputs)
        while wanted:
            name = wanted.pop()
            if name not in live:
                live.add(name)
                wanted += free_names(self.makers[name]) if name in self.makers else ()
        return live

    def owner_of(self, name: str) -> _Scope | None:
        """The graph that gives this name its meaning."""
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.makers or name in scope.weights or name in scope.ports:
                return scope
            scope = scope.outer
        return None

    def branch(self, node: onnx.NodeProto, name: str) -> _Scope:
        """A graph of one of its nodes, by the name of the attribute."""
        key = (node.output[0], name)
        if key not in self._branches:
            graph = next(attribute.g for attribute in node.attribute if attribute.name == name)
            self._branches[key] = _Scope(graph, self)
        return self._branches[key]


_INTERESTING = {operator for _, operator in _LOOKS} | _ADDED | {"Concat", "GroupQueryAttention", "If"}


class _Call:
    """One call: what is fed, and what follows from that."""

    def __init__(self, tables: Tables, fed: Mapping[str, NDArray[Any]]) -> None:
        self._tables = tables
        self._fed = fed
        self._known: dict[tuple[Callable[..., Any], int, str], Any] = {}
        self._depth = 0

    def shape(self, scope: _Scope, name: str) -> tuple[int, ...] | None:
        """The shape of a value; None where it is not known."""
        try:
            return self._shape(scope, name)
        except _UnknownError:
            return None

    def readings(self, scope: _Scope) -> Iterator[Reading]:
        """What the nodes of a graph read, and those of the branches that are taken."""
        for node in scope.nodes:
            try:
                if node.op_type == "If" and not node.domain:
                    yield from self.readings(self._taken(scope, node))
                elif node.op_type in _ADDED and not node.domain:
                    yield from self._added(scope, node)
                else:
                    yield from self._looked(scope, node)
            except _UnknownError:
                continue

    def _looked(self, scope: _Scope, node: onnx.NodeProto) -> Iterator[Looked]:
        operator = ("" if node.domain == "ai.onnx" else node.domain, node.op_type)
        if operator in self._tables.functions:
            return
        for slot, rows in _LOOKS.get(operator, ()):
            if rows < len(node.input) and node.input[rows]:
                axis = _integer(node, _AXES.get(node.op_type, ""), 0)
                yield from self._rows_of(scope, node.input[slot], axis, node.input[rows])
        if operator == _GROUPED and _integer(node, "do_rotary", 0) and len(node.input) > _COS:
            if len(node.input) > _POSITIONS and node.input[_POSITIONS]:
                yield from self._rows_of(scope, node.input[_COS], 0, node.input[_POSITIONS])
            else:
                yield from self._rows_of(scope, node.input[_COS], 0, node.input[_TOTAL], counts=True)

    def _rows_of(
        self, scope: _Scope, table: str, axis: int, rows: str, *, counts: bool = False
    ) -> Iterator[Looked]:
        """What is looked up in a table by the elements of `rows`, or by all numbers below them."""
        found = self._table(scope, table)
        if found is None:
            return
        try:
            index = self._value(scope, rows)
            shape = self._shape(scope, table)
        except _UnknownError:
            return
        if index.dtype.kind in "iu" and index.size and -len(shape) <= axis < len(shape):
            highest = int(index.max()) - counts
            lowest = 0 if counts else int(index.min())
            yield Looked(found, shape[axis], lowest, highest, self.port(scope, rows))

    def _added(self, scope: _Scope, node: onnx.NodeProto) -> Iterator[Added]:
        """A table of several rows that goes with what is computed, place by place."""
        tables = [self._table(scope, name) for name in node.input]
        if len(tables) != 2 or (tables[0] is None) == (tables[1] is None):
            return
        slot = 0 if tables[0] is not None else 1
        table = cast("Table", tables[slot])
        if sum(extent > 1 for extent in table.shape) < 2:
            return
        taken, places = self._shape(scope, node.input[slot]), self._shape(scope, node.input[1 - slot])
        for axis in range(2, 1 + min(len(taken), len(places))):
            rows, count = taken[-axis], places[-axis]
            # A single row goes with any number of places, and many rows with a single place.
            fits = rows == count or rows == 1 or (count == 1 and rows > 1)
            if not fits or rows > 1:
                yield Added(table, rows, count, fits)

    def _table(self, scope: _Scope, name: str) -> Table | None:
        """The weight that a value is, or a part of; None where it is none."""
        for _ in range(_DEEPEST):
            owner = scope.owner_of(name)
            if owner is None:
                return None
            scope = owner
            if name in scope.weights:
                return Table(name, tuple(scope.weights[name].dims))
            node = scope.makers.get(name)
            if node is None or node.domain not in ("", "ai.onnx"):
                return None
            if node.op_type == "Constant":
                tensor = next((a.t for a in node.attribute if a.name == "value"), None)
                return None if tensor is None else Table(name, tuple(tensor.dims))
            if node.op_type == "If":
                try:
                    scope, name = self._taken_output(scope, node, name)
                except _UnknownError:
                    return None
            elif node.op_type in _KEPT | _MOVED:
                name = node.input[0]
            else:
                return None
        return None

    def port(self, scope: _Scope, name: str) -> str | None:
        """The input of the graph that a value is, in whatever shape and type."""
        for _ in range(_DEEPEST):
            owner = scope.owner_of(name)
            if owner is None or name in owner.weights:
                return None
            scope = owner
            node = scope.makers.get(name)
            if node is None:
                return name if scope.outer is None else None
            if node.domain not in ("", "ai.onnx") or node.op_type not in _RENAMED:
                return None
            name = node.input[0]
        return None

    def _taken(self, scope: _Scope, node: onnx.NodeProto) -> _Scope:
        """The branch that a node takes."""
        condition = self._value(scope, node.input[0])
        return scope.branch(node, "then_branch" if bool(condition.all()) else "else_branch")

    def _taken_output(self, scope: _Scope, node: onnx.NodeProto, name: str) -> tuple[_Scope, str]:
        """What a node gives as `name`: the output of the branch that it takes."""
        branch = self._taken(scope, node)
        return branch, branch.outputs[list(node.output).index(name)]

    def _shape(self, scope: _Scope, name: str) -> tuple[int, ...]:
        return tuple(dim.dim_value for dim in self._type(scope, name).tensor_type.shape.dim)

    def _value(self, scope: _Scope, name: str) -> NDArray[Any]:
        return cast("NDArray[Any]", self._known_or(_Call._computed, scope, name))

    def _type(self, scope: _Scope, name: str) -> onnx.TypeProto:
        return cast("onnx.TypeProto", self._known_or(_Call._inferred, scope, name))

    def _known_or(
        self, find: Callable[[_Call, _Scope, str], Mapping[str, Any]], scope: _Scope, name: str
    ) -> Any:
        """What is known of a value, computed once; what a node gives besides is kept as well.

        Raises:
            _UnknownError: it cannot be computed.
        """
        owner = scope.owner_of(name)
        if owner is None:
            raise _UnknownError
        key = (find, id(owner), name)
        if key not in self._known:
            self._known[key] = None  # also what waits for itself, in a graph with a circle
            if self._depth >= _DEEPEST:
                raise _UnknownError
            self._depth += 1
            try:
                found = find(self, owner, name)
            except _UnknownError:
                raise
            except Exception as error:  # the library raises as many kinds as graphs can be wrong
                raise _UnknownError from error
            finally:
                self._depth -= 1
            self._known |= {(find, id(owner), given): value for given, value in found.items()}
        if self._known.get(key) is None:
            raise _UnknownError
        return self._known[key]

    def _computed(self, scope: _Scope, name: str) -> Mapping[str, NDArray[Any]]:
        """The value of a name of this very graph."""
        tables = self._tables
        if name in scope.weights:
            weight = scope.weights[name]
            if math.prod(weight.dims) > _LARGEST:
                raise _UnknownError
            return {name: tables.reader.array(weight)}
        node = scope.makers.get(name)
        if node is None:
            if scope.outer is not None or name not in self._fed or self._fed[name].size > _LARGEST:
                raise _UnknownError
            return {name: self._fed[name]}
        if node.op_type == "If" and not node.domain:
            return {name: self._value(*self._taken_output(scope, node, name))}
        if node.domain not in ("", "ai.onnx") or node.op_type not in _COMPUTED or self._is_function(node):
            raise _UnknownError
        if node.op_type != "Constant" and math.prod(self._shape_or_empty(scope, name)) > _LARGEST:
            raise _UnknownError
        if node.op_type in _ONLY_SHAPE:
            inputs = {node.input[0]: np.broadcast_to(np.int8(0), self._shape(scope, node.input[0]))}
        else:
            inputs = {given: self._value(scope, given) for given in node.input if given}
        values = tables.evaluator(scope, node).run(None, inputs)
        return dict(zip((given for given in node.output if given), map(np.asarray, values), strict=True))

    def _shape_or_empty(self, scope: _Scope, name: str) -> tuple[int, ...]:
        """The shape of what a node would give, so that it is not computed where it is huge."""
        try:
            return self._shape(scope, name)
        except _UnknownError:
            return ()

    def _inferred(self, scope: _Scope, name: str) -> Mapping[str, onnx.TypeProto]:
        """Element type and shape of a name of this very graph."""
        tables = self._tables
        if name in scope.weights:
            weight = scope.weights[name]
            return {name: helper.make_tensor_type_proto(weight.data_type, list(weight.dims))}
        node = scope.makers.get(name)
        if node is None:
            if scope.outer is not None or name not in self._fed:
                raise _UnknownError
            fed = self._fed[name]
            element = helper.np_dtype_to_tensor_dtype(fed.dtype)
            return {name: helper.make_tensor_type_proto(element, list(fed.shape))}
        if node.op_type == "If" and not node.domain:
            return {name: self._type(*self._taken_output(scope, node, name))}
        if self._is_function(node):
            raise _UnknownError
        if node.domain == _CONTRIB and node.op_type in _AS_SHAPED:
            return {name: self._type(scope, node.input[0])}
        if node.domain not in ("", "ai.onnx") or any(a.HasField("g") for a in node.attribute):
            raise _UnknownError
        types = {given: self._type(scope, given) for given in node.input if given}
        found = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, tables.opsets[""], ""),
            node,
            types,
            self._small(scope, types),
            opset_imports=tables.opset_imports,
            ir_version=tables.ir_version,
        )
        return {given: type_ for given, type_ in found.items() if _is_whole(type_)}

    def _small(self, scope: _Scope, types: Mapping[str, onnx.TypeProto]) -> dict[str, onnx.TensorProto]:
        """Values on which a shape may depend: integers of at most one axis."""
        found = {}
        for name, type_ in types.items():
            tensor = type_.tensor_type
            if (
                tensor.elem_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
                and len(tensor.shape.dim) < 2
            ):
                try:
                    found[name] = numpy_helper.from_array(self._value(scope, name), name)
                except _UnknownError:
                    continue
        return found

    def _is_function(self, node: onnx.NodeProto) -> bool:
        """Whether the model brings a function in the place of an operator."""
        return ("" if node.domain == "ai.onnx" else node.domain, node.op_type) in self._tables.functions


def _is_whole(type_: onnx.TypeProto) -> bool:
    """Whether every extent is known."""
    tensor = type_.tensor_type
    return tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim)


def _integer(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), default)
