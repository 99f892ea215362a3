"""What the nodes of a graph, or the package's configuration, say about its caches where the ports do not.

Exports of onnxruntime-genai spell the width of a head as a symbol, `kv_cache_dim`. An attention operator
that takes such a cache says how many heads share the width of the keys it is given; where the graph does
not say that width, `head_size` in `genai_config.json` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness import wire
from harness.errors import InputError
from harness.onnx_file import ModelFile, Shape, open_model
from harness.onnx_graph import Node, main_graphs, nodes_of, subgraph
from harness.ports import PortInventory
from harness.topology.acceptance import SELF_KV_ROLES
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

_FARTHEST = 8
"""How many nodes before an attention are asked for the width of its keys."""


class _Heads(NamedTuple):
    """Where an attention operator has its caches, and what it makes their rows of.

    Attributes:
        pasts: input position of the past keys, and of the past values.
        fresh: input position of this call's keys, and of its values.
        number: the attribute that says how many heads there are.
    """

    pasts: tuple[int, int]
    fresh: tuple[int, int]
    number: str


_ATTENTION: Mapping[tuple[str, str], _Heads] = {
    ("", "Attention"): _Heads((4, 5), (1, 2), "kv_num_heads"),
    _GROUPED: _Heads((3, 4), (1, 2), "kv_num_heads"),
    ("com.microsoft", "SparseAttention"): _Heads((3, 4), (1, 2), "kv_num_heads"),
    ("com.microsoft", "MultiHeadAttention"): _Heads((6, 7), (1, 2), "num_heads"),
}
"""Operators that take [batch, heads, rows, width] caches (ONNX and onnxruntime schemas)."""


def read_graph_facts(
    path: Path, inventory: PortInventory, topology: Topology, config: Mapping[str, Any] | None = None
) -> GraphFacts:
    """What is known about the inputs of the graph `path` beyond their ports.

    Its nodes are parsed only if something is open: an extent of a cache, the axis of a buffer, or what a
    length means.

    Args:
        path: the graph.
        inventory: its ports.
        topology: the role of every port.
        config: `genai_config.json`.

    Raises:
        InputError: the graph cannot be read.
    """
    buffers = {
        name
        for key, names in (topology.static_cache or {}).items()
        if key in ("key_cache_inputs", "value_cache_inputs")
        for name in names
    }
    caches = _open_caches(inventory, topology)
    lengths = {
        port.name for port in topology.roles if port.role is Role.CONTROL and port.direction == "input"
    } - set(map(str, (topology.static_cache or {}).values()))
    if not (buffers or caches or lengths):
        return GraphFacts()
    with open_model(path) as model:
        try:
            found = _Nodes(model, caches=caches, buffers=buffers, lengths=lengths)
            widths = found.widths()
        except wire.WireError as error:
            raise InputError(
                f"{path} is not a complete ONNX model: {error}.",
                next_action="Export or download the file again; compare its size with the original's.",
            ) from error
    declared = _declared_width(config)
    extents = {}
    for name, axis in caches.items():
        width = widths.get(name, declared)
        if width is not None:
            extents[name] = {axis: width}
    return GraphFacts(extents, found.row_axes, frozenset(found.last_token_indices))


def _open_caches(inventory: PortInventory, topology: Topology) -> dict[str, int]:
    """Growing caches whose width is a symbol, with the axis of the width: the last."""
    presents = dict(zip(topology.kv_inputs, topology.kv_outputs, strict=True))
    outputs = {port.name: port for port in inventory.outputs}
    roles = {port.name: port.role for port in topology.roles if port.direction == "input"}
    found = {}
    for port in inventory.inputs:
        present = outputs.get(presents.get(port.name, ""))
        if present is None or not port.shape or roles.get(port.name) not in SELF_KV_ROLES - {Role.KV_SCALE}:
            continue
        before, after = port.shape[-1], (present.shape or port.shape)[-1]
        # An axis that is spelled alike on both sides does not grow.
        if not isinstance(before, int) and not isinstance(after, int) and before == after:
            found[port.name] = len(port.shape) - 1
    return found


def _declared_width(config: Mapping[str, Any] | None) -> int | None:
    decoder = section(section(config or {}, "model", "model"), "decoder", "model.decoder")
    width = decoder.get("head_size")
    return width if isinstance(width, int) and not isinstance(width, bool) and width > 0 else None


class _Nodes:
    """The nodes of the main graph that a cache or a length goes into."""

    def __init__(
        self, model: ModelFile, *, caches: Iterable[str], buffers: set[str], lengths: set[str]
    ) -> None:
        self._model = model
        self._caches = frozenset(caches)
        self._attention: list[Node] = []
        self._makers: dict[str, Node] = {}
        self.row_axes: dict[str, int] = {}
        self.last_token_indices: set[str] = set()
        origin = {name: name for name in lengths}
        for place in main_graphs(model.data):
            for node in nodes_of(model.data, subgraph(model.data, place)):
                operator = (node.domain, node.operator)
                first = node.inputs[0] if node.inputs else ""
                if node.operator in _PASSED_ON and first in origin and node.outputs:
                    origin[node.outputs[0]] = origin[first]
                if operator == _SCATTER and first in buffers:
                    self.row_axes[first] = node.integers.get("axis", -2)
                if operator == _GROUPED and len(node.inputs) > _LAST_TOKEN_SLOT:
                    source = origin.get(node.inputs[_LAST_TOKEN_SLOT])
                    self.last_token_indices |= {source} if source is not None else set()
                if operator in _ATTENTION and self._caches.intersection(node.inputs):
                    self._attention.append(node)
                if self._caches and node.outputs:
                    self._makers[node.outputs[0]] = node

    def widths(self) -> dict[str, int]:
        """The width of a head in each cache, as far as the attention that takes it says so."""
        wanted = {name for node in self._attention for name in self._asked(node)}
        shapes = self._model.shapes(wanted)
        found = {}
        for node in self._attention:
            heads = _ATTENTION[node.domain, node.operator]
            count = node.integers.get(heads.number, 0)
            queries = node.integers.get("num_heads", 0)
            for past, fresh in zip(heads.pasts, heads.fresh, strict=True):
                name = node.inputs[past] if past < len(node.inputs) else ""
                if name not in self._caches or not count:
                    continue
                is_packed = fresh >= len(node.inputs) or not node.inputs[fresh]
                # Without keys of their own, queries, keys and values of all heads stand side by side.
                source, parts = (0, queries + 2 * count) if is_packed else (fresh, count)
                width = self._width(node.inputs[source], shapes)
                shape = shapes.get(node.inputs[source])
                if shape is not None and len(shape) == 4:
                    parts = 1  # heads on an axis of their own
                if width is not None and parts and width % parts == 0:
                    bits = node.integers.get("kv_cache_bit_width", 0)
                    found[name] = (width // parts + 1) // 2 if bits == 4 else width // parts
        return found

    def _asked(self, node: Node) -> Iterator[str]:
        """Values and weights whose shape may tell the width of what `node` is given."""
        for position in (0, *_ATTENTION[node.domain, node.operator].fresh):
            name = node.inputs[position] if position < len(node.inputs) else ""
            for _ in range(_FARTHEST):
                if not name:
                    break
                yield name
                maker = self._makers.get(name)
                if maker is None:
                    break
                yield from maker.inputs
                name = maker.inputs[0] if maker.inputs and maker.operator in _SAME_WIDTH else ""

    def _width(self, name: str, shapes: Mapping[str, Shape]) -> int | None:
        """The last extent of a value: as the graph says it, or as wide as the product that gave it."""
        for _ in range(_FARTHEST):
            shape = shapes.get(name)
            if shape and isinstance(shape[-1], int):
                return shape[-1]
            maker = self._makers.get(name)
            if maker is None or not maker.inputs:
                return None
            if maker.operator == "MatMulNBits":
                return maker.integers.get("N")
            if maker.operator in ("MatMul", "Gemm") and len(maker.inputs) > 1:
                weight = shapes.get(maker.inputs[1])
                last = -2 if maker.integers.get("transB") else -1
                extent = weight[last] if weight is not None and len(weight) == 2 else None
                return extent if isinstance(extent, int) else None
            if maker.operator not in _SAME_WIDTH:
                return None
            name = maker.inputs[0]
        return None
