"""SmolLM2 as written, against the weights it was made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from tokenizers import Tokenizer

from fixtures.rewrites import rewrite_accuracy_level
from fixtures.smollm2 import fetched_smollm2, fetched_smollm2_path
from fixtures.smollm2_reference import LAYERS, initializers, int4_reference, stored_reference, unpacked
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

KV_HEADS, WIDTH, VOCAB = 3, 64, 49152
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


@pytest.fixture(scope="module")
def expected(packages: Mapping[str, Path], ids: list[int]) -> NDArray[np.float64]:
    """The reference's logits for `ids`."""
    return stored_reference().logits(ids)


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
def expected_int4(packages: Mapping[str, Path], ids: list[int]) -> NDArray[np.float64]:
    """The reference's logits with the four-bit weights as they stand in the written graph."""
    return int4_reference(packages["int4"]).logits(ids)


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
