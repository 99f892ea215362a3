"""Options that several verbs have, each group given to the verb as one value.

They stand below `harness.cli.output.reporting`, which reports what is wrong with their values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from harness.cli.process import deferred_interrupts
from harness.cli.prompting import PromptOptions
from harness.errors import InputError

if TYPE_CHECKING:
    from harness.engines.isolated.limits import Limits
    from harness.engines.registry import EngineSpec
    from harness.parity.reference import OracleMode

__all__ = [
    "ORACLE",
    "DecodeOptions",
    "OracleChoice",
    "Verb",
    "decode_options",
    "limit_options",
    "oracle_options",
    "report_option",
    "with_options",
]

ORACLE = "oracle"
"""The engine to trust where none is named."""

Verb: TypeAlias = Callable[..., int]
"""A verb, or what is to become one: takes options by name and returns the exit status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """What is to be decoded, and how far.

    Attributes:
        prompts: what to continue.
        inputs: of `--inputs`; None where it is not given.
        max_new_tokens: of `--max-new-tokens`; None where it is not given.
        stop_on_eos: whether the package's end-of-sequence token ends a decode.
        ignore_declared: whether the topology is derived whatever the sidecars say.
    """

    prompts: PromptOptions
    inputs: Path | None
    max_new_tokens: int | None
    stop_on_eos: bool
    ignore_declared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleChoice:
    """The engine to trust, and how it runs."""

    spec: EngineSpec
    mode: OracleMode


def decode_options(verb: Verb) -> Verb:
    """The options that say what is decoded; the verb gets them as `decode`."""

    @functools.wraps(verb)
    def wrapped(
        *,
        texts: tuple[str, ...],
        id_lists: tuple[str, ...],
        prompt_set: Path | None,
        chat: bool,
        inputs: Path | None,
        max_new_tokens: int | None,
        stop_on_eos: bool,
        ignore_declared: bool,
        **others: Any,
    ) -> int:
        return verb(
            decode=DecodeOptions(
                prompts=PromptOptions(texts=texts, id_lists=id_lists, file=prompt_set, chat=chat),
                inputs=inputs,
                max_new_tokens=max_new_tokens,
                stop_on_eos=stop_on_eos,
                ignore_declared=ignore_declared,
            ),
            **others,
        )

    return with_options(
        wrapped,
        click.option(
            "--prompt", "texts", multiple=True, metavar="TEXT", help="A text to continue. Repeatable."
        ),
        click.option(
            "--prompt-ids",
            "id_lists",
            multiple=True,
            metavar="1,2,3",
            help="Token IDs to continue. Repeatable.",
        ),
        click.option(
            "--prompts",
            "prompt_set",
            type=click.Path(path_type=Path),
            metavar="FILE.jsonl",
            help="A prompt a line: text, prompt_ids or messages.",
        ),
        click.option("--chat", is_flag=True, help="Put each text into the package's chat template."),
        click.option(
            "--inputs",
            type=click.Path(path_type=Path),
            metavar="FILE.npz",
            help="What the encoder takes, or would give, by name. [default: made up from a seed]",
        ),
        click.option(
            "--max-new-tokens", type=click.IntRange(min=1), help="Tokens to decode a prompt. [default: 16]"
        ),
        click.option("--stop-on-eos", is_flag=True, help="Stop at the package's end-of-sequence token."),
        click.option(
            "--ignore-declared", is_flag=True, help="Derive the topology whatever the sidecars say."
        ),
    )


def limit_options(verb: Verb) -> Verb:
    """The options that say what the engine under test may do.

    The verb gets them as `strict_placement` and `limits`, None where it runs in this process.
    """

    @functools.wraps(verb)
    def wrapped(
        *,
        in_process: bool,
        call_timeout: int | None,
        timeout: int | None,
        memory_limit: str | None,
        **others: Any,
    ) -> int:
        return verb(limits=_limits(in_process, call_timeout, timeout, memory_limit), **others)

    return with_options(
        wrapped,
        click.option(
            "--strict-placement", is_flag=True, help="Let no node of the engine under test run on the CPU."
        ),
        click.option(
            "--in-process",
            is_flag=True,
            help="Run the engine under test in this process, for debugging, without limits.",
        ),
        click.option(
            "--call-timeout",
            type=click.IntRange(0, 10**7),
            metavar="SECONDS",
            help="What one call of the engine under test may take; 0: no limit. [default: 600]",
        ),
        click.option(
            "--timeout",
            type=click.IntRange(0, 10**7),
            metavar="SECONDS",
            help="What all its calls together may take; 0: no limit. [default: 0]",
        ),
        click.option(
            "--memory-limit",
            metavar="SIZE",
            help="What it may hold, such as 4GiB. [default: nine tenths of what is free]",
        ),
    )


def oracle_options(verb: Verb) -> Verb:
    """The options that choose the oracle; the verb gets them as `oracle`."""

    @functools.wraps(verb)
    def wrapped(
        *, oracle_name: str, oracle_mode: OracleMode | None, rounding: str | None, **others: Any
    ) -> int:
        with deferred_interrupts():
            from harness.engines.registry import parse_engine
            from harness.parity.reference import Reference

        spec = _rounding(parse_engine(oracle_name), rounding)
        mode = Reference.check_mode(spec, oracle_mode)
        return verb(oracle=OracleChoice(spec=spec, mode=mode), **others)

    return with_options(
        wrapped,
        click.option(
            "--oracle",
            "oracle_name",
            metavar="ENGINE",
            default=ORACLE,
            show_default=True,
            help="Trusted engine.",
        ),
        click.option(
            "--oracle-mode",
            type=click.Choice(["one-pass", "stepwise"]),
            help="One forward pass over prompt and tokens, or a run for each token. [default: one-pass where "
            "the oracle can measure its own rounding]",
        ),
        click.option(
            "--rounding",
            type=click.Choice(["none", "model"]),
            help="none: the oracle computes in its own precision throughout; model: in steps, every value "
            "rounded to the type that the model declares. [default: none]",
        ),
    )


def report_option(verb: Verb) -> Verb:
    """Where the report goes; the verb gets it as `report_dir`."""

    @functools.wraps(verb)
    def wrapped(*, report_dir: Path | None, **others: Any) -> int:
        if report_dir is not None and not report_dir.name:
            raise InputError("--report-dir is empty.", next_action="Name a folder, or leave the option out.")
        return verb(report_dir=report_dir, **others)

    return with_options(
        wrapped,
        click.option(
            "--report-dir",
            type=click.Path(path_type=Path, file_okay=False),
            help="Where the report goes. [default: reports/<UTC time>-<package>]",
        ),
    )


def with_options(verb: Verb, *options: Callable[[Verb], Verb]) -> Verb:
    """The options on a verb, in the order in which its help shows them."""
    for option in reversed(options):
        verb = option(verb)
    return verb


def _limits(
    in_process: bool, call_timeout: int | None, timeout: int | None, memory_limit: str | None
) -> Limits | None:
    """What the candidate may take in a process of its own; None where it runs in ours."""
    with deferred_interrupts():
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
