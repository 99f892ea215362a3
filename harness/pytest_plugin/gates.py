"""What a test needs and this machine may lack: it is skipped by name, or fails where it was promised.

Nobody shall take a lane that ran nothing for one that passed, so each skip names what would make it fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from harness.engines.registry import parse_engine
from harness.errors import InputError
from harness.pytest_plugin.selection import packages
from harness.pytest_plugin.settings import MODEL_DIR, REQUIRE, gate_of, required
from harness.report.plain import visible

__all__ = ["missing", "require_engine", "require_marked", "require_package"]


def missing(item: pytest.Item, gates: set[str], reason: str) -> NoReturn:
    """End a test that lacks something: it fails where one of `gates` is required, else it is skipped."""
    __tracebackhide__ = True
    reason = visible(reason)
    promised = gates & required(item.config)
    if promised:
        pytest.fail(
            f"{reason} {', '.join(sorted(promised))} is required ({REQUIRE.flag} or {REQUIRE.variable}).",
            pytrace=False,
        )
    names = ",".join(sorted(gates))
    pytest.skip(f"{reason} Set {REQUIRE.variable}={names} to have this fail, and not be skipped.")


def require_engine(item: pytest.Item, text: str) -> None:
    """Go on where the engine can be used here.

    Args:
        item: the test.
        text: name and options of the engine.
    """
    __tracebackhide__ = True
    try:
        engine = parse_engine(text).engine
    except InputError as error:
        pytest.fail(str(error), pytrace=False)
    state = engine.availability()
    if not state.usable:
        reason = f"{engine.name} is not usable here: {state.reason} {state.next_action or ''}"
        missing(item, {gate_of(engine.name)}, reason.rstrip())


def require_marked(item: pytest.Item) -> None:
    """Go on where there is what the test's markers say that it needs."""
    __tracebackhide__ = True
    if item.get_closest_marker("gpu") is not None:
        require_engine(item, "ort-cuda")
    if item.get_closest_marker("real_model") is not None and not packages(item.config):
        _no_package(item)


def require_package(item: pytest.Item, package: Path | None) -> Path:
    """The package, where there is one."""
    __tracebackhide__ = True
    if package is None:
        _no_package(item)
    return package


def _no_package(item: pytest.Item) -> NoReturn:
    """A folder that was named and has none fails, whatever is required: somebody promised models."""
    __tracebackhide__ = True
    named = MODEL_DIR.of(item.config)
    if named is not None:
        pytest.fail(
            f"{named}: there is no folder of packages, which hold .onnx files. "
            f"Correct {MODEL_DIR.flag} or {MODEL_DIR.variable}.",
            pytrace=False,
        )
    missing(item, {"model"}, f"No real models here: set {MODEL_DIR.variable} to a folder of packages.")
