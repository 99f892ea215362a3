"""The pytest plugin: `def test_my_model(parity): parity.check("path/to/package")`.

Every run of pytest where this distribution is installed loads this module, so it imports nothing heavy, and a
run of which no test asks for one of the fixtures below is as it would be without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.pytest_plugin.settings import OPTIONS, is_ours
from harness.pytest_plugin.summary import Summary

if TYPE_CHECKING:
    from harness.pytest_plugin.checks import Parity

__all__ = ["parity", "parity_engine", "parity_package", "parity_report_dir"]

_MARKERS = (
    "gpu: needs an NVIDIA GPU; with the fixture `parity` it is skipped where ort-cuda is not usable, and "
    "what counts for --parity-require=cuda is a check that ran there, not the marker",
    "real_model: needs packages of real models (--parity-model-dir); with `parity` it is skipped without",
    "bench: a benchmark with figures to report",
    "mutation: runs on changed code, to see that its tests notice",
    "slow: takes minutes",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options, each with a twin in the environment: `--parity-model-dir` is `ONNX_PARITY_MODEL_DIR`."""
    group = parser.getgroup("onnx-parity", "onnx-parity: decoders of ONNX packages against an oracle")
    for option in OPTIONS:
        group.addoption(option.flag, metavar=option.metavar, help=f"{option.help} (or {option.variable})")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and what gathers verdicts."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    config.pluginmanager.register(Summary(config), "onnx-parity-summary")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `parity_package` for each package, one of `parity_engine` for each engine."""
    if not {"parity_engine", "parity_package"}.isdisjoint(metafunc.fixturenames):
        from harness.pytest_plugin.selection import parametrise

        parametrise(metafunc)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on a GPU go to one worker, and so do the tests of a package."""
    ours = [item for item in items if is_ours(item)]
    if ours and config.pluginmanager.hasplugin("xdist"):
        from harness.pytest_plugin.selection import group

        for item in ours:
            group(item)


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """What can be used here, once it is known that a test wants to know."""
    if config.option.collectonly or config.get_verbosity() < 0 or not any(map(is_ours, items)):
        return []
    from harness.pytest_plugin.findings import usable_engines

    return usable_engines()


@pytest.fixture
def _parity_turn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers of pytest-xdist take turns with what there is once."""
    from harness.pytest_plugin.selection import turn

    with turn(request.node, tmp_path_factory.getbasetemp().parent):
        yield


@pytest.fixture
def parity(request: pytest.FixtureRequest, parity_report_dir: Path, _parity_turn: None) -> Parity:
    """Checks packages as `onnx-parity check` does: see `Parity.check`.

    A test that is marked `gpu` or `real_model` is skipped, or fails, before it begins where there is none.
    """
    from harness.pytest_plugin.checks import Parity
    from harness.pytest_plugin.gates import require_marked

    require_marked(request.node)
    return Parity(request.node, parity_report_dir)


@pytest.fixture
def parity_package(request: pytest.FixtureRequest, _parity_turn: None) -> Path:
    """Each package under `--parity-model-dir`, in a test of its own that is marked `real_model`."""
    from harness.pytest_plugin.gates import require_package

    return require_package(request.node, request.param)


@pytest.fixture
def parity_engine(request: pytest.FixtureRequest, _parity_turn: None) -> str:
    """Each installed engine but the oracle, in a test of its own; of `--parity-candidate` that one alone."""
    from harness.pytest_plugin.gates import require_engine

    require_engine(request.node, request.param)
    return str(request.param)


@pytest.fixture
def parity_report_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this test's reports; made when the first of them is written."""
    from harness.pytest_plugin.settings import report_folder

    return report_folder(request.node, tmp_path_factory)
