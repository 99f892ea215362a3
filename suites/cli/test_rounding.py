"""`check --rounding`: an oracle that rounds as the model declares, or one that does not round at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from fixtures.decoders import TinyDecoder
from harness.cli.app import run
from harness.engines.registry import EngineSpec, parse_engine
from harness.errors import InputError
from harness.parity.reference import Reference

DECODER = TinyDecoder(layers="ar", float_dtype=TensorProto.FLOAT16)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A decoder in half precision."""
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return DECODER.save(tmp_path / "model.onnx")


def check(package: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    """Exit status and document."""
    status = run(["check", str(package), "--prompt-ids", "1,2", "--max-new-tokens", "2", "--json", *options])
    return status, json.loads(capsys.readouterr().out)


def test_rounding_model_rounds_and_runs_in_steps(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report says so; nothing is claimed to be proven, nothing is re-decided."""
    status, document = check(package, capsys, "--rounding", "model", "--candidate", "oracle")
    assert status in (0, 1)
    oracle = document["oracle"]
    assert (oracle["settings"]["rounding"], oracle["mode"]) == ("model", "stepwise")
    assert oracle["proof"]["passed"] is None
    assert "not applicable" in oracle["proof"]["reason"]
    assert document["prompts"][0]["undecided"] == []


def test_rounding_none_is_the_default(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Saying it changes nothing: one pass, proven, with the same margin."""
    documents = [check(package, capsys, *options)[1] for options in ((), ("--rounding", "none"))]
    oracles = [document["oracle"] for document in documents]
    assert [oracle["settings"]["rounding"] for oracle in oracles] == ["none", "none"]
    assert [oracle["mode"] for oracle in oracles] == ["one-pass", "one-pass"]
    assert [oracle["proof"]["passed"] for oracle in oracles] == [True, True]
    assert documents[0]["prompts"][0]["min_margin"] == documents[1]["prompts"][0]["min_margin"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rounding", "model", "--oracle", "ort-cpu", "--candidate", "oracle"], "ort-cpu has no option"),
        (["--rounding", "model", "--oracle", "oracle:rounding=none"], "contradicts"),
        (["--rounding", "model", "--oracle-mode", "one-pass"], "rounding=model rounds on purpose"),
        (["--rounding", "none", "--candidate", "oracle"], "same options"),
    ],
    ids=["no such option", "contradiction", "one pass", "against itself"],
)
def test_what_cannot_be_is_refused(
    package: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    """Exit 2 with the reason, before anything runs."""
    status, document = check(package, capsys, *options)
    assert (status, document["verdict"]) == (2, None)
    assert says in document["error"]["message"]


def test_an_oracle_that_rounds_opens_no_second_precision(package: Path) -> None:
    """Asked for one pass or not: no band, no second precision; its logits are halves."""
    spec = parse_engine("oracle:rounding=model")
    opened: list[Any] = []

    class Counting:
        """The oracle, with a list of what it was opened with."""

        name, description, options = "oracle", "", spec.engine.options

        def availability(self) -> Any:
            return spec.engine.availability()

        def open(self, model: Path, options: Any) -> Any:
            opened.append(dict(options))
            return spec.engine.open(model, options)

    reference = Reference(
        EngineSpec(Counting(), spec.options), package, DECODER.topology, mode="one-pass", top_k=5
    )
    found = reference.verify((1, 2, 3), (4, 5, 6, 7))
    assert (found.mode, found.bands, found.undecided) == ("stepwise", (0.0,) * 4, ())
    logits = [value for step in found.trace.steps for value in step.values]
    assert logits == [float(np.float16(value)) for value in logits]
    assert opened == [{"rounding": "model"}]
    with pytest.raises(InputError):
        Reference.check_mode(spec, "one-pass")
    assert Reference.check_mode(spec, None) == "stepwise"
