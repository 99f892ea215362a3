"""The oracle's proof: honest kernels keep to the bound, and any loss of precision breaks it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from fixtures.decoders import save_graph
from fixtures.planted_kernels import LOSSES, plant_kernel
from harness.engines.oracle import ENGINE
from harness.errors import EngineFailedError
from harness.oracle import OracleModel, Proof, matrix
from harness.oracle import proof as proving
from harness.oracle.kernels import attention, group_query, multi_head
from harness.oracle.matrix import _SHARED_FROM, WAYS

CONTRIB = "com.microsoft"
SaveNode = Callable[..., Path]


def weights(*shape: int, dtype: Any = np.float32, seed: int = 1) -> Any:
    """Normal numbers."""
    return np.random.RandomState(seed).standard_normal(shape).astype(dtype)


def codes(*shape: int) -> Any:
    """Bytes."""
    return np.random.RandomState(2).randint(0, 256, shape).astype(np.uint8)


def packed(bits: int, *, rows: int = 24, depth: int = 80, block: int = 32, **more: Any) -> tuple[Any, ...]:
    """A MatMulNBits node of which all but the activations is constant."""
    blocks = -(-depth // block)
    extra = [more.get(name) for name in ("zeros", "groups", "bias")]
    scales = np.abs(weights(rows, blocks)).astype(more.get("dtype", np.float32))
    inputs = [weights(1, 2, depth), codes(rows, blocks, block * bits // 8), scales, *extra]
    attributes = {"bits": bits, "block_size": block, "N": rows, "K": depth, "accuracy_level": 4}
    return "MatMulNBits", inputs, (1, 2, 3, 4, 5), {"domain": CONTRIB, **attributes}


ZEROS = np.zeros((1, 2, 3, 16), np.float32)
CASES: dict[str, tuple[Any, ...]] = {
    "MatMul": ("MatMul", [weights(3, 70), weights(70, 20)], (1,), {}),
    "MatMul in half precision": (
        "MatMul",
        [weights(3, 70, dtype=np.float16), weights(70, 20, dtype=np.float16)],
        (1,),
        {},
    ),
    "MatMul of two inputs": ("MatMul", [weights(2, 3, 5), weights(2, 5, 4)], (), {}),
    "MatMul with a stack of weights": ("MatMul", [weights(3, 40), weights(2, 40, 6)], (1,), {}),
    "MatMul large enough for tiles": ("MatMul", [weights(3, 256), weights(256, 128)], (1,), {}),
    "MatMul of long sums": ("MatMul", [weights(3, 2000), weights(2000, 20)], (1,), {}),
    "MatMul with weights near overflow": ("MatMul", [weights(3, 70), weights(70, 20) * 5e37], (1,), {}),
    "Gemm": (
        "Gemm",
        [weights(50, 3), weights(20, 50), weights(20)],
        (1, 2),
        {"transA": 1, "transB": 1, "alpha": 0.7, "beta": -1.3},
    ),
    "Gemm with a computed bias": ("Gemm", [weights(3, 50), weights(50, 20), weights(20)], (1,), {}),
    "FusedMatMul": (
        "FusedMatMul",
        [weights(50, 3), weights(20, 50)],
        (1,),
        {"transA": 1, "transB": 1, "alpha": 0.3, "domain": CONTRIB},
    ),
    "FusedMatMul of two inputs": (
        "FusedMatMul",
        [weights(3, 50), weights(20, 50)],
        (),
        {"transB": 1, "alpha": 0.3, "domain": CONTRIB},
    ),
    "4 bits": packed(4),
    "4 bits in tiles": packed(4, rows=256, depth=256),
    "2 bits, packed zero points": packed(2, zeros=codes(24, 1)),
    "8 bits, float zero points, bias": packed(8, zeros=weights(24, 3), bias=weights(24)),
    "4 bits, blocks in any order": packed(4, groups=np.arange(80, dtype=np.int32) % 3),
    "4 bits, half scales": packed(4, dtype=np.float16, block=16, zeros=codes(24, 3)),
    "Conv": (
        "Conv",
        [weights(1, 6, 9), weights(8, 3, 3), weights(8)],
        (1, 2),
        {"group": 2, "pads": [2, 1], "strides": [2], "dilations": [2]},
    ),
    "Conv of many channels": ("Conv", [weights(1, 50, 9), weights(8, 50, 3)], (1,), {}),
    "Conv with a computed bias": ("Conv", [weights(1, 3, 9), weights(8, 3, 3), weights(8)], (1,), {}),
    "Conv by channel": ("Conv", [weights(1, 6, 9), weights(6, 1, 4)], (1,), {"group": 6, "pads": [3, 0]}),
    "CausalConvWithState": (
        "CausalConvWithState",
        [weights(1, 6, 9), weights(6, 1, 4), weights(6), weights(1, 6, 3)],
        (1, 2),
        {"activation": "silu", "domain": CONTRIB},
    ),
    "CausalConvWithState of two taps": (
        "CausalConvWithState",
        [weights(1, 6, 9), weights(6, 1, 2), None, weights(1, 6, 1)],
        (1,),
        {"domain": CONTRIB},
    ),
    "CausalConvWithState with small weights": (
        "CausalConvWithState",
        [weights(1, 6, 9), weights(6, 1, 4) / 10**6, None, weights(1, 6, 3)],
        (1,),
        {"activation": "silu", "domain": CONTRIB},
    ),
    "CausalConvWithState without a state": (
        "CausalConvWithState",
        [weights(1, 6, 9), weights(6, 1, 4)],
        (1,),
        {"domain": CONTRIB},
    ),
    **{
        f"LinearAttention, {rule}": (
            "LinearAttention",
            [
                *(weights(1, 3, 64), weights(1, 3, 32), weights(1, 3, 24), weights(1, 2, 16, 12)),
                *(weights(1, 3, 2), weights(1, 3, 2)),
            ],
            (),
            {"q_num_heads": 4, "kv_num_heads": 2, "update_rule": rule, "domain": CONTRIB},
        )
        for rule in ("linear", "gated", "delta", "gated_delta")
    },
    "LinearAttention with fewer queries": (
        "LinearAttention",
        [weights(1, 3, 16), weights(1, 3, 16), weights(1, 3, 24)],
        (),
        {"q_num_heads": 1, "kv_num_heads": 2, "update_rule": "linear", "scale": 0.3, "domain": CONTRIB},
    ),
    "GatedDeltaNet": (
        "GatedDeltaNet",
        [
            *(weights(3, 2, 8), weights(3, 2, 8), weights(3, 4, 6), np.array([0, 3], np.int32)),
            *(weights(3, 4), weights(3, 4), weights(1, 4, 6, 8)),
        ],
        (),
        {"domain": CONTRIB},
    ),
    "GatedDeltaNet with its own gates": (
        "GatedDeltaNet",
        [
            *(weights(3, 56), None, None, None, weights(3, 4), weights(3, 4), weights(1, 4, 6, 8)),
            *(weights(4), weights(4, seed=3)),
        ],
        (7, 8),
        {"gate_activation": "qwen", "beta_activation": "sigmoid", "qk_l2_norm": 1, "domain": CONTRIB},
    ),
    "Attention": (
        "Attention",
        [weights(1, 3, 64), weights(1, 3, 32), weights(1, 3, 32), weights(3, 6), ZEROS, ZEROS],
        (),
        {"q_num_heads": 4, "kv_num_heads": 2, "is_causal": 1},
    ),
    "Attention with a mask, a window and a softcap": (
        "Attention",
        [*(weights(1, 2, 3, 8) for _ in range(3)), np.ones((3, 6), bool), ZEROS, ZEROS],
        (),
        {"is_causal": 1, "softcap": 3.0, "scale": 0.7, "left_window_size": 9, "opset": 25},
    ),
    "Attention without a cache": ("Attention", [weights(1, 2, 3, 8) for _ in range(3)], (), {}),
    "Attention of a cache of fixed size": (
        "Attention",
        [*(weights(1, 2, 3, 8) for _ in range(3)), None, None, None, np.array([3])],
        (),
        {"is_causal": 1},
    ),
    "GroupQueryAttention": (
        "GroupQueryAttention",
        [
            *(weights(1, 3, width) for width in (64, 32, 32)),
            *(ZEROS, ZEROS, np.array([5], np.int32), np.array([6], np.int32)),
            *(weights(30, 8), weights(30, 8)),
        ],
        (7, 8),
        {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "local_window_size": 10, "domain": CONTRIB},
    ),
    "GroupQueryAttention with tables that are fed": (
        "GroupQueryAttention",
        [
            *(weights(1, 3, width) for width in (64, 32, 32)),
            *(ZEROS, ZEROS, np.array([5], np.int32), np.array([6], np.int32)),
            *(weights(30, 8), weights(30, 8), np.arange(3)[None]),
        ],
        (),
        {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "rotary_interleaved": 1, "domain": CONTRIB},
    ),
    "GroupQueryAttention with norms": (
        "GroupQueryAttention",
        [
            *(weights(1, 3, 64), weights(1, 3, 32), weights(1, 3, 32), ZEROS, ZEROS),
            *(np.array([5], np.int32), np.array([6], np.int32), weights(30, 6), weights(30, 6)),
            *(None,) * 5,
            *(weights(16) * 9, weights(16, seed=3)),
        ],
        (7, 8, 14, 15),
        {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "domain": CONTRIB},
    ),
    "GroupQueryAttention with a sink, a bias and a softcap": (
        "GroupQueryAttention",
        [
            *(weights(1, 3, 64), weights(1, 3, 32), weights(1, 3, 32), ZEROS, ZEROS),
            *(np.array([5], np.int32), np.array([6], np.int32), None, None, None, weights(1, 1, 3, 6)),
            weights(4),
        ],
        (11,),
        {"num_heads": 4, "kv_num_heads": 2, "softcap": 3.0, "scale": 0.3, "domain": CONTRIB},
    ),
    "GroupQueryAttention with a smooth softmax": (
        "GroupQueryAttention",
        [
            *(weights(1, 3, 64), weights(1, 3, 32), weights(1, 3, 32), ZEROS, ZEROS),
            *(np.array([5], np.int32), np.array([6], np.int32)),
        ],
        (),
        {"num_heads": 4, "kv_num_heads": 2, "smooth_softmax": 1, "domain": CONTRIB},
    ),
    "GroupQueryAttention, packed": (
        "GroupQueryAttention",
        [weights(1, 3, 128), None, None, ZEROS, ZEROS, np.array([5], np.int32), np.array([6], np.int32)],
        (),
        {"num_heads": 4, "kv_num_heads": 2, "domain": CONTRIB},
    ),
    "MultiHeadAttention": (
        "MultiHeadAttention",
        [
            *(weights(1, 3, 32), weights(1, 3, 32), weights(1, 3, 32), None, np.ones((1, 6), np.int32)),
            *(weights(1, 1, 3, 6), ZEROS, ZEROS),
        ],
        (),
        {"num_heads": 2, "unidirectional": 1, "domain": CONTRIB},
    ),
    "MultiHeadAttention with biases of its rows": (
        "MultiHeadAttention",
        [weights(1, 3, 80), weights(1, 3, 80), weights(1, 3, 80), weights(240)],
        (3,),
        {"num_heads": 2, "scale": 0.3, "domain": CONTRIB},
    ),
    "MultiHeadAttention with fed biases of its rows": (
        "MultiHeadAttention",
        [weights(1, 3, 80), weights(1, 3, 80), weights(1, 3, 80), weights(240)],
        (),
        {"num_heads": 2, "domain": CONTRIB},
    ),
}
"""Operator, inputs, which of them are constant, attributes."""

ATTENDING = ("Attention", "GroupQueryAttention", "MultiHeadAttention")


def proof_of(path: Path, **options: Any) -> Proof:
    """Of the graph in a file."""
    return OracleModel.load(path, **options).prove()


def saved(save: SaveNode, tmp_path: Path, name: str) -> Path:
    """The graph of a case."""
    op_type, inputs, constants, attributes = CASES[name]
    return save(tmp_path / "node.onnx", op_type, inputs, constants=constants, **attributes)


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_an_honest_kernel_keeps_to_the_bound(
    name: str, precision: str, save_one_node: SaveNode, tmp_path: Path
) -> None:
    """In both precisions, with weights of any kind; and the bound is a few hundred roundings, not more."""
    proof = proof_of(saved(save_one_node, tmp_path, name), precision=precision)
    (entry,) = proof.entries
    assert (proof.passed, proof.not_probed, proof.precision) == (True, (), precision)
    assert (entry.operator, entry.node, entry.passed) == (CASES[name][0], "the_node", True)
    assert 0 <= entry.max_error <= entry.bound
    assert proof.unit_roundoff == {"float32": 2.0**-24, "float64": 2.0**-53}[precision]


RULES = {"linear": (4, 5), "gated": (5,), "delta": (4,), "gated_delta": ()}
"""Inputs that an update rule of LinearAttention leaves alone."""


def losses() -> list[tuple[str, int, str]]:
    """Each case with each input that its kernel gets at a call and each loss; -1 for those of its result."""
    found = []
    for name, (op_type, inputs, constants, attributes) in CASES.items():
        planned = constants if op_type in ("MatMul", "FusedMatMul", "Gemm", "MatMulNBits", "Conv") else ()
        idle = RULES[attributes.get("update_rule", "gated_delta")] if op_type == "LinearAttention" else ()
        for loss in LOSSES:
            if "activations" not in loss:
                found.append((name, -1, loss))
                continue
            for at, x in enumerate(inputs):
                if x is not None and x.dtype.kind == "f" and at not in (*planned, *idle):
                    found.append((name, at, loss))
    # A block of one value in eight bits loses nothing.
    found.remove(("CausalConvWithState of two taps", 3, "int8 activations"))
    return found


def losing(loss: str, at: int) -> Any:
    """A loss on input `at`, or on the first of the outputs."""

    def change(x: Any) -> Any:
        return x if x is None or not x.size else LOSSES[loss](lambda x: x, (x,))

    def run(compute: Any, inputs: Any) -> Any:
        if at >= 0:
            return compute(*(change(x) if index == at else x for index, x in enumerate(inputs)))
        result = compute(*inputs)
        return (change(result[0]), *result[1:]) if isinstance(result, tuple) else change(result)

    return run


@pytest.mark.parametrize(("name", "at", "loss"), losses())
def test_a_kernel_that_loses_precision_breaks_the_bound(
    name: str, at: int, loss: str, save_one_node: SaveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is fed with, or its result, in eight bits, half precision or TF32: by twice the bound."""
    op_type, *_, attributes = CASES[name]
    plant_kernel(monkeypatch, op_type, losing(loss, at), domain=attributes.get("domain", ""))
    (entry,) = (proof := proof_of(saved(save_one_node, tmp_path, name))).entries
    assert (proof.passed, entry.passed) == (False, False)
    assert not entry.max_error <= 2 * entry.bound


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CASES)
def test_honest_kernels_are_far_from_the_bound(
    name: str, seed: int, save_one_node: SaveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is drawn: so no kernel fails by chance."""
    monkeypatch.setattr(proving, "_SEED", seed)
    (entry,) = proof_of(saved(save_one_node, tmp_path, name)).entries
    assert entry.max_error <= 0.5 * entry.bound


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if "activations" in loss])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] in ATTENDING])
def test_scores_in_less_precision_break_the_bound(
    name: str, loss: str, save_one_node: SaveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the kernel, where queries and keys are rotated and normalised already."""
    path = saved(save_one_node, tmp_path, name)
    for module in (attention, group_query, multi_head):

        def lose(q: Any, k: Any, *, real: Any = module.scores, **more: Any) -> Any:
            return real(*(LOSSES[loss](lambda x: x, (x,)) for x in (q, k)), **more)

        monkeypatch.setattr(module, "scores", lose)
    (entry,) = proof_of(path).entries
    assert not entry.max_error <= 2 * entry.bound


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if "activations" in loss])
def test_packed_queries_and_keys_are_asked_too(
    loss: str, save_one_node: SaveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only the values that lie behind them in the same input."""

    def lose(compute: Any, inputs: Any) -> Any:
        packed, width = inputs[0].copy(), inputs[0].shape[-1] // 8
        packed[..., : 6 * width] = LOSSES[loss](lambda x: x, (packed[..., : 6 * width],))
        return compute(packed, *inputs[1:])

    plant_kernel(monkeypatch, "GroupQueryAttention", lose, domain=CONTRIB)
    assert proof_of(saved(save_one_node, tmp_path, "GroupQueryAttention, packed")).passed is False


FEW = ["MatMul", "MatMul of two inputs", "MatMul of long sums", "Gemm", "4 bits", "4 bits in tiles"]


@pytest.mark.parametrize(("least", "beyond"), list(itertools.pairwise((*WAYS, 1025))))
@pytest.mark.parametrize("name", FEW)
def test_each_way_by_tokens_is_asked(
    name: str,
    least: int,
    beyond: int,
    save_one_node: SaveNode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that loses only for some numbers of tokens, as products go other ways for them."""
    op_type, *_, attributes = CASES[name]
    tokens = -1 if attributes.get("transA") else -2

    def lose(compute: Any, inputs: Any) -> Any:
        some = least <= inputs[0].shape[tokens] < beyond
        return losing("half activations", 0)(compute, inputs) if some else compute(*inputs)

    plant_kernel(monkeypatch, op_type, lose, domain=attributes.get("domain", ""))
    assert proof_of(saved(save_one_node, tmp_path, name)).passed is False


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if "activations" in loss])
@pytest.mark.parametrize("name", ["MatMul of long sums", "4 bits, half scales", "4 bits in tiles"])
def test_each_block_of_features_is_asked(
    name: str, loss: str, save_one_node: SaveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that loses in one block alone, whichever it is."""
    op_type, inputs, _, attributes = CASES[name]
    size = attributes.get("block_size", 32)
    block = slice(0, 0)

    def lose(compute: Any, given: Any) -> Any:
        x = given[0].copy()
        x[..., block] = LOSSES[loss](lambda x: x, (x[..., block],))
        return compute(x, *given[1:])

    plant_kernel(monkeypatch, op_type, lose, domain=attributes.get("domain", ""))
    model = OracleModel.load(saved(save_one_node, tmp_path, name))
    for start in range(0, inputs[0].shape[-1], size):
        block = slice(start, start + size)
        assert model.prove().passed is False, start


def test_each_part_of_a_conv_is_asked(
    save_one_node: SaveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss in one channel, whichever it is."""
    some = 0

    def lose(compute: Any, given: Any) -> Any:
        x = given[0].copy()
        x[:, some] = x[:, some].astype(np.float16)
        return compute(x, *given[1:])

    plant_kernel(monkeypatch, "Conv", lose)
    model = OracleModel.load(saved(save_one_node, tmp_path, "Conv of many channels"))
    for some in range(50):
        assert model.prove().passed is False, some


def test_long_sums_are_asked_beside_short_ones(
    save_one_node: SaveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go another way, in parts: the smallest weight of a model does not stand for them."""
    path = save_graph(
        tmp_path / "model.onnx",
        [helper.make_node("MatMul", ["x", name], [f"y_{name}"], name=name) for name in ("short", "long")],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info(f"y_{name}", TensorProto.FLOAT, None) for name in ("short", "long")],
        {"short": weights(100, 200), "long": weights(2000, 200)},
    )

    def lose(compute: Any, inputs: Any) -> Any:
        long = inputs[0].shape[-1] > 1000
        return losing("int8 activations", 0)(compute, inputs) if long else compute(*inputs)

    plant_kernel(monkeypatch, "MatMul", lose)
    assert [(entry.node, entry.passed) for entry in proof_of(path).entries] == [
        ("short", True),
        ("long", False),
    ]


def test_a_large_weight_is_multiplied_by_many_tokens_in_part(
    save_one_node: SaveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ways are asked of some of its rows, and what computes them alone is what is asked."""
    path = save_one_node(
        tmp_path / "n.onnx", "MatMul", [weights(3, 512), weights(512, 16384)], constants=(1,)
    )
    model, sizes = OracleModel.load(path), []
    real = matrix.product

    def counted(weight: Any, tokens: Any, start: int = 0, stop: int | None = None) -> Any:
        y = real(weight, tokens, start, stop)
        sizes.append(y.size)
        return y

    monkeypatch.setattr(matrix, "product", counted)
    assert model.prove().passed
    assert len(sizes) == 2 + len(WAYS)
    assert sorted(sizes)[-2:] == [16384, 16384 * 8]
    monkeypatch.setattr(matrix, "product", lambda *given: real(*given).astype(np.float16).astype(np.float32))
    assert model.prove().passed is False


@pytest.mark.parametrize(
    "name",
    [
        *("MatMul", "MatMul of long sums", "MatMul with a stack of weights", "Gemm", "4 bits"),
        *("2 bits, packed zero points", "Conv", "Conv of many channels", "Conv by channel"),
    ],
)
def test_rounded_weights_break_the_bound(
    name: str, save_one_node: SaveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are known from the bytes of the weights, not from what the kernel makes of them."""
    op_type, inputs, constants, attributes = CASES[name]
    at = 2 if op_type == "MatMulNBits" else 1  # of codes, the scales are what can be rounded
    rounded = [x.astype(np.float16).astype(np.float32) if i == at else x for i, x in enumerate(inputs)]
    other = save_one_node(tmp_path / "rounded.onnx", op_type, rounded, constants=constants, **attributes)
    wrong = OracleModel.load(other)._body.steps[0].compute

    def lose(compute: Any, given: Any) -> Any:
        return wrong(*given)

    plant_kernel(monkeypatch, op_type, lose, domain=attributes.get("domain", ""))
    assert proof_of(saved(save_one_node, tmp_path, name)).passed is False


@pytest.mark.parametrize("name", ["MatMul", "4 bits", "Conv", "MatMul of two inputs"])
def test_float32_does_not_pass_for_float64(
    name: str, save_one_node: SaveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that sums in float32 breaks float64's bound, and keeps float32's."""

    def lose(compute: Any, inputs: Any) -> Any:
        y = compute(*inputs)
        return y.astype(np.float32).astype(y.dtype)

    op_type, *_, attributes = CASES[name]
    plant_kernel(monkeypatch, op_type, lose, domain=attributes.get("domain", ""))
    path = saved(save_one_node, tmp_path, name)
    assert proof_of(path).passed is True
    assert proof_of(path, precision="float64").passed is False


@pytest.mark.parametrize("few", [True, False])
def test_one_row_and_many_are_asked(
    few: bool, save_one_node: SaveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels go other ways for a token than for a prompt: each is asked, the many in tiles."""
    path = saved(save_one_node, tmp_path, "4 bits in tiles")
    seen = []

    def lose(compute: Any, inputs: Any) -> Any:
        rows = inputs[0].shape[1]
        seen.append(rows)
        return compute(*inputs) * (1.001 if (rows == 1) is few else 1)

    plant_kernel(monkeypatch, "MatMulNBits", lose, domain=CONTRIB)
    assert proof_of(path).passed is False
    assert seen[0] == 1
    assert seen[1] * 256 * 256 >= _SHARED_FROM


def test_each_kind_is_asked_once_and_all_must_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two alike the smaller; nodes of subgraphs, too; one bad kind is enough."""
    row = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8]) for name in ("state", "row")]
    body = helper.make_graph(
        [
            helper.make_node("Gemm", ["state2", "inner"], ["next2"], name="in_scan"),
            helper.make_node("Unsqueeze", ["state", "zero"], ["state2"]),
            helper.make_node("Squeeze", ["next2", "zero"], ["next"]),
            helper.make_node("Add", ["next", "row"], ["grown"]),
            helper.make_node("Identity", ["grown"], ["seen"]),
        ],
        "body",
        row,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8]) for name in ("grown", "seen")],
    )
    path = save_graph(
        tmp_path / "model.onnx",
        [
            helper.make_node("MatMul", ["x", "large"], ["a"], name="large"),
            helper.make_node("MatMul", ["a", "small"], ["b"], name="small"),
            helper.make_node("Scan", ["start", "b"], ["last", "y"], name="s", body=body, num_scan_inputs=1),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 200])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        {
            "large": weights(200, 400) / 20,
            "small": weights(400, 8) / 20,
            "inner": weights(8, 8) / 8,
            "start": np.zeros(8, np.float32),
            "zero": np.array([0]),
        },
    )
    # Both are above or below what is cut into tiles: 80,000 and 3,200 elements, of which the first is.
    proof = proof_of(path)
    assert [(entry.operator, entry.node.split("/")[-1]) for entry in proof.entries] == [
        ("MatMul", "large"),
        ("Gemm", "in_scan"),
    ]
    plant_kernel(monkeypatch, "Gemm", LOSSES["int8 activations"])
    proof = proof_of(path)
    assert [entry.passed for entry in proof.entries] == [True, False]
    assert proof.passed is False


