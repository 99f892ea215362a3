"""Which engines there are: entry points of the group `onnx_parity.engines`, and how a user names one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from harness.engines.base import Availability, Engine, EngineOption, OptionValue, Session
from harness.engines.options import complete
from harness.errors import EngineUnavailableError, InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "ENTRY_POINT_GROUP",
    "EngineSpec",
    "default_candidate",
    "installed_engines",
    "parse_engine",
    "reference_of",
]

ENTRY_POINT_GROUP = "onnx_parity.engines"

_CANDIDATES = ("ort-cuda", "ort-cpu", "nxrt")
"""Engines to try as the candidate when the user names none, best first."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine as the user asked for it: `name:option=value,option=value`."""

    engine: Engine
    options: Mapping[str, OptionValue]

    @property
    def name(self) -> str:
        """Name of the engine, without options."""
        return self.engine.name

    def open(self, model: Path) -> Session:
        """Load a graph; see `harness.engines.base.Engine.open`."""
        return self.engine.open(model, self.options)


@dataclass(frozen=True, slots=True)
class _BrokenEngine:
    """Stands for an entry point that cannot be used, so that it is listed with the reason."""

    name: str
    reason: str
    next_action: str
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


def installed_engines() -> tuple[Engine, ...]:
    """Every engine that is installed, usable or not, in order of name.

    An entry point that cannot be imported, or that is no engine, is an engine that is not usable.
    """
    by_name: dict[str, set[EntryPoint]] = {}
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        by_name.setdefault(entry.name, set()).add(entry)
    return tuple(_load(name, by_name[name]) for name in sorted(by_name))


def _load(name: str, entries: set[EntryPoint]) -> Engine:
    values = sorted({entry.value for entry in entries})
    if len(values) > 1:
        return _BrokenEngine(
            name,
            f"several distributions register this name: {', '.join(values)}.",
            "Uninstall all but one of them.",
        )
    entry = min(entries, key=lambda e: e.value)
    try:
        engine = entry.load()
    except Exception as error:  # a plugin may raise whatever it likes while it is imported
        return _BrokenEngine(
            name,
            f"its entry point {entry.value} does not load: {type(error).__name__}: {error}",
            "Install what it needs, or uninstall its distribution.",
        )
    if not isinstance(engine, Engine):
        return _BrokenEngine(
            name,
            f"its entry point {entry.value} is no engine: it lacks a part of the session protocol.",
            "Update or uninstall its distribution.",
        )
    return engine


def reference_of(name: str) -> str | None:
    """Where the entry point of an engine leads, as `module:attribute`; None where none or several do."""
    values = {entry.value for entry in metadata.entry_points(group=ENTRY_POINT_GROUP) if entry.name == name}
    return values.pop() if len(values) == 1 else None


def parse_engine(text: str) -> EngineSpec:
    """The engine and options that `name:option=value,option=value` asks for.

    The engine may turn out not to be usable.

    Raises:
        InputError: no engine has this name (the nearest one is named), it has no such option, or the
            option cannot take the value.
    """
    name, colon, rest = text.partition(":")
    engines = {engine.name: engine for engine in installed_engines()}
    engine = engines.get(name)
    if engine is None:
        near = difflib.get_close_matches(name, engines, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise InputError(
            f"There is no engine named {name!r}.",
            next_action=f"{hint}Installed engines: {', '.join(engines) or 'none'}.",
        )
    options: dict[str, OptionValue] = {}
    for part in rest.split(",") if colon else ():
        option, equals, value = part.partition("=")
        if not (option and equals and value):
            raise InputError(
                f"Engine {text!r}: {part!r} is not of the form option=value.",
                next_action=f"Write {name}:option=value,option=value.",
            )
        if option in options:
            raise InputError(
                f"Engine {text!r} gives the option {option!r} twice.", next_action="Give it once."
            )
        options[option] = value
    values = complete(name, engine.options, options)
    return EngineSpec(engine, MappingProxyType({option: values[option] for option in options}))


def default_candidate() -> Engine:
    """The first usable engine of `ort-cuda`, `ort-cpu`, `nxrt`.

    Raises:
        EngineUnavailableError: none of them is usable; the reasons are in the message.
    """
    engines = {engine.name: engine for engine in installed_engines()}
    reasons = []
    fix = "Install onnx-parity again, or name another engine with --candidate."
    for name in _CANDIDATES:
        if name not in engines:
            reasons.append(f"{name}: not installed.")
            continue
        found = engines[name].availability()
        if found.usable:
            return engines[name]
        reasons.append(f"{name}: {found.reason}")
        if name == "ort-cpu" and found.next_action:
            fix = found.next_action
    raise EngineUnavailableError(
        "No candidate engine is usable here. " + " ".join(reasons),
        next_action=fix,
    )
