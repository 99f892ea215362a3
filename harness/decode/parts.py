"""The parts of a decoder: their ports, what they hand on to each other, and the ports of the whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.decode.wiring import Output, Wire, always
from harness.errors import InputError
from harness.package import Component, Package
from harness.ports import Dimension, Port, PortInventory, read_ports
from harness.topology.interface import place_inputs_by_name, words
from harness.topology.spec import Role

__all__ = [
    "HIDDEN_STATES",
    "Part",
    "cross_output",
    "decoder_inventory",
    "givers_of",
    "hands_on",
    "is_encoder",
    "parts_of",
    "passed_on",
    "refuse_encoder_alone",
    "visible_outputs",
]

HIDDEN_STATES = ("last_hidden_state", "encoder_hidden_states", "hidden_states", "encoder_outputs")
"""What encoders call their hidden states, whatever the decoder calls them."""

_PAST_OR_PRESENT = re.compile("^(past_key_values|past|present)[._]")


@dataclass(frozen=True, slots=True)
class Part:
    """A component of a package, with its ports."""

    component: Component
    inventory: PortInventory

    @property
    def name(self) -> str:
        """What the package calls it."""
        return self.component.name

    @property
    def inputs(self) -> dict[str, Port]:
        """Its inputs by name."""
        return {port.name: port for port in self.inventory.inputs}

    @property
    def outputs(self) -> dict[str, Port]:
        """Its outputs by name."""
        return {port.name: port for port in self.inventory.outputs}

    @property
    def token(self) -> Port | None:
        """The input that takes token IDs; None where no input does."""
        placed = place_inputs_by_name(self.inventory.inputs, filled=frozenset())
        return next((named.port for named in placed if named.role is Role.TOKEN), None)

    def output_named(self, name: str) -> str | None:
        """The output that others may take under this name."""
        return next((own for own in self.outputs if name in self.component.names_of(own)), None)


def decoder_inventory(package: Package) -> PortInventory:
    """The ports of the decoder as a whole: what its parts pass to each other is left out.

    A cache that a later part reads as well is still a cache: it is given back.

    Raises:
        InputError: a graph cannot be read, two parts take an input of one name but of different types, or
            the graph for later calls is missing.
    """
    parts = parts_of(package.components.decoder)
    if len(parts) == 1:
        _refuse_first_call_alone(package, parts[0])
        return parts[0].inventory
    inputs: dict[str, Port] = {}
    outputs: dict[str, Port] = {}
    for index, part in enumerate(parts):
        before = [other for other in parts[:index] if hands_on(other, part)]
        passed = {name for other in before for name in visible_outputs(other)}
        for port in part.inventory.inputs:
            if port.name not in passed:
                inputs[port.name] = _merged(package, inputs.get(port.name), port)
        outputs |= {
            name: _merged(package, outputs.get(name), replace(port, name=name), later=True)
            for name, port in visible_outputs(part).items()
        }
    pasts = {_PAST_OR_PRESENT.sub("", name) for name in inputs}
    for index, part in enumerate(parts):
        taken = {name for after in parts[index + 1 :] if hands_on(part, after) for name in after.inputs}
        for name in taken & outputs.keys():
            if _PAST_OR_PRESENT.sub("", name) not in pasts:
                del outputs[name]
    return PortInventory(tuple(inputs.values()), tuple(outputs.values()))


def parts_of(components: Iterable[Component]) -> list[Part]:
    """Read the ports of each component.

    Raises:
        InputError: a graph cannot be read.
    """
    return [Part(component, read_ports(component.graph)) for component in components]


def is_encoder(part: Part) -> bool:
    """An encoder by what it gives: hidden states of that name, or cross-attention KV."""
    return any(
        name in HIDDEN_STATES or "cross" in words(name)
        for own in part.outputs
        for name in part.component.names_of(own)
    )


def refuse_encoder_alone(package: Package) -> None:
    """Say what a package lacks whose only graph is an encoder: by its name, or as it takes no token IDs.

    Raises:
        InputError: it is one.
    """
    parts = parts_of(package.components.decoder)
    if len(parts) != 1 or any(map(_PAST_OR_PRESENT.match, parts[0].inputs)) or not is_encoder(parts[0]):
        return
    (part,) = parts
    if "encoder" not in words(part.name) and part.token is not None:
        return
    gives = next((name for name in part.outputs if name in HIDDEN_STATES), next(iter(part.outputs)))
    graph = part.component.graph
    wanted = "decoder_model.onnx with decoder_with_past_model.onnx, or decoder_model_merged.onnx"
    if graph.stem != "encoder_model":
        wanted = "decoder.onnx, or decoder/model.onnx"
    raise InputError(
        f"{graph} is an encoder: it gives {gives} and no logits, and the decoder that answers to it is "
        "missing.",
        next_action=f"Put the decoder beside it ({wanted}), and name the folder.",
    )


def hands_on(before: Part, after: Part) -> bool:
    """Whether one part of a decoder runs whenever the other does, so that it can hand on what it computed."""
    first, then = before.component, after.component
    return (first.on_prompt or not then.on_prompt) and (first.on_steps or not then.on_steps)


def visible_outputs(part: Part) -> dict[str, Port]:
    """Outputs by the name under which others know them."""
    return {part.component.names_of(own)[-1]: port for own, port in part.outputs.items()}


def passed_on(name: str, before: Sequence[Part]) -> Wire | None:
    """What the last of the parts `before` gives under this name; None where none does."""
    for part in reversed(before):
        own = part.output_named(name)
        if own is not None:
            return always(Output(part.name, own))
    return None


def givers_of(name: str, decoder: Sequence[Part]) -> Iterator[Output]:
    """The outputs that are `name` of the whole: one for each part that gives it, the last part first."""
    for part in reversed(decoder):
        own = next((own for own in part.outputs if part.component.names_of(own)[-1] == name), None)
        if own is not None:
            yield Output(part.name, own)


def _refuse_first_call_alone(package: Package, part: Part) -> None:
    """A graph that gives a cache and takes none runs at the first call, and needs its partner for others."""
    partner = package.components.partner
    gives, takes = (any(map(_PAST_OR_PRESENT.match, ports)) for ports in (part.outputs, part.inputs))
    if partner is not None and gives and not takes:
        raise InputError(
            f"{package.folder}: {partner.name} is missing, the partner of {part.component.graph.name}, which "
            "gives a cache and takes none: it is for the first call alone.",
            next_action="Copy it into the package.",
        )


def _merged(package: Package, known: Port | None, port: Port, *, later: bool = False) -> Port:
    """One port for two of the same name; what either leaves open is open, or as it is at `later` calls."""
    if known is None:
        return port
    if known.dtype != port.dtype or len(known.shape or ()) != len(port.shape or ()):
        one, other = (f"{each.dtype} {list(each.shape or ())}" for each in (known, port))
        raise InputError(
            f"{package.folder}: two graphs have a port {port.name}, one {one} and one {other}.",
            next_action="Export the parts with ports of one type under one name.",
        )
    if later or port.shape is None:
        return port
    if known.shape is None:
        return known
    shape: tuple[Dimension, ...] = tuple(
        one if one == other or not isinstance(one, int) else None if isinstance(other, int) else other
        for one, other in zip(known.shape, port.shape, strict=True)
    )
    return replace(known, shape=shape)


def cross_output(part: Part, name: str) -> str | None:
    """The output that is the cross KV of input `name`: the same name but for `past` and `present`."""
    bare = _PAST_OR_PRESENT.sub("", name)
    return next((own for own in part.outputs if own != name and _PAST_OR_PRESENT.sub("", own) == bare), None)
