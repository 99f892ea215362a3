"""The second witness: where a past port goes inside the graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from fixtures.flows import GROWING, GROWN, STATE, concat, info, model
from harness.errors import InputError
from harness.topology.dataflow import CacheFlow, read_cache_flow
from harness.topology.spec import Role


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


def recurrent(operator: str, domain: str = "") -> Callable[[str, str], Any]:
    """A recurrent network's `initial_h` and `Y_h`."""

    def make(past: str, present: str) -> list[onnx.NodeProto]:
        return [
            helper.make_node(operator, ["x", "w", "r", "", "", past], [f"{past}.y", present], domain=domain)
        ]

    return make


def cell(operator: str, domain: str = "") -> Callable[[str, str], Any]:
    """A recurrent network's `initial_c` and `Y_c`."""

    def make(past: str, present: str) -> list[onnx.NodeProto]:
        inputs, outputs = ["x", "w", "r", "", "", f"{past}.h", past], ["", f"{past}.yh", present]
        return [helper.make_node(operator, inputs, outputs, domain=domain)]

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
    "rnn": recurrent("RNN"),
    "gru": recurrent("GRU"),
    "lstm": recurrent("LSTM"),
    "lstm-cell": cell("LSTM"),
    "quantised-lstm": recurrent("DynamicQuantizeLSTM", "com.microsoft"),
    "quantised-lstm-cell": cell("DynamicQuantizeLSTM", "com.microsoft"),
    "tensor-scatter": lambda past, present: [
        helper.make_node("TensorScatter", [past, "new", "where"], [present])
    ],
}


SAYS = {
    "attention": Role.KV_KEY,
    "grouped-query-attention": Role.KV_KEY,
    "multi-head-attention": Role.KV_KEY,
    "linear-attention": Role.STATE,
    "causal-conv": Role.STATE,
    "scan": Role.STATE,
    "rnn": Role.STATE,
    "gru": Role.STATE,
    "lstm": Role.STATE,
    "lstm-cell": Role.STATE,
    "quantised-lstm": Role.STATE,
    "quantised-lstm-cell": Role.STATE,
}
"""What the operator says that the cache is, where it does."""


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_keeping_a_cache_is_followed(tmp_path: Path, way: str) -> None:
    """Two layers of it, and each past port reaches its own present port and no other; arithmetic shows."""
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
        found = [(one.output, one.role, one.whole) for one in flow.reached(past)]
        assert found == [(present, SAYS.get(way), way != "decayed")]


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (["chosen", "past.0.key", "new"], ["present.0.key"]),
        (["chosen", "new", "past.0.key"], ["present.0.key"]),
    ],
)
def test_what_is_chosen_by_a_condition_is_kept(tmp_path: Path, inputs: list[str], outputs: list[str]) -> None:
    """Either branch of a Where may hold the cache."""
    assert reached(tmp_path, [helper.make_node("Where", inputs, outputs)]) == [
        ("present.0.key", "Where", True)
    ]


def test_a_condition_is_not_kept_and_neither_is_a_second_operand_of_a_move(tmp_path: Path) -> None:
    """The condition of a Where chooses; the indices of a Gather point."""
    assert reached(tmp_path, [helper.make_node("Where", ["past.0.key", "a", "b"], ["present.0.key"])]) == []
    assert reached(tmp_path, [helper.make_node("Gather", ["a", "past.0.key"], ["present.0.key"])]) == []


@pytest.mark.parametrize("position", [0, 1, 2])
def test_each_part_of_a_split_is_kept(tmp_path: Path, position: int) -> None:
    """A cache may be a slice of a larger one."""
    outputs = ["a", "b", "c"]
    outputs[position] = "present.0.key"
    node = helper.make_node("Split", ["past.0.key"], outputs)
    assert reached(tmp_path, [node]) == [("present.0.key", "Split", True)]


def test_an_operator_of_another_domain_is_another_operator(tmp_path: Path) -> None:
    """What nobody knows keeps nothing, whatever it is called, and its bodies are its own."""
    body = helper.make_graph([identity("past.0.key", "y")], "body", [], [info("y", [4])])
    for operator in ("Concat", "Identity", "If"):
        node = helper.make_node(operator, ["past.0.key"], ["present.0.key"], domain="other", then_branch=body)
        assert reached(tmp_path, [node]) == []


def test_a_loop_that_is_cut_short_is_read(tmp_path: Path) -> None:
    """Fewer outputs than carried values, or no inputs at all: not valid, and still no exception."""
    body = helper.make_graph([], "body", [], [])
    for inputs in ([], ["trips"], ["trips", "", "past.0.key", "past.0.key"]):
        assert reached(tmp_path, [helper.make_node("Loop", inputs, ["x"], body=body)]) == []


