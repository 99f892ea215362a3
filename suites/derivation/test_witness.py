"""What the second witness settles, confirms or contradicts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from fixtures.flows import GROWING, GROWN, STATE, concat, derive, info, model
from harness.package import Component, Components, open_package
from harness.ports import read_ports
from harness.topology.dataflow import read_cache_flow
from harness.topology.resolve import resolve, resolve_package
from harness.topology.spec import Derivation, Outcome, Role


def test_names_and_dataflow_that_agree_confirm_each_other(tmp_path: Path) -> None:
    """The evidence of each port names both witnesses."""
    path = model(
        tmp_path / "m.onnx",
        concat("past_key_values.0.key", "present.0.key"),
        {"past_key_values.0.key": GROWING},
        {"present.0.key": GROWN},
    )
    topology = derive(path).topology
    assert topology is not None
    evidence = {port.name: port.because for port in topology.roles}
    for name in ("past_key_values.0.key", "present.0.key"):
        assert "confirmed by dataflow through Concat" in evidence[name]
        assert "dotted" in evidence[name]


def test_outputs_without_names_are_settled_by_dataflow(tmp_path: Path) -> None:
    """`cat_17` and `cat_18` say nothing, and the order of the outputs is not that of the inputs."""
    path = model(
        tmp_path / "m.onnx",
        [*concat("past_key_values_0.0", "cat_18"), *concat("past_key_values_0.1", "cat_17")],
        {"past_key_values_0.0": GROWING, "past_key_values_0.1": GROWING},
        {"cat_17": GROWN, "cat_18": GROWN},
    )
    by_name = resolve(read_ports(path)).refusal
    assert by_name is not None
    assert by_name.code == "E_AMBIGUOUS_STATE_PAIRING"
    topology = derive(path).topology
    assert topology is not None
    assert dict(zip(topology.kv_inputs, topology.kv_outputs, strict=True)) == {
        "past_key_values_0.0": "cat_18",
        "past_key_values_0.1": "cat_17",
    }
    roles = {port.name: port.role for port in topology.roles}
    assert (roles["past_key_values_0.0"], roles["past_key_values_0.1"]) == (Role.KV_KEY, Role.KV_VALUE)
    evidence = {port.name: port.because for port in topology.roles}
    assert evidence["past_key_values_0.0"] == "the graph feeds it to `cat_18` through Concat"
    assert evidence["cat_18"] == evidence["past_key_values_0.0"]


def test_cross_kv_that_is_only_read_is_left_as_it_is_named(tmp_path: Path) -> None:
    """It reaches no output, which says nothing against it, nor about the caches after it."""
    past = "past_key_values.0.encoder.key"
    path = model(
        tmp_path / "m.onnx",
        concat("past_key_values.0.decoder.key", "present.0.decoder.key"),
        {past: ["batch", 2, "frames", 16], "past_key_values.0.decoder.key": GROWING},
        {"present.0.decoder.key": GROWN},
    )
    topology = derive(path).topology
    assert topology is not None
    assert (topology.cross_kv_inputs, topology.kv_inputs) == ((past,), ("past_key_values.0.decoder.key",))
    evidence = {port.name: port.because for port in topology.roles}
    assert "it is only read" in evidence[past]
    assert "confirmed by dataflow through Concat" in evidence["past_key_values.0.decoder.key"]


def test_inputs_without_names_are_settled_by_their_operator(tmp_path: Path) -> None:
    """The slots of an attention operator say which is key and which is value, whatever they are called."""
    node = helper.make_node(
        "GroupQueryAttention", ["q", "k", "v", "a", "b"], ["y", "c", "d"], domain="com.microsoft"
    )
    state = helper.make_node("CausalConvWithState", ["x", "w", "", "s"], ["z", "t"], domain="com.microsoft")
    path = model(
        tmp_path / "m.onnx",
        [node, state],
        {"a": GROWING, "b": GROWING, "s": STATE},
        {"d": GROWN, "c": GROWN, "t": STATE},
    )
    topology = derive(path).topology
    assert topology is not None
    roles = {port.name: (port.role, port.pair) for port in topology.roles}
    assert roles["a"] == (Role.KV_KEY, "c")
    assert roles["b"] == (Role.KV_VALUE, "d")
    assert roles["s"] == (Role.STATE, "t")


@pytest.mark.parametrize(
    ("past", "shapes", "role"),
    [
        ("past_key_values.0.conv_state", (STATE, STATE), Role.STATE),
        ("past.0.v", (GROWING, GROWN), Role.KV_VALUE),
        ("past_states.0.k", (GROWING, GROWN), Role.KV_KEY),
    ],
)
def test_the_name_of_the_input_says_what_a_nameless_output_is(
    tmp_path: Path, past: str, shapes: tuple[list[Any], list[Any]], role: Role
) -> None:
    """Dataflow says whose it is, the words after the prefix say what."""
    path = model(tmp_path / "m.onnx", concat(past, "cat_3"), {past: shapes[0]}, {"cat_3": shapes[1]})
    topology = derive(path).topology
    assert topology is not None
    assert {(port.role, port.pair) for port in topology.roles if port.name == past} == {(role, "cat_3")}


SLOTS = {
    "key": ("GroupQueryAttention", 3, 1),
    "value": ("GroupQueryAttention", 4, 2),
    "both": ("Attention", 4, 1),
    "state": ("LinearAttention", 3, 1),
}
"""Operator of onnxruntime, and positions of its input and output."""


@pytest.mark.parametrize(
    ("past", "present", "slot", "fits"),
    [
        ("past.0.key", "present.0.key", "key", True),
        ("past.0.key", "present.0.key", "value", False),
        ("past.0.key", "present.0.key", "both", True),
        ("past.0.key", "present.0.key", "state", False),
        ("past.0.conv", "present.0.conv", "state", True),
        ("past.0.conv", "present.0.conv", "key", False),
        ("past.0.conv", "present.0.conv", "both", False),
        ("past_0", "present_0", "both", True),
        ("past_0", "present_0", "state", False),
        ("past.0.encoder.key", "present.0.encoder.key", "key", True),
        ("past.0.encoder.key", "present.0.encoder.key", "state", True),
    ],
)
def test_a_slot_contradicts_a_name_that_says_the_other_thing(
    tmp_path: Path, past: str, present: str, slot: str, fits: bool
) -> None:
    """Keys are not values, and caches of attention no states; a cache of both leaves room."""
    operator, position, output = SLOTS[slot]
    inputs, outputs = [f"x{n}" for n in range(position + 1)], [f"y{n}" for n in range(output + 1)]
    inputs[position], outputs[output] = past, present
    shapes = (STATE, STATE) if "conv" in past or "encoder" in past else (GROWING, GROWN)
    pasts, presents = {past: shapes[0]}, {present: shapes[1]}
    nodes = [helper.make_node(operator, inputs, outputs, domain="com.microsoft")]
    if "encoder" in past:  # a decoder whose only cache is its encoder's does not decode token by token
        nodes += concat("past.0.decoder.key", "present.0.decoder.key")
        pasts["past.0.decoder.key"], presents["present.0.decoder.key"] = GROWING, GROWN
    derivation = derive(model(tmp_path / "m.onnx", nodes, pasts, presents))
    codes = () if derivation.refusal is None else (derivation.refusal.code, *derivation.refusal.also)
    assert ("E_EVIDENCE_CONFLICT" in codes) is not fits
    if fits:
        assert derivation.topology is not None, derivation.refusal


def test_a_nameless_value_that_is_merely_added_to_stays_unknown(tmp_path: Path) -> None:
    """A hidden state handed on by an Add reaches an output as a cache would: no name and no slot, no role."""
    nodes = [helper.make_node("Add", ["h", "delta"], ["g"])]
    path = model(
        tmp_path / "m.onnx",
        [*concat("past_key_values.0.key", "present.0.key"), *nodes],
        {"past_key_values.0.key": GROWING, "h": STATE},
        {"present.0.key": GROWN, "g": STATE},
    )
    refusal = derive(path).refusal
    assert refusal is not None
    assert (refusal.code, refusal.ports) == ("E_UNKNOWN_INPUT", ("h",))


def test_crossed_wires_are_refused_with_both_witnesses(tmp_path: Path) -> None:
    """Names pair layer 0 with layer 0, the graph feeds it to layer 1: neither is believed."""
    names = ("past_key_values.0.key", "past_key_values.1.key")
    path = model(
        tmp_path / "m.onnx",
        [*concat(names[0], "present.1.key"), *concat(names[1], "present.0.key")],
        dict.fromkeys(names, GROWING),
        {"present.0.key": GROWN, "present.1.key": GROWN},
    )
    assert resolve(read_ports(path)).outcome is Outcome.DERIVED
    refusal = derive(path).refusal
    assert refusal is not None
    assert refusal.code == "E_EVIDENCE_CONFLICT"
    assert set(refusal.ports) == {*names, "present.0.key", "present.1.key"}
    assert refusal.message == (
        "By name `past_key_values.0.key` goes with `present.0.key`, but the graph feeds it to "
        "`present.1.key`. Declare which is right under model.io."
    )


def test_keys_in_the_slot_of_values_are_refused(tmp_path: Path) -> None:
    """Shapes agree and each past reaches its own present, but the operator takes the key as the value."""
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "past_key_values.0.value", "past_key_values.0.key"],
        ["y", "present.0.value", "present.0.key"],
        domain="com.microsoft",
    )
    path = model(
        tmp_path / "m.onnx",
        [node],
        {"past_key_values.0.key": GROWING, "past_key_values.0.value": GROWING},
        {"present.0.key": GROWN, "present.0.value": GROWN},
    )
    refusal = derive(path).refusal
    assert refusal is not None
    assert refusal.code == "E_EVIDENCE_CONFLICT"
    assert refusal.message == (
        "By name `past_key_values.0.key` is kv_key, GroupQueryAttention takes it as kv_value: declare which "
        "is right under model.io."
    )
    assert refusal.ports == tuple(
        f"{side}.0.{kind}" for kind in ("key", "value") for side in ("past_key_values", "present")
    )


def test_a_state_computed_anew_is_not_contradicted(tmp_path: Path) -> None:
    """A token shift keeps nothing of the last one: dataflow has nothing to say, and the names stand."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["shift_out"])]
    path = model(tmp_path / "m.onnx", nodes, {"shift_in": STATE}, {"shift_out": STATE})
    topology = derive(path).topology
    assert topology is not None
    assert [(pair.input, pair.output) for pair in topology.state_pairs] == [("shift_in", "shift_out")]
    assert "dataflow" not in {port.name: port.because for port in topology.roles}["shift_in"]


