"""What a kernel learns about its node when the graph is planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from harness.errors import InputError
from harness.oracle.precision import Array, Precision, file_dtype

if TYPE_CHECKING:
    from harness.oracle.dequantised import Dequantised
    from harness.oracle.executor import Body

__all__ = ["Compute", "Node", "Residency", "Tensor", "UnsupportedFeatureError"]

_INTEGER, _FLOAT, _STRING = "an integer", "a float", "a string"
_INTEGERS, _FLOATS, _EMPTY = "a list of integers", "a list of floats", "an empty list"
_TENSOR, _GRAPH = "a tensor", "a graph"

_CHECK = "Export the graph again, or run `onnx.checker` on it."

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
        names: for each input its name in the file, empty for an absent one.
        streamed: constant weights that the kernel makes of their codes itself, by position; when it runs, it
            gets None for them.
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
    names: Sequence[str] = ()
    streamed: Mapping[int, Dequantised] = field(default_factory=dict)

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
        """An integer attribute; an `InputError` when it is absent and has no default.

        As all that read attributes here, it raises an `InputError` that names the node where the file gives
        an attribute of another type. ONNX converts none, an integer where a float is due included.
        """
        return int(self._required(name, _INTEGER, default))

    def integer_or_none(self, name: str) -> int | None:
        """An integer attribute, None when absent."""
        value: int | None = self._typed(name, _INTEGER)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """An integer attribute that no specification gives a meaning but for 0 and 1.

        Raises:
            UnsupportedFeatureError: it has another value.
        """
        value = self.integer(name, int(default))
        if value not in (0, 1):
            raise UnsupportedFeatureError(f"{name} {value}, which is neither 0 nor 1")
        return value == 1

    def element_type(self, name: str) -> np.dtype[Any] | None:
        """The dtype that an attribute names as an ONNX element type, None when absent or 0 (undefined)."""
        value = self.integer_or_none(name)
        if not value:
            return None
        return file_dtype(value, of=f"the attribute `{name}` of {self.op_type} {self.label}")

    def number(self, name: str, default: float | None = None) -> float:
        """A float attribute. It is a float32 in the file, so a default is rounded to one too."""
        return float(np.float32(self._required(name, _FLOAT, default)))

    def number_or_none(self, name: str) -> float | None:
        """A float attribute, None when absent."""
        value: float | None = self._typed(name, _FLOAT)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string attribute."""
        return str(self._required(name, _STRING, default))

    def integers(self, name: str) -> list[int] | None:
        """A list of integers, None when absent."""
        value = self._typed(name, _INTEGERS)
        return None if value is None else list(value)

    def numbers(self, name: str) -> list[float] | None:
        """A list of floats, None when absent."""
        value = self._typed(name, _FLOATS)
        return None if value is None else list(value)

    def tensor(self, name: str) -> Array | None:
        """A tensor, None when absent."""
        value: Array | None = self._typed(name, _TENSOR)
        return value

    def body(self, name: str) -> Body:
        """The planned subgraph of a graph attribute."""
        body: Body = self._required(name, _GRAPH, None)
        return body

    def _required(self, name: str, due: str, default: Any) -> Any:
        value = self._typed(name, due)
        value = default if value is None else value
        if value is None:
            raise InputError(
                f"Node {self.label} lacks the attribute `{name}`, which {self.op_type} requires.",
                next_action=_CHECK,
            )
        return value

    def _typed(self, name: str, due: str) -> Any:
        """The value that the file gives, which must be of the type that is `due`; None when absent."""
        value = self.attributes.get(name)
        if value is None:
            return None
        given = _type_of(value)
        if given != due and not (given == _EMPTY and due in (_INTEGERS, _FLOATS)):
            raise InputError(
                f"Node {self.label}: the attribute `{name}` of {self.op_type} is {given}, "
                f"where {due} is due.",
                next_action=_CHECK,
            )
        return value


def _type_of(value: Any) -> str:
    """What type an attribute has in the file, in words."""
    if isinstance(value, list):
        return f"a list of {_type_of(value[0]).split(' ', 1)[1]}s" if value else _EMPTY
    if isinstance(value, np.ndarray):
        return _TENSOR
    # A planned subgraph is all that can be called; its class stands above this module.
    known = _GRAPH if callable(value) else f"a {type(value).__name__}"
    return {int: _INTEGER, float: _FLOAT, str: _STRING}.get(type(value), known)
