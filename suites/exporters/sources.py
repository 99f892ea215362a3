"""Source models: what they are, as data. Nothing here imports a library."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["PROMPTS", "Source", "sources"]

PROMPTS: tuple[tuple[int, ...], ...] = (
    (17, 43, 201, 88, 5),
    (9, 130, 9, 131, 9, 77, 250, 14, 61, 200, 33),
)
"""What every model continues; the second is longer than a sliding window of 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model of random weights.

    Attributes:
        name: of the entry.
        model_type: as transformers calls it.
        kind: `decoder`, `multimodal` (a decoder of text and images), `seq2seq` (a text encoder and its
            decoder) or `speech` (an encoder of features).
        family: what its cache looks like, for the table.
        config: arguments of its transformers configuration.
    """

    name: str
    model_type: str
    kind: str
    family: str
    config: Mapping[str, Any]


@cache
def sources() -> Mapping[str, Source]:
    """Every source model of `sources.toml`, by name."""
    entries = tomllib.loads(Path(__file__).with_name("sources.toml").read_text(encoding="utf-8"))
    defaults = entries.pop("defaults")
    return {name: _source(name, entry, defaults) for name, entry in entries.items()}


def _source(name: str, entry: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]) -> Source:
    kind = entry.get("kind", "decoder")
    common = defaults["decoder" if kind in {"decoder", "multimodal"} else "seq2seq"]
    kept = {key: value for key, value in common.items() if key not in entry.get("without", ())}
    config = {**kept, **entry.get("config", {})}
    if kind == "multimodal":
        config = {"text_config": config, "vision_config": entry["vision"], **entry["around"]}
    return Source(
        name=name,
        model_type=entry.get("model_type", name),
        kind=kind,
        family=entry["family"],
        config=config,
    )
