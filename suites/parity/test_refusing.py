"""A cache that comes back in a wrong shape: every command says whose fault it is, and alike.

From the oracle it comes back so as well: then the graph cannot be driven, whoever is under test. From the
engine alone: then that has crashed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fixtures.decoders import TinyDecoder
from fixtures.unfeedable import last_rows, lost_state
from harness.cli.app import run
from harness.engines import registry
from harness.package import model_sha256
from harness.parity.golden import Golden, GoldenPrompt, write_golden

ROOT = Path(__file__).parents[2]
PROMPT, TOKENS = (1, 2, 3), 6
GRAPHS: dict[str, tuple[Callable[[Path], TinyDecoder], int, str, list[int], list[int]]] = {
    "at the first call": (lambda path: last_rows(path, 2), 0, "present.0.key", [1, 1, 2, 4], [1, 1, 3, 4]),
    "at the next one": (lambda path: last_rows(path, 3), 1, "present.0.key", [1, 1, 3, 4], [1, 1, 4, 4]),
    "later": (lambda path: last_rows(path, 5), 3, "present.0.key", [1, 1, 5, 4], [1, 1, 6, 4]),
    "a state": (lost_state, 1, "present.0.recurrent_state", [1, 3], [1, 4]),
}
"""How a graph is made, and the step, port and shapes that must be named: what came back and what must."""

COMMANDS = {
    "check": ("parity", "check PACKAGE --candidate ENGINE ASKED"),
    "check in steps": ("parity", "check PACKAGE --candidate ENGINE --oracle-mode stepwise ASKED"),
    "record": ("recording", "record PACKAGE --engine ENGINE -o x.trace ASKED"),
    "verify": ("parity", "verify x.trace PACKAGE"),
    "golden record": ("golden-run", "golden record PACKAGE -o x.golden.json --candidate ENGINE ASKED"),
    "golden check": ("golden-run", "golden check known.golden.json PACKAGE --candidate ENGINE"),
    "conform": ("conformance", "conform PACKAGE --engine ENGINE ASKED"),
    "conform without a band": ("conformance", "conform PACKAGE --engine ENGINE --rounding none ASKED"),
}
ASKED = ("--prompt-ids", ",".join(map(str, PROMPT)), "--max-new-tokens", str(TOKENS))

Ask = Callable[[str, str], tuple[int, dict[str, Any], list[str]]]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs a command with an engine on the package in this folder: status, document, and what it said."""
    installed = {
        "misbehaving": "fixtures.misbehaving:ENGINE",
        "oracle": "harness.engines.oracle:ENGINE",
        "ort-cpu": "harness.engines.ort:CPU_ENGINE",
    }
    entries = [EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in installed.items()]
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: entries)
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def ask(command: str, engine: str) -> tuple[int, dict[str, Any], list[str]]:
        if command == "verify":
            ask("record", engine)
        schema, template = COMMANDS[command]
        words = template.replace("PACKAGE", "model.onnx").replace("ENGINE", engine).split()
        if words[-1] == "ASKED":
            words[-1:] = ASKED
        alone = () if command == "verify" else ("--in-process",)
        status = run([*words, *alone, "--json"])
        out, err = capsys.readouterr()
        document: dict[str, Any] = json.loads(out)
        jsonschema.validate(
            document, json.loads((ROOT / f"reports/schemas/{schema}-1.schema.json").read_text("utf-8"))
        )
        assert document["exit_code"] == status
        return status, document, [line for line in err.splitlines() if line.startswith("onnx-parity:")]

    return ask


def keep_golden(model: Path) -> None:
    """What `golden check` takes: tokens that the decode does not get to."""
    ids = tuple(range(TOKENS))
    known = GoldenPrompt(text=None, prompt_ids=PROMPT, inputs_sha256=None, token_ids=ids)
    write_golden(
        model.with_name("known.golden.json"),
        Golden(model="tiny", sha256=model_sha256(model), prompts=(known,)),
    )


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_graph_is_refused_in_one_line(command: str, graph: str, ask: Ask, tmp_path: Path) -> None:
    """With the port, both shapes, the step, and what to do next; the engine is not blamed."""
    make, step, port, found, needed = GRAPHS[graph]
    make(tmp_path / "model.onnx")
    keep_golden(tmp_path / "model.onnx")

    status, document, said = ask(command, "ort-cpu:threads=1")

    assert status == 3
    assert document.get("verdict") is None
    assert document["error"] is None
    refusal = document["refusal"]
    assert (refusal["code"], refusal["also"], refusal["ports"]) == ("E_NOT_DRIVABLE", [], [port])
    tokens = len(PROMPT) + step
    assert refusal["message"] == (
        f"The decode loop cannot drive this graph: at step {step}, {port} has shape {found} after {tokens} "
        f"tokens, where {needed} must come back. Declare the cache's kind in inference_metadata.yaml, or "
        "export it with KV that grows by one row for each token."
    )
    assert said == [f"onnx-parity: {refusal['message']}"]


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_engine_that_alone_shapes_it_so_has_crashed(
    command: str, at: int, ask: Ask, tmp_path: Path
) -> None:
    """The oracle gets it back in its shape after the same tokens: there is nothing wrong with the graph."""
    TinyDecoder("aa", seed=2).save(tmp_path / "model.onnx")
    keep_golden(tmp_path / "model.onnx")

    status, document, said = ask(command, f"misbehaving:does=shorten,at={at}")

    assert status == 4
    assert document["refusal"] is None
    assert "crashed" in (document.get("verdict"), document.get("outcome")) or command == "record"
    tokens = len(PROMPT) + at
    shapes = f"present.0.key has shape [1, 1, {tokens - 1}, 4] after {tokens} tokens"
    engine = document.get("engine") or document.get("candidate")
    told = " ".join([*said, str(engine.get("failure"))])
    assert shapes in told


def test_the_trace_of_a_graph_that_is_refused_keeps_what_came_before(ask: Ask, tmp_path: Path) -> None:
    """The prompts before it are judged by `verify` as by `check`; the time on the machine is not lost."""
    decoder = last_rows(tmp_path / "model.onnx", 5)
    status, document, _ = ask("record", "ort-cpu:threads=1")
    assert (status, document["outcome"]) == (3, "recorded")
    assert document["prompts"][0]["token_ids"] == list(decoder.greedy(PROMPT, 3))


def test_a_refused_decode_says_as_far_as_it_got(ask: Ask, tmp_path: Path) -> None:
    """A report of relations has the tokens of its reference from before."""
    decoder = last_rows(tmp_path / "model.onnx", 5)
    _, document, _ = ask("conform", "ort-cpu:threads=1")
    assert document["prompt"]["token_ids"] == list(decoder.greedy(PROMPT, 3))
    assert document["relations"] == []
