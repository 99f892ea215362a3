"""`genai_config.json`: the names and templates in it, what they pair, and what is wrong with some."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fixtures.flows import STATE, concat, model
from fixtures.layouts import dense_06b, interface
from fixtures.odd_names import GROWING, GROWN, ODD_BLOCK, odd_names
from harness.errors import InputError
from harness.ports import Port, PortInventory, read_ports
from harness.topology.conventions import Convention, PortPair, StemPair
from harness.topology.dataflow import read_cache_flow
from harness.topology.genai import genai_config_of, genai_names
from harness.topology.resolve import resolve
from harness.topology.spec import Outcome, PortRole, Refusal, Role, Topology


def topology(inventory: PortInventory, **options: Any) -> Topology:
    """The topology of a layout with what its package declares."""
    derivation = resolve(inventory, **options)
    assert derivation.topology is not None, derivation.refusal
    return derivation.topology


def refusal(inventory: PortInventory, **options: Any) -> Refusal:
    """The refusal of a layout with what its package declares."""
    derivation = resolve(inventory, **options)
    assert derivation.refusal is not None, derivation.topology
    return derivation.refusal


def genai(**names: str) -> Mapping[str, Any]:
    """A `genai_config.json`; keys that start with present or are logits stand among the outputs."""
    outputs = {
        key: value for key, value in names.items() if "present" in key or key in ("logits", "rnn_states")
    }
    inputs = {key: value for key, value in names.items() if key not in outputs}
    return {"model": {"decoder": {"inputs": inputs, "outputs": outputs}}}


def test_genai_templates_name_caches_that_no_convention_knows() -> None:
    """The four templates pair whatever they name, layer by layer, and keys stay keys."""
    ports = interface(vocab=1000)
    inventory = PortInventory(
        (*ports.inputs, Port("mem/0/K", "float32", GROWING), Port("mem/0/V", "float32", GROWING)),
        (*ports.outputs, Port("mem2/0/K", "float32", GROWN), Port("mem2/0/V", "float32", GROWN)),
    )
    assert resolve(inventory).outcome is Outcome.REFUSED
    config = genai(
        past_key_names="mem/%d/K",
        past_value_names="mem/%d/V",
        present_key_names="mem2/%d/K",
        present_value_names="mem2/%d/V",
    )
    found = topology(inventory, genai_config=config)
    assert dict(zip(found.kv_inputs, found.kv_outputs, strict=True)) == {
        "mem/0/K": "mem2/0/K",
        "mem/0/V": "mem2/0/V",
    }
    assert {port.name: port.role for port in found.roles}["mem/0/V"] is Role.KV_VALUE


def test_genai_names_of_fused_and_recurrent_caches_are_read() -> None:
    """`past_names` pair stacked caches, `rnn_prev_states` a recurrent state without an index."""
    ports = interface(vocab=1000)
    inventory = PortInventory(
        (
            *ports.inputs,
            Port("h.0", "float32", (2, "batch", 4, "past", 8)),
            Port("r", "float32", (3, "batch", 8)),
        ),
        (
            *ports.outputs,
            Port("g.0", "float32", (2, "batch", 4, "total", 8)),
            Port("q", "float32", (3, "batch", 8)),
        ),
    )
    config = genai(past_names="h.%d", present_names="g.%d", rnn_prev_states="r", rnn_states="q")
    found = topology(inventory, genai_config=config)
    assert (found.kv_inputs, found.kv_outputs) == (("h.0",), ("g.0",))
    assert [(pair.input, pair.output) for pair in found.state_pairs] == [("r", "q")]


def test_a_port_that_the_genai_config_names_must_exist() -> None:
    """Names given one by one are as binding as an `io` block."""
    found = refusal(dense_06b(layers=1), genai_config=genai(position_ids="positions"))
    assert (found.code, found.ports) == ("E_DECLARED_PORT_MISSING", ("positions",))


def test_an_io_block_wins_over_a_genai_config() -> None:
    """A port that the block names is not looked for under the name that the other sidecar has for it."""
    derivation = resolve(
        odd_names(), declared=ODD_BLOCK, genai_config=genai(input_ids="nobody", logits="no_output")
    )
    assert derivation.topology is not None, derivation.refusal
    assert (derivation.topology.token_input, derivation.topology.logits_output) == ("a", "x")


@pytest.mark.parametrize("strict", [True, False])
def test_configured_templates_are_held_against_the_dataflow(tmp_path: Path, strict: bool) -> None:
    """Where exact shapes accept the templates, and where the conventions must help."""
    pasts = {"mem.0.k": list(GROWING), "mem.0.v": list(GROWING)}
    presents = {"out.0.k": list(GROWN), "out.0.v": list(GROWN)}
    nodes = [*concat("mem.0.k", "out.0.k"), *concat("mem.0.v", "out.0.v")]
    if not strict:
        pasts["past_states.0.ssm"], presents["present_states.0.ssm"] = STATE, ["n", 64, 3]
        nodes += concat("past_states.0.ssm", "present_states.0.ssm")
    config = genai(
        past_key_names="mem.%d.k",
        past_value_names="mem.%d.v",
        present_key_names="out.%d.k",
        present_value_names="out.%d.v",
    )
    path = model(tmp_path / "m.onnx", nodes, pasts, presents)
    match: Any = "exact" if strict else "symbolic"
    found = topology(read_ports(path), genai_config=config, flow=read_cache_flow(path), match=match)
    caches = {port.name: port.because for port in found.roles if port.pair}
    assert set(caches) == {*pasts, *presents}
    assert all("confirmed by dataflow through Concat" in because for because in caches.values())


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"model": []}, "model"),
        (genai(past_key_names="past.%d.key"), "model.decoder.inputs.past_value_names"),
        (
            genai(
                past_key_names="past.key",
                past_value_names="past.%d.value",
                present_key_names="present.%d.key",
                present_value_names="present.%d.value",
            ),
            "model.decoder.inputs.past_key_names",
        ),
        (genai(past_names="past_%d"), "model.decoder.outputs.present_names"),
    ],
)
def test_a_malformed_genai_config_is_bad_input_at_its_place(config: Mapping[str, Any], place: str) -> None:
    """Half a set of templates, or a template without its index, names nothing."""
    with pytest.raises(InputError) as error:
        resolve(dense_06b(layers=1), genai_config=config)
    assert error.value.message.startswith(f"{place} must be")


def test_every_key_of_a_genai_config_is_read() -> None:
    """Single ports by role, lengths, and one convention of all templates."""
    inputs = {
        "input_ids": "a",
        "inputs_embeds": "b",
        "attention_mask": "c",
        "position_ids": "d",
        "encoder_hidden_states": "e",
        "encoder_attention_mask": "f",
        "past_sequence_length": "g",
        "current_sequence_length": "h",
        "total_sequence_length": "i",
        "past_key_values_length": "j",
        "past_key_names": "pk%d",
        "past_value_names": "pv%d",
        "cross_past_key_names": "ck%d",
        "cross_past_value_names": "cv%d",
        "past_names": "p%d",
        "rnn_prev_states": "r",
    }
    outputs = {
        "logits": "l",
        "present_key_names": "qk%d",
        "present_value_names": "qv%d",
        "cross_present_key_names": "dk%d",
        "cross_present_value_names": "dv%d",
        "present_names": "q%d",
        "rnn_states": "s",
    }
    found = genai_names({"model": {"decoder": {"inputs": inputs, "outputs": outputs}}})
    assert found.single == {
        Role.TOKEN: "a",
        Role.EMBEDS: "b",
        Role.ATTENTION_MASK: "c",
        Role.POSITION_IDS: "d",
        Role.ENCODER_HIDDEN_STATES: "e",
        Role.ENCODER_ATTENTION_MASK: "f",
        Role.LOGITS: "l",
    }
    assert found.controls == ("g", "h", "i", "j")
    assert found.convention == Convention(
        "genai_config.json",
        "the package",
        pairs=(
            PortPair("pk%d", "qk%d", Role.KV_KEY),
            PortPair("pv%d", "qv%d", Role.KV_VALUE),
            PortPair("ck%d", "dk%d", Role.CROSS_KV_KEY),
            PortPair("cv%d", "dv%d", Role.CROSS_KV_VALUE),
            PortPair("p%d", "q%d", Role.KV_FUSED),
            PortPair("r", "s", Role.STATE),
        ),
        stems=(StemPair("p*", "q*"),),
    )
    plain = genai_names({"model": {"decoder": {"inputs": {"past_sequence_length": "g"}}}})
    assert (plain.single, plain.controls, plain.convention) == ({}, ("g",), None)
    nothing = genai_names({})
    assert (nothing.single, nothing.controls, nothing.convention) == ({}, (), None)


@pytest.mark.parametrize(
    ("names", "template"),
    [
        ({0: "v2.0.key"}, "v2.%d.key"),
        ({0: "m0.0.k", 1: "m0.1.k"}, "m0.%d.k"),
        ({3: "a.3.k", 4: "a.4.k"}, "a.%d.k"),
        ({0: "a.0.k", 1: "b.1.k"}, None),
        ({0: "m0.0.k"}, None),
        ({7: "a.k"}, None),
        ({None: "a.0.k"}, None),
    ],
)
def test_a_template_is_what_names_have_in_common_but_for_the_layer(
    names: Mapping[int | None, str], template: str | None
) -> None:
    """The layer's own number becomes `%d`, other numbers stay; without one template nothing is written."""
    roles = tuple(
        PortRole(name, direction, role, "", layer=layer)
        for layer, name in names.items()
        for direction in ("input", "output")
        for role in (Role.KV_KEY, Role.KV_VALUE)
    )
    decoder = genai_config_of(Topology(roles=roles))["model"]["decoder"]
    keys = ["past_key_names", "past_value_names", "present_key_names", "present_value_names"]
    expected = {} if template is None else dict.fromkeys(keys, template)
    assert decoder["inputs"] | decoder["outputs"] == expected
