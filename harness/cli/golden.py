"""`onnx-parity golden record|check`: expected tokens, with where they are known from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.check import CheckRequest, plan_check
from harness.cli.options import (
    ORACLE,
    DecodeOptions,
    OracleChoice,
    decode_options,
    limit_options,
    oracle_options,
)
from harness.cli.output import (
    json_option,
    print_json_line,
    print_line,
    report_error,
    reporting,
)
from harness.cli.preparing import check_fit, check_target, failure_fields, open_model, usable_engine
from harness.cli.process import deferred_interrupts
from harness.cli.prompting import check_texts, encode_prompts
from harness.cli.running import EndError, engines_at_work, import_what_runs, run_into
from harness.errors import EngineFailedError, InputError, ParityError

if TYPE_CHECKING:
    from harness.cli.preparing import Model
    from harness.engines.base import SessionInfo
    from harness.engines.isolated.limits import Limits
    from harness.engines.registry import EngineSpec
    from harness.parity.candidate import Candidate, Prompt
    from harness.parity.golden import Golden, GoldenResult

__all__ = ["command", "failure_document"]

_SCHEMA = "onnx-parity/golden-run/1"

_candidate_option = click.option(
    "--candidate", metavar="ENGINE", help="What decodes, such as ort-cuda. [default: as for check]"
)


def failure_document(error: ParityError) -> Mapping[str, Any]:
    """The document of a run that did nothing with a golden."""
    return {
        "schema": _SCHEMA,
        "outcome": None,
        **failure_fields(error),
        "golden": None,
        "model": None,
        "candidate": None,
        "prompts": [],
    }


@click.group("golden", invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Record the tokens that a model is known to give, and check an engine against them."""
    if ctx.invoked_subcommand is None:
        raise click.UsageError("golden does one of two things, record and check.")


@command.command("record")
@click.argument("package")
@click.option(
    "-o",
    "path",
    type=click.Path(path_type=Path),
    metavar="GOLDEN",
    required=True,
    help="Where the golden goes, such as model.golden.json.",
)
@_candidate_option
@reporting(failure_document)
@oracle_options
@decode_options
@limit_options
@json_option
def record(
    package: str,
    path: Path,
    candidate: str | None,
    oracle: OracleChoice,
    decode: DecodeOptions,
    limits: Limits | None,
    strict_placement: bool,
    as_json: bool,
) -> int:
    """Write what PACKAGE gives to GOLDEN, if a candidate engine and the oracle give the same.

    The golden says on which model, engines and settings. Where they differ, nothing is written.
    """
    import_what_runs()
    with deferred_interrupts():
        from rich.console import Console

        from harness.engines.registry import parse_engine
        from harness.parity.check import run_check
        from harness.parity.golden import write_golden
        from harness.report.console import ProgressReporter
        from harness.report.document import ParityDocument

    spec = parse_engine(candidate) if candidate is not None else None
    check_target(path)
    model, plan = plan_check(
        CheckRequest(
            package=package,
            decode=decode,
            candidate=spec,
            limits=limits,
            strict_placement=strict_placement,
            oracle=oracle,
            source=None,
        )
    )
    document = ParityDocument()
    end = run_into(partial(run_check, plan), document, progress=ProgressReporter(Console(stderr=True)))
    report = document.mapping()
    found: dict[str, Any] = {
        "schema": _SCHEMA,
        "outcome": "recorded" if end.exit_code == 0 else end.verdict,
        "exit_code": end.exit_code,
        "error": report["error"],
        "refusal": report["refusal"],
        "golden": None,
        "model": {"path": model.name, "sha256": model.sha256},
        "candidate": report["candidate"]
        and {name: report["candidate"][name] for name in ("engine", "version", "settings")},
        "prompts": [
            {
                "text": each["text"],
                "prompt_ids": each["prompt_ids"],
                "expected_ids": each["oracle_ids"],
                "token_ids": each["candidate_ids"],
                "first_difference": (each["first_divergence"] or {}).get("index"),
            }
            for each in report["prompts"]
        ],
    }
    if end.exit_code == 0:
        golden = _golden(report, model, plan.prompts)
        write_golden(path, golden)
        found["golden"] = _facts(path, golden)
    elif end.error is None:
        failure = report["candidate"]["failure"]
        why = "" if failure is None else f": {failure['message'].rstrip('.')}"
        found["error"] = {
            "message": f"No golden was written: the verdict of the check is {end.verdict}{why}.",
            "next": "See what differs with `onnx-parity check`.",
        }
        report_error(EndError(found["error"]))
    if as_json:
        print_json_line(found)
    elif end.exit_code == 0:
        print_line(f"golden  {path}  {len(plan.prompts)} prompts of {model.name}, sha256 {model.sha256[:12]}")
    return end.exit_code


