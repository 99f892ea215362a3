"""End-of-sequence tokens: where a package declares them, and that a check stops there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.decoders import TinyDecoder
from harness.cli.app import run
from harness.package import open_package

GENERATION, CONFIG, GENAI = "generation_config.json", "config.json", "genai_config.json"


def write(folder: Path, files: dict[str, Any]) -> Path:
    """Write JSON files into a folder."""
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, ()),
        ({CONFIG: {"eos_token_id": 2}}, (2,)),
        ({GENERATION: {"eos_token_id": [3, 4]}, CONFIG: {"eos_token_id": 2}}, (3, 4)),
        ({GENAI: {"model": {"eos_token_id": 5}}, GENERATION: {"eos_token_id": 3}}, (5,)),
        ({GENAI: {"version": 2, "tokens": {"eos": [6, 7]}}, CONFIG: {"eos_token_id": 2}}, (6, 7)),
        ({GENERATION: {"eos_token_id": None}, CONFIG: {"eos_token_id": 2}}, (2,)),
    ],
)
def test_where_they_are_declared(tmp_path: Path, files: dict[str, Any], ids: tuple[int, ...]) -> None:
    """One ID or several, in the first file that names any; a null names none."""
    (tmp_path / "model.onnx").touch()

    assert open_package(write(tmp_path, files)).eos_token_ids() == ids


def test_a_check_stops_there_if_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--stop-on-eos` the token that ends is the last one; without it, decoding goes on."""
    decoder = TinyDecoder("ar", vocab=29, width=8, seed=2)
    decoder.save(tmp_path / "model.onnx")
    tokens = decoder.greedy((1, 2, 3, 4), 8)
    write(tmp_path, {GENERATION: {"eos_token_id": [28, tokens[3]]}})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    options = ["--prompt-ids", "1,2,3,4", "--max-new-tokens", "8", "--candidate", "ort-cpu", "--json"]

    found = []
    for more in ([], ["--stop-on-eos"]):
        run(["check", str(tmp_path), *options, *more])
        found.append(json.loads(capsys.readouterr().out)["prompts"][0]["candidate_ids"])

    end = tokens.index(tokens[3]) + 1
    assert found == [list(tokens), list(tokens[:end])]


@pytest.mark.parametrize(
    ("files", "beyond"),
    [
        ({GENERATION: {"eos_token_id": 29}}, 29),
        ({GENERATION: {"eos_token_id": [28, 10**30]}}, 10**30),
        ({CONFIG: {"eos_token_id": 128001}}, 128001),
        ({GENAI: {"model": {"eos_token_id": [30]}}, CONFIG: {"eos_token_id": 1}}, 30),
        ({GENERATION: {"eos_token_id": 28}, CONFIG: {"eos_token_id": 128001}}, None),
    ],
)
def test_an_end_that_no_token_can_be_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    files: dict[str, Any],
    beyond: int | None,
) -> None:
    """Decoding would never stop there, as if it had not been asked to; what nobody waits for is let be."""
    TinyDecoder("ar", vocab=29, width=8, seed=2).save(tmp_path / "model.onnx")
    write(tmp_path, files)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    options = ["--prompt-ids", "1", "--max-new-tokens", "1", "--candidate", "ort-cpu", "--json"]

    assert run(["check", str(tmp_path), *options]) == 0
    capsys.readouterr()
    status = run(["check", str(tmp_path), *options, "--stop-on-eos"])

    error = json.loads(capsys.readouterr().out)["error"]
    if beyond is None:
        assert (status, error) == (0, None)
    else:
        assert status == 2
        assert f"would wait for eos_token_id {beyond}, and the model knows 0 to 28" in error["message"]
