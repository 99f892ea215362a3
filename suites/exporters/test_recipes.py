"""What the exporters are asked for, and where each part of this suite can run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from suites.exporters.recipes import EXPORTERS, recipes

HERE = Path(__file__).parent
OURS = ("attribution.py", "checking.py", "configuring.py", "table.py")
"""What runs in our environment; `__main__.py` imports either side late."""
THEIRS = [
    path
    for path in (*HERE.glob("*.py"), *HERE.glob("recipes/*.py"), *HERE.glob("exporting/*.py"))
    if path.name not in (*OURS, "__main__.py") and not path.name.startswith("test_")
]
FAMILIES = {
    "dense",
    "MLA",
    "sliding window",
    "shared KV",
    "MoE",
    "gated delta",
    "mamba2",
    "lightning",
    "short conv",
    "encoder-decoder",
}


def imported(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, wherever it does."""
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = []
    for node in tree:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", THEIRS, ids=lambda path: str(path.relative_to(HERE)))
def test_what_runs_beside_an_exporter_needs_nothing_of_ours(path: Path) -> None:
    """Our runtime and theirs own the same files, and pins clash."""
    assert imported(path).isdisjoint({"harness", "fixtures", "click", "pytest"})


@pytest.mark.parametrize("name", OURS)
def test_what_checks_needs_nothing_of_the_exporters(name: str) -> None:
    """Packages are checked where no exporter is installed."""
    heavy = {"torch", "transformers", "mobius", "optimum", "onnxruntime_genai", "onnxruntime"}
    assert imported(HERE / name).isdisjoint(heavy)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_every_package_has_a_name_of_its_own(exporter: str) -> None:
    """Names are folders; every recipe also names a source model, or reading it fails."""
    names = [recipe.name for recipe in recipes(exporter)]
    assert names
    assert len(names) == len(set(names))


def test_every_kind_of_cache_is_asked_for() -> None:
    """Sixty pairs and more, of every family, with static caches, four bits and half precision."""
    asked = [
        recipe for exporter in EXPORTERS for recipe in recipes(exporter) if "fault" not in recipe.options
    ]
    assert len({(recipe.source.name, recipe.variant) for recipe in asked}) >= 60
    assert {recipe.source.family for recipe in asked} >= FAMILIES
    assert {recipe.precision for recipe in asked} == {"fp32", "fp16", "int4", "int4-level4"}
    assert any("static_cache" in recipe.options for recipe in asked)
