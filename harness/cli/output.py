"""What all verbs share: the `--json` option, error messages and their JSON documents."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeAlias

import click

from harness.cli.process import INTERRUPTED, ending
from harness.errors import InputError, ParityError
from harness.report.plain import visible

__all__ = [
    "FailureDocument",
    "InterruptionError",
    "json_option",
    "print_json_line",
    "print_line",
    "report_error",
    "report_warning",
    "reporting",
    "unreadable",
    "warnings_said",
]

FailureDocument: TypeAlias = Callable[[ParityError], Mapping[str, Any]]
"""The JSON document of a verb that could not do its work."""

P = ParamSpec("P")

_said: ContextVar[list[str]] = ContextVar("warnings of the verb that runs")

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Machine output: one line of JSON on standard output."
)


class InterruptionError(ParityError):
    """The user pressed Ctrl-C before there was anything to report."""

    exit_code = INTERRUPTED

    def __init__(self) -> None:
        super().__init__("Interrupted before any result.", next_action="Run it again.")


def print_json_line(document: Mapping[str, Any]) -> None:
    """Write one document to standard output: one line, in ASCII, so that every terminal can carry it.

    Raises:
        ValueError: the document holds NaN or infinity, which JSON has not.
    """
    click.echo(json.dumps(document, ensure_ascii=True, allow_nan=False))


def report_error(error: ParityError) -> None:
    """Say on standard error, in one line, what is wrong and what to do about it."""
    _say(str(error))


def report_warning(warning: str) -> None:
    """Say on standard error, in one line, what a user should know about a result that stands."""
    _say(f"warning: {warning}")
    _said.get([]).append(" ".join(warning.split()))


def warnings_said() -> tuple[str, ...]:
    """What the verb that runs has warned of until now, each in one line: for its report."""
    return tuple(_said.get([]))


def _say(sentences: str) -> None:
    print_line(f"onnx-parity: {' '.join(sentences.split())}", err=True)


def print_line(text: str, *, err: bool = False) -> None:
    """Write a line for a person, with nothing in it that a terminal would obey."""
    click.echo(visible(text), err=err)


def unreadable(error: OSError) -> InputError:
    """What the file system refuses: names the file and the reason."""
    where = f"{error.filename}: " if error.filename else ""
    return InputError(
        f"{where}{error.strerror or error}.", next_action="Check the path, its permissions and the disk."
    )


def reporting(document: FailureDocument) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Make a verb report our errors, those of the file system, and an interruption, instead of raising.

    The wrapped function takes `as_json`; it returns the exit status.
    """

    def decorate(verb: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(verb)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> int:
            failure: ParityError
            _said.set([])
            try:
                return verb(*args, **kwargs)
            except ParityError as error:
                failure = error
            except OSError as error:
                failure = unreadable(error)
            except KeyboardInterrupt:
                failure = InterruptionError()
            ending()
            report_error(failure)
            if kwargs.get("as_json"):
                print_json_line(document(failure))
            return failure.exit_code

        return wrapped

    return decorate
