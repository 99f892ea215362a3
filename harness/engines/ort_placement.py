"""Where ONNX Runtime put the nodes of a graph, and whether a run on a provider ran on that provider."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.engines.base import Availability
from harness.errors import InvalidRunError

__all__ = ["CPU_PROVIDER", "placed_on", "placement_of", "require_on_device"]

CPU_PROVIDER = "CPUExecutionProvider"

_SHAPE_ARITHMETIC = frozenset(
    {
        "Add",
        "And",
        "Cast",
        "Concat",
        "Constant",
        "ConstantOfShape",
        "Div",
        "Equal",
        "Expand",
        "Flatten",
        "Gather",
        "Greater",
        "GreaterOrEqual",
        "Identity",
        "Less",
        "LessOrEqual",
        "Max",
        "MemcpyFromHost",
        "MemcpyToHost",
        "Min",
        "Mod",
        "Mul",
        "Neg",
        "Not",
        "Or",
        "Range",
        "ReduceProd",
        "Reshape",
        "Shape",
        "Size",
        "Slice",
        "Split",
        "Squeeze",
        "Sub",
        "Transpose",
        "Unsqueeze",
        "Where",
    }
)
"""Operators that ONNX Runtime moves to the CPU on purpose: small integers that describe shapes.

By operator, because the runtime says no more about a node: one of these that works on activations is
not seen here. Everything that multiplies matrices, normalises, attends or recurs is outside the list.
"""


def placed_on(provider: str, found: Availability) -> Availability:
    """What is known of an engine, with the provider that it runs on where it can be used."""
    return replace(found, placement=provider) if found.usable else found


def placement_of(session: Any) -> dict[str, dict[str, dict[str, int]]]:
    """Node counts of the optimised graph, by provider and operator.

    Returns `{"providers": {"CPUExecutionProvider": {"MatMul": 12, ...}}}`; operators outside the default
    domain are written `domain.Operator`. The session must have been opened with the configuration
    entry `session.record_ep_graph_assignment_info` set to 1.
    """
    counts: dict[str, dict[str, int]] = {}
    for subgraph in session.get_provider_graph_assignment_info():
        by_operator = counts.setdefault(subgraph.ep_name, {})
        for node in subgraph.get_nodes():
            domain = "" if node.domain in ("", "ai.onnx") else f"{node.domain}."
            operator = f"{domain}{node.op_type}"
            by_operator[operator] = by_operator.get(operator, 0) + 1
    return {"providers": {name: dict(sorted(found.items())) for name, found in sorted(counts.items())}}


def require_on_device(provider: str, placement: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
    """Check that `provider` did the work: at least one node is there, and no real work elsewhere.

    Raises:
        InvalidRunError: naming what ran on another provider.
    """
    providers = placement["providers"]
    elsewhere = [
        f"{count} {operator} on {name}"
        for name, operators in providers.items()
        if name != provider
        for operator, count in operators.items()
        if operator not in _SHAPE_ARITHMETIC
    ]
    if elsewhere:
        raise InvalidRunError(
            f"{provider} was asked for, but nodes ran elsewhere: {', '.join(elsewhere)}.",
            next_action="Export the model without these operators, or check it with `ort-cpu`.",
        )
    if not providers.get(provider):
        raise InvalidRunError(
            f"{provider} was asked for, but no node ran there.",
            next_action="See `onnx-parity engines` for what is usable here.",
        )