def exporter_models() -> list[str]:
    """Names of the exported models at hand, or one that makes the test say what to set."""
    root = os.environ.get("ONNX_PARITY_EXPORTER_MODELS")
    return sorted(path.name for path in Path(root).iterdir()) if root else ["unset"]


@pytest.mark.parametrize("name", exporter_models())
def test_every_pair_of_a_real_export_is_confirmed(name: str) -> None:
    """Both witnesses give the exporter's own pairs, and each KV and state pair has the second one's word."""
    root = os.environ.get("ONNX_PARITY_EXPORTER_MODELS")
    if not root:
        pytest.skip("set ONNX_PARITY_EXPORTER_MODELS to a folder of exported models with meta.json")
    folder = Path(root) / name
    truth = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["truth"]
    topology = derive(folder / "model.onnx").topology
    assert topology is not None
    ports = {port.name: port for port in topology.roles if port.direction == "input"}
    expected = {pair["input"]: pair["output"] for pair in (*truth["kv"], *truth["state"])}
    caches = (Role.KV_KEY, Role.KV_VALUE, Role.KV_FUSED, Role.STATE)
    assert {one.name: one.pair for one in ports.values() if one.role in caches} == expected
    for past in expected:
        because = ports[past].because
        assert "confirmed by dataflow" in because or "the graph feeds it" in because
    assert topology.token_input == truth["token_input"]
    assert topology.logits_output == truth["logits"]
    assert {one.name for one in ports.values() if one.role.value.startswith("cross")} == {
        pair["input"] for pair in truth["cross_kv"]
    }


