"""Between plain mappings and topologies: the `io` block, `genai_config.json`, and `derive --json`.

Nothing here reads or writes files; `harness.package` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import InputError
from harness.topology.conventions import INDEX, IndexedPatterns
from harness.topology.spec import Derivation, Role, StatePair, Topology

__all__ = [
    "DERIVATION_SCHEMA",
    "DeclaredIo",
    "GenaiNames",
    "declared_io_of",
    "derivation_document",
    "genai_names",
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
_LIST_FIELDS = ("kv_inputs", "kv_outputs", "cross_kv_inputs", "cross_kv_outputs", "optional_inputs")


@dataclass(frozen=True, slots=True)
class DeclaredIo:
    """An `io` block as read: which ports it declares to be what. Whether they exist is not checked.

    Attributes:
        single: port name by role, for roles that one port has.
        kv_inputs: growing caches, past side; None where the field is absent.
        kv_outputs: their present side, in the same order; None where the field is absent.
        state_pairs: recurrent states; None where the field is absent.
        cross_kv_inputs: cross-attention caches, past side; None where the field is absent.
        cross_kv_outputs: their present side, in the same order; None where the field is absent.
        optional_inputs: inputs that may be left at their default.
        static_cache: declaration of a fixed-size cache, None where there is none.
    """

    single: Mapping[Role, str]
    kv_inputs: tuple[str, ...] | None = None
    kv_outputs: tuple[str, ...] | None = None
    state_pairs: tuple[StatePair, ...] | None = None
    cross_kv_inputs: tuple[str, ...] | None = None
    cross_kv_outputs: tuple[str, ...] | None = None
    optional_inputs: tuple[str, ...] = ()
    static_cache: Mapping[str, Any] | None = None


def declared_io_of(metadata: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The `io` block of an `inference_metadata.yaml`, at `model.io`; None where it declares none.

    Raises:
        InputError: `model` or `model.io` is not a mapping.
    """
    if metadata is None:
        return None
    model = _section(metadata, "model", "model")
    return _mapping(model["io"], "model.io") if model.get("io") is not None else None


def read_io_block(block: Mapping[str, Any]) -> DeclaredIo:
    """Read an `io` block. Fields that are absent, null or empty declare nothing; unknown ones are left alone.

    Raises:
        InputError: a field has the wrong type, or names the same port twice.
    """
    single = {
        role: _string(block[key], f"io.{key}")
        for key, role in _SINGLE_FIELDS.items()
        if block.get(key) is not None
    }
    lists = {
        key: _strings(block[key], f"io.{key}") for key in _LIST_FIELDS if block.get(key) not in (None, [])
    }
    pairs = block.get("state_pairs")
    static = block.get("static_cache")
    return DeclaredIo(
        single=single,
        kv_inputs=lists.get("kv_inputs"),
        kv_outputs=lists.get("kv_outputs"),
        state_pairs=None if pairs in (None, []) else _state_pairs(pairs),
        cross_kv_inputs=lists.get("cross_kv_inputs"),
        cross_kv_outputs=lists.get("cross_kv_outputs"),
        optional_inputs=lists.get("optional_inputs", ()),
        static_cache=None if static is None else _mapping(static, "io.static_cache"),
    )


def io_block(topology: Topology) -> dict[str, Any]:
    """The `io` block that says what `topology` says; fields that would be empty are left out."""
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
        "static_cache": topology.static_cache and dict(topology.static_cache),
        "optional_inputs": list(topology.optional_inputs),
    }
    return {key: value for key, value in block.items() if value not in (None, [])}


@dataclass(frozen=True, slots=True)
class GenaiNames:
    """What `genai_config.json` says about the decoder's ports.

    Attributes:
        single: port name by role.
        patterns: of the caches; None where it names none.
    """

    single: Mapping[Role, str]
    patterns: IndexedPatterns | None = None


