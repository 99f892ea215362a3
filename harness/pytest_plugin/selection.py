"""Which tests there are of packages and engines, and which of them one worker of pytest-xdist gets."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from harness.pytest_plugin.settings import CANDIDATE, MODEL_DIR, folder_named_by

__all__ = ["group", "parametrise"]

_GPU_ENGINE = "ort-cuda"


def parametrise(metafunc: pytest.Metafunc) -> None:
    """Make a test for each package, and for each engine, where it asks for them and names none itself."""
    given = {name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark)}
    asked = set(metafunc.fixturenames) - given
    if "parity_package" in asked:
        found = _packages(metafunc.config)
        # Without any there is one test still, to say so.
        params = [pytest.param(path, id=name, marks=pytest.mark.real_model) for name, path in found.items()]
        metafunc.parametrize(
            "parity_package",
            params or [pytest.param(None, id="none", marks=pytest.mark.real_model)],
            indirect=True,
        )
    if "parity_engine" in asked:
        metafunc.parametrize("parity_engine", list(map(_engine, _engines(metafunc.config))), indirect=True)


def group(item: pytest.Item) -> None:
    """Put a test into the group of the GPU, or into that of its package; where it has no group of its own."""
    if item.get_closest_marker("xdist_group") is not None:
        return
    callspec = getattr(item, "callspec", None)
    package = None if callspec is None else callspec.params.get("parity_package")
    engine = (None if callspec is None else callspec.params.get("parity_engine")) or CANDIDATE.of(item.config)
    if item.get_closest_marker("gpu") is not None or _is_gpu(engine or ""):
        item.add_marker(pytest.mark.xdist_group("onnx-parity-gpu"))
    elif package is not None:
        item.add_marker(pytest.mark.xdist_group(f"onnx-parity-{package}"))


def _names(mark: pytest.Mark) -> list[str]:
    """What a marker `parametrize` gives values to."""
    names = mark.args[0] if mark.args else mark.kwargs["argnames"]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _engine(text: str) -> object:
    return pytest.param(text, id=text, marks=pytest.mark.gpu if _is_gpu(text) else ())


def _is_gpu(engine: str) -> bool:
    return engine.partition(":")[0] == _GPU_ENGINE


_NO_CANDIDATES = {"oracle", "hf"}
"""Engines of ours that are no candidates: what they are held against, and what runs no graph."""


def _engines(config: pytest.Config) -> list[str]:
    """By name alone: whether they can be used is seen when the test begins."""
    chosen = CANDIDATE.of(config)
    if chosen is not None:
        return [chosen]
    return sorted({entry.name for entry in entry_points(group="onnx_parity.engines")} - _NO_CANDIDATES)


def _packages(config: pytest.Config) -> dict[str, Path]:
    """Folders with graphs in `--parity-model-dir`; or itself, where it holds graphs."""
    folder = folder_named_by(MODEL_DIR, config)
    if folder is None or not folder.is_dir():
        return {}
    if any(folder.glob("*.onnx")):
        return {folder.name: folder}
    return {
        each.name: each for each in sorted(folder.iterdir()) if each.is_dir() and any(each.rglob("*.onnx"))
    }