def test_a_package_is_asked_for_both_witnesses(tmp_path: Path) -> None:
    """A folder with a graph of nameless outputs derives as the graph does; a sidecar in it still wins."""
    nodes = [*concat("past_key_values_0.0", "cat_18"), *concat("past_key_values_0.1", "cat_17")]
    pasts = {"past_key_values_0.0": GROWING, "past_key_values_0.1": GROWING}
    path = model(tmp_path / "model.onnx", nodes, pasts, {"cat_17": GROWN, "cat_18": GROWN})
    derivation = resolve_package(open_package(tmp_path), read_ports(path))
    assert derivation.outcome is Outcome.DERIVED
    assert derivation.topology is not None
    assert derivation.topology.kv_outputs == ("cat_18", "cat_17")
    block = {"kv_inputs": list(pasts), "kv_outputs": ["cat_17", "cat_18"]}
    (tmp_path / "inference_metadata.yaml").write_text(json.dumps({"model": {"io": block}}), encoding="utf-8")
    declared = resolve_package(open_package(tmp_path), read_ports(path))
    assert declared.outcome is Outcome.DECLARED
    assert declared.topology is not None
    assert declared.topology.kv_outputs == ("cat_17", "cat_18")


def test_the_dataflow_of_a_decoder_in_parts_is_not_asked(tmp_path: Path) -> None:
    """It crosses their borders: what one part says of its own nodes is not the whole of it."""
    nodes = concat("past_key_values.0.key", "present.0.key")
    path = model(tmp_path / "model.onnx", nodes, {"past_key_values.0.key": GROWING}, {"present.0.key": GROWN})
    package = open_package(tmp_path)
    for parts, confirmed in ((1, True), (2, False)):
        components = Components(tuple(Component(f"part {part}", path) for part in range(parts)))
        topology = resolve_package(replace(package, components=components), read_ports(path)).topology
        assert topology is not None
        evidence = {port.name: port.because for port in topology.roles}["past_key_values.0.key"]
        assert ("confirmed by dataflow" in evidence) is confirmed


