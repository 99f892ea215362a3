"""From a topology to a plan of what is fed at each call, checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from harness.decode.axes import UnfeedableError, extra_rows
from harness.decode.buffers import Buffer, FixedScales, StaticBuffers, buffer_of
from harness.decode.caches import (
    CacheStrategy,
    GrowingKv,
    GrowingPair,
    ReplacedPair,
    ReplacedStates,
    growing_pair,
    replaced_pair,
)
from harness.decode.calls import (
    CallInput,
    control_input,
    mask_input,
    positions_input,
    token_input,
    total_input,
    write_index_input,
    zero_input,
)
from harness.decode.plan import ExtraFeeds, FeedPlan, Room
from harness.errors import NotDrivableError
from harness.ports import Dimension, Port, PortInventory
from harness.topology.spec import Role, Topology

__all__ = ["ExtraFeeds", "FeedPlan", "plan_feeds"]

_Made = TypeVar("_Made")

_ROWS = 2
"""The axis of the rows of a cache that rolls: [batch, heads, rows, width]."""

_MOST_NAMES = 4
"""How many ports a message lists for one reason; the error holds them all."""

_NOT_FED = {
    Role.EMBEDS: "takes embeddings, and only token IDs can be fed",
    Role.CROSS_KV_KEY: "takes cross-attention KV, which an encoder computes",
    Role.CROSS_KV_VALUE: "takes cross-attention KV, which an encoder computes",
    Role.ENCODER_HIDDEN_STATES: "takes the output of an encoder",
    Role.ENCODER_ATTENTION_MASK: "takes the mask of an encoder",
    Role.KV_KEY: "is a KV buffer of fixed size, and nothing says where to write in it",
    Role.KV_VALUE: "is a KV buffer of fixed size, and nothing says where to write in it",
}
"""What the loop does not feed, as a clause after the port's name."""


def plan_feeds(topology: Topology, inventory: PortInventory, *, extra: ExtraFeeds | None = None) -> FeedPlan:
    """Check that a decoder with these ports can be driven, and how.

    Args:
        topology: the role of every port.
        inventory: the ports of the session that will run, or of the graph file.
        extra: values of inputs that the loop itself has none for, fed at every call.

    Raises:
        NotDrivableError: naming every port that cannot be fed, each with the reason.
    """
    return _Planner(topology, inventory, extra or {}).plan()


