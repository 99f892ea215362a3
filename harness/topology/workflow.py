"""The newer form of inference metadata: port roles and state groups of a `pipeline.workflow`.

A workflow declares, for each of its components, what ports mean (`ports.roles`) and, in its state
service, which ports carry state and how it is updated. This reads the decoder component as an `io` block.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from harness.errors import InputError
from harness.topology.mappings import integer, mapping, misfit, optional_string, section, string

__all__ = ["io_of_workflow"]

_FIELD_OF_ROLE = {
    "token_ids": "token_input",
    "inputs_embeds": "inputs_embeds_input",
    "attention_mask": "attention_mask_input",
    "position_ids": "position_ids_input",
    "logits": "logits_output",
    "encoder_hidden_states": "encoder_hidden_states_input",
}
_SELF_ATTENTION = frozenset({"full_attention", "sliding_attention", "multi_latent_attention"})
_CROSS_ATTENTION = "cross_attention"
_RECURRENT = "recurrent"
_SCATTER = "indexed_scatter"
_PLACE = "pipeline.workflow"


def io_of_workflow(workflow: Mapping[str, Any], *, graph: str | None) -> dict[str, Any] | None:
    """The `io` block that a workflow declares for the component whose artifact is `graph`.

    None where no component is a decoder (tokens or embeddings in, logits out). Where several are,
    `graph` must name the artifact of one of them.

    Raises:
        InputError: the workflow has not the form that it must have, or leaves open which decoder is meant.
    """
    components = section(workflow, "components", f"{_PLACE}.components")
    decoders = {
        name: component for name in components if (component := _decoder(components, name)) is not None
    }
    if not decoders:
        return None
    name = _chosen(decoders, graph)
    block = dict(decoders[name][1])
    serving = section(workflow, "serving", f"{_PLACE}.serving")
    service = section(serving, "state_service", f"{_PLACE}.serving.state_service")
    place = f"{_PLACE}.serving.state_service.groups"
    groups = section(service, "groups", place)
    for group_name in groups:
        _add_group(block, mapping(groups[group_name], f"{place}.{group_name}"), f"{place}.{group_name}", name)
    return block


def _decoder(components: Mapping[str, Any], name: str) -> tuple[str | None, dict[str, Any]] | None:
    """Artifact and role fields of a component, None where it is no decoder."""
    place = f"{_PLACE}.components.{name}"
    component = mapping(components[name], place)
    implementation = section(component, "implementation", f"{place}.implementation")
    roles = section(section(component, "ports", f"{place}.ports"), "roles", f"{place}.ports.roles")
    block: dict[str, Any] = {}
    for port, role in roles.items():
        field = _FIELD_OF_ROLE.get(role) if isinstance(role, str) else None
        if field is None:
            continue
        if field in block:
            raise misfit(f"{place}.ports.roles", f"one port with the role {role}", f"{block[field]}, {port}")
        block[field] = string(port, f"{place}.ports.roles")
    if "logits_output" not in block or not {"token_input", "inputs_embeds_input"} & block.keys():
        return None
    return optional_string(implementation, "artifact", f"{place}.implementation.artifact"), block


def _chosen(decoders: Mapping[str, tuple[str | None, dict[str, Any]]], graph: str | None) -> str:
    if len(decoders) == 1:
        return next(iter(decoders))
    named = [
        name
        for name, (artifact, _) in decoders.items()
        if artifact is not None and graph is not None and PurePosixPath(artifact).name == graph
    ]
    if len(named) == 1:
        return named[0]
    raise InputError(
        f"{_PLACE}.components has {len(decoders)} decoders, {', '.join(decoders)}, and it is not clear which "
        f"one {graph or 'the graph'} is.",
        next_action="Name the graph whose file is the artifact of one of them, or pass --ignore-declared.",
    )


def _add_group(block: dict[str, Any], group: Mapping[str, Any], place: str, component: str) -> None:
    """Add the ports that a state group binds in `component` to the `io` block."""
    bindings = section(section(group, "ports", f"{place}.ports"), component, f"{place}.ports.{component}")
    if not bindings:
        return
    aliases = []
    for position, (cell, value) in enumerate(bindings.items()):
        where = f"{place}.ports.{component}.{cell}"
        alias = mapping(value, where)
        layer = alias.get("layer")
        rank = position if layer is None else integer(layer, f"{where}.layer")
        past = string(alias.get("input"), f"{where}.input")
        present = optional_string(alias, "output", f"{where}.output")
        if alias.get("access") == "read_only":
            present = None
        aliases.append((rank, str(alias.get("role") or ""), past, present))
    aliases.sort(key=lambda alias: alias[:2])
    kind = group.get("kind")
    update = section(group, "update", f"{place}.update")
    if kind in _SELF_ATTENTION and update.get("kind") == _SCATTER:
        _add_static_cache(block, aliases, update, f"{place}.update", component)
    elif kind in _SELF_ATTENTION:
        owned = [(past, present) for _, _, past, present in aliases if present is not None]
        block.setdefault("kv_inputs", []).extend(past for past, _ in owned)
        block.setdefault("kv_outputs", []).extend(present for _, present in owned)
    elif kind == _CROSS_ATTENTION:
        block.setdefault("cross_kv_inputs", []).extend(past for _, _, past, _ in aliases)
        block.setdefault("cross_kv_outputs", []).extend(
            present for _, _, _, present in aliases if present is not None
        )
    elif kind == _RECURRENT:
        block.setdefault("state_pairs", []).extend(
            {"input": past, "output": present} for _, _, past, present in aliases if present is not None
        )
    else:
        raise misfit(f"{place}.kind", "a kind of state that is known here", kind)


def _add_static_cache(
    block: dict[str, Any],
    aliases: list[tuple[int, str, str, str | None]],
    update: Mapping[str, Any],
    place: str,
    component: str,
) -> None:
    fields: dict[str, Any] = block.setdefault("static_cache", {})
    for field, key in (
        ("write_indices_input", "write_indices_ports"),
        ("kv_sequence_length_input", "kv_length_ports"),
    ):
        port = optional_string(
            section(update, key, f"{place}.{key}"), component, f"{place}.{key}.{component}"
        )
        if port is not None:
            fields[field] = port
    for kind in ("key", "value"):
        ports = [
            (past, present) for _, role, past, present in aliases if role == kind and present is not None
        ]
        fields.setdefault(f"{kind}_cache_inputs", []).extend(past for past, _ in ports)
        fields.setdefault(f"{kind}_cache_outputs", []).extend(present for _, present in ports)