def test_an_output_that_two_inputs_reach_settles_nothing(tmp_path: Path) -> None:
    """Two caches that are joined into one output are not both its past, and neither is."""
    node = helper.make_node("Concat", ["past_key_values_0.0", "past_key_values_0.1"], ["cat_1"], axis=2)
    pasts = {"past_key_values_0.0": GROWING, "past_key_values_0.1": GROWING}
    refusal = derive(model(tmp_path / "m.onnx", [node], pasts, {"cat_1": GROWN})).refusal
    assert refusal is not None
    assert refusal.code == "E_AMBIGUOUS_STATE_PAIRING"


def test_an_input_that_reaches_two_outputs_is_not_settled(tmp_path: Path) -> None:
    """A cache that comes out twice, once in another layout: nothing says which to feed back."""
    nodes = [
        *concat("past_key_values_0.0", "cat_1"),
        helper.make_node("Transpose", ["cat_1"], ["transpose_1"]),
    ]
    pasts = {"past_key_values_0.0": GROWING}
    refusal = derive(model(tmp_path / "m.onnx", nodes, pasts, {"cat_1": GROWN, "transpose_1": GROWN})).refusal
    assert refusal is not None
    assert refusal.code == "E_AMBIGUOUS_STATE_PAIRING"


def test_arithmetic_confirms_and_does_not_contradict(tmp_path: Path) -> None:
    """A convolution in plain operators feeds the state after it: that is no sign of crossed wires.

    The window's own present is computed from new tokens only, as when a call brings a whole window of them.
    """
    nodes = [
        helper.make_node("Mul", ["past_key_values.0.conv_state", "w"], ["c"]),
        helper.make_node("Add", ["past_key_values.0.ssm_state", "c"], ["present.0.ssm_state"]),
        helper.make_node("MatMul", ["x", "w"], ["present.0.conv_state"]),
    ]
    kinds = ("conv_state", "ssm_state")
    path = model(
        tmp_path / "m.onnx",
        nodes,
        {f"past_key_values.0.{kind}": STATE for kind in kinds},
        {f"present.0.{kind}": STATE for kind in kinds},
    )
    topology = derive(path).topology
    assert topology is not None
    evidence = {port.name: port.because for port in topology.roles}
    assert "confirmed by dataflow through Add" in evidence["past_key_values.0.ssm_state"]
    assert "dataflow" not in evidence["past_key_values.0.conv_state"]


def test_the_way_without_arithmetic_settles_first(tmp_path: Path) -> None:
    """A nameless window is appended to, and computed with: what it is appended into is its present."""
    nodes = [
        *concat("past_key_values_0.0", "cat_1"),
        helper.make_node("Mul", ["cat_1", "w"], ["mul_1"]),
    ]
    pasts = {"past_key_values_0.0": GROWING}
    topology = derive(model(tmp_path / "m.onnx", nodes, pasts, {"mul_1": GROWN, "cat_1": GROWN})).topology
    assert topology is not None
    assert (topology.kv_inputs, topology.kv_outputs) == (("past_key_values_0.0",), ("cat_1",))


