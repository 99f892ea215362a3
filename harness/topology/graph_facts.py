"""What the nodes of a graph, or the package's configuration, say about its caches where the ports do not.

Exports of onnxruntime-genai spell the width of a head as a symbol, `kv_cache_dim`. An attention operator
that takes such a cache says how many heads share the width of the keys it is given; where the graph does
not say that width, `head_size` in `genai_config.json` does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness import wire
from harness.errors import InputError
from harness.onnx_file import ModelFile, Shape, open_model
from harness.onnx_graph import Node, main_graphs, nodes_of, subgraph
from harness.ports import PortInventory
from harness.topology.mappings import section
from harness.topology.spec import GraphFacts, Role, Topology

__all__ = ["read_graph_facts"]

_SCATTER = ("", "TensorScatter")
_GROUPED = ("com.microsoft", "GroupQueryAttention")
_LAST_TOKEN_SLOT = 5
"""Where `GroupQueryAttention` takes the index of the last token of each sequence (its schema)."""

_PASSED_ON = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators after which a control port still means what it meant."""

_SAME_WIDTH = frozenset(
    {
        "Add",
        "Cast",
        "Identity",
        "MRotaryEmbedding",
        "RMSNormalization",
        "RotaryEmbedding",
        "SimplifiedLayerNormalization",
    }
)
"""Operators whose first output is as wide as their first input."""

_ROWS = 2
"""The axis of the rows in the caches of `GroupQueryAttention`: [batch, heads, rows, width]."""

_WINDOW_WORDS = ("sliding", "window")
"""How exporters call the length of a cache that keeps a window (onnxruntime-genai)."""

_FARTHEST = 8
"""How many nodes before an attention are asked for the width of its keys."""


class _Heads(NamedTuple):
    """Where an attention operator has its caches, and what it makes their rows of.

    Attributes:
        pasts: input position of the past keys, and of the past values. This call's queries, keys and values
            are the first three inputs.
        number: the attribute that says how many heads the caches have.
    """

    pasts: tuple[int, int]
    number: str


_ATTENTION: Mapping[tuple[str, str], _Heads] = {
    ("", "Attention"): _Heads((4, 5), "kv_num_heads"),
    _GROUPED: _Heads((3, 4), "kv_num_heads"),
    ("com.microsoft", "SparseAttention"): _Heads((3, 4), "kv_num_heads"),
    ("com.microsoft", "MultiHeadAttention"): _Heads((6, 7), "num_heads"),
}
"""Operators that take [batch, heads, rows, width] caches (ONNX and onnxruntime schemas)."""


def read_graph_facts(
    graphs: Iterable[Path],
    inventory: PortInventory,
    topology: Topology,
    config: Mapping[str, Any] | None = None,
) -> GraphFacts:
    """What is known about the inputs of a decoder beyond their ports.

    Nodes are parsed only if something is open: an extent of a cache, the axis of a buffer, or what a length
    means.

    Args:
        graphs: the decoder, or its parts.
        inventory: the ports of all of it.
        topology: the role of every port.
        config: `genai_config.json`.

    Raises:
        InputError: a graph cannot be read.
    """
    buffers = {
        name
        for key, names in (topology.static_cache or {}).items()
        if key in ("key_cache_inputs", "value_cache_inputs")
        for name in names
    }
    caches = _open_caches(inventory, topology)
    fixed = _fixed_caches(inventory, topology)
    lengths = {
        port.name for port in topology.roles if port.role is Role.CONTROL and port.direction == "input"
    } - set(map(str, (topology.static_cache or {}).values()))
    if not (buffers or caches or fixed or lengths):
        return GraphFacts()
    widths: dict[str, int] = {}
    row_axes: dict[str, int] = {}
    windows: dict[str, int] = {}
    last_token_indices: set[str] = set()
    for path in graphs:
        with open_model(path) as model:
            try:
                nodes = _Nodes(model, caches=caches, buffers=buffers, fixed=fixed, lengths=lengths)
                widths.update(nodes.widths())
            except wire.WireError as error:
                raise InputError(
                    f"{path} is not a complete ONNX model: {error}.",
                    next_action="Export or download the file again; compare its size with the original's.",
                ) from error
        row_axes.update(nodes.row_axes)
        windows.update(nodes.windows)
        last_token_indices.update(nodes.last_token_indices)
    declared = _declared_width(config)
    extents = {}
    for name, axis in caches.items():
        width = widths.get(name, declared)
        if width is not None:
            extents[name] = {axis: width}
    return GraphFacts(
        extents=extents,
        row_axes=row_axes,
        windows=windows,
        last_token_indices=frozenset(last_token_indices),
    )


def _open_caches(inventory: PortInventory, topology: Topology) -> dict[str, int]:
    """Growing caches whose width is a symbol, with the axis of the width: the last."""
    inputs = {port.name: port for port in inventory.inputs}
    outputs = {port.name: port for port in inventory.outputs}
    scales = {port.name for port in topology.roles if port.role is Role.KV_SCALE}
    found = {}
    for index, name in enumerate(topology.kv_inputs):
        before = inputs[name].shape or ()
        after = outputs[topology.kv_outputs[index]].shape or before
        # An axis that is spelled alike on both sides does not grow.
        if name not in scales and before and not isinstance(before[-1], int) and before[-1] == after[-1]:
            found[name] = len(before) - 1
    return found


