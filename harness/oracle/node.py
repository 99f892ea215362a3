"""What a kernel learns about its node when the graph is planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from harness.errors import InputError
from harness.oracle.precision import Array, Precision

if TYPE_CHECKING:
    from harness.oracle.executor import Body

__all__ = ["Compute", "Node", "Residency", "Tensor", "UnsupportedFeatureError"]

Tensor: TypeAlias = Any
"""An array, or the numpy scalar that numpy gives for an array without axes. Untyped, as numpy types most
results of its functions so."""

Compute: TypeAlias = Callable[..., Any]
"""Takes the node's inputs in order (None for an absent one; captured values of subgraphs follow) and
returns the output array, or a tuple of arrays where there are several. It never writes to an input, and
an output may be a view of an input."""


class UnsupportedFeatureError(Exception):
    """Raised by a kernel at planning: it knows the operator, but not in this configuration."""


class Residency(Protocol):
    """What decides whether a derived copy of a weight may stay in memory."""

    def reserve(self, nbytes: int) -> bool:
        """Whether `nbytes` more may stay; they count against the budget when so."""

    def claim(self, nbytes: int) -> Callable[[], bool]:
        """Ask for `nbytes`; the answer, the same for all claims, is known once the model is planned."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a graph, as its kernel sees it at planning.

    Attributes:
        domain: operator domain, empty for the standard one.
        op_type: operator.
        version: the version of the operator in force ("since version"), not the graph's opset.
        label: path and name, for messages.
        precision: the precision to compute in.
        residency: the budget for dequantised or widened weights.
        attributes: values as Python numbers, strings, lists and arrays; subgraphs are planned bodies.
        present: for each input, whether it is given.
        wanted: for each output, whether anything reads it.
        constants: inputs known at planning, by position.
        types: for each input its declared type, where planning knows it.
    """

    domain: str
    op_type: str
    version: int
    label: str
    precision: Precision
    residency: Residency
    attributes: Mapping[str, Any] = field(default_factory=dict)
    present: Sequence[bool] = ()
    wanted: Sequence[bool] = (True,)
    constants: Mapping[int, Array] = field(default_factory=dict)
    types: Sequence[np.dtype[Any] | None] = ()

    def has_input(self, index: int) -> bool:
        """Whether input `index` is given."""
        return index < len(self.present) and self.present[index]

    def wants(self, index: int) -> bool:
        """Whether anything reads output `index`."""
        return index < len(self.wanted) and self.wanted[index]

    def constant(self, index: int) -> Array | None:
        """The value of input `index` where planning knows it."""
        return self.constants.get(index)

    def declared(self, index: int) -> np.dtype[Any] | None:
        """The declared type of input `index`, where planning knows it."""
        return self.types[index] if index < len(self.types) else None

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer attribute; an `InputError` when it is absent and has no default."""
        return int(self._get(name, default))

    def number(self, name: str, default: float | None = None) -> float:
        """A float attribute. It is a float32 in the file, so a default is rounded to one too."""
        return float(np.float32(self._get(name, default)))

    def text(self, name: str, default: str | None = None) -> str:
        """A string attribute."""
        return str(self._get(name, default))

    def integers(self, name: str) -> list[int] | None:
        """A list of integers, None when absent."""
        value = self.attributes.get(name)
        return None if value is None else list(value)

    def body(self, name: str) -> Body:
        """The planned subgraph of a graph attribute."""
        body: Body = self._get(name, None)
        return body

    def _get(self, name: str, default: Any) -> Any:
        value = self.attributes.get(name, default)
        if value is None:
            raise InputError(
                f"Node {self.label} lacks the attribute `{name}`, which {self.op_type} requires.",
                next_action="Export the graph again, or run `onnx.checker` on it.",
            )
        return value
