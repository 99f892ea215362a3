"""Nothing that a terminal would obey reaches one, whoever wrote it: an engine, a model or a file."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fixtures.answering import TERMINAL
from fixtures.decoders import TinyDecoder
from fixtures.installed import install_engines
from harness.cli.app import run
from harness.events import CheckStarted, PromptStarted, SessionOpened
from harness.report.conformance_console import render_conformance
from harness.report.console import ProgressReporter, render_report
from harness.report.plain import legible, visible

ROOT = Path(__file__).parents[2]
SAMPLES = sorted((ROOT / "reports/samples").glob("*/*.json"))
DECODER = TinyDecoder(layers="ar", seed=3)


def obeyed(text: str) -> set[str]:
    """The characters of an output that do anything but stand there, and end a line."""
    return {character for character in text if not character.isprintable() and character != "\n"}


def rendered(document: Any) -> str:
    """A document as a person reads it."""
    render = render_conformance if "relations" in document else render_report
    console = Console(file=io.StringIO(), width=400, color_system=None)
    console.print(render(document))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def hostile(value: Any) -> Any:
    """The document with something that a terminal obeys in every text that is not a word of the schema's."""
    if isinstance(value, str):
        return f"{TERMINAL}{value}{TERMINAL}"
    if isinstance(value, dict):
        free = {"settings", "providers"}
        return {
            key: {hostile(name): hostile(item) for name, item in kept.items()}
            if key in free and isinstance(kept, dict)
            else hostile(kept)
            for key, kept in value.items()
        }
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return value


@given(st.text(st.characters(codec=None)))
def test_text_is_on_one_line_and_nothing_in_it_is_lost(text: str) -> None:
    """What can be shown stands as it is."""
    shown = visible(text)

    assert shown.isprintable()
    assert visible(shown) == shown
    assert (shown == text) == text.isprintable()
    assert legible({text: [text, (text, 1, None)]}) == {shown: [shown, [shown, 1, None]]}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.parent.name)
def test_no_text_of_a_report_is_obeyed(path: Path) -> None:
    """Every text of every sample at once: versions, settings, placement, prompts, evidence, failures."""
    document = json.loads(path.read_text("utf-8"))
    plain, attacked = rendered(document), rendered(hostile(document))

    assert obeyed(plain) == set()
    assert obeyed(attacked) == set()
    assert "owned" in attacked
    # A line that breaks would look like one of ours.
    assert attacked.count("\n") <= plain.count("\n") + 8


def test_progress_is_not_obeyed() -> None:
    """Names and versions are shown while it runs."""
    console = Console(file=io.StringIO(), width=400, color_system=None)
    progress = ProgressReporter(console)
    progress(
        CheckStarted(
            package="p",
            model_path="p",
            model_sha256="0" * 64,
            topology_outcome="derived",
            kv_inputs=1,
            state_pairs=0,
            candidate=f"c{TERMINAL}",
            oracle="o",
            oracle_mode="one-pass",
            prompts=1,
        )
    )
    progress(SessionOpened("candidate", f"c{TERMINAL}", f"1{TERMINAL}", {}, None, None, 1.0))
    progress(PromptStarted(0, "text", (1,), 1))
    progress.close()

    assert isinstance(console.file, io.StringIO)
    assert "loaded" in console.file.getvalue()
    assert obeyed(console.file.getvalue()) == set()


COMMANDS = {
    "check": "check PACKAGE --candidate ENGINE ASKED",
    "check that fails": "check PACKAGE --candidate ENGINE,does=fail ASKED",
    "check that parts": "check PACKAGE --candidate ENGINE,gives=nan ASKED",
    "conform": "conform PACKAGE --engine ENGINE --relation run-to-run ASKED",
    "conform that fails": "conform PACKAGE --engine ENGINE,does=fail ASKED",
    "record": "record PACKAGE -o a.trace --engine ENGINE ASKED",
    "golden record": "golden record PACKAGE -o a.json --candidate ENGINE ASKED",
    "engines": "engines",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_an_engine_says_is_not_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    """Its version, description, settings, placement and errors, on both streams of every command."""
    if "fails" in command and sys.platform == "win32":
        pytest.skip("isolation needs POSIX signals")
    install_engines(monkeypatch, answering="fixtures.answering:ENGINE")
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    package = DECODER.save(tmp_path / "model.onnx")
    # An engine that raises in this process is debugged there, and its traceback is Python's.
    way = "" if "fails" in command else " --in-process"
    asked = f"--prompt-ids 1,2,3 --max-new-tokens 3{way}"
    words = COMMANDS[command].replace("PACKAGE", str(package)).replace("ASKED", asked)

    status = run(words.replace("ENGINE", "answering:says=terminal").split())

    assert status in (0, 1, 4)
    out, err = capfd.readouterr()
    assert "owned" in out + err
    assert obeyed(out + err) == set()


def test_what_a_model_is_called_is_not_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ports are anybody's text, too."""
    monkeypatch.chdir(tmp_path)
    port = {"name": f"ids{TERMINAL}", "dtype": "int64", "shape": ["batch", f"n{TERMINAL}"]}
    ports = {"inputs": [port], "outputs": [port | {"name": "logits"}]}
    Path("ports.json").write_text(json.dumps({"ports": ports}), encoding="utf-8")

    shown = [run(["ports", "ports.json"]), run(["derive", "ports.json"])]

    out, err = capfd.readouterr()
    assert shown[0] == 0
    assert "owned" in out
    assert obeyed(out + err) == set()
