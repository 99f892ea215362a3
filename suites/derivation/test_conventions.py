"""Each naming family, alone: its pairs get their roles, and its entry says where it comes from."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fixtures.layouts import interface
from harness.ports import Port, PortInventory
from harness.topology import dataflow, exporters
from harness.topology import interface as interface_rules
from harness.topology.conventions import (
    Convention,
    Discipline,
    IndexedPatterns,
    PortPair,
    StemPair,
    WordSwap,
)
from harness.topology.exporters import CONVENTIONS
from harness.topology.resolve import resolve
from harness.topology.spec import Role, Topology

PAIRS = [
    pytest.param(pair, id=f"{pair.past} {pair.present}")
    for convention in CONVENTIONS
    for pair in convention.pairs
]
STEMS = [
    pytest.param(stem, id=f"{stem.past} {stem.present}")
    for convention in CONVENTIONS
    for stem in convention.stems
]
SWAPS = [
    pytest.param(swap, id=f"{swap.past or '-'} {swap.present or '-'}")
    for convention in CONVENTIONS
    for swap in convention.swaps
]
GROWING = ("batch", 2, "past_sequence_len", 16)
GROWN = ("batch", 2, "past_sequence_len + sequence_len", 16)
BUFFER = ("batch", 128, 32)
STATE = ("batch", 64, 3)
SCATTER_CONTROLS = (Port("write_indices", "int64", ("batch",)), Port("nonpad_kv_seqlen", "int64", ("batch",)))


def derived(pasts: list[Port], presents: list[Port], *extra: Port) -> Topology:
    """The topology of a decoder with these caches."""
    ports = interface(vocab=1000)
    inventory = PortInventory((*ports.inputs, *pasts, *extra), (*ports.outputs, *presents))
    topology = resolve(inventory).topology
    assert topology is not None, resolve(inventory).refusal
    return topology


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda convention: convention.name)
def test_an_entry_names_its_source(convention: Convention) -> None:
    """An entry is a fact about an exporter, so it says about which; and it pairs something."""
    assert convention.source
    assert convention.pairs or convention.stems or convention.swaps


def test_entries_do_not_repeat_or_contradict_each_other() -> None:
    """One past pattern with one present pattern has one role, wherever it stands."""
    roles: dict[tuple[str, str], Role] = {}
    for convention in CONVENTIONS:
        for pair in convention.pairs:
            assert roles.setdefault((pair.past, pair.present), pair.role) is pair.role


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_of_patterns_is_what_its_entry_says(pair: PortPair) -> None:
    """Two layers of the pair, with a gap in their numbering, get its role, each with its own present."""
    before, after = (BUFFER, BUFFER) if pair.discipline is Discipline.SCATTER else (GROWING, GROWN)
    if pair.role in (Role.CROSS_KV_KEY, Role.CROSS_KV_VALUE):
        before = after = ("batch", 2, "encoder_sequence_len", 16)
    layers = ("2", "11") if "%d" in pair.past else ("",)
    pasts = [Port(pair.past.replace("%d", layer), "float32", before) for layer in layers]
    presents = [Port(pair.present.replace("%d", layer), "float32", after) for layer in layers]
    controls = SCATTER_CONTROLS if pair.discipline is Discipline.SCATTER else ()
    roles = {port.name: port for port in derived(pasts, presents, *controls).roles}
    for past, present, layer in zip(pasts, presents, layers, strict=True):
        assert (roles[past.name].role, roles[past.name].pair) == (pair.role, present.name)
        assert (roles[present.name].role, roles[present.name].pair) == (pair.role, past.name)
        assert roles[past.name].layer == (int(layer) if layer else None)
        assert roles[past.name].because


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("kind", ["conv_state", "recurrent_state", "made_up"])
def test_what_else_follows_the_prefix_is_state(stem: StemPair, kind: str) -> None:
    """Whatever a state is called, the stem pairs it, and it is fed back whole."""
    names = [f"{layer}.{kind}" for layer in (0, 3)]
    pasts = [Port(stem.past.replace("*", name), "float32", STATE) for name in names]
    presents = [Port(stem.present.replace("*", name), "float32", STATE) for name in names]
    pairs = derived(pasts, presents).state_pairs
    assert [(pair.input, pair.output) for pair in pairs] == [
        (past.name, present.name) for past, present in zip(pasts, presents, strict=True)
    ]


@pytest.mark.parametrize("swap", SWAPS)
def test_a_swapped_word_pairs_states_and_growing_caches(swap: WordSwap) -> None:
    """The words in common say what it is: a shift is state, `k` and `v` that grow are keys and values."""

    def port(word: str, rest: str, shape: tuple[int | str, ...]) -> Port:
        return Port("_".join(part for part in (word, rest) if part), "float32", shape)

    kinds = {
        "shift_0": (STATE, STATE, Role.STATE),
        "k_cache_1": (GROWING, GROWN, Role.KV_KEY),
        "v_cache_1": (GROWING, GROWN, Role.KV_VALUE),
    }
    pasts = [port(swap.past, kind, before) for kind, (before, _, _) in kinds.items()]
    presents = [port(swap.present, kind, after) for kind, (_, after, _) in kinds.items()]
    roles = {one.name: one for one in derived(pasts, presents).roles}
    for past, present, (_, _, role) in zip(pasts, presents, kinds.values(), strict=True):
        assert (roles[past.name].role, roles[past.name].pair) == (role, present.name)


@pytest.mark.parametrize("swap", SWAPS)
def test_a_fixed_buffer_under_a_swapped_name_is_refused(swap: WordSwap) -> None:
    """Keys of fixed shape under a name that says little could be a buffer or a state: nobody guesses."""
    past = Port("_".join(part for part in (swap.past, "key_0") if part), "float32", BUFFER)
    present = Port("_".join(part for part in (swap.present, "key_0") if part), "float32", BUFFER)
    ports = interface(vocab=1000)
    derivation = resolve(PortInventory((*ports.inputs, past), (*ports.outputs, present)))
    assert derivation.refusal is not None
    assert derivation.refusal.code == "E_AMBIGUOUS_STATE_PAIRING"
    assert set(derivation.refusal.ports) == {past.name, present.name}


def test_the_documentation_has_a_row_for_each_family() -> None:
    """Every entry stands in the table, and the table has no family that is not an entry."""
    text = (Path(__file__).parents[2] / "docs" / "naming-families.md").read_text(encoding="utf-8")
    table = text.partition("| family |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert rows == [convention.name for convention in CONVENTIONS]


def plain(value: Any) -> Any:
    """A table as plain values: dataclasses of a module that is executed again are other classes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("module", "table"),
    [(exporters, "CONVENTIONS"), (dataflow, "CACHE_SLOTS"), (interface_rules, "_RULES")],
    ids=["conventions", "slots", "names"],
)
def test_a_table_is_the_same_whenever_it_is_made(module: ModuleType, table: str) -> None:
    """Tables are data: executing their module again, at any later time, gives an equal one."""
    assert module.__file__ is not None
    again = runpy.run_path(module.__file__, run_name=module.__name__)[table]
    assert plain(again) == plain(getattr(module, table))


