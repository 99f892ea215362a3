"""MultiHeadAttention and the Attention of ONNX Runtime against its CPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from harness.errors import EngineFailedError
from harness.oracle import OracleModel

HEADS, WIDTH = 4, 8


def floats(random: np.random.RandomState, *shape: int) -> np.ndarray:
    """Standard normal numbers in fp32."""
    return random.standard_normal(shape).astype(np.float32)


def mask_of(kind: str, *, new: int, total: int) -> np.ndarray:
    """A key mask of one kind for a batch of 2, int32; the second entry has one key less at one end."""
    if kind == "lengths":
        return np.array([total, total - 1], np.int32)
    if kind == "ends and starts":
        return np.array([total, total, 0, 1], np.int32)
    keys = np.ones((2, total), np.int32)
    keys[1, 0] = 0
    if kind == "keys":
        return keys
    if kind == "nothing left":
        keys[1] = 0
        return keys
    return np.tri(new, total, total - new, dtype=np.int32)[None] * keys[:, None]


MULTI_HEAD_CASES: dict[str, dict[str, Any]] = {
    "self": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.3},
    "causal": {"unidirectional": 1},
    "past": {"past": 3},
    "past, causal, bias": {"past": 3, "unidirectional": 1, "bias": True},
    "values of another width": {"value_width": 6},
    "cross": {"layout": "cross", "keys": 5},
    "cross with bias": {"layout": "cross", "keys": 5, "bias": True},
    "unprojected cross": {"keys": 5, "bias": True},
    "mask over keys": {"mask": "keys"},
    "mask over keys, past, causal": {"mask": "keys", "past": 2, "unidirectional": 1},
    "mask of lengths": {"mask": "lengths"},
    "mask over queries and keys": {"mask": "queries", "mask_filter_value": -32.0},
    "mask that leaves nothing": {"mask": "nothing left", "mask_filter_value": -32.0},
    "another mask value": {"mask": "keys", "mask_filter_value": -3.0},
    "attention bias": {"attention_bias": (2, HEADS)},
    "attention bias for all": {"attention_bias": (1, 1), "past": 2},
    "one step": {"new": 1, "past": 4},
}


@pytest.mark.parametrize("case", MULTI_HEAD_CASES.values(), ids=MULTI_HEAD_CASES)
def test_multi_head_attention(
    case: dict[str, Any], against_ort: Callable[..., None], seeded: np.random.RandomState
) -> None:
    """Every layout of queries, keys and values, every mask, and a cache."""
    case = dict(case)
    new, past = case.pop("new", 3), case.pop("past", 0)
    keys, value_width = case.pop("keys", new), case.pop("value_width", WIDTH)
    total, layout = past + keys, case.pop("layout", "")
    query = floats(seeded, 2, new, HEADS * WIDTH)
    key, value = floats(seeded, 2, keys, HEADS * WIDTH), floats(seeded, 2, keys, HEADS * value_width)
    inputs: list[Any] = [query, key, value, None, None, None, None, None]
    if layout == "cross":
        inputs[1:3] = [floats(seeded, 2, HEADS, keys, WIDTH) for _ in range(2)]
    if case.pop("bias", False):
        inputs[3] = floats(seeded, HEADS * (2 * WIDTH + value_width))
    if "mask" in case:
        inputs[4] = mask_of(case.pop("mask"), new=new, total=total)
    if "attention_bias" in case:
        inputs[5] = floats(seeded, *case.pop("attention_bias"), new, total)
    outputs = 1
    if past:
        inputs[6:8] = [floats(seeded, 2, HEADS, past, WIDTH) for _ in range(2)]
        outputs = 3
    while inputs[-1] is None:
        inputs.pop()
    against_ort("MultiHeadAttention", inputs, outputs=outputs, num_heads=HEADS, **case)


@pytest.mark.parametrize("past", [0, 2])
@pytest.mark.parametrize("keys", [1, 3, 5])
@pytest.mark.parametrize("new", [1, 2, 3, 6])
def test_unequal_counts_of_queries_and_keys_are_causal_from_the_first_key_on(
    new: int, keys: int, past: int, against_ort: Callable[..., None], seeded: np.random.RandomState
) -> None:
    """Query i sees keys up to P + i, and the last one all of them, as in ONNX Runtime's CPU kernel.

    Its documentation says that a token attends to earlier ones only, and not where tokens stand.
    """
    inputs = [floats(seeded, 2, count, HEADS * WIDTH) for count in (new, keys, keys)]
    if past:
        inputs += [None, None, None, *(floats(seeded, 2, HEADS, past, WIDTH) for _ in range(2))]
    against_ort("MultiHeadAttention", inputs, outputs=3 if past else 1, num_heads=HEADS, unidirectional=1)


@pytest.mark.parametrize(("new", "keys"), [(0, 2), (2, 0), (0, 0)])
@pytest.mark.parametrize("past", [0, 2])
@pytest.mark.parametrize("causal", [0, 1])
def test_without_queries_or_keys(
    new: int,
    keys: int,
    past: int,
    causal: int,
    against_ort: Callable[..., None],
    seeded: np.random.RandomState,
) -> None:
    """No query gives nothing, and a query that has no key zeros."""
    inputs = [floats(seeded, 2, count, HEADS * WIDTH) for count in (new, keys, keys)]
    if past:
        inputs += [None, None, None, *(floats(seeded, 2, HEADS, past, WIDTH) for _ in range(2))]
    against_ort(
        "MultiHeadAttention", inputs, outputs=3 if past else 1, num_heads=HEADS, unidirectional=causal
    )


def test_the_fourth_output_is_the_masked_scores(
    tmp_path: Path, save_one_node: Callable[..., Path], seeded: np.random.RandomState
) -> None:
    """Scores with mask and causality added, as ONNX Runtime gives them for word timestamps."""
    inputs = [floats(seeded, 2, 3, HEADS * WIDTH) for _ in range(3)]
    inputs += [None, mask_of("keys", new=3, total=5), None]
    inputs += [floats(seeded, 2, HEADS, 2, WIDTH) for _ in range(2)]
    path = save_one_node(
        tmp_path / "m.onnx",
        "MultiHeadAttention",
        inputs,
        outputs=4,
        domain="com.microsoft",
        opset=22,
        num_heads=HEADS,
        unidirectional=1,
    )
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (expected,) = session.run(["y3"], feeds)
    np.testing.assert_allclose(
        OracleModel.load(path).run(feeds, ["y3"])["y3"], expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("packed", ["qkv", "kv"])
def test_packed_projections_are_the_same_numbers_in_one_tensor(
    packed: str, run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """ONNX Runtime's CPU kernel has no packed form; both give what separate inputs give."""
    parts = [floats(seeded, 2, 3, HEADS, WIDTH) for _ in range(3)]
    bias, (q, k, v) = floats(seeded, 3 * HEADS * WIDTH), (x.reshape(2, 3, -1) for x in parts)
    if packed == "qkv":
        given: list[Any] = [np.stack(parts, axis=3), None, None]
    else:
        given = [q, np.stack(parts[1:], axis=3), None]
    options = {"domain": "com.microsoft", "num_heads": HEADS, "unidirectional": 1}
    (apart,) = run_node("MultiHeadAttention", [q, k, v, bias], **options)
    (together,) = run_node("MultiHeadAttention", [*given, bias], **options)
    np.testing.assert_array_equal(together, apart)


