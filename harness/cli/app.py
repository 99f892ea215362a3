"""Entry point of the command: finds the verb, turns every outcome into an exit status.

Standard output carries results alone (one line of JSON with `--json`), everything else goes to standard
error. A user's mistake is one clear message, never a traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from harness.cli.output import INTERRUPTED, FailureDocument, print_json_line, report_error
from harness.errors import InputError, ParityError

__all__ = ["app", "main"]

_VERBS = {
    "check": "decode on a candidate engine and compare with the oracle, token by token",
    "derive": "derive the I/O topology of a package, a graph or a port inventory",
    "engines": "list engines: what is installed, usable, and why not",
    "fetch": "fetch real weights into the user's cache",
    "ports": "list the ports of a graph",
}


class _LazyGroup(click.Group):
    """Imports a verb's module only when that verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        command = importlib.import_module(f"harness.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(_VERBS.items()))


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        click.echo(f"onnx-parity {version('onnx-parity')}")
        ctx.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version)
def app() -> None:
    """Does a backend decode an ONNX language model to the very same tokens as a trustworthy oracle?

    Exit status: 0 all well, 1 a finding, 2 bad usage or input, 3 refused topology, 4 the engine failed,
    5 the engine is not available here, 6 the run proves nothing, 130 interrupted.
    """


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit with its status."""
    sys.exit(run(sys.argv[1:] if argv is None else list(argv)))


def run(arguments: list[str]) -> int:
    """Run the command on `arguments` and return its exit status."""
    try:
        status = app.main(args=arguments, prog_name="onnx-parity", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        return _usage_error(error, arguments)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`| head`): not an error, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status if isinstance(status, int) else 0


def _usage_error(error: click.UsageError, arguments: list[str]) -> int:
    verb = next((a for a in arguments if a in _VERBS), None)
    help_call = f"onnx-parity {verb} --help" if verb else "onnx-parity --help"
    failure = InputError(error.format_message(), next_action=f"See `{help_call}`.")
    report_error(failure)
    if verb is not None and "--json" in arguments:
        document: FailureDocument = importlib.import_module(f"harness.cli.{verb}").failure_document
        print_json_line(document(failure))
    return ParityError.exit_code
