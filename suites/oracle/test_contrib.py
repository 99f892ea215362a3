"""ONNX Runtime's operators against its CPU kernels; where it has none, against another form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import EngineFailedError
from harness.oracle import OracleModel

CONTRIB = "com.microsoft"


def floats(random: np.random.RandomState, *shape: int) -> np.ndarray:
    """Standard normal numbers in fp32."""
    return random.standard_normal(shape).astype(np.float32)


GQA_CASES: dict[str, dict[str, Any]] = {
    "first prompt": {"new": 3},
    "one step": {"past": 5},
    "chunk behind a past": {"past": 5, "new": 3},
    "packed": {"past": 4, "new": 2, "packed": True},
    "rotary": {"past": 4, "new": 2, "rotary": True},
    "rotary packed interleaved": {"past": 6, "rotary": True, "packed": True, "rotary_interleaved": 1},
    "rotary at given positions": {"past": 4, "new": 2, "rotary": True, "positions": True},
    "partial rotary": {"past": 4, "rotary": True, "width": 32, "turned": 16},
    "softcap": {"past": 6, "new": 2, "softcap": 1.5},
    "window in a step": {"past": 9, "new": 2, "local_window_size": 4},
    "window in a prompt": {"new": 9, "local_window_size": 3},
    "scale": {"past": 4, "new": 2, "scale": 0.3},
    "smooth softmax": {"past": 4, "new": 2, "smooth_softmax": 1},
    "head sink": {"past": 4, "new": 2, "sink": True},
    "bias and softcap": {"past": 4, "new": 2, "bias": True, "softcap": 1.2},
    "not causal": {"past": 4, "new": 2, "causal": 0},
    "batch": {"past": 5, "batch": 2},
    "batch of unequal lengths": {
        "past": 7,
        "batch": 2,
        "last": (7, 4),
        "rotary": True,
        "local_window_size": 3,
    },
    "prompts of unequal lengths": {"new": 4, "batch": 2, "last": (3, 1), "rotary": True},
    "no past": {"new": 4, "batch": 2, "no_past": True},
    "longer cache": {"past": 3, "new": 2, "cache": 16},
    "longer cache, first prompt": {"new": 2, "cache": 16},
    "multi-query": {"past": 3, "new": 2, "kv_heads": 1},
}


@pytest.mark.parametrize("case", GQA_CASES.values(), ids=GQA_CASES)
def test_group_query_attention(
    case: dict[str, Any], against_ort: Callable[..., None], seeded: np.random.RandomState
) -> None:
    """Output and grown caches are those of ONNX Runtime, for each attribute and layout that it takes."""
    case = dict(case)
    batch, past, new, heads = (
        case.pop(name, n) for name, n in (("batch", 1), ("past", 0), ("new", 1), ("h", 4))
    )
    kv_heads, width = case.pop("kv_heads", 2), case.pop("width", 16)
    total, cache = past + new, case.pop("cache", past)
    if case.pop("packed", False):
        qkv = [floats(seeded, batch, new, (heads + 2 * kv_heads) * width), None, None]
    else:
        qkv = [floats(seeded, batch, new, n * width) for n in (heads, kv_heads, kv_heads)]
    pasts: list[Any] = [floats(seeded, batch, kv_heads, cache, width) for _ in range(2)]
    if case.pop("no_past", False):
        pasts = [None, None]
    last = np.array(case.pop("last", [total - 1] * batch), np.int32)
    tables: list[Any] = [None, None]
    if case.pop("rotary", False):
        angles = floats(seeded, 32, case.pop("turned", width) // 2)
        tables, case["do_rotary"] = [np.cos(angles), np.sin(angles)], 1
    positions = np.arange(past, total)[None].repeat(batch, 0) if case.pop("positions", False) else None
    bias = floats(seeded, 1, heads, new, total) if case.pop("bias", False) else None
    sink = floats(seeded, heads) if case.pop("sink", False) else None
    inputs = [*qkv, *pasts, last, np.array(total, np.int32), *tables, positions, bias, sink]
    while inputs[-1] is None:
        inputs.pop()
    against_ort("GroupQueryAttention", inputs, outputs=3, num_heads=heads, kv_num_heads=kv_heads, **case)


ROTARY_CASES: dict[str, dict[str, Any]] = {
    "merged heads": {},
    "interleaved": {"interleaved": 1},
    "rank 4": {"rank": 4, "batch": 2},
    "first position only": {"first_only": True, "batch": 2},
    "part of the head": {"turned": 8, "rotary_embedding_dim": 8, "num_heads": 4},
    "part of the head, interleaved, rank 4": {
        "turned": 8,
        "rotary_embedding_dim": 8,
        "num_heads": 4,
        "interleaved": 1,
        "rank": 4,
    },
}


@pytest.mark.parametrize("case", ROTARY_CASES.values(), ids=ROTARY_CASES)
def test_rotary_embedding(
    case: dict[str, Any], against_ort: Callable[..., None], seeded: np.random.RandomState
) -> None:
    """Every layout and form of ONNX Runtime's RotaryEmbedding."""
    case = dict(case)
    batch, count, heads, width = case.pop("batch", 1), 3, 4, 16
    shape = (batch, heads, count, width) if case.pop("rank", 3) == 4 else (batch, count, heads * width)
    angles = floats(seeded, 32, case.pop("turned", width) // 2)
    positions = np.array([5]) if case.pop("first_only", False) else seeded.randint(0, 32, (batch, count))
    inputs = [floats(seeded, *shape), positions.astype(np.int64), np.cos(angles), np.sin(angles)]
    against_ort("RotaryEmbedding", inputs, **case)


def n_bit_inputs(
    random: np.random.RandomState, *, bits: int, block: int, k: int, n: int, zero: str
) -> list[Any]:
    """Seeded B, scales and zero points (`none`, `packed` or `float`) of a MatMulNBits node."""
    blocks = -(-k // block)
    packed = random.randint(0, 256, (n, blocks, block * bits // 8)).astype(np.uint8)
    scales = (np.abs(floats(random, n, blocks)) + 0.1).astype(np.float32)
    zeros = {
        "none": None,
        "packed": random.randint(0, 256, (n, -(-blocks * bits // 8))).astype(np.uint8),
        "float": (random.random_sample((n, blocks)) * 2**bits).astype(np.float32),
    }[zero]
    return [packed, scales, zeros]


# ONNX Runtime has no float zero points at 8 bits; see test_matmul_n_bits_by_definition.
ZERO_POINTS = [(2, "none"), (2, "packed"), (2, "float"), (4, "none"), (4, "packed"), (4, "float")]
ZERO_POINTS += [(8, "none"), (8, "packed")]


@pytest.mark.parametrize(("bits", "zero"), ZERO_POINTS)
@pytest.mark.parametrize(("block", "k"), [(16, 48), (32, 64), (32, 80), (128, 256)])
def test_matmul_n_bits(
    bits: int,
    zero: str,
    block: int,
    k: int,
    against_ort: Callable[..., None],
    seeded: np.random.RandomState,
) -> None:
    """Every width, block (a ragged last one too) and kind of zero point, at accuracy level 1 (fp32)."""
    packed, scales, zeros = n_bit_inputs(seeded, bits=bits, block=block, k=k, n=24, zero=zero)
    inputs = [floats(seeded, 2, 3, k), packed, scales] + ([] if zeros is None else [zeros])
    weights = tuple(range(1, len(inputs)))
    against_ort(
        "MatMulNBits", inputs, constants=weights, bits=bits, block_size=block, N=24, K=k, accuracy_level=1
    )


def test_matmul_n_bits_adds_its_bias(against_ort: Callable[..., None], seeded: np.random.RandomState) -> None:
    """The sixth input is added to each row."""
    packed, scales, zeros = n_bit_inputs(seeded, bits=4, block=32, k=64, n=24, zero="packed")
    inputs = [floats(seeded, 3, 64), packed, scales, zeros, None, floats(seeded, 24)]
    against_ort(
        "MatMulNBits", inputs, constants=(1, 2, 3), bits=4, block_size=32, N=24, K=64, accuracy_level=1
    )


@pytest.mark.parametrize("resident", [0, 1 << 20], ids=["tile by tile", "kept"])
@pytest.mark.parametrize("zero", ["none", "packed", "float"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_matmul_n_bits_by_definition(
    bits: int,
    zero: str,
    resident: int,
    tmp_path: Path,
    save_one_node: Callable[..., Path],
    seeded: np.random.RandomState,
) -> None:
    """`A W^T` with each code read bit by bit; the same whether the weight is kept or made tile by tile.

    300 features are more than one tile; in float64 nothing but the last bits may differ.
    """
    block, k, n = 32, 80, 300
    packed, scales, zeros = n_bit_inputs(seeded, bits=bits, block=block, k=k, n=n, zero=zero)
    a = floats(seeded, 5, k)

    def code(row: np.ndarray, index: int) -> int:
        return int.from_bytes(row.tobytes(), "little") >> (index * bits) & (2**bits - 1)

    weight = np.empty((n, k))
    for i in range(n):
        for j in range(k):
            zero_point = 2.0 ** (bits - 1)
            if zeros is not None:
                zero_point = float(zeros[i, j // block]) if zero == "float" else code(zeros[i], j // block)
            weight[i, j] = (code(packed[i].ravel(), j) - zero_point) * float(scales[i, j // block])
    inputs = [a, packed, scales] + ([] if zeros is None else [zeros])
    path = save_one_node(
        tmp_path / "node.onnx",
        "MatMulNBits",
        inputs,
        domain=CONTRIB,
        constants=tuple(range(1, len(inputs))),
        bits=bits,
        block_size=block,
        N=n,
        K=k,
    )
    model = OracleModel.load(path, precision="float64", resident_limit=resident)
    for _ in range(2):
        np.testing.assert_allclose(model.run({"x0": a}, ["y0"])["y0"], a @ weight.T, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("skip_shape", [(2, 3, 32), (1, 3, 32), (3, 32)])
@pytest.mark.parametrize("vectors", [1, 2], ids=["gamma", "gamma and bias"])
def test_skip_simplified_layer_normalization(
    skip_shape: tuple[int, ...],
    vectors: int,
    against_ort: Callable[..., None],
    seeded: np.random.RandomState,
) -> None:
    """The result and the sum, with a skip that broadcasts and an optional bias."""
    inputs = [floats(seeded, 2, 3, 32), floats(seeded, *skip_shape)]
    inputs += [floats(seeded, 32) for _ in range(vectors)]
    against_ort("SkipSimplifiedLayerNormalization", inputs, outputs=4, unnamed=(1, 2), epsilon=1e-6)


@pytest.mark.parametrize("beta", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_skip_layer_normalization(
    beta: bool, bias: bool, against_ort: Callable[..., None], seeded: np.random.RandomState
) -> None:
    """The result and the sum, with and without beta and bias."""
    x, skip, gamma = floats(seeded, 2, 3, 32), floats(seeded, 2, 3, 32), floats(seeded, 32)
    inputs = [x, skip, gamma, floats(seeded, 32) if beta else None, floats(seeded, 32) if bias else None]
    while inputs[-1] is None:
        inputs.pop()
    against_ort("SkipLayerNormalization", inputs, outputs=4, unnamed=(1, 2), epsilon=1e-6)


def test_simplified_layer_normalization(
    against_ort: Callable[..., None], seeded: np.random.RandomState
) -> None:
    """ONNX Runtime's name for RMS normalisation, which stands in the standard domain."""
    inputs = [floats(seeded, 2, 3, 32), floats(seeded, 32)]
    against_ort(
        "SimplifiedLayerNormalization", inputs, outputs=2, domain="", epsilon=1e-6, axis=-1, stash_type=1
    )


CONV_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "silu": {"activation": "silu"},
    "swish": {"activation": "swish"},
    "no bias": {"bias": False},
    "no past": {"past": False},
    "one step": {"count": 1},
    "fewer positions than taps": {"count": 2},
    "dilated": {"dilation": 2},
    "channels last": {"channels_last": 1},
    "one tap": {"taps": 1, "past": False},
}


@pytest.mark.parametrize("case", CONV_CASES.values(), ids=CONV_CASES)
def test_causal_conv_with_state(
    case: dict[str, Any], against_ort: Callable[..., None], seeded: np.random.RandomState
) -> None:
    """Output and carried state, for each attribute that ONNX Runtime's CPU kernel takes."""
    case = dict(case)
    batch, channels, count, taps = 2, 6, case.pop("count", 5), case.pop("taps", 4)
    reach = (taps - 1) * case.get("dilation", 1)
    last = "channels_last" in case
    x = floats(seeded, batch, *((count, channels) if last else (channels, count)))
    past = floats(seeded, batch, *((reach, channels) if last else (channels, reach)))
    bias = floats(seeded, channels) if case.pop("bias", True) else None
    inputs = [x, floats(seeded, channels, 1, taps), bias, past if case.pop("past", True) else None]
    against_ort("CausalConvWithState", inputs, outputs=2, **case)


LINEAR_CASES: dict[str, dict[str, Any]] = {
    "linear": {"update_rule": "linear"},
    "gated": {"update_rule": "gated"},
    "delta": {"update_rule": "delta"},
    "gated delta": {},
    "gated, decay by key": {"update_rule": "gated", "decay_by_key": True},
    "gated delta, decay by key": {"decay_by_key": True},
    "one beta": {"one_beta": True},
    "no past": {"past": False},
    "scale": {"scale": 0.3},
    "one step": {"count": 1},
    "more query heads": {"heads": 4},
    "more state heads": {"kv_heads": 4},
    "more state and key heads": {"kv_heads": 4, "key_heads": 4},
}


@pytest.mark.parametrize("case", LINEAR_CASES.values(), ids=LINEAR_CASES)
def test_linear_attention(
    case: dict[str, Any], against_ort: Callable[..., None], seeded: np.random.RandomState
) -> None:
    """Every update rule, shape of decay and beta, and sharing of heads."""
    inputs, attributes = linear_attention(seeded, **case)
    against_ort("LinearAttention", inputs, outputs=2, **attributes)


def linear_attention(
    random: np.random.RandomState,
    *,
    heads: int = 2,
    kv_heads: int = 2,
    key_heads: int | None = None,
    count: int = 5,
    past: bool = True,
    decay_by_key: bool = False,
    one_beta: bool = False,
    window: int = 0,
    **attributes: Any,
) -> tuple[list[Any], dict[str, Any]]:
    """Seeded inputs and attributes of a LinearAttention node with keys 8 and values 6 wide."""
    rule = attributes.get("update_rule", "gated_delta")
    batch, width, value_width = 2, 8, 6
    query = floats(random, batch, count, heads * width)
    key = floats(random, batch, count, (key_heads or min(heads, kv_heads)) * width) * np.float32(0.3)
    value = floats(random, batch, count, kv_heads * value_width)
    state = floats(random, *([window] if window else []), batch, kv_heads, width, value_width)
    decay = -np.abs(floats(random, batch, count, kv_heads * (width if decay_by_key else 1)))
    beta = 1 / (1 + np.exp(-floats(random, batch, count, 1 if one_beta else kv_heads)))
    inputs = [query, key, value, state if past else None, decay if "gated" in rule else None]
    inputs.append(beta if "delta" in rule else None)
    while inputs[-1] is None:
        inputs.pop()
    if window:
        attributes["state_window"] = window
    return inputs, {"q_num_heads": heads, "kv_num_heads": kv_heads, **attributes}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_state_window_of_linear_attention_holds_the_states_of_its_prefixes(
    count: int, run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """Slot j is the state after position T - W + j of a run without window, zero where there is none."""
    window = 3
    inputs, attributes = linear_attention(seeded, count=count, window=window)
    y, states = run_node("LinearAttention", inputs, outputs=2, domain=CONTRIB, **attributes)
    del attributes["state_window"]
    for slot in range(window):
        length = count - window + slot + 1
        if length <= 0:
            assert not states[slot].any()
            continue
        cut = [x if i == 3 else x[:, :length] for i, x in enumerate(inputs)]
        cut[3] = inputs[3][-1]
        y_cut, state = run_node("LinearAttention", cut, outputs=2, domain=CONTRIB, **attributes)
        np.testing.assert_array_equal(states[slot], state)
        np.testing.assert_array_equal(y[:, :length], y_cut)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_state_window_of_the_convolution_holds_the_states_of_its_prefixes(
    count: int, last: int, run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """As for linear attention, in both layouts."""
    window, channels, taps = 3, 6, 4
    axis = 1 if last else 2
    x = floats(seeded, 2, *((count, channels) if last else (channels, count)))
    past = floats(seeded, window, 2, *((taps - 1, channels) if last else (channels, taps - 1)))
    weight = floats(seeded, channels, 1, taps)
    attributes = {"domain": CONTRIB, "outputs": 2, "channels_last": last}
    _, states = run_node("CausalConvWithState", [x, weight, None, past], state_window=window, **attributes)
    for slot in range(window):
        length = count - window + slot + 1
        if length <= 0:
            assert not states[slot].any()
            continue
        cut = np.take(x, range(length), axis=axis)
        _, state = run_node("CausalConvWithState", [cut, weight, None, past[-1]], **attributes)
        np.testing.assert_array_equal(states[slot], state)


@pytest.mark.parametrize("split", [1, 3])
def test_recurrences_do_not_care_how_positions_are_cut(
    split: int, run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """Two runs, the second from the state of the first, equal one run over all positions."""
    inputs, attributes = linear_attention(seeded)
    attributes |= {"domain": CONTRIB, "outputs": 2}
    whole, end = run_node("LinearAttention", inputs, **attributes)
    parts, state = [], inputs[3]
    for piece in (slice(None, split), slice(split, None)):
        cut = [state if i == 3 else x[:, piece] for i, x in enumerate(inputs)]
        y, state = run_node("LinearAttention", cut, **attributes)
        parts.append(y)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state, end, rtol=1e-5, atol=1e-6)


def test_group_query_attention_is_attention_with_its_own_cache(
    run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """The same attention written as ONNX Attention, and as MatMul and Softmax in numpy, in float64."""
    batch, past, new, heads, kv_heads, width = 1, 4, 3, 4, 2, 16
    q, k, v = (floats(seeded, batch, new, n * width) for n in (heads, kv_heads, kv_heads))
    past_k, past_v = (floats(seeded, batch, kv_heads, past, width) for _ in range(2))
    last, total = np.array([past + new - 1], np.int32), np.array(past + new, np.int32)
    heads_given = {"kv_num_heads": kv_heads, "precision": "float64", "outputs": 3}
    grouped = run_node(
        "GroupQueryAttention",
        [q, k, v, past_k, past_v, last, total],
        domain=CONTRIB,
        num_heads=heads,
        **heads_given,
    )
    standard = run_node(
        "Attention", [q, k, v, None, past_k, past_v], is_causal=1, q_num_heads=heads, **heads_given
    )
    for one, other in zip(grouped, standard, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)
    keys, values = (np.float64(x).repeat(heads // kv_heads, axis=1) for x in standard[1:])
    queries = np.float64(q).reshape(batch, new, heads, width).swapaxes(1, 2)
    scores = queries @ keys.swapaxes(-1, -2) / np.sqrt(width)
    scores[..., np.arange(past + new) > past + np.arange(new)[:, None]] = -np.inf
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    context = (weights @ values).swapaxes(1, 2).reshape(batch, new, -1)
    np.testing.assert_allclose(grouped[0], context, rtol=1e-12, atol=1e-13)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "a cache quantised in another way": ("GroupQueryAttention", {"k_quant_type": "PER_TOKEN"}),
    "a cache of no window": ("GroupQueryAttention", {"sliding_window_cache": 1}),
    "prepacked weights": ("MatMulNBits", {"weight_prepacked": 1}),
    "an update rule": ("LinearAttention", {"update_rule": "unheard of"}),
    "two spatial axes": ("CausalConvWithState", {"ndim": 2}),
    "packed batching": ("RotaryEmbedding", {"is_packed_batching": 1}),
}


@pytest.mark.parametrize(("op_type", "attributes"), REFUSED.values(), ids=REFUSED)
def test_what_a_kernel_lacks_is_refused_when_the_graph_is_loaded(
    op_type: str, attributes: dict[str, Any], tmp_path: Path, save_one_node: Callable[..., Path]
) -> None:
    """A configuration that the oracle does not compute is an error that names it, never another result."""
    required: dict[str, dict[str, Any]] = {
        "GroupQueryAttention": {"num_heads": 4, "kv_num_heads": 2},
        "MatMulNBits": {"bits": 4, "block_size": 32, "N": 8, "K": 32},
        "LinearAttention": {"q_num_heads": 2, "kv_num_heads": 2},
    }
    one = np.zeros((1, 1, 32), np.float32)
    path = save_one_node(
        tmp_path / "node.onnx", op_type, [one] * 3, domain=CONTRIB, **required.get(op_type, {}), **attributes
    )
    with pytest.raises(
        EngineFailedError, match=rf"{op_type} of domain com.microsoft with .* at node the_node"
    ) as e:
        OracleModel.load(path)
    assert e.value.kind == "unsupported"
