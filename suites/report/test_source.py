"""The source model in reports: its own block, its prompts in the places of the others, and who is named."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
from rich.console import Console

from fixtures.streams import divergent_stream
from harness.events import (
    CheckFinished,
    CheckStarted,
    Event,
    PromptJudged,
    SessionOpened,
    SourceDivergence,
    SourceJudged,
    TokenDecoded,
)
from harness.report.console import ProgressReporter, render_report
from harness.report.document import ParityDocument, token_sha256

FORM = jsonschema.Draft202012Validator(
    json.loads(
        (Path(__file__).parents[2] / "reports/schemas/parity-1.schema.json").read_text(encoding="utf-8")
    )
)
PARTED = SourceDivergence(
    index=1,
    source_token=6,
    oracle_token=8,
    gap=0.75,
    noise_band=0.001,
    source_top=((6, 2.0), (8, 1.5)),
    oracle_top=((8, 2.25), (6, 2.0), (0, float("-inf"))),
    evidence="the source's token is 0.25 behind on the graph",
)
JUDGED = [
    SourceJudged("divergent", (7, 6), PARTED, "exporter", 0.5),
    SourceJudged("identical", (1, 4, 3), None, "runtime", 0.5),
]


def sourced() -> list[Event]:
    """The stream of two prompts, with a source that parts from the graph on the first."""
    events: list[Event] = []
    for event in divergent_stream():
        match event:
            case CheckStarted():
                events.append(replace(event, source="hf", source_path="models/tiny"))
            case SessionOpened(role="candidate"):
                opened = SessionOpened("source", "hf", "5.0", {"precision": "float32"}, None, "eager", 1.0)
                events += [event, opened]
            case PromptJudged():
                own = TokenDecoded(event.index, "source", len(event.candidate_ids) - 1, 0)
                verdict = "divergent"
                events += [own, replace(event, verdict=verdict, source=JUDGED[event.index])]
            case CheckFinished():
                events.append(replace(event, attribution="exporter"))
            case _:
                events.append(event)
    return events


def document_of(events: list[Event]) -> dict[str, Any]:
    """The document after `events`, through JSON and checked against the schema."""
    document = ParityDocument()
    for event in events:
        document(event)
    parsed: dict[str, Any] = json.loads(json.dumps(document.mapping(), allow_nan=False))
    FORM.validate(parsed)
    return parsed


def test_the_document_is_valid_after_every_event() -> None:
    """Wherever a run with a source is cut off; each prompt that was judged has its place in the source's."""
    events = sourced()
    for length in range(len(events) + 1):
        document = document_of(events[:length])
        witnessed = (document["source"] or {"prompts": []})["prompts"]
        assert len(witnessed) == len(document["prompts"])


def test_what_the_source_said_stands_in_the_document() -> None:
    """Choices with their hash, both sides' logits, the gap and the band; -inf has no JSON form: null."""
    document = document_of(sourced())
    source = document["source"]
    assert document["attribution"] == "exporter"
    assert {key: source[key] for key in ("engine", "path", "version", "precision")} == {
        "engine": "hf",
        "path": "models/tiny",
        "version": "5.0",
        "precision": "float32",
    }
    first, second = source["prompts"]
    assert (first["verdict"], first["attribution"]) == ("divergent", "exporter")
    assert (second["verdict"], second["attribution"]) == ("identical", "runtime")
    assert first["source_sha256"] == token_sha256((7, 6))
    assert first["first_divergence"]["gap"] == 0.75
    assert first["first_divergence"]["oracle_top"] == [[8, 2.25], [6, 2.0], [0, None]]
    assert second["first_divergence"] is None


EXPECTED = """\
source against oracle: 1/2 identical

prompt 1: source model and graph differ at generated token 1:
  after     7
  source    6 2.0000 | 8 1.5000
  oracle    8 2.2500 | 6 2.0000 | 0 not finite
  the source's token is 0.25 behind on the graph

verdict: divergent
attribution: exporter"""


def test_a_person_reads_where_the_graph_is_not_the_source() -> None:
    """After the candidate's divergences; the source stands among the engines."""
    document = document_of(sourced())
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(render_report(document))
    assert isinstance(console.file, io.StringIO)
    text = "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
    assert text.endswith(EXPECTED)
    assert "source     hf 5.0, precision=float32\n" in text


def test_progress_shows_the_source_too() -> None:
    """On a terminal it has its own bar: an event of an engine without one would end the check."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    reporter = ProgressReporter(console)
    for event in sourced():
        reporter(event)
    assert isinstance(console.file, io.StringIO)
    assert "source hf 5.0 loaded" in console.file.getvalue()
