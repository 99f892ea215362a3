"""From the graphs of a package to a wiring that decodes as one graph does.

What a graph is for follows from its ports. Parts of a decoder pass on by name what they compute. An input
that takes embeddings gets them from the graph that makes them of token IDs; one that takes what an encoder
computes gets it from the encoder, which runs once. Text alone is decoded: an embedding graph that also takes
the features of images or sounds is given none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from harness.decode.extents import with_extents
from harness.decode.parts import (
    HIDDEN_STATES,
    Part,
    cross_output,
    decoder_inventory,
    givers_of,
    hands_on,
    is_encoder,
    parts_of,
    passed_on,
)
from harness.decode.wiring import Feed, Fill, Kept, Mask, Output, Step, Wire, Wiring, always
from harness.errors import InputError
from harness.package import Component, Package
from harness.ports import Dimension, Port, PortInventory
from harness.topology.interface import is_integer, words
from harness.topology.spec import PortRole, Role, Topology

__all__ = ["Assembly", "GivenInput", "assemble"]

GivenKind: TypeAlias = Literal["tokens", "mask", "features", "states"]

BRANCH_INPUT = "use_cache_branch"
"""Chooses, in a merged graph, the branch that computes without a cache, or the one with it (Optimum)."""

_CROSS_KV = frozenset({Role.CROSS_KV_KEY, Role.CROSS_KV_VALUE})
_OF_ENCODER = _CROSS_KV | {Role.ENCODER_HIDDEN_STATES, Role.ENCODER_ATTENTION_MASK}
_OF_EMBEDDING = frozenset({Role.EMBEDS, Role.AUXILIARY})
_NOT_FOR_TEXT = frozenset({"vision", "image", "images", "pixel", "visual", "video"})


@dataclass(frozen=True, slots=True)
class GivenInput:
    """An input of the whole that no loop has a value for: what an encoder takes, or would give.

    Attributes:
        port: as the whole has it.
        name: as its own graph has it.
        kind: token IDs of a source text, the mask of a sequence, features that an encoder takes, or states
            and cross KV that it would give.
        because: what it is, for the report.
    """

    port: Port
    name: str
    kind: GivenKind
    because: str


@dataclass(frozen=True, slots=True)
class Assembly:
    """A decoder with all that it needs to run.

    Attributes:
        topology: of the whole.
        wiring: its graphs.
        given: what must be given from outside, once for a decode.
    """

    topology: Topology
    wiring: Wiring
    given: tuple[GivenInput, ...] = ()

    @property
    def source_tokens(self) -> GivenInput | None:
        """The input of a text encoder; None where what is encoded is no text."""
        return next((given for given in self.given if given.kind == "tokens"), None)


def assemble(package: Package, topology: Topology) -> Assembly:
    """Find for every input of the decoder where its value comes from.

    Args:
        package: its graphs are read.
        topology: of `decoder_inventory(package)`.

    Raises:
        InputError: a component that the decoder needs is missing, several could be meant, or no part gives
            the logits or a cache at some call.
    """
    return _Assembler(package, topology).assembly()


@dataclass(slots=True)
class _Assembler:
    package: Package
    topology: Topology
    _given: dict[str, GivenInput] = field(default_factory=dict)
    _before: dict[str, Step] = field(default_factory=dict)
    _notes: dict[str, str] = field(default_factory=dict)

    def assembly(self) -> Assembly:
        topology = self.topology
        decoder = parts_of(self.package.components.decoder)
        others = parts_of(part for part in self.package.components.others if part.graph.is_file())
        roles = {role.name: role for role in topology.roles if role.direction == "input"}
        inventory = decoder_inventory(self.package)
        needed = {port.name: port for port in inventory.inputs}
        sources = self._sources(needed, roles, decoder, others)
        steps = [*self._before.values()]
        for index, part in enumerate(decoder):
            before = [other for other in decoder[:index] if hands_on(other, part)]
            wires = {name: passed_on(name, before) or sources[name] for name in part.inputs}
            steps.append(_step(part, wires))
        outputs = {port.name: tuple(givers_of(port.name, decoder)) for port in inventory.outputs}
        self._refuse_silent(outputs, decoder)
        if topology.token_input is None:
            topology = self._with_token(topology)
        wiring = Wiring(
            steps=tuple(steps),
            inputs=self._inputs(inventory, steps),
            outputs=outputs,
            ports=inventory.outputs,
            caches=frozenset(_caches(topology)),
            notes=self._notes,
        )
        topology = with_extents(topology, wiring.inventory, steps)
        return Assembly(topology, wiring, tuple(self._given.values()))

    def _refuse_silent(self, outputs: Mapping[str, Sequence[Output]], decoder: Sequence[Part]) -> None:
        """Logits and caches must be given at every call, by one part or another."""
        topology = self.topology
        components = {part.name: part.component for part in decoder}
        states = (pair.output for pair in topology.state_pairs)
        for name in (topology.logits_output, *topology.kv_outputs, *states):
            if name is None or name not in outputs:
                continue
            givers = [components[output.step] for output in outputs[name]]
            for call, runs in (
                ("at the prompt", any(part.on_prompt for part in givers)),
                ("after the prompt", any(part.on_steps for part in givers)),
            ):
                if not runs:
                    names = ", ".join(part.name for part in givers)
                    raise InputError(
                        f"{self.package.folder}: no part gives {name} {call}, when {names} does not run.",
                        next_action="Correct run_on_prompt and run_on_token_gen in genai_config.json.",
                    )

    def _sources(
        self,
        needed: Mapping[str, Port],
        roles: Mapping[str, PortRole],
        decoder: Sequence[Part],
        others: Sequence[Part],
    ) -> dict[str, Wire]:
        """Where each input of the decoder as a whole gets its value from."""
        sources = {name: always(Feed(name)) for name in needed}
        for name, role in roles.items():
            if role.role in _OF_EMBEDDING and name in needed:
                supplied = self._embedded(needed[name], role.role, others)
                sources[name] = supplied or sources[name]
        wanted = [name for name, role in roles.items() if role.role in _OF_ENCODER and name in needed]
        encoder = self._encoder(wanted, roles, others)
        # Hidden states first: others take their length from them.
        wanted.sort(key=lambda name: roles[name].role is not Role.ENCODER_HIDDEN_STATES)
        hidden: Feed | Output | None = None
        for name in wanted:
            port, role = needed[name], roles[name]
            if role.role is Role.ENCODER_HIDDEN_STATES:
                hidden = self._hidden_states(port, encoder)
                sources[name] = always(hidden)
            elif role.role in _CROSS_KV:
                sources[name] = self._cross_kv(port, role, encoder, hidden, decoder)
            else:
                sources[name] = self._encoder_mask(port, encoder, hidden)
        self._end_growing_states(sources, hidden, needed, roles, decoder)
        if BRANCH_INPUT in needed:
            port = needed[BRANCH_INPUT]
            shape = tuple(1 for _ in port.shape or ())
            dtype = port.dtype or "bool"
            sources[BRANCH_INPUT] = Wire(Fill(dtype, shape), Fill(dtype, shape, value=1))
        return sources

    # Embeddings.

    def _embedded(self, port: Port, role: Role, others: Sequence[Part]) -> Wire | None:
        """What an embedding graph gives to `port`; None where there is no such graph."""
        makers = [part for part in others if part.token is not None]
        found = [(part, own) for part in makers if (own := part.output_named(port.name)) is not None]
        if not found and role is Role.EMBEDS:
            found = [
                (part, floats[0])
                for part in makers
                if len(floats := [own for own, out in part.outputs.items() if not is_integer(out)]) == 1
                and not is_encoder(part)
            ]
        if not found:
            if role is Role.EMBEDS:
                self._refuse_missing(port.name)
            return None
        part, own = self._only(found, port.name)
        if part.name not in self._before:
            self._before[part.name] = _step(part, self._embedding_wires(part))
        return always(Output(part.name, own))

    def _embedding_wires(self, part: Part) -> dict[str, Wire]:
        token = part.token
        assert token is not None
        known = {port.name for port in decoder_inventory(self.package).inputs}
        wires = {}
        empty = []
        for name, port in part.inputs.items():
            if name == token.name:
                wires[name] = always(Feed(self.topology.token_input or name))
            elif name in known or is_integer(port) or port.dtype is None or port.shape is None:
                wires[name] = always(Feed(name))
            else:
                wires[name] = always(Fill(port.dtype, _no_features(port.shape)))
                empty.append(name)
        if empty:
            self._notes["text_only"] = f"{part.name} is given no {', '.join(empty)}"
        return wires

    def _with_token(self, topology: Topology) -> Topology:
        """The topology of the whole, in which an embedding graph takes the tokens."""
        for step in self._before.values():
            if step.when == "always":
                token = Part(Component(step.name, step.graph), step.inventory).token
                assert token is not None
                because = f"taken by {step.name}, whose embeddings the decoder takes"
                return replace(
                    topology,
                    token_input=token.name,
                    inputs_embeds_input=None,
                    roles=(
                        PortRole(token.name, "input", Role.TOKEN, because),
                        *(role for role in topology.roles if role.role is not Role.EMBEDS),
                    ),
                )
        return topology

    # Encoders.

    def _encoder(
        self, wanted: Sequence[str], roles: Mapping[str, PortRole], others: Sequence[Part]
    ) -> Part | None:
        """The graph that gives what the decoder takes of an encoder; None where there is none."""
        if not wanted:
            return None
        found = [
            (part, "")
            for part in others
            if any(part.output_named(name) or cross_output(part, name) for name in wanted)
            or (is_encoder(part) and any(roles[n].role is Role.ENCODER_HIDDEN_STATES for n in wanted))
        ]
        found = [pair for pair in found if pair[0].name not in self._before]
        if not found:
            self._refuse_missing(wanted[0])
            return None
        part, _ = self._only(found, wanted[0])
        wires = {}
        for port in part.inventory.inputs:
            name = f"{part.name}.{port.name}"
            wires[port.name] = always(Feed(name))
            is_token = part.token is not None and part.token.name == port.name
            kind: GivenKind = "tokens" if is_token else "mask" if "mask" in words(port.name) else "features"
            self._give(replace(port, name=name), port.name, kind, f"{port.name} of {part.name}")
        self._before[part.name] = _step(part, wires, once=True)
        return part

    def _hidden_states(self, port: Port, encoder: Part | None) -> Feed | Output:
        if encoder is None:
            self._give(port, port.name, "states", f"{port.name} in place of an encoder's")
            return Feed(port.name)
        own = encoder.output_named(port.name) or next(
            (name for name in HIDDEN_STATES if name in encoder.outputs), None
        )
        if own is None:
            floats = [name for name, out in encoder.outputs.items() if len(out.shape or ()) == 3]
            if len(floats) != 1:
                raise InputError(
                    f"{encoder.component.graph}: none of its outputs, {', '.join(encoder.outputs)}, is "
                    f"clearly what {port.name} of the decoder takes.",
                    next_action="Name it in genai_config.json, under model.encoder.outputs.",
                )
            own = floats[0]
        return Output(encoder.name, own)

    def _cross_kv(
        self,
        port: Port,
        role: PortRole,
        encoder: Part | None,
        hidden: Feed | Output | None,
        decoder: Sequence[Part],
    ) -> Wire:
        """Cross-attention KV: of the encoder, or of the decoder's own first call; never fed back later."""
        own = None if encoder is None else encoder.output_named(port.name) or cross_output(encoder, port.name)
        if encoder is not None and own is not None:
            return always(Output(encoder.name, own))
        maker = next(
            (
                (part, name)
                for part in decoder
                if part.component.on_prompt and role.pair is not None
                for name in part.outputs
                if role.pair in part.component.names_of(name)
            ),
            None,
        )
        if maker is None:
            self._give(port, port.name, "states", f"{port.name} in place of an encoder's")
            return always(Feed(port.name))
        part, name = maker
        shape = port.shape or ()
        grows = _grows(port, part.outputs[name])
        start = Fill(
            port.dtype or "float32",
            tuple(_extent(extent, axis) for axis, extent in enumerate(shape)),
            like=None if grows else hidden,
        )
        return Wire(start, Kept(part.name, name))

    def _encoder_mask(self, port: Port, encoder: Part | None, hidden: Feed | Output | None) -> Wire:
        given = None
        if encoder is not None:
            mask = next((name for name in encoder.inputs if "mask" in words(name)), None)
            given = None if mask is None else Feed(f"{encoder.name}.{mask}")
            if hidden is None:
                cross = [
                    Output(encoder.name, name)
                    for name, out in encoder.outputs.items()
                    if len(out.shape or ()) == 4
                ]
                if cross:
                    return always(Mask(port.dtype or "int64", cross[0], axis=2, given=given))
        if hidden is None:
            self._give(port, port.name, "mask", f"{port.name} in place of an encoder's")
            return always(Feed(port.name))
        return always(Mask(port.dtype or "int64", hidden, given=given))

    def _end_growing_states(
        self,
        sources: dict[str, Wire],
        hidden: Feed | Output | None,
        needed: Mapping[str, Port],
        roles: Mapping[str, PortRole],
        decoder: Sequence[Part],
    ) -> None:
        """Where cross KV is what came before and what hidden states add: they are given once alone."""
        outputs = {name: port for part in decoder for name, port in part.outputs.items()}
        grows = any(
            role.role in _CROSS_KV and role.pair in outputs and _grows(needed[name], outputs[role.pair or ""])
            for name, role in roles.items()
            if name in needed
        )
        for name, role in roles.items():
            if grows and role.role is Role.ENCODER_HIDDEN_STATES and hidden is not None and name in needed:
                port = needed[name]
                shape = tuple(_extent(extent, axis) for axis, extent in enumerate(port.shape or ()))
                sources[name] = Wire(hidden, Fill(port.dtype or "float32", shape))

    def _refuse_missing(self, port: str) -> None:
        """Name the component that the package declares for `port` and has not."""
        missing = [
            part
            for part in self.package.components.others
            if not part.graph.is_file() and not words(part.name) & _NOT_FOR_TEXT
        ]
        if missing:
            names = ", ".join(f"{part.name} ({part.graph.name})" for part in missing)
            raise InputError(
                f"{self.package.folder}: {port} of the decoder needs {names}, which the package declares and "
                "has not.",
                next_action="Copy it into the package, or name the decoder's .onnx file to drive it alone.",
            )

    def _only(self, found: Sequence[tuple[Part, str]], port: str) -> tuple[Part, str]:
        if len(found) > 1:
            raise InputError(
                f"{self.package.folder}: {', '.join(part.name for part, _ in found)} could all give {port} "
                "to the decoder.",
                next_action="Remove those that are not meant, or name them in genai_config.json.",
            )
        return found[0]

    def _give(self, port: Port, name: str, kind: GivenKind, because: str) -> None:
        self._given[port.name] = GivenInput(port, name, kind, because)

    def _inputs(self, inventory: PortInventory, steps: Iterable[Step]) -> tuple[Port, ...]:
        """The inputs of the whole: of the decoder first, then of others, those that are fed from outside."""
        ports = {port.name: port for port in inventory.inputs}
        for step in steps:
            for port in step.inventory.inputs:
                if isinstance(source := step.wires[port.name].first, Feed):
                    ports.setdefault(source.name, replace(port, name=source.name))
        fed = {
            wire.first.name for step in steps for wire in step.wires.values() if isinstance(wire.first, Feed)
        }
        return tuple(port for name, port in ports.items() if name in fed)


