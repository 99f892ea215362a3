"""Inputs that stand for one number: a scalar by specification or by exporter, or a vector of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from harness.errors import EngineFailedError


def single(*values: Any, dtype: Any = np.float32) -> list[np.ndarray]:
    """Scalars of one type."""
    return [np.array(value, dtype) for value in values]


def graph(name: str, nodes: list[Any], inputs: list[Any], outputs: list[Any]) -> Any:
    """A subgraph."""
    return helper.make_graph(nodes, name, inputs, outputs)


def value(name: str, kind: int = TensorProto.FLOAT, shape: list[int] | None = None) -> Any:
    """A port of a subgraph."""
    return helper.make_tensor_value_info(name, kind, shape)


def branch(number: float) -> Any:
    """A subgraph that gives a constant."""
    node = helper.make_node("Constant", [], [f"out_{number}"], value_float=number)
    return graph("branch", [node], [], [value(f"out_{number}")])


BODY = graph(
    "body",
    [
        helper.make_node("Identity", ["going"], ["still_going"]),
        helper.make_node("Add", ["state", "state"], ["next"]),
    ],
    [value("i", TensorProto.INT64, []), value("going", TensorProto.BOOL, []), value("state")],
    [value("still_going", TensorProto.BOOL), value("next")],
)

X, LINE, SQUARE = np.float32(3), np.arange(4, dtype=np.float32), np.ones((3, 3), np.float32)
ROW, GQA = np.ones((1, 2, 32), np.float32), {"domain": "com.microsoft", "num_heads": 2, "kv_num_heads": 2}
CACHE = np.ones((1, 2, 0, 16), np.float32)
ONE, TRUE = single(1, dtype=np.int64)[0], np.array(True)

CASES: dict[str, tuple[str, list[Any], int, dict[str, Any]]] = {
    "Clip of a number, min": ("Clip", [np.asarray(X), *single(4)], 1, {}),
    "Clip of a number, max": ("Clip", [np.asarray(X), None, *single(2)], 2, {}),
    "Clip min": ("Clip", [LINE, *single(1)], 1, {}),
    "Clip max": ("Clip", [LINE, None, *single(2)], 2, {}),
    "Range start": ("Range", single(1, 4, 1), 0, {}),
    "Range limit": ("Range", single(1, 4, 1), 1, {}),
    "Range delta": ("Range", single(1, 4, 1), 2, {}),
    "Range of integers": ("Range", single(1, 9, 2, dtype=np.int64), 1, {}),
    "CumSum axis": ("CumSum", [SQUARE, ONE], 1, {}),
    "CumProd axis": ("CumProd", [SQUARE * 2, ONE], 1, {"opset": 26}),
    "OneHot depth": ("OneHot", [np.arange(3), np.array(4), np.array([0, 1], np.float32)], 1, {}),
    "Pad value": ("Pad", [LINE, np.array([1, 2]), *single(7)], 2, {}),
    "Trilu k": ("Trilu", [SQUARE, ONE], 1, {}),
    "TopK k": ("TopK", [LINE, np.array(2)], 1, {"outputs": 2}),
    "DequantizeLinear scale": ("DequantizeLinear", [np.array([3, 4], np.uint8), *single(2)], 1, {}),
    "DequantizeLinear zero point": (
        "DequantizeLinear",
        [np.array([3, 4], np.uint8), *single(2), np.array(1, np.uint8)],
        2,
        {},
    ),
    "QuantizeLinear scale": ("QuantizeLinear", [LINE, *single(0.5)], 1, {}),
    "QuantizeLinear zero point": ("QuantizeLinear", [LINE, *single(0.5), np.array(1, np.uint8)], 2, {}),
    "If": ("If", [TRUE], 0, {"then_branch": branch(1.0), "else_branch": branch(2.0)}),
    "Loop count": ("Loop", [np.array(3), TRUE, LINE], 0, {"body": BODY}),
    "Loop condition": ("Loop", [np.array(3), TRUE, LINE], 1, {"body": BODY}),
    "GroupQueryAttention length": (
        "GroupQueryAttention",
        [ROW, ROW, ROW, CACHE, CACHE, np.array([1], np.int32), np.array(2, np.int32)],
        6,
        GQA,
    ),
}
"""Operator, inputs, which of them is the number, and attributes."""

BROADCASTS = ("DequantizeLinear", "QuantizeLinear")
"""Two scales may be one a row."""


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "input"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_scalar_and_a_vector_of_one_are_the_same_number(
    case: tuple[str, list[Any], int, dict[str, Any]],
    constant: bool,
    precision: str,
    run_node: Callable[..., list[np.ndarray]],
) -> None:
    """Values, shapes and types of all outputs, whether planning knows the number or not."""
    op_type, inputs, place, options = case
    options = options | {"precision": precision, "constants": (place,) if constant else ()}
    want = run_node(op_type, inputs, **options)
    for shape in ((1,), (1, 1)):
        given = [x.reshape(shape) if i == place else x for i, x in enumerate(inputs)]
        for got, expected in zip(run_node(op_type, given, **options), want, strict=True):
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] not in BROADCASTS])
def test_two_numbers_in_the_place_of_one_are_refused(
    name: str, run_node: Callable[..., list[np.ndarray]]
) -> None:
    """Neither the first of them is taken nor do they broadcast."""
    op_type, inputs, place, options = CASES[name]
    given = [np.repeat(x.reshape(1), 2) if i == place else x for i, x in enumerate(inputs)]
    with pytest.raises(EngineFailedError, match=r"one number is due, and a tensor of shape \[2\] is given"):
        run_node(op_type, given, **options)
