"""The caches of a decoder: which past port belongs to which present port, and what the pair is.

First the full patterns of the conventions are matched, then states are found by the suffix rule: what
follows the common prefix of the past patterns must stand again behind the common prefix of the present
patterns; then names that differ in one word. Selection looks at names only; shapes and dtypes accept or
reject what was selected (`harness.topology.acceptance`), and never select.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.ports import Dimension, Port, PortInventory
from harness.topology.acceptance import CROSS_ROLES, CacheBinding, check_binding
from harness.topology.conventions import INDEX, STEM, Convention, Discipline, WordSwap
from harness.topology.dataflow import CacheFlow
from harness.topology.findings import Finding, listed, quoted
from harness.topology.patterns import PatternTable, StemTable, layer_of, skeleton
from harness.topology.shapes import StateShapeMatch
from harness.topology.spec import Role
from harness.topology.swaps import SwapTable, cache_role, says_activation, says_attention, tokens, without
from harness.topology.witness import confirm, settle

__all__ = ["CachePorts", "derive_cache", "exclude_bound"]

_NO_CACHE_WORDS = frozenset({"logits", "token", "tokens", "id", "ids"})


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
    keys: frozenset[object]


@dataclass(frozen=True, slots=True)
class _Reading:
    """What an input is if it is paired with a certain output."""

    role: Role
    layer: int | None
    discipline: Discipline
    because: str
    swap: WordSwap | None = None


class _Book:
    """Bindings while they are made: one present to each past, and one past to each present."""

    def __init__(self, outputs: Mapping[str, Port]) -> None:
        self._outputs = outputs
        self.bindings: list[CacheBinding] = []
        self.findings: list[Finding] = []
        self.owners: dict[str, str] = {}
        self.swaps: set[WordSwap] = set()
        self.disputed: dict[str, Collection[str]] = {}

    def bind(self, past: Port, readings: Mapping[str, _Reading]) -> None:
        """Bind `past` to the output in `readings`.

        Several of them are a dispute, and nothing is bound. An output that is another's present already
        is a finding.
        """
        if len(readings) > 1:
            self.disputed[past.name] = tuple(readings)
            return
        ((present, reading),) = readings.items()
        if present in self.owners:
            both = (self.owners[present], past.name)
            self.findings.append(
                _ambiguous(f"{listed(both)} could both be fed from {quoted(present)}", (*both, present))
            )
        self.owners[present] = past.name
        if reading.swap is not None:
            self.swaps.add(reading.swap)
        self.bindings.append(
            CacheBinding(
                past, self._outputs[present], reading.role, reading.layer, reading.because, reading.discipline
            )
        )


def derive_cache(
    inventory: PortInventory,
    conventions: Sequence[Convention],
    *,
    match: StateShapeMatch,
    placed: Collection[str] = frozenset(),
    batch: Dimension = None,
    sequence: Dimension = None,
    flow: CacheFlow | None = None,
) -> CachePorts:
    """Find the caches of a graph by the names in `conventions`, and by its dataflow where that is given.

    Args:
        inventory: its ports; names are unique among inputs, and among outputs.
        conventions: what names to look for.
        match: when the shapes of a state's two ports agree.
        placed: names of ports that are known to be something else.
        batch: leading symbol of the token port, see `shapes.dynamic_state_axes`.
        sequence: trailing symbol of the token port, see `shapes.cannot_grow`.
        flow: the second witness.
    """
    inputs = [port for port in inventory.inputs if port.name not in placed]
    outputs = {port.name: port for port in inventory.outputs if port.name not in placed}
    names = _Names(conventions)
    book = _Book(outputs)
    _bind_pairs(book, inputs, outputs, names)
    _bind_stems(book, exclude_bound(inputs, book.bindings), outputs, names)
    _bind_swaps(book, exclude_bound(inputs, book.bindings), outputs, names)
    if flow is not None:
        _ask_dataflow(book, inputs, outputs, names, flow)
    still_open = exclude_bound(inputs, book.bindings)
    disputes = {port.name: book.disputed[port.name] for port in still_open if port.name in book.disputed}
    grouped = _by_presents(disputes)
    claimed = {*book.owners, *(name for _, presents in grouped for name in presents)}
    free = [port for port in outputs.values() if port.name not in claimed]
    pasts = [names.lonely_past(port, book.swaps) for port in still_open if port.name not in disputes]
    presents = [names.lonely_present(port, book.swaps) for port in free]
    lonely_pasts = [one for one in pasts if one is not None]
    lonely_presents = [one for one in presents if one is not None]
    findings = [
        *book.findings,
        *(_disputed(pasts, presents) for pasts, presents in grouped),
        *_lonely_findings(lonely_pasts, lonely_presents, free),
    ]
    for binding in book.bindings:
        findings += check_binding(binding, match=match, batch=batch, sequence=sequence)
    order = {port.name: rank for rank, port in enumerate(inventory.inputs)}
    return CachePorts(
        bindings=tuple(sorted(book.bindings, key=lambda binding: order[binding.past.name])),
        findings=tuple(findings),
        unbound=frozenset({*disputes, *(one.port.name for one in (*lonely_pasts, *lonely_presents))}),
    )


def exclude_bound(inputs: Sequence[Port], bindings: Iterable[CacheBinding]) -> list[Port]:
    """The inputs that a weaker rule may look at: none that a stronger one has already bound.

    Without this step every KV port would be a state as well, since its suffix is also behind both
    prefixes, and growing KV would be replaced by zeros of the wrong length.
    """
    bound = {binding.past.name for binding in bindings}
    return [port for port in inputs if port.name not in bound]


class _Names:
    """All patterns of some conventions, ready for matching."""

    def __init__(self, conventions: Sequence[Convention]) -> None:
        pairs = [(pair, convention) for convention in conventions for pair in convention.pairs]
        stems = [(stem, convention) for convention in conventions for stem in convention.stems]
        self.swaps = [(swap, convention) for convention in conventions for swap in convention.swaps]
        self.pasts = PatternTable((pair.past, (pair, convention)) for pair, convention in pairs)
        self.presents = PatternTable((pair.present, pair) for pair, _ in pairs)
        self.past_stems = StemTable((stem.past, (stem, convention)) for stem, convention in stems)
        self.present_stems = StemTable((stem.present, stem) for stem, _ in stems)

    def role_by_name(self, port: Port) -> Role | None:
        """What the name alone says that an input is, be there a present for it or not."""
        for (pair, _), _ in self.pasts.matches(port.name):
            return pair.role
        for _, stem in self.past_stems.matches(port.name):
            return cache_role(tokens(stem))
        return None

    def lonely_past(self, port: Port, active: Collection[WordSwap]) -> _Lonely | None:
        """`port` if its name is a past name; `active` are swaps that this graph is known to use."""
        keys: set[object] = {pair for (pair, _), _ in self.pasts.matches(port.name)}
        keys.update((pair, skeleton(stem)) for (pair, _), stem in self.past_stems.matches(port.name))
        said = tokens(port.name)
        keys.update(swap for swap in active if swap.past and without(said, swap.past))
        return _Lonely(port, frozenset(keys)) if keys else None

    def lonely_present(self, port: Port, active: Collection[WordSwap]) -> _Lonely | None:
        """`port` if its name is a present name; `active` are swaps that this graph is known to use."""
        keys: set[object] = {pair for pair, _ in self.presents.matches(port.name)}
        keys.update((pair, skeleton(stem)) for pair, stem in self.present_stems.matches(port.name))
        said = tokens(port.name)
        if not _NO_CACHE_WORDS.intersection(said):
            keys.update(swap for swap in active if swap.present and without(said, swap.present))
        return _Lonely(port, frozenset(keys)) if keys else None


def _bind_pairs(book: _Book, inputs: Iterable[Port], outputs: Mapping[str, Port], names: _Names) -> None:
    for port in inputs:
        readings: dict[str, _Reading] = {}
        matches = names.pasts.matches(port.name)
        for (pair, convention), index in matches:
            present = pair.present.replace(INDEX, index)
            if present in outputs:
                because = f"named {quoted(pair.past)}, its present {quoted(pair.present)} ({convention.name})"
                readings.setdefault(present, _Reading(pair.role, layer_of(index), pair.discipline, because))
        if readings:
            book.bind(port, readings)
        elif matches and matches[0][0][0].role in CROSS_ROLES:
            (pair, convention), index = matches[0]
            because = (
                f"named {quoted(pair.past)} ({convention.name}); no output gives it back: it is only read"
            )
            book.bindings.append(CacheBinding(port, None, pair.role, layer_of(index), because))


def _bind_stems(book: _Book, inputs: Iterable[Port], outputs: Mapping[str, Port], names: _Names) -> None:
    for port in inputs:
        if port.name in book.disputed:
            continue
        readings: dict[str, _Reading] = {}
        for (pair, convention), stem in names.past_stems.matches(port.name):
            present = pair.present.replace(STEM, stem)
            if present in outputs:
                because = f"named {quoted(pair.past)}, its present {quoted(pair.present)} ({convention.name})"
                # Named like keys or values, yet under no pattern for them: only growth would tell.
                discipline = Discipline.GROWING if says_attention(port.name, stem) else Discipline.ANY
                readings.setdefault(present, _Reading(Role.STATE, layer_of(stem), discipline, because))
        if readings:
            book.bind(port, readings)


def _bind_swaps(book: _Book, inputs: Iterable[Port], outputs: Mapping[str, Port], names: _Names) -> None:
    if not names.swaps:
        return
    table = SwapTable(names.swaps, (name for name in outputs if name not in book.owners))
    for port in inputs:
        if port.name in book.disputed:
            continue
        candidates = table.candidates(port.name)
        if len(candidates) > 1:
            book.disputed[port.name] = candidates  # shared by all names like this one, however many there are
            continue
        for present, (swap, convention, rest) in candidates.items():
            role = cache_role(rest)
            because = f"named like its present {quoted(present)} but for one word ({convention.name})"
            sure = role is Role.STATE and not says_activation(port.name)
            discipline = Discipline.ANY if sure else Discipline.GROWING
            reading = _Reading(role, layer_of(port.name), discipline, because, swap)
            book.bind(port, {present: reading})


def _ask_dataflow(
    book: _Book, inputs: Sequence[Port], outputs: Mapping[str, Port], names: _Names, flow: CacheFlow
) -> None:
    """Let the second witness speak: on what is bound, and on what is still open."""
    book.bindings, findings = confirm(flow, book.bindings, {*book.owners, *map(str, outputs)})
    free = {name: port for name, port in outputs.items() if name not in book.owners}
    still_open = exclude_bound(inputs, book.bindings)
    settled, more = settle(flow, still_open, free, book.owners, names.role_by_name)
    book.findings += [*findings, *more]
    for binding in settled:
        book.bindings.append(binding)
        if binding.present is not None:
            book.owners[binding.present.name] = binding.past.name


def _by_presents(disputes: Mapping[str, Collection[str]]) -> list[tuple[list[str], Collection[str]]]:
    """Disputes over the very same presents together: each of these lists is gone through once."""
    grouped: dict[int, tuple[list[str], Collection[str]]] = {}
    for past, presents in disputes.items():
        grouped.setdefault(id(presents), ([], presents))[0].append(past)
    return list(grouped.values())


def _disputed(pasts: Sequence[str], presents: Collection[str]) -> Finding:
    could = "could be" if len(pasts) == 1 else "could each be"
    what = f"{listed(pasts)} {could} paired with each of {listed(presents)}"
    return _ambiguous(what, (*pasts, *presents))


def _ambiguous(what: str, ports: tuple[str, ...]) -> Finding:
    return Finding(
        "E_AMBIGUOUS_STATE_PAIRING",
        f"{what}: declare which under model.io.kv_inputs and kv_outputs, or model.io.state_pairs.",
        ports,
    )


def _lonely_findings(
    pasts: Sequence[_Lonely],
    presents: Sequence[_Lonely],
    unbound: Sequence[Port],
) -> list[Finding]:
    """Say what is wrong with cache ports that have no partner: their index, or that there is none."""
    renumbered, alone = _parted(pasts, presents)
    renumbered_presents, orphans = _parted(presents, pasts)
    findings = []
    if renumbered:
        inputs, outputs = ([port.name for port in ports] for ports in (renumbered, renumbered_presents))
        findings.append(
            Finding(
                "E_LAYER_ID_MISMATCH",
                f"Inputs {listed(inputs)} and outputs {listed(outputs)} have the same names "
                "but for the index: pairing them in order would be a guess. Declare the pairs under "
                "model.io.kv_inputs and kv_outputs, or model.io.state_pairs.",
                (*inputs, *outputs),
            )
        )
    if alone:
        findings.append(_alone_finding(alone, presents, unbound))
    if orphans:
        names = tuple(port.name for port in orphans)
        findings.append(
            Finding(
                "E_PRESENT_WITHOUT_PAST",
                f"Outputs {listed(names)} are caches by name, and no input takes them back: decoding token "
                "by token is impossible. Export the graph with past inputs.",
                names,
            )
        )
    return findings


def _parted(lonely: Sequence[_Lonely], others: Sequence[_Lonely]) -> tuple[list[Port], list[Port]]:
    """Those of `lonely` that could be meant for one of `others`, and those that could not."""
    keys = frozenset(key for one in others for key in one.keys)
    renumbered = [one.port for one in lonely if not keys.isdisjoint(one.keys)]
    return renumbered, [one.port for one in lonely if keys.isdisjoint(one.keys)]


def _alone_finding(alone: Sequence[Port], presents: Sequence[_Lonely], unbound: Sequence[Port]) -> Finding:
    names = tuple(port.name for port in alone)
    known = {one.port.name for one in presents}
    free = [port for port in unbound if port.name not in known]
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
