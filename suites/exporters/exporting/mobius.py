"""mobius-onnx, by its library."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import mobius
from mobius.integrations.onnx_genai import write_onnx_genai_config
from mobius.integrations.ort_genai import write_ort_genai_config

from suites.exporters.recipes import Recipe
from suites.exporters.witness import auto_class

DISTRIBUTIONS = ("mobius-onnx", "onnxscript", "onnx-ir", "transformers", "torch")


def export(recipe: Recipe, source: Path, to: Path) -> None:
    """What `mobius build --model SOURCE TO` does: its command would look for the tokenizer in a hub."""
    options = recipe.options
    provider, room = options.get("execution_provider", "default"), options.get("static_cache")
    task = None if room is None else mobius.CausalLMTask(static_cache=True, max_seq_len=room)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = _changed(recipe, source, Path(folder))
        package = mobius.build(
            str(checkpoint), task=task, dtype=options.get("dtype", "f32"), execution_provider=provider
        )
        package.save(str(to), progress_bar=False)
    if options.get("runtime") == "ort-genai":
        write_ort_genai_config(package, str(to), ep=provider, local_config_dir=str(source))
    elif options.get("runtime") == "onnx-genai":
        write_onnx_genai_config(package, str(to), config=package.config, source=str(source))


def _changed(recipe: Recipe, source: Path, to: Path) -> Path:
    """The checkpoint as the variant wants it: `source` itself, or a changed copy in `to`."""
    options = recipe.options
    if "config" not in options and "names" not in options:
        return source
    if options.get("names") == "model":
        model = auto_class(recipe.source.kind).from_pretrained(source, dtype="float32")
        model.save_pretrained(to, save_original_format=False)
    else:
        shutil.copytree(source, to, dirs_exist_ok=True)
    path = to / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, **options.get("config", {})}), encoding="utf-8")
    return to