def test_arithmetic_inside_a_function_counts_as_arithmetic(tmp_path: Path) -> None:
    """A function that decays a state confirms its own pair, and contradicts no other by it."""
    opsets = [helper.make_opsetid("", 21)]
    decay = helper.make_function(
        "local", "decay", ["s", "d"], ["o"], [helper.make_node("Mul", ["s", "d"], ["o"])], opsets
    )
    node = helper.make_node("decay", ["past.0.conv", "w"], ["present.0.ssm"], domain="local")
    other = helper.make_node("MatMul", ["x", "w"], ["present.0.conv"])
    kinds = ("conv", "ssm")
    path = model(
        tmp_path / "m.onnx",
        [node, other],
        {f"past.0.{kind}": STATE for kind in kinds},
        {f"present.0.{kind}": STATE for kind in kinds},
        (decay,),
    )
    assert [one.whole for one in read_cache_flow(path).reached("past.0.conv")] == [False]
    assert derive(path).outcome is Outcome.DERIVED


def code(derivation: Derivation) -> str | None:
    """The leading code, None where it derives."""
    return None if derivation.refusal is None else derivation.refusal.code


def test_a_settled_cache_must_grow_or_have_a_slot_that_says_what_it_is(tmp_path: Path) -> None:
    """Appending and slicing may keep a state as well: a fixed shape under the name of a key is left open."""
    fixed = ["batch", 2, 64, 16]
    past = "past.3.k"
    path = model(tmp_path / "m.onnx", concat(past, "cat_3"), {past: fixed}, {"cat_3": fixed})
    assert code(derive(path)) == "E_AMBIGUOUS_STATE_PAIRING"
    node = helper.make_node(
        "GroupQueryAttention", ["q", "k", "v", past, "d"], ["y", "cat_3", "o"], domain="com.microsoft"
    )
    topology = derive(model(tmp_path / "m.onnx", [node], {past: fixed}, {"cat_3": fixed})).topology
    assert topology is not None
    assert [(port.role, port.layer) for port in topology.roles if port.name == past] == [(Role.KV_KEY, 3)]


def test_a_settled_output_is_no_longer_free(tmp_path: Path) -> None:
    """A nameless input may belong to an output with a present name, which is then not without its past."""
    node = helper.make_node(
        "GroupQueryAttention", ["q", "k", "v", "a", "b"], ["y", "present.0.key", "c"], domain="com.microsoft"
    )
    pasts, presents = {"a": GROWING, "b": GROWING}, {"present.0.key": GROWN, "c": GROWN}
    topology = derive(model(tmp_path / "m.onnx", [node], pasts, presents)).topology
    assert topology is not None
    assert (topology.kv_inputs, topology.kv_outputs) == (("a", "b"), ("present.0.key", "c"))


def test_an_input_that_is_not_settled_does_not_keep_others_from_it(tmp_path: Path) -> None:
    """The first input reaches two outputs, the second one: only the first stays open."""
    nodes = [
        *concat("past_key_values_0.0", "cat_1"),
        helper.make_node("Transpose", ["cat_1"], ["cat_2"]),
        *concat("past_key_values_0.1", "cat_3"),
    ]
    path = model(
        tmp_path / "m.onnx",
        nodes,
        {"past_key_values_0.0": GROWING, "past_key_values_0.1": GROWING},
        {"cat_1": GROWN, "cat_2": GROWN, "cat_3": GROWN},
    )
    refusal = derive(path).refusal
    assert refusal is not None
    assert set(refusal.ports) == {"past_key_values_0.0", "cat_1", "cat_2"}


def test_both_witnesses_findings_are_told(tmp_path: Path) -> None:
    """A dispute between names stays one when the dataflow has another thing to say."""
    path = model(
        tmp_path / "m.onnx",
        concat("past_key_values.1.key", "present.0.key"),
        dict.fromkeys(("past_key_values.0.key", "past.0.key", "past_key_values.1.key"), GROWING),
        {"present.0.key": GROWN, "present.1.key": GROWN},
    )
    refusal = derive(path).refusal
    assert refusal is not None
    assert {refusal.code, *refusal.also} >= {"E_AMBIGUOUS_STATE_PAIRING", "E_EVIDENCE_CONFLICT"}


PASTS = ("past_key_values.0.key", "past_key_values.0.value")
PRESENTS = ("present.0.key", "present.0.value")


