"""The source model through the plugin: an engine that is no candidate, and is skipped by its own name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.engines.hf import ENGINE
from suites.plugin.conftest import Run

if TYPE_CHECKING:
    import pytest

pytest_plugins = ["pytester"]


def test_the_source_engine_is_no_candidate(project: pytest.Pytester, run: Run) -> None:
    """`parity_engine` runs through what runs graphs."""
    project.makepyfile("def test_it(parity_engine): pass")
    ended = run("--collect-only")
    ended.stdout.fnmatch_lines(["*ort-cpu*"])
    ended.stdout.no_fnmatch_line("*[[]hf[]]*")


def test_a_source_that_cannot_run_here_is_skipped_by_name(project: pytest.Pytester, run: Run) -> None:
    """What to set so that it fails is the name of the source's engine."""
    project.makepyfile(
        f"""
        import pytest
        import harness.engines.hf as hf

        def test_it(parity, monkeypatch):
            monkeypatch.setattr(hf.util, "find_spec", lambda name: None)
            parity.check("models/one", source="models/one", prompts=[1, 2])

        def test_named(parity, monkeypatch):
            monkeypatch.setattr(hf.util, "find_spec", lambda name: None)
            parity.check("models/one", source="models/one", source_engine="{ENGINE.name}", prompts=[1, 2])
        """
    )
    ended = run()
    ended.assert_outcomes(skipped=2)
    ended.stdout.fnmatch_lines(["SKIPPED *hf is not usable here*ONNX_PARITY_REQUIRE=hf*"])
