"""Faults that an exporter could have, planted in the checkpoint that it is given.

The source model knows nothing of them. Runs in an exporter's environment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

__all__ = ["plant"]

Weights = dict[str, torch.Tensor]
_WEIGHTS = "model.safetensors"
_CONFIG = "config.json"


def plant(fault: str, checkpoint: Path) -> None:
    """Change the checkpoint in a folder as `fault` says: `rope-base`, or a name in `_OF_WEIGHTS`."""
    if fault == "rope-base":
        _other_rope_base(checkpoint / _CONFIG)
        return
    path = checkpoint / _WEIGHTS
    weights = load_file(path)
    save_file(_OF_WEIGHTS[fault](weights), path, metadata={"format": "pt"})


def _other_rope_base(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_parameters"]["rope_theta"] *= 10
    path.write_text(json.dumps(config), encoding="utf-8")


def _transposed_projection(weights: Weights) -> Weights:
    """The square output projection of the second layer's attention, the wrong way round."""
    name = "model.layers.1.self_attn.o_proj.weight"
    return weights | {name: weights[name].T.contiguous()}


def _swapped_layers(weights: Weights) -> Weights:
    """All weights of the first layer in the second, and the other way round."""
    other = {"model.layers.0.": "model.layers.1.", "model.layers.1.": "model.layers.0."}

    def renamed(name: str) -> str:
        prefix = next((prefix for prefix in other if name.startswith(prefix)), "")
        return other.get(prefix, "") + name.removeprefix(prefix)

    return {renamed(name): value for name, value in weights.items()}


def _missing_scale(weights: Weights) -> Weights:
    """The last norm, without its scale."""
    name = "model.norm.weight"
    return weights | {name: torch.ones_like(weights[name])}


_OF_WEIGHTS: Mapping[str, Callable[[Weights], Weights]] = {
    "transposed-projection": _transposed_projection,
    "swapped-layers": _swapped_layers,
    "missing-scale": _missing_scale,
}
