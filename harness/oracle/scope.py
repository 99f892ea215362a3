"""What names stand for while a graph is planned: slots of a body in the making, and constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from harness.oracle.executor import ABSENT, Step
from harness.oracle.precision import Array, file_dtype
from harness.oracle.weights import Packed

if TYPE_CHECKING:
    import numpy as np
    import onnx

    from harness.oracle.dequantised import Dequantised

__all__ = ["Constant", "Draft", "Scope", "Value"]


class Constant:
    """A value known at planning.

    Attributes:
        stored: as in the file, or as computed; elements of a few bits may still be packed.
        wide: in the dtype that holds it; None while nobody asked, or where the budget is spent.
    """

    __slots__ = ("stored", "wide")

    def __init__(self, stored: Array | Packed) -> None:
        self.stored = stored
        self.wide: Array | None = None

    @property
    def array(self) -> Array:
        """An element each; unpacked now if it was not."""
        if isinstance(self.stored, Packed):
            self.stored = self.stored.unpacked()
        return self.stored


Value: TypeAlias = "int | Constant"
"""What a name stands for when a node reads it: a slot of the body at hand, or a constant."""


@dataclass(slots=True)
class Draft:
    """A body in the making.

    Attributes:
        steps: nodes planned so far.
        constants: values of constant slots.
        slot_count: slots given so far.
        captures: slots here by the slots of the enclosing body whose values they hold.
        constant_slots: slots of constants, by identity of the array.
    """

    steps: list[Step] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=lambda: {ABSENT: None})
    slot_count: int = 2
    captures: dict[int, int] = field(default_factory=dict)
    constant_slots: dict[int, int] = field(default_factory=dict)

    def new_slot(self) -> int:
        """A slot that nothing else has."""
        self.slot_count += 1
        return self.slot_count - 1

    def slot_of(self, array: Array) -> int:
        """The slot of a constant array; one for all its uses."""
        key = id(array)
        if key not in self.constant_slots:
            slot = self.constant_slots[key] = self.new_slot()
            self.constants[slot] = array
        return self.constant_slots[key]

    def capture(self, outer: int) -> int:
        """The slot here of a value in slot `outer` of the enclosing body."""
        if outer not in self.captures:
            self.captures[outer] = self.new_slot()
        return self.captures[outer]


@dataclass(slots=True)
class Scope:
    """The names that nodes see: of a graph with those around it, or of a function by itself.

    Attributes:
        draft: the body that the nodes go to.
        opsets: opset by domain.
        outer: the scope around a subgraph; None for the main graph and for functions.
        attributes: what the attributes of a function stand for in its body.
        path: prefix of node labels.
        names: what names stand for here.
        types: declared element types of names here, where the file says them.
    """

    draft: Draft
    opsets: Mapping[str, int]
    outer: Scope | None = None
    attributes: Mapping[str, onnx.AttributeProto] = field(default_factory=dict)
    path: str = ""
    names: dict[str, Value | Dequantised] = field(default_factory=dict)
    types: dict[str, np.dtype[Any]] = field(default_factory=dict)

    def find(self, name: str) -> Value | Dequantised | None:
        """What `name` stands for in this body; outer values are captured."""
        value = self.names.get(name)
        if value is None and self.outer is not None:
            value = self.outer.find(name)
            if isinstance(value, int):
                if value != ABSENT:
                    value = self.draft.capture(value)
                self.names[name] = value
        return value

    def declare(self, values: Iterable[onnx.ValueInfoProto]) -> None:
        """Note the element types that the file declares of `values`."""
        for value in values:
            if value.type.tensor_type.elem_type:
                self.types[value.name] = file_dtype(value.type.tensor_type.elem_type, of=value.name)

    def type_of(self, name: str) -> np.dtype[Any] | None:
        """The declared type of `name`, as far as the file says it or a constant has it."""
        known = self.names.get(name)
        if isinstance(known, Constant):
            return known.stored.dtype
        if name in self.types or self.outer is None:
            return self.types.get(name)
        return self.outer.type_of(name)
