"""Events for a person at a terminal: progress while it runs, then what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from harness.events import (
    CheckFinished,
    CheckStarted,
    Event,
    PromptJudged,
    PromptStarted,
    SessionOpened,
    TokenDecoded,
)
from harness.report.plain import legible, visible

if TYPE_CHECKING:
    from rich.progress import TaskID

__all__ = ["ProgressReporter", "engine_text", "model_text", "render_report"]

TokenText = Callable[[int], str]
"""Text of one token ID, for people only."""

_COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("#", "right"),
    ("prompt", "left"),
    ("verdict", "left"),
    ("tokens", "right"),
    ("parts at", "right"),
    ("margin", "right"),
)

_STYLES = {
    "identical": "bold green",
    "near-tie": "bold yellow",
    "inconclusive": "bold yellow",
}


_TAIL_LINES = 8
"""Lines that are shown of what a failed engine wrote; the report has more."""


class ProgressReporter:
    """An event sink that shows on a terminal how far the check is; elsewhere it says one line a prompt."""

    def __init__(self, console: Console) -> None:
        """`console` writes to standard error."""
        self._console = console
        self._live = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._live,
        )
        self._tasks: dict[str, TaskID] = {}
        self._prompts = 0
        self._names: dict[str, str] = {}
        self._judged: set[int] = set()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event:
            case CheckStarted():
                self._prompts = event.prompts
                self._names = {"candidate": event.candidate, "oracle": event.oracle}
                if event.source is not None:
                    self._names["source"] = event.source
                self._progress.start()
            case SessionOpened():
                self._say(f"{event.role} {event.engine} {event.version} loaded in {event.seconds:.1f} s")
            case PromptStarted():
                for role, name in self._names.items():
                    self._restart(role, f"prompt {event.index + 1}/{self._prompts} {name}", event)
            case TokenDecoded():
                self._progress.update(self._tasks[event.role], completed=event.step + 1)
            case PromptJudged():
                again = " again, in steps" if event.index in self._judged else ""
                self._judged.add(event.index)
                if not self._live:
                    self._say(
                        f"prompt {event.index + 1}/{self._prompts}{again}: {event.verdict}, "
                        f"{_tokens(len(event.candidate_ids))}, candidate {event.candidate_seconds:.1f} s, "
                        f"oracle {event.oracle_seconds:.1f} s"
                    )
            case CheckFinished():
                self.close()

    def close(self) -> None:
        """Take the progress display away. May be called twice."""
        self._progress.stop()

    def _restart(self, role: str, description: str, event: PromptStarted) -> None:
        if role in self._tasks:
            self._progress.remove_task(self._tasks[role])
        self._tasks[role] = self._progress.add_task(escape(visible(description)), total=event.max_new_tokens)

    def _say(self, line: str) -> None:
        self._console.print(visible(line), style="dim", markup=False, highlight=False)


def render_report(document: Mapping[str, Any], *, token_text: TokenText | None = None) -> Group:
    """A parity document as a person reads it: what ran, a row for each prompt, and every first divergence.

    Args:
        document: `onnx-parity/parity/1`.
        token_text: shows tokens as text beside their IDs; None shows IDs alone.
    """
    raw, document = document, legible(document)
    parts: list[Any] = []
    if document["model"] is not None:
        parts += [_head(document), Text(), _table(document)]
    for number, prompt in enumerate(document["prompts"], 1):
        if prompt["first_divergence"] is not None:
            parts += [Text(), _divergence(number, prompt, token_text)]
    if document["source"] is not None:
        parts += _source(document, token_text)
    failure = (document["candidate"] or {}).get("failure")
    if failure is not None:
        where = "" if failure["step"] is None else f" at step {failure['step']}"
        parts += [Text(), Text(f"The candidate {failure['kind']}{where}: {failure['message']}")]
        written = (raw["candidate"]["failure"]["stderr_tail"] or "").splitlines()[-_TAIL_LINES:]
        parts += [Text(f"  | {visible(line)}", style="dim") for line in written]
    if document["verdict"] is not None:
        parts += [Text(), Text(f"verdict: {document['verdict']}", style=_style(document["verdict"]))]
    if document["attribution"] is not None:
        parts.append(Text(f"attribution: {document['attribution']}", style="bold"))
    return Group(*parts)


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _head(document: Mapping[str, Any]) -> Table:
    model, topology = document["model"], document["model"]["topology"]
    grid = Table.grid(padding=(0, 2))
    grid.add_row("model", Text(model_text(model), overflow="fold"))
    grid.add_row(
        "topology",
        f"{topology['outcome']}: {topology['kv_inputs']} KV inputs, {topology['state_pairs']} state pairs",
    )
    for role in ("candidate", "oracle"):
        grid.add_row(role, Text(engine_text(document[role]), overflow="fold"))
    if document["source"] is not None:
        grid.add_row("source", Text(engine_text(document["source"]), overflow="fold"))
    proof = document["oracle"]["proof"]
    if proof is not None:
        grid.add_row("proof", Text(_proof(proof), overflow="fold"))
    return grid


def _proof(proof: Mapping[str, Any]) -> str:
    if proof["passed"] is None:
        return f"none: {proof['reason']}"
    broken = [entry for entry in proof["entries"] if not entry["passed"]]
    if broken:
        entry = broken[0]
        if entry.get("reason") is not None:
            return f"FAILED: {entry['operator']} {entry['node']}: {entry['reason']}"
        return (
            f"FAILED: {entry['operator']} {entry['node']}: error {entry['max_error']}, bound {entry['bound']}"
        )
    count, open_kinds = len(proof["entries"]), len(proof["not_probed"])
    kinds = "1 kind of product" if count == 1 else f"{count} kinds of product"
    return f"{kinds} within {proof['precision']} bounds" + (
        f", {open_kinds} not probed" if open_kinds else ""
    )


def _short(path: str) -> str:
    """The folder and file name; the whole path stands in the report."""
    parts = Path(path).parts
    return path if len(parts) < 3 else str(Path("...", *parts[-2:]))


def model_text(model: Mapping[str, Any]) -> str:
    """The model of a report on one line."""
    return f"{_short(model['path'])}  sha256 {model['sha256'][:12]}"


def engine_text(side: Mapping[str, Any]) -> str:
    """The engine of a report on one line: its version, settings and placement."""
    settings = [f"{key}={value}" for key, value in side["settings"].items()]
    parts = [f"{side['engine']} {side['version'] or ''}".strip(), *settings]
    if side.get("placement"):
        nodes = {
            provider: sum(operators.values())
            for provider, operators in side["placement"].get("providers", {}).items()
        }
        parts += [f"{count} nodes on {provider}" for provider, count in nodes.items()]
    # Reports of before do not say in which process it was; an oracle is always in this one.
    parts += [side[key] for key in ("mode", "process") if side.get(key)]
    return ", ".join(parts)


def _table(document: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    rows = [_row(number, prompt) for number, prompt in enumerate(document["prompts"], 1)]
    for index, (title, justify) in enumerate(_COLUMNS):
        # Where the terminal is narrow the prompt gives way, and nothing else.
        if title == "prompt":
            table.add_column(title, max_width=36)
        else:
            width = max([len(title), *(row[index].cell_len for row in rows)])
            table.add_column(title, justify=justify, min_width=width, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _row(number: int, prompt: Mapping[str, Any]) -> list[Text]:
    text, found = prompt["text"], prompt["first_divergence"]
    shown = " ".join(map(str, prompt["prompt_ids"])) if text is None else text
    margin = prompt["min_margin"] if found is None else found["oracle_margin"]
    return [
        Text(str(number)),
        Text(shown, no_wrap=True, overflow="ellipsis"),
        Text(prompt["verdict"], style=_style(prompt["verdict"])),
        Text(f"{len(prompt['candidate_ids'])}/{prompt['max_new_tokens']}"),
        Text("-" if found is None else str(found["index"])),
        Text("-" if margin is None else f"{margin:.4f}"),
    ]


def _divergence(number: int, prompt: Mapping[str, Any], token_text: TokenText | None) -> Group:
    found = prompt["first_divergence"]
    index = found["index"]
    lines = [
        Text(f"prompt {number} parts at generated token {index}:", style="bold"),
        Text(f"  after     {_tail(prompt['candidate_ids'][:index], token_text)}"),
        Text(f"  oracle    {_choices(found['oracle_top'], token_text)}"),
        Text(f"  candidate {_choices(found['candidate_top'], token_text)}"),
        Text(f"  {found['evidence']}"),
    ]
    return Group(*lines)


def _source(document: Mapping[str, Any], token_text: TokenText | None) -> list[Any]:
    """On how many prompts the source is with the graph, and where it is not."""
    witnessed = document["source"]["prompts"]
    alike = sum(each is not None and each["verdict"] == "identical" for each in witnessed)
    parts: list[Any] = [Text(), Text(f"source against oracle: {alike}/{len(witnessed)} identical")]
    for number, (each, prompt) in enumerate(zip(witnessed, document["prompts"], strict=True), 1):
        if each is not None and each["first_divergence"] is not None:
            ids = prompt["candidate_ids"]
            parts += [Text(), _source_divergence(number, each["first_divergence"], ids, token_text)]
    return parts


def _source_divergence(
    number: int, found: Mapping[str, Any], ids: list[int], token_text: TokenText | None
) -> Group:
    title = f"prompt {number}: source model and graph differ at generated token {found['index']}:"
    return Group(
        Text(title, style="bold"),
        Text(f"  after     {_tail(ids[: found['index']], token_text)}"),
        Text(f"  source    {_choices(found['source_top'], token_text)}"),
        Text(f"  oracle    {_choices(found['oracle_top'], token_text)}"),
        Text(f"  {found['evidence']}"),
    )


def _tail(ids: list[int], token_text: TokenText | None) -> str:
    if not ids:
        return "the prompt"
    last = ids[-8:]
    lead = "... " if len(ids) > len(last) else ""
    if token_text is None:
        return lead + " ".join(map(str, last))
    return lead + repr("".join(token_text(i) for i in last))


def _choices(top: list[list[Any]], token_text: TokenText | None) -> str:
    shown = []
    for token, logit in top[:3]:
        text = "" if token_text is None else f" {token_text(token)!r}"
        shown.append(f"{token}{text} {'not finite' if logit is None else format(logit, '.4f')}")
    return " | ".join(shown)


def _style(verdict: str) -> str:
    return _STYLES.get(verdict, "bold red")