def stacked_and_split() -> list[onnx.NodeProto]:
    """Key and value in one tensor, whose halves are given in the other order."""
    return [
        helper.make_node("Concat", PASTS, ["both"], axis=1),
        helper.make_node("Split", ["both"], PRESENTS[::-1], axis=1, num_outputs=2),
    ]


def mixed() -> list[onnx.NodeProto]:
    """Each present is a sum of both caches."""
    return [helper.make_node("Sum", PASTS, [present]) for present in PRESENTS]


def carried_by_a_loop_that_swaps() -> list[onnx.NodeProto]:
    """After an odd number of turns each carried value stands where the other one stood."""
    ports = [info("i", [], TensorProto.INT64), info("go", [], TensorProto.BOOL), *swapped_ports()]
    on = helper.make_node("Identity", ["go"], ["on"])
    body = helper.make_graph(
        [on, *swapping()], "body", ports, [info("on", [], TensorProto.BOOL), info("c", [4]), info("d", [4])]
    )
    return [helper.make_node("Loop", ["trips", "", *PASTS], PRESENTS, body=body)]


def carried_by_a_scan_that_swaps() -> list[onnx.NodeProto]:
    """The same with a Scan."""
    body = helper.make_graph(
        swapping(), "body", [*swapped_ports(), info("x", [4])], [info("c", [4]), info("d", [4])]
    )
    return [helper.make_node("Scan", [*PASTS, "xs"], PRESENTS, body=body, num_scan_inputs=1)]


def swapped_ports() -> list[onnx.ValueInfoProto]:
    """The values that `swapping` takes."""
    return [info("a", [4]), info("b", [4])]


def swapping() -> list[onnx.NodeProto]:
    """A body of which `c` is the second value and `d` the first."""
    return [helper.make_node("Identity", ["b"], ["c"]), helper.make_node("Identity", ["a"], ["d"])]


@pytest.mark.parametrize("way", [stacked_and_split, mixed, carried_by_a_loop_that_swaps])
def test_a_past_that_reaches_both_presents_alike_is_not_confirmed(
    tmp_path: Path, way: Callable[[], list[onnx.NodeProto]]
) -> None:
    """Which half is whose, how many turns a loop takes: the steps do not say, so the names stand alone."""
    path = model(tmp_path / "m.onnx", way(), dict.fromkeys(PASTS, GROWING), dict.fromkeys(PRESENTS, GROWN))
    assert {one.output for one in read_cache_flow(path).reached(PASTS[0])} == set(PRESENTS)
    topology = derive(path).topology
    assert topology is not None
    assert topology.kv_outputs == PRESENTS
    evidence = {port.name: port.because for port in topology.roles}
    for past, own, other in zip(PASTS, PRESENTS, PRESENTS[::-1], strict=True):
        assert evidence[past] == (
            f"named `{past.replace('0', '%d')}`, its present `{own.replace('0', '%d')}` (dotted); dataflow "
            f"confirms nothing: the graph feeds it to `{own}`, `{other}`"
        )


def test_a_scan_that_swaps_what_it_carries_confirms_nothing(tmp_path: Path) -> None:
    """Its states are two by position, and one by what its body does."""
    states = ("past.0.conv", "past.0.ssm"), ("present.0.conv", "present.0.ssm")
    names = dict(zip((*PASTS, *PRESENTS), (*states[0], *states[1]), strict=True))
    node = carried_by_a_scan_that_swaps()[0]
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names[name] for name in node.output]
    path = model(
        tmp_path / "m.onnx", [node], dict.fromkeys(states[0], STATE), dict.fromkeys(states[1], STATE)
    )
    topology = derive(path).topology
    assert topology is not None
    for port in topology.roles:
        assert "confirmed" not in port.because
        assert ("dataflow confirms nothing" in port.because) is (port.role is Role.STATE)


