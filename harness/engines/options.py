"""Options of engines, as data: what each may be, and how it is read, in one tone for all engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.engines.base import EngineOption, OptionValue
from harness.errors import EngineUnavailableError, InputError, shown

__all__ = ["Choice", "Count", "Text", "complete"]


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number from zero to `maximum`."""

    help: str
    default: int
    maximum: int = 1024

    @property
    def expected(self) -> str:
        """What it may be, in words."""
        return f"a whole number from 0 to {self.maximum}"

    def read(self, value: OptionValue) -> OptionValue | None:
        """The number that `value` is or spells; None where it is none."""
        text = str(value)
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            return None
        return int(text) if int(text) <= self.maximum else None


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several words; the first is the default."""

    help: str
    choices: tuple[str, ...]

    @property
    def default(self) -> str:
        """The first of `choices`."""
        return self.choices[0]

    @property
    def expected(self) -> str:
        """What it may be, in words."""
        return f"one of {', '.join(self.choices)}"

    def read(self, value: OptionValue) -> OptionValue | None:
        """The choice that `value` names; None where it names none."""
        text = str(value)
        return text if text in self.choices else None


@dataclass(frozen=True, slots=True)
class Text:
    """Any text without a comma; empty by default."""

    help: str

    @property
    def default(self) -> str:
        """Empty."""
        return ""

    @property
    def expected(self) -> str:
        """What it may be, in words."""
        return "text without a comma"

    def read(self, value: OptionValue) -> OptionValue | None:
        """The text."""
        return str(value)


def complete(
    engine: str, declared: Mapping[str, EngineOption], given: Mapping[str, OptionValue]
) -> dict[str, OptionValue]:
    """Every declared option with its value: as given, or its default.

    Raises:
        InputError: an option that the engine does not have, or a value that it cannot take.
        EngineUnavailableError: the option itself failed, or gave what is no value.
    """
    for name in given:
        if name not in declared:
            known = "; ".join(f"{n} ({option.help})" for n, option in declared.items())
            raise InputError(
                f"{engine} has no option {name!r}.",
                next_action=f"It has: {known}." if known else "It takes none.",
            )
    values = {}
    for name, option in declared.items():
        value = _read(engine, name, option, given[name]) if name in given else option.default
        if value is None:
            raise InputError(
                f"{engine}: option {name}={given[name]} must be {option.expected}.",
                next_action=f"Write, for example, {engine}:{name}={option.default}.",
            )
        values[name] = value
    return values


def _read(engine: str, name: str, option: EngineOption, given: OptionValue) -> OptionValue | None:
    try:
        value = option.read(given)
        fault = None if isinstance(value, OptionValue | None) else f"gave {shown(value)}"
    except Exception as error:  # options of a plugin may raise whatever they like
        fault = f"raised {type(error).__name__}"
    if fault is not None:
        raise EngineUnavailableError(
            f"{engine} is not usable with {name}={given}: reading that option {fault}.",
            next_action="Leave the option out, or report it to the engine.",
        )
    return value
