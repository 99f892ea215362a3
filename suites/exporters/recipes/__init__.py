"""What each exporter builds, as data: a TOML file an exporter. Nothing here imports a library."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suites.exporters.sources import Source, sources

__all__ = ["EXPORTERS", "Recipe", "recipes"]

EXPORTERS: tuple[str, ...] = ("mobius", "genai", "optimum", "dynamo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One package to build.

    Attributes:
        exporter: one of `EXPORTERS`.
        source: the model that is exported.
        variant: what the exporter was asked for, in a word.
        precision: `fp32`, `fp16`, `int4`, or `int4-level4` (whose activations are int8): what the package
            computes in.
        options: what the exporter is given, in its own words.
    """

    exporter: str
    source: Source
    variant: str
    precision: str
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The folder of the package."""
        return f"{self.source.name}-{self.variant}"


def recipes(exporter: str) -> Sequence[Recipe]:
    """Everything that `exporter` builds, in the order of its file."""
    path = Path(__file__).with_name(f"{exporter}.toml")
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Recipe(
            exporter=exporter,
            source=sources()[name],
            variant=variant,
            precision=document["variants"][variant]["precision"],
            options=document["variants"][variant]["options"],
        )
        for variant, names in document["packages"].items()
        for name in names
    ]