def test_a_cache_that_goes_whole_into_another_present_is_refused_though_its_own_is_computed_from_it(
    tmp_path: Path,
) -> None:
    """What is added to the named present, here nothing, does not make up for where the cache itself goes."""
    nodes = [
        *concat("past_key_values.0.key", "present.0.value"),
        helper.make_node("Mul", ["present.0.value", "zero"], ["nothing"]),
        *concat("past_key_values.0.value", "kept"),
        helper.make_node("Add", ["kept", "nothing"], ["present.0.key"]),
    ]
    path = model(tmp_path / "m.onnx", nodes, dict.fromkeys(PASTS, GROWING), dict.fromkeys(PRESENTS, GROWN))
    refusal = derive(path).refusal
    assert refusal is not None
    assert (refusal.code, refusal.message) == (
        "E_EVIDENCE_CONFLICT",
        "By name `past_key_values.0.key` goes with `present.0.key`, but the graph feeds it to "
        "`present.0.value`. Declare which is right under model.io.",
    )
    assert refusal.ports == ("past_key_values.0.key", "present.0.key", "present.0.value")


def test_a_whole_copy_under_a_name_of_its_own_confirms_and_contradicts_nothing(tmp_path: Path) -> None:
    """A state that decays, and is given as it was as well: no other cache lays claim to the copy."""
    nodes = [
        helper.make_node("Mul", ["past.0.ssm", "decay"], ["present.0.ssm"]),
        helper.make_node("Identity", ["past.0.ssm"], ["snapshot"]),
    ]
    presents: dict[str, list[Any]] = {"present.0.ssm": STATE, "snapshot": ["rows", "batch", 64, 3]}
    topology = derive(model(tmp_path / "m.onnx", nodes, {"past.0.ssm": STATE}, presents)).topology
    assert topology is not None
    evidence = {port.name: port.because for port in topology.roles}["past.0.ssm"]
    assert evidence.endswith("dataflow confirms nothing: the graph feeds it to `present.0.ssm`, `snapshot`")


def test_a_present_that_is_reached_whole_is_confirmed_whatever_is_computed_from_it(tmp_path: Path) -> None:
    """A convolution window goes on into the state after it through arithmetic, which is its use."""
    nodes = [
        *concat("past.0.conv", "present.0.conv"),
        helper.make_node("Mul", ["present.0.conv", "w"], ["c"]),
        helper.make_node("Add", ["past.0.ssm", "c"], ["present.0.ssm"]),
    ]
    kinds = ("conv", "ssm")
    pasts, presents = ({f"{side}.0.{kind}": STATE for kind in kinds} for side in ("past", "present"))
    topology = derive(model(tmp_path / "m.onnx", nodes, pasts, presents)).topology
    assert topology is not None
    evidence = {port.name: port.because for port in topology.roles}
    assert "confirmed by dataflow through Concat" in evidence["past.0.conv"]
    assert "confirmed by dataflow through Add" in evidence["past.0.ssm"]


@pytest.mark.parametrize(
    ("pasts", "slots", "refused"),
    [
        (("past_key_values_key_cache_0", "past_key_values_value_cache_0"), (3, 4), None),
        (("past_key_values_key_cache_0", "past_key_values_value_cache_0"), (4, 3), ("kv_key", "kv_value")),
        (("past_conv.0", "past_recurrent.0"), (3, 4), ("state", "kv_key")),
    ],
)
def test_settled_caches_are_held_against_the_slots_that_they_go_into(
    tmp_path: Path, pasts: tuple[str, str], slots: tuple[int, int], refused: tuple[str, str] | None
) -> None:
    """Outputs without names change nothing: keys are not values, and attention keeps no recurrent state."""
    fixed = ["batch", 2, 4, 16]
    inputs = ["q", "k", "v", "", ""]
    for past, slot in zip(pasts, slots, strict=True):
        inputs[slot] = past
    node = helper.make_node("GroupQueryAttention", inputs, ["y", "o1", "o2"], domain="com.microsoft")
    path = model(tmp_path / "m.onnx", [node], dict.fromkeys(pasts, fixed), {"o1": fixed, "o2": fixed})
    derivation = derive(path)
    if refused is None:
        assert derivation.topology is not None
        assert dict(zip(derivation.topology.kv_inputs, derivation.topology.kv_outputs, strict=True)) == {
            pasts[0]: "o1",
            pasts[1]: "o2",
        }
        return
    assert derivation.refusal is not None
    assert (derivation.refusal.code, derivation.refusal.message) == (
        "E_EVIDENCE_CONFLICT",
        f"By name `{pasts[0]}` is {refused[0]}, GroupQueryAttention takes it as {refused[1]}: declare "
        "which is right under model.io.",
    )
    assert set(derivation.refusal.ports) == {*pasts, "o1", "o2"}


