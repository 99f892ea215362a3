"""The gates of the suite for real models on a GPU: nobody takes a lane that ran nothing for one that passed.

Without a GPU the suite is run with an engine that computes on the CPU under the name of `ort-cuda`
(`fixtures/claimed_cuda.py`): what is specified here is what the suite makes of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml

from fixtures.decoders import TinyDecoder
from harness.engines.ort import CUDA_ENGINE
from harness.models import builtin_package
from suites.e2e.test_gpu import judge_golden

ROOT = Path(__file__).parents[2]
CUDA = "CUDAExecutionProvider"
SUITE = "suites/e2e/test_gpu.py"
PACKAGES = "a_package_decodes"
"""Selects the tests of real packages; the others need no folder of them."""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Two packages; what the second declares of its ports would be refused."""
    folder = tmp_path / "models"
    for name in ("plain", "misdeclared"):
        (folder / name).mkdir(parents=True)
        TinyDecoder(layers="ar", seed=3).save(folder / name / "model.onnx")
    declared = {"model": {"io": {"token_input": "attention_mask", "logits_output": "nothing"}}}
    text = yaml.safe_dump(declared)
    (folder / "misdeclared/inference_metadata.yaml").write_text(text, encoding="utf-8")
    return folder


def run(tmp_path: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A session of the suite in an environment that names nothing but `environment`."""
    given = {k: v for k, v in os.environ.items() if not k.startswith(("ONNX_PARITY_", "PYTEST_"))}
    command = [sys.executable, "-m", "pytest", SUITE, "-q", "-ra", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return subprocess.run(
        [*command, f"--basetemp={tmp_path / 'base'}", *options],
        cwd=ROOT,
        env=given
        | {"ONNX_PARITY_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT), "COLUMNS": "400"}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def without_gpu() -> None:
    """For what can only be seen where there is none."""
    if CUDA_ENGINE.availability().usable:
        pytest.skip("there is a GPU here, and these tests are about machines without one")


@pytest.mark.usefixtures("without_gpu")
def test_without_a_gpu_every_test_is_skipped_by_name(tmp_path: Path, models: Path) -> None:
    """Each says why, and what would have it fail instead."""
    ended = run(tmp_path, ONNX_PARITY_MODEL_DIR=str(models))
    assert ended.returncode == 0, ended.stdout
    assert re.search(r"^6 skipped", ended.stdout, re.MULTILINE), ended.stdout
    skips = [line for line in ended.stdout.splitlines() if line.startswith("SKIPPED")]
    assert skips
    for line in skips:
        assert "ort-cuda is not usable here: " in line
        assert "ONNX_PARITY_REQUIRE=cuda" in line


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("selection", ["", "nothing"])
def test_without_a_gpu_that_was_promised_the_lane_fails(tmp_path: Path, models: Path, selection: str) -> None:
    """Each test by itself, and the session for want of any, also where none was even selected."""
    ended = run(
        tmp_path, "-k", selection, ONNX_PARITY_MODEL_DIR=str(models), ONNX_PARITY_REQUIRE="cuda,model"
    )
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    for gate in ("cuda", "model"):
        assert f"ERROR: {gate} is required" in ended.stdout
    assert "skipped" not in ended.stdout.splitlines()[-1]
    assert ("6 errors" in ended.stdout.splitlines()[-1]) == (not selection)


def test_without_models_the_tests_of_packages_are_skipped_by_name(tmp_path: Path) -> None:
    """Where there is a GPU and no folder."""
    ended = run(tmp_path, "-p", "fixtures.claimed_cuda", "-k", PACKAGES)
    assert ended.returncode == 0, ended.stdout
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("SKIPPED")]
    assert "ONNX_PARITY_MODEL_DIR" in line


def test_every_package_is_decoded_and_the_report_has_both_times(tmp_path: Path, models: Path) -> None:
    """The sidecar that would be refused is not even looked at; the promised lanes have run."""
    ended = run(
        tmp_path,
        *("-p", "fixtures.claimed_cuda", "-k", PACKAGES, f"--junitxml={tmp_path / 'junit.xml'}"),
        ONNX_PARITY_MODEL_DIR=str(models),
        ONNX_PARITY_REQUIRE="cuda,model",
        ONNX_PARITY_REPORT_DIR=str(tmp_path / "reports"),
    )
    assert ended.returncode == 0, ended.stdout
    found = {}
    for case in ET.parse(tmp_path / "junit.xml").iter("testcase"):
        properties = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
        found[Path(properties["parity_package"]).name] = properties
    assert set(found) == {"plain", "misdeclared"}
    for properties in found.values():
        assert properties["parity_verdict"] == "identical"
        assert properties["parity_placement"] == CUDA
        document = json.loads(Path(properties["parity_report"]).read_text(encoding="utf-8"))
        assert document["model"]["topology"]["outcome"] == "derived"
        (prompt,) = document["prompts"]
        assert len(prompt["candidate_ids"]) >= 16
        assert {"candidate_s", "oracle_s", "candidate_tokens_per_s", "oracle_tokens_per_s"} == set(
            prompt["timing"]
        )


def test_a_golden_decides_about_its_own_model_alone(tmp_path: Path) -> None:
    """The demo gives its golden's tokens; a package of its name alone fails; without a golden: skipped."""
    models = tmp_path / "models"
    demo = builtin_package("demo")
    assert demo is not None
    shutil.copytree(demo.materialise(), models / "demo")
    for name in ("smollm2", "without"):
        (models / name).mkdir()
        TinyDecoder(layers="ar", seed=3).save(models / name / "model.onnx")
    ended = run(
        tmp_path, "-p", "fixtures.claimed_cuda", "-k", "its_golden", ONNX_PARITY_MODEL_DIR=str(models)
    )
    assert ended.stdout.splitlines()[-1].startswith("1 failed, 1 passed, 1 skipped"), ended.stdout
    assert "its_golden[smollm2]" in ended.stdout
    assert "of another model" in ended.stdout
    assert "there is no golden without.json" in ended.stdout


ADVISORY = {
    "exit_code": 1,
    "outcome": "inconclusive",
    "error": None,
    "golden": {"advisory": True},
    "prompts": [{"first_difference": 3}, {"first_difference": None}],
}


def test_an_advisory_golden_is_shown_and_decides_nothing() -> None:
    """Neither a pass nor a failure; any other outcome of an advisory golden is a failure still."""
    with pytest.raises(pytest.skip.Exception, match=r"advisory.*\[3, None\]"):
        judge_golden(ADVISORY)
    for outcome in ("crashed", "invalid-run", None):
        with pytest.raises(pytest.fail.Exception, match=str(outcome)):
            judge_golden(
                ADVISORY | {"outcome": outcome, "golden": None if outcome is None else ADVISORY["golden"]}
            )
    with pytest.raises(pytest.fail.Exception, match="inconclusive"):
        judge_golden(ADVISORY | {"golden": {"advisory": False}})
    judge_golden(ADVISORY | {"outcome": "identical", "exit_code": 0})


def test_an_engine_that_ran_elsewhere_fails_the_suite(tmp_path: Path, models: Path) -> None:
    """Its tokens are right, and its nodes were on the CPU."""
    ended = run(
        tmp_path,
        *("-p", "fixtures.claimed_cuda", "-k", f"{PACKAGES} and plain"),
        ONNX_PARITY_MODEL_DIR=str(models),
        CLAIMED_PROVIDER="CPUExecutionProvider",
    )
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    assert "CUDAExecutionProvider" in ended.stdout
    assert "1 failed" in ended.stdout.splitlines()[-1]
