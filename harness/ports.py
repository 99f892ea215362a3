"""Graph ports: names, dtypes and shapes of a graph's inputs and outputs.

Reading them needs neither numpy nor a runtime, and neither weights nor nodes are parsed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Dimension", "Port", "PortInventory"]

Dimension: TypeAlias = int | str | None
"""One axis of a shape: concrete (int), or symbolic (a name, or None where it has none)."""


@dataclass(frozen=True, slots=True)
class Port:
    """A named graph input or output.

    Attributes:
        name: as in the graph.
        dtype: element type in numpy's spelling (`float32`, `int64`, `bool`, `bfloat16`,
            `float8e4m3fn`, ...); None where the graph does not say.
        shape: one `Dimension` an axis; None where the graph does not say even the rank.
    """

    name: str
    dtype: str | None = None
    shape: tuple[Dimension, ...] | None = None


@dataclass(frozen=True, slots=True)
class PortInventory:
    """All ports of a graph, in graph order. Initialisers that are also listed as inputs are left out."""

    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()
