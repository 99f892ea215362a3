"""ONNX Runtime's small fused operators, norms, gates and table look-ups against its CPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

CONTRIB = "com.microsoft"


def floats(random: np.random.RandomState, *shape: int) -> np.ndarray:
    """Standard normal numbers in fp32."""
    return random.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("op_type", "shapes", "attributes"),
    [
        ("Gelu", [(2, 3, 16)], {}),
        ("BiasGelu", [(2, 3, 16), (16,)], {}),
        ("FastGelu", [(2, 3, 16)], {}),
        ("FastGelu", [(2, 3, 16), (16,)], {}),
        ("QuickGelu", [(2, 3, 16)], {}),
        ("QuickGelu", [(2, 3, 16)], {"alpha": 0.7}),
        ("GatedAdd", [(2, 3, 16), (2, 3, 16), (2, 3, 1)], {}),
        ("FusedMatMul", [(2, 3, 4), (2, 4, 5)], {"alpha": 0.3}),
        ("FusedMatMul", [(2, 4, 3), (2, 4, 5)], {"transA": 1}),
        ("FusedMatMul", [(2, 3, 4), (5, 4)], {"transB": 1}),
        ("FusedMatMul", [(3, 2, 4), (4, 2, 5)], {"transBatchA": 1, "transBatchB": 1}),
        ("FusedMatMul", [(4, 2, 3), (5, 2, 4)], {f"trans{x}": 1 for x in ("A", "B", "BatchA", "BatchB")}),
        ("GatedRMSNorm", [(2, 3, 32), (32,), (2, 3, 32)], {}),
        ("GatedRMSNorm", [(2, 3, 32), (8,), (2, 3, 32)], {"activation": "sigmoid", "epsilon": 1e-3}),
        ("GatedRMSNorm", [(2, 3, 32), (8,), (2, 3, 32)], {"activation": "swish"}),
        ("LinearAttentionGate", [(2, 3, 4), (4,), (4,)], {}),
    ],
)
def test_formulas(
    op_type: str,
    shapes: list[tuple[int, ...]],
    attributes: dict[str, Any],
    against_ort: Callable[..., None],
    seeded: np.random.RandomState,
) -> None:
    """Each fused operator, for every attribute of it."""
    against_ort(op_type, [floats(seeded, *shape) for shape in shapes], **attributes)


def test_the_gate_gives_decay_and_beta(
    against_ort: Callable[..., None], seeded: np.random.RandomState
) -> None:
    """Both outputs; large projections reach the linear end of softplus."""
    a, b = floats(seeded, 2, 3, 4) * 20, floats(seeded, 2, 3, 4)
    against_ort("LinearAttentionGate", [a, floats(seeded, 4), floats(seeded, 4), b], outputs=2)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("sections", [(8, 0, 0), (4, 2, 2), (2, 3, 3), (3, 3, 2)])
def test_m_rotary_embedding(
    sections: tuple[int, int, int],
    layout: int,
    interleaved: int,
    rank: int,
    against_ort: Callable[..., None],
    seeded: np.random.RandomState,
) -> None:
    """Three streams of positions in both layouts, over the whole head and over a part of it."""
    batch, count, heads, width = 2, 3, 4, 24
    shape = (batch, heads, count, width) if rank == 4 else (batch, count, heads * width)
    angles, positions = floats(seeded, 32, 8), seeded.randint(0, 32, (3, batch, count))
    against_ort(
        "MRotaryEmbedding",
        [floats(seeded, *shape), positions.astype(np.int64), np.cos(angles), np.sin(angles)],
        mrope_section=list(sections),
        mrope_layout=layout,
        interleaved=interleaved,
        num_heads=heads,
        rotary_embedding_dim=16,
    )


def test_one_section_of_m_rotary_embedding_is_rotary_embedding(
    run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """With all columns following time it is the plain operator, whatever height and width say."""
    x, angles = floats(seeded, 1, 5, 64), floats(seeded, 16, 8)
    positions = seeded.randint(0, 16, (3, 1, 5))
    tables = [np.cos(angles), np.sin(angles)]
    options = {"domain": CONTRIB, "num_heads": 4}
    (plain,) = run_node("RotaryEmbedding", [x, positions[0], *tables], **options)
    (streams,) = run_node("MRotaryEmbedding", [x, positions, *tables], mrope_section=[8, 0, 0], **options)
    np.testing.assert_array_equal(streams, plain)


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("positions", ["", "shared", "own"])
def test_embed_layer_normalization(
    mask: bool,
    segments: bool,
    positions: str,
    against_ort: Callable[..., None],
    seeded: np.random.RandomState,
) -> None:
    """Word, position and segment tables, given positions, the mask's lengths and the sum."""
    shape = (2, 5)
    ids = [seeded.randint(0, n, shape).astype(np.int32) for n in (9, 2)]
    lengths = (np.arange(5) < np.array([[5], [3]])).astype(np.int32) if mask else None
    given = None
    if positions:
        given = seeded.randint(0, 6, (1 if positions == "shared" else 2, 5)).astype(np.int32)
    tables = [floats(seeded, n, 16) for n in (9, 6, 2)]
    inputs = [ids[0], ids[1] if segments else None, *tables[:2], tables[2] if segments else None]
    inputs += [floats(seeded, 16), floats(seeded, 16), lengths, given]
    while inputs[-1] is None:
        inputs.pop()
    against_ort("EmbedLayerNormalization", inputs, outputs=3, epsilon=1e-6)


