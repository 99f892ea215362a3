"""The layouts that the project was begun for: a 27B hybrid, a 0.6B dense decoder, and Whisper."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from fixtures.layouts import WHISPER_GENAI_CONFIG, dense_06b, hybrid_27b, whisper_cross_kv
from harness.ports import PortInventory
from harness.topology import derive
from harness.topology.derive import derive_cache
from harness.topology.exporters import CONVENTIONS
from harness.topology.resolve import resolve
from harness.topology.shapes import StateShapeMatch
from harness.topology.spec import Derivation, Outcome, Role

DOTTED_CONFIG: Mapping[str, Any] = {
    "model": {
        "decoder": {
            "inputs": {
                "past_key_names": "past_key_values.%d.key",
                "past_value_names": "past_key_values.%d.value",
            },
            "outputs": {
                "present_key_names": "present.%d.key",
                "present_value_names": "present.%d.value",
            },
        }
    }
}
LAYOUTS: Mapping[str, tuple[Callable[[], PortInventory], Mapping[str, Any]]] = {
    "hybrid_27b": (hybrid_27b, DOTTED_CONFIG),
    "dense_06b": (dense_06b, DOTTED_CONFIG),
    "whisper_cross_kv": (whisper_cross_kv, WHISPER_GENAI_CONFIG),
}
EXPECTED = json.loads(
    (Path(__file__).parent / "expected" / "strict_and_fallback.json").read_text(encoding="utf-8")
)


def summary(derivation: Derivation) -> dict[str, Any]:
    """What a committed expectation says about a derivation."""
    if derivation.topology is None:
        assert derivation.refusal is not None
        return {
            "outcome": derivation.outcome.value,
            "code": derivation.refusal.code,
            "named_ports": len(derivation.refusal.ports),
        }
    topology = derivation.topology
    return {
        "outcome": derivation.outcome.value,
        "kv_inputs": len(topology.kv_inputs),
        "state_pairs": len(topology.state_pairs),
        "cross_kv_inputs": len(topology.cross_kv_inputs),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_strict_contract_is_as_committed(layout: str) -> None:
    """Four configured patterns and exact shapes: the answer is a recorded fact, whatever the fallback does.

    The 27B hybrid is refused because its present states have symbols only; the others derive.
    """
    make, config = LAYOUTS[layout]
    assert summary(resolve(make(), genai_config=config, match="exact")) == EXPECTED[layout]["strict"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_fallback_is_as_committed(layout: str) -> None:
    """The loader's additive fallback takes a symbolic axis as unknown, and engages on recurrent graphs only.

    Whisper is asked with its configured cross patterns; the others declare nothing.
    """
    make, config = LAYOUTS[layout]
    given = config if layout == "whisper_cross_kv" else None
    derivation = resolve(make(), genai_config=given, gate="recurrent-only")
    assert summary(derivation) == EXPECTED[layout]["fallback"]


def test_the_default_resolver_also_places_dense_decoders() -> None:
    """Without the gate, the 0.6B layout has 56 KV inputs, its three interface inputs, and no state."""
    derivation = resolve(dense_06b())
    assert derivation.outcome is Outcome.DERIVED
    topology = derivation.topology
    assert topology is not None
    assert (len(topology.kv_inputs), topology.state_pairs) == (56, ())
    assert (topology.token_input, topology.attention_mask_input, topology.position_ids_input) == (
        "input_ids",
        "attention_mask",
        "position_ids",
    )
    assert topology.logits_output == "logits"


def test_the_declined_dense_decoder_says_what_to_declare() -> None:
    """The loader's message names the key and the three ports that match."""
    refusal = resolve(dense_06b(), gate="recurrent-only").refusal
    assert refusal is not None
    assert "model.io.token_input" in refusal.message
    assert "3 ports match: input_ids, attention_mask, position_ids" in refusal.message
    assert refusal.ports == ("input_ids", "attention_mask", "position_ids")


@pytest.mark.parametrize("backwards", [False, True])
def test_pairs_of_the_27b_hybrid_stay_in_their_layer(backwards: bool) -> None:
    """Every pair has one layer and one kind on both sides, in whatever order the graph lists its outputs."""
    ports = hybrid_27b()
    topology = resolve(PortInventory(ports.inputs, ports.outputs[:: -1 if backwards else 1])).topology
    assert topology is not None
    attention = {str(layer) for layer in range(3, 64, 4)}
    for past, present in zip(topology.kv_inputs, topology.kv_outputs, strict=True):
        assert past.removeprefix("past_key_values.") == present.removeprefix("present.")
        assert past.split(".")[1] in attention
    for pair in topology.state_pairs:
        assert pair.input.removeprefix("past_key_values.") == pair.output.removeprefix("present.")
        assert pair.input.split(".")[1] not in attention
        assert (pair.init, pair.update) == ("zeros", "replace")


def test_whisper_self_kv_is_kv_and_cross_kv_is_cross_kv() -> None:
    """With its configured cross patterns every cache of Whisper has the right role, and none is a state."""
    topology = resolve(whisper_cross_kv(), genai_config=WHISPER_GENAI_CONFIG).topology
    assert topology is not None
    roles = {port.name: port.role for port in topology.roles}
    for name, role in roles.items():
        if ".decoder." in name:
            assert role in (Role.KV_KEY, Role.KV_VALUE)
        elif ".encoder." in name:
            assert role in (Role.CROSS_KV_KEY, Role.CROSS_KV_VALUE)
    assert len(topology.kv_inputs) == len(topology.cross_kv_inputs) == 8
    assert topology.state_pairs == ()


@pytest.mark.parametrize("match", ["exact", "symbolic"])
def test_whisper_ports_are_never_states(match: Literal["exact", "symbolic"]) -> None:
    """Cross KV has a fixed shape, as a state would; configured as cross KV it is none under any option."""
    inventory = whisper_cross_kv()
    declined = resolve(inventory, genai_config=WHISPER_GENAI_CONFIG, gate="recurrent-only", match=match)
    assert declined.outcome is Outcome.DECLINED
    derived = resolve(inventory, genai_config=WHISPER_GENAI_CONFIG, match=match).topology
    assert derived is not None
    assert Role.STATE not in {port.role for port in derived.roles}


def test_without_the_kv_exclusion_every_kv_port_becomes_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suffix rule needs its exclusion: without it the dense layout has exactly 56 bogus state pairs.

    28 layers with a key and a value each; both sides carry the common prefixes, and symbolic axes do not
    contradict each other, so nothing but the exclusion keeps them out.
    """
    inventory = dense_06b()
    caches = derive_cache(inventory, CONVENTIONS, match=StateShapeMatch.SYMBOLIC)
    assert [binding for binding in caches.bindings if binding.role is Role.STATE] == []
    monkeypatch.setattr(derive, "exclude_bound", lambda inputs, bindings: inputs)
    caches = derive_cache(inventory, CONVENTIONS, match=StateShapeMatch.SYMBOLIC)
    assert sum(binding.role is Role.STATE for binding in caches.bindings) == 56
    assert resolve(inventory).outcome is Outcome.REFUSED