def _fixed_caches(inventory: PortInventory, topology: Topology) -> dict[str, bool]:
    """Caches that need not grow, each with whether the number of its rows is known.

    Where it is not, the length of a window counts them, by its name.
    """
    shapes = {port.name: port.shape or () for port in inventory.inputs}
    return {
        name: isinstance(rows, int)
        for name in topology.kv_inputs
        for rows in shapes[name][_ROWS : _ROWS + 1]
        if isinstance(rows, int) or (rows is not None and any(word in rows for word in _WINDOW_WORDS))
    }


def _declared_width(config: Mapping[str, Any] | None) -> int | None:
    decoder = section(section(config or {}, "model", "model"), "decoder", "model.decoder")
    width = decoder.get("head_size")
    return width if isinstance(width, int) and not isinstance(width, bool) and width > 0 else None


class _Nodes:
    """The nodes of the main graph that a cache or a length goes into."""

    def __init__(
        self,
        model: ModelFile,
        *,
        caches: Collection[str],
        buffers: Collection[str],
        fixed: Mapping[str, bool],
        lengths: Collection[str],
    ) -> None:
        self._model = model
        self._taken: list[tuple[Node, int, str]] = []
        self._makers: dict[str, Node] = {}
        self.row_axes: dict[str, int] = {}
        self.windows: dict[str, int] = {}
        self.last_token_indices: set[str] = set()
        origin = {name: name for name in lengths}
        for place in main_graphs(model.data):
            for node in nodes_of(model.data, subgraph(model.data, place)):
                operator = (node.domain, node.operator)
                first = next(iter(node.inputs), None)
                if node.operator in _PASSED_ON and first in origin and node.outputs:
                    origin[node.outputs[0]] = origin[first]
                if operator == _SCATTER and first is not None and first in buffers:
                    self.row_axes[first] = node.integers.get("axis", -2)
                if operator == _GROUPED:
                    slot = node.inputs[_LAST_TOKEN_SLOT : _LAST_TOKEN_SLOT + 1]
                    self.last_token_indices.update(origin[name] for name in slot if name in origin)
                    self._note_fixed(node, fixed)
                if operator in _ATTENTION:
                    self._taken += [
                        (node, position, name)
                        for position, past in enumerate(_ATTENTION[operator].pasts, start=1)
                        for name in node.inputs[past : past + 1]
                        if name in caches
                    ]
                if caches and node.outputs:
                    self._makers[node.outputs[0]] = node

    def _note_fixed(self, node: Node, fixed: Mapping[str, bool]) -> None:
        """A grouped attention writes into a buffer that is long enough, or rolls one where it is told to.

        One that rolls without a window keeps nobody knows how much, and nothing is noted.
        """
        window = node.integers.get("local_window_size", 0)
        for position in _ATTENTION[_GROUPED].pasts:
            for name in node.inputs[position : position + 1]:
                if name in fixed and node.integers.get("sliding_window_cache"):
                    self.windows |= {name: window} if window > 0 else {}
                elif fixed.get(name):
                    self.row_axes[name] = _ROWS

    def widths(self) -> dict[str, int]:
        """The width of a head in each cache, as far as the attention that takes it says so."""
        sources = {cache: _source(node, position) for node, position, cache in self._taken}
        shapes = self._model.shapes({asked for name in sources.values() for asked in self._asked(name)})
        found = {}
        for node, position, cache in self._taken:
            parts = 1 if len(shapes.get(sources[cache]) or ()) > 3 else _heads_in_a_row(node, position)
            width = self._width(sources[cache], shapes)
            if width is None or parts < 1:
                continue
            each, rest = divmod(width, parts)
            if rest == 0:
                # Two values of 4 bits share a byte, of which the last one may hold one only.
                is_halved = node.integers.get("kv_cache_bit_width") == 4
                found[cache] = (each + 1) // 2 if is_halved else each
        return found

    def _asked(self, name: str) -> Iterator[str]:
        """Values and weights whose shape may tell the width of a value."""
        for value, maker in self._made_of(name):
            yield value
            yield from () if maker is None else maker.inputs

    def _width(self, name: str, shapes: Mapping[str, Shape]) -> int | None:
        """The last extent of a value: as the graph says it, or as wide as the product that gave it."""
        for value, maker in self._made_of(name):
            shape = shapes.get(value)
            if shape and isinstance(shape[-1], int):
                return shape[-1]
            if maker is not None and maker.operator == "MatMulNBits":
                return maker.integers.get("N")
            if maker is not None and maker.operator in ("MatMul", "Gemm") and len(maker.inputs) > 1:
                weight = shapes.get(maker.inputs[1])
                last = 0 if maker.integers.get("transB") else 1
                extent = weight[last] if weight is not None and len(weight) == 2 else None
                return extent if isinstance(extent, int) else None
        return None

    def _made_of(self, name: str) -> Iterator[tuple[str, Node | None]]:
        """A value and those before it that are as wide, each with the node that gives it."""
        for _ in range(_FARTHEST):
            maker = self._makers.get(name)
            yield name, maker
            if maker is None or maker.operator not in _SAME_WIDTH or not maker.inputs:
                return
            name = maker.inputs[0]


def _source(node: Node, position: int) -> str:
    """What holds the keys or values that an attention is given at `position`: itself, the keys, or all."""
    return node.inputs[position] or node.inputs[1] or node.inputs[0]


def _heads_in_a_row(node: Node, position: int) -> int:
    """How many heads stand side by side in what holds them, by rank 3; 0 where the node does not say."""
    count = node.integers.get(_ATTENTION[node.domain, node.operator].number, 0)
    if node.inputs[position]:
        return count
    queries = node.integers.get("num_heads", 0)
    return queries + 2 * count if queries > 0 and not node.inputs[1] else 0