def test_weights_too_small_for_the_exponent_break_no_bound(save_one_node: SaveNode, tmp_path: Path) -> None:
    """Products beneath the smallest float of full precision lose bits in any honest kernel."""
    tiny = weights(70, 20) * np.float32(1e-41)
    assert proof_of(
        save_one_node(tmp_path / "n.onnx", "MatMul", [weights(3, 70), tiny], constants=(1,))
    ).passed


def test_what_cannot_be_asked_is_listed(save_one_node: SaveNode, tmp_path: Path) -> None:
    """Never silently: the operator and a node, and that nothing at all was asked is no pass."""
    path = save_one_node(
        tmp_path / "node.onnx", "Einsum", [weights(3, 4), weights(4, 5)], equation="ij,jk->ik"
    )
    proof = proof_of(path)
    assert (proof.passed, proof.entries) == (None, ())
    assert proof.reason
    (node,) = proof.not_probed
    assert (node.operator, node.node) == ("Einsum", "the_node")


UNKNOWN: dict[str, tuple[Any, ...]] = {
    "Attention, constant keys": ("Attention", [weights(1, 2, 3, 8) for _ in range(3)], (1,), {}),
    "GroupQueryAttention, a quantised cache": (
        "GroupQueryAttention",
        [
            *(weights(1, 3, 64), weights(1, 3, 32), weights(1, 3, 32)),
            *(np.zeros((1, 2, 3, 16), np.int8), np.zeros((1, 2, 3, 16), np.int8)),
            *(np.array([5], np.int32), np.array([6], np.int32), *(None,) * 5, weights(1), weights(1)),
        ],
        (),
        {
            "num_heads": 4,
            "kv_num_heads": 2,
            "domain": CONTRIB,
            "k_quant_type": "PER_TENSOR",
            "v_quant_type": "PER_TENSOR",
        },
    ),
    "GroupQueryAttention, a cache of a window": (
        "GroupQueryAttention",
        [
            *(weights(1, 3, 64), weights(1, 3, 32), weights(1, 3, 32), ZEROS, ZEROS),
            *(np.array([5], np.int32), np.array([6], np.int32)),
        ],
        (),
        {
            "num_heads": 4,
            "kv_num_heads": 2,
            "domain": CONTRIB,
            "sliding_window_cache": 1,
            "local_window_size": 2,
        },
    ),
    "GroupQueryAttention, constant positions": (
        "GroupQueryAttention",
        [
            *(weights(1, 3, 64), weights(1, 3, 32), weights(1, 3, 32), ZEROS, ZEROS),
            *(np.array([5], np.int32), np.array([6], np.int32), weights(30, 8), weights(30, 8)),
            np.arange(3)[None],
        ],
        (7, 8, 9),
        {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "domain": CONTRIB},
    ),
    "MultiHeadAttention, packed": (
        "MultiHeadAttention",
        [weights(1, 3, 2, 3, 8)],
        (),
        {"num_heads": 2, "domain": CONTRIB},
    ),
    "LinearAttention, states of a window": (
        "LinearAttention",
        [weights(1, 3, 16), weights(1, 3, 16), weights(1, 3, 24)],
        (),
        {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "linear", "state_window": 2, "domain": CONTRIB},
    ),
    "CausalConvWithState, dilated": (
        "CausalConvWithState",
        [weights(1, 6, 9), weights(6, 1, 4)],
        (1,),
        {"dilation": 2, "domain": CONTRIB},
    ),
    "CausalConvWithState, no channels": (
        "CausalConvWithState",
        [weights(1, 0, 9), weights(0, 1, 4)],
        (1,),
        {"domain": CONTRIB},
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_of_an_operator_is_listed(
    name: str, save_one_node: SaveNode, tmp_path: Path
) -> None:
    """Configurations without a known sum, by operator and node; none passes without being asked."""
    op_type, inputs, constants, attributes = UNKNOWN[name]
    path = save_one_node(tmp_path / "node.onnx", op_type, inputs, constants=constants, **attributes)
    proof = proof_of(path)
    assert (proof.passed, proof.entries) == (None, ())
    (node,) = proof.not_probed
    assert (node.operator, node.node) == (op_type, "the_node")


def test_an_oracle_that_rounds_on_purpose_says_so(save_one_node: SaveNode, tmp_path: Path) -> None:
    """With rounding=model nothing is proven, and nothing is claimed to be."""
    proof = proof_of(saved(save_one_node, tmp_path, "4 bits"), rounding="model")
    assert (proof.passed, proof.entries) == (None, ())
    assert "not applicable" in (proof.reason or "")


def test_a_proof_is_the_same_each_time_and_changes_nothing(save_one_node: SaveNode, tmp_path: Path) -> None:
    """Its inputs are seeded; what the model computes afterwards is the same to the bit."""
    path = saved(save_one_node, tmp_path, "4 bits")
    model, x = OracleModel.load(path), CASES["4 bits"][1][0]
    before = model.run({"x0": x}, ["y0"])["y0"].copy()
    assert model.prove().entries == model.prove().entries
    np.testing.assert_array_equal(model.run({"x0": x}, ["y0"])["y0"], before)


def test_the_session_gives_plain_data(
    save_one_node: SaveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes into a report: JSON has no NaN."""
    plant_kernel(monkeypatch, "MatMul", LOSSES["one that is no number"])
    session = ENGINE.open(saved(save_one_node, tmp_path, "MatMul"), {})
    proof = session.proof()
    assert proof["passed"] is False
    (entry,) = proof["entries"]
    assert entry["max_error"] is None
    assert entry["bound"] > 0
    assert (entry["operator"], entry["node"], entry["passed"]) == ("MatMul", "the_node", False)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("MatMul", 1),
        ("MatMul in half precision", 1),
        ("MatMul large enough for tiles", 1),
        ("Gemm", 1),
        ("Gemm", 2),
        ("FusedMatMul", 1),
        ("4 bits", 2),
        ("4 bits, half scales", 2),
        ("8 bits, float zero points, bias", 3),
        ("8 bits, float zero points, bias", 5),
        ("Conv", 1),
        ("Conv", 2),
        ("CausalConvWithState", 1),
        ("CausalConvWithState without a state", 1),
    ],
)
def test_a_weight_that_is_not_finite_is_named(
    name: str, at: int, value: float, save_one_node: SaveNode, tmp_path: Path
) -> None:
    """Whichever of its values it is, asked or not: no sum is known, and the node fails for that reason."""
    op_type, inputs, constants, attributes = CASES[name]
    for place in (0, -1):
        spoilt = inputs[at].copy()
        spoilt.flat[place] = value
        given = [spoilt if i == at else x for i, x in enumerate(inputs)]
        path = save_one_node(tmp_path / "node.onnx", op_type, given, constants=constants, **attributes)
        for precision in ("float32", "float64"):
            (entry,) = (proof := proof_of(path, precision=precision)).entries
            assert (proof.passed, entry.passed) == (False, False)
            assert entry.reason == f"its input {at}, x{at}, holds a value that is NaN or infinite"


def test_infinity_keeps_to_no_bound(
    save_one_node: SaveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum that is infinite has an infinite bound, within which anything would be: its node fails."""
    op_type, inputs, constants, attributes = CASES["Gemm"]
    path = save_one_node(
        tmp_path / "node.onnx", op_type, inputs, constants=constants, **{**attributes, "alpha": float("inf")}
    )
    plant_kernel(monkeypatch, "Gemm", lambda compute, inputs: np.zeros((inputs[0].shape[1], 20), np.float32))
    proof = proof_of(path)
    (entry,) = proof.entries
    assert (proof.passed, entry.passed) == (False, False)
    assert entry.reason == "what it must give is not finite itself"
    (plain,) = proof.mapping()["entries"]
    assert (plain["max_error"], plain["bound"]) == (None, None)


@pytest.mark.parametrize("loss", ["half result", "one that is no number"])
def test_a_kernel_that_loses_has_no_excuse(
    loss: str, save_one_node: SaveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reason stands only where a weight or the sum is not finite; NaN of finite weights is the kernel's."""
    plant_kernel(monkeypatch, "MatMul", LOSSES[loss])
    (entry,) = proof_of(saved(save_one_node, tmp_path, "MatMul")).entries
    assert (entry.passed, entry.reason) == (False, None)


MALFORMED: dict[str, tuple[onnx.NodeProto, dict[str, Any]]] = {
    "codes of another size": (
        helper.make_node("MatMulNBits", ["x", "b", "s"], ["y"], domain=CONTRIB, N=8, K=64, block_size=32),
        {"b": codes(7, 2, 16), "s": weights(8, 2)},
    ),
    "a product of one": (helper.make_node("MatMul", ["x"], ["y"]), {}),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_node_is_listed(name: str, tmp_path: Path) -> None:
    """The proof is about precision: what a node cannot compute at all, the run says, by the node's name."""
    node, constants = MALFORMED[name]
    path = save_graph(
        tmp_path / "model.onnx",
        [node],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        constants,
    )
    model = OracleModel.load(path)
    (listed,) = model.prove().not_probed
    assert listed.operator == node.op_type
    with pytest.raises(EngineFailedError, match=node.op_type):
        model.run({"x": weights(1, 64)}, ["y"])
