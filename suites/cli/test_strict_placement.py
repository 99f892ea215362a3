"""`check --strict-placement`: no node of the candidate runs on the CPU; the report keeps where they ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.decoders import TinyDecoder
from harness.cli.app import run
from harness.engines.registry import parse_engine

DECODER = TinyDecoder(layers="ar", seed=3)
PROMPT = (1, 2, 3)
TOKENS = 4


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny decoder."""
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return DECODER.save(tmp_path / "model.onnx")


def check(package: Path, capsys: pytest.CaptureFixture[str], candidate: str, *options: str) -> dict[str, Any]:
    """The document."""
    ids = ",".join(map(str, PROMPT))
    common = ["--candidate", candidate, "--prompt-ids", ids, "--max-new-tokens", str(TOKENS), "--json"]
    status = run(["check", str(package), *common, *options])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == status
    return document


def test_a_candidate_on_the_cpu_is_an_invalid_run(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 6 instead of 0: the nodes are listed, and nothing is decoded; the report has where they ran."""
    assert check(package, capsys, "ort-cpu")["verdict"] == "identical"

    document = check(package, capsys, "ort-cpu", "--strict-placement")

    assert (document["exit_code"], document["verdict"], document["prompts"]) == (6, "invalid-run", [])
    operators = document["candidate"]["placement"]["providers"]["CPUExecutionProvider"]
    for operator, count in operators.items():
        assert f"{count} {operator}" in document["error"]["message"]


def test_a_candidate_that_shows_no_placement_is_an_invalid_run(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`nxrt` does not say where it computes."""
    if not (state := parse_engine("nxrt").engine.availability()).usable:
        pytest.skip(f"{state.reason} {state.next_action}")
    document = check(package, capsys, "nxrt", "--strict-placement")
    assert (document["exit_code"], document["verdict"]) == (6, "invalid-run")
    assert "nxrt does not say where its nodes run" in document["error"]["message"]
