"""From a topology to what is fed at each call, checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from harness.decode.caches import (
    CacheStrategy,
    GrowingKv,
    ReplacedStates,
    UnfeedableError,
    growing_pair,
    replaced_pair,
)
from harness.engines.base import Session, TensorHandle
from harness.errors import NotDrivableError
from harness.ports import Dimension, Port, PortInventory
from harness.topology.spec import Role, Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ExtraFeeds", "FeedPlan", "plan_feeds"]

ExtraFeeds: TypeAlias = "Mapping[str, NDArray[Any] | TensorHandle]"
"""Values of inputs that are the same at every call, by port: host arrays, or handles of the session."""

_PortProblem: TypeAlias = Callable[[Port], str | None]

_INTEGERS = frozenset({"int32", "int64"})

_MOST_NAMES = 4
"""How many ports a message lists for one reason; the error holds them all."""

_NOT_FED = {
    Role.EMBEDS: "takes embeddings, and only token IDs can be fed",
    Role.CROSS_KV_KEY: "takes cross-attention KV, which an encoder computes",
    Role.CROSS_KV_VALUE: "takes cross-attention KV, which an encoder computes",
    Role.ENCODER_HIDDEN_STATES: "takes the output of an encoder",
    Role.ENCODER_ATTENTION_MASK: "takes the mask of an encoder",
    Role.CONTROL: "is a control input, and there is no value to give it",
    Role.OPTIONAL: "is an optional input, and there is no value to give it",
    Role.KV_KEY: "is a KV buffer of fixed size, which is written in place",
    Role.KV_VALUE: "is a KV buffer of fixed size, which is written in place",
    Role.KV_FUSED: "takes key and value fused into one tensor",
    Role.KV_SCALE: "takes the scales of a quantised cache",
}
"""What the loop does not feed, as a clause after the port's name."""


