"""Which rows of its tables a graph reads at a call: positions, rotary caches, embeddings of tokens.

Whether a call reads behind the end of a table is computed, not guessed (`harness.decode.computed`). What
cannot be computed says nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from onnx import helper

from harness.decode.computed import (
    CONTRIB,
    DEEPEST,
    Fed,
    Graph,
    Hollow,
    Scope,
    UnknownError,
    Values,
    operator_of,
)

if TYPE_CHECKING:
    import onnx

__all__ = ["Added", "Looked", "Reading", "Table", "Tables"]

_MOVED = frozenset({"Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
_KEPT = frozenset({"Cast", "CastLike", "DequantizeLinear", "Expand", "Identity", "Tile"})
"""Operators through which a table is still that table, in part, whole or repeated."""

_LOOKS: Mapping[tuple[str, str], Sequence[tuple[int, int]]] = {
    ("", "Gather"): ((0, 1),),
    ("", "GatherElements"): ((0, 1),),
    (CONTRIB, "GatherBlockQuantized"): ((0, 1),),
    ("", "RotaryEmbedding"): ((1, 3),),
    (CONTRIB, "RotaryEmbedding"): ((2, 1),),
    (CONTRIB, "MRotaryEmbedding"): ((2, 1),),
    (CONTRIB, "EmbedLayerNormalization"): ((2, 0), (3, 8)),
}
"""Operators that look rows up: input positions of a table, and of the rows (ONNX and onnxruntime schemas)."""

_AXES = {"Gather": "axis", "GatherElements": "axis", "GatherBlockQuantized": "gather_axis"}
_GROUPED = (CONTRIB, "GroupQueryAttention")
_TOTAL, _COS, _POSITIONS = 6, 7, 9
"""Where `GroupQueryAttention` takes the number of all tokens, its table of cosines, and positions."""

_ADDED = frozenset({"Add", "Mul", "Sub"})
_MULTIPLYING = frozenset({"Gemm", "MatMul"})
_ASKED = _ADDED | _MULTIPLYING | {operator for _, operator in (*_LOOKS, _GROUPED)} | {"Concat", "If"}


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
    """A table, or a slice of it, that goes with what is computed, place by place.

    Attributes:
        table: which.
        rows: those that the call takes.
        places: how many there are.
        fits: whether the ones go with the others.
    """

    table: Table
    rows: int
    places: int
    fits: bool


Reading: TypeAlias = Looked | Added


class Tables:
    """The tables of one graph, and what calls read of them. Weights are not touched.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        """Parse the file.

        Raises:
            InputError: it cannot be read.
        """
        self.path = path
        self._graph = Graph(path, _ASKED)

    def read(self, fed: Mapping[str, Fed]) -> list[Reading]:
        """What a call reads, as far as it can be computed; `fed` has the inputs that are known."""
        return list(_Call(self._graph, fed).readings(self._graph.root))

    def has_matrix_of(self, rows: int) -> bool:
        """Whether a matrix of as many rows is among the weights of the graph, and not one of a product."""
        root = self._graph.root
        factors = {name for node in root.nodes if node.op_type in _MULTIPLYING for name in node.input}
        return any(
            len(weight.dims) == 2 and weight.dims[0] == rows
            for name, weight in root.weights.items()
            if name not in factors
        )

    def appended(self, ports: Collection[str], fed: Mapping[str, Fed]) -> dict[str, tuple[int, ...]]:
        """The shapes of what a call joins to inputs, such as new keys to a cache, as far as they show.

        Args:
            ports: the inputs, which are taken for empty along the axis of joining.
            fed: the other inputs that are known.
        """
        root = self._graph.root
        known = dict(fed)
        values = Values(self._graph, known)
        found: dict[str, tuple[int, ...]] = {}
        for node in root.nodes:  # in order: what a layer appends follows from the caches before it
            if operator_of(node) != ("", "Concat") or len(node.input) != 2:
                continue
            for own, other in (node.input, node.input[::-1]):
                try:
                    port = values.port(root, own)
                    if port is None or port not in ports or port in known:
                        continue
                    joined = values.type_of(root, other).tensor_type
                except UnknownError:
                    continue
                shape = tuple(dim.dim_value for dim in joined.shape.dim)
                axis = _integer(node, "axis", 0) % max(len(shape), 1)
                found[port] = shape
                dtype = helper.tensor_dtype_to_np_dtype(joined.elem_type)
                known[port] = Hollow(dtype, (*shape[:axis], 0, *shape[axis + 1 :]))
        return found


