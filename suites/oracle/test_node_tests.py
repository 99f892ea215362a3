from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from harness.errors import ParityError
from harness.oracle import OracleModel
from harness.oracle.kernels import claims, find, operator_version
from harness.oracle.precision import Precision, file_dtype

OPERATORS = sorted({op for domain, op, _ in claims() if domain == ""} - {"SimplifiedLayerNormalization"})
"""SimplifiedLayerNormalization stands in the standard domain by ONNX Runtime's choice; onnx knows it not."""

NARROWING = "a cast to a narrower float is dropped unless rounding=model: the oracle keeps its own precision"
EXCLUDED = {
    "test_cast*_to_FLOAT8*": NARROWING,
    "test_cast*_to_FLOAT4E2M1*": NARROWING,
}
"""Tests that are in scope and must fail, by pattern of their names, each with the reason."""

ROUNDED = {
    # Expected values are rounded to the declared type after each operation of the reference; the oracle
    # rounds nothing. Four units in the last place.
    TensorProto.FLOAT16: 4 * 2.0**-11,
    TensorProto.BFLOAT16: 4 * 2.0**-8,
}


def operators_of(nodes: Iterable[onnx.NodeProto]) -> Iterable[tuple[str, str]]:
    """Domain and operator of all nodes, those of subgraphs included."""
    for node in nodes:
        yield ("" if node.domain == "ai.onnx" else node.domain), node.op_type
        for attribute in node.attribute:
            yield from operators_of(attribute.g.node)


def in_scope(model: onnx.ModelProto) -> bool:
    """Whether the oracle claims every operator of `model` in the version it has there."""
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    return all(
        find(domain, op, operator_version(domain, op, opsets.get(domain, 1))) is not None
        for domain, op in operators_of(model.graph.node)
    )


def tensors_only(model: onnx.ModelProto) -> bool:
    """Whether every port is a tensor of numbers: the oracle has no sequences, optionals and strings."""
    ports = [*model.graph.input, *model.graph.output]
    return all(
        port.type.WhichOneof("value") == "tensor_type"
        and port.type.tensor_type.elem_type != TensorProto.STRING
        for port in ports
    )


def array_of(value: Any) -> np.ndarray:
    """Test data as an array; 4-bit types come as tensor messages."""
    return onnx.numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def run_case(case: Any, path: Path, precision: str, rounding: str = "none") -> None:
    """Run one node test on the oracle and compare as onnx does, with exact integers.

    With rounding `model` every float that comes out must be one of its declared type.

    Raises:
        AssertionError: the oracle's outputs are others.
        ParityError: it could not run the test.
    """
    onnx.save(case.model, path)
    model = OracleModel.load(path, precision=precision, rounding=rounding)
    held = Precision(precision)
    for inputs, outputs in case.data_sets:
        feeds = {spec.name: array_of(value) for spec, value in zip(model.inputs, inputs, strict=True)}
        results = model.run(feeds, [spec.name for spec in model.outputs])
        for port, value in zip(case.model.graph.output, outputs, strict=True):
            elem_type, expected = port.type.tensor_type.elem_type, held.widen(array_of(value))
            result = results[port.name]
            assert (result.dtype, result.shape) == (expected.dtype, expected.shape), port.name
            if expected.dtype.kind == "f":
                if rounding == "model":
                    narrow = file_dtype(elem_type)
                    np.testing.assert_array_equal(held.widen(result.astype(narrow)), result)
                rtol = ROUNDED.get(elem_type, case.rtol)
                atol = rtol if elem_type in ROUNDED else case.atol
                np.testing.assert_allclose(result, expected, rtol=rtol, atol=atol)
            else:
                np.testing.assert_array_equal(result, expected)


