"""The node that made a result infinite or NaN, among masks whose infinities are meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from fixtures.decoders import save_graph
from harness.engines.oracle import ENGINE
from harness.oracle import OracleModel

FLOAT = TensorProto.FLOAT


def node(op_type: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    """A node named after its output."""
    return helper.make_node(op_type, inputs, [output], name=output, **attributes)


def attention(name: str, x: str) -> list[onnx.NodeProto]:
    """Masked self attention over rows of x, whose mask is 0 where allowed and minus infinity elsewhere."""
    return [
        node("Transpose", [x], f"{name}_t"),
        node("MatMul", [x, f"{name}_t"], f"{name}_scores"),
        node("Where", ["allowed", "zero", "minus_infinity"], f"{name}_mask"),
        node("Add", [f"{name}_scores", f"{name}_mask"], f"{name}_masked"),
        node("Softmax", [f"{name}_masked"], f"{name}_weights"),
        node("MatMul", [f"{name}_weights", x], f"{name}_out"),
    ]


def graph(tmp_path: Path, between: list[onnx.NodeProto], last: str) -> OracleModel:
    """Attention over x, the nodes `between`, then attention over `last` and the logits."""
    nodes = [*attention("first", "x"), *between, *attention("second", last)]
    nodes.append(node("Add", ["second_out", "x"], "logits"))
    path = save_graph(
        tmp_path / "model.onnx",
        nodes,
        [
            helper.make_tensor_value_info("x", FLOAT, ["n", 4]),
            helper.make_tensor_value_info("allowed", TensorProto.BOOL, ["n", "n"]),
        ],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in ("logits", "first_out")],
        {
            "zero": np.zeros((), np.float32),
            "minus_infinity": np.float32(-np.inf),
            "huge": np.full((), 1e38, np.float32),
            "root": np.full((), 4.0, np.float32),
        },
    )
    return OracleModel.load(path)


def feeds(count: int = 3) -> dict[str, np.ndarray]:
    """Rows of small numbers and a causal mask."""
    x = np.linspace(-1, 1, count * 4, dtype=np.float32).reshape(count, 4)
    return {"x": x, "allowed": np.tri(count, dtype=bool)}


FAULTS: dict[str, tuple[list[onnx.NodeProto], str]] = {
    # Infinities that become NaN only two nodes on.
    "an overflow": (
        [
            node("Mul", ["first_out", "huge"], "large"),
            node("Mul", ["large", "huge"], "too_large"),
            node("Sub", ["too_large", "too_large"], "gap"),
        ],
        "Mul too_large",
    ),
    "a root of a negative number": ([node("Sqrt", ["first_out"], "gap")], "Sqrt gap"),
    "nothing divided by nothing": (
        [node("Sub", ["x", "x"], "nothing"), node("Div", ["nothing", "nothing"], "gap")],
        "Div gap",
    ),
    "infinity that stays infinity": (
        [node("Exp", ["x"], "e"), node("Sub", ["e", "e"], "nought"), node("Div", ["huge", "nought"], "gap")],
        "Div gap",
    ),
}


@pytest.mark.parametrize(("between", "expected"), FAULTS.values(), ids=FAULTS)
def test_the_first_node_that_made_them_so_is_named(
    between: list[onnx.NodeProto], expected: str, tmp_path: Path
) -> None:
    """Neither the masks with their infinities nor the nodes that only pass NaN on are."""
    model = graph(tmp_path, between, "gap")
    assert model.first_non_finite(feeds(), ["logits"]) == expected


def test_infinite_masks_are_values(tmp_path: Path) -> None:
    """Results that are finite are nobody's fault, however many infinities the graph works with."""
    model = graph(tmp_path, [node("Identity", ["first_out"], "gap")], "gap")
    assert model.first_non_finite(feeds(), ["logits", "first_out"]) is None


