"""Between plain mappings and topologies: the `io` block of inference metadata, and `derive --json`.

Nothing here reads or writes files; `harness.package` does. The fields of the block are those of the
published schema of ONNX inference metadata (onnx-genai, `model.io`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from harness.topology.mappings import known_keys, mapping, misfit, optional_string, section, string, strings
from harness.topology.spec import Derivation, Role, StatePair, Topology
from harness.topology.workflow import io_of_workflow

__all__ = [
    "DERIVATION_SCHEMA",
    "DeclaredIo",
    "STATIC_CACHE_LISTS",
    "STATIC_CACHE_PORTS",
    "declared_io_of",
    "derivation_document",
    "io_block",
    "read_io_block",
]

DERIVATION_SCHEMA = "onnx-parity/derivation/1"

_SINGLE_FIELDS = {
    "token_input": Role.TOKEN,
    "inputs_embeds_input": Role.EMBEDS,
    "attention_mask_input": Role.ATTENTION_MASK,
    "position_ids_input": Role.POSITION_IDS,
    "encoder_hidden_states_input": Role.ENCODER_HIDDEN_STATES,
    "logits_output": Role.LOGITS,
}
_AUXILIARY_FIELDS: Mapping[str, Literal["input", "output"]] = {
    "audio_features_input": "input",
    "hidden_output": "output",
}
"""Ports that the published block names and a decode has no use for."""
_MANNERS = ("aliasing", "kv_layout", "kv_ownership", "kv_update", "sequence_source")
"""Keys of the published block that name no port: they say how a runtime may go about it."""
_PORT_LISTS: Mapping[str, Literal["input", "output"]] = {"inputs": "input", "outputs": "output"}
"""Ports as an exporter lists them, each with its name, dtype, rank and shape, and without a role."""
_PORT_FIELDS = ("name", "dtype", "rank", "shape")
_LIST_FIELDS = ("kv_inputs", "kv_outputs", "cross_kv_inputs", "cross_kv_outputs")
STATIC_CACHE_PORTS = ("write_indices_input", "kv_sequence_length_input")
STATIC_CACHE_LISTS = ("key_cache_inputs", "value_cache_inputs", "key_cache_outputs", "value_cache_outputs")
_PAIR_FIELDS = ("input", "output", "init", "update")
_KNOWN_FIELDS = (
    *_SINGLE_FIELDS,
    *_LIST_FIELDS,
    *_AUXILIARY_FIELDS,
    *_MANNERS,
    *_PORT_LISTS,
    "state_pairs",
    "optional_inputs",
    "static_cache",
)


@dataclass(frozen=True, slots=True)
class DeclaredIo:
    """An `io` block as read: which ports it declares to be what. Whether they exist is not checked.

    Attributes:
        single: port name by role, for roles that one port has.
        kv_inputs: growing caches, past side; None where nothing is declared.
        kv_outputs: their present side, in the same order; None where nothing is declared.
        state_pairs: recurrent states; None where nothing is declared.
        cross_kv_inputs: cross-attention caches, past side; None where nothing is declared.
        cross_kv_outputs: their present side, in the same order; None where nothing is declared.
        optional_inputs: inputs that may be left at zeros.
        static_cache: the fields of a cache of fixed size, as far as they are declared; None without one.
        auxiliary: ports that are declared as something that a decode has no use for, with their direction.
        listed: ports that are said to exist, with their direction.
    """

    single: Mapping[Role, str]
    kv_inputs: tuple[str, ...] | None = None
    kv_outputs: tuple[str, ...] | None = None
    state_pairs: tuple[StatePair, ...] | None = None
    cross_kv_inputs: tuple[str, ...] | None = None
    cross_kv_outputs: tuple[str, ...] | None = None
    optional_inputs: tuple[str, ...] = ()
    static_cache: Mapping[str, str | tuple[str, ...]] | None = None
    auxiliary: tuple[tuple[str, Literal["input", "output"]], ...] = ()
    listed: tuple[tuple[str, Literal["input", "output"]], ...] = ()


def declared_io_of(
    metadata: Mapping[str, Any] | None, *, graph: str | None = None
) -> Mapping[str, Any] | None:
    """The `io` block that an `inference_metadata.yaml` declares; None where it declares none.

    That is `model.io`, or else `io` of the entry of `pipeline.models` whose file is `graph`, or else what the
    roles and state groups of `pipeline.workflow` say about the component whose artifact is `graph`.

    Raises:
        InputError: the sidecar has not the form that it must have.
    """
    if metadata is None:
        return None
    model = section(metadata, "model", "model")
    if model.get("io") is not None:
        return mapping(model["io"], "model.io")
    pipeline = section(metadata, "pipeline", "pipeline")
    models = section(pipeline, "models", "pipeline.models")
    for name in models:
        place = f"pipeline.models.{name}"
        entry = mapping(models[name], place)
        file = optional_string(entry, "filename", f"{place}.filename")
        if file is not None and PurePosixPath(file).name == graph and entry.get("io") is not None:
            return mapping(entry["io"], f"{place}.io")
    workflow = section(pipeline, "workflow", "pipeline.workflow")
    return io_of_workflow(workflow, graph=graph)


def read_io_block(block: Mapping[str, Any]) -> DeclaredIo:
    """Read an `io` block. Fields that are absent, null or empty declare nothing.

    Keys are those of the published block, and private ones, which begin with `x-` and are left alone.

    Raises:
        InputError: a field has the wrong type, or a key is none of these.
    """
    known_keys(block, _KNOWN_FIELDS, "io")
    single = {
        role: string(block[key], f"io.{key}")
        for key, role in _SINGLE_FIELDS.items()
        if block.get(key) is not None
    }
    given = {key: block[key] for key in block if block[key] not in (None, [], {})}
    lists = {key: strings(given[key], f"io.{key}") for key in _LIST_FIELDS if key in given}
    return DeclaredIo(
        single=single,
        kv_inputs=lists.get("kv_inputs"),
        kv_outputs=lists.get("kv_outputs"),
        state_pairs=_state_pairs(given["state_pairs"]) if "state_pairs" in given else None,
        cross_kv_inputs=lists.get("cross_kv_inputs"),
        cross_kv_outputs=lists.get("cross_kv_outputs"),
        optional_inputs=_optional_inputs(given.get("optional_inputs", ())),
        static_cache=_static_cache(given["static_cache"]) if "static_cache" in given else None,
        auxiliary=tuple(
            (name, direction)
            for key, direction in _AUXILIARY_FIELDS.items()
            if (name := optional_string(block, key, f"io.{key}")) is not None
        ),
        listed=tuple(
            (name, direction)
            for key, direction in _PORT_LISTS.items()
            if key in given
            for name in _listed(given[key], f"io.{key}")
        ),
    )


def io_block(topology: Topology) -> dict[str, Any]:
    """The `io` block that says what `topology` says; fields that would be empty are left out.

    `optional_inputs` is the list of their names; the published form, which needs shapes, is written by
    `harness.topology.writing`.
    """
    block: dict[str, Any] = {
        "token_input": topology.token_input,
        "inputs_embeds_input": topology.inputs_embeds_input,
        "attention_mask_input": topology.attention_mask_input,
        "position_ids_input": topology.position_ids_input,
        "logits_output": topology.logits_output,
        "kv_inputs": list(topology.kv_inputs),
        "kv_outputs": list(topology.kv_outputs),
        "state_pairs": [
            {"input": pair.input, "output": pair.output, "init": pair.init, "update": pair.update}
            for pair in topology.state_pairs
        ],
        "cross_kv_inputs": list(topology.cross_kv_inputs),
        "cross_kv_outputs": list(topology.cross_kv_outputs),
        "encoder_hidden_states_input": topology.encoder_hidden_states_input,
        "static_cache": None if topology.static_cache is None else dict(topology.static_cache),
        "optional_inputs": list(topology.optional_inputs),
    }
    return {key: value for key, value in block.items() if value not in (None, [])}


def derivation_document(source: str, derivation: Derivation) -> dict[str, Any]:
    """The document that `derive --json` prints for one source that could be read."""
    topology, refusal = derivation.topology, derivation.refusal
    return {
        "schema": DERIVATION_SCHEMA,
        "source": source,
        "outcome": derivation.outcome.value,
        "io": None if topology is None else io_block(topology),
        "ports": [
            {
                "name": port.name,
                "direction": port.direction,
                "role": port.role.value,
                "pair": port.pair,
                "layer": port.layer,
                "because": port.because,
            }
            for port in (topology.roles if topology is not None else ())
        ],
        "refusal": None
        if refusal is None
        else {
            "code": refusal.code,
            "also": list(refusal.also),
            "message": refusal.message,
            "ports": list(refusal.ports),
        },
        "error": None,
        "exit_code": 3 if topology is None else 0,
    }


def _state_pairs(value: object) -> tuple[StatePair, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise misfit("io.state_pairs", "a list of pairs", value)
    pairs = []
    for index, item in enumerate(value):
        place = f"io.state_pairs[{index}]"
        pair = mapping(item, place)
        known_keys(pair, _PAIR_FIELDS, place)
        for key, only in (("init", "zeros"), ("update", "replace")):
            if pair.get(key, only) != only:
                raise misfit(f"{place}.{key}", only, pair[key])
        pairs.append(
            StatePair(
                string(pair.get("input"), f"{place}.input"), string(pair.get("output"), f"{place}.output")
            )
        )
    return tuple(pairs)


def _optional_inputs(value: object) -> tuple[str, ...]:
    """Names of optional inputs: the keys of the published mapping, or a plain list."""
    if not isinstance(value, Mapping):
        return strings(value, "io.optional_inputs")
    for name, spec in value.items():
        absent = section(
            mapping(spec, f"io.optional_inputs.{name}"), "absent", f"io.optional_inputs.{name}.absent"
        )
        if absent.get("kind", "zeros") != "zeros":
            raise misfit(f"io.optional_inputs.{name}.absent.kind", "zeros", absent["kind"])
    return tuple(value)


def _listed(value: object, place: str) -> list[str]:
    """Names of ports that are described one by one."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise misfit(place, "a list of ports", value)
    names = []
    for index, item in enumerate(value):
        port = mapping(item, f"{place}[{index}]")
        known_keys(port, _PORT_FIELDS, f"{place}[{index}]")
        names.append(string(port.get("name"), f"{place}[{index}].name"))
    return names


def _static_cache(value: object) -> Mapping[str, str | tuple[str, ...]]:
    declared = mapping(value, "io.static_cache")
    known_keys(declared, (*STATIC_CACHE_PORTS, *STATIC_CACHE_LISTS), "io.static_cache")
    fields: dict[str, str | tuple[str, ...]] = {}
    for key in STATIC_CACHE_PORTS:
        if declared.get(key) is not None:
            fields[key] = string(declared[key], f"io.static_cache.{key}")
    for key in STATIC_CACHE_LISTS:
        if declared.get(key) not in (None, []):
            fields[key] = strings(declared[key], f"io.static_cache.{key}")
    return fields
