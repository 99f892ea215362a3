"""Tried relations for a person at a terminal: a line while each is tried, then what was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from harness.relation_events import RelationEvent, RelationJudged, RelationsFinished, RelationStarted
from harness.report.console import engine_text, model_text
from harness.report.plain import legible

__all__ = ["RelationProgress", "render_conformance"]

_STYLES = {
    "conformant": "bold green",
    "bitwise": "bold green",
    "within-band": "green",
    "near-tie": "bold yellow",
    "not-judged": "bold yellow",
    "not-applicable": "dim",
}


class RelationProgress:
    """An event sink that says on a terminal which relation is tried; elsewhere it says a line for each."""

    def __init__(self, console: Console) -> None:
        """`console` writes to standard error."""
        self._console = console
        self._status = console.status("the decode that all relations stand against", spinner="dots")
        if console.is_terminal:
            self._status.start()

    def __call__(self, event: RelationEvent) -> None:
        """Show one event."""
        match event:
            case RelationStarted():
                self._status.update(event.name)
            case RelationJudged():
                if not self._console.is_terminal:
                    line = f"{event.name}: {event.outcome}, {event.seconds:.1f} s"
                    self._console.print(line, style="dim", markup=False, highlight=False)
            case RelationsFinished():
                self.close()

    def close(self) -> None:
        """Take the display away. May be called twice."""
        self._status.stop()


def render_conformance(document: Mapping[str, Any]) -> Group:
    """A conformance document as a person reads it: what ran, a row for each relation, and what differs.

    Args:
        document: `onnx-parity/conformance/1`.
    """
    document = legible(document)
    parts: list[Any] = []
    if document["model"] is not None:
        parts += [_head(document), Text(), _table(document["relations"])]
    for relation in document["relations"]:
        if relation["outcome"] not in ("bitwise", "within-band"):
            parts += _details(relation)
    failure = (document["engine"] or {}).get("failure")
    if failure is not None:
        parts += [Text(), Text(f"The engine {failure['kind']}: {failure['message']}")]
    if document["verdict"] is not None:
        verdict = document["verdict"]
        # A remark on one relation; where it is all that there is, the run failed.
        style = "bold red" if verdict == "not-applicable" else _style(verdict)
        parts += [Text(), Text(f"verdict: {verdict}", style=style)]
    return Group(*parts)


def _head(document: Mapping[str, Any]) -> Table:
    prompt, band = document["prompt"], document["band"]
    grid = Table.grid(padding=(0, 2))
    grid.add_row("model", Text(model_text(document["model"]), overflow="fold"))
    grid.add_row("engine", Text(engine_text(document["engine"]), overflow="fold"))
    grid.add_row("decodes", f"{len(prompt['prompt_ids'])} tokens and {prompt['max_new_tokens']} new ones")
    if band is not None:
        measure = f"{band['factor']:g} times what {band['oracle']} in the model's types is off from float64"
        grid.add_row("bands", Text(band["reason"] or measure, overflow="fold"))
    return grid


def _table(relations: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("relation", "outcome", "largest difference", "band", "tensor"):
        table.add_column(title, no_wrap=title != "tensor", overflow="fold")
    for relation in relations:
        largest = relation["largest"] or {"port": None, "size": None, "band": None}
        band = "0" if relation["must"] == "bitwise" and relation["largest"] else _number(largest["band"])
        size = "0" if relation["outcome"] == "bitwise" else _number(largest["size"])
        table.add_row(
            Text(relation["name"]),
            Text(relation["outcome"], style=_style(relation["outcome"])),
            Text(size),
            Text(band),
            Text(largest["port"] or "-"),
        )
    return table


def _details(relation: Mapping[str, Any]) -> list[Text]:
    """What is to be said of a relation beside its row."""
    case = "" if relation["case"] is None else f" ({relation['case']})"
    lines = [Text(), Text(f"{relation['name']}{case}: {relation['statement']}", style="bold")]
    if relation["reason"] is not None:
        lines.append(Text(f"  {relation['reason']}"))
    found = relation["first_difference"]
    if found is not None:
        lines.append(Text(f"  first: {_first(found)}"))
    if relation["tokens_part_at"] is not None:
        lines.append(Text(f"  the choices part at step {relation['tokens_part_at']}"))
    return lines


def _first(found: Mapping[str, Any]) -> str:
    where = f"step {found['step']}, {found['port']}"
    if found["note"] is not None:
        return f"{where}: {found['note']}"
    return (
        f"{where}{found['index']}: {_number(found['expected'], 9)} against {_number(found['found'], 9)}; "
        f"{found['differing']} of {found['elements']} elements differ, by {_number(found['size'])} at most"
    )


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _style(word: str) -> str:
    return _STYLES.get(word, "bold red")
