"""Run and report: on standard error while it goes on, then as a document, and in a folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from harness.cli.output import print_json_line, report_error, warnings_said
from harness.cli.preparing import failure_fields
from harness.cli.process import INTERRUPTED, deferred_interrupts, ending
from harness.errors import EngineFailedError, ParityError
from harness.events import CheckFinished
from harness.relation_events import RelationsFinished

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.cli.preparing import Model
    from harness.parity.check import CheckPlan

__all__ = [
    "EndError",
    "default_report_dir",
    "engines_at_work",
    "failed_end",
    "failure_document",
    "import_what_runs",
    "run_and_report",
    "run_into",
    "show_report",
]

E = TypeVar("E", CheckFinished, RelationsFinished)
Sink: TypeAlias = Callable[[Any], None]


class Progress(Protocol):
    """A sink that shows a person how far a run is."""

    def __call__(self, event: Any) -> None:
        """Show one event."""

    def close(self) -> None:
        """Take the display away. May be called twice."""


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

    document = ParityDocument()
    document(failed_end(CheckFinished, error))
    return document.mapping()


def failed_end(kind: type[E], error: ParityError) -> E:
    """The end of a run that could not begin.

    Args:
        kind: `CheckFinished` or `RelationsFinished`.
        error: why it could not.
    """
    return kind(verdict=None, interrupted=error.exit_code == INTERRUPTED, **failure_fields(error))


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

    document = ParityDocument()
    folder = report_dir or default_report_dir(model.asked)
    writer = ReportWriter(folder, document, fresh=report_dir is None)
    progress = ProgressReporter(Console(stderr=True))
    plan = replace(plan, warnings=warnings_said())
    end = run_into(partial(run_check, plan), document, writer, progress=progress)
    show_report(
        document.mapping(),
        writer.path,
        as_json=as_json,
        render=partial(render_report, token_text=model.token_text()),
    )
    return end.exit_code


@contextmanager
def engines_at_work() -> Iterator[None]:
    """Whatever an engine in this process prints goes to standard error, where no document stands.

    Raises:
        EngineFailedError: one tried to end the process, with whatever status.
    """
    from harness.engines.plugins import raised
    from harness.engines.streams import reserved_stdout

    with reserved_stdout():
        try:
            yield
        except SystemExit as error:
            raise EngineFailedError(
                f"An engine in the command's own process asked it to exit ({raised(error)}).",
                kind="crashed",
                next_action="Leave --in-process out, or report it to the engine.",
            ) from error


def run_into(run: Callable[[Sink], E], *sinks: Sink, progress: Progress) -> E:
    """Run with each event going to all sinks, and say on standard error what went wrong.

    When the end has come, Ctrl-C does not keep it from being told.

    Args:
        run: emits events and returns the last of them.
        sinks: in this order.
        progress: the last sink; closed whatever happens.

    Raises:
        EngineFailedError: an engine in this process ended it.
    """

    def emit(event: object) -> None:
        if isinstance(event, CheckFinished | RelationsFinished):
            ending()
        for sink in sinks:
            sink(event)
        progress(event)

    with engines_at_work():
        try:
            end = run(emit)
        finally:
            progress.close()
    if end.error is not None:
        report_error(EndError(end.error))
    return end


def show_report(
    document: Mapping[str, Any],
    path: Path | None,
    *,
    as_json: bool,
    render: Callable[[Mapping[str, Any]], RenderableType],
) -> None:
    """Print a report, and where it lies.

    Args:
        document: of the whole run.
        path: the file that holds it; None where the run did not begin.
        as_json: print the document, and not what `render` makes of it for a person.
        render: see `as_json`.
    """
    from rich.console import Console

    from harness.report.plain import visible

    if as_json:
        print_json_line(document)
    elif path is not None:
        Console().print(render(document))
    if path is not None:
        Console(stderr=True).print(
            visible(f"report: {path}"), style="dim", markup=False, highlight=False, soft_wrap=True
        )


def default_report_dir(package: str) -> Path:
    """Where a report on `package` goes that begins now."""
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(package).absolute().name[:80]).strip("-.") or "package"
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path("reports") / f"{stamp}-{label}"
