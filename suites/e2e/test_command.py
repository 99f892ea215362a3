"""The command as a user runs it, in a process of its own, on the built-in demo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from harness.engines.registry import parse_engine
from harness.report.document import token_sha256

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "reports/schemas/parity-1.schema.json").read_text(encoding="utf-8")
)
COMMAND = [sys.executable, "-c", "from harness.cli import main; main()"]


def environment(tmp_path: Path) -> dict[str, str]:
    """Ours, with a cache that nobody else uses."""
    return {**os.environ, "ONNX_PARITY_CACHE_DIR": str(tmp_path / "cache")}


def valid(text: str) -> dict[str, Any]:
    """A parity document that fits its schema."""
    document: dict[str, Any] = json.loads(text)
    jsonschema.validate(document, SCHEMA)
    return document


@pytest.mark.parametrize("candidate", [None, "nxrt"])
def test_the_demo_is_identical_on_every_engine(tmp_path: Path, candidate: str | None) -> None:
    """No package named: the demo, its topology derived, 3 prompts of 32 tokens, report and output agree."""
    if candidate is not None and not (state := parse_engine(candidate).engine.availability()).usable:
        pytest.skip(f"{state.reason} {state.next_action}")
    chosen = [] if candidate is None else ["--candidate", candidate]
    run = subprocess.run(
        [*COMMAND, "check", *chosen, "--json"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    document = valid(line)
    assert document["verdict"] == "identical"
    assert document["model"]["path"] == "demo"
    assert document["model"]["topology"] == {"outcome": "derived", "kv_inputs": 32, "state_pairs": 96}
    assert document["candidate"]["engine"] == (candidate or "ort-cpu")
    assert document["oracle"]["precision"] == "float32"
    assert len(document["prompts"]) == 3
    for prompt in document["prompts"]:
        assert len(prompt["candidate_ids"]) == 32
        assert prompt["candidate_ids"] == prompt["oracle_ids"] == prompt["oracle_forced_ids"]
        assert prompt["candidate_sha256"] == prompt["oracle_sha256"] == token_sha256(prompt["oracle_ids"])
    (report,) = (tmp_path / "reports").glob("*-demo/parity.json")
    assert valid(report.read_text(encoding="utf-8")) == document


@pytest.fixture
def long_check(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A check of several prompts, running, with its first prompt judged; and its report."""
    prompts = [part for i in range(20) for part in ("--prompt-ids", f"{i + 1},2")]
    report = tmp_path / "report" / "parity.json"
    with subprocess.Popen(
        [*COMMAND, "check", "demo", *prompts, "--max-new-tokens", "8", "--json", "--report-dir", "report"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while process.poll() is None:
            if report.exists() and json.loads(report.read_text(encoding="utf-8"))["prompts"]:
                break
            time.sleep(0.02)
        yield process, report
        process.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_ctrl_c_leaves_a_valid_report_of_what_was_judged(
    long_check: tuple[subprocess.Popen[str], Path],
) -> None:
    """Exit 130, one JSON document, no draft left, no traceback, and the judged prompts are in the report."""
    process, report = long_check
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    (line,) = out.splitlines()
    document = valid(line)
    assert (document["verdict"], document["exit_code"], document["interrupted"]) == (None, 130, True)
    assert 1 <= len(document["prompts"]) < 20
    assert all(prompt["verdict"] == "identical" for prompt in document["prompts"])
    assert valid(report.read_text(encoding="utf-8")) == document
    assert [path.name for path in report.parent.iterdir()] == ["parity.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_a_killed_check_leaves_a_valid_report_that_says_so(
    long_check: tuple[subprocess.Popen[str], Path],
) -> None:
    """Nothing can be said after SIGKILL, so what was written last already reads as interrupted."""
    process, report = long_check
    process.kill()
    process.wait(timeout=120)
    document = valid(report.read_text(encoding="utf-8"))
    assert (document["verdict"], document["exit_code"], document["interrupted"]) == (None, 130, True)
    assert document["prompts"]
