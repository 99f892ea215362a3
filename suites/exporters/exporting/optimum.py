"""optimum-onnx, by its library."""

from __future__ import annotations

from pathlib import Path

from optimum.exporters.onnx import main_export

from suites.exporters.recipes import Recipe

DISTRIBUTIONS = ("optimum-onnx", "optimum", "transformers", "torch")
_TASKS = {
    "decoder": "text-generation-with-past",
    "seq2seq": "text2text-generation-with-past",
    "speech": "automatic-speech-recognition-with-past",
}


def export(recipe: Recipe, source: Path, to: Path) -> None:
    """What `optimum-cli export onnx --model SOURCE TO` does, without its own comparison of logits."""
    main_export(
        str(source),
        str(to),
        task=_TASKS[recipe.source.kind],
        no_post_process=not recipe.options["merged"],
        local_files_only=True,
        do_validation=False,
    )
