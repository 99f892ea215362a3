"""The caches of a decoder: which past port belongs to which present port, and what the pair is.

First the full patterns of the conventions are matched, then states are found by the suffix rule: what
follows the common prefix of the past patterns must stand again behind the common prefix of the present
patterns. Selection looks at names only; shapes and dtypes accept or reject what was selected, and never
select.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.ports import Dimension, Port, PortInventory
from harness.topology.conventions import INDEX, STEM, Convention, PortPair, StemPair
from harness.topology.findings import Finding, listed, quoted
from harness.topology.patterns import PatternTable, StemTable, layer_of, skeleton
from harness.topology.shapes import StateShapeMatch, dynamic_state_axes, growing_axes, mismatch
from harness.topology.spec import Role

__all__ = ["CacheBinding", "CachePorts", "check_binding", "derive_cache", "exclude_bound"]

CROSS_ROLES = frozenset({Role.CROSS_KV_KEY, Role.CROSS_KV_VALUE})


@dataclass(frozen=True, slots=True)
class CacheBinding:
    """A past port and the present port that gives its next value.

    Attributes:
        past: the graph input.
        present: the graph output; None for cross-attention KV that is only read.
        role: of both.
        layer: the layer index in the names, None where they have none.
        because: the evidence, one line.
    """

    past: Port
    present: Port | None
    role: Role
    layer: int | None
    because: str


@dataclass(frozen=True, slots=True)
class CachePorts:
    """The caches of a graph.

    Attributes:
        bindings: in the order of the graph's inputs.
        findings: what speaks against them.
        unbound: names of ports, inputs and outputs, that are caches by name but have no partner; each
            stands in a finding.
    """

    bindings: tuple[CacheBinding, ...]
    findings: tuple[Finding, ...]
    unbound: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Lonely:
    """A cache port without its partner; `keys` tell which other lonely ports could be meant for it."""

    port: Port
    keys: frozenset[tuple[object, str]]


@dataclass(frozen=True, slots=True)
class _Claim:
    """An input, the names of the outputs that it could be paired with, and as what."""

    past: Port
    presents: Mapping[str, tuple[Role, int | None, str]]


def derive_cache(
    inventory: PortInventory,
    conventions: Sequence[Convention],
    *,
    match: StateShapeMatch,
    placed: Collection[str] = frozenset(),
    batch: Dimension = None,
) -> CachePorts:
    """Find the caches of a graph by the names in `conventions`.

    Args:
        inventory: its ports; names are unique among inputs, and among outputs.
        conventions: what names to look for.
        match: when the shapes of a state's two ports agree.
        placed: names of ports that are known to be something else.
        batch: leading symbol of the token port, see `shapes.dynamic_state_axes`.
    """
    inputs = [port for port in inventory.inputs if port.name not in placed]
    outputs = {port.name: port for port in inventory.outputs if port.name not in placed}
    pairs = [(pair, convention) for convention in conventions for pair in convention.pairs]
    stems = [(stem, convention) for convention in conventions for stem in convention.stems]

    paired, lonely_pasts, findings = _bind(_pair_claims(inputs, outputs, pairs), outputs)
    remaining = exclude_bound(inputs, paired, lonely_pasts)
    by_stem, lonely_stems, more = _bind(_stem_claims(remaining, outputs, stems), outputs)
    findings += more
    bindings = paired + by_stem
    lonely_pasts += lonely_stems
    bound = {binding.present.name for binding in bindings if binding.present is not None}
    lonely_presents = _lonely_presents(outputs, bound, pairs, stems)
    findings += _lonely_findings(lonely_pasts, lonely_presents, outputs, bound)
    for binding in bindings:
        findings += check_binding(binding, match=match, batch=batch)
    order = {port.name: rank for rank, port in enumerate(inventory.inputs)}
    return CachePorts(
        bindings=tuple(sorted(bindings, key=lambda binding: order[binding.past.name])),
        findings=tuple(findings),
        unbound=frozenset(one.port.name for one in (*lonely_pasts, *lonely_presents)),
    )


def exclude_bound(
    inputs: Sequence[Port], bindings: Iterable[CacheBinding], lonely: Iterable[_Lonely]
) -> list[Port]:
    """The inputs that the suffix rule may look at: none that a full pattern has already claimed.

    Without this step every KV port would be a state as well, since its suffix is also behind both
    prefixes, and growing KV would be replaced by zeros of the wrong length.
    """
    claimed = {binding.past.name for binding in bindings} | {one.port.name for one in lonely}
    return [port for port in inputs if port.name not in claimed]


def _pair_claims(
    inputs: Iterable[Port], outputs: Mapping[str, Port], pairs: Sequence[tuple[PortPair, Convention]]
) -> Iterable[_Claim | _Lonely | CacheBinding]:
    table = PatternTable((pair.past, (pair, convention)) for pair, convention in pairs)
    for port in inputs:
        matches = table.matches(port.name)
        if not matches:
            continue
        presents = {}
        for (pair, convention), index in matches:
            present = pair.present.replace(INDEX, index)
            because = f"named {quoted(pair.past)}, its present {quoted(pair.present)} ({convention.name})"
            presents[present] = (pair.role, int(index) if 0 < len(index) < 10 else None, because)
        existing = {name: what for name, what in presents.items() if name in outputs}
        role, layer, _ = next(iter(presents.values()))
        (pair, convention), _ = matches[0]
        if existing:
            yield _Claim(port, existing)
        elif role in CROSS_ROLES:
            because = (
                f"named {quoted(pair.past)} ({convention.name}); no output gives it back: it is only read"
            )
            yield CacheBinding(port, None, role, layer, because)
        else:
            yield _Lonely(port, frozenset((pair, "") for (pair, _), _ in matches))


def _stem_claims(
    inputs: Iterable[Port], outputs: Mapping[str, Port], stems: Sequence[tuple[StemPair, Convention]]
) -> Iterable[_Claim | _Lonely | CacheBinding]:
    table = StemTable((stem.past, (stem, convention)) for stem, convention in stems)
    for port in inputs:
        matches = table.matches(port.name)
        if not matches:
            continue
        presents = {}
        for (pair, convention), stem in matches:
            present = pair.present.replace(STEM, stem)
            because = f"named {quoted(pair.past)}, its present {quoted(pair.present)} ({convention.name})"
            presents[present] = (Role.STATE, layer_of(stem), because)
        existing = {name: what for name, what in presents.items() if name in outputs}
        if existing:
            yield _Claim(port, existing)
        else:
            yield _Lonely(port, frozenset((pair, skeleton(stem)) for (pair, _), stem in matches))


def _bind(
    claims: Iterable[_Claim | _Lonely | CacheBinding], outputs: Mapping[str, Port]
) -> tuple[list[CacheBinding], list[_Lonely], list[Finding]]:
    """Turn claims into bindings: one present to each past, and one past to each present."""
    bindings: list[CacheBinding] = []
    lonely: list[_Lonely] = []
    findings: list[Finding] = []
    owners: dict[str, str] = {}
    for claim in claims:
        if isinstance(claim, CacheBinding):
            bindings.append(claim)
        elif isinstance(claim, _Lonely):
            lonely.append(claim)
        else:
            present, (role, layer, because) = next(iter(claim.presents.items()))
            names = tuple(claim.presents)
            if len(names) > 1:
                findings.append(
                    _ambiguous(
                        f"{quoted(claim.past.name)} could be paired with each of {listed(names)}",
                        (claim.past.name, *names),
                    )
                )
            if present in owners:
                both = (owners[present], claim.past.name)
                findings.append(
                    _ambiguous(f"{listed(both)} could both be fed from {quoted(present)}", (*both, present))
                )
            owners[present] = claim.past.name
            bindings.append(CacheBinding(claim.past, outputs[present], role, layer, because))
    return bindings, lonely, findings


def _ambiguous(what: str, ports: tuple[str, ...]) -> Finding:
    return Finding(
        "E_AMBIGUOUS_STATE_PAIRING",
        f"{what}: declare which under model.io.kv_inputs and kv_outputs, or model.io.state_pairs.",
        ports,
    )


def _lonely_presents(
    outputs: Mapping[str, Port],
    bound: Collection[str],
    pairs: Sequence[tuple[PortPair, Convention]],
    stems: Sequence[tuple[StemPair, Convention]],
) -> list[_Lonely]:
    pair_table = PatternTable((pair.present, pair) for pair, _ in pairs)
    stem_table = StemTable((stem.present, stem) for stem, _ in stems)
    found = []
    for port in outputs.values():
        if port.name in bound:
            continue
        keys: set[tuple[object, str]] = {(pair, "") for pair, _ in pair_table.matches(port.name)}
        if not keys:
            keys.update((pair, skeleton(stem)) for pair, stem in stem_table.matches(port.name))
        if keys:
            found.append(_Lonely(port, frozenset(keys)))
    return found


def _lonely_findings(
    pasts: Sequence[_Lonely],
    presents: Sequence[_Lonely],
    outputs: Mapping[str, Port],
    bound: Collection[str],
) -> list[Finding]:
    """Say what is wrong with cache ports that have no partner: their index, or that there is none."""
    past_keys = frozenset(key for one in pasts for key in one.keys)
    present_keys = frozenset(key for one in presents for key in one.keys)
    renumbered = [one.port.name for one in pasts if one.keys & present_keys]
    renumbered_presents = [one.port.name for one in presents if one.keys & past_keys]
    findings = []
    if renumbered:
        findings.append(
            Finding(
                "E_LAYER_ID_MISMATCH",
                f"Inputs {listed(renumbered)} and outputs {listed(renumbered_presents)} have the same names "
                "but for the index: pairing them in order would be a guess. Declare the pairs under "
                "model.io.kv_inputs and kv_outputs, or model.io.state_pairs.",
                (*renumbered, *renumbered_presents),
            )
        )
    alone = [one.port for one in pasts if not one.keys & present_keys]
    if alone:
        findings.append(_alone_finding(alone, presents, outputs, bound))
    orphans = [one.port.name for one in presents if not one.keys & past_keys]
    if orphans:
        findings.append(
            Finding(
                "E_PRESENT_WITHOUT_PAST",
                f"Outputs {listed(orphans)} are caches by name, and no input takes them back: decoding token "
                "by token is impossible. Export the graph with past inputs.",
                tuple(orphans),
            )
        )
    return findings


def _alone_finding(
    alone: Sequence[Port], presents: Sequence[_Lonely], outputs: Mapping[str, Port], bound: Collection[str]
) -> Finding:
    names = tuple(port.name for port in alone)
    known = {one.port.name for one in presents}
    free = [port for port in outputs.values() if port.name not in bound and port.name not in known]
    signatures = {(port.dtype, len(port.shape)) for port in alone if port.shape is not None}
    candidates = [port.name for port in free if port.shape and (port.dtype, len(port.shape)) in signatures]
    if candidates:
        return Finding(
            "E_AMBIGUOUS_STATE_PAIRING",
            f"Inputs {listed(names)} are caches by name; outputs {listed(candidates)} fit them by dtype and "
            "rank, but nothing in their names says which is whose. Declare the pairs under "
            "model.io.kv_inputs and kv_outputs, or model.io.state_pairs.",
            (*names, *candidates),
        )
    return Finding(
        "E_UNPAIRED_PAST",
        f"Inputs {listed(names)} are caches by name, and no output gives their next value. Declare their "
        "outputs under model.io.kv_outputs or model.io.state_pairs.",
        names,
    )


def check_binding(binding: CacheBinding, *, match: StateShapeMatch, batch: Dimension) -> list[Finding]:
    """Check that a pair can be fed back: dtype, rank and extents agree, and it can be initialised."""
    past, present = binding.past, binding.present
    findings = []
    if binding.role is Role.STATE:
        findings += _check_initial_state(past, batch)
    if present is None:
        return findings
    names = (past.name, present.name)
    if past.dtype is not None and present.dtype is not None and past.dtype != present.dtype:
        findings.append(
            Finding(
                "E_DTYPE_MISMATCH",
                f"{quoted(past.name)} takes {past.dtype} and {quoted(present.name)} gives {present.dtype}: a "
                "cache keeps its dtype from step to step. Export both ports with one dtype.",
                names,
            )
        )
    problem = mismatch(past.shape, present.shape)
    if problem is None and binding.role is Role.STATE and not match.accepts(past.shape, present.shape):
        problem = f"shapes not spelled alike, as --match {match.value} asks"
    if problem is None and binding.role not in CROSS_ROLES | {Role.STATE}:
        axes = growing_axes(past.shape, present.shape)
        if len(axes) > 1:
            problem = f"axes {', '.join(map(str, axes))} all differ, and a cache grows along one"
    if problem is not None:
        findings.append(
            Finding(
                "E_SHAPE_MISMATCH",
                f"{quoted(past.name)} and {quoted(present.name)}: {problem}. Both are one cache; if the "
                "declared shapes are wrong, correct them in the graph.",
                names,
            )
        )
    return findings


def _check_initial_state(past: Port, batch: Dimension) -> list[Finding]:
    if past.shape is None:
        what = "the graph does not say its shape"
    else:
        axes = dynamic_state_axes(past, batch)
        if not axes:
            return []
        what = f"axis {', '.join(map(str, axes))} of {list(past.shape)} is symbolic and not the batch"
    return [
        Finding(
            "E_STATE_DYNAMIC_DIM",
            f"State {quoted(past.name)} starts as zeros, and {what}. Export it with concrete extents, or "
            "declare what the port is under model.io.",
            (past.name,),
        )
    ]
