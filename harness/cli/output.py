"""What all verbs share: the `--json` option, error messages and their JSON documents."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeAlias

import click

from harness.errors import ParityError

__all__ = ["INTERRUPTED", "FailureDocument", "json_option", "print_json_line", "report_error", "reporting"]

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells have it."""

FailureDocument: TypeAlias = Callable[[ParityError], Mapping[str, Any]]
"""The JSON document of a verb that could not do its work."""

P = ParamSpec("P")

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Machine output: one line of JSON on standard output."
)


def print_json_line(document: Mapping[str, Any]) -> None:
    """Write one document to standard output, one line."""
    from harness.report.writer import to_json_line

    click.echo(to_json_line(document))


def report_error(error: ParityError) -> None:
    """Say on standard error, in one line, what is wrong and what to do about it."""
    click.echo(f"onnx-parity: {' '.join(str(error).split())}", err=True)


def reporting(document: FailureDocument) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Make a verb report our errors and an interruption instead of raising them.

    The wrapped function takes `as_json`; it returns the exit status.
    """

    def decorate(verb: Callable[P, int]) -> Callable[P, int]:
        @functools.wraps(verb)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return verb(*args, **kwargs)
            except ParityError as error:
                failure = error
            except KeyboardInterrupt:
                failure = _InterruptedError("Interrupted before any result.", next_action="Run it again.")
            report_error(failure)
            if kwargs.get("as_json"):
                print_json_line(document(failure))
            return failure.exit_code

        return wrapped

    return decorate


class _InterruptedError(ParityError):
    exit_code = INTERRUPTED
