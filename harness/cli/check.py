"""`onnx-parity check`: the main job."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.output import json_option, print_json_line, report_error, reporting
from harness.cli.planning import derive_decoder, plan_decoder
from harness.cli.process import deferred_interrupts
from harness.cli.prompting import PromptOptions, encode_prompts, requested_prompts
from harness.cli.source import find_package
from harness.errors import EngineUnavailableError, InputError, NotDrivableError, ParityError
from harness.events import CheckFinished, Event

if TYPE_CHECKING:
    from harness.engines.base import OptionValue
    from harness.engines.isolated.limits import Limits
    from harness.engines.registry import EngineSpec
    from harness.models.builtin import BuiltinPackage
    from harness.package import Package
    from harness.parity.check import CheckPlan
    from harness.parity.reference import OracleMode
    from harness.topology.spec import Refusal

__all__ = ["command", "failure_document"]

_DEFAULT_NEW_TOKENS = 16
_SEED = 0


class _RefusedError(ParityError):
    """The topology is refused or declined; carries the refusal into the report."""

    exit_code = 3

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(
            f"{refusal.code}: {refusal.message}",
            next_action="Declare what it asks for in inference_metadata.yaml, or correct the export.",
        )
        self.refusal = refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What the user asked for, with the package opened."""

    name: str
    package: Package
    builtin: BuiltinPackage | None
    prompts: PromptOptions
    inputs: Path | None
    max_new_tokens: int | None
    stop_on_eos: bool
    ignore_declared: bool
    strict_placement: bool
    candidate: EngineSpec | None
    limits: Limits | None
    oracle: EngineSpec
    oracle_mode: OracleMode


class _EndError(ParityError):
    """What ended a check, for the line on standard error."""

    def __init__(self, end: CheckFinished) -> None:
        error = end.error or {}
        super().__init__(error.get("message", ""), next_action=error.get("next", ""))


def failure_document(error: ParityError) -> Mapping[str, Any]:
    """The parity document of a check that could not begin."""
    from harness.report.document import ParityDocument

    refusal: dict[str, Any] | None = None
    if isinstance(error, _RefusedError):
        r = error.refusal
        refusal = {"code": r.code, "also": list(r.also), "message": r.message, "ports": list(r.ports)}
    elif isinstance(error, NotDrivableError):
        refusal = {"code": error.code, "also": [], "message": error.message, "ports": list(error.ports)}
    document = ParityDocument()
    document(
        CheckFinished(
            verdict=None,
            exit_code=error.exit_code,
            error=None if refusal else {"message": error.message, "next": error.next_action},
            refusal=refusal,
            interrupted=error.exit_code == 130,
        )
    )
    return document.mapping()