ATTENTION_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"unidirectional": 1},
    "scale": {"scale": 0.3},
    "values of another width": {"value_width": 6},
    "past": {"past": 3, "unidirectional": 1},
    "one step": {"past": 3, "new": 1, "unidirectional": 1},
    "mask over keys": {"mask": "keys"},
    "mask of lengths": {"mask": "lengths"},
    "mask of ends and starts": {"mask": "ends and starts"},
    "mask over queries and keys": {"mask": "queries", "past": 2, "mask_filter_value": -32.0},
    "mask that leaves nothing": {"mask": "nothing left", "mask_filter_value": -32.0},
    "another mask value": {"mask": "keys", "mask_filter_value": -3.0, "unidirectional": 1},
    "attention bias": {"attention_bias": True},
}


@pytest.mark.parametrize("case", ATTENTION_CASES.values(), ids=ATTENTION_CASES)
def test_attention_behind_its_own_projection(
    case: dict[str, Any], against_ort: Callable[..., None], seeded: np.random.RandomState
) -> None:
    """The older Attention of com.microsoft: projection, masks, the joint cache."""
    case = dict(case)
    new, past, value_width = case.pop("new", 3), case.pop("past", 0), case.pop("value_width", WIDTH)
    total = past + new
    columns = HEADS * (2 * WIDTH + value_width)
    x, weight = floats(seeded, 2, new, 20), floats(seeded, 20, columns) * np.float32(0.3)
    mask = mask_of(case.pop("mask"), new=new, total=total) if "mask" in case else None
    cache = floats(seeded, 2, 2, HEADS, past, WIDTH) if past else None
    bias = floats(seeded, 2, HEADS, new, total) if case.pop("attention_bias", False) else None
    inputs = [x, weight, floats(seeded, columns), mask, cache, bias]
    while inputs[-1] is None:
        inputs.pop()
    if value_width != WIDTH:
        case["qkv_hidden_sizes"] = [HEADS * WIDTH, HEADS * WIDTH, HEADS * value_width]
    against_ort("Attention", inputs, constants=(1, 2), outputs=2 if past else 1, num_heads=HEADS, **case)