class _Planner:
    """Collects what cannot be fed, so that one message says it all."""

    def __init__(self, topology: Topology, inventory: PortInventory, extra: ExtraFeeds) -> None:
        self._topology = topology
        self._extra = extra
        self._inputs, self._outputs = _as_written(topology, inventory)
        self._roles = {role.name: role.role for role in topology.roles if role.direction == "input"}
        self._fed = set(extra)
        self._problems: dict[str, str] = {
            name: "is given a value, and is no input of the graph"
            for name in extra
            if name not in self._inputs
        }
        self._batch, self._sequence = self._symbols()

    def plan(self) -> FeedPlan:
        topology = self._topology
        growing, scales, fixed = self._kv()
        buffers = StaticBuffers((*fixed, *self._buffers()))
        states = ReplacedStates(tuple(self._states()))
        caches: tuple[CacheStrategy, ...] = (growing, scales, buffers, states)
        smallest = buffers.smallest
        room = None if smallest is None else Room(smallest.shape[smallest.axis], smallest.input)
        scores = self._outputs.get(topology.logits_output or "", Port("", None, None)).shape or ()
        rows = scores[0] if len(scores) == 2 else None
        token = self._call(topology.token_input, token_input, rows=rows)
        calls = [
            None if token is None else token[0],
            self._call(
                topology.attention_mask_input, mask_input, capacity=None if room is None else room.tokens
            ),
            self._call(topology.position_ids_input, positions_input),
            *self._controls(),
        ]
        self._refuse_the_rest()
        logits = topology.logits_output
        if logits is None or logits not in self._outputs:
            self._problems[logits or "logits"] = "is needed to choose a token, and is no output of the graph"
        if topology.token_input is None and not self._problems:
            self._problems["input_ids"] = "is needed to feed token IDs, and is no input of the graph"
        if self._problems or token is None or logits is None:
            raise NotDrivableError(
                f"The decode loop cannot drive this graph: {_listed(self._problems)}.",
                next_action="Export a decoder that takes token IDs, at most a mask, positions and lengths, "
                "and caches whose extents the graph or genai_config.json says.",
                ports=tuple(self._problems),
            )
        return FeedPlan(
            calls=tuple(call for call in calls if call is not None),
            caches=tuple(cache for cache in caches if cache.inputs),
            logits=logits,
            tokens_a_call=token[1] or self._tokens_that_states_allow(),
            room=room,
            extra=self._extra,
        )

    def _symbols(self) -> tuple[Dimension, Dimension]:
        """How the port that drives the decoder spells its batch and the tokens of a call."""
        token = self._inputs.get(self._topology.token_input or "")
        embeds = self._inputs.get(self._topology.inputs_embeds_input or "")
        shape = ((embeds.shape or ())[:-1] if embeds is not None else ()) if token is None else token.shape
        if not shape:
            return None, None
        return (shape[0] if len(shape) > 1 else None), shape[-1]

    def _kv(self) -> tuple[GrowingKv, FixedScales, list[Buffer]]:
        """KV that grows, scales that do not, and KV in buffers that the attention itself writes."""
        facts = self._topology.facts
        growing: list[GrowingPair] = []
        scales: list[ReplacedPair] = []
        buffers: list[Buffer] = []
        for past, present in zip(self._topology.kv_inputs, self._topology.kv_outputs, strict=True):
            source, target = self._pair(past, present)
            if source is None or target is None:
                continue
            is_scale = self._roles.get(past) is Role.KV_SCALE
            if is_scale and source.shape is not None and all(isinstance(e, int) for e in source.shape[1:]):
                scale = self._made(source, replaced_pair, output=present, batch=self._batch)
                scales += () if scale is None else (scale,)
            elif past in facts.row_axes or past in facts.windows:
                axis, window = facts.row_axes.get(past, _ROWS), facts.windows.get(past)
                buffer = self._made(
                    source, buffer_of, output=target, batch=self._batch, axis=axis, window=window
                )
                buffers += () if buffer is None else (buffer,)
            else:
                why = "cannot be threaded as growing KV: "
                pair = self._made(source, growing_pair, why=why, present=target, batch=self._batch)
                growing += () if pair is None else (pair,)
        return GrowingKv(tuple(growing)), FixedScales(tuple(scales)), buffers

    def _buffers(self) -> Iterator[Buffer]:
        """The buffers of a static cache."""
        fields = self._topology.static_cache or {}
        for kind in ("key", "value"):
            names = (fields.get(f"{kind}_cache_inputs", ()), fields.get(f"{kind}_cache_outputs", ()))
            for name, output in zip(*names, strict=True):
                source, target = self._pair(name, output)
                if source is None or target is None:
                    continue
                axis = self._topology.facts.row_axes.get(name)
                buffer = self._made(source, buffer_of, output=target, batch=self._batch, axis=axis)
                if buffer is not None:
                    yield buffer

    def _states(self) -> Iterator[ReplacedPair]:
        for state in self._topology.state_pairs:
            source, target = self._pair(state.input, state.output)
            if source is None or target is None:
                continue
            if (state.init, state.update) != ("zeros", "replace"):
                self._problems[state.input] = (
                    f"is declared init {state.init!r}, update {state.update!r}; only zeros, replace is known"
                )
                continue
            why = "cannot be carried as a state: "
            pair = self._made(source, replaced_pair, why=why, output=state.output, batch=self._batch)
            if pair is not None:
                yield pair

    def _controls(self) -> Iterator[CallInput | None]:
        """Lengths and write indices, and optional inputs, which stay at zero."""
        topology = self._topology
        static = topology.static_cache or {}
        yield self._call(static.get("write_indices_input"), write_index_input, sequence=self._sequence)
        yield self._call(static.get("kv_sequence_length_input"), total_input)
        optional = dict.fromkeys(topology.optional_inputs, Role.OPTIONAL)
        for name, role in (self._roles | optional).items():
            if name in self._fed or name not in self._inputs:
                continue
            if role is Role.CONTROL:
                last = name in topology.facts.last_token_indices
                yield self._call(name, control_input, last_token=last)
            elif role is Role.OPTIONAL:
                yield self._call(name, zero_input, batch=self._batch, sequence=self._sequence)

    def _tokens_that_states_allow(self) -> int | None:
        """1 where a state comes back in its own shape only after one token, None where any number does."""
        for pair in self._topology.state_pairs:
            before, after = self._inputs[pair.input].shape or (), self._outputs[pair.output].shape or ()
            for length, extent in zip(before, after, strict=False):
                rows = extra_rows(extent, self._sequence)
                if rows is not None and length == rows + 1:
                    return 1
        return None

    def _pair(self, source: str, target: str) -> tuple[Port | None, Port | None]:
        """Both ports of a cache; notes which is missing."""
        self._fed.add(source)
        if source in self._extra:
            return None, None
        if source not in self._inputs:
            self._problems[source] = "stands in the topology, and is no input of the graph"
            return None, None
        if target not in self._outputs:
            self._problems[target] = "stands in the topology, and is no output of the graph"
            return None, None
        return self._inputs[source], self._outputs[target]

    def _call(self, name: str | None, make: Callable[..., _Made], **options: Any) -> _Made | None:
        """The input `name`, made for every call; None where there is none, or where it cannot be fed."""
        if name is None or name in self._extra:
            return None
        self._fed.add(name)
        if name not in self._inputs:
            self._problems[name] = "stands in the topology, and is no input of the graph"
            return None
        return self._made(self._inputs[name], make, **options)

    def _made(self, port: Port, make: Callable[..., _Made], *, why: str = "", **options: Any) -> _Made | None:
        """What `make` makes of `port`; notes the reason, after `why`, where that cannot be fed."""
        try:
            return make(port, **options)
        except UnfeedableError as error:
            self._problems[port.name] = f"{why}{error}"
            return None

    def _refuse_the_rest(self) -> None:
        """Every other input of the graph needs a value that nobody has."""
        topology = self._topology
        named = {topology.inputs_embeds_input: Role.EMBEDS}
        named |= dict.fromkeys(topology.cross_kv_inputs, Role.CROSS_KV_KEY)
        named |= {topology.encoder_hidden_states_input: Role.ENCODER_HIDDEN_STATES}
        for name in self._inputs:
            if name not in self._fed:
                role = self._roles.get(name, named.get(name))
                why = None if role is None else _NOT_FED.get(role)
                self._problems.setdefault(name, why or "is an input that nobody has a value for")


