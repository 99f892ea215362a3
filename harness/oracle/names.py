"""Names in a graph: domains, labels of nodes, what a node reads, and the order that follows from it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

import onnx

from harness.errors import InputError
from harness.oracle.scope import Scope

__all__ = ["domain_of", "free_names", "label_of", "ordered", "resolved"]


def domain_of(name: str) -> str:
    """The domain as the registry spells it: the standard one is empty."""
    return "" if name == "ai.onnx" else name


def label_of(node: onnx.NodeProto, scope: Scope) -> str:
    """Path and name of a node for messages; without a name, its operator and first output."""
    return scope.path + (node.name or f"{node.op_type}({next(filter(None, node.output), '')})")


def resolved(attributes: Iterable[onnx.AttributeProto], scope: Scope) -> Iterator[onnx.AttributeProto]:
    """Attributes with references to those of the function replaced; an unset one is left out."""
    for attribute in attributes:
        if not attribute.ref_attr_name:
            yield attribute
        elif attribute.ref_attr_name in scope.attributes:
            actual = onnx.AttributeProto()
            actual.CopyFrom(scope.attributes[attribute.ref_attr_name])
            actual.name = attribute.name
            yield actual


def free_names(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node reads: its inputs, and what its subgraphs read from outside."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            graph = attribute.g
            own = {tensor.name for tensor in graph.initializer} | {port.name for port in graph.input}
            own.update(name for inner in graph.node for name in inner.output)
            reads = [name for inner in graph.node for name in free_names(inner)]
            reads += [port.name for port in graph.output]
            yield from (name for name in reads if name not in own)


def ordered(nodes: Sequence[onnx.NodeProto], scope: Scope) -> list[onnx.NodeProto]:
    """`nodes` so that each stands behind what it reads, otherwise in the order given.

    Raises:
        InputError: nodes read each other in a circle.
    """
    producer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    waits = [{producer[name] for name in free_names(node) if name in producer} for node in nodes]
    if all(not awaited or max(awaited) < index for index, awaited in enumerate(waits)):
        return list(nodes)
    readers: dict[int, list[int]] = {}
    for index, awaited in enumerate(waits):
        for earlier in awaited:
            readers.setdefault(earlier, []).append(index)
    ready = [index for index, awaited in enumerate(waits) if not awaited]  # sorted, so it is a heap
    order: list[onnx.NodeProto] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(nodes[index])
        for later in readers.get(index, ()):
            waits[later].discard(index)
            if not waits[later]:
                heapq.heappush(ready, later)
    if len(order) < len(nodes):
        stuck = [label_of(node, scope) for node, awaited in zip(nodes, waits, strict=True) if awaited]
        raise InputError(
            f"The graph has a circle: of the nodes {', '.join(stuck[:8])} each waits for another.",
            next_action="Export the graph again, or run `onnx.checker` on it.",
        )
    return order
