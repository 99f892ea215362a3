"""SmolLM2 as written, against the weights it was made from.

The reference here reads the GGUF by itself and computes in float64 in that file's own form (rotary
pairs interleaved); it shares no code with the builder. An independent conversion of the same weights
agreed with such a reference within 1e-4.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tokenizers import Tokenizer

from fixtures.rewrites import rewrite_accuracy_level
from fixtures.smollm2 import fetched_smollm2, fetched_smollm2_path
from harness.models.fetch import SMOLLM2_WEIGHTS
from harness.models.smollm2 import (
    SMOLLM2_INT4_SHA256,
    SMOLLM2_PROMPTS,
    SMOLLM2_SHA256,
    smollm2_int4_package,
    smollm2_package,
    write_smollm2,
)
from harness.package import model_sha256

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAYERS, HEADS, KV_HEADS, WIDTH, VOCAB = 30, 9, 3, 64, 49152
TEXT = "The capital of France is Paris, and 2 + 2 = 4."
ENGINES = ["onnxruntime", "nxrt"]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The graph files of both packages, written anew."""
    source = fetched_smollm2()
    models = {}
    for weights in ("fp32", "int4"):
        models[weights] = write_smollm2(tmp_path_factory.mktemp(weights), source, weights=weights)
    return models


@pytest.fixture(scope="module")
def ids(packages: Mapping[str, Path]) -> list[int]:
    """`TEXT` in token IDs."""
    return list(Tokenizer.from_file(str(packages["fp32"].with_name("tokenizer.json"))).encode(TEXT).ids)


