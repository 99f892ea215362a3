"""What can be computed of a graph before it runs: nothing is guessed, nothing printed, nothing endless."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from fixtures.decoders import save_graph
from harness.decode.computed import Fed, Hollow
from harness.decode.tables import Looked, Tables

if TYPE_CHECKING:
    from numpy.typing import NDArray

INT64, FLOAT = TensorProto.INT64, TensorProto.FLOAT
TABLE: dict[str, NDArray[np.generic]] = {"table": np.ones((7, 4), np.float32)}


def looked(path: Path, **fed: Fed) -> list[tuple[int, int]]:
    """The first and the last row that a call of the graph looks up."""
    return [(each.lowest, each.highest) for each in Tables(path).read(fed) if isinstance(each, Looked)]


def saved(
    path: Path, nodes: Sequence[onnx.NodeProto], weights: dict[str, NDArray[np.generic]] | None = None
) -> Path:
    """A graph that looks `rows` up in a table of seven; it takes `x`, of which that is made."""
    takes = helper.make_tensor_value_info("x", INT64, ["n"])
    gives = helper.make_tensor_value_info("y", FLOAT, None)
    return save_graph(
        path,
        [*nodes, helper.make_node("Gather", ["table", "rows"], ["y"])],
        [takes],
        [gives],
        {**TABLE, **(weights or {})},
    )


def node(operator: str, *inputs: str, output: str = "rows", **attributes: Any) -> onnx.NodeProto:
    """One node."""
    return helper.make_node(operator, inputs, [output], **attributes)


def test_what_is_fed_is_followed_to_the_table(tmp_path: Path) -> None:
    """Its value where that is known, its shape where nothing else is needed, and nothing where it is not."""
    path = saved(tmp_path / "m.onnx", [node("Neg", "x")])
    assert looked(path, x=np.array([1, 9, 3])) == [(-9, -1)]
    assert looked(path, x=Hollow(np.dtype(np.int64), (3,))) == []
    assert looked(path) == []

    path = saved(tmp_path / "m.onnx", [node("Shape", "x")])
    assert looked(path, x=np.array([1, 9, 3])) == [(3, 3)]
    assert looked(path, x=Hollow(np.dtype(np.float32), (5,))) == [(5, 5)]


@pytest.mark.parametrize(
    "nodes",
    [
        # Of other operators it is not known what they give; nor of those that a model defines itself.
        [node("Unknown", "x", domain="com.unknown")],
        # What waits for itself.
        [node("Add", "x", "b", output="a"), node("Add", "a", "x", output="b"), node("Identity", "a")],
        # More than any memory holds.
        [node("Range", "zero", "huge", "one")],
        [node("Expand", "x", "wide")],
        # What the operator refuses.
        [node("Concat", "x", "table", axis=0)],
        [node("Gather", "x", "huge")],
    ],
)
def test_what_cannot_be_computed_says_nothing(nodes: list[onnx.NodeProto], tmp_path: Path) -> None:
    """Whatever the reason: no row is known, and the next table is looked at."""
    weights: dict[str, NDArray[np.generic]] = {
        "zero": np.array(0),
        "one": np.array(1),
        "huge": np.array(1 << 40),
        "wide": np.array([1 << 20, 1 << 20, 1]),
    }
    also = [node("Gather", "table", "x", output="beside"), node("Add", "y", "beside", output="z")]
    model = onnx.load(saved(tmp_path / "m.onnx", nodes, weights))
    model.graph.node.extend(also)
    model.graph.output.append(helper.make_tensor_value_info("z", FLOAT, None))
    onnx.save(model, tmp_path / "m.onnx")

    assert looked(tmp_path / "m.onnx", x=np.array([2, 5])) == [(2, 5)]


def test_a_function_in_the_place_of_an_operator_is_what_the_model_says(tmp_path: Path) -> None:
    """Its body is not looked into, and the operator that it replaces is not taken for it."""
    model = onnx.load(saved(tmp_path / "m.onnx", [node("Neg", "x")]))
    body = helper.make_node("Identity", ["a"], ["b"])
    opset = [helper.make_opsetid("", 21)]
    model.functions.append(helper.make_function("", "Neg", ["a"], ["b"], [body], opset))
    onnx.save(model, tmp_path / "m.onnx")

    assert looked(tmp_path / "m.onnx", x=np.array([2, 5])) == []


def test_arithmetic_without_a_result_prints_nothing(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    """A division by zero is the graph's affair."""
    path = saved(tmp_path / "m.onnx", [node("Div", "x", "zero")], {"zero": np.array(0)})

    looked(path, x=np.array([1]))

    assert capfd.readouterr() == ("", "")
    assert len(recwarn) == 0


def test_a_long_chain_is_given_up(tmp_path: Path) -> None:
    """However deep a graph is, nothing overflows."""
    chain = [node("Neg", f"v{i}" if i else "x", output=f"v{i + 1}") for i in range(5000)]

    assert looked(saved(tmp_path / "m.onnx", [*chain, node("Identity", "v5000")]), x=np.array([1])) == []
