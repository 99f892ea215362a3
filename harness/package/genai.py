"""The graphs that a `genai_config.json` of onnxruntime-genai names.

Version 1 names them under `model` (`decoder`, `embedding`, `encoder`, ...), a decoder in parts under
`model.decoder.pipeline`; version 2 under `pipeline.sessions`. Keys and defaults are those of its
`src/config.h` and of the configurations that its tests run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.errors import InputError, shown
from harness.package.components import (
    Component,
    Components,
    mapping_at,
    named_graph,
    refuse_doubled,
    section_at,
    undrivable,
)

__all__ = ["genai_components"]

_FILE = "genai_config.json"
_OTHERS = ("embedding", "encoder", "vision", "speech")
_DECODERS = ("decoder", "model", "text")
_PARTS = '[{"NAME": {"filename": "FILE.onnx"}}, ...]'
_TARGET_ALONE = "Name the graph of the target model to check it alone."


def genai_components(folder: Path, config: Mapping[str, Any]) -> Components | None:
    """The graphs that the configuration names; None where it names no decoder.

    Raises:
        InputError: a graph of the decoder is missing, a name is no name of a file in the package, two graphs
            have one name, one graph is listed twice, or a section has another form than that of the schema.
        NotDrivableError: the configuration is that of a transducer, or of a speculative pair.
    """
    found = _named(folder, config)
    if found is not None:
        refuse_doubled(folder, _FILE, found)
    return found


def _named(folder: Path, config: Mapping[str, Any]) -> Components | None:
    model = section_at(folder, _FILE, config, "model")
    _refuse_other_kinds(folder, config, model)
    sessions = section_at(folder, _FILE, config, "pipeline", "sessions")
    if sessions:
        return _of_sessions(folder, config, sessions)
    decoder = section_at(folder, _FILE, config, "model", "decoder")
    stages = tuple(_stages(folder, decoder))
    if not stages:
        named = decoder.get("filename")
        if named is None:
            return None
        place = f"{_FILE}: model.decoder.filename"
        stages = (Component("decoder", named_graph(folder, named, place=place)),)
    others = tuple(
        Component(
            name, _optional(folder, part["filename"], f"model.{name}.filename"), _aliases(part, decoder)
        )
        for name in _OTHERS
        if (part := section_at(folder, _FILE, config, "model", name)).get("filename") is not None
    )
    _refuse_one_name(folder, [part.name for part in (*stages, *others)])
    return Components(stages, others)


def _refuse_one_name(folder: Path, names: list[str]) -> None:
    """What a part hands on is known by the part's name, so that each has its own."""
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise InputError(
            f"{folder}: {_FILE} has two graphs of the name {shown(doubled)}, under model.decoder.pipeline "
            "or beside it.",
            next_action="Give each part of the decoder a name of its own.",
        )


def _of_sessions(folder: Path, config: Mapping[str, Any], sessions: Mapping[str, Any]) -> Components | None:
    files = {
        name: section_at(folder, _FILE, config, "pipeline", "sessions", name).get("file") for name in sessions
    }
    decoder = next((name for name in _DECODERS if files.get(name) is not None), None)
    if decoder is None:
        return None
    place = f"{_FILE}: pipeline.sessions.{decoder}.file"
    return Components(
        (Component(decoder, named_graph(folder, files[decoder], place=place)),),
        tuple(
            Component(name, _optional(folder, file, f"pipeline.sessions.{name}.file"))
            for name, file in files.items()
            if name != decoder and file is not None
        ),
    )


def _stages(folder: Path, decoder: Mapping[str, Any]) -> Iterator[Component]:
    """The parts of a decoder: a list of mappings from a part's name to what it is.

    onnxruntime-genai takes no other form either.
    """
    pipeline = decoder.get("pipeline")
    if pipeline is None:
        return
    place = "model.decoder.pipeline"
    if not isinstance(pipeline, list):
        raise _no_parts(folder, f"{place} is {shown(pipeline)}")
    for index, entry in enumerate(pipeline):
        if not isinstance(entry, Mapping):
            raise _no_parts(folder, f"{place}[{index}] is {shown(entry)}")
        for name, stage in entry.items():
            if not isinstance(stage, Mapping):
                raise _no_parts(folder, f"{place}[{index}].{name} is {shown(stage)}")
            at = f"{place}.{name}"
            forwarded = section_at(folder, _FILE, stage, "output_names_forwarder")
            yield Component(
                str(name),
                named_graph(folder, stage.get("filename"), place=f"{_FILE}: {at}.filename"),
                tuple((str(own), str(other)) for own, other in forwarded.items()),
                on_prompt=_runs(folder, stage, "run_on_prompt", at),
                on_steps=_runs(folder, stage, "run_on_token_gen", at),
            )


def _no_parts(folder: Path, what: str) -> InputError:
    return InputError(
        f"{folder / _FILE}: {what}; a list of mappings is due, from the name of a part to what it is.",
        next_action=f"Write {_PARTS}, or leave it out and give model.decoder.filename.",
    )


def _runs(folder: Path, stage: Mapping[str, Any], key: str, place: str) -> bool:
    """Whether a part runs at such calls; it does where nothing is said."""
    value = stage.get(key, True)
    if not isinstance(value, bool):
        raise InputError(
            f"{folder / _FILE}: {place}.{key} is {shown(value)}; true or false is due.",
            next_action="Correct the file.",
        )
    return value


def _aliases(part: Mapping[str, Any], decoder: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What the decoder calls the outputs of another graph."""
    outputs, inputs = mapping_at(part, "outputs"), mapping_at(decoder, "inputs")
    pairs = (
        (("inputs_embeds", "embeddings"), ("inputs_embeds", "embeddings"), "inputs_embeds"),
        (
            ("encoder_hidden_states", "hidden_states", "encoder_outputs"),
            ("encoder_hidden_states",),
            "encoder_hidden_states",
        ),
        (("cross_present_key_names",), ("cross_past_key_names",), None),
        (("cross_present_value_names",), ("cross_past_value_names",), None),
    )
    found = []
    for own_keys, other_keys, default in pairs:
        own = next((outputs[key] for key in own_keys if isinstance(outputs.get(key), str)), None)
        other = next((inputs[key] for key in other_keys if isinstance(inputs.get(key), str)), default)
        if own is not None and other is not None and own != other:
            found.append((own, other))
    return tuple(found)


def _optional(folder: Path, named: object, key: str) -> Path:
    return named_graph(folder, named, place=f"{_FILE}: {key}", must_exist=False)


def _refuse_other_kinds(folder: Path, config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    kind = model.get("type")
    transducer = isinstance(kind, str) and any(word in kind for word in ("transducer", "rnnt", "tdt"))
    if mapping_at(model, "joiner") or mapping_at(model, "decoder", "joiner") or transducer:
        raise undrivable(
            folder,
            "a transducer: it emits by frames of its input, and not token after token",
            instead="Check a decoder that takes tokens and gives the logits of the next one.",
        )
    if mapping_at(config, "pipeline", "strategy").get("kind") == "speculative":
        raise undrivable(
            folder, "a speculative pair: a draft proposes, and its target verifies", instead=_TARGET_ALONE
        )
