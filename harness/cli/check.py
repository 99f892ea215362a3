"""`onnx-parity check`: the main job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli.attributing import SourceChoice, plan_source, source_options
from harness.cli.options import (
    DecodeOptions,
    OracleChoice,
    decode_options,
    limit_options,
    oracle_options,
    report_option,
)
from harness.cli.output import json_option, reporting
from harness.cli.preparing import Model, all_options, check_independent, open_model, plan_task, usable_engine
from harness.cli.process import deferred_interrupts
from harness.cli.running import failure_document, import_what_runs, run_and_report

if TYPE_CHECKING:
    from harness.engines.isolated.limits import Limits
    from harness.engines.registry import EngineSpec
    from harness.parity.check import CheckPlan

__all__ = ["CheckRequest", "command", "failure_document", "plan_check"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """What the user asked for."""

    package: str
    decode: DecodeOptions
    candidate: EngineSpec | None
    limits: Limits | None
    strict_placement: bool
    oracle: OracleChoice
    source: SourceChoice | None


@click.command("check")
@click.argument("package", default="demo")
@click.option("--candidate", metavar="ENGINE", help="Engine under test, such as ort-cpu:threads=1.")
@reporting(failure_document)
@oracle_options
@source_options
@decode_options
@limit_options
@report_option
@json_option
def command(
    package: str,
    candidate: str | None,
    oracle: OracleChoice,
    source: SourceChoice | None,
    decode: DecodeOptions,
    limits: Limits | None,
    strict_placement: bool,
    report_dir: Path | None,
    as_json: bool,
) -> int:
    """Decode PACKAGE on a candidate engine and compare every token with the oracle.

    PACKAGE is a model directory, an .onnx file (taken for itself, without sidecars), or a built-in name:
    demo, demo-ops, smollm2, smollm2-int4. Built-in packages bring their own prompts and length.
    """
    import_what_runs()
    with deferred_interrupts():
        from harness.engines.registry import parse_engine

    model, plan = plan_check(
        CheckRequest(
            package=package,
            decode=decode,
            # Names first: a misspelt engine is found before a package is written or read.
            candidate=parse_engine(candidate) if candidate is not None else None,
            limits=limits,
            strict_placement=strict_placement,
            oracle=oracle,
            source=source,
        )
    )
    return run_and_report(plan, model, report_dir=report_dir, as_json=as_json)


def plan_check(request: CheckRequest) -> tuple[Model, CheckPlan]:
    """The model that was asked for, opened, and what is to be done with it.

    Raises:
        ParityError: whatever is wrong with the input; nothing has been opened on an engine or written.
    """
    from harness.decode.wired import wired
    from harness.engines.isolated.engine import isolated, process_of
    from harness.parity.check import CheckPlan

    decode = request.decode
    model = open_model(request.package, ignore_declared=decode.ignore_declared, inputs=decode.inputs)
    task = plan_task(model, decode)
    candidate, oracle = usable_engine(request.candidate), usable_engine(request.oracle.spec)
    check_independent(
        candidate.name,
        all_options(candidate),
        oracle,
        next_action="Name another engine with --candidate or --oracle.",
    )
    if request.limits is not None:
        candidate = isolated(candidate, request.limits)
    wiring = model.decoder.conditioning.assembly.wiring
    return model, CheckPlan(
        package=model.asked,
        model=model.package.model,
        model_name=model.name,
        model_sha256=model.sha256,
        topology=model.decoder.topology,
        topology_outcome=model.outcome,
        candidate=wired(candidate, wiring),
        oracle=wired(oracle, wiring),
        oracle_mode=request.oracle.mode,
        prompts=task.prompts,
        max_new_tokens=task.max_new_tokens,
        stop_ids=task.stop_ids,
        candidate_process=process_of(candidate),
        strict_placement=request.strict_placement,
        source=None if request.source is None else plan_source(request.source, model),
    )