_GENAI_INPUTS = {
    "input_ids": Role.TOKEN,
    "inputs_embeds": Role.EMBEDS,
    "attention_mask": Role.ATTENTION_MASK,
    "position_ids": Role.POSITION_IDS,
    "encoder_hidden_states": Role.ENCODER_HIDDEN_STATES,
    "encoder_attention_mask": Role.ENCODER_ATTENTION_MASK,
}
_GENAI_PATTERNS = {
    "past_key": ("inputs", "past_key_names"),
    "past_value": ("inputs", "past_value_names"),
    "present_key": ("outputs", "present_key_names"),
    "present_value": ("outputs", "present_value_names"),
}
_GENAI_CROSS_PATTERNS = {
    "cross_past_key": ("inputs", "cross_past_key_names"),
    "cross_past_value": ("inputs", "cross_past_value_names"),
    "cross_present_key": ("outputs", "cross_present_key_names"),
    "cross_present_value": ("outputs", "cross_present_value_names"),
}


def genai_names(config: Mapping[str, Any]) -> GenaiNames:
    """Read `model.decoder.inputs` and `model.decoder.outputs` of a `genai_config.json`.

    Raises:
        InputError: a field has the wrong type, a pattern has not exactly one `%d`, or only some of the
            four patterns are given.
    """
    decoder = _section(_section(config, "model", "model"), "decoder", "model.decoder")
    sides = {side: _section(decoder, side, f"model.decoder.{side}") for side in ("inputs", "outputs")}

    def given(side: str, key: str) -> str | None:
        value = sides[side].get(key)
        return None if value is None else _string(value, f"model.decoder.{side}.{key}")

    single = {role: name for key, role in _GENAI_INPUTS.items() if (name := given("inputs", key)) is not None}
    logits = given("outputs", "logits")
    if logits is not None:
        single[Role.LOGITS] = logits
    four = {field: given(*place) for field, place in _GENAI_PATTERNS.items()}
    cross = {field: given(*place) for field, place in _GENAI_CROSS_PATTERNS.items()}
    missing = [".".join(_GENAI_PATTERNS[field]) for field, pattern in four.items() if pattern is None]
    if len(missing) == len(four):
        return GenaiNames(single)
    if missing:
        raise _misfit(f"model.decoder.{missing[0]}", "given where the other cache patterns are", None)
    patterns = {field: pattern for field, pattern in {**four, **cross}.items() if pattern is not None}
    for field, pattern in patterns.items():
        if pattern.count(INDEX) != 1:
            place = ".".join({**_GENAI_PATTERNS, **_GENAI_CROSS_PATTERNS}[field])
            raise _misfit(f"model.decoder.{place}", "a pattern with one %d for the layer", pattern)
    return GenaiNames(single, IndexedPatterns(**patterns))


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
    }


def _section(parent: Mapping[str, Any], key: str, place: str) -> Mapping[str, Any]:
    value = parent.get(key)
    return {} if value is None else _mapping(value, place)


def _mapping(value: object, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _misfit(place, "a mapping", value)
    return value


def _string(value: object, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise _misfit(place, "a port name", value)
    return value


def _strings(value: object, place: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _misfit(place, "a list of port names", value)
    return tuple(_string(item, f"{place}[{index}]") for index, item in enumerate(value))


def _state_pairs(value: object) -> tuple[StatePair, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _misfit("io.state_pairs", "a list of pairs", value)
    pairs = []
    for index, item in enumerate(value):
        place = f"io.state_pairs[{index}]"
        pair = _mapping(item, place)
        init, update = pair.get("init", "zeros"), pair.get("update", "replace")
        if init != "zeros":
            raise _misfit(f"{place}.init", "zeros", init)
        if update != "replace":
            raise _misfit(f"{place}.update", "replace", update)
        pairs.append(
            StatePair(
                _string(pair.get("input"), f"{place}.input"), _string(pair.get("output"), f"{place}.output")
            )
        )
    return tuple(pairs)


def _misfit(place: str, wanted: str, value: object) -> InputError:
    return InputError(
        f"{place} must be {wanted}, not {value!r:.60}.",
        next_action="Correct the sidecar, or pass --ignore-declared to derive the topology from the ports.",
    )
