"""The model builder of onnxruntime-genai, in this process: it takes seconds to import."""

from __future__ import annotations

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from suites.exporters.recipes import Recipe

DISTRIBUTIONS = ("onnxruntime-genai", "onnx-ir", "transformers", "torch")
_EXECUTION_PROVIDER = "cpu"


def export(recipe: Recipe, source: Path, to: Path) -> None:
    """`python -m onnxruntime_genai.models.builder -i SOURCE -o TO` with the options of the variant."""
    builder = _builder()
    precision = recipe.precision.partition("-")[0]
    with tempfile.TemporaryDirectory() as cache:
        place = (None, str(source), str(to), precision, _EXECUTION_PROVIDER, cache)
        options = builder.parse_extra_options(
            *place, [f"{key}={value}" for key, value in recipe.options.items()]
        )
        builder.create_model(*place, **options)


def _builder() -> Any:
    """The builder is a script, and imports the modules beside it by their bare names."""
    spec = find_spec("onnxruntime_genai")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("onnxruntime_genai is not installed")
    folder = str(Path(spec.origin).parent / "models")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import builder

    return builder
