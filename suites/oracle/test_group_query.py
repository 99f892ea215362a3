"""Caches of GroupQueryAttention: quantised, of a window, and what it shows of its scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from harness.errors import EngineFailedError
from harness.oracle import OracleModel

CONTRIB = "com.microsoft"
HEADS, KV_HEADS, WIDTH = 4, 2, 16


def floats(random: np.random.RandomState, *shape: int) -> np.ndarray:
    """Standard normal numbers in fp32."""
    return random.standard_normal(shape).astype(np.float32)


def inputs_of(
    random: np.random.RandomState,
    caches: list[Any],
    *,
    past: int,
    new: int,
    batch: int = 1,
    extra: dict[int, Any] | None = None,
) -> list[Any]:
    """Inputs over given caches; `extra` by position."""
    inputs: list[Any] = [floats(random, batch, new, n * WIDTH) for n in (HEADS, KV_HEADS, KV_HEADS)]
    inputs += [*caches, np.full(batch, past + new - 1, np.int32), np.array(past + new, np.int32)]
    inputs += [None] * 9
    for position, value in (extra or {}).items():
        inputs[position] = value
    while inputs[-1] is None:
        inputs.pop()
    return inputs


ATTRIBUTES = {"num_heads": HEADS, "kv_num_heads": KV_HEADS}


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("static", [False, True], ids=["", "longer cache"])
@pytest.mark.parametrize(
    ("batch", "past", "new"), [(1, 0, 1), (1, 0, 5), (3, 0, 1), (3, 0, 5), (1, 3, 1), (1, 3, 5), (3, 3, 1)]
)
def test_positions_that_do_not_count_from_the_cache(
    batch: int,
    past: int,
    new: int,
    static: bool,
    interleaved: int,
    against_ort: Callable[..., None],
    seeded: np.random.RandomState,
) -> None:
    """Given positions hold token by token, but of a first prompt only the first one, as documented."""
    rows = past + new + 2 if static else past
    caches = [floats(seeded, batch, KV_HEADS, rows, WIDTH) for _ in range(2)]
    angles, positions = floats(seeded, 24, WIDTH // 2), seeded.randint(0, 16, (batch, new))
    extra = {7: np.cos(angles), 8: np.sin(angles), 9: positions.astype(np.int64)}
    inputs = inputs_of(seeded, caches, past=past, new=new, batch=batch, extra=extra)
    against_ort(
        "GroupQueryAttention",
        inputs,
        outputs=3,
        do_rotary=1,
        rotary_interleaved=interleaved,
        **ATTRIBUTES,
    )


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("granularity", ["PER_TENSOR", "PER_CHANNEL"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_cache(
    bits: int,
    granularity: str,
    new: int,
    past: int,
    against_ort: Callable[..., None],
    seeded: np.random.RandomState,
) -> None:
    """Codes of the new rows are exact, and attention is over what the codes stand for."""
    shape = (1, KV_HEADS, past, WIDTH if bits == 8 else WIDTH // 2)
    low, high, dtype = (-128, 128, np.int8) if bits == 8 else (0, 256, np.uint8)
    caches = [seeded.randint(low, high, shape).astype(dtype) for _ in range(2)]
    scale_shape = (1,) if granularity == "PER_TENSOR" else (1, KV_HEADS, 1, WIDTH)
    scales = [(np.abs(floats(seeded, *scale_shape)) + 1) * np.float32(4 / 2**bits) for _ in range(2)]
    inputs = inputs_of(seeded, caches, past=past, new=new, extra={12: scales[0], 13: scales[1]})
    against_ort(
        "GroupQueryAttention",
        inputs,
        outputs=3,
        k_quant_type=granularity,
        v_quant_type=granularity,
        kv_cache_bit_width=bits,
        **ATTRIBUTES,
    )


@pytest.mark.parametrize(
    ("dtype", "quant_type", "bits"),
    [
        (np.int8, "NONE", 0),
        (np.uint8, "NONE", 4),
        (ml_dtypes.float8_e4m3fn, "NONE", 8),
        (np.float32, "PER_TENSOR", 8),
        (np.float16, "PER_CHANNEL", 0),
        (ml_dtypes.float8_e5m2, "PER_TENSOR", 8),
        (np.int8, "PER_TENSOR", 4),
        (np.uint8, "PER_TENSOR", 8),
        (ml_dtypes.float8_e4m3fn, "PER_TENSOR", 4),
        (np.int8, "PER_TENSOR", 2),
        (np.int16, "PER_TENSOR", 8),
    ],
)
@pytest.mark.parametrize("sides", ["kv", "k", "v"])
def test_a_cache_whose_type_is_not_that_of_its_codes_is_refused(
    sides: str,
    dtype: Any,
    quant_type: str,
    bits: int,
    tmp_path: Path,
    save_one_node: Callable[..., Path],
    seeded: np.random.RandomState,
) -> None:
    """When the graph is loaded: rows of codes and of numbers in one cache would be neither."""
    scale = np.array([0.5], np.float32)
    caches = [np.zeros((1, KV_HEADS, 3, WIDTH), dtype if side in sides else np.int8) for side in "kv"]
    inputs = inputs_of(seeded, caches, past=3, new=2, extra={12: scale, 13: scale})
    kinds = {f"{side}_quant_type": quant_type if side in sides else "PER_TENSOR" for side in "kv"}
    path = save_one_node(
        tmp_path / "m.onnx",
        "GroupQueryAttention",
        inputs,
        outputs=3,
        domain=CONTRIB,
        kv_cache_bit_width=bits,
        **kinds,
        **ATTRIBUTES,
    )
    with pytest.raises(EngineFailedError, match=r"and a cache of") as error:
        OracleModel.load(path)
    assert error.value.kind == "unsupported"


@pytest.mark.parametrize("bits", [8, 4])
def test_the_type_of_a_quantised_cache_says_its_bits(
    bits: int, run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """Where `kv_cache_bit_width` does not; ONNX Runtime's CPU kernel wants both."""
    dtype, width = (np.int8, WIDTH) if bits == 8 else (np.uint8, WIDTH // 2)
    caches = [seeded.randint(0, 100, (1, KV_HEADS, 3, width)).astype(dtype) for _ in range(2)]
    scale = np.array([0.5], np.float32)
    inputs = inputs_of(seeded, caches, past=3, new=2, extra={12: scale, 13: scale})
    kinds = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
    options = {"domain": CONTRIB, "outputs": 3, **kinds, **ATTRIBUTES}
    want = run_node("GroupQueryAttention", inputs, kv_cache_bit_width=bits, **options)
    for got, expected in zip(run_node("GroupQueryAttention", inputs, **options), want, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_an_fp8_cache_is_a_cache_of_scaled_floats(
    run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """ONNX Runtime's CPU kernel has none: what is stored times the scale is what a plain cache holds.

    The oracle drops narrowing, so the new rows are stored unrounded.
    """
    stored = [floats(seeded, 1, KV_HEADS, 3, WIDTH).astype(ml_dtypes.float8_e4m3fn) for _ in range(2)]
    scales = [np.array([0.5], np.float32), np.array([0.25], np.float32)]
    inputs = inputs_of(seeded, stored, past=3, new=2, extra={12: scales[0], 13: scales[1]})
    options = {"domain": CONTRIB, "outputs": 3, **ATTRIBUTES}
    kinds = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
    y, *present = run_node("GroupQueryAttention", inputs, **options, **kinds)
    plain = [x.astype(np.float32) * scale for x, scale in zip(stored, scales, strict=True)]
    want, *caches = run_node("GroupQueryAttention", [*inputs[:3], *plain, *inputs[5:7]], **options)
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)
    for got, scale, cache in zip(present, scales, caches, strict=True):
        np.testing.assert_array_equal(got * scale, cache)


WINDOW_CASES = [
    # capacity, window, positions seen, new
    (6, 4, 3, 1),
    (6, 4, 6, 1),
    (6, 4, 7, 1),
    (6, 4, 9, 3),
    (4, 4, 9, 1),
    (4, 4, 9, 6),
    (7, 2, 20, 2),
    (6, 4, 0, 5),
    (6, 4, 0, 9),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("capacity", "window", "seen", "new"), WINDOW_CASES)
def test_a_cache_of_a_window(
    capacity: int,
    window: int,
    seen: int,
    new: int,
    bias: bool,
    tmp_path: Any,
    save_one_node: Callable[..., Any],
    seeded: np.random.RandomState,
) -> None:
    """Output, and the resident rows of the cache, are ONNX Runtime's; rows behind them are unspecified."""
    import onnxruntime

    from harness.oracle.kernels.kv_cache import resident_rows

    caches = [floats(seeded, 1, KV_HEADS, capacity, WIDTH) for _ in range(2)]
    extra = {10: floats(seeded, 1, HEADS, new, seen + new)} if bias else {}
    inputs = inputs_of(seeded, caches, past=seen, new=new, extra=extra)
    path = save_one_node(
        tmp_path / "m.onnx",
        "GroupQueryAttention",
        inputs,
        outputs=3,
        domain=CONTRIB,
        opset=22,
        local_window_size=window,
        sliding_window_cache=1,
        **ATTRIBUTES,
    )
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    names = ["y0", "y1", "y2"]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    expected = dict(zip(names, session.run(names, feeds), strict=True))
    got = OracleModel.load(path).run(feeds, names)
    np.testing.assert_allclose(got["y0"], expected["y0"], rtol=1e-5, atol=1e-5)
    rows = resident_rows(seen + new, capacity, window)
    for name in names[1:]:
        assert got[name].shape == expected[name].shape
        np.testing.assert_array_equal(got[name][:, :, :rows], expected[name][:, :, :rows])


@pytest.mark.parametrize("capacity", [4, 6, 9])
def test_a_cache_of_a_window_is_the_whole_cache_seen_through_a_window(
    capacity: int, run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """Step by step and in uneven chunks, outputs are those of a cache that keeps everything."""
    count, window = 14, 4
    rows = [floats(seeded, 1, count, n * WIDTH) for n in (HEADS, KV_HEADS, KV_HEADS)]
    options = {"domain": CONTRIB, "outputs": 3, "local_window_size": window, **ATTRIBUTES}
    ends = (np.array([count - 1], np.int32), np.array(count, np.int32))
    want = run_node("GroupQueryAttention", [*rows, None, None, *ends], **options)[0]
    for sizes in ([1] * count, [5, 1, 1, 7]):
        caches: Any = [np.zeros((1, KV_HEADS, capacity, WIDTH), np.float32)] * 2
        start, pieces = 0, []
        for size in sizes:
            end = start + size
            ends = (np.array([end - 1], np.int32), np.array(end, np.int32))
            piece = [x[:, start:end] for x in rows]
            y, *caches = run_node(
                "GroupQueryAttention", [*piece, *caches, *ends], sliding_window_cache=1, **options
            )
            pieces.append(y)
            start = end
        np.testing.assert_allclose(np.concatenate(pieces, axis=1), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shown", [1, 2])
@pytest.mark.parametrize("case", ["plain", "bias", "window", "sink"])
def test_the_scores_that_it_shows(
    case: str, shown: int, against_ort: Callable[..., None], seeded: np.random.RandomState
) -> None:
    """Before the softmax, after cap and bias (1), or after it (2); zero where a query may not look."""
    caches = [floats(seeded, 1, KV_HEADS, 3, WIDTH) for _ in range(2)]
    extra = {}
    if case == "bias":
        extra[10] = floats(seeded, 1, HEADS, 2, 5)
    if case == "sink":
        extra[11] = floats(seeded, HEADS)
    options: dict[str, Any] = {"local_window_size": 3} if case == "window" else {}
    inputs = inputs_of(seeded, caches, past=3, new=2, extra=extra)
    against_ort(
        "GroupQueryAttention", inputs, outputs=4, qk_output=shown, softcap=2.0, **options, **ATTRIBUTES
    )


@pytest.mark.parametrize("window", [-1, 3])
@pytest.mark.parametrize("past", [0, 4])
@pytest.mark.parametrize("new", [1, 5])
def test_keys_and_values_of_another_layer(
    new: int, past: int, window: int, against_ort: Callable[..., None], seeded: np.random.RandomState
) -> None:
    """Layers that share a cache: no rows of their own, and for a past the present of another layer."""
    caches = [floats(seeded, 1, KV_HEADS, past + new, WIDTH) for _ in range(2)]
    inputs = inputs_of(
        seeded, caches, past=past, new=new, extra={7: floats(seeded, 16, 8), 8: floats(seeded, 16, 8)}
    )
    inputs[1] = inputs[2] = floats(seeded, 1, 0, KV_HEADS * WIDTH)
    against_ort("GroupQueryAttention", inputs, outputs=3, do_rotary=1, local_window_size=window, **ATTRIBUTES)


def test_norms_of_queries_and_keys_come_before_the_rotation(
    run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """No CPU kernel has them: the same as RMSNormalization of each head before the operator."""
    caches = [floats(seeded, 1, KV_HEADS, 3, WIDTH) for _ in range(2)]
    angles = floats(seeded, 8, WIDTH // 2)
    norms = [floats(seeded, WIDTH) for _ in range(2)]
    extra = {7: np.cos(angles), 8: np.sin(angles), 14: norms[0], 15: norms[1]}
    inputs = inputs_of(seeded, caches, past=3, new=2, extra=extra)
    options = {"domain": CONTRIB, "outputs": 3, "do_rotary": 1, **ATTRIBUTES}
    got = run_node("GroupQueryAttention", inputs, qk_norm_epsilon=1e-3, **options)
    normed = []
    for x, norm in zip(inputs[:2], norms, strict=True):
        split = x.reshape(1, 2, -1, WIDTH)
        (y,) = run_node("RMSNormalization", [split, norm], epsilon=1e-3)
        normed.append(y.reshape(x.shape))
    want = run_node("GroupQueryAttention", [*normed, *inputs[2:9]], **options)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
