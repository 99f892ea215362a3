"""What a user may name: a built-in package, a folder, a graph, or a port inventory."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.json_keys import unique_keys
from harness.models import BUILTIN_NAMES, builtin_package
from harness.models.builtin import BuiltinPackage
from harness.package import Package, open_package
from harness.ports import PortInventory, inventory_from_json

__all__ = ["Source", "find_package", "read_source"]


@dataclass(frozen=True, slots=True)
class Source:
    """Ports, and what is declared about them.

    Attributes:
        inventory: the ports.
        declared: an `io` block that came with a port inventory; None where there is none.
        package: the package that the ports were read from; None for a port inventory.
    """

    inventory: PortInventory
    declared: Mapping[str, Any] | None = None
    package: Package | None = None


def find_package(name: str) -> tuple[Package, BuiltinPackage | None]:
    """The package that a user named: an existing path wins over a built-in name.

    Built-in packages are written to the cache first where they are not there yet.

    Raises:
        InputError: neither a path nor a built-in name, or the package cannot be read or written.
    """
    if not name:
        raise InputError("The package has an empty name.", next_action="Name a model directory.")
    path = Path(name)
    if _exists(path):
        return open_package(path), None
    builtin = builtin_package(name)
    if builtin is not None:
        return open_package(builtin.materialise()), builtin
    near = difflib.get_close_matches(name, BUILTIN_NAMES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"built-in names are {', '.join(BUILTIN_NAMES)}."
    raise InputError(
        f"{name}: no such file or directory, and no built-in package of that name.",
        next_action=f"Give a model directory or an .onnx file; {hint}",
    )


def read_source(name: str) -> Source:
    """Read the ports of a package's decoder, an `.onnx` graph or a port inventory (`.json`).

    A decoder in parts has the ports of the whole.

    Raises:
        InputError: it cannot be read.
    """
    path = Path(name)
    if path.suffix == ".json" and _exists(path) and path.is_file():
        try:
            document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
        except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise InputError(
                f"{path}: not readable as JSON: {error}.",
                next_action='Give {"ports": {"inputs": [...], "outputs": [...]}}, or a graph.',
            ) from error
        inventory, declared = inventory_from_json(document, source=str(path))
        return Source(inventory, declared=declared)
    from harness.decode.parts import decoder_inventory

    package, _ = find_package(name)
    return Source(decoder_inventory(package), package=package)


def _exists(path: Path) -> bool:
    """Whether there is such a path; False for a name that no file can have."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, a loop of links; a NUL character
        return False