@pytest.mark.parametrize("value_width", [2, 12])
@pytest.mark.parametrize("case", ["present", "past"])
def test_one_cache_of_unequal_keys_and_values_is_refused(
    case: str, value_width: int, tmp_path: Path, save_one_node: Callable[..., Path]
) -> None:
    """Before anything runs: past and present have one width for keys and values."""
    columns = HEADS * (2 * WIDTH + value_width)
    x, weight, b = (np.zeros(shape, np.float32) for shape in ((1, 3, 20), (20, columns), columns))
    inputs = [x, weight, b] + (
        [None, np.zeros((2, 1, HEADS, 2, WIDTH), np.float32)] if case == "past" else []
    )
    path = save_one_node(
        tmp_path / "m.onnx",
        "Attention",
        inputs,
        outputs=2 if case == "present" else 1,
        domain="com.microsoft",
        num_heads=HEADS,
        qkv_hidden_sizes=[HEADS * WIDTH, HEADS * WIDTH, HEADS * value_width],
    )
    with pytest.raises(EngineFailedError, match="one cache of keys and values that differ in width") as error:
        OracleModel.load(path)
    assert error.value.kind == "unsupported"


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_prompt_in_pieces_is_the_whole_prompt(
    step: int, run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """Causal MultiHeadAttention over its own cache, piece by piece, in float64."""
    count = 5
    q, k, v = (floats(seeded, 1, count, HEADS * WIDTH) for _ in range(3))
    options = {"domain": "com.microsoft", "precision": "float64", "num_heads": HEADS, "unidirectional": 1}
    (whole,) = run_node("MultiHeadAttention", [q, k, v], **options)
    caches = [np.zeros((1, HEADS, 0, WIDTH), np.float32)] * 2
    pieces = []
    for start in range(0, count, step):
        piece = [x[:, start : start + step] for x in (q, k, v)]
        y, *caches = run_node(
            "MultiHeadAttention", [*piece, None, None, None, *np.float32(caches)], outputs=3, **options
        )
        pieces.append(y)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes"),
    [
        ("MultiHeadAttention", 9, {}),
        ("Attention", 3, {"do_rotary": 1}),
        ("Attention", 3, {"past_present_share_buffer": 1}),
    ],
)
def test_caches_shared_by_beams_are_refused(
    op_type: str,
    inputs: int,
    attributes: dict[str, Any],
    tmp_path: Path,
    save_one_node: Callable[..., Path],
) -> None:
    """What belongs to beam search, or what no CPU kernel has, is refused when the graph is loaded."""
    one = np.zeros((1, 1, 32), np.float32)
    path = save_one_node(
        tmp_path / "m.onnx", op_type, [one] * inputs, domain="com.microsoft", num_heads=4, **attributes
    )
    with pytest.raises(EngineFailedError, match=f"{op_type} of domain com.microsoft with") as error:
        OracleModel.load(path)
    assert error.value.kind == "unsupported"
