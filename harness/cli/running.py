"""Run a check and report it: on standard error while it goes on, then as a document, and in a folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli.output import print_json_line, report_error
from harness.cli.preparing import refusal_mapping
from harness.cli.process import deferred_interrupts, ending
from harness.errors import ParityError
from harness.events import CheckFinished, Event

if TYPE_CHECKING:
    from harness.cli.preparing import Model
    from harness.parity.check import CheckPlan

__all__ = ["EndError", "default_report_dir", "failure_document", "import_what_runs", "run_and_report"]


class EndError(ParityError):
    """What ended a run, as its document says it, for the line on standard error."""

    def __init__(self, error: Mapping[str, str]) -> None:
        super().__init__(error.get("message", ""), next_action=error.get("next", ""))


def import_what_runs() -> None:
    """Import what a check needs, where Ctrl-C cannot break it: numpy, onnx, and what shows progress."""
    with deferred_interrupts():
        import harness.oracle
        import harness.parity.check
        import harness.report.console
        import harness.report.writer  # noqa: F401 (all of them: what is imported now is not broken later)


def failure_document(error: ParityError) -> Mapping[str, Any]:
    """The parity document of a check that could not begin."""
    from harness.report.document import ParityDocument

    refusal = refusal_mapping(error)
    document = ParityDocument()
    document(
        CheckFinished(
            verdict=None,
            exit_code=error.exit_code,
            error=None if refusal else {"message": error.message, "next": error.next_action},
            refusal=refusal,
            interrupted=error.exit_code == 130,
        )
    )
    return document.mapping()


def run_and_report(
    plan: CheckPlan,
    model: Model,
    *,
    report_dir: Path | None,
    as_json: bool,
) -> int:
    """Run a check, with the report in its folder and on standard output; returns the exit status.

    Args:
        plan: the check.
        model: what it is about.
        report_dir: where `parity.json` goes; None for a new folder under `reports`.
        as_json: print the document, not a report for people.

    Raises:
        InputError: the report cannot be written.
    """
    from rich.console import Console

    from harness.parity.check import run_check
    from harness.report.console import ProgressReporter, render_report
    from harness.report.document import ParityDocument
    from harness.report.writer import ReportWriter

    say = Console(stderr=True)
    document = ParityDocument()
    folder = report_dir or default_report_dir(model.asked)
    writer = ReportWriter(folder, document, fresh=report_dir is None)
    progress = ProgressReporter(say)

    def emit(event: Event) -> None:
        if isinstance(event, CheckFinished):
            ending()
        for sink in (document, writer, progress):
            sink(event)

    try:
        end = run_check(plan, emit)
    finally:
        progress.close()
    if end.error is not None:
        report_error(EndError(end.error))
    if as_json:
        print_json_line(document.mapping())
    elif writer.path is not None:
        Console().print(render_report(document.mapping(), token_text=model.token_text()))
    if writer.path is not None:
        say.print(f"report: {writer.path}", style="dim", markup=False, highlight=False, soft_wrap=True)
    return end.exit_code


def default_report_dir(package: str) -> Path:
    """Where a report on `package` goes that begins now."""
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(package).absolute().name[:80]).strip("-.") or "package"
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path("reports") / f"{stamp}-{label}"
