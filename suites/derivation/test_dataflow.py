"""The second witness: where a past port goes inside the graph, and what that settles or contradicts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from harness.errors import InputError
from harness.package import open_package
from harness.ports import read_ports
from harness.topology.dataflow import read_cache_flow
from harness.topology.resolve import resolve, resolve_package
from harness.topology.spec import Derivation, Outcome, Role

GROWING = ["batch", 2, "past", 16]
GROWN = ["batch", 2, "total", 16]
STATE = ["batch", 64, 3]


def info(name: str, shape: list[Any], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """A port."""
    return helper.make_tensor_value_info(name, kind, shape)


def concat(past: str, present: str) -> list[onnx.NodeProto]:
    """A cache that is appended to."""
    return [helper.make_node("Concat", [past, f"{past}.new"], [present], axis=2)]


def concat_and_slice(past: str, present: str) -> list[onnx.NodeProto]:
    """A window of which the last columns are kept."""
    return [
        helper.make_node("Concat", [past, f"{past}.new"], [f"{past}.all"], axis=2),
        helper.make_node("Slice", [f"{past}.all", "starts", "ends"], [present]),
    ]


def moved_and_cast(past: str, present: str) -> list[onnx.NodeProto]:
    """A cache that changes its layout and dtype on the way, and back."""
    return [
        helper.make_node("Transpose", [past], [f"{past}.t"]),
        helper.make_node("Cast", [f"{past}.t"], [f"{past}.c"], to=TensorProto.FLOAT16),
        helper.make_node("Concat", [f"{past}.c", "new"], [f"{past}.a"], axis=1),
        helper.make_node("Cast", [f"{past}.a"], [f"{past}.d"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", [f"{past}.d"], [present]),
    ]


def decayed(past: str, present: str) -> list[onnx.NodeProto]:
    """One step of a recurrence in plain operators; the state is also read, which leads nowhere."""
    return [
        helper.make_node("Mul", [past, "decay"], [f"{past}.kept"]),
        helper.make_node("MatMul", ["k", "v"], [f"{past}.update"]),
        helper.make_node("Add", [f"{past}.kept", f"{past}.update"], [present]),
        helper.make_node("MatMul", ["q", present], [f"{past}.read"]),
    ]


def scan(past: str, present: str) -> list[onnx.NodeProto]:
    """A recurrence carried by a Scan, whose body updates the state in a way that is not followed."""
    body = helper.make_graph(
        [helper.make_node("MatMul", ["s", "x"], ["t"]), helper.make_node("Identity", ["t"], ["y"])],
        "body",
        [info("s", [4]), info("x", [4])],
        [info("t", [4]), info("y", [4])],
    )
    return [helper.make_node("Scan", [past, "xs"], [present, f"{past}.ys"], body=body, num_scan_inputs=1)]


def loop(past: str, present: str) -> list[onnx.NodeProto]:
    """A value carried by a Loop."""
    body = helper.make_graph(
        [helper.make_node("MatMul", ["s", "w"], ["t"]), helper.make_node("Identity", ["go"], ["on"])],
        "body",
        [info("i", [], TensorProto.INT64), info("go", [], TensorProto.BOOL), info("s", [4])],
        [info("on", [], TensorProto.BOOL), info("t", [4])],
    )
    return [helper.make_node("Loop", ["trips", "", past], [present], body=body)]


def branch(past: str, present: str) -> list[onnx.NodeProto]:
    """A cache captured by one branch of an If, whose other branch makes it anew."""
    then = helper.make_graph(concat(past, "kept"), "then", [], [info("kept", [4])])
    other = helper.make_graph(
        [helper.make_node("Constant", [], ["kept"], value_float=0.0)], "else", [], [info("kept", [4])]
    )
    return [helper.make_node("If", ["cached"], [present], then_branch=then, else_branch=other)]


def attention(operator: str, domain: str, slots: tuple[int, int, int, int]) -> Callable[[str, str], Any]:
    """The key and value slots of an attention operator; `past` and `present` are those of the key."""

    def make(past: str, present: str) -> list[onnx.NodeProto]:
        inputs = [f"x{position}" for position in range(max(slots[0], slots[1]) + 1)]
        outputs = [f"{past}.y{position}" for position in range(max(slots[2], slots[3]) + 1)]
        inputs[slots[0]], outputs[slots[2]] = past, present
        inputs[slots[1]], outputs[slots[3]] = past.replace("key", "value"), present.replace("key", "value")
        return [helper.make_node(operator, inputs, outputs, domain=domain)]

    return make


def state_operator(operator: str, domain: str) -> Callable[[str, str], Any]:
    """An operator that takes a state at position 3 and gives its next value at position 1."""

    def make(past: str, present: str) -> list[onnx.NodeProto]:
        return [helper.make_node(operator, ["a", "b", "c", past], [f"{past}.y", present], domain=domain)]

    return make


WAYS: dict[str, Callable[[str, str], list[onnx.NodeProto]]] = {
    "concat": concat,
    "concat-and-slice": concat_and_slice,
    "moved-and-cast": moved_and_cast,
    "decayed": decayed,
    "scan": scan,
    "loop": loop,
    "if": branch,
    "attention": attention("Attention", "", (4, 5, 1, 2)),
    "grouped-query-attention": attention("GroupQueryAttention", "com.microsoft", (3, 4, 1, 2)),
    "multi-head-attention": attention("MultiHeadAttention", "com.microsoft", (6, 7, 1, 2)),
    "linear-attention": state_operator("LinearAttention", "com.microsoft"),
    "causal-conv": state_operator("CausalConvWithState", ""),
    "tensor-scatter": lambda past, present: [
        helper.make_node("TensorScatter", [past, "new", "where"], [present])
    ],
}


def model(
    path: Path,
    nodes: list[onnx.NodeProto],
    pasts: dict[str, list[Any]],
    presents: dict[str, list[Any]],
    functions: tuple[onnx.FunctionProto, ...] = (),
) -> Path:
    """A decoder with these caches, whose other nodes read them all and give the logits."""
    read = helper.make_node("MatMul", [next(iter(pasts)), "w"], ["hidden"])
    for past in pasts:
        nodes = [*nodes, helper.make_node("MatMul", ["hidden", past], ["hidden"])]
    graph = helper.make_graph(
        [read, *nodes, helper.make_node("MatMul", ["hidden", "head"], ["logits"])],
        "decoder",
        [info("input_ids", ["batch", "s"], TensorProto.INT64), *(info(n, s) for n, s in pasts.items())],
        [info("logits", ["batch", "s", 1000]), *(info(name, shape) for name, shape in presents.items())],
    )
    path.write_bytes(helper.make_model(graph, functions=functions).SerializeToString())
    return path


def derive(path: Path) -> Derivation:
    """Derive a graph with both witnesses."""
    return resolve(read_ports(path), flow=read_cache_flow(path))


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_keeping_a_cache_is_followed(tmp_path: Path, way: str) -> None:
    """Two layers of it, and each past port reaches its own present port and no other."""
    names = {f"past.{layer}.key": f"present.{layer}.key" for layer in range(2)}
    nodes = [node for past, present in names.items() for node in WAYS[way](past, present)]
    path = model(
        tmp_path / "m.onnx",
        nodes,
        {name: GROWING for past in names for name in (past, past.replace("key", "value"))},
        {name: GROWN for present in names.values() for name in (present, present.replace("key", "value"))},
    )
    flow = read_cache_flow(path)
    for past, present in names.items():
        assert [reached.output for reached in flow.reached(past)] == [present]


def test_reading_a_cache_leads_nowhere(tmp_path: Path) -> None:
    """Logits depend on every cache, and no cache reaches them: products and reductions end the way."""
    nodes = [helper.make_node("ReduceSum", ["past.0.key"], ["logit_bias"])]
    path = model(tmp_path / "m.onnx", nodes, {"past.0.key": GROWING}, {"logit_bias": GROWN})
    assert read_cache_flow(path).reached("past.0.key") == ()
    assert read_cache_flow(path).reached("nobody") == ()


@pytest.mark.parametrize(("attributes", "kept"), [({"num_scan_inputs": 1}, False), ({}, True)])
def test_what_a_scan_goes_through_piece_by_piece_is_not_kept(
    tmp_path: Path, attributes: dict[str, int], kept: bool
) -> None:
    """The last inputs of a Scan are sequences; only those before them are states, carried to the outputs."""
    body = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "body", [info("x", [4])], [info("y", [4])]
    )
    node = helper.make_node("Scan", ["past.0.ssm"], ["present.0.ssm"], body=body, **attributes)
    path = model(tmp_path / "m.onnx", [node], {"past.0.ssm": STATE}, {"present.0.ssm": STATE})
    found = [(one.output, one.role, one.through) for one in read_cache_flow(path).reached("past.0.ssm")]
    assert found == ([("present.0.ssm", Role.STATE, "Scan")] if kept else [])


def test_a_function_is_followed_inside(tmp_path: Path) -> None:
    """A model-local function that appends is as good as the Concat in it, also through another function."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    append = helper.make_function("local", "append", ["c", "n"], ["o"], concat("c", "o"), opsets)
    outer = helper.make_function(
        "local",
        "outer",
        ["n", "c"],
        ["read", "o"],
        [
            helper.make_node("append", ["c", "n"], ["o"], domain="local"),
            helper.make_node("MatMul", ["o", "n"], ["read"]),
        ],
        opsets,
    )
    nodes = [helper.make_node("outer", ["new", "past.0.key"], ["y", "present.0.key"], domain="local")]
    path = model(
        tmp_path / "m.onnx", nodes, {"past.0.key": GROWING}, {"present.0.key": GROWN}, (append, outer)
    )
    assert [one.output for one in read_cache_flow(path).reached("past.0.key")] == ["present.0.key"]


