"""The workflows for GitHub Actions are well formed, run what the README says, and keep what they promise."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fixtures.decoders import TinyDecoder

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github/workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
GPU = FOLDER / "gpu.yml"


def read(path: Path) -> dict[Any, Any]:
    """A workflow as plain data; the key `on` is the truth value True in YAML 1.1."""
    workflow: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return workflow


def jobs(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each job with its name."""
    yield from read(path)["jobs"].items()


def steps_that_run(job: dict[str, Any], text: str) -> list[dict[str, Any]]:
    """The steps of a job with `text` in their script."""
    return [step for step in job["steps"] if text in step.get("run", "")]


def lint(*paths: Path) -> subprocess.CompletedProcess[str]:
    """The schema of workflows that check-jsonschema brings along, without a network."""
    pytest.importorskip("check_jsonschema", reason="the package check-jsonschema is not installed")
    return subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *paths],
        capture_output=True,
        text=True,
        check=False,
    )


def test_there_are_workflows_for_everybody_the_night_and_the_gpu() -> None:
    """What follows is about these."""
    assert {path.name for path in WORKFLOWS} >= {"ci.yml", "gpu.yml", "nightly.yml"}


def test_workflows_fit_their_schema() -> None:
    """As GitHub reads them."""
    ended = lint(*WORKFLOWS)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("timeout-minutes:", "timeout-minute:"), ("runs-on:", "run-on:"), ("steps:", "step:")],
)
def test_the_schema_notices_a_misspelt_key(tmp_path: Path, right: str, wrong: str) -> None:
    """What lints nothing would pass as well."""
    text = GPU.read_text(encoding="utf-8")
    assert right in text
    broken = tmp_path / "gpu.yml"
    broken.write_text(text.replace(right, wrong), encoding="utf-8")
    assert lint(broken).returncode == 1


def test_the_lines_of_the_readme_run_on_three_systems() -> None:
    """Word for word, each in a step of its own, in bash also on Windows."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^python3 -m venv .*$", readme, re.MULTILINE)
    assert len(lines) == 2
    (job,) = [job for _, job in jobs(FOLDER / "ci.yml")]
    systems = {system.partition("-")[0] for system in job["strategy"]["matrix"]["os"]}
    assert systems == {"ubuntu", "macos", "windows"}
    assert job["runs-on"] == "${{ matrix.os }}"
    assert job["defaults"]["run"]["shell"] == "bash"
    assert [step["run"].strip() for step in job["steps"] if "run" in step] == lines


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_job_ends_and_may_do_little(path: Path) -> None:
    """A job that hangs shall not take hours, nor one that is misled write anything anywhere."""
    assert read(path)["permissions"] == {}
    for name, job in jobs(path):
        assert job["timeout-minutes"] <= 360, name
        assert set(job["permissions"].items()) <= {("contents", "read")}, name


def test_the_gpu_lane_runs_where_a_gpu_is_and_never_for_strangers() -> None:
    """On a runner of one's own, by night or by hand."""
    assert set(read(GPU)[True]) == {"schedule", "workflow_dispatch"}
    for name, job in jobs(GPU):
        assert {"self-hosted", "gpu"} <= set(job["runs-on"]), name


def test_the_gpu_lane_promises_a_gpu_and_models() -> None:
    """A job for each package, one at a time: without what is promised it fails, and never skips."""
    found = dict(jobs(GPU))
    assert read(GPU)["env"]["ONNX_PARITY_REQUIRE"] == "cuda"
    job = found["package"]
    assert job["strategy"]["matrix"] == {"package": "${{ fromJSON(needs.packages.outputs.names) }}"}
    assert (job["strategy"]["max-parallel"], job["strategy"]["fail-fast"]) == (1, False)
    (step,) = steps_that_run(job, "pytest")
    assert step["env"]["ONNX_PARITY_REQUIRE"] == "cuda,model"
    assert step["timeout-minutes"] < job["timeout-minutes"]


