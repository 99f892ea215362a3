"""torch.onnx.export(dynamo=True), as a user calls it: one step of the model, with its cache as inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from suites.exporters.recipes import Recipe
from suites.exporters.witness import auto_class

DISTRIBUTIONS = ("torch", "onnxscript", "onnx-ir", "transformers")


class _Step(torch.nn.Module):
    """Token IDs and what was cached before to logits and what is cached now, all as plain tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        past_keys: list[torch.Tensor],
        past_values: list[torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        cache = DynamicCache()
        for layer, (key, value) in enumerate(zip(past_keys, past_values, strict=True)):
            cache.update(key, value, layer)
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": cache}
        outputs = self.model(**given, use_cache=True)
        layers = outputs.past_key_values.layers
        return outputs.logits, [layer.keys for layer in layers], [layer.values for layer in layers]


def export(recipe: Recipe, source: Path, to: Path) -> None:
    """Trace one step with a batch of two, two new tokens and three old ones, every such axis dynamic."""
    # Experts as one batch of products: what transformers groups them into has no translation.
    ways = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    model = auto_class(recipe.source.kind).from_pretrained(source, **ways).eval()
    old, new = torch.tensor([[5, 6, 7], [9, 8, 6]]), torch.tensor([[5, 6], [7, 8]])
    with torch.no_grad():
        layers = model(input_ids=old, past_key_values=DynamicCache(), use_cache=True).past_key_values.layers
    mask = torch.ones(2, 5, dtype=torch.int64)
    arguments = (new, mask, [layer.keys for layer in layers], [layer.values for layer in layers])
    axis = torch.export.Dim.DYNAMIC
    cached = [{0: axis, 2: axis} for _ in layers]
    names: dict[str, list[str]] = {}
    if recipe.options["named"]:
        parts = ("key", "value")
        names = {
            "input_names": ["input_ids", "attention_mask", *_names("past_key_values", parts, len(layers))],
            "output_names": ["logits", *_names("present", parts, len(layers))],
        }
    program = torch.onnx.export(
        _Step(model),
        arguments,
        dynamo=True,
        dynamic_shapes=({0: axis, 1: axis}, {0: axis, 1: axis}, cached, cached),
        verbose=False,
        **names,
    )
    program.save(str(to / "model.onnx"))


def _names(prefix: str, parts: tuple[str, ...], layers: int) -> list[str]:
    """All keys, then all values, as they are passed."""
    return [f"{prefix}.{layer}.{part}" for part in parts for layer in range(layers)]