def test_a_function_that_calls_itself_ends(tmp_path: Path) -> None:
    """Such a model is not valid; reading it still comes to an end, with nothing said about the call."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    call = helper.make_node("f", ["c"], ["o"], domain="local")
    function = helper.make_function("local", "f", ["c"], ["o"], [call], opsets)
    nodes = [helper.make_node("f", ["past.0.key"], ["present.0.key"], domain="local")]
    path = model(tmp_path / "m.onnx", nodes, {"past.0.key": GROWING}, {"present.0.key": GROWN}, (function,))
    assert read_cache_flow(path).reached("past.0.key") == ()


def test_a_chain_of_functions_too_deep_to_follow_is_bad_input(tmp_path: Path) -> None:
    """A thousand functions, each calling the next, is no real model, and must not exhaust the stack."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    functions = tuple(
        helper.make_function(
            "local",
            f"f{i}",
            ["c"],
            ["o"],
            [helper.make_node(f"f{i + 1}", ["c"], ["o"], domain="local")],
            opsets,
        )
        for i in range(1000)
    )
    nodes = [helper.make_node("f0", ["past.0.key"], ["present.0.key"], domain="local")]
    path = model(tmp_path / "m.onnx", nodes, {"past.0.key": GROWING}, {"present.0.key": GROWN}, functions)
    with pytest.raises(InputError, match="nested"):
        read_cache_flow(path)


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


def test_branching_ways_do_not_multiply(tmp_path: Path) -> None:
    """Sixty diamonds in a row have two to the sixtieth ways through them; each value is met once."""
    nodes = []
    value = "past.0.key"
    for number in range(60):
        sides = [f"a{number}", f"b{number}"]
        nodes += [helper.make_node("Identity", [value], [side]) for side in sides]
        value = f"v{number}"
        nodes.append(helper.make_node("Concat", sides, [value], axis=0))
    nodes.append(helper.make_node("Identity", [value], ["present.0.key"]))
    path = model(tmp_path / "m.onnx", nodes, {"past.0.key": GROWING}, {"present.0.key": GROWN})
    assert [one.output for one in read_cache_flow(path).reached("past.0.key")] == ["present.0.key"]
