"""Mixtures of experts: against ONNX Runtime where its CPU kernel has the form, else by definition.

ONNX Runtime's CPU kernel of QMoE always divides the weights of the chosen experts by their sum; MoE, of which
the same is said, does so only where `normalize_routing_weights` asks for it. The oracle takes the attribute
at its word in both, so QMoE without it is held to MoE on the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import EngineFailedError
from harness.oracle import OracleModel

CONTRIB = "com.microsoft"
EXPERTS, HIDDEN, INNER = 4, 32, 64


def floats(random: np.random.RandomState, *shape: int) -> np.ndarray:
    """Standard normal numbers in fp32."""
    return random.standard_normal(shape).astype(np.float32)


def dense(
    random: np.random.RandomState, *, fused: bool = False, bias: bool = False, third: bool = False
) -> list[Any]:
    """Weights of MoE from its third input on."""
    inner = INNER * 2 if fused else INNER
    shapes = [(inner, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN)]
    weights: list[Any] = []
    for rows, columns in shapes if third else shapes[:2]:
        weights.append(floats(random, EXPERTS, rows, columns) / np.float32(np.sqrt(columns)))
        weights.append(floats(random, EXPERTS, rows) if bias else None)
    return weights


MOE_CASES: dict[str, dict[str, Any]] = {
    "relu, one expert": {},
    "relu, two": {"k": 2},
    "all experts, normalised": {"k": 4, "normalize_routing_weights": 1},
    "normalised": {"k": 2, "normalize_routing_weights": 1, "activation_type": "silu"},
    "gelu": {"k": 2, "activation_type": "gelu"},
    "identity with biases": {"k": 2, "activation_type": "identity", "bias": True},
    "swiglu, interleaved": {"k": 2, "activation_type": "swiglu", "swiglu_fusion": 1},
    "swiglu with its constants": {
        "k": 2,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.702,
        "activation_beta": 1.0,
        "swiglu_limit": 0.5,
        "bias": True,
    },
}


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("case", MOE_CASES.values(), ids=MOE_CASES)
def test_moe(
    case: dict[str, Any], rank: int, against_ort: Callable[..., None], seeded: np.random.RandomState
) -> None:
    """Routing, activations and biases, over a batch and over packed rows."""
    case = dict(case)
    x = floats(seeded, *((2, 3, HIDDEN) if rank == 3 else (6, HIDDEN)))
    weights = dense(seeded, fused="swiglu_fusion" in case, bias=case.pop("bias", False))
    inputs = [x, floats(seeded, 6, EXPERTS), *weights]
    while inputs[-1] is None:
        inputs.pop()
    against_ort("MoE", inputs, constants=tuple(range(2, len(inputs))), **case)


@pytest.mark.parametrize("fusion", [0, 2])
def test_each_layout_of_swiglu_is_the_same_numbers(
    fusion: int, run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """Gate and linear half apart (fc1 and fc3) or one behind the other, as they are interleaved."""
    x, router = floats(seeded, 5, HIDDEN), floats(seeded, 5, EXPERTS)
    gate, gate_bias, down, down_bias, linear, linear_bias = dense(seeded, bias=True, third=True)
    options = {"domain": CONTRIB, "k": 2, "activation_type": "swiglu", "swiglu_limit": 1.0}
    woven = [
        np.stack(pair, axis=2).reshape(EXPERTS, 2 * INNER, *pair[0].shape[2:])
        for pair in ((gate, linear), (gate_bias, linear_bias))
    ]
    (want,) = run_node("MoE", [x, router, *woven, down, down_bias], swiglu_fusion=1, **options)
    if fusion == 2:
        joined = [np.concatenate(pair, axis=1) for pair in ((gate, linear), (gate_bias, linear_bias))]
        given = [x, router, *joined, down, down_bias]
    else:
        given = [x, router, gate, gate_bias, down, down_bias, linear, linear_bias]
    (got,) = run_node("MoE", given, swiglu_fusion=fusion, **options)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_third_product_gates_any_activation(
    run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """The sum of w_e (silu(x W1^T) * (x W3^T)) W2^T, written row by row in numpy."""
    x, router = floats(seeded, 5, HIDDEN), floats(seeded, 5, EXPERTS)
    w1, _, w2, _, w3, _ = dense(seeded, third=True)
    options = {"domain": CONTRIB, "k": 2, "activation_type": "silu", "precision": "float64"}
    (got,) = run_node("MoE", [x, router, w1, None, w2, None, w3], **options)
    weights = np.exp(np.float64(router)) / np.exp(np.float64(router)).sum(-1, keepdims=True)
    for row in range(5):
        want = np.zeros(HIDDEN)
        for e in sorted(range(EXPERTS), key=lambda e: -router[row, e])[:2]:
            gate = w1[e].astype(np.float64) @ x[row]
            inner = gate / (1 + np.exp(-gate)) * (w3[e].astype(np.float64) @ x[row])
            want += weights[row, e] * (w2[e].astype(np.float64) @ inner)
        np.testing.assert_allclose(got[row], want, rtol=1e-12, atol=1e-12)


def quantised(
    random: np.random.RandomState, *, bits: int, block: int | None, zeros: bool, fused: bool
) -> tuple[list[Any], list[Any]]:
    """Inputs of QMoE from its third on, and the same weights as inputs of MoE."""
    given: list[Any] = [None] * 11
    plain: list[Any] = []
    shapes = [(2 * INNER if fused else INNER, HIDDEN), (HIDDEN, INNER)]
    for part, (rows, columns) in enumerate(shapes):
        codes = random.randint(0, 2**bits, (EXPERTS, rows, columns))
        groups = columns // block if block else 1
        scale = (np.abs(floats(random, EXPERTS, rows, groups)) + np.float32(0.5)) / np.float32(2**bits)
        zero = np.full((EXPERTS, rows, groups), 2 ** (bits - 1))
        if zeros:
            zero = random.randint(0, 2**bits, zero.shape)
            given[9 + part] = packed(zero if block else zero[..., 0], bits)
        given[3 * part] = packed(codes, bits)
        given[3 * part + 1] = scale if block else scale[..., 0]
        spread = [np.repeat(x, columns // groups, axis=2) for x in (zero, scale)]
        plain += [((codes - spread[0]) * spread[1]).astype(np.float32), None]
    while given[-1] is None:
        given.pop()
    return given, plain[:3]


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes along the last axis in bytes, lowest bits first, the last byte filled up with zeros."""
    each = 8 // bits
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % each)])
    grouped = codes.reshape(*codes.shape[:-1], -1, each)
    return (grouped << np.arange(0, 8, bits)).sum(axis=-1).astype(np.uint8)


