"""`check` on decoders with caches of every sort: identical, and verified in the way that the cache allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