def nested(depth: int) -> tuple[onnx.FunctionProto, ...]:
    """Functions that each call the next and before it a small one; the innermost hands the cache on."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1)]
    functions = []
    for level in range(depth):
        small = helper.make_node(f"small{level}", ["c"], ["s"], domain="local")
        inner = helper.make_node(f"f{level + 1}", ["c"], ["o"], domain="local")
        last = level == depth - 1
        body = [small, identity("c", "o") if last else inner]
        functions.append(helper.make_function("local", f"f{level}", ["c"], ["o"], body, opsets))
        leaf = helper.make_function("local", f"small{level}", ["c"], ["s"], [identity("c", "s")], opsets)
        functions += [] if last else [leaf]
    return tuple(functions)


def test_bodies_are_followed_fifty_deep_and_no_deeper(tmp_path: Path) -> None:
    """Deeper than protobuf reads them; what lies beside does not count as depth."""
    path = tmp_path / "m.onnx"
    call = helper.make_node("f0", ["past.0.key"], ["present.0.key"], domain="local")
    for depth in (49, 50):
        model(path, [call], {"past.0.key": GROWING}, {"present.0.key": GROWN}, nested(depth))
        if depth == 49:
            assert [one.output for one in read_cache_flow(path).reached("past.0.key")] == ["present.0.key"]
            continue
        with pytest.raises(InputError) as error:
            read_cache_flow(path)
    assert error.value.message == (
        f"{path} is not a complete ONNX model: graphs and functions nested more than 50 deep."
    )
    assert error.value.next_action == (
        "Export or download the file again; compare its size with the original's."
    )


def test_many_steps_in_few_bytes_are_refused(tmp_path: Path) -> None:
    """A graph may cost what a graph of its size costs: 26,000 tiny nodes may pass, 36,000 may not."""
    path = tmp_path / "m.onnx"
    for count, fits in ((26_000, True), (36_000, False)):
        nodes = (
            onnx.NodeProto(op_type="Identity", input=[f"{n:x}"], output=[f"{n + 1:x}"]) for n in range(count)
        )
        path.write_bytes(onnx.ModelProto(graph=onnx.GraphProto(node=nodes)).SerializeToString())
        if fits:
            assert read_cache_flow(path).reached("0") == ()
            continue
        with pytest.raises(InputError, match="more than a model of its size"):
            read_cache_flow(path)


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


def loop_with_scan_output(past: str, present: str) -> list[onnx.NodeProto]:
    """A Loop that carries another value, and gives what it keeps of a captured one at each turn."""
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["s", "w"], ["t"]),
            helper.make_node("Concat", [past, "s"], ["kept"], axis=0),
        ],
        "body",
        [info("i", [], TensorProto.INT64), info("go", [], TensorProto.BOOL), info("s", [4])],
        [info("go", [], TensorProto.BOOL), info("t", [4]), info("kept", [4])],
    )
    return [helper.make_node("Loop", ["trips", "", "x"], ["xo", present], body=body)]


def scanned(past: str, present: str) -> list[onnx.NodeProto]:
    """A Scan that hands a cache on piece by piece."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "body", [info("x", [4])], [info("y", [4])]
    )
    return [helper.make_node("Scan", [past], [present], body=body, num_scan_inputs=1)]


def branch_of_a_captured_value(past: str, present: str) -> list[onnx.NodeProto]:
    """An If that gives a value of the graph around it as it is, or appends to it."""
    then = helper.make_graph([], "then", [], [info(past, [4])])
    other = helper.make_graph(concat(past, "kept"), "else", [], [info("kept", [4])])
    return [helper.make_node("If", ["cached"], [present], then_branch=then, else_branch=other)]


SUBGRAPHS: dict[str, tuple[Callable[[str, str], list[onnx.NodeProto]], str]] = {
    "loop": (loop_with_scan_output, "Concat"),
    "scan": (scanned, "Scan"),
    "if": (branch_of_a_captured_value, "If"),
}


@pytest.mark.parametrize("name", SUBGRAPHS)
def test_values_enter_and_leave_the_bodies_of_control_flow(tmp_path: Path, name: str) -> None:
    """By position, a Loop's condition aside; the first operator that keeps the cache is the evidence."""
    make, through = SUBGRAPHS[name]
    path = model(
        tmp_path / "m.onnx",
        make("past.0.key", "present.0.key"),
        {"past.0.key": GROWING},
        {"present.0.key": GROWN, "xo": GROWN},
    )
    found = read_cache_flow(path).reached("past.0.key")
    assert [(one.output, one.role, one.whole) for one in found] == [("present.0.key", None, True)]
    assert found[0].through in (through, "Concat")


