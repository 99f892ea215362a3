"""Engines as entry points give them: whatever one does wrong, it alone is not usable, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.engines.base import Availability, Engine, EngineOption, OptionValue, Session
from harness.engines.streams import reserved_stdout
from harness.errors import EngineUnavailableError, shown

__all__ = ["RefusedEngine", "load", "raised"]

_UPDATE = "Update or uninstall its distribution."
_MOST_OF_A_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class RefusedEngine:
    """Stands for an entry point that cannot be used, so that it is listed with the reason."""

    name: str
    reason: str
    next_action: str = _UPDATE
    description: str = "an installed engine that does not load"
    options: Mapping[str, EngineOption] = field(default_factory=lambda: MappingProxyType({}))

    def availability(self) -> Availability:
        """Never usable."""
        return Availability(usable=False, reason=self.reason, next_action=self.next_action)

    def open(self, model: Path, options: Mapping[str, OptionValue]) -> Session:
        """Raises EngineUnavailableError."""
        raise EngineUnavailableError(
            f"{self.name} is not usable here: {self.reason}", next_action=self.next_action
        )


@dataclass(frozen=True, slots=True)
class _InstalledEngine:
    """An engine, and what it said of itself when it was loaded."""

    inner: Engine
    name: str
    description: str
    options: Mapping[str, EngineOption]

    def availability(self) -> Availability:
        """Whether it can be used here; one that cannot even say so cannot."""
        try:
            with reserved_stdout():
                return _sound(self.inner.availability())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin may raise whatever it likes, SystemExit too
            return _cannot_say(f"it raised {raised(error)}.")

    def open(self, model: Path, options: Mapping[str, OptionValue]) -> Session:
        """As the engine does."""
        return self.inner.open(model, options)


def load(name: str, entry: EntryPoint) -> Engine:
    """The engine of an entry point; one that stands for it where it cannot be used.

    Raises:
        KeyboardInterrupt: the user, or the plugin, pressed Ctrl-C.
    """
    try:
        with reserved_stdout():
            engine = entry.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may raise whatever it likes while it is imported
        return RefusedEngine(
            name,
            f"its entry point {entry.value} does not load: {raised(error)}.",
            "Install what it needs, or uninstall its distribution.",
        )
    try:
        with reserved_stdout():
            return _described(name, entry, engine)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # its properties may do so, too
        return RefusedEngine(name, f"asked what it is, it raised {raised(error)}.")


def raised(error: BaseException) -> str:
    """Type and message of an error on one line, whatever its `__str__` does."""
    try:
        text = " ".join(str(error)[:_MOST_OF_A_MESSAGE].split()).rstrip(".")
    except KeyboardInterrupt:
        raise
    except BaseException:  # the error of an error
        text = ""
    return f"{type(error).__name__}{': ' if text else ''}{text}"


def _described(name: str, entry: EntryPoint, engine: object) -> Engine:
    """The engine with what it says of itself, read once; what that raises is the caller's to catch."""
    if not isinstance(engine, Engine):
        lacks = f"its entry point {entry.value} is no engine: it lacks a part of the session protocol."
        return RefusedEngine(name, lacks)
    if isinstance(engine, type):
        return RefusedEngine(name, f"its entry point {entry.value} is a class: it must be an instance of it.")
    own: Any = engine.name
    description: Any = engine.description
    options: Any = engine.options
    if own != name:
        return RefusedEngine(
            name, f"its entry point is called {name}, and the engine {shown(own)}: both must be one name."
        )
    if not isinstance(description, str):
        return RefusedEngine(name, f"its description is {shown(description)}, which must be text.")
    if not isinstance(options, Mapping):
        return RefusedEngine(name, f"its options are {shown(options)}, which must be a mapping.")
    for key, option in options.items():
        whole = isinstance(key, str) and isinstance(option.help, str) and isinstance(option.expected, str)
        if not (whole and isinstance(option.default, OptionValue) and callable(option.read)):
            return RefusedEngine(name, f"its option {shown(key)} is none of the protocol's.")
    return _InstalledEngine(engine, name, description, MappingProxyType(dict(options)))


def _sound(found: object) -> Availability:
    """What an engine says of whether it can be used, if it can be taken."""
    if not isinstance(found, Availability) or type(found.usable) is not bool:
        return _cannot_say(f"it gave {shown(found)}, and no Availability.")
    for each in fields(found):
        value = getattr(found, each.name)
        if each.name != "usable" and not isinstance(value, str | None):
            return _cannot_say(f"its {each.name} is {shown(value)}, which must be text.")
    return found if found.usable or found.reason else replace(found, reason="it does not say why.")


def _cannot_say(how: str) -> Availability:
    return Availability(
        usable=False, reason=f"asked whether it can be used, {how}", next_action="Report it to the engine."
    )
