"""A project of somebody else: tiny packages, engines of a distribution of its own, and the plugin."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from fixtures.decoders import TinyDecoder

ROOT = Path(__file__).parents[2]

DECODER = TinyDecoder(layers="ar", seed=3)

WRONG_ENGINE = """
from fixtures.planted import PlantedEngine
from harness.engines.base import TopLogits

def swap(run, tops):
    # The third token of each decode of six is the second choice.
    if run % 6 != 2:
        return tops
    return [TopLogits((t.token_ids[1], t.token_ids[0], *t.token_ids[2:]), t.values) for t in tops]

ENGINE = PlantedEngine(name="wrong", logits=swap)
"""

ENTRY_POINTS = """
[onnx_parity.engines]
absent = no_such_module:ENGINE
misbehaving = fixtures.misbehaving:ENGINE
wrong = wrong_engine:ENGINE
"""

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with the packages `models/one` and `models/two` and three engines; `absent` does not load."""
    if not any(entry.value == "harness.pytest_plugin" for entry in entry_points(group="pytest11")):
        pytest.fail("onnx-parity was installed before it had its plugin: install it again", pytrace=False)
    for name in ("one", "two"):
        folder = pytester.path / "models" / name
        folder.mkdir(parents=True)
        DECODER.save(folder / "model.onnx")
    installed = pytester.mkdir("planted-1.0.dist-info")
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n", encoding="utf-8"
    )
    (installed / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    pytester.makepyfile(wrong_engine=WRONG_ENGINE)
    found = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(pytester.path), str(ROOT), *found]))
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(pytester.path / "cache"))
    for twin in ("MODEL_DIR", "REQUIRE", "CANDIDATE", "REPORT_DIR"):
        monkeypatch.delenv(f"ONNX_PARITY_{twin}", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return pytester


@pytest.fixture
def run(project: pytest.Pytester) -> Run:
    """Runs pytest in the project, in a process of its own, under the strictest rules."""

    def start(*arguments: str) -> pytest.RunResult:
        return project.runpytest_subprocess("--strict-markers", "--strict-config", "-ra", *arguments)

    return start