@dataclass(frozen=True, slots=True)
class FeedPlan:
    """What to feed at each call and what to ask for.

    Attributes:
        token: the port of the token IDs, [1, tokens].
        mask: the port of the attention mask, [1, all tokens], or None.
        positions: the port of the position IDs, [1, tokens], or None.
        caches: what is carried from call to call.
        logits: the output that chooses the next token.
        extra: what is fed at every call and never fed back.
    """

    token: Port
    mask: Port | None
    positions: Port | None
    caches: tuple[CacheStrategy, ...]
    logits: str
    extra: ExtraFeeds = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Every output that a call must give."""
        return (self.logits, *(name for cache in self.caches for name in cache.outputs))

    def constants(self, session: Session) -> dict[str, TensorHandle]:
        """What every call is fed alike; to be asked for once a decode, as arrays are copied in."""
        return {
            name: session.place(cast("NDArray[Any]", value)) if hasattr(value, "__array__") else value
            for name, value in self.extra.items()
        }

    def start(self, session: Session) -> dict[str, TensorHandle]:
        """Fresh caches for the first call."""
        return {name: handle for cache in self.caches for name, handle in cache.start(session).items()}

    def advance(self, outputs: Mapping[str, TensorHandle], *, tokens: int) -> dict[str, TensorHandle]:
        """The caches for the next call; see `CacheStrategy.advance`."""
        return {
            name: handle
            for cache in self.caches
            for name, handle in cache.advance(outputs, tokens=tokens).items()
        }

    def inputs(self, session: Session, new: Sequence[int], *, past: int) -> dict[str, TensorHandle]:
        """The inputs of a call with the token IDs `new` after `past` earlier ones: IDs, mask, positions."""
        import numpy as np

        total = past + len(new)
        feeds = {self.token.name: session.place(np.array([new], dtype=self.token.dtype))}
        if self.mask is not None:
            feeds[self.mask.name] = session.place(np.ones((1, total), dtype=self.mask.dtype))
        if self.positions is not None:
            positions = np.arange(past, total, dtype=self.positions.dtype)
            feeds[self.positions.name] = session.place(positions[np.newaxis])
        return feeds


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
        self._inputs = {port.name: port for port in inventory.inputs}
        self._outputs = {port.name: port for port in inventory.outputs}
        self._roles = {role.name: role.role for role in topology.roles if role.direction == "input"}
        self._problems: dict[str, str] = {}

    def plan(self) -> FeedPlan:
        topology = self._topology
        token = self._integer_port(topology.token_input, self._token_problem)
        mask = self._integer_port(topology.attention_mask_input, _rank_2_problem)
        positions = self._integer_port(topology.position_ids_input, _rank_2_problem)
        batch: Dimension = token.shape[0] if token is not None and token.shape else None
        caches = (self._growing_kv(batch), self._replaced_states(batch))
        self._refuse_the_rest(token, mask, positions)
        logits = topology.logits_output
        if logits is None or logits not in self._outputs:
            self._problems[logits or "logits"] = "is needed to choose a token, and is no output of the graph"
        if token is None and not self._problems:
            self._problems["input_ids"] = "is needed to feed token IDs, and is no input of the graph"
        if self._problems or token is None or logits is None:
            raise NotDrivableError(
                f"The decode loop cannot drive this graph: {_listed(self._problems)}.",
                next_action="Export a decoder that takes token IDs, KV that grows from length zero or states "
                "of fixed shape, and at most a mask and positions of rank 2.",
                ports=tuple(self._problems),
            )
        return FeedPlan(
            token=token,
            mask=mask,
            positions=positions,
            caches=tuple(cache for cache in caches if cache.inputs),
            logits=logits,
            extra=self._extra,
        )

    def _integer_port(self, name: str | None, problem: _PortProblem) -> Port | None:
        """The input `name` if integers of rank 2 can be fed to it; notes a problem if not."""
        if name is None:
            return None
        port = self._inputs.get(name)
        if port is None:
            self._problems[name] = "stands in the topology, and is no input of the graph"
            return None
        if port.dtype not in _INTEGERS:
            self._problems[name] = f"has dtype {port.dtype}, and only int32 and int64 can be fed"
        elif why := problem(port):
            self._problems[name] = why
        return port

    def _token_problem(self, port: Port) -> str | None:
        if (why := _rank_2_problem(port)) is not None or port.shape is None:
            return why
        if isinstance(port.shape[1], int):
            return f"takes exactly {port.shape[1]} tokens a call, and the loop feeds a whole prompt"
        return None

    def _growing_kv(self, batch: Dimension) -> GrowingKv:
        pairs = []
        topology = self._topology
        for past, present in zip(topology.kv_inputs, topology.kv_outputs, strict=True):
            if past in self._problems or not self._exist(past, present):
                continue
            if self._roles.get(past) in (Role.KV_FUSED, Role.KV_SCALE):
                self._problems[past] = _NOT_FED[self._roles[past]]
            elif topology.static_cache is not None:
                self._problems[past] = _NOT_FED[Role.KV_KEY]
            else:
                try:
                    pairs.append(growing_pair(self._inputs[past], self._outputs[present], batch=batch))
                except UnfeedableError as error:
                    self._problems[past] = f"cannot be threaded as growing KV: {error}"
        return GrowingKv(tuple(pairs))

    def _replaced_states(self, batch: Dimension) -> ReplacedStates:
        pairs = []
        for state in self._topology.state_pairs:
            if not self._exist(state.input, state.output):
                continue
            if (state.init, state.update) != ("zeros", "replace"):
                self._problems[state.input] = (
                    f"is declared init {state.init!r}, update {state.update!r}; only zeros, replace is known"
                )
                continue
            try:
                pairs.append(replaced_pair(self._inputs[state.input], state.output, batch=batch))
            except UnfeedableError as error:
                self._problems[state.input] = f"cannot be carried as a state: {error}"
        return ReplacedStates(tuple(pairs))

    def _exist(self, source: str, target: str) -> bool:
        if source not in self._inputs:
            self._problems[source] = "stands in the topology, and is no input of the graph"
        elif target not in self._outputs:
            self._problems[target] = "stands in the topology, and is no output of the graph"
        else:
            return True
        return False

    def _refuse_the_rest(self, *fed: Port | None) -> None:
        """Every other input of the graph needs a value that nobody has."""
        topology = self._topology
        known = {port.name for port in fed if port is not None} | set(self._extra)
        self._problems |= {
            name: "is given a value, and is no input of the graph"
            for name in self._extra
            if name not in self._inputs
        }
        known.update(topology.kv_inputs, (pair.input for pair in topology.state_pairs))
        named = {topology.inputs_embeds_input: Role.EMBEDS}
        named |= dict.fromkeys(topology.cross_kv_inputs, Role.CROSS_KV_KEY)
        named |= {topology.encoder_hidden_states_input: Role.ENCODER_HIDDEN_STATES}
        named |= dict.fromkeys(topology.optional_inputs, Role.OPTIONAL)
        for name in self._inputs:
            if name not in known:
                role = self._roles.get(name, named.get(name))
                why = None if role is None else _NOT_FED.get(role)
                self._problems.setdefault(name, why or "is an input that nobody has a value for")


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


def _rank_2_problem(port: Port) -> str | None:
    if port.shape is None:
        return None
    if len(port.shape) != 2:
        return f"has rank {len(port.shape)}, and only rank 2 can be fed"
    if isinstance(port.shape[0], int) and port.shape[0] != 1:
        return f"takes a batch of {port.shape[0]}, and the loop decodes one sequence"
    return None