def _as_written(
    topology: Topology, inventory: PortInventory
) -> tuple[Mapping[str, Port], Mapping[str, Port]]:
    """Inputs and outputs of a session, with all that is known about their extents.

    A runtime may infer extents that the file leaves open, and name its symbols anew: those of the file are
    taken, since they say what grows together.
    """
    file = topology.inventory or PortInventory()
    spelled = [{port.name: port.shape for port in ports} for ports in (file.inputs, file.outputs)]
    inputs = {
        port.name: _settled(port, spelled[0].get(port.name), topology.facts.extents.get(port.name, {}))
        for port in inventory.inputs
    }
    outputs = {port.name: _settled(port, spelled[1].get(port.name), {}) for port in inventory.outputs}
    return inputs, outputs


def _settled(port: Port, spelled: tuple[Dimension, ...] | None, extents: Mapping[int, int]) -> Port:
    """`port` with its open axes as they are known, or else as the file spells them."""
    if port.shape is None:
        return port
    symbols = spelled if spelled is not None and len(spelled) == len(port.shape) else port.shape
    shape = tuple(
        extent if isinstance(extent, int) else extents.get(axis, symbol)
        for axis, (extent, symbol) in enumerate(zip(port.shape, symbols, strict=True))
    )
    return replace(port, shape=shape)


def _listed(problems: Mapping[str, str]) -> str:
    """Each reason once, after the ports that it holds for; long lists of ports are cut."""
    by_reason: dict[str, list[str]] = {}
    for port, why in problems.items():
        by_reason.setdefault(why, []).append(port)
    return "; ".join(
        ", ".join(ports[:_MOST_NAMES])
        + (f" and {len(ports) - _MOST_NAMES} more (each)" if len(ports) > _MOST_NAMES else "")
        + f" {why}"
        for why, ports in by_reason.items()
    )
