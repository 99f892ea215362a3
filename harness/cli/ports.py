"""`onnx-parity ports`: the ports of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from harness.cli.output import json_option, print_json_line, reporting
from harness.errors import ParityError
from harness.ports import Port

__all__ = ["command", "failure_document"]

_SCHEMA = "onnx-parity/ports/1"


def failure_document(error: ParityError) -> Mapping[str, Any]:
    """The document of a source that could not be read."""
    return {
        "schema": _SCHEMA,
        "source": None,
        "ports": None,
        "exit_code": error.exit_code,
        "error": {"message": error.message, "next": error.next_action},
    }


@click.command("ports")
@click.argument("source")
@json_option
@reporting(failure_document)
def command(source: str, as_json: bool) -> int:
    """List the ports of SOURCE: a package, an .onnx graph, or a port inventory (.json)."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from harness.cli.source import read_source
    from harness.report.plain import visible

    inventory = read_source(source).inventory
    if as_json:
        ports = {"inputs": [_plain(p) for p in inventory.inputs]}
        ports["outputs"] = [_plain(p) for p in inventory.outputs]
        print_json_line({"schema": _SCHEMA, "source": source, "ports": ports, "exit_code": 0, "error": None})
        return 0
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("direction", "name", "dtype", "shape"):
        table.add_column(title, overflow="fold")
    for direction, ports_of in (("input", inventory.inputs), ("output", inventory.outputs)):
        for port in ports_of:
            cells = (port.name, port.dtype or "?", _shape(port))
            table.add_row(direction, *(Text(visible(cell)) for cell in cells))
    Console().print(table)
    return 0


def _plain(port: Port) -> dict[str, Any]:
    return {
        "name": port.name,
        "dtype": port.dtype,
        "shape": None if port.shape is None else list(port.shape),
    }


def _shape(port: Port) -> str:
    if port.shape is None:
        return "?"
    return "[" + ", ".join("?" if axis is None else str(axis) for axis in port.shape) + "]"