QMOE = [(bits, block, zeros) for bits in (2, 4, 8) for block in (None, 16, 32) for zeros in (False, True)]


@pytest.mark.parametrize(("bits", "block", "zeros"), QMOE)
@pytest.mark.parametrize("activation", ["silu", "swiglu"])
def test_qmoe_is_moe_on_dequantised_weights(
    activation: str,
    bits: int,
    block: int | None,
    zeros: bool,
    run_node: Callable[..., list[np.ndarray]],
    seeded: np.random.RandomState,
) -> None:
    """Every width, block and kind of zero point, with and without normalised weights."""
    fused = activation == "swiglu"
    given, plain = quantised(seeded, bits=bits, block=block, zeros=zeros, fused=fused)
    x, router = floats(seeded, 5, HIDDEN), floats(seeded, 5, EXPERTS)
    options: dict[str, Any] = {"domain": CONTRIB, "k": 2, "activation_type": activation}
    if fused:
        options["swiglu_fusion"] = 1
    (want,) = run_node("MoE", [x, router, *plain], **options)
    if block:
        options["block_size"] = block
    (got,) = run_node("QMoE", [x, router, *given], expert_weight_bits=bits, **options)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


ROUNDS_ACTIVATIONS = ((8, 16), (8, 32), (2, 32))
"""Bits and block for which ONNX Runtime's kernel rounds activations to int8, whatever the level."""