@command.command("check")
@click.argument("path", type=click.Path(path_type=Path), metavar="GOLDEN")
@click.argument("package")
@_candidate_option
@click.option(
    "--inputs",
    type=click.Path(path_type=Path),
    metavar="FILE.npz",
    help="What the encoder takes, or would give, as it was given when the golden was recorded.",
)
@click.option("--ignore-declared", is_flag=True, help="Derive the topology whatever the sidecars say.")
@reporting(failure_document)
@limit_options
@json_option
def check(
    path: Path,
    package: str,
    candidate: str | None,
    inputs: Path | None,
    ignore_declared: bool,
    limits: Limits | None,
    strict_placement: bool,
    as_json: bool,
) -> int:
    """Decode PACKAGE on a candidate engine, and every token must be that of GOLDEN. No oracle runs.

    A golden of another model is an error. One that does not say of which model it is decides nothing: what
    it holds is shown, and the outcome is inconclusive.
    """
    import_what_runs()
    with deferred_interrupts():
        from harness.engines.registry import parse_engine
        from harness.parity.golden import compare_with_golden, read_golden
        from harness.parity.verdict import Verdict, exit_code_of, worst_verdict

    spec = parse_engine(candidate) if candidate is not None else None
    golden = read_golden(path)
    model = open_model(package, ignore_declared=ignore_declared, inputs=inputs)
    golden.require_same_model(model.sha256, package=package)
    texts = [(each.text, each.prompt_ids) for each in golden.prompts]
    warnings = check_texts(texts, model.package, model.decoder.conditioning, of=f"{path}: the golden")
    prompts = _prompts(golden, model, path)
    candidate_side = _candidate(golden, model, usable_engine(spec), limits)
    with engines_at_work():
        try:
            info = _session_of(candidate_side, strict_placement=strict_placement)
            results = []
            for prompt, each in zip(prompts, golden.prompts, strict=True):
                results.append(compare_with_golden(candidate_side, prompt, each.token_ids))
                _require_drivable(model, prompt, results[-1])
        finally:
            candidate_side.close()
    verdict = worst_verdict(each.verdict for each in results)
    if golden.advisory and verdict in (Verdict.IDENTICAL, Verdict.DIVERGENT):
        verdict = Verdict.INCONCLUSIVE
    error = _error(golden, results, path)
    document = {
        "schema": _SCHEMA,
        "outcome": verdict,
        "exit_code": exit_code_of(verdict),
        "error": error,
        "refusal": None,
        "golden": _facts(path, golden),
        "model": {"path": model.name, "sha256": model.sha256},
        "candidate": {
            "engine": candidate_side.name,
            "version": None if info is None else info.version,
            "settings": {} if info is None else dict(info.settings),
        },
        "prompts": [
            {
                "text": each.text,
                "prompt_ids": list(prompt.source_ids or prompt.token_ids),
                "expected_ids": list(each.token_ids),
                "token_ids": list(result.token_ids),
                "first_difference": result.first_difference,
            }
            for prompt, each, result in zip(prompts, golden.prompts, results, strict=True)
        ],
        "warnings": warnings,
    }
    if error is not None:
        report_error(EndError(error))
    if as_json:
        print_json_line(document)
    else:
        _show(document, model.token_text())
    return exit_code_of(verdict)


def _golden(report: Mapping[str, Any], model: Model, prompts: Sequence[Prompt]) -> Golden:
    """What a check that found nothing shows of its model."""
    from importlib.metadata import version

    from harness.parity.golden import Golden, GoldenPrompt, inputs_sha256

    named = ("engine", "version", "settings")
    return Golden(
        model=model.label,
        sha256=model.sha256,
        provenance={
            "utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "onnx_parity": version("onnx-parity"),
            "candidate": {name: report["candidate"][name] for name in named},
            "oracle": {name: report["oracle"][name] for name in (*named, "mode")},
            "verdict": report["verdict"],
        },
        prompts=tuple(
            GoldenPrompt(
                text=each["text"],
                prompt_ids=tuple(each["prompt_ids"]),
                inputs_sha256=inputs_sha256(prompt),
                token_ids=tuple(each["candidate_ids"]),
            )
            for each, prompt in zip(report["prompts"], prompts, strict=True)
        ),
    )


