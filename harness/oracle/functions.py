"""Model-local functions: which node calls one, and what its calls come to before any of them is inlined.

A function may have the name of an operator. Whether it is then called is for runtimes to say, by ONNX
(onnx.proto, on `ModelProto.functions`), and here it is said so. Operators have no overloads, so a node that
names one means the function. Of other domains than ONNX's own, the operators are those of ONNX Runtime, which
exporters describe by functions for those who lack them: a kernel goes before such a description, as with ONNX
Runtime itself. A function in the place of a standard operator is refused: what one runtime computes by it is
not what another one does.

A few functions that call each other twice stand for millions of nodes. So inlining keeps to a limit, for
which nodes are counted before any is planned, each function once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from harness.errors import InputError
from harness.oracle.kernels import find, is_standard, operator_version
from harness.oracle.names import domain_of

if TYPE_CHECKING:
    import onnx

__all__ = ["Functions"]

_MOST_NODES = 1 << 18
"""Nodes that functions may come to in all; real exports have thousands. A node takes a kilobyte or more."""

_DEEPEST = 50
"""Levels of functions and graphs in each other; exporters nest as deep as the model's modules do."""

_Key: TypeAlias = tuple[str, str, str]
"""Domain, name and overload."""


@dataclass(frozen=True, slots=True)
class _Extent:
    """What a function comes to.

    Attributes:
        own: nodes that stand in it, those of subgraphs and calls included.
        nodes: those, and the nodes of all calls within it.
        depth: levels of functions and graphs, itself included.
    """

    own: int
    nodes: int
    depth: int


_NOTHING = _Extent(0, 0, 0)


class Functions:
    """The functions of one model, and how much of the limit inlining has taken."""

    def __init__(self, model: onnx.ModelProto, file: str, *, inline_all: bool) -> None:
        """Note the functions of `model`.

        Args:
            model: the model.
            file: name of its file, for messages.
            inline_all: inline also where there is a native kernel for the operator that a function defines.
        """
        self._functions = {(domain_of(f.domain), f.name, f.overload): f for f in model.functions}
        self._file = file
        self._inline_all = inline_all
        self._extents: dict[_Key, _Extent] = {}
        self._inlined = 0

    def called_by(self, node: onnx.NodeProto, opsets: Mapping[str, int]) -> onnx.FunctionProto | None:
        """The function to inline in place of a node; None where a kernel computes it, or nothing does.

        Raises:
            InputError: the node may mean a function or a standard operator.
        """
        domain = domain_of(node.domain)
        function = self._functions.get((domain, node.op_type, node.overload))
        if function is None or node.overload or self._inline_all:
            return function
        if is_standard(domain, node.op_type, opsets.get(domain, 1)):
            raise InputError(
                f"Function {_name(function)} of {self._file}, which node {node.name or node.op_type} names, "
                "has the name of a standard operator: ONNX leaves open which of them is meant.",
                next_action="Export with another name or domain for the function, or without it.",
            )
        version = operator_version(domain, node.op_type, opsets.get(domain, 1))
        return function if find(domain, node.op_type, version) is None else None

    def reserve(self, function: onnx.FunctionProto, caller: str) -> None:
        """Account for inlining `function` in place of the node `caller`.

        Raises:
            InputError: with all calls within it there would be too many nodes, or they are nested too deep,
                or functions call each other in a circle.
        """
        extent = self._extent(function, {})
        if self._inlined + extent.nodes > _MOST_NODES:
            raise InputError(
                f"Function {_name(function)} of {self._file}, which node {caller} calls, comes to "
                f"{extent.nodes:,} nodes with all calls within it: the oracle inlines at most "
                f"{_MOST_NODES:,} nodes of a model's functions.",
                next_action="Export with fewer calls of functions, or name another oracle with --oracle.",
            )
        # Those of the calls within follow when they are inlined themselves.
        self._inlined += extent.own

    def _extent(self, function: onnx.FunctionProto, callers: Mapping[_Key, str]) -> _Extent:
        key = (domain_of(function.domain), function.name, function.overload)
        if key in self._extents:
            return self._extents[key]
        if key in callers:
            raise InputError(
                f"The functions {', '.join(callers.values())} of {self._file} call each other in a circle.",
                next_action="Export the graph again, or run `onnx.checker` on it.",
            )
        path = {**callers, key: _name(function)}
        opsets = {domain_of(entry.domain): entry.version for entry in function.opset_import}
        own, nodes, depth = 0, 0, 1
        for node, level in _nodes_of(function.node):
            called = self.called_by(node, opsets)
            # Before the walk goes deeper itself.
            if len(path) + (called is not None) > _DEEPEST:
                raise self._too_deep(function)
            inner = _NOTHING if called is None else self._extent(called, path)
            own += 1
            nodes += 1 + inner.nodes
            depth = max(depth, level + inner.depth)
        if depth > _DEEPEST:
            raise self._too_deep(function)
        self._extents[key] = _Extent(own, nodes, depth)
        return self._extents[key]

    def _too_deep(self, function: onnx.FunctionProto) -> InputError:
        return InputError(
            f"Function {_name(function)} of {self._file} lies in functions and graphs, or has such in it, "
            f"that are nested more than {_DEEPEST} deep, which the oracle does not inline.",
            next_action="Export with fewer levels of functions, or name another oracle with --oracle.",
        )


def _name(function: onnx.FunctionProto) -> str:
    return f"{function.domain or 'ai.onnx'}.{function.name}"


def _nodes_of(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[onnx.NodeProto, int]]:
    """All nodes, those of subgraphs included, with their level from 1 on."""
    todo = [(nodes, 1)]
    while todo:
        some, level = todo.pop()
        for node in some:
            yield node, level
            todo += [(attribute.g.node, level + 1) for attribute in node.attribute if attribute.HasField("g")]
