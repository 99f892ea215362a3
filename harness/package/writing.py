"""Sidecar files that are written, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.package.reading import METADATA_NAMES

__all__ = ["write_sidecar"]


def write_sidecar(folder: Path, name: str, document: Mapping[str, Any]) -> Path:
    """Write a sidecar file called `name` into `folder`, as YAML or JSON by its suffix; returns its path.

    The file appears at once or not at all, and none is ever overwritten.

    Raises:
        InputError: the folder has a sidecar of this kind already, or cannot be written to.
    """
    path = folder / name
    kin = METADATA_NAMES if name in METADATA_NAMES else (name,)
    taken = next((folder / n for n in kin if os.path.lexists(folder / n)), None)
    if taken is not None:
        raise InputError(
            f"{taken} exists, and nothing is overwritten.",
            next_action="Move it away and write again, or keep it: it declares the topology already.",
        )
    if path.suffix == ".json":
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    else:
        import yaml  # only packages that have a YAML sidecar pay for the import

        # ASCII only: unescaped, some characters (U+0085) would be read back as ends of lines.
        text = yaml.safe_dump(document, sort_keys=False, width=1 << 16)
    draft = folder / f".{name}.{os.getpid()}.tmp"
    try:
        try:
            draft.write_text(text, encoding="utf-8")
            os.link(draft, path)  # unlike a rename, this fails where the name is taken meanwhile
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror or error}.",
            next_action="Check the folder, its permissions and the disk.",
        ) from error
    return path