def _prompts(golden: Golden, model: Model, path: Path) -> tuple[Prompt, ...]:
    """The prompts of a golden, encoded for the model.

    Raises:
        InputError: a text cannot be encoded, or encoders would be fed otherwise than they were.
    """
    from harness.decode.prompts import vocabulary_size
    from harness.parity.golden import inputs_sha256

    decoder = model.decoder
    prompts = encode_prompts(
        # One of text and IDs is there. Where both are, they have been held against each other.
        tuple(each.prompt_ids or str(each.text) for each in golden.prompts),
        model.package,
        chat=False,
        vocabulary=vocabulary_size(decoder.inventory, decoder.topology),
        conditioning=decoder.conditioning,
    )
    check_fit(decoder, prompts, max(len(each.token_ids) for each in golden.prompts))
    for number, (prompt, each) in enumerate(zip(prompts, golden.prompts, strict=True), 1):
        if inputs_sha256(prompt) != each.inputs_sha256:
            raise InputError(
                f"{path}: the golden has prompt {number} with other inputs of the encoder than those here.",
                next_action="Give the --inputs that it was recorded with.",
            )
    return prompts


def _candidate(golden: Golden, model: Model, engine: EngineSpec, limits: Limits | None) -> Candidate:
    from harness.decode.wired import wired
    from harness.engines.isolated.engine import isolated
    from harness.parity.candidate import Candidate

    if limits is not None:
        engine = isolated(engine, limits)
    decoder = model.decoder
    return Candidate(
        wired(engine, decoder.conditioning.assembly.wiring),
        model.package.model,
        decoder.topology,
        max_new_tokens=max(len(each.token_ids) for each in golden.prompts),
        top_k=1,
    )


def _session_of(candidate: Candidate, *, strict_placement: bool) -> SessionInfo | None:
    """What runs; None where the engine does not open, which each decode then says for itself."""
    from harness.engines.placement import require_off_cpu

    try:
        info = candidate.info
    except EngineFailedError:
        return None
    if strict_placement:
        require_off_cpu(info)
    return info


def _require_drivable(model: Model, prompt: Prompt, result: GoldenResult) -> None:
    """See that no cache came back in a wrong shape from the candidate, or from it alone.

    Raises:
        NotDrivableError: it does from the oracle as well.
    """
    from harness.decode.trace import TraceFailure
    from harness.decode.wired import wired
    from harness.engines.registry import parse_engine
    from harness.parity.refusing import refusal_after

    if isinstance(result.failure, TraceFailure) and result.failure.ports:
        refusal = refusal_after(
            prompt.token_ids,
            result.token_ids,
            oracle=wired(parse_engine(ORACLE), model.decoder.conditioning.assembly.wiring),
            model=model.package.model,
            topology=model.decoder.topology,
            extra=prompt.extra,
        )
        if refusal is not None:
            raise refusal


def _error(golden: Golden, results: Sequence[GoldenResult], path: Path) -> dict[str, str] | None:
    """What the line on standard error says: how the engine failed, or why nothing is decided."""
    failure = next((each.failure for each in results if each.failure is not None), None)
    if failure is not None:
        return {
            "message": f"The engine {failure.kind}: {failure.message}",
            "next": "Run `onnx-parity check` to see what it decodes before.",
        }
    if golden.advisory:
        return {
            "message": f"{path}: the golden does not say of which model it is, so it decides nothing.",
            "next": "Record one of this model with `onnx-parity golden record`.",
        }
    return None


def _facts(path: Path, golden: Golden) -> dict[str, Any]:
    return {
        "path": str(path),
        "model": {"name": golden.model, "sha256": golden.sha256},
        "advisory": golden.advisory,
        "provenance": dict(golden.provenance),
    }


def _show(document: Mapping[str, Any], token_text: Callable[[int], str] | None) -> None:
    golden, model = document["golden"], document["model"]
    print_line(f"golden  {golden['path']}  of {golden['model']['name']}")
    print_line(f"model   {model['path']}  sha256 {model['sha256'][:12]}")
    for number, prompt in enumerate(document["prompts"], 1):
        expected, found, first = prompt["expected_ids"], prompt["token_ids"], prompt["first_difference"]
        if first is None:
            print_line(f"prompt {number}: {len(expected)} of {len(expected)} tokens as expected")
        else:
            wanted = _token(expected[first], token_text)
            given = _token(found[first], token_text) if first < len(found) else "nothing"
            print_line(f"prompt {number}: expected {wanted} at generated token {first}, and found {given}")
    print_line(f"outcome: {document['outcome']}")


def _token(token: int, token_text: Callable[[int], str] | None) -> str:
    return str(token) if token_text is None else f"{token} {token_text(token)!r}"