def _caches(topology: Topology) -> Iterator[str]:
    """The inputs that are fresh at the first call of a decode, and at no other."""
    scales = {port.name for port in topology.roles if port.role is Role.KV_SCALE}
    yield from (name for name in topology.kv_inputs if name not in scales)
    yield from (pair.input for pair in topology.state_pairs)
    for buffers in ("key_cache_inputs", "value_cache_inputs"):
        yield from (topology.static_cache or {}).get(buffers, ())


def _step(part: Part, wires: Mapping[str, Wire], *, once: bool = False) -> Step:
    component = part.component
    when: Literal["always", "first", "later", "once"] = "always"
    if once:
        when = "once"
    elif not component.on_steps:
        when = "first"
    elif not component.on_prompt:
        when = "later"
    return Step(component.name, component.graph, part.inventory, wires, when)


def _grows(past: Port, present: Port) -> bool:
    """Whether the present's shape says that something is appended to the past: `past + more`."""
    pairs = zip(past.shape or (), present.shape or (), strict=False)
    return any(
        isinstance(before, str) and isinstance(after, str) and before in re.split(r"\s*\+\s*", after)[:-1]
        for before, after in pairs
    )


def _extent(extent: Dimension, axis: int) -> int | None:
    """An extent to fill: the batch is one; an open one is the length of what an encoder gave."""
    if isinstance(extent, int):
        return extent
    return 1 if axis == 0 else None


def _no_features(shape: Sequence[Dimension]) -> tuple[int, ...]:
    """The shape of no features at all: zero wherever it is open, but for the batch."""
    return tuple(
        extent if isinstance(extent, int) else 1 if axis == 0 and "batch" in str(extent) else 0
        for axis, extent in enumerate(shape)
    )
