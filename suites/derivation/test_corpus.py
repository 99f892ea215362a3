"""Port layouts of real exporters and of public bug reports: derived as their exporters mean them, or refused.

Nothing derived may be wrong. Where the ports leave room, a refusal by name is as good; which layouts are
refused, and with which code, is a committed expectation, so that neither a loss nor a gain goes unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fixtures.layouts import WHISPER_GENAI_CONFIG
from fixtures.recorded import RecordedLayout, Truth, recorded_layouts, recorded_reports
from harness.topology import resolve as resolve_module
from harness.topology.resolve import resolve
from harness.topology.sidecar import io_block
from harness.topology.spec import Derivation, Role, Topology

LAYOUTS = recorded_layouts()
REPORTS = recorded_reports()
EVERY = LAYOUTS + REPORTS
EXPECTED_FOLDER = Path(__file__).parent / "expected"
SELF_KV = (Role.KV_KEY, Role.KV_VALUE, Role.KV_FUSED)
CROSS_KV = (Role.CROSS_KV_KEY, Role.CROSS_KV_VALUE)


def four(past: str, present: str, **cross: str) -> Mapping[str, Any]:
    """A `genai_config.json` with nothing but templates; `{}` stands for key or value."""
    inputs = {f"past_{kind}_names": past.format(kind) for kind in ("key", "value")}
    outputs = {f"present_{kind}_names": present.format(kind) for kind in ("key", "value")}
    return {"model": {"decoder": {"inputs": {**inputs, **cross}, "outputs": outputs}}}


DOTTED = four("past_key_values.%d.{}", "present.%d.{}")
UNDERSCORED = four(
    "past_{}_self_%d",
    "present_{}_self_%d",
    cross_past_key_names="past_key_cross_%d",
    cross_past_value_names="past_value_cross_%d",
)


def strict_config(layout: RecordedLayout) -> Mapping[str, Any]:
    """The templates that an exporter of this layout would configure; the dotted ones where it is neither."""
    names = {port.name for port in (*layout.inventory.inputs, *layout.inventory.outputs)}
    if any(name.endswith(".0.decoder.key") for name in names):
        decoder = WHISPER_GENAI_CONFIG["model"]["decoder"]
        inputs = {key: value for key, value in decoder["inputs"].items() if key != "input_ids"}
        outputs = {key: value for key, value in decoder["outputs"].items() if key != "logits"}
        return {"model": {"decoder": {"inputs": inputs, "outputs": outputs}}}
    return UNDERSCORED if "past_key_self_0" in names else DOTTED


def summary(derivation: Derivation) -> str:
    """What a committed expectation says about a derivation."""
    if derivation.topology is None:
        assert derivation.refusal is not None
        return f"{derivation.outcome.value} {derivation.refusal.code}"
    found = derivation.topology
    return (
        f"{derivation.outcome.value} kv={len(found.kv_inputs)} state={len(found.state_pairs)} "
        f"cross={len(found.cross_kv_inputs)} static={found.static_cache is not None}"
    )


def expected(name: str) -> dict[str, str]:
    """Committed expectations by layout."""
    loaded: dict[str, str] = json.loads((EXPECTED_FOLDER / name).read_text(encoding="utf-8"))
    return loaded


def assert_true(topology: Topology, truth: Truth) -> None:
    """Every role that matters to a decode is what the truth says."""
    inputs = {port.name: port for port in topology.roles if port.direction == "input"}
    driving = {topology.token_input, topology.inputs_embeds_input}
    assert truth.token is None or truth.token in driving
    assert truth.logits is None or topology.logits_output == truth.logits
    assert topology.attention_mask_input == truth.attention_mask
    assert topology.position_ids_input == truth.position_ids
    assert {(port.name, port.pair) for port in inputs.values() if port.role in SELF_KV} == truth.kv
    assert {(port.name, port.pair) for port in inputs.values() if port.role is Role.STATE} == truth.state
    assert {port.name for port in inputs.values() if port.role in CROSS_KV} == truth.cross


@pytest.mark.parametrize("layout", EVERY, ids=lambda layout: layout.name)
def test_what_is_derived_is_right_and_what_is_refused_is_honest(layout: RecordedLayout) -> None:
    """Derived: token, logits, mask, positions, and every pair as in the truth. Refused: for a good reason."""
    derivation = resolve(layout.inventory, declared=layout.declared)
    if derivation.topology is not None:
        assert not layout.refuse
        assert layout.truth is not None
        assert_true(derivation.topology, layout.truth)
        return
    refusal = derivation.refusal
    assert refusal is not None
    codes = {refusal.code, *refusal.also}
    unknown = "E_UNKNOWN_INPUT" in codes and set(refusal.ports) <= layout.unknown
    assert codes & (layout.refuse | layout.may_refuse) or "*" in layout.may_refuse or unknown, refusal
    assert layout.must_name <= set(refusal.ports)


@pytest.mark.parametrize("layout", EVERY, ids=lambda layout: layout.name)
def test_every_port_has_one_role_with_evidence(layout: RecordedLayout) -> None:
    """A topology places each port of the graph exactly once, in one line each."""
    topology = resolve(layout.inventory, declared=layout.declared).topology
    if topology is None:
        return
    placed = [(port.direction, port.name) for port in topology.roles]
    ports = [("input", port.name) for port in layout.inventory.inputs]
    ports += [("output", port.name) for port in layout.inventory.outputs]
    assert sorted(placed) == sorted(ports)
    assert all(port.because and "\n" not in port.because for port in topology.roles)


def test_outcomes_over_the_corpus_are_as_committed() -> None:
    """Which layouts derive, with how many caches, and which are refused with which code."""
    found = {layout.name: summary(resolve(layout.inventory, declared=layout.declared)) for layout in EVERY}
    assert found == expected("corpus.json")


def test_the_strict_contract_over_the_corpus_is_as_committed() -> None:
    """Configured templates and exact shapes: recorded facts, layout by layout."""
    found = {
        layout.name: summary(resolve(layout.inventory, genai_config=strict_config(layout), match="exact"))
        for layout in LAYOUTS
    }
    assert found == expected("strict_corpus.json")


def test_the_strict_contract_does_not_know_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking every convention of the fallback away changes no strict answer."""
    monkeypatch.setattr(resolve_module, "CONVENTIONS", ())
    found = {
        layout.name: summary(resolve(layout.inventory, genai_config=strict_config(layout), match="exact"))
        for layout in LAYOUTS
    }
    assert found == expected("strict_corpus.json")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_strict_contract_derives_nothing_wrong(layout: RecordedLayout) -> None:
    """What the templates and exact shapes let through is what the exporter means."""
    topology = resolve(layout.inventory, genai_config=strict_config(layout), match="exact").topology
    if topology is not None:
        assert layout.truth is not None
        assert_true(topology, layout.truth)


@pytest.mark.parametrize("layout", EVERY, ids=lambda layout: layout.name)
def test_the_relaxation_changes_acceptance_and_never_selection(layout: RecordedLayout) -> None:
    """What exact matching derives, symbolic matching derives with the same pairs."""
    exact = resolve(layout.inventory, match="exact").topology
    if exact is not None:
        relaxed = resolve(layout.inventory, match="symbolic").topology
        assert relaxed is not None
        assert io_block(relaxed) == io_block(exact)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_gate_engages_on_recurrent_graphs_only(layout: RecordedLayout) -> None:
    """The additive fallback declines where the exporter has no state, and never where it has a usable one."""
    outcome = resolve(layout.inventory, gate="recurrent-only").outcome.value
    assert layout.truth is not None
    if not layout.truth.state:
        assert outcome == "declined"
    else:
        assert outcome == resolve(layout.inventory).outcome.value
