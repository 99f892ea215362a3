"""`onnx-parity derive`: the I/O topology of a package, a graph or a port inventory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from harness.cli.output import json_option, print_json_line, report_error, reporting
from harness.cli.source import read_source
from harness.errors import ParityError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["command", "failure_document"]


def failure_document(error: ParityError) -> Mapping[str, Any]:
    """The document of a derivation whose sources could not even be named."""
    return _unreadable(None, error)


@click.command("derive")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option(
    "--gate",
    type=click.Choice(["default", "recurrent-only"]),
    default="default",
    show_default=True,
    help="recurrent-only is a loader's additive fallback: it declines where nothing is recurrent.",
)
@click.option(
    "--match",
    "match",
    type=click.Choice(["exact", "symbolic"]),
    default="symbolic",
    show_default=True,
    help="How past and present shapes must agree; symbolic takes an unknown axis as unknown.",
)
@click.option("--ignore-declared", is_flag=True, help="Derive the topology whatever the sidecars say.")
@json_option
@reporting(failure_document)
def command(sources: tuple[str, ...], gate: str, match: str, ignore_declared: bool, as_json: bool) -> int:
    """Derive the topology of each SOURCE: a package, an .onnx graph, or a port inventory (.json).

    With --json, one JSON document a line, in order, also for a source that could not be read.
    """
    from harness.parity.verdict import first_exit_code
    from harness.topology.resolve import resolve, resolve_package
    from harness.topology.sidecar import derivation_document

    options: dict[str, Any] = {
        "gate": cast("Literal['default', 'recurrent-only']", gate),
        "match": cast("Literal['exact', 'symbolic']", match),
        "ignore_declared": ignore_declared,
    }
    codes = []
    for name in sources:
        try:
            source = read_source(name)
            if source.package is not None:
                derivation = resolve_package(source.package, source.inventory, **options)
            else:
                derivation = resolve(source.inventory, declared=source.declared, **options)
        except ParityError as error:
            codes.append(error.exit_code)
            report_error(error)
            if as_json:
                print_json_line(_unreadable(name, error))
            continue
        document = derivation_document(name, derivation)
        codes.append(0 if derivation.topology is not None else 3)
        if as_json:
            print_json_line(document)
        else:
            _show(document)
    return first_exit_code(codes)


def _unreadable(source: str | None, error: ParityError) -> dict[str, Any]:
    from harness.topology.sidecar import DERIVATION_SCHEMA

    return {
        "schema": DERIVATION_SCHEMA,
        "source": source,
        "outcome": "unreadable",
        "io": None,
        "ports": [],
        "refusal": None,
        "error": {"message": error.message, "next": error.next_action},
        "exit_code": error.exit_code,
    }


def _show(document: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(f"{document['source']}: {document['outcome']}", style="bold"))
    refusal = document["refusal"]
    if refusal is not None:
        also = f" (also {', '.join(refusal['also'])})" if refusal["also"] else ""
        shown: RenderableType = Text(f"{refusal['code']}{also}: {refusal['message']}")
        console.print(shown, style="red")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("port", "role", "pair", "because"):
        table.add_column(title, overflow="fold")
    for port in document["ports"]:
        table.add_row(
            Text(port["name"]), port["role"], Text(port["pair"] or "-"), Text(port["because"], style="dim")
        )
    console.print(table)
