"""How each exporter is called: `export(recipe, source, to)` and the distributions that take part."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

from suites.exporters.recipes import Recipe

__all__ = ["Exporter", "exporter_named"]


class Exporter(Protocol):
    """A module of this folder.

    Attributes:
        DISTRIBUTIONS: whose versions the record names.
    """

    DISTRIBUTIONS: Sequence[str]

    def export(self, recipe: Recipe, source: Path, to: Path) -> None:
        """Write the package of the checkpoint in `source` into `to`; what the exporter raises passes."""
        ...


def exporter_named(name: str) -> Exporter:
    """The module of an exporter; its libraries are imported here."""
    return cast("Exporter", importlib.import_module(f"suites.exporters.exporting.{name}"))