def test_the_gpu_lane_keeps_reports_and_junit_whatever_happens() -> None:
    """And shows the verdicts on the page of the run."""
    for name in ("package", "built-in"):
        job = dict(jobs(GPU))[name]
        (step,) = steps_that_run(job, "pytest")
        assert "--parity-report-dir reports/gpu " in step["run"]
        assert "--junitxml reports/gpu/junit.xml" in step["run"]
        (told,) = steps_that_run(job, "GITHUB_STEP_SUMMARY")
        (kept,) = [s for s in job["steps"] if s.get("uses", "").startswith("actions/upload-artifact@")]
        assert kept["with"]["path"] == "reports/gpu/"
        assert told["if"] == kept["if"] == "always()"


def test_the_tests_that_the_gpu_lane_names_exist() -> None:
    """A test that was renamed would be missed on the next night only."""
    suite = (ROOT / "suites/e2e/test_gpu.py").read_text(encoding="utf-8")
    (by_package,) = steps_that_run(dict(jobs(GPU))["package"], "pytest")
    named = re.findall(r'"suites/e2e/test_gpu\.py::(\w+)\[\$PACKAGE\]"', by_package["run"])
    assert sorted(named) == sorted(re.findall(r"^def (test_a_package_\w+)\(", suite, re.MULTILINE))
    (built_in,) = steps_that_run(dict(jobs(GPU))["built-in"], "pytest")
    assert "suites/e2e/test_gpu.py -k built_in " in built_in["run"]
    assert "def test_a_built_in_" in suite


def script(tmp_path: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A step as GitHub runs it: `bash -eo pipefail`, with the files that it may write to."""
    files = {name: str(tmp_path / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text],
        env={**os.environ, **files, "RUNNER_TEMP": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs bash")
def test_the_gpu_lane_finds_the_packages(tmp_path: Path) -> None:
    """Folders with graphs, also further down, and nothing else; a folder without any fails the lane."""
    models = tmp_path / "models"
    for name in ("two words", "exported/onnx"):
        (models / name).mkdir(parents=True)
        TinyDecoder(layers="a", seed=3).save(models / name / "model.onnx")
    (models / "notes").mkdir()
    (models / "list.onnx").write_text("", encoding="utf-8")
    (step,) = steps_that_run(dict(jobs(GPU))["packages"], "GITHUB_OUTPUT")

    ended = script(tmp_path, step["run"], ONNX_PARITY_MODEL_DIR=str(models))
    assert ended.returncode == 0, ended.stderr
    key, _, value = (tmp_path / "GITHUB_OUTPUT").read_text(encoding="utf-8").partition("=")
    assert (key, json.loads(value)) == ("names", ["exported", "two words"])

    for folder in (str(models / "notes"), ""):
        ended = script(tmp_path, step["run"], ONNX_PARITY_MODEL_DIR=folder)
        assert ended.returncode == 1
        assert "nothing would be tested" in ended.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs bash")
def test_the_gpu_lane_shows_the_table_of_verdicts(tmp_path: Path) -> None:
    """From its heading to the end, as pytest writes it."""
    (step,) = steps_that_run(dict(jobs(GPU))["package"], "GITHUB_STEP_SUMMARY")
    (tmp_path / "log.txt").write_text(
        "== FAILURES ==\nlong\n========= onnx-parity =========\nverdict\nidentical\n== 1 passed in 2s ==\n",
        encoding="utf-8",
    )
    assert script(tmp_path, step["run"]).returncode == 0
    assert (tmp_path / "GITHUB_STEP_SUMMARY").read_text(encoding="utf-8").splitlines() == [
        "```",
        "========= onnx-parity =========",
        "verdict",
        "identical",
        "== 1 passed in 2s ==",
        "```",
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="needs bash")
def test_the_gpu_lane_says_where_there_is_no_table(tmp_path: Path) -> None:
    """What could not be installed leaves no log: that the step before failed is enough."""
    (step,) = steps_that_run(dict(jobs(GPU))["built-in"], "GITHUB_STEP_SUMMARY")
    assert script(tmp_path, step["run"]).returncode == 0
    summary = (tmp_path / "GITHUB_STEP_SUMMARY").read_text(encoding="utf-8")
    assert summary.splitlines() == ["```", "No test ran.", "```"]
