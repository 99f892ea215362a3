"""Extents of caches that the ports leave open: those of what the graph appends to them.

Older exports count the heads with the batch (`batch_size * num_heads`): how many that are for one sequence
shows in the keys and values of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.decode.axes import UnfeedableError, batch_axis
from harness.decode.calls import Call, mask_input, positions_input, token_input
from harness.decode.wiring import Feed, Step
from harness.ports import Port, PortInventory
from harness.topology.spec import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["with_extents"]


def with_extents(topology: Topology, inventory: PortInventory, steps: Sequence[Step]) -> Topology:
    """The topology with the extents of growing KV that are open, spelled alike on both sides, and no batch.

    A graph is parsed only where there are any.

    Args:
        topology: of the whole.
        inventory: its ports.
        steps: its graphs.

    Raises:
        InputError: a graph cannot be read.
    """
    ports = {port.name: port for port in inventory.inputs}
    wanted = _open_axes(topology, ports, {port.name: port for port in inventory.outputs})
    if not wanted:
        return topology
    from harness.decode.tables import Tables

    fed = _first_token(topology, ports)
    extents = {name: dict(known) for name, known in topology.facts.extents.items()}
    for step in steps:
        names = {
            own: wire.first.name
            for own, wire in step.wires.items()
            if isinstance(wire.first, Feed) and wire.first.name in wanted
        }
        if not names:
            continue
        given = {own: fed[name] for own, wire in step.wires.items() if (name := _name(wire.first)) in fed}
        for own, shape in Tables(step.graph).appended(names, given).items():
            name = names[own]
            if len(shape) == len(ports[name].shape or ()):
                extents.setdefault(name, {}).update({axis: shape[axis] for axis in wanted[name]})
    return replace(topology, facts=replace(topology.facts, extents=extents))


def _open_axes(
    topology: Topology, inputs: dict[str, Port], outputs: dict[str, Port]
) -> dict[str, tuple[int, ...]]:
    """For each cache that has any, the axes that do not grow, are no batch, and are not known."""
    token = inputs.get(topology.token_input or "")
    batch = token.shape[0] if token is not None and token.shape is not None and len(token.shape) > 1 else None
    found = {}
    for past, present in zip(topology.kv_inputs, topology.kv_outputs, strict=True):
        if past not in inputs or present not in outputs:
            continue
        before, after = inputs[past].shape or (), outputs[present].shape or ()
        known = topology.facts.extents.get(past, {})
        axes = tuple(
            axis
            for axis, (extent, other) in enumerate(zip(before, after, strict=False))
            if isinstance(extent, str)
            and extent == other
            and axis not in known
            and axis != batch_axis(before, batch)
        )
        if axes:
            found[past] = axes
    return found


def _first_token(topology: Topology, inputs: dict[str, Port]) -> dict[str, NDArray[Any]]:
    """What follows from a single token, by input."""
    call = Call((0,), 0)
    fed = {}
    for name, make in (
        (topology.token_input, lambda port: token_input(port)[0]),
        (topology.attention_mask_input, lambda port: mask_input(port, capacity=None)),
        (topology.position_ids_input, positions_input),
    ):
        if name is not None and name in inputs:
            try:
                fed[name] = make(inputs[name]).array(call)
            except UnfeedableError:
                continue
    return fed


def _name(source: object) -> str:
    """The input of the whole; empty for another source."""
    return source.name if isinstance(source, Feed) else ""
