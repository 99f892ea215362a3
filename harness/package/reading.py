"""Sidecar files as plain mappings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.errors import InputError

__all__ = ["METADATA_NAMES", "read_json", "read_yaml"]

METADATA_NAMES = ("inference_metadata.yaml", "inference_metadata.yml")
"""What the sidecar of inference metadata may be called, best first."""


def read_json(path: Path) -> Mapping[str, Any]:
    """The mapping in a JSON file.

    Raises:
        InputError: it cannot be read, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise _unreadable(path, "JSON", error) from error
    return _mapping(path, value)


def read_yaml(path: Path) -> Mapping[str, Any]:
    """The mapping in a YAML file.

    Raises:
        InputError: it cannot be read, or holds something else.
    """
    import yaml  # only packages that have a YAML sidecar pay for the import

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except Exception as error:  # besides YAMLError, a value of the wrong form raises whatever it likes
        raise _unreadable(path, "YAML", error) from error
    return _mapping(path, value)


def _unreadable(path: Path, kind: str, error: Exception) -> InputError:
    detail = " ".join(str(error).split())
    return InputError(
        f"{path}: not readable as {kind}: {detail}.",
        next_action="Correct the file, or remove it to have the topology derived from the ports.",
    )


def _mapping(path: Path, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(
            f"{path}: holds a {type(value).__name__}; a sidecar is a mapping at the top level.",
            next_action="Correct the file, or remove it to have the topology derived from the ports.",
        )
    return value
