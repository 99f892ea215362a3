"""The profile for nightly runs: 25 times the examples, in every test that says how many it draws."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from hypothesis import settings

from fixtures import effort

if TYPE_CHECKING:
    import pytest

SUITES = Path(__file__).parents[1]


def test_nightly_runs_draw_25_times_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default profile draws what a test asks for, and `nightly` in proportion to it."""
    for profile, drawn in (("default", 40), ("nightly", 1000)):
        chosen = SimpleNamespace(default=settings.get_profile(profile), get_profile=settings.get_profile)
        monkeypatch.setattr(effort, "settings", chosen)
        assert effort.examples(40) == drawn


def test_no_test_draws_the_same_number_under_every_profile() -> None:
    """A number that is given outright would be the same at night: it is given through `examples`."""
    for path in SUITES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "max_examples" and path.name != "conftest.py":
                assert ast.unparse(node.value).startswith("examples("), f"{path}:{node.value.lineno}"
