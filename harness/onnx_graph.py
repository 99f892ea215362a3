"""The nodes of an `.onnx` file, one at a time: operators, the names they connect, and their subgraphs.

Nothing is kept but what the caller keeps, and no weight is touched. Field numbers are those of
`onnx.proto`, see `harness.onnx_file`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from harness import wire

__all__ = ["FunctionBody", "GraphBody", "Node", "functions_of", "main_graphs", "nodes_of", "subgraph"]

_MODEL_GRAPH, _MODEL_FUNCTIONS = 7, 25
_GRAPH_NODES, _GRAPH_INPUTS, _GRAPH_OUTPUTS = 1, 11, 12
_FUNCTION_NAME, _FUNCTION_INPUTS, _FUNCTION_OUTPUTS, _FUNCTION_NODES, _FUNCTION_DOMAIN = 1, 4, 5, 7, 10
_NODE_INPUTS, _NODE_OUTPUTS, _NODE_OPERATOR, _NODE_ATTRIBUTES, _NODE_DOMAIN = 1, 2, 4, 5, 7
_NODE_FIELDS = frozenset({_NODE_INPUTS, _NODE_OUTPUTS, _NODE_OPERATOR, _NODE_ATTRIBUTES, _NODE_DOMAIN})
_ATTRIBUTE_NAME, _ATTRIBUTE_INTEGER, _ATTRIBUTE_GRAPH = 1, 3, 6
_VALUE_NAME = 1
_STANDARD_DOMAINS = frozenset({"", "ai.onnx"})

Span = tuple[int, int]


class Node(NamedTuple):
    """One node. A name that is left out is the empty string.

    Attributes:
        domain: of the operator, empty for the standard one.
        operator: its name.
        inputs: names of the values it takes, by position.
        outputs: names of the values it gives, by position.
        graphs: place in the file of each subgraph, by attribute name.
        integers: its integer attributes.
    """

    domain: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    graphs: Mapping[str, Span]
    integers: Mapping[str, int]


class GraphBody(NamedTuple):
    """Names of a graph's inputs and outputs, and its place in the file."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    place: Span


class FunctionBody(NamedTuple):
    """Names of a model-local function's inputs and outputs, and its place in the file."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    place: Span


def main_graphs(data: memoryview) -> list[Span]:
    """Places of the model's graph fields: one, but for files that are written in parts."""
    fields = wire.fields(data, 0, len(data), only=(_MODEL_GRAPH,))
    return [(start, end) for _, kind, start, end in fields if kind == wire.BYTES]


def subgraph(data: memoryview, place: Span) -> GraphBody:
    """Read the names of a graph's inputs and outputs."""
    inputs: list[str] = []
    outputs: list[str] = []
    for number, kind, start, end in wire.fields(data, *place, only=(_GRAPH_INPUTS, _GRAPH_OUTPUTS)):
        if kind == wire.BYTES:
            names = inputs if number == _GRAPH_INPUTS else outputs
            names.append(_text_field(data, start, end, _VALUE_NAME))
    return GraphBody(tuple(inputs), tuple(outputs), place)


def functions_of(data: memoryview) -> dict[tuple[str, str], FunctionBody]:
    """The model-local functions, by domain and name."""
    found = {}
    for _, kind, first, last in wire.fields(data, 0, len(data), only=(_MODEL_FUNCTIONS,)):
        if kind != wire.BYTES:
            continue
        domain, name = "", ""
        inputs: list[str] = []
        outputs: list[str] = []
        for number, inner_kind, start, end in wire.fields(data, first, last):
            if inner_kind != wire.BYTES or number == _FUNCTION_NODES:
                continue
            if number == _FUNCTION_NAME:
                name = wire.text(data, start, end)
            elif number == _FUNCTION_DOMAIN:
                domain = _domain(wire.text(data, start, end))
            elif number == _FUNCTION_INPUTS:
                inputs.append(wire.text(data, start, end))
            elif number == _FUNCTION_OUTPUTS:
                outputs.append(wire.text(data, start, end))
        found[domain, name] = FunctionBody(tuple(inputs), tuple(outputs), (first, last))
    return found


def nodes_of(data: memoryview, body: GraphBody | FunctionBody) -> Iterator[Node]:
    """Yield the nodes of a graph or function, in file order."""
    field = _FUNCTION_NODES if isinstance(body, FunctionBody) else _GRAPH_NODES
    for _, kind, start, end in wire.fields(data, *body.place, only=(field,)):
        if kind == wire.BYTES:
            yield _node(data, start, end)


def _node(data: memoryview, first: int, last: int) -> Node:
    domain, operator = "", ""
    inputs: list[str] = []
    outputs: list[str] = []
    graphs: dict[str, Span] = {}
    integers: dict[str, int] = {}
    for number, kind, start, end in wire.fields(data, first, last, only=_NODE_FIELDS):
        if kind != wire.BYTES:
            continue
        if number == _NODE_INPUTS:
            inputs.append(wire.text(data, start, end))
        elif number == _NODE_OUTPUTS:
            outputs.append(wire.text(data, start, end))
        elif number == _NODE_OPERATOR:
            operator = wire.text(data, start, end)
        elif number == _NODE_DOMAIN:
            domain = _domain(wire.text(data, start, end))
        elif number == _NODE_ATTRIBUTES:
            _read_attribute(data, start, end, graphs, integers)
    return Node(domain, operator, tuple(inputs), tuple(outputs), graphs, integers)


def _read_attribute(
    data: memoryview, first: int, last: int, graphs: dict[str, Span], integers: dict[str, int]
) -> None:
    name = ""
    graph: Span | None = None
    integer: int | None = None
    wanted = (_ATTRIBUTE_NAME, _ATTRIBUTE_INTEGER, _ATTRIBUTE_GRAPH)
    for number, kind, start, end in wire.fields(data, first, last, only=wanted):
        if number == _ATTRIBUTE_NAME and kind == wire.BYTES:
            name = wire.text(data, start, end)
        elif number == _ATTRIBUTE_INTEGER and kind == wire.VARINT:
            integer = wire.signed(start)
        elif number == _ATTRIBUTE_GRAPH and kind == wire.BYTES:
            graph = (start, end)
    if graph is not None:
        graphs[name] = graph
    if integer is not None:
        integers[name] = integer


def _text_field(data: memoryview, start: int, end: int, wanted: int) -> str:
    found = ""
    for _, kind, first, last in wire.fields(data, start, end, only=(wanted,)):
        if kind == wire.BYTES:
            found = wire.text(data, first, last)
    return found


def _domain(name: str) -> str:
    return "" if name in _STANDARD_DOMAINS else name
