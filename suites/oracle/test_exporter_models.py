"""Graphs of real exporters against calls that were recorded on ONNX Runtime when they were exported."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from fixtures.rewrites import rewrite_accuracy_level
from harness.oracle import OracleModel

VARIABLE = "ONNX_PARITY_EXPORTER_MODELS"
MODELS = {
    "dynamo-llama-default-names": 1e-4,
    "genai-lfm2-conv-hybrid": 1e-4,
    # Recorded at accuracy_level 4: int8 activations.
    "genai-llama-int4-matmulnbits": 2e-2,
    "genai-qwen3_5-hybrid": 1e-4,
    "genai-whisper-decoder": 1e-4,
    "mobius-bamba-mamba2-hybrid": 1e-4,
    "mobius-gemma4_text-kvshared": 1e-4,
    "mobius-llama-attention": 1e-4,
    "mobius-llama-gqa-cpu": 1e-4,
    "mobius-llama-static-cache": 1e-4,
    "mobius-mamba2-pure-ssm": 1e-4,
    "mobius-qwen3_5-gated-deltanet-hybrid": 1e-4,
    "optimum-whisper-merged": 1e-4,
}
"""Name of the package, and the largest difference to the recorded values, whose scale is 1 to 4."""

CALLS = ("call0", "call1")


@pytest.fixture(params=MODELS)
def package(request: pytest.FixtureRequest) -> Path:
    """The folder of one package: `model.onnx`, and `case.npz` with `call{0,1}.in.NAME` and `.out.NAME`."""
    return package_of(request.param)


def package_of(name: str) -> Path:
    """The folder of a package; skips when the variable that names the models' folder is not set."""
    root = os.environ.get(VARIABLE)
    if not root:
        pytest.skip(f"set {VARIABLE} to the folder of the exporters' models")
    folder = Path(root) / name
    assert folder.is_dir(), f"{VARIABLE} names a folder without {name}"
    return folder


