"""`check` on decoders with caches of every sort: identical, and verified in the way that the cache allows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from fixtures.attention_forms import Quantised, WithHeads
from fixtures.cache_forms import Fused, OneToken, Static, Unbatched, Windowed
from fixtures.decoder_graphs import CacheForm
from fixtures.decoders import TinyDecoder
from fixtures.state_forms import GrownState, HalfStates
from harness.cli.app import run

# Decoders and seeds of `suites/decode/test_cache_forms.py`: no choice is close.
FORMS: dict[str, tuple[str, int, CacheForm, str]] = {
    "fused": ("aa", 2, Fused(), "one-pass"),
    "static": ("aa", 2, Static(), "one-pass"),
    "no batch": ("ra", 5, Unbatched(), "one-pass"),
    "states in half precision": ("rar", 4, HalfStates(), "one-pass"),
    "a width that is a symbol": ("ara", 3, WithHeads(), "one-pass"),
    "buffers that the attention writes": ("aa", 2, WithHeads(rows_in=24, rows_out=24), "one-pass"),
    "a window that rolls": ("aa", 0, WithHeads(rows_in=5, rows_out=5, rolls=True), "one-pass"),
    "windowed": ("aa", 0, Windowed(), "stepwise"),
    "a scale for each row": ("aa", 2, Quantised(), "stepwise"),
    "a state that grows": ("cac", 0, GrownState(), "stepwise"),
    "one token": ("ra", 5, OneToken(), "stepwise"),
}
ROUNDED = {"a scale for each row"}
"""Forms whose cache holds other numbers than the reference computes with."""


@pytest.mark.parametrize("name", FORMS)
def test_a_check_verifies_every_form(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one pass where that sees what steps see; the report says which way it went."""
    layers, seed, form, mode = FORMS[name]
    window = 5 if "window" in name else None
    decoder = TinyDecoder(layers, vocab=29, width=8, seed=seed, mask=name != "static", window=window)
    decoder.save(tmp_path / "model.onnx", form)
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    asked = ["--prompt-ids", "1,2,3,4", "--prompt-ids", "7", "--max-new-tokens", "16"]
    engines = ["--candidate", "ort-cpu", "--in-process", "--report-dir", str(tmp_path / "report")]

    assert run(["check", str(tmp_path), *asked, *engines, "--json"]) == 0

    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "identical"
    assert report["oracle"]["mode"] == mode
    if name not in ROUNDED:
        found = [tuple(prompt["candidate_ids"]) for prompt in report["prompts"]]
        assert found == [decoder.greedy(prompt, 16) for prompt in ((1, 2, 3, 4), (7,))]


def kept_rows(path: Path, rows: int) -> Path:
    """A decoder that says its KV grows, and gives back its last `rows` rows alone."""
    decoder = TinyDecoder("aa", seed=2)
    model = onnx.load(decoder.save(path))
    for name, value in (("starts", -rows), ("ends", 2**31), ("axes", 2)):
        model.graph.initializer.append(numpy_helper.from_array(np.array([value]), name))
    for port in decoder.topology.kv_outputs:
        (node,) = (node for node in model.graph.node if port in node.output)
        whole = f"{port}/whole"
        node.output[list(node.output).index(port)] = whole
        for other in model.graph.node:
            for index, taken in enumerate(other.input):
                if taken == port:
                    other.input[index] = whole
        model.graph.node.append(helper.make_node("Slice", [whole, "starts", "ends", "axes"], [port]))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_a_graph_whose_cache_cannot_be_fed_again_is_refused_at_any_step(
    rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first call (2 rows of 3 tokens) or later: the oracle finds it as well, so nobody crashed."""
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    kept_rows(tmp_path / "model.onnx", rows)
    asked = ["--prompt-ids", "1,2,3", "--max-new-tokens", "6", "--report-dir", str(tmp_path / "report")]

    assert run(["check", str(tmp_path), *asked, "--candidate", "ort-cpu", "--in-process", "--json"]) == 3

    report = json.loads(capsys.readouterr().out)
    tokens = max(rows + 1, 3)
    assert report["verdict"] is None
    assert f"has shape [1, 1, {rows}, " in report["error"]["message"]
    assert f"after {tokens} tokens, where [1, 1, {tokens}, " in report["error"]["message"]
    assert report["error"]["message"].startswith("The decode loop cannot drive this graph: present.")
    assert "export it with KV that grows" in report["error"]["next"]
