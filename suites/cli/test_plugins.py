"""Engines of others at the command: what one does wrong is told of it, and nothing else suffers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fixtures.answering import WRONG_INFO, WRONG_TOPS
from fixtures.decoders import TinyDecoder
from fixtures.installed import install_engines
from harness.cli.app import run

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "reports/schemas/parity-1.schema.json").read_text(encoding="utf-8")
)
DECODER = TinyDecoder(layers="ar", seed=3)
PROMPT = (1, 2, 3)
TOKENS = 4
WAYS = [(), ("--in-process",)] if sys.platform != "win32" else [("--in-process",)]

ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: "".join(way) or "isolated")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny decoder; the answering engine is installed beside the usual ones."""
    install_engines(monkeypatch, answering="fixtures.answering:ENGINE")
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return DECODER.save(tmp_path / "model.onnx")


def check(
    package: Path, capfd: pytest.CaptureFixture[str], engine: str, *options: str
) -> tuple[int, dict[str, Any], str]:
    """Exit status, document, and what stood on standard error."""
    ids = ",".join(map(str, PROMPT))
    common = ["--candidate", engine, "--prompt-ids", ids, "--max-new-tokens", str(TOKENS), "--json"]
    status = run(["check", str(package), *common, *options])
    out, err = capfd.readouterr()
    document = json.loads(out)
    jsonschema.validate(document, SCHEMA)
    (report,) = Path("reports").glob("*/parity.json")
    jsonschema.validate(json.loads(report.read_text("utf-8")), SCHEMA)
    assert document["exit_code"] == status
    assert "Traceback" not in err
    return status, document, err


@ways
@pytest.mark.parametrize("gives", WRONG_TOPS)
def test_largest_logits_of_a_wrong_form_are_a_crash(
    package: Path, capfd: pytest.CaptureFixture[str], gives: str, way: tuple[str, ...]
) -> None:
    """Exit 4 in whatever process it runs: nobody's tokens are blamed, and nothing is identical."""
    status, document, _ = check(package, capfd, f"answering:gives={gives}", *way)

    assert (status, document["verdict"]) == (4, "crashed")
    failure = document["candidate"]["failure"]
    assert failure["step"] == 0
    assert failure["message"].startswith("answering ")
    assert document["prompts"][0]["candidate_ids"] == []


@ways
@pytest.mark.parametrize("strict", [(), ("--strict-placement",)], ids=["", "strict"])
@pytest.mark.parametrize("says", WRONG_INFO)
def test_a_session_that_says_what_no_session_is_is_a_crash(
    package: Path, capfd: pytest.CaptureFixture[str], says: str, way: tuple[str, ...], strict: tuple[str, ...]
) -> None:
    """Exit 4, a report that keeps its schema, and no traceback."""
    status, document, _ = check(package, capfd, f"answering:says={says}", *way, *strict)

    assert (status, document["verdict"]) == (4, "crashed")
    assert document["candidate"]["failure"]["step"] is None
    assert document["candidate"]["failure"]["message"].startswith("answering ")


@ways
@pytest.mark.parametrize("gives", ["nan", "infinity"])
def test_logits_that_decide_nothing_are_divergent(
    package: Path, capfd: pytest.CaptureFixture[str], gives: str, way: tuple[str, ...]
) -> None:
    """At the first step, though the token is right."""
    status, document, _ = check(package, capfd, f"answering:gives={gives}", *way)

    assert (status, document["verdict"]) == (1, "divergent")
    assert document["prompts"][0]["first_divergence"]["index"] == 0


@ways
def test_what_an_engine_prints_leaves_the_document_alone(
    package: Path, capfd: pytest.CaptureFixture[str], way: tuple[str, ...]
) -> None:
    """Printed by Python or past it, in whatever process."""
    status, document, err = check(package, capfd, "answering:does=print", *way)

    assert (status, document["verdict"]) == (0, "identical")
    if way:
        assert "printed" in err
        assert "written" in err


COMMANDS = {
    "check": "check model.onnx --candidate ENGINE ASKED",
    "conform": "conform model.onnx --engine ENGINE --relation run-to-run ASKED",
    "record": "record model.onnx -o a.trace --engine ENGINE ASKED",
    "golden record": "golden record model.onnx -o b.json --candidate ENGINE ASKED",
    "golden check": "golden check a.json model.onnx --candidate ENGINE",
}
commands = pytest.mark.parametrize("command", COMMANDS)


def ask(command: str, engine: str) -> int:
    """The exit status of a command with an engine in its own process."""
    ids = ",".join(map(str, PROMPT))
    if command == "golden check":
        asked = (
            f"golden record model.onnx -o a.json --candidate ort-cpu --prompt-ids {ids} --max-new-tokens 2"
        )
        assert run(asked.split()) == 0
    words = COMMANDS[command].replace("ENGINE", engine)
    words = words.replace("ASKED", f"--prompt-ids {ids} --max-new-tokens 2")
    return run([*words.split(), "--in-process", "--json"])


@commands
@pytest.mark.usefixtures("package")
def test_standard_output_is_the_documents_in_every_command(
    command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where the engine runs in the command's own process and prints."""
    status = ask(command, "answering:does=print")

    out, err = capfd.readouterr()
    assert status == json.loads(out.splitlines()[-1])["exit_code"] == 0
    assert "printed" not in out
    assert "written" not in out
    assert "printed" in err


@commands
@pytest.mark.usefixtures("package")
def test_an_engine_that_ends_the_command_has_crashed(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    """In the command's own process an exit with status 0 would pass for one that found nothing."""
    status = ask(command, "answering:does=exit")

    out, err = capfd.readouterr()
    assert status == json.loads(out.splitlines()[-1])["exit_code"] == 4
    assert "asked it to exit (SystemExit: 0)" in err
