"""Reductions: types, integers, and axes without elements, by definition and against ONNX Runtime."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from harness.errors import EngineFailedError
from harness.oracle.kernels import claims
from harness.oracle.precision import Precision

Exact = Callable[[Sequence[Any]], Any]

DEFINITIONS: dict[str, Exact] = {
    "ReduceL1": lambda x: sum(map(abs, x)),
    "ReduceL2": lambda x: math.sqrt(sum(v * v for v in x)),
    "ReduceLogSum": lambda x: math.log(sum(x)),
    "ReduceLogSumExp": lambda x: math.log(sum(map(math.exp, x))),
    "ReduceMax": max,
    "ReduceMean": lambda x: Fraction(sum(map(Fraction, x)), len(x)),
    "ReduceMin": min,
    "ReduceProd": math.prod,
    "ReduceSum": sum,
    "ReduceSumSquare": lambda x: sum(v * v for v in x),
}
"""Each reduction over Python's numbers; where it is an integer's it is rounded towards zero."""

VERSIONS = [(op_type, version) for _, op_type, version in claims() if op_type.startswith("Reduce")]


def types_of(op_type: str, version: int) -> list[np.dtype[Any]]:
    """The types that the specification gives a reduction."""
    schema = onnx.defs.get_schema(op_type, version)
    (constraint,) = [entry for entry in schema.type_constraints if entry.type_param_str == "T"]
    names = [name.removeprefix("tensor(").removesuffix(")").upper() for name in constraint.allowed_type_strs]
    numbers = [getattr(onnx.TensorProto, name) for name in names]
    return [np.dtype(onnx.helper.tensor_dtype_to_np_dtype(number)) for number in numbers]


def test_every_reduction_has_a_definition_here() -> None:
    """So that a new one, or a new version of one, is held to it."""
    assert {op_type for op_type, _ in VERSIONS} == DEFINITIONS.keys()


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize(("op_type", "version"), VERSIONS)
def test_what_comes_out_is_of_the_type_that_went_in(
    op_type: str, version: int, precision: Any, bound: Callable[..., Any]
) -> None:
    """For every type of the specification, every set of axes, with and without the reduced axes."""
    by_input = version >= (13 if op_type == "ReduceSum" else 18)
    values = np.array([[[1, 7, 2], [5, 2, 3]], [[4, 4, 1], [1, 9, 6]]])
    axes_sets = [None, (), (0,), (-1,), (0, 2), (1, -1), (0, 1, 2)]
    for declared, axes, keep in itertools.product(types_of(op_type, version), axes_sets, (0, 1)):
        held = Precision(precision).held(declared)
        x = values.astype(held)
        given: list[Any] = [x]
        options: dict[str, Any] = {"keepdims": keep}
        if axes is not None and by_input:
            given.append(np.array(axes, np.int64))
            options["noop_with_empty_axes"] = int(axes == ())
        elif axes:
            options["axes"] = list(axes)
        compute = bound(op_type, version, inputs=len(given), precision=precision, **options)
        got = np.asarray(compute(*given))
        assert got.dtype == held, (declared, axes)
        reduced = {axis % 3 for axis in axes} if axes or (axes == () and by_input) else {0, 1, 2}
        want = np.empty([1 if axis in reduced else n for axis, n in enumerate(x.shape)], held)
        for place in np.ndindex(*want.shape):
            where = tuple(slice(None) if axis in reduced else place[axis] for axis in range(3))
            want[place] = number(DEFINITIONS[op_type](np.ravel(x[where]).tolist()), held)
        if not keep:
            want = want.squeeze(tuple(reduced))
        np.testing.assert_allclose(got, want, rtol=1e-5 if held.kind == "f" else 0)


def number(value: Any, dtype: np.dtype[Any]) -> Any:
    """A Python number in a type; integers are rounded towards zero."""
    return float(value) if dtype.kind == "f" else bool(value) if dtype.kind == "b" else int(value)


@given(data=st.data(), dtype=st.sampled_from([np.int32, np.uint32, np.int64, np.uint64]))
def test_a_mean_of_integers_is_exact(data: st.DataObject, dtype: Any, bound: Callable[..., Any]) -> None:
    """Also where the sum does not fit into the type, and of either sign: rounded towards zero."""
    shape = data.draw(hnp.array_shapes(max_dims=3, max_side=5))
    x = data.draw(hnp.arrays(dtype, shape))
    axis = data.draw(st.integers(0, x.ndim - 1))
    got = bound("ReduceMean", 18, inputs=2, keepdims=0)(x, np.array([axis]))
    want = np.apply_along_axis(
        lambda row: int(Fraction(sum(map(int, row)), len(row))), axis, x.astype(object)
    ).astype(dtype)
    assert np.asarray(got).dtype == dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("op_type", DEFINITIONS)
def test_integers_as_onnx_runtime_has_them(
    op_type: str, dtype: Any, against_ort: Callable[..., None], seeded: np.random.RandomState
) -> None:
    """What its CPU kernel gives of integers, to the bit; it has no unsigned ones.

    Of ReduceLogSumExp it rounds each power by itself, so that only equal elements compare.
    """
    x = seeded.randint(-9, 10, (3, 4, 2))
    if "Log" in op_type:
        x = np.full_like(x, 5) if op_type == "ReduceLogSumExp" else np.abs(x) + 1
    against_ort(op_type, [x.astype(dtype), np.array([0, 2])], domain="", opset=18, constants=(1,))


EMPTY = [(0,), (2, 0), (0, 3), (2, 0, 3), (0, 0)]


@pytest.mark.parametrize("op_type", [op_type for op_type in DEFINITIONS if op_type != "ReduceMean"])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_no_elements_reduce_to_the_neutral_one(
    shape: tuple[int, ...], dtype: Any, op_type: str, against_ort: Callable[..., None]
) -> None:
    """By specification; minus infinity of integers is the least of them. All as ONNX Runtime has it."""
    for axis in range(len(shape)):
        against_ort(op_type, [np.zeros(shape, dtype), np.array([axis])], domain="", opset=20)


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_a_mean_of_nothing_is_no_number(shape: tuple[int, ...], run_node: Callable[..., Any]) -> None:
    """The specification leaves it undefined: NaN of floats, an error of integers; no means are no fault."""
    for axis, extent in enumerate(shape):
        rest = shape[:axis] + shape[axis + 1 :]
        floats, integers = ([np.zeros(shape, dtype), np.array([axis])] for dtype in (np.float32, np.int64))
        (y,) = run_node("ReduceMean", floats, keepdims=0)
        assert y.shape == rest
        assert np.isnan(y).all()
        if extent == 0 and 0 not in rest:
            with pytest.raises(EngineFailedError, match="the mean of no integers is not defined"):
                run_node("ReduceMean", integers, keepdims=0)
        else:
            (y,) = run_node("ReduceMean", integers, keepdims=0)
            assert (y.shape, y.dtype) == (rest, np.int64)


@pytest.mark.parametrize("opset", [9, 11, 13, 21])
@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_nothing_is_its_own_softmax(
    shape: tuple[int, ...], op_type: str, opset: int, against_ort: Callable[..., None]
) -> None:
    """An empty tensor of the same shape, whichever axis has no elements, in every version."""
    for axis in range(len(shape)):
        against_ort(op_type, [np.zeros(shape, np.float32)], domain="", opset=opset, axis=axis)
