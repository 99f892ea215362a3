"""Dataflow as a second witness: it confirms what names say, settles what they cannot, or contradicts them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from harness.ports import Port
from harness.topology.acceptance import SELF_KV_ROLES, CacheBinding
from harness.topology.conventions import Discipline
from harness.topology.dataflow import CacheFlow, Reached
from harness.topology.findings import Finding, listed, quoted
from harness.topology.patterns import layer_of
from harness.topology.spec import Role

__all__ = ["confirm", "settle"]

_HALVES = frozenset({Role.KV_KEY, Role.KV_VALUE})
_SAID = {False: "By name", True: "As declared,"}
_ADVICE = {
    False: "declare which is right under model.io.",
    True: "what is declared is kept; correct it where it is wrong.",
}
"""What pairs go by, and what to do where the graph contradicts it: made by name (False), or declared."""


def settle(
    flow: CacheFlow,
    inputs: Sequence[Port],
    free: Mapping[str, Port],
    taken: Collection[str],
    role_by_name: Callable[[Port], Role | None],
) -> tuple[list[CacheBinding], list[Finding]]:
    """Bind inputs that names leave open to the only free output that each of them reaches as a cache.

    An output that two of them reach settles nothing, nor does an input that goes without arithmetic into
    another's present. What the cache is, its name says, or else the
    operator that updates it; where neither does, the input stays open. Where both do and differ, that
    is a contradiction, which is returned beside the bindings.

    Args:
        flow: of the graph.
        inputs: those without a role.
        free: outputs without a partner, by name.
        taken: names of the outputs that are another's present.
        role_by_name: what the name of an input says that it is, None for nothing.
    """
    reached = {port.name: _closest(_presents(flow, port, free, taken)) for port in inputs}
    claims: dict[str, int] = {}
    for found in reached.values():
        for one in found:
            claims[one.output] = claims.get(one.output, 0) + 1
    bindings = []
    findings = []
    for port in inputs:
        found = reached[port.name]
        if len(found) != 1 or found[0].output in taken or claims[found[0].output] != 1:
            continue
        role = role_by_name(port) or found[0].role
        if role is not None:
            present = free[found[0].output]
            because = f"the graph feeds it to {quoted(present.name)} through {found[0].through}"
            sure = Discipline.ANY if found[0].role is not None else Discipline.GROWING
            discipline = Discipline.ANY if role is Role.STATE else sure
            binding = CacheBinding(port, present, role, layer_of(port.name), because, discipline)
            bindings.append(binding)
            findings += _contradictions(binding, present, found[0], declared=False)
    return bindings, findings


def _presents(flow: CacheFlow, port: Port, free: Collection[str], taken: Collection[str]) -> list[Reached]:
    """Outputs that an open input may belong to, and those of others that it goes into as a whole."""
    return [
        one for one in flow.reached(port.name) if one.output in free or (one.whole and one.output in taken)
    ]


def confirm(
    flow: CacheFlow, bindings: Iterable[CacheBinding], outputs: Collection[str], *, declared: bool = False
) -> tuple[list[CacheBinding], list[Finding]]:
    """Hold bindings made by name, or declared, against the dataflow.

    Returns them with its evidence, and the contradictions.

    A past port that reaches its present port, and no other output as closely, is confirmed. One that
    reaches other caches only, without arithmetic on the way, contradicts its name; so does one that
    reaches another's present without arithmetic and its own with it, or whose operator says that it is
    something else. One that reaches several alike, or none, says nothing: caches may be stacked and split
    again, and a state may be computed anew from the last tokens.
    """
    bindings = list(bindings)
    presents = {binding.present.name for binding in bindings if binding.present is not None}
    confirmed = []
    findings = []
    for binding in bindings:
        if binding.present is None:
            confirmed.append(binding)
            continue
        reached = [one for one in flow.reached(binding.past.name) if one.output in outputs]
        own = next((one for one in reached if one.output == binding.present.name), None)
        elsewhere = tuple(
            one.output
            for one in reached
            if one.whole and (own is None or (not own.whole and one.output in presents))
        )
        if elsewhere:
            findings.append(_crossed(binding, binding.present, elsewhere, declared=declared))
        if own is None:
            confirmed.append(binding)
            continue
        findings += _contradictions(binding, binding.present, own, declared=declared)
        confirmed.append(replace(binding, because=f"{binding.because}; {_evidence(own, _closest(reached))}"))
    return confirmed, findings


def _closest(reached: Collection[Reached]) -> list[Reached]:
    """Those that are reached without arithmetic, or else all of them, with it."""
    return [one for one in reached if one.whole] or list(reached)


def _evidence(own: Reached, closest: Sequence[Reached]) -> str:
    """What the dataflow adds to a name, given what its past reaches most closely."""
    if [own] == closest:
        return f"confirmed by dataflow through {own.through}"
    every = dict.fromkeys((own.output, *(one.output for one in closest)))
    return f"dataflow confirms nothing: the graph feeds it to {listed(every)}"


def _contradictions(
    binding: CacheBinding, present: Port, reached: Reached, *, declared: bool
) -> list[Finding]:
    """Refuse a cache that the operator on its way takes as something else than what it is said to be."""
    found = reached.role
    if found is None or not _contradicts(binding.role, found):
        return []
    return [
        Finding(
            "E_EVIDENCE_CONFLICT",
            f"{_SAID[declared]} {quoted(binding.past.name)} is {binding.role.value}, {reached.through} takes "
            f"it as {found.value}: {_ADVICE[declared]}",
            (binding.past.name, present.name),
        )
    ]


def _contradicts(named: Role, found: Role) -> bool:
    if named in _HALVES and found in _HALVES:
        return named is not found
    return (named is Role.STATE) is not (found is Role.STATE) and named in {*SELF_KV_ROLES, Role.STATE}


def _crossed(binding: CacheBinding, present: Port, reached: tuple[str, ...], *, declared: bool) -> Finding:
    return Finding(
        "E_EVIDENCE_CONFLICT",
        f"{_SAID[declared]} {quoted(binding.past.name)} goes with {quoted(present.name)}, but the graph "
        f"feeds it to {listed(reached)}. {_ADVICE[declared].capitalize()}",
        (binding.past.name, present.name, *reached),
    )