@pytest.mark.parametrize(
    ("keys", "values", "stems"),
    [
        (("past.%d.key", "present.%d.key"), ("past.%d.value", "present.%d.value"), ("past.*", "present.*")),
        (("past_key_%d", "present_key_%d"), ("past_value_%d", "present_value_%d"), ("past_*", "present_*")),
        (("key_%d", "present_key_%d"), ("value_%d", "present_value_%d"), None),
        (("past_key_%d", "key_%d"), ("past_value_%d", "value_%d"), None),
        (("a%d", "b%d"), ("abc%d", "bcd%d"), ("a*", "b*")),
        (("%d", "p%d"), ("%d_", "p%d_"), None),
        (("x%d%d", "y%d"), ("x%d", "y%d"), ("x*", "y*")),
    ],
)
def test_configured_patterns_leave_states_to_their_common_prefix(
    keys: tuple[str, str], values: tuple[str, str], stems: tuple[str, str] | None
) -> None:
    """Up to the layer index; without a common prefix on both sides nothing tells a state."""
    patterns = IndexedPatterns(keys[0], values[0], keys[1], values[1])
    found = patterns.convention(name="n", source="s")
    assert (found.name, found.source) == ("n", "s")
    assert found.stems == (() if stems is None else (StemPair(*stems),))
    assert found.pairs == (PortPair(*keys, Role.KV_KEY), PortPair(*values, Role.KV_VALUE))


def test_a_cross_pattern_without_its_present_gets_the_one_of_its_prefix() -> None:
    """Configurations name the past alone, where the encoder gives the present."""
    patterns = IndexedPatterns(
        cross_past_key="past_key_values.%d.encoder.key", cross_past_value="cv%d", cross_present_value="cw%d"
    )
    assert patterns.convention(name="n", source="s").pairs[2:] == (
        PortPair("past_key_values.%d.encoder.key", "present.%d.encoder.key", Role.CROSS_KV_KEY),
        PortPair("cv%d", "cw%d", Role.CROSS_KV_VALUE),
    )
