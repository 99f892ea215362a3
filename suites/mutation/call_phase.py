"""A pytest plugin: the exit status is 1 only if a test failed in its call phase.

A mutant is killed by what a test asserts. A fixture that breaks, a module that cannot be collected or an
error inside pytest say nothing about the test, so they end the run with `NOT_A_KILL` instead. Each kill is
noted, with the test that made it, in the file that `KILLS_VARIABLE` names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

__all__ = ["KILLED", "KILLS_VARIABLE", "NOT_A_KILL"]

KILLED = 1
NOT_A_KILL = 35
"""What mutmut calls suspicious: neither killed nor survived."""
KILLS_VARIABLE = "ONNX_PARITY_KILLS"
_MUTANT_VARIABLE = "MUTANT_UNDER_TEST"
_FEW = 12

_killers: list[str] = []
_wanted: dict[str, set[str]] = {}


def pytest_configure(config: pytest.Config) -> None:
    """Collect whole files where many of their tests are asked for: finding each by its name takes longer."""
    _wanted.clear()
    for argument in config.args:
        file, separator, _ = argument.partition("::")
        if separator:
            _wanted.setdefault(file, set()).add(argument)
    for file in [file for file, tests in _wanted.items() if len(tests) <= _FEW]:
        del _wanted[file]
    config.args = list(
        dict.fromkeys(file if (file := a.partition("::")[0]) in _wanted else a for a in config.args)
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep what was asked for, committed texts first: most mutants fall to them, and one kill ends it."""
    items[:] = [
        item for item in items if item.nodeid in _wanted.get(item.nodeid.partition("::")[0], {item.nodeid})
    ]
    items.sort(key=_rank)
    for item in items:
        # mutmut 3.8 reads this private attribute, which pytest 9.2 has no more.
        item.__dict__.setdefault("_nodeid", item.nodeid)


def _rank(item: pytest.Item) -> int:
    if "over_the_corpus" in item.name:
        return 1
    return 0 if item.path.name == "test_messages.py" else 2


def pytest_sessionstart() -> None:
    """Forget the kills of an earlier session in this process."""
    _killers.clear()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Take note of a test that failed in its call phase."""
    if report.when == "call" and report.failed:
        _killers.append(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Replace every failure that is no kill by `NOT_A_KILL`."""
    if exitstatus == pytest.ExitCode.OK:
        return
    session.exitstatus = KILLED if _killers else NOT_A_KILL
    notes = os.environ.get(KILLS_VARIABLE)
    if _killers and notes:
        line = json.dumps([os.environ.get(_MUTANT_VARIABLE, ""), _killers[0]]) + "\n"
        with Path(notes).open("a", encoding="utf-8") as stream:
            stream.write(line)
