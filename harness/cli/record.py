"""`onnx-parity record`: decode on the engine's machine, and keep what a check needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options import ORACLE, DecodeOptions, decode_options, limit_options
from harness.cli.output import json_option, print_json_line, print_line, report_error, reporting
from harness.cli.preparing import (
    all_options,
    check_target,
    failure_fields,
    open_model,
    plan_task,
    usable_engine,
)
from harness.cli.process import deferred_interrupts
from harness.cli.running import engines_at_work
from harness.errors import ParityError

if TYPE_CHECKING:
    from harness.cli.preparing import Model
    from harness.engines.isolated.limits import Limits
    from harness.engines.registry import EngineSpec
    from harness.parity.recorded import RecordedDecode, Recording
    from harness.parity.recording import RecordPlan

__all__ = ["command", "failure_document"]

_SCHEMA = "onnx-parity/recording/1"


def failure_document(error: ParityError) -> Mapping[str, Any]:
    """The document of a recording that left no trace."""
    return {
        "schema": _SCHEMA,
        "outcome": None,
        **failure_fields(error),
        "trace": None,
        "model": None,
        "engine": None,
        "prompts": [],
    }


@click.command("record")
@click.argument("package")
@click.option("--engine", metavar="ENGINE", help="What decodes, such as ort-cuda. [default: as for check]")
@click.option(
    "-o",
    "trace",
    type=click.Path(path_type=Path),
    metavar="TRACE",
    required=True,
    help="Where the trace goes, such as model.trace.safetensors.",
)
@click.option("--states", is_flag=True, help="Keep caches and states whole, not only their hashes.")
@reporting(failure_document)
@decode_options
@limit_options
@json_option
def command(
    package: str,
    engine: str | None,
    trace: Path,
    states: bool,
    decode: DecodeOptions,
    limits: Limits | None,
    strict_placement: bool,
    as_json: bool,
) -> int:
    """Decode PACKAGE on an engine and keep in TRACE what a check needs.

    `onnx-parity verify TRACE PACKAGE` then judges it elsewhere, another day, without the engine. Every prompt
    is decoded twice, so that an engine that differs from itself is found. PACKAGE is as for check.
    """
    with deferred_interrupts():
        # Imported here, Ctrl-C cannot break them; and what the trace needs is missed before all is decoded.
        import numpy as np  # noqa: F401
        import safetensors.numpy  # noqa: F401

        from harness.engines.registry import parse_engine
        from harness.parity.recording import record, refusal_in
        from harness.parity.trace_writing import write_trace

    spec = parse_engine(engine) if engine is not None else None
    check_target(trace)
    model = open_model(package, ignore_declared=decode.ignore_declared, inputs=decode.inputs)
    plan = _plan(model, decode, usable_engine(spec), limits, strict_placement, states)

    def tell(index: int, decoded: RecordedDecode) -> None:
        failed = decoded.trace is None or decoded.trace.failure is not None
        count, seconds = (
            (len(decoded.trace.token_ids), decoded.trace.seconds) if decoded.trace is not None else (0, 0.0)
        )
        print_line(
            f"prompt {index + 1}/{len(plan.prompts)}: {count} tokens in {seconds:.1f} s"
            f"{', then the engine failed' if failed else ''}",
            err=True,
        )

    with engines_at_work():
        recording = record(plan, on_decode=tell)
    write_trace(trace, recording)
    failure = refusal_in(plan, recording) or _failure(recording)
    document = _document(recording, trace, model, failure)
    if failure is not None:
        report_error(failure)
    if as_json:
        print_json_line(document)
    else:
        _show(document)
    return int(document["exit_code"])


def _plan(
    model: Model,
    decode: DecodeOptions,
    engine: EngineSpec,
    limits: Limits | None,
    strict_placement: bool,
    states: bool,
) -> RecordPlan:
    from harness.decode.wired import wired
    from harness.engines.isolated.engine import isolated, process_of
    from harness.engines.registry import parse_engine
    from harness.parity.recorded import RecordedModel, topology_sha256
    from harness.parity.recording import RecordPlan

    task = plan_task(model, decode)
    options = all_options(engine)
    if limits is not None:
        engine = isolated(engine, limits)
    topology, wiring = model.decoder.topology, model.decoder.conditioning.assembly.wiring
    return RecordPlan(
        model=model.package.model,
        facts=RecordedModel(
            name=model.label,
            sha256=model.sha256,
            topology_sha256=topology_sha256(topology),
            topology_outcome=model.outcome,
            ignore_declared=decode.ignore_declared,
        ),
        topology=topology,
        engine=wired(engine, wiring),
        oracle=wired(parse_engine(ORACLE), wiring),
        options=options,
        process=process_of(engine),
        prompts=task.prompts,
        max_new_tokens=task.max_new_tokens,
        stop_ids=task.stop_ids,
        notes=wiring.notes,
        states=states,
        strict_placement=strict_placement,
    )


def _failure(recording: Recording) -> ParityError | None:
    """The first failure of the engine, for a line on standard error."""
    from harness.errors import EngineFailedError

    if recording.engine.failure is not None:
        return recording.engine.failure
    for number, prompt in enumerate(recording.prompts, 1):
        for decode in prompt.decodes:
            if decode.failure is not None:
                return decode.failure
            if decode.trace is not None and decode.trace.failure is not None:
                failed = decode.trace.failure
                return EngineFailedError(
                    f"{recording.engine.name} {failed.kind} at step {failed.step} of prompt {number}: "
                    f"{failed.message}",
                    next_action="The trace has what came before; verify will say so.",
                    kind=failed.kind,
                )
    return None


def _document(recording: Recording, trace: Path, model: Model, failure: ParityError | None) -> dict[str, Any]:
    from hashlib import file_digest

    with trace.open("rb") as stream:
        digest = file_digest(stream, "sha256").hexdigest()
    info = recording.engine.info
    well = {"exit_code": 0, "error": None, "refusal": None}
    return {
        "schema": _SCHEMA,
        "outcome": "recorded",
        **(well if failure is None else failure_fields(failure)),
        "trace": {"path": str(trace), "bytes": trace.stat().st_size, "sha256": digest},
        "model": {
            "path": model.name,
            "sha256": recording.model.sha256,
            "topology_sha256": recording.model.topology_sha256,
        },
        "engine": {
            "engine": recording.engine.name,
            "version": None if info is None else info.version,
            "settings": {} if info is None else dict(info.settings),
            "process": recording.engine.process,
            "settings_sha256": recording.settings_sha256,
        },
        "prompts": [
            {
                "text": each.prompt.text,
                "prompt_ids": list(each.prompt.source_ids or each.prompt.token_ids),
                "token_ids": _tokens(each.decodes[:1]),
                "seconds": sum(d.trace.seconds for d in each.decodes if d.trace is not None),
                "repeats": _repeats(each.decodes),
            }
            for each in recording.prompts
        ],
    }


def _tokens(decodes: tuple[RecordedDecode, ...]) -> list[int]:
    return [token for each in decodes if each.trace is not None for token in each.trace.token_ids]


def _repeats(decodes: tuple[RecordedDecode, ...]) -> bool | None:
    """Whether the second decode ended in the first one's tokens, logits and caches, bit for bit."""
    if len(decodes) < 2:
        return None
    first, again = decodes
    return _tokens((first,)) == _tokens((again,)) and {
        port: output.sha256 for port, output in first.outputs.items()
    } == {port: output.sha256 for port, output in again.outputs.items()}


def _show(document: Mapping[str, Any]) -> None:
    trace, prompts = document["trace"], document["prompts"]
    same = [prompt["repeats"] for prompt in prompts if prompt["repeats"] is not None]
    print_line(f"trace   {trace['path']}  {_size(trace['bytes'])}  sha256 {trace['sha256'][:12]}")
    print_line(f"model   {document['model']['path']}  sha256 {document['model']['sha256'][:12]}")
    print_line(f"engine  {document['engine']['engine']} {document['engine']['version'] or ''}".rstrip())
    print_line(
        f"decoded {len(prompts)} prompts in {sum(prompt['seconds'] for prompt in prompts):.1f} s; "
        f"{sum(same)} of {len(same)} repeated bit for bit"
    )


def _size(count: int) -> str:
    if count < 1024:
        return f"{count} bytes"
    power = min((count.bit_length() - 1) // 10, 3)
    return f"{count / (1 << 10 * power):.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"
