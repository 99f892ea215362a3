"""Which tests there are of packages and engines, and which of them one worker of pytest-xdist gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from harness.pytest_plugin.settings import CANDIDATE, MODEL_DIR, folder_named_by, label

__all__ = ["group", "packages", "parametrise", "turn"]

_GPU_ENGINE = "ort-cuda"


def parametrise(metafunc: pytest.Metafunc) -> None:
    """Make a test for each package, and for each engine, where it asks for them and names none itself."""
    given = {name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark)}
    asked = set(metafunc.fixturenames) - given
    if "parity_package" in asked:
        found = packages(metafunc.config)
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
    """Put a test into the group of its GPU, or into that of its package; where it has no group of its own."""
    if item.get_closest_marker("xdist_group") is not None:
        return
    callspec = getattr(item, "callspec", None)
    package = None if callspec is None else callspec.params.get("parity_package")
    engine = (None if callspec is None else callspec.params.get("parity_engine")) or CANDIDATE.of(item.config)
    if item.get_closest_marker("gpu") is not None or _is_gpu(engine or ""):
        item.add_marker(pytest.mark.xdist_group(f"onnx-parity-gpu{_device(engine or '')}"))
    elif package is not None:
        item.add_marker(pytest.mark.xdist_group(f"onnx-parity-{package}"))


@contextlib.contextmanager
def turn(item: pytest.Item, folder: Path) -> Iterator[None]:
    """Wait until no other worker of pytest-xdist runs a test of this test's group, and keep them waiting.

    Groups alone do not see to it: they count for nothing unless tests are distributed by them, and with
    pytest 9.2 not even then (pytest-xdist up to 3.8).

    Args:
        item: the test.
        folder: where all workers of this run may keep a file.
    """
    mark = item.get_closest_marker("xdist_group")
    if mark is None or not hasattr(item.config, "workerinput"):
        yield
        return
    from filelock import FileLock

    name = str(mark.args[0] if mark.args else mark.kwargs.get("name", "default"))
    with FileLock(folder / f"{label(name)}.lock"):  # whatever ends a worker frees it
        yield


def _names(mark: pytest.Mark) -> list[str]:
    """What a marker `parametrize` gives values to."""
    names = mark.args[0] if mark.args else mark.kwargs["argnames"]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _engine(text: str) -> object:
    return pytest.param(text, id=text, marks=pytest.mark.gpu if _is_gpu(text) else ())


def _device(engine: str) -> str:
    """What tells the groups of several GPUs apart: empty for the first, which is that of tests in general."""
    options = dict(part.partition("=")[::2] for part in engine.partition(":")[2].split(","))
    number = options.get("device", "0") if _is_gpu(engine) else "0"
    return "" if number == "0" else f"-{number}"


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


def packages(config: pytest.Config) -> dict[str, Path]:
    """Folders with graphs in `--parity-model-dir`; or itself, where it holds graphs."""
    folder = folder_named_by(MODEL_DIR, config)
    if folder is None or not folder.is_dir():
        return {}
    if any(folder.glob("*.onnx")):
        return {folder.name: folder}
    return {
        each.name: each for each in sorted(folder.iterdir()) if each.is_dir() and any(each.rglob("*.onnx"))
    }