@pytest.mark.parametrize("swapped", [False, True])
def test_the_two_states_of_an_lstm_are_told_apart(tmp_path: Path, swapped: bool) -> None:
    """Both have one shape, and only the operator's positions say which output continues which input."""
    presents = ("state_h_out", "state_c_out")
    outputs = ["y", *(presents[::-1] if swapped else presents)]
    node = helper.make_node("LSTM", ["x", "w", "r", "", "", "state_h", "state_c"], outputs)
    state = [1, "batch", 16]
    pasts = dict.fromkeys(("state_h", "state_c"), state)
    derivation = derive(model(tmp_path / "m.onnx", [node], pasts, dict.fromkeys(presents, state)))
    if swapped:
        assert derivation.refusal is not None
        assert (derivation.refusal.code, derivation.refusal.message) == (
            "E_EVIDENCE_CONFLICT",
            "By name `state_h` goes with `state_h_out`, but the graph feeds it to `state_c_out`. Declare "
            "which is right under model.io.",
        )
        return
    assert derivation.topology is not None
    states = [port for port in derivation.topology.roles if port.role is Role.STATE]
    assert len(states) == 4
    assert all("confirmed by dataflow through LSTM" in port.because for port in states)


@pytest.mark.parametrize("half", [0, 1])
def test_a_nameless_half_of_what_was_stacked_is_not_settled(tmp_path: Path, half: int) -> None:
    """Names take one of two halves, and the other is not thereby the nameless input's: it reaches both."""
    outputs = ["cat_1", "cat_1"]
    outputs[half] = "present.0.key"
    nodes = [
        helper.make_node("Concat", ["past_key_values.0.key", "past_key_values_0.1"], ["both"], axis=1),
        helper.make_node("Split", ["both"], outputs, axis=1, num_outputs=2),
    ]
    pasts = {"past_key_values.0.key": GROWING, "past_key_values_0.1": GROWING}
    path = model(tmp_path / "m.onnx", nodes, pasts, {"present.0.key": GROWN, "cat_1": GROWN})
    refusal = derive(path).refusal
    assert refusal is not None
    assert "past_key_values_0.1" in refusal.ports


def test_what_goes_into_a_present_that_names_take_is_not_settled_by_arithmetic(tmp_path: Path) -> None:
    """A nameless cache that is another's present, and is computed with on the way to a free output."""
    nodes = [
        *concat("past_key_values_0.1", "present.0.key"),
        helper.make_node("Mul", ["past_key_values_0.1", "w"], ["cat_1"]),
        *concat("past_key_values.0.key", "nowhere"),
    ]
    pasts = {"past_key_values.0.key": GROWING, "past_key_values_0.1": GROWING}
    path = model(tmp_path / "m.onnx", nodes, pasts, {"present.0.key": GROWN, "cat_1": GROWN})
    refusal = derive(path).refusal
    assert refusal is not None
    assert "past_key_values_0.1" in refusal.ports


def test_what_goes_into_its_own_output_is_settled_whatever_is_computed_from_it(tmp_path: Path) -> None:
    """A nameless window goes on into the state of the names through arithmetic: that is its use."""
    nodes = [
        *concat("past_key_values_0.1", "cat_1"),
        helper.make_node("Mul", ["cat_1", "w"], ["c"]),
        helper.make_node("Add", ["past_key_values.0.key", "c"], ["present.0.key"]),
    ]
    pasts = {"past_key_values.0.key": GROWING, "past_key_values_0.1": GROWING}
    path = model(tmp_path / "m.onnx", nodes, pasts, {"present.0.key": GROWN, "cat_1": GROWN})
    topology = derive(path).topology
    assert topology is not None
    assert topology.kv_outputs == ("present.0.key", "cat_1")


def test_a_copy_in_an_output_that_is_something_else_settles_against_nothing(tmp_path: Path) -> None:
    """What is declared to be no cache takes none: the only output left is the present."""
    past = "past_key_values_0.0"
    nodes = [*concat(past, "cat_1"), helper.make_node("Identity", [past], ["copy"])]
    path = model(tmp_path / "m.onnx", nodes, {past: GROWING}, {"cat_1": GROWN, "copy": GROWING})
    topology = resolve(
        read_ports(path), flow=read_cache_flow(path), declared={"hidden_output": "copy"}
    ).topology
    assert topology is not None
    assert topology.kv_outputs == ("cat_1",)