def test_a_node_inside_a_loop_is_named_itself(tmp_path: Path) -> None:
    """A state that grows in a Scan until it overflows: the node of the body, under its path.

    Before it, the same body works with an infinite constant that never gets into a result.
    """
    body = helper.make_graph(
        [
            node("Min", ["row", "infinity"], "kept"),
            node("Mul", ["state", "kept"], "grown"),
            node("Identity", ["grown"], "seen"),
        ],
        "body",
        [helper.make_tensor_value_info(name, FLOAT, [2]) for name in ("state", "row")],
        [helper.make_tensor_value_info(name, FLOAT, [2]) for name in ("grown", "seen")],
    )
    scan = helper.make_node(
        "Scan", ["start", "x"], ["last", "all"], name="steps", body=body, num_scan_inputs=1
    )
    path = save_graph(
        tmp_path / "model.onnx",
        [scan, node("Softmax", ["last"], "logits")],
        [helper.make_tensor_value_info("x", FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("logits", FLOAT, None)],
        {"start": np.full(2, 2.0, np.float32), "infinity": np.float32(np.inf)},
    )
    model = OracleModel.load(path)
    large = {"x": np.full((3, 2), 1e18, np.float32)}
    assert model.first_non_finite(large, ["logits"]) == "Mul steps.body/grown"
    assert model.first_non_finite({"x": np.full((3, 2), 10, np.float32)}, ["logits"]) is None
    assert all(inner.watch is None for step in model._body.steps for inner in step.bodies)


def test_a_result_is_judged_by_itself(tmp_path: Path) -> None:
    """What is asked for is finite, though another output of the graph would not be."""
    model = graph(tmp_path, [node("Sqrt", ["first_out"], "gap")], "gap")
    assert model.first_non_finite(feeds(), ["first_out"]) is None


def test_a_query_without_any_key_is_the_softmaxs_doing(tmp_path: Path) -> None:
    """A row masked throughout is NaN by Softmax's definition; the mask's constant is not to blame."""
    model = graph(tmp_path, [node("Identity", ["first_out"], "gap")], "gap")
    given = feeds()
    given["allowed"][1] = False
    assert model.first_non_finite(given, ["logits"]) == "Softmax first_weights"


def test_what_is_fed_is_named_as_input(tmp_path: Path) -> None:
    """A state that comes in broken is no node's fault."""
    model = graph(tmp_path, [node("Identity", ["first_out"], "gap")], "gap")
    given = feeds()
    given["x"][0, 0] = np.nan
    assert model.first_non_finite(given, ["logits"]) == "input x"


def test_a_constant_infinity_in_a_result_names_the_node_that_reads_it(tmp_path: Path) -> None:
    """Logits of banned tokens, say: no input is to blame, and no overflow."""
    path = save_graph(
        tmp_path / "model.onnx",
        [node("Add", ["x", "ban"], "banned"), node("Identity", ["banned"], "logits")],
        [helper.make_tensor_value_info("x", FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("logits", FLOAT, None)],
        {"ban": np.array([0, -np.inf], np.float32)},
    )
    model = OracleModel.load(path)
    assert model.first_non_finite({"x": np.ones((1, 2), np.float32)}, ["logits"]) == "Add banned"


def test_infinities_that_fill_a_tensor_are_told_from_overflows(tmp_path: Path) -> None:
    """A mask filled with minus infinity at run time is no overflow; a row masked throughout names Softmax."""
    path = save_graph(
        tmp_path / "model.onnx",
        [
            node("Shape", ["x"], "shape"),
            node("ConstantOfShape", ["shape"], "mask", value=helper.make_tensor("v", FLOAT, [1], [-np.inf])),
            node("Add", ["x", "mask"], "masked"),
            node("Softmax", ["masked"], "logits"),
        ],
        [helper.make_tensor_value_info("x", FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("logits", FLOAT, None)],
    )
    assert OracleModel.load(path).first_non_finite({"x": np.ones((2, 4), np.float32)}, ["logits"]) == (
        "Softmax logits"
    )


def test_a_cast_that_overflows_is_named_where_types_are_kept(tmp_path: Path) -> None:
    """70000 is no half: without rounding it passes, with rounding the Cast made it infinite."""
    path = save_graph(
        tmp_path / "model.onnx",
        [node("Cast", ["x"], "half", to=TensorProto.FLOAT16), node("Cast", ["half"], "logits", to=FLOAT)],
        [helper.make_tensor_value_info("x", FLOAT, [1])],
        [helper.make_tensor_value_info("logits", FLOAT, None)],
    )
    x = {"x": np.array([70000], np.float32)}
    assert OracleModel.load(path).first_non_finite(x, ["logits"]) is None
    assert OracleModel.load(path, rounding="model").first_non_finite(x, ["logits"]) == "Cast half"


def test_a_session_tells_it_too(tmp_path: Path) -> None:
    """Through handles, as the check holds its feeds."""
    graph(tmp_path, [node("Sqrt", ["first_out"], "gap")], "gap")
    session = ENGINE.open(tmp_path / "model.onnx", {})
    given = {name: session.place(array) for name, array in feeds().items()}
    assert session.first_non_finite(given, ["logits"]) == "Sqrt gap"
