"""ONNX's own node tests, read from the installed onnx, and short ways to run one node."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from harness.oracle import OracleModel
from harness.oracle.kernels import find
from harness.oracle.node import Node
from harness.oracle.planner import Budget
from harness.oracle.precision import Precision

# These modules compute images and pooling for ten seconds when imported; the oracle claims none of their
# operators, which test_node_tests.py checks.
SLOW_MODULES = {
    "_image_decoder_data",
    "averagepool",
    "globalaveragepool",
    "globalmaxpool",
    "image_decoder",
    "lppool",
    "maxpool",
}


@pytest.fixture(scope="session")
def onnx_node_cases() -> list[Any]:
    """All node tests (`onnx.backend.test.case.test_case.TestCase`) but those of `SLOW_MODULES`.

    onnx makes the cases when the modules that describe them are imported.
    """
    import onnx.backend.test.case.node as cases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they overflow and divide by zero on purpose
        for module in pkgutil.iter_modules(cases.__path__):
            if module.name not in SLOW_MODULES:
                importlib.import_module(f"{cases.__name__}.{module.name}")
    return list(cases._NodeTestCases)


RunNode = Callable[..., list[np.ndarray]]


@pytest.fixture
def run_node(tmp_path: Path) -> RunNode:
    """Runs one node on the oracle: `run_node(op, inputs, outputs=1, domain="", opset=24, **attributes)`.

    `inputs` are arrays or None for absent ones; all of them are graph inputs. Gives the outputs in order.
    """

    def run(
        op_type: str,
        inputs: list[Any],
        *,
        outputs: int = 1,
        domain: str = "",
        opset: int = 24,
        precision: str = "float32",
        constants: tuple[int, ...] = (),
        **attributes: Any,
    ) -> list[np.ndarray]:
        path = save_node(
            tmp_path / "node.onnx",
            op_type,
            inputs,
            outputs=outputs,
            domain=domain,
            opset=opset,
            constants=constants,
            **attributes,
        )
        model = OracleModel.load(path, precision=precision)
        feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None and i not in constants}
        results = model.run(feeds, [f"y{i}" for i in range(outputs)])
        return list(results.values())

    return run


def save_node(
    path: Path,
    op_type: str,
    inputs: list[Any],
    *,
    outputs: int = 1,
    domain: str = "",
    opset: int = 24,
    constants: tuple[int, ...] = (),
    **attributes: Any,
) -> Path:
    """A graph of one node with inputs x0, x1, .. and outputs y0, y1, ..; `constants` are initialisers."""
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op_type, names, results, domain=domain, name="the_node", **attributes)

    def elem_type(x: np.ndarray) -> int:
        return helper.np_dtype_to_tensor_dtype(x.dtype)

    given = [(i, x) for i, x in enumerate(inputs) if x is not None]
    graph = helper.make_graph(
        [node],
        "one_node",
        [
            helper.make_tensor_value_info(f"x{i}", elem_type(x), list(x.shape))
            for i, x in given
            if i not in constants
        ],
        [helper.make_tensor_value_info(name, elem_type(given[0][1]), None) for name in results],
        [onnx.numpy_helper.from_array(np.asarray(x), f"x{i}") for i, x in given if i in constants],
    )
    opsets = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


TOLERANCE = 1e-5
"""Largest difference relative to the largest expected value: ten times what fp32 sums of a few hundred
terms in another order may differ."""


@pytest.fixture
def against_ort(tmp_path: Path) -> Callable[..., None]:
    """Runs a node on ONNX Runtime and on the oracle, in both precisions, and compares all outputs."""

    def run(
        op_type: str,
        inputs: list[Any],
        *,
        outputs: int = 1,
        domain: str = "com.microsoft",
        unnamed: tuple[int, ...] = (),
        constants: tuple[int, ...] = (),
        opset: int = 22,
        **attributes: Any,
    ) -> None:
        path = save_node(
            tmp_path / "node.onnx",
            op_type,
            inputs,
            outputs=outputs,
            domain=domain,
            opset=opset,
            constants=constants,
            **attributes,
        )
        model = onnx.load(path)
        for port in model.graph.output:
            port.type.Clear()  # both infer it: not every output is of the first input's type
        for index in sorted(unnamed, reverse=True):
            model.graph.node[0].output[index] = ""
            del model.graph.output[index]
        onnx.save(model, path)
        feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None and i not in constants}
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = [port.name for port in model.graph.output]
        expected = session.run(names, feeds)
        for precision in ("float32", "float64"):
            got = OracleModel.load(path, precision=precision).run(feeds, names)
            for name, want in zip(names, expected, strict=True):
                assert got[name].shape == want.shape, name
                if want.dtype.kind != "f":
                    assert got[name].dtype == want.dtype, name
                    assert (got[name] == want).all(), name
                    continue
                finite = np.isfinite(want)
                np.testing.assert_array_equal(got[name][~finite], want[~finite], name)
                scale = float(np.abs(want[finite]).max(initial=1e-30))
                difference = np.abs(got[name][finite] - want[finite])
                assert float(difference.max(initial=0.0)) <= TOLERANCE * scale, name

    return run


@pytest.fixture(scope="session")
def bound() -> Callable[..., Any]:
    """What computes a node without a graph, for properties over thousands of them.

    `bound(op, version, domain="", inputs=1, constants={}, precision="float32", **attributes)`;
    `constants` are inputs known at planning, by position.
    """

    def bind(
        op_type: str,
        version: int,
        *,
        domain: str = "",
        inputs: int = 1,
        constants: dict[int, np.ndarray] | None = None,
        precision: Any = "float32",
        **attributes: Any,
    ) -> Callable[..., Any]:
        kernel = find(domain, op_type, version)
        assert kernel is not None
        node = Node(
            domain=domain,
            op_type=op_type,
            version=version,
            label="the_node",
            precision=Precision(precision),
            residency=Budget(0),
            attributes=attributes,
            present=[True] * inputs,
            constants=constants or {},
        )
        return kernel.bind(node)

    return bind


@pytest.fixture(scope="session")
def save_one_node() -> Callable[..., Path]:
    """The function `save_node`, for tests that run the graph on several engines."""
    return save_node


@pytest.fixture
def seeded() -> np.random.RandomState:
    """A generator whose stream numpy keeps for ever."""
    return np.random.RandomState(20240229)