class Reference:
    """The model in float64, from its tensors by GGUF name (rotary rows interleaved), without a cache."""

    def __init__(self, weights: Mapping[str, NDArray[np.float32]]) -> None:
        self._weights = weights

    def logits(self, ids: list[int]) -> NDArray[np.float64]:
        """[positions, vocab]."""
        x = self._weights["token_embd.weight"][ids].astype(np.float64)
        for layer in range(LAYERS):
            x = x + self._attention(self._norm(x, f"blk.{layer}.attn_norm"), f"blk.{layer}.attn")
            y = self._norm(x, f"blk.{layer}.ffn_norm")
            gate = self._linear(y, f"blk.{layer}.ffn_gate")
            gated = gate / (1 + np.exp(-gate)) * self._linear(y, f"blk.{layer}.ffn_up")
            x = x + self._linear(gated, f"blk.{layer}.ffn_down")
        return self._linear(self._norm(x, "output_norm"), "token_embd")

    def _linear(self, x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        return np.asarray(x @ self._weights[f"{name}.weight"].T.astype(np.float64))

    def _norm(self, x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(mean_square + 1e-5) * self._weights[f"{name}.weight"])

    def _attention(self, x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        length = len(x)
        query = self._rotated(self._linear(x, f"{name}_q"), HEADS)
        key = self._rotated(self._linear(x, f"{name}_k"), KV_HEADS)
        value = self._linear(x, f"{name}_v").reshape(length, KV_HEADS, WIDTH)
        context = np.empty((length, HEADS, WIDTH))
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            for position in range(length):
                scores = key[: position + 1, shared] @ query[position, head] / np.sqrt(WIDTH)
                weights = np.exp(scores - scores.max())
                context[position, head] = weights / weights.sum() @ value[: position + 1, shared]
        return self._linear(context.reshape(length, HEADS * WIDTH), f"{name}_output")

    def _rotated(self, x: NDArray[np.float64], heads: int) -> NDArray[np.float64]:
        """Elements 2i and 2i + 1 of a head as one complex number, turned by position * 1e5^(-2i/D)."""
        pairs = x.reshape(len(x), heads, WIDTH // 2, 2)
        angles = np.arange(len(x))[:, None] * 1e5 ** (-np.arange(0, WIDTH, 2) / WIDTH)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, None, :]
        return np.stack([turned.real, turned.imag], axis=-1).reshape(len(x), heads, WIDTH)


@pytest.fixture(scope="module")
def stored() -> Mapping[str, NDArray[np.float32]]:
    """Every tensor of the GGUF, dequantised by its own library: fp32 holds these values exactly."""
    tensors = fetched_smollm2().tensors.values()
    from gguf.quants import dequantize  # an extra: there once the line above has not skipped

    return {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in tensors}


@pytest.fixture(scope="module")
def expected(stored: Mapping[str, NDArray[np.float32]], ids: list[int]) -> NDArray[np.float64]:
    """The reference's logits for `ids`."""
    return Reference(stored).logits(ids)


class Model:
    """A written graph on one engine; feeds and keeps the cache by hand."""

    def __init__(self, engine: str, model: Path) -> None:
        self._names = [f"{layer}.{kind}" for layer in range(LAYERS) for kind in ("key", "value")]
        if engine == "onnxruntime":
            import onnxruntime

            self._session: Any = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        else:
            if find_spec("nxrt") is None:
                pytest.skip("install nxrt: pip install 'onnx-parity[nxrt]'")
            self._session = import_module("nxrt").InferenceSession(str(model))

    def logits(self, *chunks: list[int], hidden: int = 0) -> NDArray[np.float32]:
        """[positions, vocab] for the tokens fed chunk after chunk, the first `hidden` of them masked."""
        past = [np.zeros((1, KV_HEADS, 0, WIDTH), np.float32) for _ in self._names]
        results, total = [], 0
        for chunk in chunks:
            first, total = total, total + len(chunk)
            positions = np.arange(first, total) - hidden
            feeds = {
                "input_ids": np.array([chunk], np.int64),
                "attention_mask": (np.arange(total) >= hidden).astype(np.int64)[None],
                "position_ids": positions.clip(0).astype(np.int64)[None],
            }
            feeds |= {f"past_key_values.{name}": value for name, value in zip(self._names, past, strict=True)}
            outputs = ["logits", *(f"present.{name}" for name in self._names)]
            found, *past = [np.asarray(value) for value in self._session.run(outputs, feeds)]
            assert found.shape == (1, len(chunk), VOCAB)
            results.append(found[0])
        return np.concatenate(results)


@pytest.fixture(scope="module", params=ENGINES)
def model(request: pytest.FixtureRequest, packages: Mapping[str, Path]) -> Model:
    """The fp32 package on each engine."""
    return Model(request.param, packages["fp32"])


def test_logits_are_those_of_the_weights(model: Model, ids: list[int], expected: NDArray[np.float64]) -> None:
    """For all positions within 1e-3 of the float64 reference (the wrong rotary form is off by 6)."""
    found = model.logits(ids)
    assert np.abs(found - expected).max() < 1e-3
    assert (found.argmax(axis=-1) == expected.argmax(axis=-1)).all()


def test_the_cache_carries_all_that_went_before(
    model: Model, ids: list[int], expected: NDArray[np.float64]
) -> None:
    """In chunks of one, several and one token again, the logits are those of one pass."""
    found = model.logits(ids[:1], ids[1:6], ids[6:7], ids[7:])
    assert np.abs(found - expected).max() < 1e-3


def test_masked_tokens_have_no_influence(model: Model, ids: list[int], expected: NDArray[np.float64]) -> None:
    """With two masked tokens before the text, and positions counted from the text, nothing changes."""
    found = model.logits([7, 8, *ids[:3]], ids[3:], hidden=2)
    assert np.abs(found[2:] - expected).max() < 1e-3


def test_the_most_likely_continuation_makes_sense(model: Model, packages: Mapping[str, Path]) -> None:
    """After "The capital of France is" comes " Paris"."""
    tokenizer = Tokenizer.from_file(str(packages["fp32"].with_name("tokenizer.json")))
    found = model.logits(tokenizer.encode("The capital of France is").ids)
    assert tokenizer.decode([int(found[-1].argmax())]) == " Paris"


@pytest.mark.parametrize("weights", ["fp32", "int4"])
def test_the_bytes_are_the_same_everywhere(packages: Mapping[str, Path], weights: str) -> None:
    """Graph and data have the hash that names the package in the cache, and nothing else is written."""
    expected = {"fp32": SMOLLM2_SHA256, "int4": SMOLLM2_INT4_SHA256}[weights]
    package = {"fp32": smollm2_package, "int4": smollm2_int4_package}[weights]()
    assert model_sha256(packages[weights]) == expected
    assert expected.startswith(package.content_version)
    assert sorted(file.name for file in packages[weights].parent.iterdir()) == [
        "generation_config.json",
        "model.onnx",
        "model.onnx.data",
        "provenance.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


@pytest.mark.parametrize("weights", ["fp32", "int4"])
def test_the_package_brings_prompts_of_text(packages: Mapping[str, Path], weights: str) -> None:
    """Six prompts, 64 new tokens each, the same for both; each has IDs within the vocabulary."""
    package = {"fp32": smollm2_package, "int4": smollm2_int4_package}[weights]()
    assert (package.prompts, package.max_new_tokens) == (SMOLLM2_PROMPTS, 64)
    assert len(set(SMOLLM2_PROMPTS)) == 6
    tokenizer = Tokenizer.from_file(str(packages[weights].with_name("tokenizer.json")))
    for prompt in SMOLLM2_PROMPTS:
        encoded = tokenizer.encode(prompt).ids
        assert tokenizer.decode(encoded, skip_special_tokens=False) == prompt
        assert max(encoded) < VOCAB


@pytest.mark.parametrize("weights", ["fp32", "int4"])
def test_provenance_tells_the_whole_way(packages: Mapping[str, Path], weights: str) -> None:
    """Source, its hashes, every step, and the hashes of what was written; quantisation where there is one."""
    folder = packages[weights].parent
    provenance = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    source = provenance["source"]
    assert source["wheel_sha256"] == SMOLLM2_WEIGHTS.wheel_sha256
    assert source["sha256"] == hashlib.sha256(fetched_smollm2_path().read_bytes()).hexdigest()
    assert source["licence"].lower() == fetched_smollm2().licence.lower() == "apache-2.0"
    assert source["tensors"] == {"F32": 61, "Q4_1": 210, "Q8_0": 1}
    for name, digest in provenance["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert set(provenance["files"]) == {"model.onnx", "model.onnx.data"}
    if weights == "fp32":
        assert provenance["quantisation"] is None
    else:
        quantisation = provenance["quantisation"]
        nodes = onnx.load(folder / "model.onnx", load_external_data=False).graph.node
        quantised = [node for node in nodes if node.op_type == "MatMulNBits"]
        assert len(quantised) == 7 * LAYERS
        for node in quantised:
            attributes = {a.name: a.i for a in node.attribute}
            for key in ("bits", "block_size", "accuracy_level"):
                assert attributes[key] == quantisation[key]


@cache
def initializers(model: Path) -> dict[str, NDArray[Any]]:
    """All weights of a graph by name."""
    loaded = onnx.load(model)
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in loaded.graph.initializer}


def unpacked(int4: Mapping[str, NDArray[Any]], name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The matrix [N, K] of projection `name` by the operator's definition, and the step of every weight."""
    nibbles = {
        part: np.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:-1], -1).astype(np.float64)
        for part in ("codes", "zero_points")
        for values in [int4[f"{name}.weight_{part}"]]
    }
    steps = int4[f"{name}.weight_scales"].astype(np.float64)[..., None]
    matrix = (nibbles["codes"] - nibbles["zero_points"][..., None]) * steps
    return matrix.reshape(len(matrix), -1), np.broadcast_to(steps, matrix.shape).reshape(len(matrix), -1)


def test_int4_weights_lie_within_half_a_step_of_the_fp32_ones(packages: Mapping[str, Path]) -> None:
    """Every projection of every layer; all other weights are the same bits."""
    fp32, int4 = initializers(packages["fp32"]), initializers(packages["int4"])
    projections = [name.removesuffix(".weight_codes") for name in int4 if name.endswith(".weight_codes")]
    assert len(projections) == 7 * LAYERS
    for name in projections:
        matrix, steps = unpacked(int4, name)
        error = np.abs(matrix - fp32[f"{name}.weight"].T)
        assert (error <= steps * (0.5 + 1e-5)).all()
    for name in fp32.keys() - {f"{name}.weight" for name in projections}:
        assert np.array_equal(fp32[name], int4[name])


@pytest.fixture(scope="module")
def expected_int4(
    packages: Mapping[str, Path], stored: Mapping[str, NDArray[np.float32]], ids: list[int]
) -> NDArray[np.float64]:
    """The reference's logits with the four-bit weights as they stand in the written graph."""
    int4 = initializers(packages["int4"])
    names = {
        "attn_q": "attention/query_proj",
        "attn_k": "attention/key_proj",
        "attn_v": "attention/value_proj",
        "attn_output": "attention/out_proj",
        "ffn_gate": "mlp/gate_proj",
        "ffn_up": "mlp/up_proj",
        "ffn_down": "mlp/down_proj",
    }
    weights = dict(stored)
    for layer in range(LAYERS):
        for name, written in names.items():
            matrix, _ = unpacked(int4, f"layers.{layer}/{written}")
            if name in ("attn_q", "attn_k"):
                matrix = interleaved(matrix)
            weights[f"blk.{layer}.{name}.weight"] = matrix
    return Reference(weights).logits(ids)


def interleaved(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows i and i + D/2 of each head as rows 2i and 2i + 1."""
    result = np.empty_like(matrix)
    for start in range(0, len(matrix), WIDTH):
        result[start : start + WIDTH : 2] = matrix[start : start + WIDTH // 2]
        result[start + 1 : start + WIDTH : 2] = matrix[start + WIDTH // 2 : start + WIDTH]
    return result


@pytest.mark.parametrize("engine", ENGINES)
def test_int4_at_level_1_computes_with_the_written_weights(
    packages: Mapping[str, Path],
    ids: list[int],
    expected_int4: NDArray[np.float64],
    tmp_path: Path,
    engine: str,
) -> None:
    """Asked for fp32 activations, an engine is as close to the float64 reference as on fp32 weights."""
    level_1 = rewrite_accuracy_level(packages["int4"], level=1, folder=tmp_path)
    found = Model(engine, level_1).logits(ids)
    assert np.abs(found - expected_int4).max() < 1e-3
    assert (found.argmax(axis=-1) == expected_int4.argmax(axis=-1)).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_int4_as_written_uses_int8_activations(
    packages: Mapping[str, Path], ids: list[int], expected_int4: NDArray[np.float64], engine: str
) -> None:
    """At level 4 the same weights give visibly other logits: the package shows a real divergence.

    Measured over `SMOLLM2_PROMPTS` x 64 tokens: four of the six prompts part from the float64 reference
    on ONNX Runtime (at indices 16, 6, 7 and 0) and on nxrt (16, 27, 7 and 0).
    """
    found = Model(engine, packages["int4"]).logits(ids)
    assert np.abs(found - expected_int4).max() > 0.05
