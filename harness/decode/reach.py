"""How far a decode may go: behind the end of a table of positions neither a runtime nor the oracle goes on.

A length that a package merely declares ends nothing, since rotary angles can be computed for any position. It
counts where the graph holds a table of just that length and does not show how it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from harness.decode.assembling import Assembly, GivenInput
from harness.decode.buffers import StaticBuffers
from harness.decode.caches import GrowingKv, ReplacedStates
from harness.decode.calls import Call
from harness.decode.computed import Fed, Hollow
from harness.decode.encoder_reach import check_encoder, fitted
from harness.decode.plan import ExtraFeeds, FeedPlan
from harness.decode.tables import Looked, Reading, Table, Tables
from harness.decode.wiring import Feed, Fill, Step
from harness.engines.tensor_types import numpy_dtype
from harness.errors import InputError
from harness.package import Package
from harness.package.components import mapping_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Declared", "Reach", "declared_lengths"]

_LEARNED: Mapping[str, tuple[str, int]] = {
    "bart": ("max_position_embeddings", 2),
    "biogpt": ("max_position_embeddings", 2),
    "blenderbot": ("max_position_embeddings", 0),
    "gpt2": ("n_positions", 0),
    "gpt_bigcode": ("n_positions", 0),
    "gpt_neo": ("max_position_embeddings", 0),
    "marian": ("max_position_embeddings", 0),
    "mbart": ("max_position_embeddings", 2),
    "opt": ("max_position_embeddings", 2),
    "pegasus": ("max_position_embeddings", 0),
    "whisper": ("max_target_positions", 0),
}
"""Models that look positions up: for a `model_type` the key of `config.json` that counts them, and how many
rows stand before the first (transformers, the position embeddings of each)."""

_KEYS = ("n_positions", "max_target_positions", "max_position_embeddings")
_RELATIVE = frozenset({"longt5", "mt5", "t5", "umt5"})
"""Models whose positions are distances, though their configuration counts positions (transformers)."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A number of positions that a package declares.

    Attributes:
        positions: how many.
        place: the file and the key.
        rows: of the table in which such models look them up; None where they may do otherwise.
    """

    positions: int
    place: str
    rows: int | None = None


def declared_lengths(package: Package) -> tuple[Declared, ...]:
    """What a package says about how many positions its decoder knows, the smallest number first.

    Looked up are `model.context_length` of `genai_config.json`, and of `config.json`, also in its
    `text_config`, `n_positions`, `max_target_positions` and `max_position_embeddings`.

    Raises:
        InputError: a file cannot be read.
    """
    config = package.config("config.json")
    genai = mapping_at(package.config("genai_config.json"), "model")
    found = list(_declared("genai_config.json: model.", genai, ("context_length",)))
    found += _declared("config.json: ", config, _KEYS)
    found += _declared("config.json: text_config.", mapping_at(config, "text_config"), _KEYS)
    return tuple(sorted(found, key=lambda each: each.positions))


def _declared(place: str, section: Mapping[str, Any], keys: Sequence[str]) -> Iterator[Declared]:
    kind = str(section.get("model_type"))
    learned, before = _LEARNED.get(kind, ("", 0))
    for key in () if kind in _RELATIVE else keys:
        value = section.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield Declared(value, place + key, value + before if key == learned else None)


@dataclass(frozen=True, slots=True)
class Reach:
    """How far the graphs of a decoder go. Each of them is parsed once.

    Attributes:
        assembly: the graphs.
        config: `config.json` of the package.
        declared: what the package says of positions.
    """

    assembly: Assembly
    config: Mapping[str, Any] = field(default_factory=dict)
    declared: tuple[Declared, ...] = ()
    _tables: dict[Path, Tables] = field(default_factory=dict)

    def check(self, plan: FeedPlan, token: str, prompt: Sequence[int], new: int) -> str | None:
        """See that every row is there that a decode reads. The last new token is never fed.

        Args:
            plan: what each call is fed.
            token: the input of the whole that takes token IDs.
            prompt: token IDs, at least one.
            new: tokens to decode after it.

        Returns:
            what to warn of: that the decode goes beyond a declared length.

        Raises:
            InputError: a token ID or a position has no row, or what an encoder is given does not fit it.
        """
        for tables, given, fed in self._encoders(plan.extra):
            check_encoder(tables, given, fed, self.config)
        asked = _Asked(plan, tuple(prompt), new)
        readings = list(self._readings(asked))
        for step, reading in readings:
            if isinstance(reading, Looked) and _source(step, reading.port) == token:
                _check_tokens(step, reading, prompt)
        beyond = next((pair for pair in readings if not pair[1].fits), None)
        most = 0 if beyond is None else self._most(asked)
        if beyond is not None and most:
            raise self._too_long(beyond[0].graph.name, beyond[1].table, asked, most)
        over = next((each for each in self.declared if each.positions < asked.total), None)
        if over is None or beyond is not None:
            return None
        if not any(_follows(step, reading, token, asked.total) for step, reading in readings):
            self._refuse_declared(asked)
        return (
            f"{over.place} is {over.positions}, and {asked}. No table of the graph is seen to end there: the "
            "decode goes on."
        )

    def fitted(self, given: Sequence[GivenInput], values: ExtraFeeds) -> tuple[GivenInput, ...]:
        """Inputs of the whole, with the lengths that encoders need where those that were made up do not fit.

        Args:
            given: inputs for which values were made up.
            values: by port of the whole.
        """
        for tables, own, fed in self._encoders(values):
            changed = dict(zip(own, fitted(tables, own, fed), strict=True))
            given = [changed.get(each, each) for each in given]
        return tuple(given)

    def _encoders(
        self, values: ExtraFeeds
    ) -> Iterator[tuple[Tables, tuple[GivenInput, ...], dict[str, NDArray[Any]]]]:
        """The graphs that run once a decode, with what they must be given, and the values of it."""
        arrays = _arrays(values)
        for step in self.assembly.wiring.steps:
            if step.when == "once":
                given = tuple(
                    each
                    for each in self.assembly.given
                    if each.name in step.wires and step.wires[each.name].first == Feed(each.port.name)
                )
                fed = {each.name: arrays[each.port.name] for each in given if each.port.name in arrays}
                yield self._tables_of(step), given, fed

    def _tables_of(self, step: Step) -> Tables:
        """Those of a graph."""
        if step.graph not in self._tables:
            self._tables[step.graph] = Tables(step.graph)
        return self._tables[step.graph]

    def _readings(self, asked: _Asked) -> Iterator[tuple[Step, Reading]]:
        """What the first call reads, and the last: each position between them is between theirs."""
        for call in asked.calls():
            first = call.past == 0
            fed = _fed(asked, call)
            for step in self.assembly.wiring.steps:
                if step.when in ("always", "first" if first else "later"):
                    for reading in self._tables_of(step).read(_given(step, fed, first=first)):
                        yield step, reading

    def _most(self, asked: _Asked) -> int:
        """How many tokens fit, of a decode that does not; 0 where not even one does.

        Then it is not the length that is wrong, and what is the runtime will say.
        """
        fits, ends = 0, asked.total
        while ends - fits > 1:
            middle = (fits + ends) // 2
            if all(reading.fits for _, reading in self._readings(asked.cut(middle))):
                fits = middle
            else:
                ends = middle
        return fits

    def _refuse_declared(self, asked: _Asked) -> None:
        """A table as long as declared ends there, though the graph does not show how it is read."""
        for each in self.declared:
            if each.rows is None or each.positions >= asked.total:
                continue
            for step in self.assembly.wiring.steps:
                if step.when != "once" and self._tables_of(step).has_matrix_of(each.rows):
                    raise self._too_long(step.graph.name, None, asked, each.positions)

    def _too_long(self, graph: str, table: Table | None, asked: _Asked, most: int) -> InputError:
        places = [] if table is None else [f"{table.name} {list(table.shape)}"]
        places += [each.place for each in self.declared if each.positions == most]
        left = most - len(asked.prompt) + 1
        return InputError(
            f"{graph} has rows for {most} positions ({'; '.join(places)}), and {asked}: all but the last are "
            "fed.",
            next_action=(f"Ask for at most {left} new tokens" if left > 0 else "Give a shorter prompt")
            + ", or export the model with more positions.",
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """A decode: what each call is fed, the prompt, and how many tokens are to follow it."""

    plan: FeedPlan
    prompt: tuple[int, ...]
    new: int

    def __str__(self) -> str:
        return f"a prompt of {len(self.prompt)} with {self.new} new tokens takes {self.total}"

    @property
    def total(self) -> int:
        """Tokens that are fed."""
        return len(self.prompt) + self.new - 1

    def calls(self) -> Iterator[Call]:
        """The first call and the last one."""
        one = self.plan.tokens_a_call is not None
        first = Call(self.prompt[:1] if one else self.prompt, 0)
        yield first
        if first.total < self.total:
            yield Call(self.prompt[-1:], self.total - 1)

    def cut(self, total: int) -> _Asked:
        """The same with as many tokens fed."""
        prompt = self.prompt[:total]
        return _Asked(self.plan, prompt, total - len(prompt) + 1)


def _fed(asked: _Asked, call: Call) -> dict[str, Fed]:
    """What a call is fed, by input of the whole; of caches the shape alone is known."""
    plan = asked.plan
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for cache in plan.caches:
        if isinstance(cache, GrowingKv):
            for pair in cache.pairs:
                shape = (*pair.shape[: pair.axis], call.past, *pair.shape[pair.axis + 1 :])
                if not pair.windowed:  # how many rows a window keeps shows at a run alone
                    shapes[pair.past] = (pair.dtype, shape)
        elif isinstance(cache, ReplacedStates):
            shapes |= {state.input: (state.dtype, state.shape) for state in cache.pairs}
        elif isinstance(cache, StaticBuffers):
            for buffer in cache.buffers:
                rows = buffer.shape[buffer.axis] or asked.total
                shape = (*buffer.shape[: buffer.axis], rows, *buffer.shape[buffer.axis + 1 :])
                shapes[buffer.input] = (buffer.dtype, shape)
    caches = {name: Hollow(numpy_dtype(dtype), shape) for name, (dtype, shape) in shapes.items()}
    return {**_arrays(plan.extra), **caches, **{feed.name: feed.array(call) for feed in plan.calls}}


def _arrays(values: ExtraFeeds) -> dict[str, NDArray[Any]]:
    """Those that are on the host: nothing else is fed before anything is opened."""
    return {
        name: cast("NDArray[Any]", value) for name, value in values.items() if hasattr(value, "__array__")
    }


def _given(step: Step, fed: Mapping[str, Fed], *, first: bool) -> dict[str, Fed]:
    """What a graph is fed of that, by its own inputs; what other graphs give it is not known."""
    import numpy as np

    found: dict[str, Fed] = {}
    for name, wire in step.wires.items():
        source = wire.first if first else wire.later
        if isinstance(source, Feed) and source.name in fed:
            found[name] = fed[source.name]
        elif isinstance(source, Fill) and source.like is None and None not in source.shape:
            shape = tuple(extent or 0 for extent in source.shape)
            found[name] = np.full(shape, source.value, dtype=numpy_dtype(source.dtype))
    return found


def _source(step: Step, port: str | None) -> str | None:
    """The input of the whole behind an input of a graph."""
    source = None if port is None or port not in step.wires else step.wires[port].first
    return source.name if isinstance(source, Feed) else None


def _follows(step: Step, reading: Reading, token: str, total: int) -> bool:
    """Whether a reading shows that a table of positions goes on as far as the decode does."""
    return (
        isinstance(reading, Looked) and _source(step, reading.port) != token and reading.highest >= total - 1
    )


def _check_tokens(step: Step, reading: Looked, prompt: Sequence[int]) -> None:
    for index, token in enumerate(prompt):
        if not 0 <= token < reading.rows:
            raise InputError(
                f"Token ID {token} at position {index} is outside the vocabulary (0 to {reading.rows - 1}): "
                f"{reading.table.name} {list(reading.table.shape)} of {step.graph.name} has no row for it.",
                next_action="Use IDs of the tokenizer that the model was exported with.",
            )
