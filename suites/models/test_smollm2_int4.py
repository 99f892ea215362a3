"""Four-bit quantisation, on matrices of every kind; needs no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fixtures.effort import examples
from harness.models.graph import GraphBuilder
from harness.models.smollm2_int4 import ACCURACY_LEVEL, BLOCK_SIZE, dequantise, linear_int4, quantise

if TYPE_CHECKING:
    from numpy.typing import NDArray


@st.composite
def matrices(draw: st.DrawFn) -> NDArray[np.float32]:
    """Up to 3 x 160, with odd numbers of blocks, of any scale, rows all positive or all zero included."""
    shape = (draw(st.integers(1, 3)), BLOCK_SIZE * draw(st.integers(1, 5)))
    elements = st.floats(-1, 1, width=32)
    matrix = draw(hnp.arrays(np.float32, shape, elements=elements, fill=elements))
    scale = draw(st.sampled_from([0.0, 1e-44, 1e-38, 1e-3, 1.0, 1e30]))
    shift = draw(st.sampled_from([0.0, -1.0, 1.0, 100.0]))
    return np.asarray((matrix + np.float32(shift)) * np.float32(scale), dtype=np.float32)


def blocks_of(matrix: NDArray[Any]) -> NDArray[Any]:
    """[N, K] as [N, K/32, 32]."""
    return matrix.reshape(matrix.shape[0], -1, BLOCK_SIZE)


@given(matrices())
def test_every_weight_moves_by_at_most_half_a_step(matrix: NDArray[np.float32]) -> None:
    """A step is the block's scale. Rounding in fp32 may add some millionths of the largest weight."""
    quantised = quantise(matrix)
    error = np.abs(blocks_of(dequantise(quantised).astype(np.float64) - matrix)).max(axis=-1)
    slack = 4e-6 * np.abs(blocks_of(matrix)).max(axis=-1).astype(np.float64)
    assert (error <= quantised.scales.astype(np.float64) / 2 + slack).all()


@given(matrices())
def test_a_step_is_a_fifteenth_of_the_range(matrix: NDArray[np.float32]) -> None:
    """Half a step would be easy with large steps: the range of a block and zero spans fifteen of them."""
    with_zero = np.concatenate([blocks_of(matrix), np.zeros_like(blocks_of(matrix)[..., :1])], axis=-1)
    span = with_zero.max(axis=-1).astype(np.float64) - with_zero.min(axis=-1)
    smallest_normal = float(np.finfo(np.float32).tiny)
    expected = np.maximum(span / 15, smallest_normal)
    np.testing.assert_allclose(quantise(matrix).scales, expected, rtol=1e-6)


@given(matrices(), st.randoms(use_true_random=False))
def test_zero_stays_zero(matrix: NDArray[np.float32], random: Any) -> None:
    """With an integer zero point, zero has a code of its own."""
    column = random.randrange(matrix.shape[1])
    matrix[:, column] = 0
    assert (dequantise(quantise(matrix))[:, column] == 0).all()


def test_codes_of_a_block_worked_out_by_hand() -> None:
    """Weights -5, -4, ..., 10 have scale 1 and zero point 5: their codes are 0, 1, ..., 15, even ones low."""
    weights = np.tile(np.arange(-5, 11, dtype=np.float32), 2)[None]
    quantised = quantise(np.concatenate([weights, weights, weights], axis=1))
    pairs = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert quantised.codes.tolist() == [[pairs * 2] * 3]
    assert quantised.scales.tolist() == [[1.0, 1.0, 1.0]]
    assert quantised.zero_points.tolist() == [[0x55, 0x05]]


@pytest.mark.parametrize(
    "matrix",
    [
        np.zeros((2, 33), np.float32),
        np.full((1, 32), np.nan, np.float32),
        np.full((1, 32), np.inf, np.float32),
    ],
    ids=["33 columns", "NaN", "infinity"],
)
def test_what_has_no_four_bit_form_is_refused(matrix: NDArray[np.float32]) -> None:
    """Half a block, or a weight that is no number."""
    with pytest.raises(ValueError, match="multiple of 32, all finite"):
        quantise(matrix)


@settings(max_examples=examples(15))
@given(matrices(), st.integers(0, 2**32 - 1))
def test_an_engine_computes_with_the_dequantised_weights(matrix: NDArray[np.float32], seed: int) -> None:
    """ONNX Runtime at level 0 (fp32) on what we packed gives the product with `dequantise`'s matrix.

    So that layout, order of the nibbles, and padding of an odd number of zero points are the operator's.
    """
    columns = matrix.shape[1]
    x = np.random.default_rng(seed).standard_normal((3, columns)).astype(np.float32)
    expected = x.astype(np.float64) @ dequantise(quantise(matrix)).astype(np.float64).T
    found = run_projection(matrix, x, level=0)
    bound = np.abs(x).astype(np.float64) @ np.abs(dequantise(quantise(matrix))).astype(np.float64).T
    assert (np.abs(found - expected) <= 1e-5 * bound + 1e-36).all()


def test_level_4_takes_effect() -> None:
    """At the level we set, ONNX Runtime rounds activations to int8, which float zero points would prevent.

    Seen from outside: it is off the exact product by far more than at level 0.
    """
    random = np.random.default_rng(0)
    matrix = random.standard_normal((64, 256)).astype(np.float32)
    x = random.standard_normal((1, 256)).astype(np.float32)
    exact = x.astype(np.float64) @ dequantise(quantise(matrix)).astype(np.float64).T
    error = {level: np.abs(run_projection(matrix, x, level=level) - exact).max() for level in (0, 4)}
    assert ACCURACY_LEVEL == 4
    assert error[4] > 1000 * error[0]


def run_projection(matrix: NDArray[np.float32], x: NDArray[np.float32], *, level: int) -> NDArray[np.float32]:
    """One `linear_int4` on ONNX Runtime's CPU provider, its accuracy level replaced by `level`."""
    import onnx

    graph = GraphBuilder("one")
    graph.input("x", "float32", ("rows", matrix.shape[1]))
    projected = linear_int4(graph, "x", matrix, name="projection")
    graph.output(projected, "float32", ("rows", matrix.shape[0]))
    opsets = [onnx.helper.make_opsetid("", 24), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph.graph(), opset_imports=opsets, ir_version=10)
    (attribute,) = [a for a in model.graph.node[0].attribute if a.name == "accuracy_level"]
    assert attribute.i == ACCURACY_LEVEL
    attribute.i = level
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0], dtype=np.float32)
