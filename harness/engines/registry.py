"""Which engines there are: entry points of the group `onnx_parity.engines`, and how a user names one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from harness.engines.answers import checked
from harness.engines.base import Engine, OptionValue, Session
from harness.engines.options import complete
from harness.engines.plugins import RefusedEngine, load
from harness.errors import EngineUnavailableError, InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "BUILT_IN",
    "ENTRY_POINT_GROUP",
    "EngineSpec",
    "default_candidate",
    "installed_engines",
    "parse_engine",
    "reference_of",
]

ENTRY_POINT_GROUP = "onnx_parity.engines"

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "hf": "harness.engines.hf:ENGINE",
        "nxrt": "harness.engines.nxrt:ENGINE",
        "oracle": "harness.engines.oracle:ENGINE",
        "ort-cpu": "harness.engines.ort:CPU_ENGINE",
        "ort-cuda": "harness.engines.ort:CUDA_ENGINE",
    }
)
"""The engines of this project: no other distribution may take their names."""

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
        """Load a graph; see `harness.engines.base.Engine.open`.

        Raises:
            EngineFailedError: also where what was opened says of itself what cannot be.
        """
        return checked(self.engine.open(model, self.options), engine=self.name)


def installed_engines() -> tuple[Engine, ...]:
    """Every engine that is installed, usable or not, in order of name.

    An entry point that cannot be imported, that is no engine, or that repeats the name of an engine of this
    project, is an engine that is not usable.

    Raises:
        KeyboardInterrupt: as `harness.engines.plugins.load`.
    """
    by_name: dict[str, set[EntryPoint]] = {}
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        by_name.setdefault(entry.name, set()).add(entry)
    found: list[Engine] = []
    for name, entries in by_name.items():
        found += _engines_of(name, {entry.value: entry for entry in entries})
    return tuple(sorted(found, key=lambda engine: engine.name))


def _engines_of(name: str, entries: dict[str, EntryPoint]) -> Iterator[Engine]:
    """The engine that `entries`, by where they lead, give this name; beside it what may not have it."""
    if name in BUILT_IN:
        own = entries.pop(BUILT_IN[name], None)
        if own is not None:
            yield load(name, own)
        for value in entries:
            yield RefusedEngine(
                # Another name than the engine's, which keeps its own.
                f"{name} ({value})",
                f"{value} registers the name {name}, which is that of an engine of onnx-parity.",
                "Uninstall its distribution, or have it choose another name.",
            )
    elif len(entries) > 1:
        yield RefusedEngine(
            name,
            f"several distributions register this name: {', '.join(sorted(entries))}.",
            "Uninstall all but one of them.",
        )
    else:
        (entry,) = entries.values()
        yield load(name, entry)


def reference_of(name: str) -> str | None:
    """Where the entry point of an engine leads, as `module:attribute`; None where none or several do."""
    values = {entry.value for entry in metadata.entry_points(group=ENTRY_POINT_GROUP) if entry.name == name}
    if name in BUILT_IN:
        return BUILT_IN[name] if BUILT_IN[name] in values else None
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