@click.command("check")
@click.argument("package", default="demo")
@click.option("--candidate", metavar="ENGINE", help="Engine under test, such as ort-cpu:threads=1.")
@click.option(
    "--oracle", "oracle_name", metavar="ENGINE", default="oracle", show_default=True, help="Trusted engine."
)
@click.option(
    "--oracle-mode",
    type=click.Choice(["one-pass", "stepwise"]),
    help="One forward pass over prompt and tokens, or a run for each token. [default: one-pass where the "
    "oracle can measure its own rounding]",
)
@click.option(
    "--rounding",
    type=click.Choice(["none", "model"]),
    help="none: the oracle computes in its own precision throughout; model: in steps, every value rounded to "
    "the type that the model declares. [default: none]",
)
@click.option("--prompt", "texts", multiple=True, metavar="TEXT", help="A text to continue. Repeatable.")
@click.option(
    "--prompt-ids", "id_lists", multiple=True, metavar="1,2,3", help="Token IDs to continue. Repeatable."
)
@click.option(
    "--prompts",
    "prompt_set",
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help="A prompt a line: text, prompt_ids or messages.",
)
@click.option("--chat", is_flag=True, help="Put each text into the package's chat template.")
@click.option(
    "--inputs",
    type=click.Path(path_type=Path),
    metavar="FILE.npz",
    help="What the encoder takes, or would give, by name. [default: made up from a seed]",
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Tokens to decode a prompt. [default: 16]")
@click.option("--stop-on-eos", is_flag=True, help="Stop at the package's end-of-sequence token.")
@click.option("--ignore-declared", is_flag=True, help="Derive the topology whatever the sidecars say.")
@click.option("--strict-placement", is_flag=True, help="Let no node of the candidate run on the CPU.")
@click.option(
    "--in-process", is_flag=True, help="Run the candidate in this process, for debugging, without limits."
)
@click.option(
    "--call-timeout",
    type=click.IntRange(0, 10**7),
    metavar="SECONDS",
    help="What one call of the candidate may take; 0: no limit. [default: 600]",
)
@click.option(
    "--timeout",
    type=click.IntRange(0, 10**7),
    metavar="SECONDS",
    help="What all calls of the candidate together may take; 0: no limit. [default: 0]",
)
@click.option(
    "--memory-limit",
    metavar="SIZE",
    help="What the candidate may hold, such as 4GiB. [default: nine tenths of what is free]",
)
@click.option(
    "--report-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where parity.json goes. [default: reports/<UTC time>-<package>]",
)
@json_option
@reporting(failure_document)
def command(
    package: str,
    candidate: str | None,
    oracle_name: str,
    oracle_mode: OracleMode | None,
    rounding: str | None,
    texts: tuple[str, ...],
    id_lists: tuple[str, ...],
    prompt_set: Path | None,
    chat: bool,
    inputs: Path | None,
    max_new_tokens: int | None,
    stop_on_eos: bool,
    ignore_declared: bool,
    strict_placement: bool,
    in_process: bool,
    call_timeout: int | None,
    timeout: int | None,
    memory_limit: str | None,
    report_dir: Path | None,
    as_json: bool,
) -> int:
    """Decode PACKAGE on a candidate engine and compare every token with the oracle.

    PACKAGE is a model directory, an .onnx file (taken for itself, without sidecars), or a built-in name:
    demo, demo-ops, smollm2, smollm2-int4. Built-in packages bring their own prompts and length.
    """
    with deferred_interrupts():
        from rich.console import Console

        import harness.oracle  # noqa: F401 (numpy and onnx with it, where Ctrl-C cannot break them)
        from harness.engines.registry import parse_engine
        from harness.parity.check import run_check
        from harness.parity.reference import Reference
        from harness.report.console import ProgressReporter, render_report
        from harness.report.document import ParityDocument
        from harness.report.writer import ReportWriter

    if report_dir is not None and not report_dir.name:
        raise InputError("--report-dir is empty.", next_action="Name a folder, or leave the option out.")
    say = Console(stderr=True)
    # Names and options first: a misspelt engine is found before a package is written or read.
    candidate_spec = parse_engine(candidate) if candidate is not None else None
    oracle_spec = _rounding(parse_engine(oracle_name), rounding)
    limits = _limits(in_process, call_timeout, timeout, memory_limit)
    found, builtin = find_package(package)
    plan = _plan(
        _Request(
            name=package,
            package=found,
            builtin=builtin,
            prompts=PromptOptions(texts=texts, id_lists=id_lists, file=prompt_set, chat=chat),
            inputs=inputs,
            max_new_tokens=max_new_tokens,
            stop_on_eos=stop_on_eos,
            ignore_declared=ignore_declared,
            strict_placement=strict_placement,
            candidate=candidate_spec,
            limits=limits,
            oracle=oracle_spec,
            oracle_mode=Reference.check_mode(oracle_spec, oracle_mode),
        )
    )
    document = ParityDocument()
    folder = report_dir or _default_report_dir(package)
    writer = ReportWriter(folder, document, fresh=report_dir is None)
    progress = ProgressReporter(say)

    def emit(event: Event) -> None:
        for sink in (document, writer, progress):
            sink(event)

    try:
        end = run_check(plan, emit)
    finally:
        progress.close()
    if end.error is not None:
        report_error(_EndError(end))
    if as_json:
        print_json_line(document.mapping())
    elif writer.path is not None:
        Console().print(render_report(document.mapping(), token_text=_token_text(found)))
    if writer.path is not None:
        say.print(f"report: {writer.path}", style="dim", markup=False, highlight=False, soft_wrap=True)
    return end.exit_code


def _rounding(oracle: EngineSpec, rounding: str | None) -> EngineSpec:
    """The oracle with its option `rounding` set; as it is where none was asked for."""
    if rounding is None:
        return oracle
    if "rounding" not in oracle.engine.options:
        raise InputError(
            f"--rounding {rounding}: {oracle.name} has no option rounding.",
            next_action="Leave --rounding out, or use --oracle oracle.",
        )
    given = oracle.options.get("rounding", rounding)
    if given != rounding:
        raise InputError(
            f"--rounding {rounding} contradicts --oracle {oracle.name}:rounding={given}.",
            next_action="Say it once.",
        )
    return replace(oracle, options={**oracle.options, "rounding": rounding})


def _limits(
    in_process: bool, call_timeout: int | None, timeout: int | None, memory_limit: str | None
) -> Limits | None:
    """What the candidate may take in a process of its own; None where it runs in ours."""
    from harness.engines.isolated.engine import can_isolate
    from harness.engines.isolated.limits import Limits, most_memory, read_memory

    given = {"--call-timeout": call_timeout, "--timeout": timeout, "--memory-limit": memory_limit}
    named = [name for name, value in given.items() if value is not None]
    if named and in_process:
        raise InputError(
            f"{named[0]} needs a process that can be ended, and --in-process asks for none.",
            next_action="Leave one of them out.",
        )
    if named and not can_isolate():
        raise InputError(
            f"{named[0]} needs a process of its own for the candidate, which this system does not allow.",
            next_action="Leave it out, or run the check on Linux or macOS.",
        )
    if in_process or not can_isolate():
        return None
    most = most_memory() if memory_limit is None else read_memory(memory_limit)
    if most is None:
        raise InputError(
            f"--memory-limit {memory_limit!r} is no size.", next_action="Write, for example, 4GiB or 512M."
        )
    call = Limits().call_seconds if call_timeout is None else call_timeout
    return Limits(call_seconds=call or None, run_seconds=timeout or None, memory_bytes=most)


def _usable(spec: EngineSpec | None) -> EngineSpec:
    """The engine asked for if it can be used here; the default candidate where none was asked for."""
    from harness.engines.registry import EngineSpec, default_candidate

    with deferred_interrupts():  # looking whether an engine is there imports its runtime
        if spec is None:
            return EngineSpec(default_candidate(), {})
        state = spec.engine.availability()
    if not state.usable:
        raise EngineUnavailableError(
            f"{spec.name} is not usable here: {state.reason}",
            next_action=state.next_action or "See `onnx-parity engines`.",
        )
    return spec


def _plan(request: _Request) -> CheckPlan:
    from harness.decode.feeds import plan_feeds
    from harness.decode.prompts import vocabulary_size
    from harness.decode.wired import wired
    from harness.engines.isolated.engine import isolated, process_of
    from harness.models.builtin import cache_dir
    from harness.package import model_files, model_sha256
    from harness.parity.check import CheckPlan

    package, builtin = request.package, request.builtin
    for part in package.components.decoder:
        model_files(part.graph)  # what is missing or outside the package is found here
    derivation = derive_decoder(package, ignore_declared=request.ignore_declared)
    if derivation.topology is None:
        assert derivation.refusal is not None
        raise _RefusedError(derivation.refusal)
    decoder = plan_decoder(package, derivation.topology, inputs=request.inputs, seed=_SEED)
    sha256 = model_sha256(*decoder.graphs, cache=cache_dir())
    prompts = encode_prompts(
        requested_prompts(request.prompts, package, builtin, conditioning=decoder.conditioning),
        package,
        chat=request.prompts.chat,
        vocabulary=vocabulary_size(decoder.inventory, decoder.topology),
        conditioning=decoder.conditioning,
    )
    stop_ids = _stop_ids(package) if request.stop_on_eos else ()
    max_new_tokens = request.max_new_tokens or (builtin.max_new_tokens if builtin else _DEFAULT_NEW_TOKENS)
    # What cannot be fed, and what a cache has no room for, is said before anything is opened.
    for prompt in prompts:
        feeds = plan_feeds(decoder.topology, decoder.inventory, extra=prompt.extra)
        feeds.check_room(len(prompt.token_ids), max_new_tokens)
    candidate, oracle = _usable(request.candidate), _usable(request.oracle)
    if candidate.name == oracle.name and _settings(candidate) == _settings(oracle):
        raise InputError(
            f"Candidate and oracle are both {candidate.name} with the same options: they would agree "
            "whatever they compute.",
            next_action="Name another engine with --candidate or --oracle.",
        )
    if request.limits is not None:
        candidate = isolated(candidate, request.limits)
    candidate_process = process_of(candidate)
    wiring = decoder.conditioning.assembly.wiring
    candidate, oracle = wired(candidate, wiring), wired(oracle, wiring)
    return CheckPlan(
        package=request.name,
        model=package.model,
        model_name=str(package.model) if builtin is None else builtin.name,
        model_sha256=sha256,
        topology=decoder.topology,
        topology_outcome=derivation.outcome.value,
        candidate=candidate,
        oracle=oracle,
        oracle_mode=request.oracle_mode,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        candidate_process=candidate_process,
        strict_placement=request.strict_placement,
    )


def _settings(spec: EngineSpec) -> Mapping[str, OptionValue]:
    """Every option with its value, given or default."""
    from harness.engines.options import complete

    return complete(spec.name, spec.engine.options, spec.options)


def _stop_ids(package: Package) -> tuple[int, ...]:
    ids = package.eos_token_ids()
    if not ids:
        raise InputError(
            f"{package.folder}: --stop-on-eos needs an eos_token_id, and no file of the package names one.",
            next_action="Leave the option out, or add generation_config.json with eos_token_id.",
        )
    return ids


def _token_text(package: Package) -> Callable[[int], str] | None:
    if package.tokenizer is None:
        return None
    from harness.decode.prompts import decode_tokens

    return lambda token: decode_tokens(package.folder, (token,))


def _default_report_dir(package: str) -> Path:
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(package).absolute().name[:80]).strip("-.") or "package"
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path("reports") / f"{stamp}-{label}"