def table_of(random: np.random.RandomState, kind: str, rows: int, width: int) -> tuple[np.ndarray, int, int]:
    """A quantised table of one kind, with the bits of a code and how many codes an element holds."""
    if kind.startswith("uint8"):
        bits = int(kind.removeprefix("uint8 of "))
        return random.randint(0, 256, (rows, width * bits // 8)).astype(np.uint8), bits, 8 // bits
    dtype = {"int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4}[kind]
    low = -8 if kind == "int4" else 0
    return random.randint(low, low + 16, (rows, width)).astype(dtype), 4, 1


@pytest.mark.parametrize("indices", [(), (0,), (4,), (2, 3)], ids=["scalar", "none", "vector", "matrix"])
@pytest.mark.parametrize("zero_points", [True, False])
@pytest.mark.parametrize("kind", ["int4", "uint4", "uint8 of 2", "uint8 of 4", "uint8 of 8"])
def test_gather_block_quantized(
    kind: str,
    zero_points: bool,
    indices: tuple[int, ...],
    against_ort: Callable[..., None],
    seeded: np.random.RandomState,
) -> None:
    """Every type of code, with and without zero points, a ragged last block, negative indices."""
    rows, width, block = 12, 48, 32
    table, bits, _ = table_of(seeded, kind, rows, width)
    scales = np.abs(floats(seeded, rows, 2)) + np.float32(0.1)
    where = np.asarray(seeded.randint(-rows, rows, indices), np.int64)
    inputs = [table, where, scales]
    if zero_points:
        inputs.append(table_of(seeded, kind, rows, max(2, 8 // bits))[0][:, : 2 if bits == 8 else None])
        if kind in ("int4", "uint4"):
            inputs[3] = inputs[3][:, :2]
    constants = tuple(i for i in range(len(inputs)) if i != 1)
    attributes: dict[str, Any] = {"bits": bits, "block_size": block, "quantize_axis": 1, "gather_axis": 0}
    against_ort("GatherBlockQuantized", inputs, constants=constants, **attributes)


@pytest.mark.parametrize("axes", [(0, 1), (1, 0), (0, 2), (2, 1), (1, -1)])
def test_gather_block_quantized_along_any_axes(
    axes: tuple[int, int], against_ort: Callable[..., None], seeded: np.random.RandomState
) -> None:
    """Look-up and blocks along any two axes of a table of rank 3."""
    gather, quantise = axes
    shape = [5, 6, 7]
    shape[quantise] = 32
    table = seeded.randint(-8, 8, shape).astype(ml_dtypes.int4)
    shape[quantise] = 2
    scales = np.abs(floats(seeded, *shape)) + np.float32(0.1)
    attributes: dict[str, Any] = {"block_size": 16, "quantize_axis": quantise, "gather_axis": gather}
    where = np.array([[3, 0], [1, 4]])
    against_ort("GatherBlockQuantized", [table, where, scales], constants=(0, 2), **attributes)


def test_an_index_outside_a_quantised_table_gives_zeros(
    run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """Unlike Gather, and as its specification says."""
    table, scales = seeded.randint(0, 256, (4, 16)).astype(np.uint8), np.ones((4, 1), np.float32)
    (y,) = run_node(
        "GatherBlockQuantized",
        [table, np.array([0, 4, -5]), scales],
        domain=CONTRIB,
        constants=(0, 2),
        bits=8,
        block_size=16,
    )
    assert not y[1:].any()
    np.testing.assert_array_equal(y[0], table[0] - 128.0)


@pytest.mark.parametrize("block", [0, 16])
@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_a_table_of_narrow_floats_is_their_values_times_the_scale(
    dtype: Any, block: int, run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """Block 0 is a scale a row; one scale may serve all rows."""
    table = floats(seeded, 6, 32).astype(dtype)
    scales = np.abs(floats(seeded, 1 if block else 6, 32 // block if block else 1))
    (y,) = run_node(
        "GatherBlockQuantized",
        [table, np.array([[5, 2]]), scales],
        domain=CONTRIB,
        constants=(0, 2),
        block_size=block,
    )
    wide = table.astype(np.float32) * np.repeat(scales, block or 32, axis=1)
    np.testing.assert_array_equal(y, wide[[[5, 2]]])
