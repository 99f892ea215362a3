"""`onnx-parity verify`: judge a recorded trace against the oracle, without the engine that made it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli.attributing import SourceChoice, plan_source, source_options
from harness.cli.options import OracleChoice, oracle_options, report_option
from harness.cli.output import json_option, reporting
from harness.cli.preparing import Model, check_fit, check_independent, open_model, usable_engine
from harness.cli.process import deferred_interrupts
from harness.cli.prompting import check_texts
from harness.cli.running import failure_document, import_what_runs, run_and_report

if TYPE_CHECKING:
    from harness.parity.check import CheckPlan
    from harness.parity.recorded import Recording

__all__ = ["command", "failure_document"]


@click.command("verify")
@click.argument("trace", type=click.Path(path_type=Path))
@click.argument("package")
@reporting(failure_document)
@oracle_options
@source_options
@report_option
@json_option
def command(
    trace: Path,
    package: str,
    oracle: OracleChoice,
    source: SourceChoice | None,
    report_dir: Path | None,
    as_json: bool,
) -> int:
    """Check what TRACE recorded against the oracle, token by token, with the report of `onnx-parity check`.

    PACKAGE must be what was recorded: the same model, and the same topology. Only the oracle runs.
    """
    import_what_runs()
    with deferred_interrupts():
        from harness.parity.trace_reading import read_trace

    recording = read_trace(trace)
    model = open_model(package, ignore_declared=recording.model.ignore_declared)
    plan = replace(
        _plan(recording, model, oracle), source=None if source is None else plan_source(source, model)
    )
    return run_and_report(plan, model, report_dir=report_dir, as_json=as_json)


def _plan(recording: Recording, model: Model, oracle: OracleChoice) -> CheckPlan:
    from harness.decode.prompts import vocabulary_size
    from harness.decode.wired import wired
    from harness.parity.check import TOP_K, CheckPlan
    from harness.parity.recorded import topology_sha256
    from harness.parity.replay import Replay, require_complete, require_same_model

    decoder = model.decoder
    require_same_model(
        recording,
        sha256=model.sha256,
        topology_sha256=topology_sha256(decoder.topology),
        package=model.asked,
    )
    require_complete(recording, top_k=TOP_K, vocabulary=vocabulary_size(decoder.inventory, decoder.topology))
    prompts = tuple(each.prompt for each in recording.prompts)
    texts = [(each.text, each.source_ids or each.token_ids) for each in prompts]
    check_texts(texts, model.package, decoder.conditioning, of="The trace")
    check_fit(decoder, prompts, recording.max_new_tokens)
    trusted, engine = usable_engine(oracle.spec), recording.engine
    check_independent(engine.name, engine.options, trusted, next_action="Name another oracle with --oracle.")
    # What an encoder was given is in the trace, whatever would be made up for it here.
    wiring = replace(decoder.conditioning.assembly.wiring, notes=recording.notes)
    return CheckPlan(
        package=model.asked,
        model=model.package.model,
        model_name=model.name,
        model_sha256=model.sha256,
        topology=decoder.topology,
        topology_outcome=model.outcome,
        candidate=Replay(recording, decoder.inventory),
        oracle=wired(trusted, wiring),
        oracle_mode=oracle.mode,
        prompts=prompts,
        max_new_tokens=recording.max_new_tokens,
        stop_ids=recording.stop_ids,
        candidate_process=engine.process,
    )
