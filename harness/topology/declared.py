"""What a package declares, as roles: it wins over whatever the names would say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from harness.ports import Port
from harness.topology.acceptance import CROSS_ROLES, SELF_KV_ROLES, CacheBinding, check_binding
from harness.topology.conventions import INDEX, Convention
from harness.topology.dataflow import CacheFlow
from harness.topology.derive import derive_cache
from harness.topology.findings import Finding, listed, quoted
from harness.topology.genai import GenaiNames
from harness.topology.patterns import PatternTable, layer_of
from harness.topology.placement import Direction, Placement
from harness.topology.shapes import StateShapeMatch
from harness.topology.sidecar import STATIC_CACHE_LISTS, STATIC_CACHE_PORTS, DeclaredIo
from harness.topology.spec import Role
from harness.topology.swaps import cache_role, tokens
from harness.topology.witness import confirm

__all__ = ["note_unfollowed", "place_configured", "place_declared"]

_BECAUSE = "declared by the package's io block"


def place_configured(placement: Placement, names: GenaiNames) -> None:
    """Place the ports that `genai_config.json` names one by one, where nothing else is declared."""
    for role, name in names.single.items():
        if placement.taken(role) is None:
            _place_single(placement, role, name, f"named {role.value} by genai_config.json")
    for name in names.controls:
        _place_single(placement, Role.CONTROL, name, "named as a length by genai_config.json")
    for one in names.templates:
        if INDEX not in one.pattern and placement.taken(one.role) is None:
            _find(placement, one.pattern, one.direction)


def note_unfollowed(placement: Placement, names: GenaiNames) -> None:
    """Say which templates of `genai_config.json` no port follows, and which ports are otherwise.

    The evidence of ports that are derived instead says so as well.
    """
    for one in names.templates:
        is_input = one.direction == "input"
        ports = placement.inventory.inputs if is_input else placement.inventory.outputs
        side = placement.inputs if is_input else placement.outputs
        table = PatternTable([(one.pattern, None)])
        followers = [port.name for port in ports if table.matches(port.name)]
        if not followers:
            what = f"no {one.direction} is named like {quoted(one.pattern)}, {one.key} of genai_config.json"
            placement.warnings.append(
                f"{what[0].upper()}{what[1:]}: it is left aside. Correct it, or remove it."
            )
            for name, port in side.items():
                if port.role is one.role:
                    side[name] = replace(port, because=f"{port.because}; {what}")
        others = [name for name in followers if name in side and side[name].role is not one.role]
        if others:
            kept = side[others[0]]
            placement.warnings.append(
                f"By {one.key} of genai_config.json {listed(others)} would be {one.role.value}. Kept is "
                f"{kept.role.value}: {kept.because}. Correct the configuration."
            )


def place_declared(
    placement: Placement,
    io: DeclaredIo,
    conventions: Sequence[Convention],
    match: StateShapeMatch,
    flow: CacheFlow | None,
) -> None:
    """Place what the `io` block declares. A cache whose other side it leaves out is completed by name.

    What is declared stands, also where the dataflow contradicts it: that is a warning.
    """
    for role, name in io.single.items():
        _place_single(placement, role, name, _BECAUSE)
    natural = _by_name(placement, io, conventions, match)
    bindings = [
        *_declared_bindings(placement, io.kv_inputs, io.kv_outputs, natural),
        *_declared_bindings(placement, io.cross_kv_inputs, io.cross_kv_outputs, natural, cross=True),
    ]
    for pair in io.state_pairs or ():
        past, present = _find(placement, pair.input, "input"), _find(placement, pair.output, "output")
        if past is not None and present is not None:
            bindings.append(CacheBinding(past, present, Role.STATE, layer_of(past.name), _BECAUSE))
    bindings += _static_bindings(placement, io)
    if flow is not None:
        bindings = _held_against(placement, bindings, flow)
    for binding in bindings:
        placement.findings += check_binding(binding, match=match, batch=None, sequence=None)
        placement.place_binding(binding)
    for name, direction in io.auxiliary:
        if _find(placement, name, direction) is not None:
            placement.place(name, direction, Role.AUXILIARY, _BECAUSE)
    for name in io.optional_inputs:
        if _find(placement, name, "input") is not None:
            placement.place(name, "input", Role.OPTIONAL, _BECAUSE)
    for name, direction in io.listed:
        _find(placement, name, direction)


def _held_against(
    placement: Placement, bindings: Sequence[CacheBinding], flow: CacheFlow
) -> list[CacheBinding]:
    """Declared caches with what the dataflow says about them as further evidence."""
    outputs = {port.name for port in placement.inventory.outputs}.difference(placement.outputs)
    confirmed, findings = confirm(flow, bindings, outputs, declared=True)
    against = {finding.ports[0]: finding.message for finding in findings}
    placement.warnings += against.values()
    return [
        replace(one, because=f"{one.because}. {against[one.past.name]}") if one.past.name in against else one
        for one in confirmed
    ]


def _place_single(placement: Placement, role: Role, name: str, because: str) -> None:
    direction: Direction = "output" if role is Role.LOGITS else "input"
    if _find(placement, name, direction) is not None:
        placement.place(name, direction, role, because)


def _find(placement: Placement, name: str, direction: Direction) -> Port | None:
    """The port that a declaration names; a finding where the graph lacks it."""
    port = placement.port(name, direction)
    if port is not None:
        return port
    placement.findings.append(
        Finding(
            "E_DECLARED_PORT_MISSING",
            f"The package declares the {direction} {quoted(name)}, which the graph lacks. Correct the "
            "declaration, or export the graph again.",
            (name,),
        )
    )
    return None


def _by_name(
    placement: Placement, io: DeclaredIo, conventions: Sequence[Convention], match: StateShapeMatch
) -> dict[str, CacheBinding]:
    """Caches by the name of either side: what declarations that name one side only leave open."""
    if all(ports is None for ports in (io.kv_inputs, io.kv_outputs, io.cross_kv_inputs, io.cross_kv_outputs)):
        return {}
    found = derive_cache(placement.inventory, conventions, match=match).bindings
    by_name = {binding.past.name: binding for binding in found}
    by_name.update((binding.present.name, binding) for binding in found if binding.present is not None)
    return by_name


def _declared_bindings(
    placement: Placement,
    inputs: Sequence[str] | None,
    outputs: Sequence[str] | None,
    completed: Mapping[str, CacheBinding],
    *,
    cross: bool = False,
) -> list[CacheBinding]:
    """The caches of two lists in the same order, of which one may be left out."""
    if inputs is not None and outputs is not None:
        lonely_pasts, lonely_presents = inputs[len(outputs) :], outputs[len(inputs) :]
        lonely = (*lonely_pasts, *lonely_presents)
        if lonely:
            placement.findings.append(
                Finding(
                    "E_UNPAIRED_PAST" if lonely_pasts else "E_PRESENT_WITHOUT_PAST",
                    f"{len(inputs)} cache inputs are declared and {len(outputs)} outputs; {listed(lonely)} "
                    "stands alone. Declare each input with its output, in the same order.",
                    lonely,
                )
            )
            return []
    bindings = []
    for past_name, present_name in zip_longest(inputs or (), outputs or ()):
        given = str(past_name or present_name)
        natural = completed.get(given)
        if past_name is None and natural is not None:
            past_name = natural.past.name
        if present_name is None and natural is not None and natural.present is not None:
            present_name = natural.present.name
        if past_name is None or (present_name is None and not cross):
            placement.findings.append(
                Finding(
                    "E_UNPAIRED_PAST" if past_name else "E_PRESENT_WITHOUT_PAST",
                    f"{quoted(given)} is declared as a cache without its other side. Declare both "
                    "model.io.kv_inputs and model.io.kv_outputs.",
                    (given,),
                )
            )
            continue
        past = _find(placement, past_name, "input")
        present = _find(placement, present_name, "output") if present_name is not None else None
        if past is None or (present is None and present_name is not None):
            continue
        role = _cache_role(past.name, natural, cross=cross)
        bindings.append(CacheBinding(past, present, role, layer_of(past.name), _BECAUSE))
    return bindings


def _static_bindings(placement: Placement, io: DeclaredIo) -> list[CacheBinding]:
    """Place the control ports of a declared static cache; returns its buffers."""
    fields = io.static_cache
    if fields is None:
        return []
    named = [name for field in fields.values() for name in ((field,) if isinstance(field, str) else field)]
    missing = [key for key in (*STATIC_CACHE_PORTS, *STATIC_CACHE_LISTS) if key not in fields]
    lengths = {len(fields[key]) for key in STATIC_CACHE_LISTS if key in fields}
    if missing or len(lengths) > 1:
        problem = f"lacks {', '.join(missing)}" if missing else "has lists of different lengths"
        placement.findings.append(
            Finding(
                "E_INCOMPLETE_CONTROL_PORTS",
                f"model.io.static_cache {problem}; it names {listed(named)}. Declare the write index, the "
                "valid length, and each buffer with its output, layer by layer.",
                tuple(named),
            )
        )
        return []
    for key in STATIC_CACHE_PORTS:
        _place_single(placement, Role.CONTROL, str(fields[key]), f"declared as {key} of the static cache")
    bindings = []
    for kind, role in (("key", Role.KV_KEY), ("value", Role.KV_VALUE)):
        outputs = fields[f"{kind}_cache_outputs"]
        for index, past_name in enumerate(fields[f"{kind}_cache_inputs"]):
            past = _find(placement, past_name, "input")
            present = _find(placement, outputs[index], "output")
            if past is not None and present is not None:
                bindings.append(CacheBinding(past, present, role, layer_of(past.name), _BECAUSE))
    placement.static_cache = {
        key: value if isinstance(value, str) else list(value) for key, value in fields.items()
    }
    return bindings


def _cache_role(name: str, natural: CacheBinding | None, *, cross: bool) -> Role:
    """Whether a declared cache holds keys, values or both: as its name says."""
    if natural is not None and natural.role in (CROSS_ROLES if cross else SELF_KV_ROLES):
        return natural.role
    said = cache_role(tokens(name))
    if cross:
        return Role.CROSS_KV_VALUE if said in (Role.KV_VALUE, Role.CROSS_KV_VALUE) else Role.CROSS_KV_KEY
    return said if said in SELF_KV_ROLES else Role.KV_FUSED
