"""`onnx-parity conform`: properties that an engine must have on any package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from harness.cli.options import ORACLE, DecodeOptions, limit_options, report_option
from harness.cli.output import json_option, reporting, warnings_said
from harness.cli.preparing import Model, open_model, plan_task, usable_engine
from harness.cli.process import deferred_interrupts
from harness.cli.prompting import PromptOptions
from harness.cli.running import (
    default_report_dir,
    failed_end,
    import_what_runs,
    run_into,
    show_report,
)
from harness.errors import InputError, ParityError
from harness.relation_events import RelationJudged, RelationsFinished, RelationsStarted

if TYPE_CHECKING:
    from harness.decode.wiring import Wiring
    from harness.engines.isolated.limits import Limits
    from harness.engines.registry import EngineSpec
    from harness.parity.conform import ConformPlan
    from harness.parity.relations.base import Relation

__all__ = ["command", "failure_document"]

_NEW_TOKENS = 8


def failure_document(error: ParityError) -> Mapping[str, Any]:
    """The document of relations that could not be tried."""
    from harness.report.conformance import ConformanceDocument

    document = ConformanceDocument()
    document(failed_end(RelationsFinished, error))
    return document.mapping()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What the user asked for."""

    package: str
    engine: EngineSpec | None
    decode: DecodeOptions
    limits: Limits | None
    strict_placement: bool
    rounding: Literal["model", "none"]
    relations: tuple[Relation, ...]


@click.command("conform")
@click.argument("package", default="demo")
@click.option("--engine", metavar="ENGINE", help="Engine under test, such as ort-cpu:threads=1.")
@click.option(
    "--relation", "names", multiple=True, metavar="NAME", help="One to try. Repeatable. [default: all]"
)
@click.option("--prompt", "text", metavar="TEXT", help="A text to continue.")
@click.option("--prompt-ids", "ids", metavar="1,2,3", help="Token IDs to continue.")
@click.option("--chat", is_flag=True, help="Put the text into the package's chat template.")
@click.option(
    "--inputs",
    type=click.Path(path_type=Path),
    metavar="FILE.npz",
    help="What the encoder takes, or would give, by name. [default: made up from a seed]",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=_NEW_TOKENS,
    show_default=True,
    help="Tokens to decode.",
)
@click.option("--ignore-declared", is_flag=True, help="Derive the topology whatever the sidecars say.")
@click.option(
    "--rounding",
    type=click.Choice(["model", "none"]),
    default="model",
    show_default=True,
    help="model: what is not bitwise by nature must lie within what rounding to the model's types makes of "
    "the oracle; none: without the oracle, such differences are reported and not judged.",
)
@limit_options
@report_option
@json_option
@reporting(failure_document)
def command(
    package: str,
    engine: str | None,
    names: tuple[str, ...],
    text: str | None,
    ids: str | None,
    chat: bool,
    inputs: Path | None,
    max_new_tokens: int,
    ignore_declared: bool,
    rounding: Literal["model", "none"],
    limits: Limits | None,
    strict_placement: bool,
    report_dir: Path | None,
    as_json: bool,
) -> int:
    """Try relations on an engine: properties that it must have on any PACKAGE, whatever the weights.

    A second decode equals the first, chunks equal the whole, a batch equals one alone, and so on. Each
    compares tokens, logits and every state. PACKAGE is as for `check`.
    """
    import_what_runs()
    with deferred_interrupts():
        from harness.engines.registry import parse_engine

    if text is not None and ids is not None:
        raise InputError(
            "Relations are tried on one prompt, and --prompt and --prompt-ids give two.",
            next_action="Leave one of them out.",
        )
    prompts = PromptOptions(
        texts=() if text is None else (text,), id_lists=() if ids is None else (ids,), chat=chat
    )
    model, plan = _plan(
        _Request(
            package=package,
            # Names first: a misspelt engine is found before a package is written or read.
            engine=parse_engine(engine) if engine is not None else None,
            relations=_relations(names),
            decode=DecodeOptions(
                prompts=prompts,
                inputs=inputs,
                max_new_tokens=max_new_tokens,
                stop_on_eos=False,
                ignore_declared=ignore_declared,
            ),
            limits=limits,
            strict_placement=strict_placement,
            rounding=rounding,
        )
    )
    return _run_and_report(plan, model, report_dir=report_dir, as_json=as_json)


def _relations(names: tuple[str, ...]) -> tuple[Relation, ...]:
    """Those that were named, in the order in which all are tried; all where none was."""
    from harness.parity.relations.catalogue import RELATIONS

    known = {relation.name: relation for relation in RELATIONS}
    for name in names:
        if name not in known:
            raise InputError(
                f"There is no relation named {name!r}.", next_action=f"They are: {', '.join(known)}."
            )
    return tuple(relation for relation in RELATIONS if not names or relation.name in names)


def _plan(request: _Request) -> tuple[Model, ConformPlan]:
    from harness.decode.wired import wired
    from harness.engines.isolated.engine import isolated, process_of
    from harness.engines.registry import parse_engine
    from harness.parity.conform import ConformPlan
    from harness.parity.relations.laboratory import Subject

    decode = request.decode
    model = open_model(request.package, ignore_declared=decode.ignore_declared, inputs=decode.inputs)
    # Of those that a built-in package brings one is enough: the longest, which can be cut into chunks.
    prompt = max(plan_task(model, decode).prompts, key=lambda prompt: len(prompt.token_ids))
    engine = usable_engine(request.engine)
    if request.limits is not None:
        engine = isolated(engine, request.limits)
    wiring = model.decoder.conditioning.assembly.wiring
    return model, ConformPlan(
        package=model.asked,
        model_name=model.name,
        model_sha256=model.sha256,
        topology_outcome=model.outcome,
        engine=wired(engine, wiring),
        process=process_of(engine),
        subject=Subject(
            model=model.package.model,
            topology=model.decoder.topology,
            prompt=prompt.token_ids,
            steps=decode.max_new_tokens or _NEW_TOKENS,
            extra=prompt.extra,
            is_plain=wiring.is_plain,
            keeps_first_call=_keeps_first_call(wiring),
        ),
        text=prompt.text,
        oracle=wired(parse_engine(ORACLE), wiring),
        judges_rounding=request.rounding == "model",
        relations=request.relations,
        strict_placement=request.strict_placement,
    )


def _keeps_first_call(wiring: Wiring) -> bool:
    """Whether a graph is fed at later calls what another gave at the first."""
    from harness.decode.wiring import Kept

    return any(isinstance(wire.later, Kept) for step in wiring.steps for wire in step.wires.values())


def _run_and_report(plan: ConformPlan, model: Model, *, report_dir: Path | None, as_json: bool) -> int:
    """Try the relations, with the report in its folder and on standard output; returns the exit status."""
    from rich.console import Console

    from harness.parity.conform import run_conform
    from harness.report.conformance import ConformanceDocument
    from harness.report.conformance_console import RelationProgress, render_conformance
    from harness.report.writer import ReportWriter

    document = ConformanceDocument()
    writer = ReportWriter(
        report_dir or default_report_dir(model.asked),
        document,
        fresh=report_dir is None,
        name="conformance.json",
        events=(RelationsStarted, RelationJudged, RelationsFinished),
    )
    progress = RelationProgress(Console(stderr=True))
    plan = replace(plan, warnings=warnings_said())
    end = run_into(partial(run_conform, plan), document, writer, progress=progress)
    show_report(document.mapping(), writer.path, as_json=as_json, render=render_conformance)
    return end.exit_code
