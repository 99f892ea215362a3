"""Sidecars that say what was derived, and the refusal to write what a format cannot say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from harness.errors import InputError
from harness.ports import PortInventory
from harness.topology.findings import listed
from harness.topology.genai import genai_config_of
from harness.topology.resolve import resolve
from harness.topology.sidecar import io_block
from harness.topology.spec import Derivation, PortRole, Role, Topology

__all__ = ["FILE_NAMES", "Format", "differing", "sidecar_of"]

Format = Literal["inference-metadata", "genai-config"]

FILE_NAMES: Mapping[Format, str] = {
    "inference-metadata": "inference_metadata.yaml",
    "genai-config": "genai_config.json",
}
"""What a sidecar of each format is called."""
_UNSPEAKABLE = frozenset({Role.AUXILIARY, Role.ENCODER_ATTENTION_MASK})


def sidecar_of(inventory: PortInventory, topology: Topology, form: Format) -> dict[str, Any]:
    """The content of a sidecar file that declares `topology`, a mapping to be written by the caller.

    Reading it back and resolving `inventory` with it gives `topology` again; that is checked here.

    Raises:
        InputError: the format cannot say it; the message names the ports.
    """
    if form == "genai-config":
        document = genai_config_of(topology)
        again = resolve(inventory, genai_config=document)
        unsaid = differing(topology, again)
    else:
        document = {"model": {"io": _published_block(inventory, topology)}}
        again = resolve(inventory, declared=document["model"]["io"])
        unsaid = differing(topology, again) or _inputs_without_field(topology)
    if unsaid:
        raise InputError(
            f"{FILE_NAMES[form]} has no way to say what {listed(unsaid)} are.",
            next_action="Write the other format, or none: the package derives without a sidecar.",
        )
    return document


def _published_block(inventory: PortInventory, topology: Topology) -> dict[str, Any]:
    """The `io` block in its published form, in which an optional input says what its absence means."""
    block = io_block(topology)
    if topology.optional_inputs:
        shapes = {port.name: port.shape for port in inventory.inputs}
        block["optional_inputs"] = {
            name: {"presence": name, "absent": {"kind": "zeros", "shape": list(shapes[name] or ())}}
            for name in topology.optional_inputs
            if shapes[name] is not None and all(extent is not None for extent in shapes[name] or ())
        }
    return block


def _signature(topology: Topology) -> dict[tuple[str, str], tuple[Role, str | None]]:
    return {(port.direction, port.name): (port.role, port.pair) for port in topology.roles}


def differing(topology: Topology, again: Derivation) -> list[str]:
    """Names of ports that `again` places otherwise than `topology` does; empty where they agree."""
    wanted = _signature(topology)
    if again.topology is None:
        named = again.refusal.ports if again.refusal is not None else ()
        return list(named) or [name for _, name in wanted]
    got = _signature(again.topology)
    return [name for (direction, name), what in wanted.items() if got.get((direction, name)) != what]


def _inputs_without_field(topology: Topology) -> list[str]:
    """Inputs that the `io` block has no field for: they would be undeclared, and only derived again."""
    static = topology.static_cache or {}
    controls = {static.get("write_indices_input"), static.get("kv_sequence_length_input")}
    return [port.name for port in topology.roles if _has_no_field(port) and port.name not in controls]


def _has_no_field(port: PortRole) -> bool:
    return port.direction == "input" and (port.role in _UNSPEAKABLE or port.role is Role.CONTROL)
