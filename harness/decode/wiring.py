"""Several graphs that work as one: where each input of each graph gets its value from.

A wiring is what a runtime would call a pipeline, as data. From outside it has the ports of one decoder:
tokens, mask, positions and caches in, logits and caches out. What passes between its graphs, and what is
kept from the first call of a decode, is nobody else's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from harness.ports import Port, PortInventory

__all__ = ["Feed", "Fill", "Kept", "Mask", "Output", "Source", "Step", "Wire", "Wiring", "always"]


@dataclass(frozen=True, slots=True)
class Feed:
    """What is fed to the input `name` of the whole."""

    name: str


@dataclass(frozen=True, slots=True)
class Output:
    """What the graph `step` gave at the output `port`, in this call, or when it ran once."""

    step: str
    port: str


@dataclass(frozen=True, slots=True)
class Kept:
    """What a graph gave at the output `port` at the first call of this decode."""

    step: str
    port: str


@dataclass(frozen=True, slots=True)
class Fill:
    """A constant.

    Attributes:
        dtype: element type.
        shape: extents; None is the length of `like`, its axis 1.
        value: of every element.
        like: what has the length; where there is none, a length is 0.
    """

    dtype: str
    shape: tuple[int | None, ...]
    value: int = 0
    like: Feed | Output | None = None


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of what an encoder gave: that of its own input where it has as many places, else all ones.

    Attributes:
        dtype: element type.
        over: what the encoder gave.
        axis: along which it has its places.
        given: the mask of the encoder's own input; None where it takes none.
    """

    dtype: str
    over: Feed | Output
    axis: int = 1
    given: Feed | None = None


Source: TypeAlias = Feed | Output | Kept | Fill | Mask


@dataclass(frozen=True, slots=True)
class Wire:
    """Where an input gets its value from, at the first call of a decode and at all later ones."""

    first: Source
    later: Source


def always(source: Source) -> Wire:
    """The same source at every call."""
    return Wire(source, source)


@dataclass(frozen=True, slots=True)
class Step:
    """A graph in its turn.

    Attributes:
        name: what the package calls it.
        graph: the file.
        inventory: its ports.
        wires: one for each of its inputs.
        when: it runs at every call; at the first one of a decode alone, or at all others; or `once`, again
            only when it is fed something else.
    """

    name: str
    graph: Path
    inventory: PortInventory
    wires: Mapping[str, Wire]
    when: Literal["always", "first", "later", "once"] = "always"


@dataclass(frozen=True, slots=True)
class Wiring:
    """Graphs in the order in which they run, and the ports of the whole.

    Attributes:
        steps: the graphs.
        inputs: the inputs of the whole.
        outputs: for each output of the whole, which graphs give it; at each call one of them does.
        ports: the outputs of the whole as ports.
        caches: the inputs of the whole that are fresh at the first call of a decode: empty, or zeros as
            the session made them.
        notes: what the report shall say about it, by name.
    """

    steps: tuple[Step, ...]
    inputs: tuple[Port, ...]
    outputs: Mapping[str, tuple[Output, ...]]
    ports: tuple[Port, ...]
    caches: frozenset[str] = frozenset()
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def inventory(self) -> PortInventory:
        """The ports of the whole."""
        return PortInventory(self.inputs, self.ports)

    @property
    def is_plain(self) -> bool:
        """True where it is a single graph that is fed all that it takes under its own names."""
        (step, *more) = self.steps
        return not more and all(wire == always(Feed(name)) for name, wire in step.wires.items())