@pytest.mark.parametrize("operator", ["Scan", "If", "Loop"])
def test_bodies_with_other_ports_than_their_node_are_read(tmp_path: Path, operator: str) -> None:
    """Such a model is not valid, and saying so is not the reader's business: it goes as far as both agree."""
    ports = [info(name, [4]) for name in ("a", "b", "c", "d")]
    body = helper.make_graph(
        [helper.make_node("Identity", ["a"], ["e"])], "body", ports, [*ports, info("e", [4])]
    )
    key = "then_branch" if operator == "If" else "body"
    node = helper.make_node(operator, ["past.0.key"], ["y"], **{key: body})
    path = model(tmp_path / "m.onnx", [node], {"past.0.key": GROWING}, {"present.0.key": GROWN})
    assert read_cache_flow(path).reached("past.0.key") == ()


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


def identity(source: str, target: str) -> onnx.NodeProto:
    """A node that hands a value on."""
    return helper.make_node("Identity", [source], [target])


def reached(path: Path, nodes: list[onnx.NodeProto]) -> list[tuple[str, str, bool]]:
    """Where `past.0.key` goes: outputs, through what, and whether as a whole."""
    path = model(path / "m.onnx", nodes, {"past.0.key": GROWING}, {"present.0.key": GROWN})
    return [(one.output, one.through, one.whole) for one in read_cache_flow(path).reached("past.0.key")]


def test_a_value_that_is_met_twice_hides_no_other(tmp_path: Path) -> None:
    """The walk goes on with what is left, also after a value that it has seen."""
    twice = helper.make_node("Concat", ["past.0.key", "past.0.key"], ["twice"], axis=0)
    nodes = [identity("past.0.key", "present.0.key"), twice]
    assert reached(tmp_path, nodes) == [("present.0.key", "Identity", True)]


def test_the_best_way_to_a_value_counts(tmp_path: Path) -> None:
    """Where a value is kept as a whole and computed with as well, it is kept."""
    nodes = [
        identity("past.0.key", "y"),
        helper.make_node("Mul", ["past.0.key", "w"], ["z"]),
        helper.make_node("Concat", ["y", "z"], ["present.0.key"], axis=0),
    ]
    assert reached(tmp_path, nodes) == [("present.0.key", "Identity", True)]


def test_the_evidence_is_the_operator_that_says_what_it_keeps_or_the_first(tmp_path: Path) -> None:
    """A cast before an attention operator is not what makes it a cache."""
    cast = helper.make_node("Cast", ["past.0.key"], ["c"], to=TensorProto.FLOAT16)
    attend = helper.make_node(
        "GroupQueryAttention", ["q", "k", "v", "c", "d"], ["y", "p", "o"], domain="com.microsoft"
    )
    back = helper.make_node("Cast", ["p"], ["present.0.key"], to=TensorProto.FLOAT)
    assert reached(tmp_path, [cast, attend, back]) == [("present.0.key", "GroupQueryAttention", True)]
    append = helper.make_node("Concat", ["c", "new"], ["present.0.key"], axis=0)
    assert reached(tmp_path, [cast, append]) == [("present.0.key", "Cast", True)]


def test_outputs_that_are_left_out_and_weights_lead_nowhere(tmp_path: Path) -> None:
    """Neither has a value, and no value is not a value that they have in common."""
    body = helper.make_graph(
        [identity("s", "t"), identity("go", "on")],
        "body",
        [info("i", [], TensorProto.INT64), info("go", [], TensorProto.BOOL), info("s", [4])],
        [info("on", [], TensorProto.BOOL), info("t", [4])],
    )
    nodes = [
        identity("past.0.key", ""),
        helper.make_node("Loop", ["trips", "", "weight"], ["present.0.key"], body=body),
    ]
    assert reached(tmp_path, nodes) == []
    assert reached(tmp_path, [identity("past.0.key", ""), identity("", "present.0.key")]) == []


@pytest.mark.parametrize("inputs", [["q", "k", "v"], ["q", "k", "v", "past.0.key"]])
def test_an_operator_without_its_optional_ports_is_read(tmp_path: Path, inputs: list[str]) -> None:
    """Attention has no cache where its slots are left out."""
    outputs = ["y", "present.0.key"] if len(inputs) == 3 else ["y"]
    node = helper.make_node("GroupQueryAttention", inputs, outputs, domain="com.microsoft")
    assert reached(tmp_path, [node]) == []


def chain(caches: int, length: int, *, joined: bool) -> CacheFlow:
    """Caches that are handed on many times, each on its own way or all on one."""
    flow = CacheFlow([f"i{cache}" for cache in range(caches)], [f"o{cache}" for cache in range(caches)])
    ways = [
        [flow.define(flow.scope, f"v{cache}.{step}") for step in range(length)] for cache in range(caches)
    ]
    for cache in range(caches):
        way = ways[0] if joined else ways[cache]
        flow.step(flow.scope[f"i{cache}"], way[0], None, "Identity")
        if cache == 0 or not joined:
            for one, next_one in itertools.pairwise(way):
                flow.step(one, next_one, None, "Identity")
        flow.step(way[-1], flow.define(flow.scope, f"o{cache}"), None, "Identity")
    flow.close()
    return flow


