"""What is shipped: the wheel holds `harness` alone, and its declared dependencies keep the house clean."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = {name: [Requirement(r) for r in rs] for name, rs in PROJECT["optional-dependencies"].items()}

PLATFORMS = {
    "linux-x86_64": {"sys_platform": "linux", "platform_machine": "x86_64"},
    "linux-arm64": {"sys_platform": "linux", "platform_machine": "aarch64"},
    "macos-arm64": {"sys_platform": "darwin", "platform_machine": "arm64"},
    "macos-x86_64": {"sys_platform": "darwin", "platform_machine": "x86_64"},
    "windows-x86_64": {"sys_platform": "win32", "platform_machine": "AMD64"},
}


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("extra", [None, *EXTRAS])
def test_exactly_one_distribution_owns_the_onnxruntime_files(platform: str, extra: str | None) -> None:
    """`onnxruntime` and `onnxruntime-gpu` overwrite each other's files: never both, never neither."""
    wanted = REQUIREMENTS + (EXTRAS[extra] if extra else [])
    names = {r.name for r in wanted if r.marker is None or r.marker.evaluate(PLATFORMS[platform])}
    assert len(names & {"onnxruntime", "onnxruntime-gpu"}) == 1


def test_versions_are_ranges_and_never_pinned() -> None:
    """An exact pin in a library makes it impossible to install beside others."""
    for requirement in [*REQUIREMENTS, *(r for rs in EXTRAS.values() for r in rs)]:
        assert requirement.specifier, f"{requirement.name} has no lower bound"
        assert all(part.operator not in ("==", "===") for part in requirement.specifier)


def test_nothing_in_the_wheel_imports_the_suites() -> None:
    """`harness` is all that is installed, so it must not need `fixtures` or `suites`."""
    sources = list((ROOT / "harness").rglob("*.py"))
    assert sources
    for source in sources:
        text = source.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(from|import) (fixtures|suites)\b", text, re.MULTILINE), source
