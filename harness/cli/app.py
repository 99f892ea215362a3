"""Entry point of the command: finds the verb, turns every outcome into an exit status.

Standard output carries results alone (one line of JSON with `--json`), everything else goes to standard
error. A user's mistake is one clear message, never a traceback.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from harness.cli.output import InterruptionError, print_json_line, report_error
from harness.cli.process import deferred_interrupts, ending, guarded_streams
from harness.errors import InputError, ParityError

__all__ = ["app", "run"]

_VERBS = {
    "check": "decode on a candidate engine and compare with the oracle, token by token",
    "conform": "try properties that an engine must have on any package, whatever the weights",
    "derive": "derive the I/O topology of a package, a graph or a port inventory",
    "engines": "list engines: what is installed, usable, and why not",
    "fetch": "fetch real weights into the user's cache",
    "golden": "record the tokens that a model is known to give, or check an engine against them",
    "ports": "list the ports of a graph",
    "record": "decode on an engine and keep what a check needs in a trace",
    "verify": "check a recorded trace against the oracle, without the engine",
}


class _LazyGroup(click.Group):
    """Imports a verb's module only when that verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        with deferred_interrupts():
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


@click.group(
    cls=_LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version)
@click.pass_context
def app(ctx: click.Context) -> None:
    """Does a backend decode an ONNX language model to the very same tokens as a trustworthy oracle?

    Exit status: 0 all well, 1 a finding, 2 bad usage or input, 3 refused topology, 4 the engine failed,
    5 the engine is not available here, 6 the run proves nothing, 130 interrupted.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(ParityError.exit_code)


def run(arguments: list[str]) -> int:
    """Run the command on `arguments` and return its exit status."""
    with guarded_streams() as out:
        status = _run(arguments)
        out.flush()
        if out.broken:
            # A reader that went away has seen what it wanted. A full disk has lost the result.
            report_error(
                InputError(
                    f"Standard output cannot be written: {out.failure}.",
                    next_action="Send it elsewhere, or make room.",
                )
            )
            return ParityError.exit_code
        return status


def _run(arguments: list[str]) -> int:
    try:
        status = app.main(args=arguments, prog_name="onnx-parity", standalone_mode=False)
    except click.UsageError as error:
        verb = _verb(arguments)
        help_call = f"onnx-parity {verb} --help" if verb else "onnx-parity --help"
        return _fail(InputError(error.format_message(), next_action=f"See `{help_call}`."), arguments)
    except (click.Abort, KeyboardInterrupt):
        return _fail(InterruptionError(), arguments)
    return status if isinstance(status, int) else 0


def _verb(arguments: list[str]) -> str | None:
    return next((a for a in arguments if a in _VERBS), None)


def _fail(failure: ParityError, arguments: list[str]) -> int:
    """Report what kept a verb from starting, also as its document where one was asked for."""
    ending()
    report_error(failure)
    if "--json" in arguments:
        verb = _verb(arguments)
        if verb is None:
            print_json_line(_document(failure))
        else:
            with deferred_interrupts():
                module = importlib.import_module(f"harness.cli.{verb}")
            print_json_line(module.failure_document(failure))
    return failure.exit_code


def _document(failure: ParityError) -> Mapping[str, Any]:
    """The document of a command line that names no verb."""
    return {
        "schema": "onnx-parity/error/1",
        "exit_code": failure.exit_code,
        "error": {"message": failure.message, "next": failure.next_action},
    }
