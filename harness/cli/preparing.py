"""From what a user names to what can be decoded: the model opened and hashed, prompts encoded, engines found.

Whatever is wrong with the input is said here, before anything is opened on an engine or written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli.output import report_warning
from harness.cli.planning import derive_decoder, plan_decoder
from harness.cli.process import deferred_interrupts
from harness.cli.prompting import encode_prompts, requested_prompts
from harness.cli.source import find_package
from harness.errors import EngineUnavailableError, InputError, NotDrivableError, ParityError

if TYPE_CHECKING:
    from harness.cli.options import DecodeOptions
    from harness.cli.planning import Decoder
    from harness.engines.base import OptionValue
    from harness.engines.registry import EngineSpec
    from harness.models.builtin import BuiltinPackage
    from harness.package import Package
    from harness.parity.candidate import Prompt
    from harness.topology.spec import Refusal

__all__ = [
    "Model",
    "RefusedError",
    "Task",
    "all_options",
    "check_fit",
    "check_independent",
    "check_target",
    "failure_fields",
    "open_model",
    "plan_task",
    "usable_engine",
]

_DEFAULT_NEW_TOKENS = 16
_SEED = 0


class RefusedError(ParityError):
    """The topology is refused or declined; carries the refusal into the report."""

    exit_code = 3

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(
            f"{refusal.code}: {refusal.message}",
            next_action="Declare what it asks for in inference_metadata.yaml, or correct the export.",
        )
        self.refusal = refusal


def _refusal(error: ParityError) -> dict[str, Any] | None:
    """The field `refusal` of a document; None for an error that is no refusal."""
    if isinstance(error, RefusedError):
        r = error.refusal
        return {"code": r.code, "also": list(r.also), "message": r.message, "ports": list(r.ports)}
    if isinstance(error, NotDrivableError):
        return dict(error.refusal)
    return None


def failure_fields(error: ParityError) -> dict[str, Any]:
    """The fields `exit_code`, `error` and `refusal` of a document of what could not be done.

    A refusal says what to do in its message, so there is no error beside it.
    """
    refusal = _refusal(error)
    return {
        "exit_code": error.exit_code,
        "error": None if refusal else {"message": error.message, "next": error.next_action},
        "refusal": refusal,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A package whose decoder can be driven.

    Attributes:
        asked: what the user named.
        package: as it lies there.
        builtin: what comes with the command; None for a package of the user's.
        outcome: `derived` or `declared`.
        decoder: its topology and graphs.
        sha256: over its graphs and their external files.
    """

    asked: str
    package: Package
    builtin: BuiltinPackage | None
    outcome: str
    decoder: Decoder
    sha256: str

    @property
    def name(self) -> str:
        """How reports name it: its path, or the name of a built-in package, the same on every machine."""
        return str(self.package.model) if self.builtin is None else self.builtin.name

    @property
    def label(self) -> str:
        """What it is called, on whatever machine: the name of its folder, or of a built-in package."""
        return self.package.folder.resolve().name if self.builtin is None else self.builtin.name

    def token_text(self) -> Callable[[int], str] | None:
        """What a token reads as; None for a package without a tokenizer."""
        folder = self.package.folder
        if self.package.tokenizer is None:
            return None
        from harness.decode.prompts import decode_tokens

        return lambda token: decode_tokens(folder, (token,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be decoded; fields as in `harness.parity.check.CheckPlan`."""

    prompts: tuple[Prompt, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]


def open_model(name: str, *, ignore_declared: bool, inputs: Path | None = None) -> Model:
    """Find a package, derive its topology and hash it.

    Args:
        name: a path or the name of a built-in package.
        ignore_declared: derive the topology whatever the sidecars say.
        inputs: `.npz` with what the encoder takes, or would give; None to make it up.

    Raises:
        InputError: it cannot be read, lacks a file, or is an encoder without its decoder.
        RefusedError: the topology is refused or declined.
        NotDrivableError: it cannot be driven here.
    """
    from harness.decode.parts import refuse_encoder_alone
    from harness.models.builtin import cache_dir
    from harness.package import model_files, model_sha256

    package, builtin = find_package(name)
    for part in package.components.decoder:
        model_files(part.graph)  # what is missing or outside the package is found here
    derivation = derive_decoder(package, ignore_declared=ignore_declared)
    if derivation.topology is None:
        refuse_encoder_alone(package)
        assert derivation.refusal is not None
        raise RefusedError(derivation.refusal)
    decoder = plan_decoder(package, derivation.topology, inputs=inputs, seed=_SEED)
    return Model(
        asked=name,
        package=package,
        builtin=builtin,
        outcome=derivation.outcome.value,
        decoder=decoder,
        sha256=model_sha256(*decoder.graphs, cache=cache_dir()),
    )


def plan_task(model: Model, options: DecodeOptions) -> Task:
    """Encode the prompts, and see that they can be fed.

    Raises:
        InputError: a prompt cannot be encoded or has no room, or the package names no end of sequence that
            its decoder can give.
        NotDrivableError: the loop cannot feed this graph.
    """
    from harness.decode.prompts import vocabulary_size

    decoder = model.decoder
    vocabulary = vocabulary_size(decoder.inventory, decoder.topology)
    prompts = encode_prompts(
        requested_prompts(options.prompts, model.package, model.builtin, conditioning=decoder.conditioning),
        model.package,
        chat=options.prompts.chat,
        vocabulary=vocabulary,
        conditioning=decoder.conditioning,
    )
    task = Task(
        prompts=prompts,
        max_new_tokens=options.max_new_tokens
        or (model.builtin.max_new_tokens if model.builtin else _DEFAULT_NEW_TOKENS),
        stop_ids=_stop_ids(model.package, vocabulary) if options.stop_on_eos else (),
    )
    check_fit(decoder, prompts, task.max_new_tokens)
    return task


def check_fit(decoder: Decoder, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """See that every prompt can be fed, that a cache of fixed size has room for it, and tables have its rows.

    A declared length that the graph goes beyond is a warning.

    Raises:
        InputError: there is no room, or a token ID or a position has no row.
        NotDrivableError: the loop cannot feed this graph.
    """
    from harness.decode.feeds import plan_feeds

    warnings = []
    for prompt in sorted(prompts, key=lambda prompt: len(prompt.token_ids)):
        feeds = plan_feeds(decoder.topology, decoder.inventory, extra=prompt.extra)
        feeds.check_room(len(prompt.token_ids), max_new_tokens)
        warnings.append(
            decoder.reach.check(feeds, str(decoder.topology.token_input), prompt.token_ids, max_new_tokens)
        )
    for warning in filter(None, warnings[-1:]):
        report_warning(warning)


def check_target(path: Path) -> None:
    """See that a file can be written to `path` (of `-o`), before anything is decoded for it.

    Raises:
        InputError: it is a folder, or lies in none.
    """
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"lies in {path.parent}, which is no folder"
        raise InputError(f"-o {path} {reason}.", next_action="Name a file in a folder that is there.")


def usable_engine(spec: EngineSpec | None) -> EngineSpec:
    """The engine asked for if it can be used here; the default candidate where none was asked for.

    Raises:
        EngineUnavailableError: it cannot be used here, with the reason.
    """
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


_COMPUTES_THE_SAME = frozenset({"threads", "device"})
"""Options that say where and how fast something is computed, and not what."""


def check_independent(
    candidate: str, options: Mapping[str, OptionValue], oracle: EngineSpec, *, next_action: str
) -> None:
    """Refuse an engine that is to be its own oracle.

    Args:
        candidate: name of the engine under test.
        options: of it; what is not there has its default.
        oracle: what is to judge it.
        next_action: what to do instead.

    Raises:
        InputError: both are the same engine, with the same options but for those that change nothing of what
            is computed.
    """
    if candidate != oracle.name:
        return
    known = oracle.engine.options  # of both, as they are the same engine; what is not said has its default
    trusted = all_options(oracle)
    differing = sorted(name for name in known if options.get(name, known[name].default) != trusted[name])
    if _COMPUTES_THE_SAME.issuperset(differing):
        but = (
            f" but for {', '.join(differing)}, which changes nothing of what is computed" if differing else ""
        )
        raise InputError(
            f"Candidate and oracle are both {candidate} with the same options{but}: they would agree "
            "whatever they compute.",
            next_action=next_action,
        )


def all_options(spec: EngineSpec) -> Mapping[str, OptionValue]:
    """Every option of an engine with its value, given or default."""
    from harness.engines.options import complete

    return complete(spec.name, spec.engine.options, spec.options)


def _stop_ids(package: Package, vocabulary: int | None) -> tuple[int, ...]:
    ids = package.eos_token_ids()
    beyond = [id_ for id_ in ids if vocabulary is not None and id_ >= vocabulary]
    if beyond and vocabulary is not None:
        raise InputError(
            f"{package.folder}: --stop-on-eos would wait for eos_token_id {beyond[0]}, and the model knows 0 "
            f"to {vocabulary - 1}: it is that of another model.",
            next_action="Leave the option out, or correct the file of the package that names it.",
        )
    if not ids:
        raise InputError(
            f"{package.folder}: --stop-on-eos needs an eos_token_id, and no file of the package names one.",
            next_action="Leave the option out, or add generation_config.json with eos_token_id.",
        )
    return ids
