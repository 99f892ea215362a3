"""`check` on engines that misbehave, each in one run: every one is a finding with a name and an exit code."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from fixtures.decoders import TinyDecoder
from fixtures.installed import install_engines
from harness.cli.app import run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="isolation needs POSIX signals")

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "reports/schemas/parity-1.schema.json").read_text(encoding="utf-8")
)
DECODER = TinyDecoder(layers="ar", seed=3)
PROMPTS = ((1, 2, 3), (4,))
TOKENS = 6


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny decoder; the misbehaving engine is installed beside the usual ones."""
    install_engines(monkeypatch, misbehaving="fixtures.misbehaving:ENGINE")
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return DECODER.save(tmp_path / "model.onnx")


def check(
    package: Path, capsys: pytest.CaptureFixture[str], engine: str, *options: str
) -> tuple[int, dict[str, Any], str]:
    """Exit status, document, and what stood on standard error."""
    prompts = [part for ids in PROMPTS for part in ("--prompt-ids", ",".join(map(str, ids)))]
    common = ["--candidate", engine, *prompts, "--max-new-tokens", str(TOKENS), "--json"]
    status = run(["check", str(package), *common, *options])
    out, err = capsys.readouterr()
    document = json.loads(out)
    jsonschema.validate(document, SCHEMA)
    assert document["exit_code"] == status
    assert "Traceback" not in err
    return status, document, err


FAILURES: dict[str, tuple[str, str, int | None, dict[str, Any]]] = {
    "segfault at a step": ("segfault,at=3", "crashed", 3, {"signal": "SIGSEGV"}),
    "abort at creation": ("abort,when=open", "crashed", None, {"signal": "SIGABRT"}),
    "exit that calls itself a success": ("exit,at=1", "crashed", 1, {"exit_code": 0}),
    "hang": ("hang,at=2", "timeout", 2, {"limit": "call 5 s"}),
    "memory eater": ("eat,at=1", "crashed", 1, {"limit": "memory 600 MiB"}),
    "lacks an operator": ("lack,when=open", "unsupported", None, {}),
    "Python error": ("raise,at=4", "crashed", 4, {}),
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_engine_that_fails_is_a_verdict_for_each_prompt(
    name: str, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 4, what was decoded so far, and how it failed; the second prompt gets a new process.

    What the tokens before the failure must be is known from the decoder's own reference.
    """
    act, verdict, step, facts = FAILURES[name]
    before = set(psutil.Process().children(recursive=True))
    # Whoever does not hang has all the time that a busy machine may take.
    patience = "5" if verdict == "timeout" else "120"
    status, document, _ = check(
        package, capsys, f"misbehaving:does={act}", "--call-timeout", patience, "--memory-limit", "600MiB"
    )
    assert (status, document["verdict"]) == (4, verdict)
    assert [prompt["verdict"] for prompt in document["prompts"]] == [verdict] * len(PROMPTS)
    for ids, prompt in zip(PROMPTS, document["prompts"], strict=True):
        assert prompt["candidate_ids"] == prompt["oracle_ids"] == list(DECODER.greedy(ids, step or 0))
    assert document["candidate"]["process"] == "isolated"
    failure = document["candidate"]["failure"]
    assert (failure["kind"], failure["step"]) == (verdict, step)
    found = {name: failure[name] for name in ("signal", "exit_code", "limit")}
    assert found == {"signal": None, "exit_code": None, "limit": None} | facts
    assert set(psutil.Process().children(recursive=True)) == before


def test_noise_is_no_finding(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megabytes on both streams of the candidate: exit 0, and neither of ours has any of it."""
    status, document, err = check(package, capsys, "misbehaving:does=noise,at=1")
    assert (status, document["verdict"]) == (0, "identical")
    assert "noise" not in err.replace("does=noise", "")


def test_nan_is_divergent_at_its_first_step(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The step is named; JSON has no NaN, so the logits are null."""
    status, document, _ = check(package, capsys, "misbehaving:does=nan,at=2")
    assert (status, document["verdict"]) == (1, "divergent")
    found = document["prompts"][0]["first_divergence"]
    assert found["index"] == 2
    assert "NaN" in found["evidence"]
    assert {logit for _, logit in found["candidate_top"]} == {None}


def test_an_engine_that_draws_its_answers_is_nondeterministic(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It differs from the oracle, and decoded again from itself: its draws go on where they were."""
    status, document, _ = check(package, capsys, "misbehaving:does=random")
    assert (status, document["verdict"]) == (1, "nondeterministic")
    assert "decoded again" in document["prompts"][0]["first_divergence"]["evidence"]


def test_an_engine_that_never_loaded_has_no_placement_to_judge(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also under strict placement the verdict is what happened."""
    status, document, _ = check(package, capsys, "misbehaving:does=lack,when=open", "--strict-placement")
    assert (status, document["verdict"]) == (4, "unsupported")


def test_an_engine_that_runs_elsewhere_is_an_invalid_run(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 6, with the worker's own words."""
    status, document, _ = check(package, capsys, "misbehaving:does=elsewhere,when=open")
    assert (status, document["verdict"]) == (6, "invalid-run")
    assert "MatMul ran on the CPU" in document["error"]["message"]


def test_a_run_that_takes_too_long_is_a_timeout_for_all_that_is_left(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit of the run is spent on the first prompt; the second is not begun."""
    status, document, _ = check(package, capsys, "misbehaving:does=hang,at=1", "--timeout", "5")
    assert (status, document["verdict"]) == (4, "timeout")
    assert document["candidate"]["failure"]["limit"] == "run 5 s"
    assert [len(prompt["candidate_ids"]) for prompt in document["prompts"]] == [1, 0]


def test_in_process_runs_the_candidate_here(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine says in which process it is: this one when asked, another by default; so does the report."""
    pids = []
    for options, process in (([], "isolated"), (["--in-process"], "in-process")):
        status, document, _ = check(package, capsys, "misbehaving", *options)
        assert status == 0
        assert document["candidate"]["process"] == process
        pids.append(document["candidate"]["settings"]["pid"])
    assert pids[0] != os.getpid()
    assert pids[1] == os.getpid()


def test_the_oracle_stays_in_process(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker is started for a check, however many sessions the oracle has."""
    from harness.engines.isolated import engine

    started: list[str] = []
    worker = engine.Worker
    monkeypatch.setattr(
        engine, "Worker", lambda name, **limits: started.append(name) or worker(name, **limits)
    )
    status, _, _ = check(package, capsys, "ort-cpu")
    assert (status, started) == (0, ["ort-cpu"])


def test_modules_that_lie_where_the_command_is_run_are_not_taken(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of a candidate imports what its parent would, and nothing that is merely called alike."""
    for name in ("json", "numpy", "onnxruntime", "harness"):
        Path(f"{name}.py").write_text("raise SystemExit('theirs')", encoding="utf-8")
    here = ("", str(Path.cwd()))
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in here])

    status, document, _ = check(package, capsys, "ort-cpu")

    assert (status, document["verdict"]) == (0, "identical")
