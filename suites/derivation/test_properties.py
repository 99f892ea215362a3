"""What must hold of every derivation: over layouts composed of real namings, and broken ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fixtures.effort import examples
from fixtures.layouts import dense_06b, hybrid_27b
from fixtures.strategies import BREAKAGES, CachePair, Layout, broken, layouts, odd_inventories, shuffled
from harness.errors import InputError
from harness.ports import Port, PortInventory
from harness.topology.resolve import resolve
from harness.topology.sidecar import io_block
from harness.topology.spec import REFUSAL_CODES, Role, Topology
from harness.topology.writing import sidecar_of

KV = (Role.KV_KEY, Role.KV_VALUE, Role.KV_FUSED, Role.KV_SCALE)
CROSS = (Role.CROSS_KV_KEY, Role.CROSS_KV_VALUE)
RELAXED = settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])


def derived(inventory: PortInventory, **options: Any) -> Topology:
    """The topology; a refusal fails the test with its reason."""
    derivation = resolve(inventory, **options)
    assert derivation.topology is not None, derivation.refusal
    return derivation.topology


def pairs(topology: Topology, *roles: Role) -> set[tuple[str, str | None]]:
    """Names of past and present of the caches with one of these roles."""
    return {
        (port.name, port.pair) for port in topology.roles if port.direction == "input" and port.role in roles
    }


@RELAXED
@given(layouts())
def test_a_layout_is_what_it_was_composed_of(layout: Layout) -> None:
    """Every cache has its own partner and role: KV is no state, cross KV is neither, nothing is added."""
    topology = derived(layout.inventory)
    assert pairs(topology, *KV) == layout.pairs(*KV)
    assert pairs(topology, Role.STATE) == layout.pairs(Role.STATE)
    assert pairs(topology, *CROSS) == layout.pairs(*CROSS)
    assert layout.token in (topology.token_input, topology.inputs_embeds_input)
    assert topology.logits_output == layout.logits
    roles = {port.name: port.role for port in topology.roles if port.direction == "input"}
    assert all(roles[cache.past.name] is cache.role for cache in layout.caches)


@RELAXED
@given(st.data())
def test_the_order_of_ports_changes_nothing_but_order(data: st.DataObject) -> None:
    """Pairing is by name: the same ports in another order have the same roles and partners."""
    layout = data.draw(layouts())
    other = data.draw(shuffled(layout))
    one, two = derived(layout.inventory), derived(other.inventory)
    assert set(one.roles) == set(two.roles)


@RELAXED
@given(st.integers(1, 5), st.integers(0, 1000), st.booleans())
def test_renumbering_layers_changes_nothing_but_numbers(layers: int, shift: int, hybrid: bool) -> None:
    """Adding to every layer index gives the same topology with those indices."""
    make = hybrid_27b if hybrid else dense_06b

    def renumbered(text: str | None) -> str | None:
        if text is None:
            return None
        return ".".join(str(int(part) + shift) if part.isdigit() else part for part in text.split("."))

    inventory = make(layers=layers)
    moved = PortInventory(
        *(
            tuple(replace(port, name=renumbered(port.name) or "") for port in side)
            for side in (inventory.inputs, inventory.outputs)
        )
    )
    expected = [
        (renumbered(port.name), port.role, renumbered(port.pair)) for port in derived(inventory).roles
    ]
    assert [(port.name, port.role, port.pair) for port in derived(moved).roles] == expected


@RELAXED
@given(layouts())
def test_exact_acceptance_implies_symbolic_acceptance(layout: Layout) -> None:
    """The relaxation accepts more and selects nothing else."""
    exact = resolve(layout.inventory, match="exact").topology
    if exact is not None:
        assert io_block(derived(layout.inventory, match="symbolic")) == io_block(exact)


def fed_back(layout: Layout, data: st.DataObject) -> CachePair:
    """A self-attention or state pair of the layout, which is fed back at each step."""
    caches = [cache for cache in layout.caches if cache.present is not None and cache.role not in CROSS]
    assume(caches)
    return data.draw(st.sampled_from(caches))


@pytest.mark.parametrize("name", BREAKAGES)
@RELAXED
@given(st.data())
def test_a_broken_pair_is_refused_with_the_code_that_names_it(name: str, data: st.DataObject) -> None:
    """Dropped, doubled, retyped, reshaped or nameless: one port of one pair is enough to refuse the graph."""
    layout = data.draw(layouts(min_layers=2))
    cache = fed_back(layout, data)
    assert cache.present is not None
    symbolic_present = isinstance((cache.present.shape or (1,))[-1], str)
    assume(not (name == "present wider" and symbolic_present))
    refusal = resolve(broken(layout, cache, BREAKAGES[name])).refusal
    assert refusal is not None
    codes = {refusal.code, *refusal.also}
    unnamed = {"E_AMBIGUOUS_STATE_PAIRING", "E_UNKNOWN_INPUT"} if name == "present dropped" else set()
    assert codes & ({BREAKAGES[name].code} | unnamed), refusal
    if name != "past of no name":
        assert {cache.past.name, cache.present.name} & set(refusal.ports)


@RELAXED
@given(layouts(), st.text("abcxyz_", min_size=3, max_size=12))
def test_an_unknown_input_is_refused(layout: Layout, name: str) -> None:
    """One more float input that nobody knows, and the graph is not derived any more."""
    extra = Port(f"unheard_of_{name}", "float32", ("batch", 5, 5))
    inventory = PortInventory((*layout.inventory.inputs, extra), layout.inventory.outputs)
    refusal = resolve(inventory).refusal
    assert refusal is not None
    assert "E_UNKNOWN_INPUT" in {refusal.code, *refusal.also}
    assert extra.name in refusal.ports


@RELAXED
@given(layouts())
def test_a_state_with_an_unknown_extent_is_refused(layout: Layout) -> None:
    """Zeros of an unknown shape cannot be made: a symbol beside the batch is one too many."""
    states = [cache for cache in layout.caches if cache.role is Role.STATE]
    assume(states)
    shape = states[0].past.shape or ()
    dynamic = replace(states[0].past, shape=(*shape[:-1], "channels"))
    inputs = tuple(dynamic if port == states[0].past else port for port in layout.inventory.inputs)
    refusal = resolve(PortInventory(inputs, layout.inventory.outputs)).refusal
    assert refusal is not None
    assert "E_STATE_DYNAMIC_DIM" in {refusal.code, *refusal.also}
    assert dynamic.name in refusal.ports


@pytest.mark.parametrize("form", ["inference-metadata", "genai-config"])
@RELAXED
@given(layouts())
def test_deriving_from_what_was_written_gives_the_topology_back(form: Any, layout: Layout) -> None:
    """A sidecar that is written reads back as the same topology; what it cannot say, is not written."""
    topology = derived(layout.inventory)
    try:
        written = sidecar_of(layout.inventory, topology, form)
    except InputError:
        return
    if form == "genai-config":
        again = derived(layout.inventory, genai_config=written)
    else:
        again = derived(layout.inventory, declared=written["model"]["io"])
    assert io_block(again) == io_block(topology)


@settings(deadline=None, max_examples=examples(250))
@given(
    odd_inventories(), st.sampled_from(["default", "recurrent-only"]), st.sampled_from(["exact", "symbolic"])
)
def test_derivation_is_total(inventory: PortInventory, gate: Any, match: Any) -> None:
    """Any ports at all give a topology that places each of them, or a refusal with a known code."""
    derivation = resolve(inventory, gate=gate, match=match)
    if derivation.topology is None:
        assert derivation.refusal is not None
        assert {derivation.refusal.code, *derivation.refusal.also} <= set(REFUSAL_CODES)
        assert derivation.refusal.message
        assert "\n" not in derivation.refusal.message
    else:
        assert len(derivation.topology.roles) == len(inventory.inputs) + len(inventory.outputs)


@RELAXED
@given(odd_inventories())
def test_the_leading_code_has_precedence(inventory: PortInventory) -> None:
    """Of several codes the first in the order of precedence leads, and none is given twice."""
    refusal = resolve(inventory).refusal
    if refusal is not None:
        ranks = [REFUSAL_CODES.index(code) for code in (refusal.code, *refusal.also)]
        assert ranks == sorted(set(ranks))


def steps(inventory: PortInventory) -> int:
    """Function calls that a derivation takes: a cost that does not depend on the machine."""
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.runcall(resolve, inventory)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [dense_06b, hybrid_27b], ids=lambda make: make.__name__)
def test_the_cost_of_a_derivation_grows_linearly(make: Any) -> None:
    """Ten times the layers take at most ten times the calls, and a little."""
    assert steps(make(layers=1000)) <= 11 * steps(make(layers=100))


def test_fifty_thousand_odd_ports_are_refused_in_linear_cost() -> None:
    """Unknown inputs in any number are named, at a cost in proportion: 25,000 inputs and as many outputs."""

    def flood(count: int) -> PortInventory:
        ports = dense_06b(layers=1)
        extra = tuple(Port(f"unheard_of.{i}", "float32", ("batch", 3)) for i in range(count))
        return PortInventory((*ports.inputs, *extra), (*ports.outputs, *extra))

    refusal = resolve(flood(25_000)).refusal
    assert refusal is not None
    assert len(refusal.ports) == 25_000
    assert steps(flood(2_000)) <= 11 * steps(flood(200))


def alike(prefix: str, i: int, suffix: str = "") -> str:
    """One of many names that separators alone tell apart: all have the same words."""
    return prefix + f"{i:b}".translate({ord("0"): "_", ord("1"): "."}) + suffix


@pytest.mark.parametrize("pasts", [("h",), ("h.in",), ("h", "h.in", "h.prev", "h.old")], ids=" ".join)
@pytest.mark.parametrize("presents", [("h.out",), ("h.out", "h.next", "h.new", "h")], ids=" ".join)
@pytest.mark.parametrize("others", [1, None])
def test_any_number_of_names_with_the_same_words_are_refused_in_linear_cost(
    pasts: tuple[str, ...], presents: tuple[str, ...], others: int | None
) -> None:
    """Each could be the past of each: the refusal names all once, and its message a few."""

    def flood(count: int) -> PortInventory:
        ports = dense_06b(layers=1)
        inputs = [Port(alike(f"{one}/", i), "float32", ("batch", 4)) for one in pasts for i in range(count)]
        outputs = [
            Port(alike(f"{one}:", i), "float32", ("batch", 4))
            for one in presents
            for i in range(others or count)
        ]
        return PortInventory((*ports.inputs, *inputs), (*ports.outputs, *outputs))

    refusal = resolve(flood(1_000)).refusal
    assert refusal is not None
    assert "E_AMBIGUOUS_STATE_PAIRING" in {refusal.code, *refusal.also}
    assert len(refusal.message) < 600
    assert len(set(refusal.ports)) == len(refusal.ports)
    assert steps(flood(1_000)) <= 11 * steps(flood(100))
