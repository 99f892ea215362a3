"""mobius-onnx, by its library."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path

import mobius
import transformers
from mobius.integrations.onnx_genai import write_onnx_genai_config
from mobius.integrations.ort_genai import write_ort_genai_config
from safetensors.torch import load_file

from suites.exporters.faults import plant
from suites.exporters.recipes import Recipe
from suites.exporters.witness import auto_class

DISTRIBUTIONS = ("mobius-onnx", "onnxscript", "onnx-ir", "transformers", "torch")


def export(recipe: Recipe, source: Path, to: Path) -> None:
    """What `mobius build --model SOURCE TO` does: its command would look for the tokenizer in a hub."""
    options = recipe.options
    provider = options.get("execution_provider", "default")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = _checkpoint(recipe, source, Path(folder))
        if "layer_types" in options:
            package = _with_layer_types(recipe, checkpoint)
        else:
            room = options.get("static_cache")
            package = mobius.build(
                str(checkpoint),
                task=None if room is None else mobius.CausalLMTask(static_cache=True, max_seq_len=room),
                dtype=options.get("dtype", "f32"),
                execution_provider=provider,
            )
        package.save(str(to), progress_bar=False)
    if options.get("runtime") == "ort-genai":
        write_ort_genai_config(package, str(to), ep=provider, local_config_dir=str(source))
    elif options.get("runtime") == "onnx-genai":
        write_onnx_genai_config(package, str(to), config=package.config, source=str(source))


def _checkpoint(recipe: Recipe, source: Path, to: Path) -> Path:
    """The checkpoint as the variant wants it: `source` itself, or a changed copy in `to`."""
    if recipe.options.get("names") == "model":
        model = auto_class(recipe.source.kind).from_pretrained(source, dtype="float32")
        model.save_pretrained(to, save_original_format=False)
    elif "fault" in recipe.options:
        shutil.copytree(source, to, dirs_exist_ok=True)
        plant(recipe.options["fault"], to)
    else:
        return source
    return to


def _with_layer_types(recipe: Recipe, checkpoint: Path) -> mobius.ModelPackage:
    """What `mobius.build` does, with the exporter's own names for kinds of layers."""
    read = mobius.ArchitectureConfig.from_transformers(transformers.AutoConfig.from_pretrained(checkpoint))
    own = recipe.options["layer_types"]
    config = dataclasses.replace(read, layer_types=[own.get(kind, kind) for kind in read.layer_types])
    model_class = mobius.registry.get(recipe.source.model_type)
    module = model_class(config)
    package = mobius.build_from_module(
        module, config, getattr(model_class, "default_task", "text-generation")
    )
    package.apply_weights(module.preprocess_weights(load_file(checkpoint / "model.safetensors")))
    return package
