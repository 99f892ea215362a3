from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from fixtures.effort import examples
from harness.errors import EngineFailedError, InputError
from harness.oracle import OracleModel
from harness.oracle.kernels.elementwise import erf

node = helper.make_node


def value(name: str, dtype: int = TensorProto.FLOAT, shape: Sequence[Any] | None = None) -> Any:
    """A port; without a shape not even its rank is declared."""
    return helper.make_tensor_value_info(name, dtype, shape)


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    weights: dict[str, np.ndarray] | None = None,
    *,
    functions: Sequence[onnx.FunctionProto] = (),
    domains: Sequence[str] = (),
) -> Path:
    """A graph of opset 24; returns the path of its file."""
    initializers = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 24), *(helper.make_opsetid(domain, 1) for domain in domains)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10), path)
    return path


# --- what runs, and when values die


SIZE = 1 << 15
"""Bytes of one value in the tests of memory: far above Python's own bookkeeping."""


@settings(deadline=None, max_examples=examples(25))
@given(data=st.data())
def test_no_more_values_live_than_later_nodes_need(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The peak of memory is what liveness alone asks for, on any graph of additions.

    The expectation is computed here, from the definition: after node i those values live that a later node
    or an output reads; while it runs its operands and its result do.
    """
    count = data.draw(st.integers(3, 25))
    operands = [
        (data.draw(st.integers(max(0, i - 6), i)), data.draw(st.integers(max(0, i - 6), i)))
        for i in range(count)
    ]
    nodes = [node("Add", [f"v{a}", f"v{b}"], [f"v{i + 1}"]) for i, (a, b) in enumerate(operands)]
    path = save(
        tmp_path_factory.mktemp("live") / "m.onnx", nodes, [value("v0", shape=["n"])], [value(f"v{count}")]
    )
    needed = {count}
    for i in reversed(range(count)):
        if i + 1 in needed:
            needed.update(operands[i])
    last_use = {
        v: max((i for i, ab in enumerate(operands) if v in ab and i + 1 in needed), default=-1)
        for v in needed
    }
    last_use[count] = count
    most = 0
    for i in sorted(i for i in range(count) if i + 1 in needed):
        # v0 is the caller's own.
        most = max(most, sum(1 for v in needed if 0 < v <= i + 1 and last_use[v] >= i))

    model = OracleModel.load(path)
    feed = np.ones(SIZE // 4, np.float32)
    model.run({"v0": feed}, [f"v{count}"])
    tracemalloc.start()
    model.run({"v0": feed}, [f"v{count}"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (most - 0.5) * SIZE <= peak <= (most + 0.5) * SIZE


def test_only_what_the_wanted_outputs_need_is_computed_and_fed(tmp_path: Path) -> None:
    """A branch that would fail does no harm while nobody asks for it, and its input need not be fed."""
    path = save(
        tmp_path / "m.onnx",
        [node("Neg", ["x"], ["good"]), node("Reshape", ["y", "shape"], ["bad"], name="the_reshape")],
        [value("x", shape=["n"]), value("y", shape=["n"])],
        [value("good"), value("bad")],
        {"shape": np.array([7])},
    )
    model = OracleModel.load(path)
    x = np.ones(3, np.float32)

    np.testing.assert_array_equal(model.run({"x": x}, ["good"])["good"], -x)
    with pytest.raises(EngineFailedError, match="Reshape the_reshape") as caught:
        model.run({"y": x}, ["bad"])
    assert caught.value.kind == "crashed"
    with pytest.raises(InputError, match="Input y is not fed"):
        model.run({"x": x}, ["good", "bad"])


@pytest.mark.parametrize("tokens", [1, 5, 100])
def test_products_of_one_value_are_carried_out_together(tokens: int, tmp_path: Path) -> None:
    """Query, key and value as one instruction give what each gives alone; other products stay by themselves.

    Expected are the products in float64, within the rounding of sums of 96 float32 products.
    """
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((96, n)).astype(np.float32) for name, n in (("q", 96), ("k", 32))}
    weights |= {"o": rng.standard_normal((96, 8)).astype(np.float32), "bias": np.ones(32, np.float32)}
    path = save(
        tmp_path / "m.onnx",
        [
            node("MatMul", ["x", "q"], ["xq"]),
            node("Relu", ["xq"], ["relu"]),
            node("Gemm", ["x", "k", "bias"], ["biased"]),
            node("MatMul", ["x", "k"], ["xk"]),
            node("MatMul", ["relu", "o"], ["y"]),
        ],
        [value("x", shape=[tokens, 96])],
        [value(name) for name in ("y", "biased", "xk")],
        weights,
    )
    model = OracleModel.load(path)
    x = rng.standard_normal((tokens, 96)).astype(np.float32)
    wide = {name: array.astype(np.float64) for name, array in weights.items()}
    relu = np.maximum(x @ wide["q"], 0)
    expected = {"y": relu @ wide["o"], "biased": x @ wide["k"] + 1, "xk": x @ wide["k"]}
    for wanted in (["y", "biased", "xk"], ["xk"], ["y"]):
        for name, array in model.run({"x": x}, wanted).items():
            assert np.abs(array - expected[name]).max() <= 96 * 2**-23 * 100
    together = model._body.program(model._body.outputs, gathered=True)
    assert len(together.instructions) == len(model._body.steps) - 1


def test_of_products_carried_out_together_the_one_that_overflows_is_named(tmp_path: Path) -> None:
    """Looking for where infinities come from goes node by node."""
    weights = {"a": np.ones((4, 4), np.float32), "b": np.full((4, 4), 3e38, np.float32)}
    path = save(
        tmp_path / "m.onnx",
        [node("MatMul", ["x", "a"], ["xa"], name="small"), node("MatMul", ["x", "b"], ["xb"], name="large")],
        [value("x", shape=[2, 4])],
        [value("xa"), value("xb")],
        weights,
    )
    feeds = {"x": np.ones((2, 4), np.float32)}
    model = OracleModel.load(path)
    assert np.isinf(model.run(feeds, ["xa", "xb"])["xb"]).all()
    assert "large" in str(model.first_non_finite(feeds, ["xa", "xb"]))


def test_nodes_out_of_order_run_in_the_order_of_their_values(tmp_path: Path) -> None:
    """A node may stand before what it reads, also when only its subgraph reads it."""
    branch = {
        name: helper.make_graph([node(op, ["late"], ["b"])], name, [], [value("b")])
        for name, op in (("then_branch", "Identity"), ("else_branch", "Neg"))
    }
    path = save(
        tmp_path / "m.onnx",
        [
            node("If", ["flag"], ["y"], **branch),
            node("Add", ["mid", "x"], ["late"]),
            node("Neg", ["x"], ["mid"]),
        ],
        [value("x", shape=["n"]), value("flag", TensorProto.BOOL, [])],
        [value("y")],
    )
    y = OracleModel.load(path).run({"x": np.ones(2, np.float32), "flag": np.array(True)}, ["y"])["y"]
    np.testing.assert_array_equal(y, [0, 0])


def test_a_circle_is_refused_by_the_names_of_its_nodes(tmp_path: Path) -> None:
    """Nodes that wait for each other cannot be put in order."""
    nodes = [node("Add", ["x", "b"], ["a"], name="one"), node("Neg", ["a"], ["b"], name="two")]
    path = save(tmp_path / "m.onnx", nodes, [value("x", shape=["n"])], [value("a")])
    with pytest.raises(InputError, match=r"circle: of the nodes one, two each waits"):
        OracleModel.load(path)


def test_a_value_that_nothing_produces_is_named(tmp_path: Path) -> None:
    """A dangling name is one clear error at load."""
    path = save(tmp_path / "m.onnx", [node("Neg", ["nowhere"], ["y"], name="n")], [], [value("y")])
    with pytest.raises(InputError, match=r"Value nowhere is read by n, but no node"):
        OracleModel.load(path)


# --- subgraphs and functions


def test_subgraphs_see_values_of_all_graphs_around_them(tmp_path: Path) -> None:
    """A Scan in an If in the main graph reads inputs, weights and values of each level."""
    body = helper.make_graph(
        [
            node("Add", ["state", "item"], ["sum"]),
            node("Mul", ["sum", "doubled"], ["scaled"]),  # of the branch
            node("Add", ["scaled", "bias"], ["next"]),  # a weight of the main graph
            node("Add", ["next", "x0"], ["out"]),  # an input of the main graph
        ],
        "body",
        [value("state"), value("item")],
        [value("next", shape=[]), value("out", shape=[])],
    )
    then_branch = helper.make_graph(
        [
            node("Add", ["x0", "x0"], ["doubled"]),
            node("Scan", ["x0", "items"], ["last", "all"], body=body, num_scan_inputs=1),
        ],
        "then",
        [],
        [value("all")],
    )
    else_branch = helper.make_graph([node("Neg", ["items"], ["negated"])], "else", [], [value("negated")])
    path = save(
        tmp_path / "m.onnx",
        [node("If", ["flag"], ["y"], then_branch=then_branch, else_branch=else_branch)],
        [value("flag", TensorProto.BOOL, []), value("x0", shape=[]), value("items", shape=["n"])],
        [value("y")],
        {"bias": np.float32(0.5)},
    )
    model = OracleModel.load(path)
    x0, items = np.array(0.25, np.float32), np.array([1, 2, 3], np.float32)
    state, expected = x0, []
    for item in items:
        state = (state + item) * (2 * x0) + np.float32(0.5)
        expected.append(state + x0)

    yes = model.run({"flag": np.array(True), "x0": x0, "items": items}, ["y"])["y"]
    no = model.run({"flag": np.array(False), "x0": x0, "items": items}, ["y"])["y"]

    np.testing.assert_array_equal(yes, expected)
    np.testing.assert_array_equal(no, -items)


@pytest.mark.parametrize(("limit", "until"), [(5, 100.0), (100, 6.0), (0, 100.0), (None, 6.0)])
def test_a_loop_ends_by_its_count_or_its_condition(limit: int | None, until: float, tmp_path: Path) -> None:
    """States, stacked items and the number of iterations, for either way to end and for none at all."""
    body = helper.make_graph(
        [
            node("Add", ["state", "step"], ["next"]),
            node("Less", ["next", "until"], ["go_on"]),
            node("Unsqueeze", ["next", "zero"], ["item"]),
        ],
        "body",
        [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("state", shape=[])],
        [value("go_on", TensorProto.BOOL, []), value("next", shape=[]), value("item", shape=[1])],
    )
    inputs = [value("until", shape=[]), value("start", shape=[])]
    if limit is not None:
        inputs.append(value("limit", TensorProto.INT64, []))
    path = save(
        tmp_path / "m.onnx",
        [node("Loop", ["limit" if limit is not None else "", "", "start"], ["last", "items"], body=body)],
        inputs,
        [value("last"), value("items")],
        {"step": np.float32(1.5), "zero": np.array([0])},
    )
    feeds = {"until": np.array(until, np.float32), "start": np.array(0, np.float32)}
    if limit is not None:
        feeds["limit"] = np.array(limit)
    results = OracleModel.load(path).run(feeds, ["last", "items"])

    values = []
    while (limit is None or len(values) < limit) and (not values or values[-1] < until):
        values.append((values[-1] if values else 0.0) + 1.5)
    assert results["last"] == (values[-1] if values else 0.0)
    np.testing.assert_array_equal(results["items"], np.float32(values).reshape(-1, 1))


def test_a_scan_over_nothing_gives_nothing_of_the_declared_rank(tmp_path: Path) -> None:
    """Zero steps keep the states; outputs have extent 0 along the scan axis, the rest as declared."""
    body = helper.make_graph(
        [node("Identity", ["state"], ["same"]), node("Identity", ["item"], ["out"])],
        "body",
        [value("state"), value("item")],
        [value("same"), value("out", shape=[2, 3])],
    )
    path = save(
        tmp_path / "m.onnx",
        [node("Scan", ["s", "x"], ["last", "all"], body=body, num_scan_inputs=1, scan_output_axes=[1])],
        [value("s", shape=[2]), value("x", shape=["n", 2, 3])],
        [value("last"), value("all")],
    )
    s = np.ones(2, np.float32)
    results = OracleModel.load(path).run({"s": s, "x": np.zeros((0, 2, 3), np.float32)}, ["last", "all"])
    np.testing.assert_array_equal(results["last"], s)
    assert results["all"].shape == (2, 0, 3)


def test_functions_resolve_attributes_defaults_and_absent_inputs(tmp_path: Path) -> None:
    """A function in a function: attributes by reference and by default, an input left out, shared names."""
    clip = helper.make_function(
        "own",
        "Bounded",
        ["x", "low", "high"],
        ["y"],
        [node("Clip", ["x", "low", "high"], ["y"])],
        [helper.make_opsetid("", 24)],
    )
    leaky = helper.make_function(
        "own",
        "Leaky",
        ["x", "low"],
        ["y"],
        [node("LeakyRelu", ["x"], ["t"]), node("Bounded", ["t", "low"], ["y"], domain="own")],
        [helper.make_opsetid("", 24), helper.make_opsetid("own", 1)],
        attributes=["alpha"],
        attribute_protos=[helper.make_attribute("unused", 1.0)],
    )
    reference = leaky.node[0].attribute.add()
    reference.name, reference.ref_attr_name, reference.type = "alpha", "alpha", onnx.AttributeProto.FLOAT
    path = save(
        tmp_path / "m.onnx",
        [
            node("Neg", ["x"], ["t"]),
            node("Leaky", ["t", "floor"], ["a"], domain="own", alpha=0.5),
            node("Leaky", ["t"], ["b"], domain="own"),
        ],
        [value("x", shape=["n"])],
        [value("a"), value("b")],
        {"floor": np.float32(-1)},
        functions=[leaky, clip],
        domains=["own"],
    )
    x = np.array([-2, 0, 1, 8], np.float32)
    results = OracleModel.load(path).run({"x": x}, ["a", "b"])
    np.testing.assert_array_equal(results["a"], np.float32([2, 0, -0.5, -1]))
    np.testing.assert_array_equal(results["b"], np.where(-x < 0, -x * 0.01, -x).astype(np.float32))


def test_functions_that_call_themselves_are_refused(tmp_path: Path) -> None:
    """A circle of functions has no end to inline to."""
    opsets = [helper.make_opsetid("own", 1)]
    first = helper.make_function(
        "own", "First", ["x"], ["y"], [node("Second", ["x"], ["y"], domain="own")], opsets
    )
    second = helper.make_function(
        "own", "Second", ["x"], ["y"], [node("First", ["x"], ["y"], domain="own")], opsets
    )
    path = save(
        tmp_path / "m.onnx",
        [node("First", ["x"], ["y"], domain="own")],
        [value("x", shape=["n"])],
        [value("y")],
        functions=[first, second],
        domains=["own"],
    )
    with pytest.raises(InputError, match=r"own\.First, own\.Second of m\.onnx call each other in a circle"):
        OracleModel.load(path)


def calls(count: int, name: str, x: str = "x", y: str = "y") -> list[onnx.NodeProto]:
    """`count` calls of a function of the domain `own`, one after the other."""
    names = [x, *(f"t{i}" for i in range(count - 1)), y]
    return [node(name, [names[i]], [names[i + 1]], domain="own") for i in range(count)]


def model_of_functions(
    path: Path, bodies: dict[str, list[onnx.NodeProto]], first: str, times: int = 1
) -> Path:
    """A graph that calls the function `first`, of functions x -> y by name."""
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("own", 1)]
    functions = [
        helper.make_function("own", name, ["x"], ["y"], body, opsets) for name, body in bodies.items()
    ]
    return save(
        path,
        calls(times, first),
        [value("x", shape=["n"])],
        [value("y")],
        functions=functions,
        domains=["own"],
    )


def in_branch(nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """An If whose branches both hold these nodes, from x to y."""
    branch = helper.make_graph(nodes, "branch", [], [value("y")])
    return [
        node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True))),
        node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch),
    ]


@pytest.mark.parametrize("place", ["in the open", "in branches"])
def test_functions_that_multiply_are_refused_before_memory_is_taken(place: str, tmp_path: Path) -> None:
    """Each calls the next twice, 2^40 nodes in all: counted, not inlined, and refused with the limit."""
    around = in_branch if place == "in branches" else list
    depth = 40 if place == "in the open" else 20
    bodies = {f"f{i}": around(calls(2, f"f{i + 1}")) for i in range(depth)}
    bodies[f"f{depth}"] = [node("Neg", ["x"], ["y"])]
    path = model_of_functions(tmp_path / "m.onnx", bodies, "f0")
    tracemalloc.start()
    with pytest.raises(
        InputError, match=r"Function own\.f0 of m\.onnx, which node f0\(y\) calls, .* at most 262,144 nodes"
    ):
        OracleModel.load(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 << 20


def test_the_limit_counts_what_is_inlined_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls of a function of 4 + 2 * 3 nodes: 30, of which a limit of 29 refuses the last call."""
    bodies = {
        "outer": [*calls(2, "inner", y="t"), node("Abs", ["t"], ["u"]), node("Neg", ["u"], ["y"])],
        "inner": [node("Neg", ["x"], ["a"]), node("Abs", ["a"], ["b"]), node("Neg", ["b"], ["y"])],
    }
    path = model_of_functions(tmp_path / "m.onnx", bodies, "outer", times=3)
    monkeypatch.setattr("harness.oracle.functions._MOST_NODES", 30)
    x = np.array([2, -3], np.float32)
    np.testing.assert_array_equal(OracleModel.load(path).run({"x": x}, ["y"])["y"], np.float32([-2, -3]))
    monkeypatch.setattr("harness.oracle.functions._MOST_NODES", 29)
    with pytest.raises(InputError, match=r"own\.outer .* which node outer\(y\) calls, comes to 10 nodes"):
        OracleModel.load(path)


@pytest.mark.parametrize("depth", [50, 51, 5000])
def test_functions_are_inlined_to_a_depth(depth: int, tmp_path: Path) -> None:
    """A chain as deep as the limit is computed; a longer one is refused, however long it is."""
    bodies = {f"f{i}": calls(1, f"f{i + 1}") for i in range(depth - 1)}
    bodies[f"f{depth - 1}"] = [node("Neg", ["x"], ["y"])]
    path = model_of_functions(tmp_path / "m.onnx", bodies, "f0")
    if depth == 50:
        x = np.array([2, -3], np.float32)
        np.testing.assert_array_equal(OracleModel.load(path).run({"x": x}, ["y"])["y"], -x)
    else:
        with pytest.raises(InputError, match=r"Function own\.f\d+ of m\.onnx lies in .* more than 50 deep"):
            OracleModel.load(path)


def skip_norm_function() -> onnx.FunctionProto:
    """SkipSimplifiedLayerNormalization (three inputs) in standard operators."""
    rms = node("RMSNormalization", ["sum", "gamma"], ["y"], axis=-1)
    reference = rms.attribute.add()
    reference.name, reference.ref_attr_name, reference.type = "epsilon", "epsilon", onnx.AttributeProto.FLOAT
    return helper.make_function(
        "com.microsoft",
        "SkipSimplifiedLayerNormalization",
        ["x", "skip", "gamma"],
        ["y", "mean", "inverse", "sum"],
        [
            node("Add", ["x", "skip"], ["sum"]),
            rms,
            node("Constant", [], ["mean"], value_float=0.0),
            node("Constant", [], ["inverse"], value_float=0.0),
        ],
        [helper.make_opsetid("", 24)],
        attributes=["epsilon"],
    )


def test_a_native_kernel_computes_what_the_function_body_says(tmp_path: Path) -> None:
    """A model-local function with a native kernel gives the same natively and inlined; both really ran."""
    path = save(
        tmp_path / "m.onnx",
        [
            node(
                "SkipSimplifiedLayerNormalization",
                ["x", "skip", "gamma"],
                ["y", "", "", "sum"],
                domain="com.microsoft",
                epsilon=0.125,
            )
        ],
        [value("x", shape=["n", 8]), value("skip", shape=["n", 8])],
        [value("y"), value("sum")],
        {"gamma": np.linspace(1, 2, 8, dtype=np.float32)},
        functions=[skip_norm_function()],
        domains=["com.microsoft"],
    )
    random = np.random.RandomState(3)
    feeds = {name: random.standard_normal((4, 8)).astype(np.float32) for name in ("x", "skip")}
    native, inlined = (OracleModel.load(path, inline_functions=inline) for inline in (False, True))
    assert (len(native._body.steps), len(inlined._body.steps)) == (1, 2)
    for name, want in inlined.run(feeds, ["y", "sum"]).items():
        np.testing.assert_allclose(native.run(feeds, ["y", "sum"])[name], want, rtol=1e-6)


def negation(domain: str, name: str, overload: str = "") -> onnx.FunctionProto:
    """A function that computes -x, whatever its name says."""
    opsets = [helper.make_opsetid("", 24)]
    return helper.make_function(
        domain, name, ["x"], ["y"], [node("Neg", ["x"], ["y"])], opsets, overload=overload
    )


@pytest.mark.parametrize("nested", [False, True])
def test_a_function_in_the_place_of_a_standard_operator_is_refused(nested: bool, tmp_path: Path) -> None:
    """ONNX leaves open which of them a node means; one that no node names says nothing."""
    functions = [negation("", "Relu"), negation("own", "Twice")]
    if nested:
        functions[1].node[0].op_type = "Relu"
    for called in ("Neg", "Twice" if nested else "Relu"):
        path = save(
            tmp_path / "m.onnx",
            [node(called, ["x"], ["y"], domain="own" if called == "Twice" else "")],
            [value("x", shape=[2])],
            [value("y")],
            functions=functions,
            domains=["own"],
        )
        if called == "Neg":
            got = OracleModel.load(path).run({"x": np.float32([-1, 2])}, ["y"])
            np.testing.assert_array_equal(got["y"], np.float32([1, -2]))
            continue
        with pytest.raises(InputError, match=r"Function ai\.onnx\.Relu of m\.onnx.*leaves open"):
            OracleModel.load(path)


@pytest.mark.parametrize(
    ("domain", "name", "overload", "opset", "inlined"),
    [
        ("own", "Relu", "", 24, True),
        ("", "Relu", "mine", 24, True),
        ("com.microsoft", "Gelu", "mine", 24, True),
        # Not yet an operator: Gelu is one from opset 20 on.
        ("", "Gelu", "", 19, True),
        # ONNX Runtime's own: the same is what ONNX Runtime itself computes.
        ("com.microsoft", "QuickGelu", "", 24, False),
    ],
)
def test_a_node_means_the_function_where_no_operator_has_its_name(
    domain: str, name: str, overload: str, opset: int, inlined: bool, tmp_path: Path
) -> None:
    """By domain, name and overload; operators have no overloads."""
    call = node(name, ["x"], ["y"], domain=domain)
    call.overload = overload
    graph = helper.make_graph([call], "g", [value("x", shape=[2])], [value("y", shape=[2])])
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    model = helper.make_model(
        graph, opset_imports=opsets, functions=[negation(domain, name, overload)], ir_version=10
    )
    onnx.save(model, tmp_path / "m.onnx")
    x = np.float32([-1, 2])
    got = OracleModel.load(tmp_path / "m.onnx").run({"x": x}, ["y"])["y"]
    if inlined:
        np.testing.assert_array_equal(got, -x)
        return
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(got, session.run(None, {"x": x})[0], rtol=1e-6)


def test_an_overload_that_the_model_lacks_is_no_operator(tmp_path: Path) -> None:
    """A kernel of that name computes the operator, not the overload."""
    call = node("Relu", ["x"], ["y"])
    call.overload = "mine"
    path = save(tmp_path / "m.onnx", [call], [value("x", shape=[2])], [value("y")])
    with pytest.raises(EngineFailedError, match=r"operator Relu, overload mine, of domain ai\.onnx"):
        OracleModel.load(path)


# --- precision


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("resident", [0, 1 << 30], ids=["widened at each use", "widened once"])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_narrow_floats_are_computed_in_the_oracles_precision(
    dtype: Any, resident: int, precision: Any, tmp_path: Path
) -> None:
    """Narrow ports, weights and casts: the result is that of the wide computation on the same numbers.

    The weight is larger than what is widened regardless of the budget.
    """
    elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    random = np.random.RandomState(1)
    weight = random.uniform(0.5, 1.5, (256, 300)).astype(dtype)
    x = random.uniform(0.5, 1.5, (2, 256)).astype(dtype)
    outputs = ["root", "picked", "turned", "rooted"]
    path = save(
        tmp_path / "m.onnx",
        [
            node("MatMul", ["x", "w"], ["xw"]),
            node("Cast", ["xw"], ["narrow"], to=elem_type),
            node("Sqrt", ["narrow"], ["root"]),
            node("Gather", ["w", "rows"], ["picked"]),
            node("Transpose", ["w"], ["turned"]),
            node("Sqrt", ["w"], ["rooted"]),
        ],
        [value("x", elem_type, ["n", 256]), value("rows", TensorProto.INT64, ["m"])],
        [value(name, elem_type) for name in outputs],
        {"w": weight},
    )
    model = OracleModel.load(path, precision=precision, resident_limit=resident)
    results = model.run({"x": x, "rows": np.array([3, 0])}, outputs)

    wide = weight.astype(precision)
    assert {array.dtype for array in results.values()} == {np.dtype(precision)}
    expected = np.sqrt(x.astype(np.float64) @ weight.astype(np.float64))
    np.testing.assert_allclose(results["root"], expected, rtol={"float32": 1e-6, "float64": 1e-14}[precision])
    np.testing.assert_array_equal(results["picked"], wide[[3, 0]])
    np.testing.assert_array_equal(results["turned"], wide.T)
    np.testing.assert_array_equal(results["rooted"], np.sqrt(wide))
    fed_wide = model.run({"x": x.astype(np.float32), "rows": np.array([3, 0])}, ["root"])["root"]
    np.testing.assert_array_equal(fed_wide, results["root"])


def test_float64_tensors_stay_float64_at_precision_float32(tmp_path: Path) -> None:
    """The precision is a floor: 1 + 2^-40 survives in a graph that asks for double."""
    path = save(
        tmp_path / "m.onnx",
        [node("Cast", ["x"], ["d"], to=TensorProto.DOUBLE), node("Add", ["d", "tiny"], ["y"])],
        [value("x", shape=[])],
        [value("y", TensorProto.DOUBLE)],
        {"tiny": np.float64(2.0**-40)},
    )
    y = OracleModel.load(path).run({"x": np.array(1, np.float32)}, ["y"])["y"]
    assert (y.dtype, float(y)) == (np.float64, 1 + 2.0**-40)


@pytest.fixture(scope="module")
def integers(tmp_path_factory: pytest.TempPathFactory) -> OracleModel:
    """The four operations on int64."""
    operations = ("Add", "Sub", "Mul", "Div")
    path = save(
        tmp_path_factory.mktemp("integers") / "m.onnx",
        [node(op, ["a", "b"], [op]) for op in operations],
        [value("a", TensorProto.INT64, [1]), value("b", TensorProto.INT64, [1])],
        [value(op, TensorProto.INT64) for op in operations],
    )
    return OracleModel.load(path)


@given(a=st.integers(-(2**63), 2**63 - 1), b=st.integers(-(2**63), 2**63 - 1))
@settings(deadline=None, max_examples=examples(100))
def test_integers_are_exact_and_wrap_as_in_c(a: int, b: int, integers: OracleModel) -> None:
    """Sums and products modulo 2^64; quotients towards zero, also beyond what a float64 holds."""
    kinds = {"Add": a + b, "Sub": a - b, "Mul": a * b}
    if b not in (0, -1):
        kinds["Div"] = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    results = integers.run({"a": np.array([a]), "b": np.array([b])}, list(kinds))
    for op, want in kinds.items():
        assert int(results[op][0]) == (want + 2**63) % 2**64 - 2**63, op


@given(st.floats(-8, 8) | st.sampled_from([math.inf, -math.inf, 1e-300, -0.0]))
def test_erf_is_the_error_function(x: float) -> None:
    """Within two units in the last place of 1 of Python's own, relative near zero."""
    got = float(erf(np.array([x]))[0])
    assert got == pytest.approx(math.erf(x), rel=1e-14, abs=0 if abs(x) < 0.5 else 4e-16)
    assert math.copysign(1, got) == math.copysign(1, x)
    assert math.isnan(erf(np.array([math.nan]))[0])


# --- feeds


def feed_graph(tmp_path: Path) -> OracleModel:
    """Computes y = x + x and kf = k; w is an input that has an initialiser."""
    return OracleModel.load(
        save(
            tmp_path / "m.onnx",
            [node("Add", ["x", "x"], ["y"]), node("Cast", ["k"], ["kf"], to=1)],
            [value("x", shape=[2, "n"]), value("k", TensorProto.INT64, [1]), value("w", shape=[1])],
            [value("y", shape=[2, "n"]), value("kf")],
            {"w": np.zeros(1, np.float32)},
        )
    )


def test_ports_are_what_must_be_fed(tmp_path: Path) -> None:
    """Names, dtypes and shapes as declared; an initialiser that is listed as input is none."""
    model = feed_graph(tmp_path)
    assert [(s.name, s.dtype, s.shape) for s in model.inputs] == [
        ("x", "float32", (2, "n")),
        ("k", "int64", (1,)),
    ]
    assert [(s.name, s.shape) for s in model.outputs] == [("y", (2, "n")), ("kf", None)]


@pytest.mark.parametrize(
    ("feeds", "outputs", "message"),
    [
        ({}, ["y"], "Input x is not fed"),
        ({"x": np.zeros((3, 1), np.float32)}, ["y"], r"shape \[3, 1\], but the graph declares \[2, 'n'\]"),
        ({"x": np.zeros(2, np.float32)}, ["y"], r"shape \[2\]"),
        ({"x": np.zeros((2, 1), np.float64)}, ["y"], "fed as float64, but the graph declares float32"),
        ({"k": np.zeros(1, np.int32)}, ["kf"], "fed as int32, but the graph declares int64"),
        ({"z": np.zeros(1)}, ["y"], "z is fed, but it is no input"),
        ({}, ["z"], "z is no output of the graph"),
    ],
)
def test_a_wrong_feed_is_one_line_that_names_port_and_rule(
    feeds: dict[str, Any], outputs: list[str], message: str, tmp_path: Path
) -> None:
    """Missing, misshapen, mistyped and unknown feeds, and unknown outputs, are errors of the input."""
    with pytest.raises(InputError, match=message):
        feed_graph(tmp_path).run(feeds, outputs)


def test_an_unknown_precision_is_refused(tmp_path: Path) -> None:
    """Only float32 and float64 exist."""
    with pytest.raises(InputError, match="precision=float16 is not a precision"):
        OracleModel.load(tmp_path / "none.onnx", precision="float16")  # type: ignore[arg-type]


# --- threads and independence


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_blas_has_one_thread_while_a_graph_runs(
    asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit holds during a run, however many workers share its products, and is lifted after it."""
    from threadpoolctl import threadpool_info, threadpool_limits

    def threads() -> list[int]:
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    path = save(tmp_path / "m.onnx", [node("Neg", ["x"], ["y"])], [value("x", shape=[1])], [value("y")])
    model, seen = OracleModel.load(path, threads=asked), []
    run = model._body.run
    monkeypatch.setattr(model._body, "run", lambda *given: seen.extend(threads()) or run(*given))
    with threadpool_limits(limits=2, user_api="blas"):
        model.run({"x": np.ones(1, np.float32)}, ["y"])
        assert seen == [1] * len(seen)
        assert seen
        assert threads() == [2] * len(seen)


def test_the_oracle_imports_no_runtime(tmp_path: Path, save_one_node: Callable[..., Path]) -> None:
    """Loading and running a graph in a fresh interpreter imports neither onnxruntime nor nxrt."""
    path = save_one_node(tmp_path / "m.onnx", "Neg", [np.ones(2, np.float32)])
    code = (
        "import sys, numpy as np; from pathlib import Path; from harness.engines.oracle import ENGINE;"
        f"session = ENGINE.open(Path({str(path)!r}), {{}});"
        "run = session.run({'x0': session.place(np.ones(2, np.float32))}, ['y0']);"
        "print(session.copy_out(run['y0']).tolist(), {'onnxruntime', 'nxrt'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[-1.0, -1.0] set()"