@pytest.mark.parametrize(
    ("bits", "block", "zeros"), [case for case in QMOE if case[:2] not in ROUNDS_ACTIVATIONS]
)
@pytest.mark.parametrize("activation", ["silu", "swiglu"])
def test_qmoe(
    activation: str,
    bits: int,
    block: int | None,
    zeros: bool,
    against_ort: Callable[..., None],
    seeded: np.random.RandomState,
) -> None:
    """Every form that ONNX Runtime's CPU kernel computes in fp32."""
    fused = activation == "swiglu"
    given, _ = quantised(seeded, bits=bits, block=block, zeros=zeros, fused=fused)
    inputs = [floats(seeded, 5, HIDDEN), floats(seeded, 5, EXPERTS), *given]
    options: dict[str, Any] = {"swiglu_fusion": 1} if fused else {}
    if block:
        options["block_size"] = block
    against_ort(
        "QMoE",
        inputs,
        constants=tuple(range(2, len(inputs))),
        k=2,
        normalize_routing_weights=1,
        expert_weight_bits=bits,
        activation_type=activation,
        **options,
    )


def test_qmoe_takes_the_weights_of_experts_from_their_own_input(
    against_ort: Callable[..., None], seeded: np.random.RandomState
) -> None:
    """The router chooses, `router_weights` weigh; biases are added."""
    given, _ = quantised(seeded, bits=4, block=None, zeros=True, fused=False)
    given[2], given[5] = floats(seeded, EXPERTS, INNER), floats(seeded, EXPERTS, HIDDEN)
    given += [None] * (12 - len(given)) + [np.abs(floats(seeded, 5, EXPERTS))]
    inputs = [floats(seeded, 5, HIDDEN), floats(seeded, 5, EXPERTS), *given]
    against_ort(
        "QMoE",
        inputs,
        constants=tuple(i for i in range(2, 14)),
        k=2,
        normalize_routing_weights=1,
        activation_type="silu",
    )


def test_parts_of_qmoe_may_have_their_own_widths(
    run_node: Callable[..., list[np.ndarray]], seeded: np.random.RandomState
) -> None:
    """`fc2_expert_weight_bits` says how wide the second matrix's codes are."""
    four, plain_four = quantised(seeded, bits=4, block=16, zeros=True, fused=False)
    eight, plain_eight = quantised(seeded, bits=8, block=16, zeros=True, fused=False)
    x, router = floats(seeded, 5, HIDDEN), floats(seeded, 5, EXPERTS)
    given = [*four[:3], *eight[3:6], *four[6:10], eight[10]]
    options = {"domain": CONTRIB, "k": 2}
    (want,) = run_node("MoE", [x, router, *plain_four[:2], plain_eight[2]], **options)
    (got,) = run_node("QMoE", [x, router, *given], block_size=16, fc2_expert_weight_bits=8, **options)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    ("op_type", "attributes"),
    [
        ("MoE", {"use_sparse_mixer": 1}),
        ("MoE", {"activation_type": "unheard of"}),
        ("QMoE", {"quant_type": "nvfp4"}),
        ("QMoE", {"weights_prepacked": 1}),
        ("QMoE", {"expert_weight_bits": 3}),
    ],
)
def test_other_routers_and_layouts_are_refused(
    op_type: str, attributes: dict[str, Any], tmp_path: Path, save_one_node: Callable[..., Path]
) -> None:
    """Sparse mixers, prepacked and other quantised weights are refused when the graph is loaded."""
    one = np.zeros((1, 4), np.float32)
    path = save_one_node(tmp_path / "m.onnx", op_type, [one] * 5, domain=CONTRIB, **attributes)
    with pytest.raises(EngineFailedError, match=f"{op_type} of domain com.microsoft with") as error:
        OracleModel.load(path)
    assert error.value.kind == "unsupported"
