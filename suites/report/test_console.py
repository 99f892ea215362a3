"""What a person reads. The expected texts are snapshots: a change of wording is a change of the product."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from fixtures.streams import crashed_stream, divergent_stream
from harness.events import Event, PromptJudged, PromptStarted
from harness.report.console import ProgressReporter, render_report
from harness.report.document import ParityDocument


def rendered(events: list[Event], **options: object) -> str:
    """The report after `events`, 100 columns wide, trailing spaces stripped."""
    document = ParityDocument()
    for event in events:
        document(event)
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(render_report(document.mapping(), **options))  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


DIVERGENT = """\
model      tiny/model.onnx  sha256 abababababab
topology   derived: 32 KV inputs, 96 state pairs
candidate  ort-cpu 1.31.1, threads=2, opt=all, 5 nodes on CPUExecutionProvider, isolated
oracle     oracle 0.1.0, precision=float32, stepwise
proof      1 kind of product within float32 bounds, 1 not probed

#  prompt         verdict    tokens  parts at  margin
1  Hello,\\nworld  identical     2/2         -  0.5000
2  9              divergent     3/3         1  0.0125

prompt 2 parts at generated token 1:
  after     '<1>'
  oracle    4 '<4>' 3.0125 | 2 '<2>' 3.0000 | 0 '<0>' -1.0000
  candidate 2 '<2>' 3.2500 | 4 '<4>' 3.0000 | 0 '<0>' not finite
  the candidate's token is 0.0125 behind the oracle's choice, at rank 2

verdict: divergent"""


def test_a_divergence_shows_where_what_and_by_how_much() -> None:
    """Engines with their settings, a row a prompt, and for the divergence both sides' choices."""
    assert rendered(divergent_stream(), token_text=lambda token: f"<{token}>") == DIVERGENT


def test_without_a_tokenizer_ids_stand_alone() -> None:
    """Packages without a tokenizer show token IDs and no text."""
    assert "  oracle    4 3.0125 | 2 3.0000 | 0 -1.0000" in rendered(divergent_stream())


def test_a_crash_names_its_step_and_message() -> None:
    """The engine's own words reach the reader."""
    assert "The candidate crashed at step 1: out of memory" in rendered(crashed_stream())


def test_a_crash_shows_the_last_lines_that_the_engine_wrote() -> None:
    """Eight of them, right after the message, and no character that a terminal would obey."""
    written = "".join(f"line {i}\x1b[2J\n" for i in range(20))
    events = [
        replace(event, failure=replace(event.failure, stderr_tail=written))
        if isinstance(event, PromptJudged) and event.failure is not None
        else event
        for event in crashed_stream()
    ]
    lines = rendered(events).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("The candidate crashed")) + 1
    assert lines[start : start + 8] == [f"  | line {i}\\x1b[2J" for i in range(12, 20)]
    assert lines[start + 8] == ""


def test_markup_in_a_prompt_is_shown_as_it_is() -> None:
    """Square brackets in prompts or messages are text, not formatting."""
    events = [
        PromptStarted(0, "[bold]x[/bold]", (5,), 2) if isinstance(e, PromptStarted) and e.index == 0 else e
        for e in divergent_stream()
    ]
    assert "[bold]x[/bold]" in rendered(events)


def test_in_a_narrow_terminal_the_prompt_gives_way() -> None:
    """At 50 columns every verdict, position and margin is whole."""
    document = ParityDocument()
    for event in divergent_stream():
        document(event)
    console = Console(file=io.StringIO(), width=50, color_system=None)
    console.print(render_report(document.mapping()))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "identical     2/2         -  0.5000" in text
    assert "divergent     3/3         1  0.0125" in text


def test_what_a_terminal_would_obey_is_spelled_out() -> None:
    """A prompt cannot colour or move anything."""
    events = [
        PromptStarted(0, "a\x1b[31mred\x07", (5,), 2) if isinstance(e, PromptStarted) and e.index == 0 else e
        for e in divergent_stream()
    ]
    text = rendered(events)
    assert "\x1b" not in text
    assert "a\\x1b[31mred\\x07" in text


def test_progress_on_a_plain_stream_is_one_line_for_each_thing_that_happens() -> None:
    """Redirected to a file, progress has no control characters and does not repeat itself."""
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    reporter = ProgressReporter(console)
    for event in divergent_stream():
        reporter(event)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "oracle oracle 0.1.0 loaded in 0.1 s",
        "candidate ort-cpu 1.31.1 loaded in 0.2 s",
        "prompt 1/2: identical, 2 tokens, candidate 0.2 s, oracle 1.0 s",
        "prompt 2/2: divergent, 3 tokens, candidate 0.5 s, oracle 2.0 s",
    ]


def test_a_prompt_that_is_judged_again_says_so() -> None:
    """Its second line differs from the first in more than the verdict."""
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    reporter = ProgressReporter(console)
    for event in (
        *divergent_stream()[:-1],
        PromptJudged(0, "divergent", (7, 8), (9,), (9, 8), 0.5, 0.25, 3.0),
    ):
        reporter(event)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[-1] == (
        "prompt 1/2 again, in steps: divergent, 2 tokens, candidate 0.2 s, oracle 3.0 s"
    )