def test_weights_are_looked_for_only_where_an_output_needs_one() -> None:
    """An output that a node or an input gives needs none; one that neither gives must be a weight."""
    asked: list[frozenset[str]] = []

    def weights(names: frozenset[str]) -> set[str]:
        asked.append(names)
        return {"weight"}

    flow = CacheFlow(["given"], ["given"])
    assert flow.unproduced == frozenset()
    flow.close(weights)
    assert (asked, flow.unproduced) == ([], frozenset())
    flow = CacheFlow(["given"], ["given", "weight", "nothing"])
    flow.close(weights)
    assert (asked, flow.unproduced) == ([{"weight", "nothing"}], {"nothing"})


def test_long_ways_of_many_caches_are_walked_to_their_ends() -> None:
    """More steps in all than any fixed bound would allow: what each cache costs is its own."""
    flow = chain(60, 2_000, joined=False)
    assert [[one.output for one in flow.reached(f"i{cache}")] for cache in range(60)] == [
        [f"o{cache}"] for cache in range(60)
    ]


@pytest.mark.parametrize(("length", "answered"), [(1_000, 119), (369, 291)])
def test_walks_take_twenty_times_the_steps_and_a_hundred_thousand(length: int, answered: int) -> None:
    """A chain is walked again and again, until the walk that would end with the last of these steps.

    120,000 steps are 120 times a chain of 1,000; 107,380 are 291 times a chain of 369 and one more.
    """
    flow = chain(1, length - 1, joined=False)
    found = [flow.reached("i0") for _ in range(answered + 3)]
    assert [bool(one) for one in found] == [True] * answered + [False] * 3


def test_ways_that_meet_in_a_graph_made_for_it_end_in_silence() -> None:
    """Six hundred caches through one chain of six hundred: twenty times the steps there are, and no more."""
    flow = chain(600, 600, joined=True)
    assert len(flow.reached("i0")) == 600
    assert [flow.reached(f"i{cache}") for cache in range(1, 600)][-1] == ()
    assert flow.reached("i0") == ()


def keeping(kept: dict[str, str]) -> onnx.FunctionProto:
    """A function in the place of GroupQueryAttention, which appends to each past what gives that present."""
    body = [
        helper.make_node("Identity", ["q"], ["o"]),
        *(node for past, present in kept.items() for node in concat(past, present)),
    ]
    return helper.make_function(
        "com.microsoft",
        "GroupQueryAttention",
        ["q", "k", "v", "past_k", "past_v"],
        ["o", "present_k", "present_v"],
        body,
        [helper.make_opsetid("", 21)],
    )


@pytest.mark.parametrize(
    ("kept", "found"),
    [
        ({"past_k": "present_k", "past_v": "present_v"}, [("present.0.key", Role.KV_KEY)]),
        ({"past_v": "present_k", "past_k": "present_v"}, [("present.0.value", None)]),
        ({"past_v": "present_v"}, []),
    ],
)
def test_a_function_takes_the_place_of_the_operator_of_its_name(
    tmp_path: Path, kept: dict[str, str], found: list[tuple[str, Role | None]]
) -> None:
    """What the model defines is what runs; in the operator's own slots it is what the operator says."""
    names = ("past.0.key", "past.0.value"), ("present.0.key", "present.0.value")
    node = helper.make_node(
        "GroupQueryAttention", ["q", "k", "v", *names[0]], ["y", *names[1]], domain="com.microsoft"
    )
    pasts, presents = dict.fromkeys(names[0], GROWING), dict.fromkeys(names[1], GROWN)
    flow = read_cache_flow(model(tmp_path / "m.onnx", [node], pasts, presents, (keeping(kept),)))
    assert [(one.output, one.role) for one in flow.reached("past.0.key")] == found


def test_a_function_takes_the_place_of_a_standard_operator(tmp_path: Path) -> None:
    """Also of one that hands a value on, and of one with bodies: both lead only where the function does."""
    nothing = [helper.make_node("MatMul", ["c", "c"], ["o"])]
    opsets = [helper.make_opsetid("", 21)]
    branch_body = helper.make_graph([identity("past.0.key", "kept")], "then", [], [info("kept", [4])])
    for operator, graphs in (("Identity", {}), ("If", {"then_branch": branch_body})):
        function = helper.make_function("", operator, ["c"], ["o"], nothing, opsets)
        node = helper.make_node(operator, ["past.0.key"], ["present.0.key"], **graphs)
        path = model(
            tmp_path / "m.onnx", [node], {"past.0.key": GROWING}, {"present.0.key": GROWN}, (function,)
        )
        assert read_cache_flow(path).reached("past.0.key") == ()
