"""Real exporters' decoders without their encoders: recorded calls, and a decode on two engines.

The models are not part of this repository. `ONNX_PARITY_EXPORTER_MODELS` names a folder with one model in
each subfolder: `model.onnx`, and `case.npz` with two recorded calls (arrays `call0.in.PORT`,
`call0.out.PORT`, `call1.in.PORT`, ...).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.sessions import open_session
from harness.cli.app import run
from harness.decode.assembling import Assembly, assemble
from harness.decode.loop import forced_decode
from harness.decode.parts import decoder_inventory
from harness.decode.wired import WiredSession
from harness.package import open_package
from harness.topology.resolve import resolve_package

GIVEN = {
    "genai-whisper-decoder": [f"past_{kind}_cross_{i}" for kind in ("key", "value") for i in (0, 1)],
    "optimum-whisper-merged": ["encoder_hidden_states"],
}
"""What each takes of its encoder: cross KV that it only reads, or hidden states of which it makes its own."""

VOCABULARY = 256
NEW_TOKENS = 32


def model_folder(name: str) -> Path:
    """The folder of one model; skips by the name of the variable to set."""
    folder = os.environ.get("ONNX_PARITY_EXPORTER_MODELS")
    if not folder:
        pytest.skip("set ONNX_PARITY_EXPORTER_MODELS to a folder of exporters' models")
    return Path(folder) / name


def assembly_of(folder: Path) -> Assembly:
    """A package's decoder with all its graphs."""
    package = open_package(folder)
    topology = resolve_package(package, decoder_inventory(package)).topology
    assert topology is not None
    return assemble(package, topology)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("genai-whisper-decoder", "ort-cpu"),
        ("genai-whisper-decoder", "nxrt"),
        ("genai-whisper-decoder", "oracle"),
        # nxrt 0.1.0.dev6 gives one value of an If that has several.
        ("optimum-whisper-merged", "ort-cpu"),
        ("optimum-whisper-merged", "oracle"),
    ],
)
def test_both_recorded_calls_are_reproduced(name: str, kind: str) -> None:
    """All logits after the prompt, and after the next token on the cached branch, are the recorded ones."""
    folder = model_folder(name)
    assembly = assembly_of(folder)
    case = np.load(folder / "case.npz")
    (step,) = assembly.wiring.steps
    session = WiredSession(assembly.wiring, {step.name: open_session(kind, step.graph)})
    extra = {given.port.name: case[f"call0.in.{given.name}"] for given in assembly.given}
    prompt, more = (case[f"call{call}.in.input_ids"][0].tolist() for call in (0, 1))

    # The token after the last recorded one is fed to nobody: any will do.
    trace = forced_decode(session, assembly.topology, prompt, [*more, 0], top_k=VOCABULARY, extra=extra)

    assert sorted(extra) == sorted(GIVEN[name])
    assert trace.failure is None
    for call, found in ((0, trace.steps[0]), (1, trace.steps[-1])):
        recorded = case[f"call{call}.out.logits"][0, -1]
        logits = np.empty_like(recorded)
        logits[list(found.token_ids)] = found.values
        assert np.allclose(logits, recorded, atol=1e-4)


@pytest.mark.parametrize("mode", ["one-pass", "stepwise"])
@pytest.mark.parametrize("name", GIVEN)
def test_a_check_without_the_encoder_says_so_and_is_identical(
    name: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sides are given the same numbers, made up from the seed in the report, and decode the same."""
    folder = model_folder(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    options = ["--candidate", "ort-cpu", "--oracle-mode", mode, "--max-new-tokens", str(NEW_TOKENS), "--json"]

    status = run(["check", str(folder), "--prompt-ids", "94,62,68,89", *options])

    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    (prompt,) = document["prompts"]
    assert (status, document["verdict"], document["oracle"]["mode"]) == (0, "identical", mode)
    assert prompt["candidate_ids"] == prompt["oracle_ids"]
    assert len(prompt["candidate_ids"]) == NEW_TOKENS
    for side in ("candidate", "oracle"):
        settings = document[side]["settings"]
        assert settings["encoder"] == "is not in the package"
        assert settings["encoder_outputs"].startswith(f"made up from seed {document['seed']}: ")
