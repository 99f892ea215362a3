"""`onnx-parity engines`: what is installed, usable, and why not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from harness.cli.output import json_option, print_json_line, reporting
from harness.errors import ParityError

__all__ = ["command", "failure_document"]

_SCHEMA = "onnx-parity/engines/1"


def failure_document(error: ParityError) -> Mapping[str, Any]:
    """The document of a listing that failed."""
    return {
        "schema": _SCHEMA,
        "engines": None,
        "exit_code": error.exit_code,
        "error": {"message": error.message, "next": error.next_action},
    }


@click.command("engines")
@json_option
@reporting(failure_document)
def command(as_json: bool) -> int:
    """List the engines: name, version, whether it can be used here, and why not."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from harness.engines.registry import default_candidate, installed_engines
    from harness.errors import EngineUnavailableError
    from harness.report.plain import legible

    try:
        default = default_candidate().name
    except EngineUnavailableError:
        default = None
    rows: list[dict[str, Any]] = []
    for engine in installed_engines():
        found = engine.availability()
        rows.append(
            {
                "name": engine.name,
                "description": engine.description,
                "usable": found.usable,
                "default_candidate": engine.name == default,
                "version": found.version,
                "reason": found.reason,
                "next": found.next_action,
                "options": {
                    name: {"help": option.help, "default": option.default, "expected": option.expected}
                    for name, option in engine.options.items()
                },
            }
        )
    if as_json:
        print_json_line({"schema": _SCHEMA, "engines": rows, "exit_code": 0, "error": None})
        return 0
    rows = legible(rows)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("engine", "usable", "version", "what it is, or why it cannot be used"):
        table.add_column(title)
    for row in rows:
        why = row["description"] if row["usable"] else f"{row['reason']} {row['next'] or ''}".rstrip()
        if row["default_candidate"]:
            why += " (default candidate)"
        usable = "yes" if row["usable"] else "no"
        table.add_row(Text(row["name"]), usable, Text(row["version"] or "-"), Text(why))
        for name, option in row["options"].items():
            line = f"  {name}={option['default']}: {option['help']}; {option['expected']}"
            table.add_row("", "", "", Text(line, style="dim"))
    Console(soft_wrap=False).print(table)
    return 0
