"""From ports to a topology, or to the reason why there is none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal

from harness.package import Package
from harness.ports import Dimension, Port, PortInventory
from harness.topology.acceptance import CROSS_ROLES, SELF_KV_ROLES
from harness.topology.conventions import Convention
from harness.topology.dataflow import CacheFlow, read_cache_flow
from harness.topology.declared import note_unfollowed, place_configured, place_declared
from harness.topology.derive import derive_cache
from harness.topology.exporters import CONVENTIONS
from harness.topology.findings import Finding, listed, matching, quoted, refusal_from
from harness.topology.genai import GenaiNames, genai_names
from harness.topology.graph_facts import read_graph_facts
from harness.topology.interface import (
    PAGED_NAMES,
    NamedPort,
    is_integer,
    place_inputs_by_name,
    place_logits,
    place_token_by_shape,
)
from harness.topology.placement import Placement
from harness.topology.shapes import StateShapeMatch
from harness.topology.sidecar import DeclaredIo, declared_io_of, read_io_block
from harness.topology.spec import Derivation, Gate, Outcome, Refusal, Role
from harness.topology.static_cache import place_static_cache

__all__ = ["resolve", "resolve_package"]

_LARGEST_EXTENT = (1 << 63) - 1


def resolve_package(
    package: Package,
    inventory: PortInventory,
    *,
    gate: Literal["default", "recurrent-only"] = "default",
    match: Literal["exact", "symbolic"] = "symbolic",
    ignore_declared: bool = False,
) -> Derivation:
    """Find the topology of a package's decoder, whose ports are `inventory`; see `resolve`.

    The graph's nodes are parsed for its dataflow, its weights are not. The dataflow of a decoder in parts
    crosses their borders: its pairs are made by name alone.

    Raises:
        InputError: what the package declares is not well formed, or the graph cannot be parsed.
    """
    graphs = [part.graph for part in package.components.decoder]
    derivation = resolve(
        inventory,
        declared=declared_io_of(package.metadata, graph=package.model.name),
        genai_config=package.genai_config,
        gate=gate,
        match=match,
        ignore_declared=ignore_declared,
        flow=read_cache_flow(graphs[0]) if len(graphs) == 1 else None,
    )
    if derivation.topology is None:
        return derivation
    facts = read_graph_facts(graphs, inventory, derivation.topology, package.genai_config)
    return replace(derivation, topology=replace(derivation.topology, facts=facts))


def resolve(
    inventory: PortInventory,
    *,
    declared: Mapping[str, Any] | None = None,
    genai_config: Mapping[str, Any] | None = None,
    gate: Literal["default", "recurrent-only"] = "default",
    match: Literal["exact", "symbolic"] = "symbolic",
    ignore_declared: bool = False,
    flow: CacheFlow | None = None,
) -> Derivation:
    """Find the topology that ports and declarations settle.

    What `declared` (an `io` block) says always wins; what it leaves out is derived. Without it, the
    patterns of `genai_config` are tried strictly, with exact shapes; then, unless `match` is exact, the
    conventions are tried as well, where symbolic axes are taken as unknown. The gate `recurrent-only` is
    a loader's additive fallback: it declines where nothing is declared and no state is found.

    `flow`, the dataflow of the graph, is a second witness: it confirms pairs made by name, settles those
    that no name settles, and a contradiction between the two is a refusal.

    Any list of ports gives a derivation, at a cost linear in their number.

    Raises:
        InputError: `declared` or `genai_config` is not well formed.
    """
    io = DeclaredIo({}) if ignore_declared or declared is None else read_io_block(declared)
    names = GenaiNames({}) if ignore_declared or genai_config is None else genai_names(genai_config)
    malformed = _malformed(inventory)
    if malformed:
        return Derivation(Outcome.REFUSED, refusal=refusal_from(malformed))
    shape_match = StateShapeMatch(match)
    if names.convention is None:
        placement = _place(inventory, io, names, CONVENTIONS, shape_match, flow)
    else:
        configured = (names.convention,)
        placement = _place(inventory, io, names, configured, StateShapeMatch.EXACT, flow)
        if placement.findings and shape_match is StateShapeMatch.SYMBOLIC:
            placement = _place(inventory, io, names, (*configured, *CONVENTIONS), shape_match, flow)
    is_declared = io != DeclaredIo({}, listed=io.listed)
    has_state = any(port.role is Role.STATE for port in placement.inputs.values())
    if Gate(gate) is Gate.RECURRENT_ONLY and not is_declared and not has_state:
        return Derivation(Outcome.DECLINED, refusal=_declined(inventory))
    if placement.findings:
        return Derivation(
            Outcome.REFUSED,
            refusal=refusal_from(placement.findings),
            warnings=tuple(placement.warnings),
        )
    outcome = Outcome.DECLARED if is_declared else Outcome.DERIVED
    return Derivation(outcome, topology=placement.topology(), warnings=tuple(placement.warnings))


def _place(
    inventory: PortInventory,
    io: DeclaredIo,
    names: GenaiNames,
    conventions: Sequence[Convention],
    match: StateShapeMatch,
    flow: CacheFlow | None,
) -> Placement:
    """Give every port a role, from what is declared to what is left over."""
    placement = Placement(inventory)
    place_declared(placement, io, conventions, match, flow)
    place_configured(placement, names)
    filled = {port.role for port in placement.inputs.values()}
    for named in place_inputs_by_name(placement.open_inputs(), filled=filled):
        placement.place(named.port.name, "input", named.role, named.because)
    _refuse_paging(placement)
    _place_caches(placement, io, conventions, match, flow)
    _place_token(placement, declared=frozenset(io.single))
    _place_logits(placement)
    note_unfollowed(placement, names)
    for port in placement.open_outputs():
        placement.place(port.name, "output", Role.AUXILIARY, "no cache and not the logits; nothing needs it")
    unknown = _unexplained(placement, placement.open_inputs())
    if unknown:
        placement.findings.append(_unknown(unknown))
    if flow is not None:
        placement.findings += _unproduced(placement.inventory.outputs, flow.unproduced)
    return placement


def _place_caches(
    placement: Placement,
    io: DeclaredIo,
    conventions: Sequence[Convention],
    match: StateShapeMatch,
    flow: CacheFlow | None,
) -> None:
    inventory = placement.inventory
    placed = {*placement.inputs, *placement.outputs, "logits"}  # no cache, whatever it is computed from
    batch, sequence = _token_symbols(placement)
    caches = derive_cache(
        inventory, conventions, match=match, placed=placed, batch=batch, sequence=sequence, flow=flow
    )
    placement.findings += caches.findings
    for binding in caches.bindings:
        if _is_declared_elsewhere(binding.role, io):
            placement.findings.append(_left_out(binding.past.name, binding.role))
        if binding.present is None or binding.present.name not in placement.outputs:
            placement.place_binding(binding)
    place_static_cache(placement, caches.bindings)
    if not caches.unbound and not any(
        port.pair or port.role in SELF_KV_ROLES for port in placement.inputs.values()
    ):
        placement.findings.append(
            Finding(
                "E_NO_CACHE",
                "No input is a cache that an output gives back: each step would have to compute everything "
                "anew. Export the graph with past inputs, or declare model.io.kv_inputs.",
            )
        )


def _refuse_paging(placement: Placement) -> None:
    paging = tuple(port.name for port in placement.inventory.inputs if port.name in PAGED_NAMES)
    if paging:
        placement.findings.append(
            Finding(
                "E_UNSUPPORTED_LAYOUT_PAGED",
                f"{listed(paging)} address a pool of blocks that many sequences share. Export the graph "
                "without paged attention.",
                paging,
            )
        )


def _token_symbols(placement: Placement) -> tuple[Dimension, Dimension]:
    """How the port that drives the decoder spells its batch and its length."""
    driving = [*placement.shapes(Role.TOKEN), *placement.shapes(Role.EMBEDS)]
    batch, sequence, *_ = (*next(iter(driving), ()), None, None)
    return batch, sequence


def _is_declared_elsewhere(role: Role, io: DeclaredIo) -> bool:
    """True if the `io` block lists the ports of this role, so that it is complete without this one."""
    if role in SELF_KV_ROLES:
        return io.kv_inputs is not None or io.static_cache is not None
    if role in CROSS_ROLES:
        return io.cross_kv_inputs is not None
    return io.state_pairs is not None


def _left_out(name: str, role: Role) -> Finding:
    field = {Role.STATE: "state_pairs"}.get(role, "cross_kv_inputs" if role in CROSS_ROLES else "kv_inputs")
    return Finding(
        "E_UNKNOWN_INPUT",
        f"{quoted(name)} looks like {role.value}, but model.io.{field} is declared without it. Add it there.",
        (name,),
    )


def _place_token(placement: Placement, *, declared: frozenset[Role]) -> None:
    token, embeds = placement.taken(Role.TOKEN), placement.taken(Role.EMBEDS)
    if token is not None and embeds is not None:
        if not declared & {Role.TOKEN, Role.EMBEDS}:
            placement.findings.append(
                Finding(
                    "E_AMBIGUOUS_TOKEN_INPUT",
                    f"Declare model.io.token_input: {matching((token, embeds))}.",
                    (token, embeds),
                )
            )
        return
    if token is not None or embeds is not None:
        return
    candidates = _unexplained(placement, placement.open_inputs())
    found = place_token_by_shape(candidates)
    if isinstance(found, NamedPort):
        placement.place(found.port.name, "input", found.role, found.because)
    elif found is not None:
        placement.findings.append(found)
    else:
        names = tuple(port.name for port in candidates)
        what = (
            f"none of {listed(names)} is an integer input of rank 2 whose name may mean tokens"
            if names
            else "no input is left"
        )
        placement.findings.append(
            Finding(
                "E_NO_TOKEN_INPUT",
                f"No token input: {what}. Declare model.io.token_input or inputs_embeds_input.",
                names,
            )
        )


def _place_logits(placement: Placement) -> None:
    if placement.taken(Role.LOGITS) is not None:
        return
    widths = {extent for shape in placement.shapes(Role.STATE) for extent in shape}
    for role in (Role.EMBEDS, Role.ENCODER_HIDDEN_STATES):
        widths |= {extent for shape in placement.shapes(role) for extent in shape[-1:]}
    attention = (Role.KV_KEY, Role.KV_VALUE, Role.KV_FUSED)
    heads = {width for role in attention for shape in placement.shapes(role) for width in _head_widths(shape)}
    candidates = _unexplained(placement, placement.open_outputs())
    found = place_logits(candidates, widths=widths, heads=heads)
    if isinstance(found, NamedPort):
        placement.place(found.port.name, "output", found.role, found.because)
    else:
        placement.findings.append(found)


def _head_widths(shape: Sequence[Dimension]) -> tuple[int, ...]:
    """How wide one head of a KV cache of this shape is, and all of them together, where it says so."""
    extents = [extent for extent in shape[1:] if isinstance(extent, int)]
    return (extents[-1], prod(extents)) if extents else ()


def _unexplained(placement: Placement, ports: Sequence[Port]) -> list[Port]:
    """Those of `ports` that no finding names: not caches without a partner, nor one of several candidates."""
    named = {
        name for finding in placement.findings if finding.code != "E_NO_TOKEN_INPUT" for name in finding.ports
    }
    return [port for port in ports if port.name not in named]


def _unknown(ports: Sequence[Port]) -> Finding:
    names = tuple(port.name for port in ports)
    return Finding(
        "E_UNKNOWN_INPUT",
        f"Nothing says what to feed to {listed(names)}. Declare the role under model.io, or list the port "
        "under model.io.optional_inputs if it may keep its default.",
        names,
    )


def _declined(inventory: PortInventory) -> Refusal:
    """The answer of the additive fallback where it has nothing to add."""
    names = tuple(port.name for port in inventory.inputs if is_integer(port))
    return Refusal(
        code="E_AMBIGUOUS_TOKEN_INPUT",
        message="The graph has no recurrent state, so the fallback adds nothing, and "
        f"model.io.token_input is not declared: {matching(names)}.",
        ports=names,
    )


def _malformed(inventory: PortInventory) -> list[Finding]:
    findings = []
    for direction, ports in (("input", inventory.inputs), ("output", inventory.outputs)):
        seen: set[str] = set()
        repeated: set[str] = set()
        for port in ports:
            problem = _malformation(port)
            if problem is not None:
                findings.append(
                    Finding(
                        "E_MALFORMED_PORT", f"The {direction} {quoted(port.name)} {problem}.", (port.name,)
                    )
                )
            (repeated if port.name in seen else seen).add(port.name)
        findings += [
            Finding(
                "E_DUPLICATE_PORT",
                f"Two {direction}s are named {quoted(name)}; port names are unique. Export the graph again.",
                (name,),
            )
            for name in sorted(repeated)
        ]
    return findings


def _unproduced(outputs: Sequence[Port], lacking: Collection[str]) -> list[Finding]:
    """Outputs whose values come from nowhere: those that are `lacking`."""
    return [
        Finding(
            "E_MALFORMED_PORT",
            f"The output {quoted(port.name)} is given by no node, and is neither an input nor a weight. "
            "Export the graph again.",
            (port.name,),
        )
        for port in outputs
        if port.name in lacking
    ]


def _malformation(port: Port) -> str | None:
    if not port.name:
        return "has no name"
    if "\0" in port.name:
        return "has a NUL in its name"
    for extent in port.shape or ():
        if isinstance(extent, int) and not 0 <= extent <= _LARGEST_EXTENT:
            return f"has the extent {extent}, which no tensor has"
    return None