@pytest.fixture(scope="session")
def by_operator(onnx_node_cases: list[Any]) -> dict[str, list[Any]]:
    """The tests in scope by the operator that they are about: that of the node, or of the node expanded."""
    alone = {
        case.name: case.model.graph.node[0].op_type
        for case in onnx_node_cases
        if "_expanded" not in case.name
    }
    found: dict[str, list[Any]] = {}
    for case in onnx_node_cases:
        if in_scope(case.model) and tensors_only(case.model):
            found.setdefault(alone[case.name.split("_expanded")[0]], []).append(case)
    return found


@cache
def reason(name: str) -> str | None:
    """Why the test of this name is excluded, None when it is not."""
    return next((why for pattern, why in EXCLUDED.items() if fnmatchcase(name, pattern)), None)


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_oracle_passes_onnx_tests_of_every_operator_it_claims(
    operator: str,
    precision: str,
    by_operator: dict[str, list[Any]],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Every test of a claimed operator, as node or expanded to its function body, gives onnx's result.

    How many there were is recorded, which with the parameters makes the table by operator.
    """
    cases = [case for case in by_operator.get(operator, []) if reason(case.name) is None]
    assert cases, f"no node test of {operator} is in scope"
    failures = {}
    for case in cases:
        try:
            run_case(case, tmp_path / "case.onnx", precision)
        except (AssertionError, ParityError) as error:
            failures[case.name] = str(error)
    assert failures == {}
    record_property("node tests passed", len(cases))


NARROW = {TensorProto.DataType.Value(name) for name in ("FLOAT16", "BFLOAT16", "FLOAT4E2M1", "FLOAT8E4M3FN")}
NARROW |= {TensorProto.DataType.Value(f"FLOAT8{name}") for name in ("E4M3FNUZ", "E5M2", "E5M2FNUZ", "E8M0")}


def about_narrow_floats(model: onnx.ModelProto) -> bool:
    """Whether a port of `model` is of a float type narrower than float32."""
    ports = [*model.graph.input, *model.graph.output]
    return any(port.type.tensor_type.elem_type in NARROW for port in ports)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_with_rounding_every_test_about_narrow_floats_passes(
    precision: str, by_operator: dict[str, list[Any]], tmp_path: Path
) -> None:
    """With `rounding=model` nothing is excluded: casts narrow as onnx's do, outputs are of their types."""
    cases = [case for found in by_operator.values() for case in found if about_narrow_floats(case.model)]
    assert {"Cast", "CastLike", "QuantizeLinear", "Attention"} <= {
        case.model.graph.node[0].op_type for case in cases
    }
    failures = {}
    for case in cases:
        try:
            run_case(case, tmp_path / "case.onnx", precision, "model")
        except (AssertionError, ParityError) as error:
            failures[case.name] = str(error)
    assert failures == {}


def test_no_exclusion_is_stale(by_operator: dict[str, list[Any]], tmp_path: Path) -> None:
    """What is excluded is in scope and fails."""
    excluded = [case for cases in by_operator.values() for case in cases if reason(case.name)]
    assert all(any(fnmatchcase(case.name, pattern) for case in excluded) for pattern in EXCLUDED)
    for case in excluded:
        with pytest.raises((AssertionError, ParityError)):
            run_case(case, tmp_path / "case.onnx", "float32")


def test_slow_case_modules_are_about_operators_that_the_oracle_has_not() -> None:
    """No test of a claimed operator is lost by not importing the modules that are slow to import."""
    pooling = {"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "ImageDecoder", "LpPool", "MaxPool"}
    assert pooling.isdisjoint(op for _, op, _ in claims())


def test_a_wrong_kernel_fails_its_tests(by_operator: dict[str, list[Any]], tmp_path: Path) -> None:
    """The comparison has teeth: a graph that adds where the test multiplies is found out."""
    for case in by_operator["Mul"]:
        if len(case.model.graph.node) == 1:
            broken = type(case)(
                **{**case.__dict__, "model": onnx.ModelProto.FromString(case.model.SerializeToString())}
            )
            broken.model.graph.node[0].op_type = "Add"
            with pytest.raises(AssertionError):
                run_case(broken, tmp_path / "case.onnx", "float32")