@cache
def recorded(folder: Path, call: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What was fed to and given by one recorded call."""
    with np.load(folder / "case.npz") as case:
        return tuple(  # type: ignore[return-value]
            {name.removeprefix(start): case[name] for name in case.files if name.startswith(start)}
            for start in (f"{call}.in.", f"{call}.out.")
        )


def difference(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> float:
    """The largest absolute difference over all outputs, which must agree in shape."""
    assert {name: x.shape for name, x in got.items()} == {name: x.shape for name, x in want.items()}
    return max(float(np.abs(got[name] - want[name]).max(initial=0)) for name in want)


@pytest.mark.parametrize("inline", [False, True], ids=["native", "function bodies"])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_both_recorded_calls_are_reproduced(package: Path, precision: str, inline: bool) -> None:
    """Prefill and the step behind it, all outputs; native kernels and the exporter's own function bodies."""
    model = OracleModel.load(package / "model.onnx", precision=precision, inline_functions=inline)
    for call in CALLS:
        feeds, expected = recorded(package, call)
        assert difference(model.run(feeds, list(expected)), expected) < MODELS[package.name]


def test_float32_stays_close_to_float64(package: Path) -> None:
    """The oracle's own spread between precisions is far below the tolerance of the recorded calls."""
    single, double = (OracleModel.load(package / "model.onnx", precision=p) for p in ("float32", "float64"))
    feeds, expected = recorded(package, "call0")
    assert difference(single.run(feeds, list(expected)), double.run(feeds, list(expected))) < 3e-5


PRESENT_OF = {
    "past_key_values.": "present.",
    "past_states.": "present.",
    "past_key_self_": "present_key_self_",
    "past_value_self_": "present_value_self_",
    "past.": "present.",
    "key_cache.": "updated_key_cache.",
    "value_cache.": "updated_value_cache.",
}
"""How exporters call the output that is fed back, by the beginning of the input's name."""

NAMELESS = ["past_key_values_key_cache_0", "past_key_values_key_cache_1"]
NAMELESS += ["past_key_values_value_cache_0", "past_key_values_value_cache_1"]
"""The caches of the package whose outputs have the names of nodes; its presents come in this order."""


def present_of(name: str, outputs: list[str]) -> str | None:
    """The output that is fed back to the input `name`, None when it is no cache or state."""
    if name in NAMELESS:
        return outputs[1 + NAMELESS.index(name)]
    for start, other in PRESENT_OF.items():
        if name.startswith(start):
            return other + name.removeprefix(start)
    return None


def test_a_prompt_in_two_chunks_gives_what_the_whole_prompt_gives(package: Path) -> None:
    """The second chunk, from the caches and states of the first, ends where the whole prompt ends."""
    model = OracleModel.load(package / "model.onnx", precision="float64")
    feeds, _ = recorded(package, "call0")
    names = [port.name for port in model.outputs]
    logits = names[0]
    count = feeds["input_ids"].shape[1]
    assert count > 2
    cut = count // 2
    whole = model.run(feeds, names)
    first = model.run(chunk(feeds, slice(0, cut)), names)
    carried = {
        name: first[present]
        for name in feeds
        if (present := present_of(name, names)) in first and first[present].size
    }
    assert carried
    second = model.run(chunk(feeds, slice(cut, count)) | carried, names)
    joined = np.concatenate([first[logits], second[logits]], axis=1)
    # A merged graph gives its cross-attention caches in the first call only.
    grown = [name for name in names if ".encoder." not in name]
    got = {name: second[name] for name in grown} | {logits: joined}
    assert difference(got, {name: whole[name] for name in grown}) < 1e-9


def chunk(feeds: dict[str, np.ndarray], positions: slice) -> dict[str, np.ndarray]:
    """The feeds of a prompt cut to `positions`, with a mask over all positions up to their end."""
    cut = dict(feeds)
    for name in ("input_ids", "position_ids"):
        if name in cut:
            cut[name] = cut[name][..., positions]
    if "attention_mask" in cut:
        cut["attention_mask"] = cut["attention_mask"][:, : positions.stop]
    for name, value in (("write_indices", positions.start), ("nonpad_kv_seqlen", positions.stop)):
        if name in cut:
            cut[name] = np.full_like(cut[name], value)
    if "use_cache_branch" in cut:
        cut["use_cache_branch"] = np.array([positions.start > 0])
    return cut


def test_int4_is_what_onnx_runtime_computes_at_level_1(tmp_path: Path) -> None:
    """At level 4, as exported, ONNX Runtime rounds activations to int8; at level 1 it agrees."""
    folder = package_of("genai-llama-int4-matmulnbits")
    rewritten = rewrite_accuracy_level(folder / "model.onnx", level=1, folder=tmp_path)
    session = onnxruntime.InferenceSession(str(rewritten), providers=["CPUExecutionProvider"])
    model = OracleModel.load(folder / "model.onnx")
    for call in CALLS:
        feeds, recorded_outputs = recorded(folder, call)
        names = list(recorded_outputs)
        at_level_1 = dict(zip(names, session.run(names, feeds), strict=True))
        ours = model.run(feeds, names)
        assert difference(ours, at_level_1) < 1e-4
        assert difference(ours, recorded_outputs) > 1e-3  # the rewrite did change something


def test_rounding_adds_just_what_the_declared_precision_implies(package: Path) -> None:
    """A float32 graph is unchanged, bit for bit; int8 activations give the call recorded with them."""
    dropped, kept = (OracleModel.load(package / "model.onnx", rounding=name) for name in ("none", "model"))
    for call in CALLS:
        feeds, expected = recorded(package, call)
        got = kept.run(feeds, list(expected))
        assert difference(got, expected) < 1e-4
        if "int4" not in package.name:
            assert difference(got, dropped.run(feeds, list(expected))) == 0
