"""`--source`: the model that a package was exported from, as a third witness of a check."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.options import Verb, with_options
from harness.cli.output import report_warning
from harness.cli.preparing import usable_engine
from harness.cli.process import deferred_interrupts
from harness.errors import InputError, shown
from harness.package.reading import is_there, read_json

if TYPE_CHECKING:
    from harness.cli.preparing import Model
    from harness.engines.registry import EngineSpec
    from harness.package import Package
    from harness.parity.source import SourcePlan

__all__ = ["SourceChoice", "plan_source", "source_options"]

_DEFAULT_ENGINE = "hf"
_TOKENIZER = "tokenizer.json"
_CONFIG = "config.json"
_WRITTEN_BY = "transformers_version"
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
"""What no exporter changes. The number of tokens is compared with the logits themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceChoice:
    """The folder of the source model, and what runs it."""

    folder: Path
    spec: EngineSpec


def source_options(verb: Verb) -> Verb:
    """The options that name the source model; the verb gets them as `source`, None where there is none."""

    @functools.wraps(verb)
    def wrapped(*, source_folder: Path | None, source_engine: str | None, **others: Any) -> int:
        return verb(source=_choice(source_folder, source_engine), **others)

    return with_options(
        wrapped,
        click.option(
            "--source",
            "source_folder",
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="The transformers model that PACKAGE was exported from: tells an exporter's fault from a "
            "runtime's.",
        ),
        click.option(
            "--source-engine",
            metavar="ENGINE",
            help=f"What runs it, such as {_DEFAULT_ENGINE}:precision=float64. [default: {_DEFAULT_ENGINE}]",
        ),
    )


def plan_source(choice: SourceChoice, model: Model) -> SourcePlan:
    """See that the source can speak of this package; it is opened later, in a process of its own if possible.

    Raises:
        EngineUnavailableError: what runs it is not installed.
        InputError: there is no such folder, its tokenizer has other tokens than that of the package, its
            config other sizes, or the package's decoder goes by an encoder.
    """
    from harness.decode.prompts import vocabulary_size
    from harness.engines.isolated.engine import can_isolate, isolated
    from harness.engines.isolated.limits import Limits, most_memory
    from harness.parity.source import SourcePlan

    spec, folder = usable_engine(choice.spec), choice.folder
    if not folder.is_dir():
        raise InputError(
            f"--source {folder}: no such folder.",
            next_action="Name the folder of the model that was exported, with config.json and safetensors.",
        )
    if model.decoder.conditioning.assembly.given:
        raise InputError(
            f"--source: the decoder of {model.package.folder} goes by an encoder, and only decoders that "
            "stand alone are compared with their source.",
            next_action="Leave --source out.",
        )
    if model.package.tokenizer is not None and (folder / _TOKENIZER).is_file():
        _check_same_tokens(model.package.folder, folder)
    _check_same_model(model.package, folder)
    if spec.engine.name == _DEFAULT_ENGINE:
        _warn_of_another_version(folder)
    if can_isolate():
        # How long a source may take is nobody's finding, but it shall not take the memory of the others.
        spec = isolated(spec, Limits(call_seconds=None, memory_bytes=most_memory()))
    decoder = model.decoder
    vocabulary = vocabulary_size(decoder.inventory, decoder.topology)
    return SourcePlan(spec=spec, folder=folder, vocabulary=vocabulary)


def _choice(folder: Path | None, engine: str | None) -> SourceChoice | None:
    if folder is None:
        if engine is not None:
            raise InputError(
                f"--source-engine {engine} has no source model to run.",
                next_action="Name the folder of the model with --source DIR, or leave it out.",
            )
        return None
    with deferred_interrupts():
        from harness.engines.registry import parse_engine

    return SourceChoice(folder=folder, spec=parse_engine(engine or _DEFAULT_ENGINE))


def _check_same_model(package: Package, source: Path) -> None:
    """Refuse a source of other sizes than those in the package's own config, and warn where the types differ.

    Some exporters write another type for what is the same model, such as that of the text part alone.
    """
    configs = package.config(_CONFIG), _config_of(source)
    ours, theirs = map(_of_text, configs)
    for size in _SIZES:
        if None not in (ours.get(size), theirs.get(size)) and ours[size] != theirs[size]:
            raise InputError(
                f"--source {source}: its {_CONFIG} has {size} {shown(theirs[size])}, and that of the package "
                f"{shown(ours[size])}: it is not what the package was exported from.",
                next_action="Name the folder of the model that was exported.",
            )
    our_type, their_type = (config.get("model_type") for config in configs)
    if isinstance(our_type, str) and isinstance(their_type, str) and our_type != their_type:
        report_warning(
            f"--source {source} is of the type {their_type}, and the package of the type {our_type}, as each "
            f"{_CONFIG} has it: see that it is the model that was exported."
        )


def _warn_of_another_version(source: Path) -> None:
    """Say that another version of transformers wrote the source than runs it, which may compute otherwise.

    Versions that differ in their last number alone correct faults.
    """
    written = _config_of(source).get(_WRITTEN_BY)
    with contextlib.suppress(metadata.PackageNotFoundError):
        installed = metadata.version("transformers")
        if isinstance(written, str) and written.split(".")[:2] != installed.split(".")[:2]:
            report_warning(
                f"--source {source} was written by transformers {written} ({_CONFIG}), and {installed} runs "
                "it: where they differ, so may what each makes of the weights."
            )


def _config_of(source: Path) -> Mapping[str, Any]:
    """The config of a source; an empty one where it cannot be read, which is said when it is opened."""
    with contextlib.suppress(InputError):
        if is_there(source / _CONFIG):
            return read_json(source / _CONFIG)
    return {}


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of the part that decodes text."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def _check_same_tokens(package: Path, source: Path) -> None:
    """Refuse a source whose tokens are others: an ID would mean one thing to it and another to the package.

    A token that one of them lacks is no contradiction: exporters leave out added ones.
    """
    from harness.decode.prompts import tokens_of

    ours, theirs = tokens_of(package), tokens_of(source)
    both = [(token, id_, theirs[token]) for token, id_ in ours.items() if theirs.get(token, id_) != id_]
    text, named = _inverse(ours), _inverse(theirs)
    other = [id_ for id_ in text if named.get(id_, text[id_]) != text[id_]]
    if not (both or other):
        return
    if other:
        first = min(other)
        what = f"token {first} is {named[first]!r} there, and {text[first]!r} in the package"
    else:
        token, ours_id, theirs_id = min(both, key=lambda each: each[1])
        what = f"{token!r} is token {theirs_id} there, and {ours_id} in the package"
    raise InputError(
        f"--source {source}: {what}: it is the model of another {_TOKENIZER}.",
        next_action="Name the folder of the model that was exported.",
    )


def _inverse(tokens: Mapping[str, int]) -> dict[int, str]:
    return {id_: token for token, id_ in tokens.items()}
