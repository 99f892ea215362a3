"""`onnx-parity derive`: the I/O topology of a package, a graph or a port inventory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from harness.cli.output import (
    json_option,
    print_json_line,
    print_line,
    report_error,
    report_warning,
    reporting,
    unreadable,
)
from harness.cli.source import Source, read_source
from harness.errors import InputError, ParityError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.topology.spec import Topology

__all__ = ["command", "failure_document"]


def failure_document(error: ParityError) -> Mapping[str, Any]:
    """The document of a run that was misused or interrupted: it has no outcome."""
    return _document_of_failure(None, None, error)


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
@click.option(
    "--write",
    "form",
    type=click.Choice(["inference-metadata", "genai-config"]),
    help="Write the topology as a sidecar into the package's folder; no file is ever overwritten.",
)
@json_option
@reporting(failure_document)
def command(
    sources: tuple[str, ...], gate: str, match: str, ignore_declared: bool, form: str | None, as_json: bool
) -> int:
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
        outcome: str | None = "unreadable"
        try:
            source = _read(name)
            if source.package is not None:
                derivation = resolve_package(source.package, source.inventory, **options)
            else:
                derivation = resolve(source.inventory, declared=source.declared, **options)
            outcome = None  # read, and yet there may be no way to write it
            if form is not None and derivation.topology is not None:
                _write(name, source, derivation.topology, form)
        except ParityError as error:
            codes.append(error.exit_code)
            report_error(error)
            if as_json:
                print_json_line(_document_of_failure(name, outcome, error))
            continue
        for warning in derivation.warnings:
            report_warning(warning)
        document = derivation_document(name, derivation)
        codes.append(document["exit_code"])
        if as_json:
            print_json_line(document)
        else:
            _show(document)
    return first_exit_code(codes)


def _read(name: str) -> Source:
    """Read one source; what the file system cannot even look up is as unreadable as a broken file."""
    try:
        return read_source(name)
    except OSError as error:
        raise unreadable(error) from error
    except ValueError as error:
        raise InputError(
            f"{name!r:.60} is no name that a file can have: {error}.", next_action="Correct the name."
        ) from error


def _write(name: str, source: Source, topology: Topology, form: str) -> None:
    """Write `topology` beside the graph, and make sure that the folder now says just that.

    Raises:
        InputError: the source is no folder or graph of the user's, the format cannot say the topology, a
            sidecar stands there already, or the folder would be read otherwise; nothing is left behind.
    """
    from harness.cli.genai_loading import NEEDED, loading_facts
    from harness.package import open_package, write_sidecar
    from harness.topology.resolve import resolve_package
    from harness.topology.writing import FILE_NAMES, Format, differing, sidecar_of

    package, kind = source.package, cast("Format", form)
    if package is None or not Path(name).exists():
        raise InputError(
            f"{name}: a sidecar is written beside a graph, and this is no folder or .onnx file of yours.",
            next_action="Give a model directory or an .onnx file.",
        )
    document = sidecar_of(source.inventory, topology, kind)
    missing: list[str] = []
    if kind == "genai-config":
        facts = loading_facts(package, source.inventory, topology)
        missing = [key for key in NEEDED if key not in facts["model"]]
        ports = document["model"]["decoder"]
        sizes = facts["model"].pop("decoder")
        document = {
            **facts,
            "model": {**facts["model"], "decoder": {**sizes, **ports, "filename": package.model.name}},
        }
    path = write_sidecar(package.folder, FILE_NAMES[kind], document)
    try:
        written = open_package(package.folder)
        if written.model.name != package.model.name:
            raise InputError(
                f"{package.folder}: {path.name} cannot say that it is about {package.model.name}, since the "
                f"folder is read as {written.model.name}.",
                next_action="Write genai-config, which names its graph, or move the graph to its own folder.",
            )
        unsaid = differing(topology, resolve_package(written, source.inventory))
        if unsaid:
            raise InputError(
                f"{package.folder}: with {path.name} beside what is declared there already, "
                f"{', '.join(unsaid[:4])} would be read otherwise.",
                next_action="Move the other sidecar away, and write again.",
            )
    except BaseException:
        path.unlink()
        raise
    print_line(f"onnx-parity: wrote {path}", err=True)
    if missing:
        print_line(
            f"onnx-parity: neither the ports nor {package.folder / 'config.json'} say "
            f"{' and '.join(missing)}: onnxruntime-genai asks for it under `model`.",
            err=True,
        )


def _document_of_failure(source: str | None, outcome: str | None, error: ParityError) -> dict[str, Any]:
    from harness.topology.sidecar import DERIVATION_SCHEMA

    return {
        "schema": DERIVATION_SCHEMA,
        "source": source,
        "outcome": outcome,
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

    from harness.report.plain import legible

    console, document = Console(), legible(document)
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
