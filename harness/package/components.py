"""The graphs of a package that has several: what each is called, and what its outputs are to the others.

What a component is for follows from its ports, and is found where it is put to use (`harness.decode`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import InputError, NotDrivableError, shown
from harness.package.links import is_own

__all__ = [
    "INDEX",
    "Component",
    "Components",
    "mapping_at",
    "named_graph",
    "refuse_doubled",
    "section_at",
    "undrivable",
]

INDEX = "%d"
"""Stands for the layer in the names of ports."""


@dataclass(frozen=True, slots=True)
class Component:
    """One graph of a package.

    Attributes:
        name: what the package, or its folder or file, calls it.
        graph: the file; it need not be there as long as nothing needs it.
        aliases: pairs of an output's name and a name under which another graph takes it, both perhaps with
            `%d` for the layer. An output is always known under its own name as well.
        on_prompt: whether it runs at the first call.
        on_steps: whether it runs at later calls.
    """

    name: str
    graph: Path
    aliases: tuple[tuple[str, str], ...] = ()
    on_prompt: bool = True
    on_steps: bool = True

    def names_of(self, output: str) -> tuple[str, ...]:
        """Every name under which other graphs may take this output."""
        return tuple(dict.fromkeys((output, *self._aliases_of(output))))

    def _aliases_of(self, output: str) -> Iterator[str]:
        for own, other in self.aliases:
            if INDEX not in own:
                if own == output:
                    yield other
            elif found := re.fullmatch("([0-9]+)".join(map(re.escape, own.split(INDEX, 1))), output):
                yield other.replace(INDEX, found.group(1))


@dataclass(frozen=True, slots=True)
class Components:
    """The graphs of a package.

    Attributes:
        decoder: what takes tokens or embeddings and gives logits, in the order in which it runs: one graph,
            or the parts of one, or one for the first call and one for all others.
        others: what else there is, such as encoders and embeddings.
        partner: the graph for later calls that is not there, and that a decoder for the first call alone
            needs; None where it would have none.
    """

    decoder: tuple[Component, ...]
    others: tuple[Component, ...] = ()
    partner: Path | None = None


def mapping_at(parent: Mapping[str, Any] | None, *keys: str) -> Mapping[str, Any]:
    """The mapping at a path of keys; an empty one where there is none."""
    value: Any = parent
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def section_at(folder: Path, file: str, parent: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """The mapping at a path of keys of a sidecar; an empty one where there is none.

    Raises:
        InputError: what stands there is no mapping, so that what it means to say would be dropped.
    """
    value: Any = parent
    for depth, key in enumerate(keys, 1):
        value = value.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise InputError(
                f"{folder / file}: {'.'.join(keys[:depth])} is {shown(value)}; a mapping is due.",
                next_action="Correct the file, or name the graph itself instead of its folder.",
            )
    return value if isinstance(value, Mapping) else {}


def refuse_doubled(folder: Path, file: str, components: Components) -> None:
    """See that no file stands for two graphs that run at one call: whatever it computed would count twice.

    Raises:
        InputError: one does; the message has its name and what both are called in the sidecar `file`.
    """
    known: list[tuple[Component, Path]] = []
    for part in (*components.decoder, *components.others):
        path = part.graph.resolve()
        for other, where in known:
            together = (part.on_prompt and other.on_prompt) or (part.on_steps and other.on_steps)
            if path == where and together:
                raise InputError(
                    f"{folder}: {file} lists {part.graph.name} twice, as {shown(other.name)} and as "
                    f"{shown(part.name)}, both at one call.",
                    next_action="Give each the graph that is meant, or leave one of them out.",
                )
        known.append((part, path))


def named_graph(folder: Path, named: object, *, place: str, must_exist: bool = True) -> Path:
    """The graph that a sidecar names; it must be in the package.

    Args:
        folder: the package.
        named: what the sidecar says.
        place: the file and the key that say it.
        must_exist: whether to refuse a file that is not there.

    Raises:
        InputError: it is no file name, it is missing, or it lies outside the package.
    """
    why = "is not a file name"
    if isinstance(named, str):
        try:
            graph = folder / named
            inside = is_own(folder, named)
            why = "is missing" if inside else _outside(folder, named)
            if inside and (graph.is_file() or not must_exist):
                return graph
        except (OSError, RuntimeError, ValueError):  # too long, a loop of links, a NUL character
            why = "cannot be the name of a file"
    raise InputError(
        f"{folder}: {place} is {str(named)[:80]!r}, which {why}.",
        next_action="Correct the file, or name the graph itself instead of its folder.",
    )


def _outside(folder: Path, named: str) -> str:
    home = folder.resolve()
    if Path(os.path.normpath(home / named)).is_relative_to(home):
        return f"is a link out of the package, to {(home / named).resolve()}"
    return "lies outside the package"


def undrivable(folder: Path, what: str, *, instead: str) -> NotDrivableError:
    """The refusal of a package of a kind that the decode loop cannot run; `what` names the kind."""
    return NotDrivableError(f"{folder} is {what}.", next_action=instead, ports=())
