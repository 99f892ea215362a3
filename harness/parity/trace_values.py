"""Values of a trace's document: what reads one says what it must be, and names it where it is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.engines.base import OptionValue
from harness.errors import InputError

__all__ = ["Value", "misfit"]


def misfit(path: Path, what: str, action: str | None = None) -> InputError:
    """The error that a trace is not what it must be; `what` continues "the trace"."""
    return InputError(
        f"{path}: the trace {what}.",
        next_action=action or "Copy it again from where it was recorded, or record it anew.",
    )


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the document, and where it stands. Every method raises InputError where it is another kind.

    Attributes:
        path: of the file, for messages.
        where: its place in the document; empty for the document itself.
        value: as JSON has it.
    """

    path: Path
    where: str
    value: Any

    def wrong(self, must: str) -> InputError:
        """The error that it is not what it must be."""
        return misfit(self.path, f"holds {self.value!r:.40} as {self.where or 'its document'}, not {must}")

    def __getitem__(self, key: str) -> Value:
        if not isinstance(self.value, dict) or key not in self.value:
            where = f"{self.where}.{key}" if self.where else key
            raise misfit(self.path, f"lacks {where}, which a check needs")
        return Value(self.path, f"{self.where}.{key}" if self.where else key, self.value[key])

    def items(self) -> Iterator[tuple[str, Value]]:
        """The values of a mapping, by key."""
        if not isinstance(self.value, dict):
            raise self.wrong("a mapping")
        return ((key, self[key]) for key in self.value)

    def elements(self) -> Iterator[Value]:
        """The values of a list."""
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return (Value(self.path, f"{self.where}[{i}]", each) for i, each in enumerate(self.value))

    def text(self) -> str:
        """A text."""
        if not isinstance(self.value, str):
            raise self.wrong("a text")
        return self.value

    def one_of(self, choices: Sequence[str]) -> Any:
        """One of these texts."""
        if self.value not in choices:
            raise self.wrong(f"one of {', '.join(choices)}")
        return self.value

    def count(self) -> int:
        """A whole number from zero that 63 bits hold."""
        if type(self.value) is not int or not 0 <= self.value < 1 << 63:
            raise self.wrong("a whole number from 0")
        return self.value

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def seconds(self) -> float:
        """A finite number from zero."""
        if type(self.value) not in (int, float) or not 0 <= self.value < math.inf:
            raise self.wrong("a number from 0")
        return float(self.value)

    def counts(self) -> tuple[int, ...]:
        """A list of whole numbers from zero."""
        return tuple(each.count() for each in self.elements())

    def mapping(self) -> dict[str, Any]:
        """A mapping, as plain data."""
        return {key: each.value for key, each in self.items()}

    def texts(self) -> dict[str, str]:
        """A mapping of texts."""
        return {key: each.text() for key, each in self.items()}

    def settings(self) -> dict[str, OptionValue]:
        """A mapping of options or settings."""
        found = {}
        for key, each in self.items():
            if not isinstance(each.value, bool | int | str):
                raise each.wrong("a text, a whole number, true or false")
            found[key] = each.value
        return found

    def maybe(self, read: Callable[[Value], Any]) -> Any:
        """None where it is null, else what `read` makes of it."""
        return None if self.value is None else read(self)
