"""What a session found: properties of each test, the table at the end, and whether promised lanes ran.

What a test finds travels as plain data on its reports, so that it comes from workers of pytest-xdist as well.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from harness.pytest_plugin.settings import REQUIRE, is_ours, required
from harness.report.plain import visible

__all__ = ["FINDINGS", "Summary"]

_COLUMNS = ("verdict", "package", "candidate", "placement", "oracle", "prompts", "parts at", "margin", "test")
_NUMBERS = frozenset({"prompts", "parts at", "margin"})

FINDINGS = pytest.StashKey[list[dict[str, Any]]]()
"""What the checks of a test found and no report has told yet, as `harness.pytest_plugin.findings` has it."""


class Summary:
    """A plugin that gathers what tests find and tells it at the end."""

    def __init__(self, config: pytest.Config) -> None:
        """Raises UsageError where what is required does not exist."""
        self._required = required(config)
        self._rows: list[dict[str, Any]] = []
        self._ran: set[str] = set()
        self._missed: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Give the report what was found in its phase, and which gates were passed."""
        report = yield
        if is_ours(item) or self._required:
            found = item.stash.get(FINDINGS, [])
            # What ran counts. A marker says what a test means to do, and not that it did.
            gates = {gate for finding in found for gate in finding["gates"]}
            if report.when == "call" and not report.skipped and _has_package(item):
                gates.add("model")
            if found or gates:
                # Attributes of a report that are plain data cross from a worker.
                report.__dict__["onnx_parity"] = {"rows": list(found), "gates": sorted(gates)}
            found.clear()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather, also what workers found."""
        found = getattr(report, "onnx_parity", None)
        if found is not None:
            self._rows += [{**row, "test": report.nodeid} for row in found["rows"]]
            self._ran.update(found["gates"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A gate that is required and that no test went through fails the session."""
        if hasattr(session.config, "workerinput") or session.config.option.collectonly:
            return
        self._missed = sorted(self._required - self._ran)
        if self._missed and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """A row for each check."""
        if not (self._rows or self._missed):
            return
        terminalreporter.section("onnx-parity")
        for line in _table(self._rows):
            terminalreporter.write_line(line)
        for gate in self._missed:
            terminalreporter.write_line(
                f"ERROR: {gate} is required ({REQUIRE.flag} or {REQUIRE.variable}), and no test ran with it.",
                red=True,
            )


def _has_package(item: pytest.Item) -> bool:
    """Whether the fixture `parity_package` gave a test a package."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("parity_package") is not None


def _short(package: str) -> str:
    """The end of a long path; the whole is in the properties."""
    parts = Path(package).parts
    return package if len(parts) < 3 else str(Path("...", *parts[-2:]))


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a table without empty columns."""
    if not rows:
        return []
    rows = [{**row, "package": _short(row["package"])} for row in rows]
    cells = [[visible(row[name.replace(" ", "_")]) for name in _COLUMNS] for row in rows]
    shown = [i for i in range(len(_COLUMNS)) if any(row[i] for row in cells)]
    lines = [list(_COLUMNS), *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    return [
        "  ".join(
            line[i].rjust(widths[i]) if _COLUMNS[i] in _NUMBERS else line[i].ljust(widths[i]) for i in shown
        ).rstrip()
        for line in lines
    ]