class _Call:
    """What one call reads."""

    def __init__(self, graph: Graph, fed: Mapping[str, Fed]) -> None:
        self._graph = graph
        self._values = Values(graph, fed)

    def readings(self, scope: Scope) -> Iterator[Reading]:
        """What the nodes of a graph read, and those of the branches that are taken."""
        for node in scope.nodes:
            operator = operator_of(node)
            if operator in self._graph.functions:
                continue
            try:
                if operator == ("", "If"):
                    yield from self.readings(self._values.taken(scope, node))
                elif not operator[0] and node.op_type in _ADDED:
                    yield from self._added(scope, node)
                else:
                    yield from self._looked(scope, node, operator)
            except UnknownError:
                continue

    def _looked(self, scope: Scope, node: onnx.NodeProto, operator: tuple[str, str]) -> Iterator[Looked]:
        taken = node.input
        for slot, rows in _LOOKS.get(operator, ()):
            if rows < len(taken) and taken[rows]:
                axis = _integer(node, _AXES.get(node.op_type, ""), 0)
                yield from self._rows_of(scope, taken[slot], taken[rows], axis=axis)
        if operator == _GROUPED and _integer(node, "do_rotary", 0) and len(taken) > _COS:
            if len(taken) > _POSITIONS and taken[_POSITIONS]:
                yield from self._rows_of(scope, taken[_COS], taken[_POSITIONS])
            else:
                yield from self._rows_of(scope, taken[_COS], taken[_TOTAL], counts=True)

    def _rows_of(
        self, scope: Scope, table: str, rows: str, *, axis: int = 0, counts: bool = False
    ) -> Iterator[Looked]:
        """What is looked up in a table by the elements of `rows`, or by all numbers below them."""
        values = self._values
        found = self._table(scope, table)
        if found is None:
            return
        try:
            index, shape = values.value(scope, rows), values.shape(scope, table)
        except UnknownError:
            return
        if index.dtype.kind in "iu" and index.size and -len(shape) <= axis < len(shape):
            lowest, highest = (0 if counts else int(index.min())), int(index.max()) - counts
            yield Looked(found, shape[axis], lowest, highest, values.port(scope, rows))

    def _added(self, scope: Scope, node: onnx.NodeProto) -> Iterator[Added]:
        """A table of several rows that goes with what is computed."""
        tables = [self._table(scope, name) for name in node.input]
        if (tables[0] is None) == (tables[1] is None):
            return
        slot = 0 if tables[0] is not None else 1
        table = cast("Table", tables[slot])
        if sum(extent > 1 for extent in table.shape) < 2:
            return
        taken, places = (self._values.shape(scope, node.input[each]) for each in (slot, 1 - slot))
        for axis in range(2, 1 + min(len(taken), len(places))):
            rows, count = taken[-axis], places[-axis]
            # A single row goes with any number of places, and many rows with a single place.
            fits = rows == count or rows == 1 or (count == 1 and rows > 1)
            if not fits or rows > 1:
                yield Added(table, rows, count, fits)

    def _table(self, scope: Scope, name: str) -> Table | None:
        """The weight that a value is, or a part of; None where it is none, or where that is not known."""
        try:
            for _ in range(DEEPEST):
                scope = scope.owner_of(name)
                if name in scope.weights:
                    return Table(name, tuple(scope.weights[name].dims))
                node = scope.makers.get(name)
                if node is None or operator_of(node)[0]:
                    return None
                if node.op_type == "Constant":
                    tensor = next((a.t for a in node.attribute if a.name == "value"), None)
                    return None if tensor is None else Table(name, tuple(tensor.dims))
                if node.op_type == "If":
                    scope, name = self._values.taken_output(scope, node, name)
                elif node.op_type in _KEPT | _MOVED:
                    name = node.input[0]
                else:
                    return None
        except UnknownError:
            pass
        return None


def _integer(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), default)
