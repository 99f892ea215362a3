"""Sidecar files as plain mappings."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import InputError
from harness.json_keys import doubled, unique_keys

if TYPE_CHECKING:
    import yaml

__all__ = ["METADATA_NAMES", "is_there", "read_json", "read_yaml"]

METADATA_NAMES = ("inference_metadata.yaml", "inference_metadata.yml")
"""What the sidecar of inference metadata may be called, best first."""

_MOST_NODES = 1_000_000


def is_there(path: Path) -> bool:
    """Whether there is a sidecar, to be read.

    Raises:
        InputError: there is something of its name that cannot be read, such as a link that leads nowhere. To
            go on without it would be to drop what it declares.
    """
    if path.is_file():
        return True
    try:
        kind = os.lstat(path).st_mode
        if stat.S_ISLNK(kind) and path.exists():
            kind = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    what = "it is a link that leads nowhere" if stat.S_ISLNK(kind) else "it is no regular file"
    if stat.S_ISDIR(kind):
        what = "it is a directory"
    raise InputError(
        f"{path}: cannot be read: {what}.", next_action="Put the file there, or remove what is in its place."
    )


def read_json(path: Path) -> Mapping[str, Any]:
    """The mapping in a JSON file.

    Raises:
        InputError: it cannot be read, has a key twice in one mapping, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise _unreadable(path, "JSON", error) from error
    return _mapping(path, value)


def read_yaml(path: Path) -> Mapping[str, Any]:
    """The mapping in a YAML file.

    Raises:
        InputError: it cannot be read, has a key twice in one mapping, or holds something else.
    """
    import yaml  # only packages that have a YAML sidecar pay for the import

    class Loader(yaml.SafeLoader):
        """The safe loader, which refuses a key that stands twice in one mapping."""

        def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
            # Here and not when the mapping is constructed: by then, what `<<` brings in is among its keys.
            node = super().compose_mapping_node(anchor)
            _check_keys(key for key, _ in node.value)
            return node

        def get_single_node(self) -> yaml.Node | None:
            node: yaml.Node | None = super().get_single_node()
            if node is not None and _written_out(node, {}) > _MOST_NODES:
                raise ValueError("its aliases stand for more than a million values, or for themselves")
            return node

    try:
        value = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except Exception as error:  # besides YAMLError, a value of the wrong form raises whatever it likes
        raise _unreadable(path, "YAML", error) from error
    return _mapping(path, value)


def _written_out(node: yaml.Node, known: dict[int, float]) -> float:
    """How many values a node stands for, when each alias is replaced by what it stands for."""
    if id(node) not in known:
        known[id(node)] = math.inf  # that of a node within itself
        children: Iterable[Any] = node.value if isinstance(node.value, list) else ()
        parts = (part for child in children for part in (child if isinstance(child, tuple) else (child,)))
        known[id(node)] = 1 + sum(_written_out(part, known) for part in parts)
    return known[id(node)]


def _unreadable(path: Path, kind: str, error: Exception) -> InputError:
    detail = " ".join(str(error).split())
    return InputError(
        f"{path}: not readable as {kind}: {detail}.",
        next_action="Correct the file, or remove it to have the topology derived from the ports.",
    )


def _check_keys(keys: Iterable[yaml.Node]) -> None:
    """Refuse the same scalar twice among the keys of a YAML mapping; says where its second line is."""
    seen: set[tuple[str, str]] = set()
    for key in keys:
        if not isinstance(key.value, str):
            continue  # a list or a mapping, which is no key of a Python mapping either
        known = (key.tag, key.value)
        if known in seen:
            raise ValueError(f"{doubled(key.value)}, again on line {key.start_mark.line + 1}")
        seen.add(known)


def _kind(value: object) -> str:
    """What a value is called in JSON and YAML."""
    if value is None:
        return "null"
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")


def _mapping(path: Path, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(
            f"{path}: holds {_kind(value)}; a sidecar is a mapping at the top level.",
            next_action="Correct the file, or remove it to have the topology derived from the ports.",
        )
    return value
