"""`genai_config.json` of onnxruntime-genai: single port names, and name templates for the caches.

Keys and their meaning are those of `model.decoder.inputs` and `model.decoder.outputs`; `%d` in a template
stands for the layer. Nothing here reads or writes files; `harness.package` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from harness.topology.conventions import INDEX, Convention, IndexedPatterns, PortPair, StemPair
from harness.topology.mappings import misfit, optional_string, section
from harness.topology.spec import PortRole, Role, Topology

__all__ = ["GenaiNames", "genai_config_of", "genai_names"]

_INPUTS = {
    "input_ids": Role.TOKEN,
    "inputs_embeds": Role.EMBEDS,
    "attention_mask": Role.ATTENTION_MASK,
    "position_ids": Role.POSITION_IDS,
    "encoder_hidden_states": Role.ENCODER_HIDDEN_STATES,
    "encoder_attention_mask": Role.ENCODER_ATTENTION_MASK,
}
_CONTROLS = (
    "past_sequence_length",
    "current_sequence_length",
    "total_sequence_length",
    "past_key_values_length",
)
_FOUR = {
    "past_key": ("inputs", "past_key_names"),
    "past_value": ("inputs", "past_value_names"),
    "present_key": ("outputs", "present_key_names"),
    "present_value": ("outputs", "present_value_names"),
}
_CROSS = {
    "cross_past_key": ("inputs", "cross_past_key_names"),
    "cross_past_value": ("inputs", "cross_past_value_names"),
    "cross_present_key": ("outputs", "cross_present_key_names"),
    "cross_present_value": ("outputs", "cross_present_value_names"),
}
_FUSED = (("inputs", "past_names"), ("outputs", "present_names"))
_RECURRENT = (("inputs", "rnn_prev_states"), ("outputs", "rnn_states"))
_CACHES: tuple[Mapping[Role, tuple[str, str]], ...] = (
    {
        Role.KV_KEY: ("past_key_names", "present_key_names"),
        Role.KV_VALUE: ("past_value_names", "present_value_names"),
    },
    {Role.KV_FUSED: ("past_names", "present_names")},
    {
        Role.CROSS_KV_KEY: ("cross_past_key_names", "cross_present_key_names"),
        Role.CROSS_KV_VALUE: ("cross_past_value_names", "cross_present_value_names"),
    },
)
"""Keys of the past and of the present template, by what the caches are; together what belongs together."""
_STATES = {Role.STATE: ("rnn_prev_states", "rnn_states")}
_NUMBER = re.compile("[0-9]+")
_NAME = "genai_config.json"
_SOURCE = "the package"


class CacheName(NamedTuple):
    """A name or template of caches: the key that gives it, the side it is of, and what such ports are."""

    key: str
    pattern: str
    direction: Literal["input", "output"]
    role: Role


@dataclass(frozen=True, slots=True)
class GenaiNames:
    """What `genai_config.json` says about the decoder's ports.

    Attributes:
        single: port name by role.
        controls: ports that carry lengths.
        convention: the naming of the caches; None where it names none.
        templates: the names and templates of caches, one by one.
    """

    single: Mapping[Role, str]
    controls: tuple[str, ...] = ()
    convention: Convention | None = None
    templates: tuple[CacheName, ...] = ()


def genai_names(config: Mapping[str, Any]) -> GenaiNames:
    """Read `model.decoder.inputs` and `model.decoder.outputs` of a `genai_config.json`.

    Raises:
        InputError: a field has the wrong type, a template has not exactly one `%d`, or a template of one
            side is given without that of the other.
    """
    decoder = section(section(config, "model", "model"), "decoder", "model.decoder")
    sides = {side: section(decoder, side, f"model.decoder.{side}") for side in ("inputs", "outputs")}

    def given(side: str, key: str) -> str | None:
        return optional_string(sides[side], key, f"model.decoder.{side}.{key}")

    single = {role: name for key, role in _INPUTS.items() if (name := given("inputs", key)) is not None}
    logits = given("outputs", "logits")
    if logits is not None:
        single[Role.LOGITS] = logits
    controls = tuple(name for key in _CONTROLS if (name := given("inputs", key)) is not None)
    pairs: list[PortPair] = []
    stems: tuple[StemPair, ...] = ()
    four = _templates({field: (place, given(*place)) for field, place in _FOUR.items()}, together=True)
    if four:
        cross = _templates({field: (place, given(*place)) for field, place in _CROSS.items()}, together=False)
        patterns = IndexedPatterns(**four, **cross).convention(name=_NAME, source=_SOURCE)
        pairs = list(patterns.pairs)
        stems = patterns.stems
    for (past, present), role in ((_FUSED, Role.KV_FUSED), (_RECURRENT, Role.STATE)):
        names = {side: (place, given(*place)) for side, place in (("past", past), ("present", present))}
        found = _templates(names, together=True, indexed=role is Role.KV_FUSED)
        if found:
            pairs.append(PortPair(found["past"], found["present"], role))
    if not pairs:
        return GenaiNames(single, controls)
    convention = Convention(_NAME, _SOURCE, pairs=tuple(pairs), stems=stems)
    return GenaiNames(single, controls, convention, tuple(_given(given)))


def genai_config_of(topology: Topology) -> dict[str, Any]:
    """The decoder part of a `genai_config.json` that names the ports of `topology`, as far as it can.

    A cache whose names have no template in common stays unnamed; whether the result says all that
    `topology` says is for the caller to find out, by resolving it.
    """
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}
    by_role = {role: key for key, role in _INPUTS.items()}
    for port in topology.roles:
        if port.role in by_role and port.direction == "input":
            inputs[by_role[port.role]] = port.name
        if port.role is Role.LOGITS:
            outputs["logits"] = port.name
        if port.role is Role.CONTROL and port.name in _CONTROLS:
            inputs[port.name] = port.name
    for kinds in _CACHES:
        pasts = {keys[0]: _template_of(topology, role, "input") for role, keys in kinds.items()}
        presents = {keys[1]: _template_of(topology, role, "output") for role, keys in kinds.items()}
        # The format asks for templates that belong together to be given together.
        if Role.CROSS_KV_KEY in kinds or None not in (*pasts.values(), *presents.values()):
            inputs.update((key, template) for key, template in pasts.items() if template is not None)
            outputs.update((key, template) for key, template in presents.items() if template is not None)
    return {"model": {"decoder": {"inputs": inputs, "outputs": outputs}}}


def _given(given: Callable[[str, str], str | None]) -> Iterator[CacheName]:
    for kinds in (*_CACHES, _STATES):
        for role, (past, present) in kinds.items():
            if (name := given("inputs", past)) is not None:
                yield CacheName(past, name, "input", role)
            if (name := given("outputs", present)) is not None:
                yield CacheName(present, name, "output", role)


def _templates(
    given: Mapping[str, tuple[tuple[str, str], str | None]], *, together: bool, indexed: bool = True
) -> dict[str, str]:
    """The templates that are given. `together`: all or none of them must be."""
    found = {field: template for field, (_, template) in given.items() if template is not None}
    if found and together:
        for place, template in given.values():
            if template is None:
                raise misfit(
                    f"model.decoder.{'.'.join(place)}",
                    f"given, as {', '.join(found)} is given",
                    None,
                )
    for field, template in found.items():
        if indexed and template.count(INDEX) != 1:
            where = ".".join(given[field][0])
            raise misfit(f"model.decoder.{where}", "a template with one %d for the layer", template)
    return found


def _template_of(topology: Topology, role: Role, direction: str) -> str | None:
    return _template(port for port in topology.roles if (port.role, port.direction) == (role, direction))


def _template(ports: Iterable[PortRole]) -> str | None:
    """What the names of `ports` have in common, with `%d` for the layer; None if they share no template."""
    templates: set[str] | None = None
    for port in ports:
        own = {
            port.name[: number.start()] + INDEX + port.name[number.end() :]
            for number in _NUMBER.finditer(port.name)
            if port.layer is not None and int(number.group()) == port.layer
        }
        templates = own if templates is None else templates & own
    return next(iter(templates)) if templates and len(templates) == 1 else None
