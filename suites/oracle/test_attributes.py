"""Attributes of another type than the operator has are refused by name, whatever Python makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from harness.errors import EngineFailedError, InputError
from harness.oracle import OracleModel
from harness.oracle.node import Node
from harness.oracle.planner import Budget
from harness.oracle.precision import Precision

SaveNode = Callable[..., Path]

FLOATS = np.ones((1, 4), np.float32)

GRAPH = helper.make_graph(
    [helper.make_node("Constant", [], ["c"], value_int=1)],
    "body",
    [],
    [helper.make_tensor_value_info("c", TensorProto.INT64, [])],
)

TYPES: dict[str, Any] = {
    "an integer": 1,
    "a float": 0.5,
    "a string": "abc",
    "a list of integers": [1, 2],
    "a list of floats": [0.5, 0.5],
    "a list of strings": ["a", "b"],
    "a tensor": helper.make_tensor("t", TensorProto.FLOAT, [1], [1.0]),
    "a graph": GRAPH,
}
"""Values of attributes by the words for their type."""

ACCESSORS: dict[str, str] = {
    "integer": "an integer",
    "integer_or_none": "an integer",
    "flag": "an integer",
    "element_type": "an integer",
    "number": "a float",
    "number_or_none": "a float",
    "text": "a string",
    "integers": "a list of integers",
    "numbers": "a list of floats",
    "tensor": "a tensor",
    "body": "a graph",
}
"""What each accessor of `Node` reads."""

OPERATORS: dict[str, tuple[str, str, str, str]] = {
    "LpNormalization": ("", "p", "an integer", "x"),
    "SkipSimplifiedLayerNormalization": ("com.microsoft", "epsilon", "a float", "xxx"),
    "Softmax": ("", "axis", "an integer", "x"),
    "Transpose": ("", "perm", "a list of integers", "x"),
    "Shape": ("", "end", "an integer", "x"),
    "Gelu": ("", "approximate", "a string", "x"),
    "Cast": ("", "to", "an integer", "x"),
    "ConstantOfShape": ("", "value", "a tensor", "n"),
}
"""Domain, attribute, type due, inputs (x floats, n integers)."""


def attribute(value: Any) -> Any:
    """The value as planning gives it to a node: arrays for tensors, what can be called for graphs."""
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    return (lambda: None) if isinstance(value, onnx.GraphProto) else value


def node_with(value: Any) -> Node:
    """A node whose attribute `a` has this value."""
    return Node("", "Op", 1, "model/one", Precision("float32"), Budget(0), attributes={"a": value})


def test_every_accessor_is_known_here() -> None:
    """Whatever reads an attribute by its name stands in the table."""
    methods = inspect.getmembers(Node, inspect.isfunction)
    by_name = {name for name, method in methods if "name" in inspect.signature(method).parameters}
    assert {name for name in by_name if not name.startswith("_")} == set(ACCESSORS)


@pytest.mark.parametrize("given", TYPES)
@pytest.mark.parametrize("accessor", ACCESSORS)
def test_an_attribute_of_another_type_is_refused_by_name(accessor: str, given: str) -> None:
    """One message with node, operator, attribute, the type given and the type due; none is converted."""
    due, node = ACCESSORS[accessor], node_with(attribute(TYPES[given]))
    if given == due:
        assert getattr(node, accessor)("a") is not None
        return
    with pytest.raises(InputError) as caught:
        getattr(node, accessor)("a")
    assert caught.value.message == f"Node model/one: the attribute `a` of Op is {given}, where {due} is due."


def test_an_empty_list_is_of_either_type() -> None:
    """Nothing in it tells floats from integers."""
    assert node_with([]).integers("a") == node_with([]).numbers("a") == []
    with pytest.raises(InputError, match="is an empty list, where an integer is due"):
        node_with([]).integer("a")


@pytest.mark.parametrize("rounding", ["none", "model"])
@pytest.mark.parametrize("op_type", OPERATORS)
def test_a_graph_with_one_is_no_input(
    op_type: str, rounding: Any, save_one_node: SaveNode, tmp_path: Path
) -> None:
    """At planning, in whatever setting: never a traceback, never another value than the file's."""
    domain, name, due, kinds = OPERATORS[op_type]
    inputs = [FLOATS if kind == "x" else np.array([2]) for kind in kinds]
    for given in TYPES.keys() - {due}:
        path = save_one_node(tmp_path / "m.onnx", op_type, inputs, domain=domain, **{name: TYPES[given]})
        message = f"Node the_node: the attribute `{name}` of {op_type} is {given}, where {due} is due"
        with pytest.raises(InputError, match=message):
            OracleModel.load(path, rounding=rounding)


def test_an_attribute_without_a_type_is_refused_by_name(save_one_node: SaveNode, tmp_path: Path) -> None:
    """A file of the first versions of ONNX, or a damaged one."""
    path = save_one_node(tmp_path / "m.onnx", "Softmax", [FLOATS], axis=1)
    model = onnx.load(path)
    model.graph.node[0].attribute[0].type = onnx.AttributeProto.UNDEFINED
    onnx.save(model, path)
    with pytest.raises(InputError, match="Node the_node: the attribute `axis` of Softmax has no type"):
        OracleModel.load(path)


def test_an_element_type_that_there_is_not_is_refused_by_name(
    save_one_node: SaveNode, tmp_path: Path
) -> None:
    """99 is none of ONNX's."""
    path = save_one_node(tmp_path / "m.onnx", "Cast", [FLOATS], to=99)
    with pytest.raises(
        InputError, match="element type 99, given for the attribute `to` of Cast the_node, is none"
    ):
        OracleModel.load(path)


@pytest.mark.parametrize("place", ["input", "output", "value_info", "initializer"])
def test_so_is_one_of_a_port_or_a_weight(place: str, save_one_node: SaveNode, tmp_path: Path) -> None:
    """Wherever a file says a type, the message says of what."""
    path = save_one_node(tmp_path / "m.onnx", "Add", [FLOATS, FLOATS], constants=(1,))
    model = onnx.load(path)
    if place == "value_info":
        model.graph.value_info.add(name="between")
    (item,) = getattr(model.graph, place)
    if place == "initializer":
        item.data_type = 99
    else:
        item.type.tensor_type.elem_type = 99
    onnx.save(model, path)
    with pytest.raises(
        InputError, match=f"element type 99, given for .*{item.name}.*, is none that ONNX has"
    ):
        OracleModel.load(path)


def test_what_else_keeps_a_node_from_being_planned_names_it(save_one_node: SaveNode, tmp_path: Path) -> None:
    """A constant of a shape with which the kernel can do nothing: a failure of the run, no traceback."""
    path = save_one_node(
        tmp_path / "m.onnx",
        "MatMulNBits",
        [FLOATS, np.ones((3, 2, 1), np.uint8), np.ones(7, np.float32)],
        constants=(1, 2),
        domain="com.microsoft",
        N=0,
        K=0,
        block_size=0,
    )
    with pytest.raises(EngineFailedError, match="MatMulNBits the_node"):
        OracleModel.load(path)
