"""What onnxruntime-genai itself generates from the packages: runs in its environment.

Its loop is not ours: it reads `genai_config.json`, keeps its own caches, and feeds its own masks and
positions. The same tokens from both are evidence for either. Written to `EXPORTER/peers/NAME.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnxruntime_genai as og

from suites.exporters.recipes import EXPORTERS

__all__ = ["PEER_TOKENS", "write_peers"]

PEER_TOKENS = 64
_CONFIG = "genai_config.json"


def write_peers(folder: Path, *, only: Collection[str] = ()) -> None:
    """Let onnxruntime-genai continue the prompts of every package that it has a configuration for.

    A package that was given one (`EXPORTER/configured/NAME`) is tried without it first: what the error then
    was stands in the record as `before`.

    Args:
        folder: the build folder.
        only: names of packages; empty for all.
    """
    for exporter in EXPORTERS:
        given = {path.name: path for path in sorted((folder / exporter / "configured").glob("*"))}
        own = {
            path.name: path
            for path in sorted((folder / exporter / "packages").glob("*"))
            if (path / _CONFIG).is_file()
        }
        for name, package in {**own, **given}.items():
            if only and name not in only:
                continue
            record = json.loads((folder / exporter / "records" / f"{name}.json").read_text(encoding="utf-8"))
            source = folder / exporter / "sources" / record["recipe"]["source"]["name"]
            witness = json.loads((source / "witness.json").read_text(encoding="utf-8"))
            if witness["kind"] in {"seq2seq", "speech"}:
                continue  # its loop for these takes audio, not the features that our prompts come with
            prompts = [trace["prompt_ids"] for trace in witness["prompts"]]
            document: dict[str, Any] = {"engine": f"onnxruntime-genai {version('onnxruntime-genai')}"}
            if name in given:
                document["before"] = _generated(folder / exporter / "packages" / name, prompts)["error"]
            document.update(_generated(package, prompts))
            # Where the build folder lies is not part of what went wrong.
            for key in ("before", "error"):
                if document.get(key) is not None:
                    document[key] = document[key].replace(f"{folder}/", "")
            path = folder / exporter / "peers" / f"{name}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(document) + "\n", encoding="utf-8")
            ended = document["error"] or "generated"
            print(f"{exporter} {name}: {ended:.200}", file=sys.stderr)  # noqa: T201 (a command's progress)


def _generated(package: Path, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The tokens after each prompt, or the error."""
    try:
        model = og.Model(str(package))
        return {"prompts": [_continued(model, prompt) for prompt in prompts], "error": None}
    except Exception as error:  # the library raises what its native side says
        return {"prompts": None, "error": " ".join(str(error).split())[:400]}


def _continued(model: og.Model, prompt: Sequence[int]) -> dict[str, Any]:
    """Greedy; it stops at the model's end-of-sequence token."""
    params = og.GeneratorParams(model)
    params.set_search_options(do_sample=False, max_length=len(prompt) + PEER_TOKENS)
    generator = og.Generator(model, params)
    generator.append_tokens(list(prompt))
    while not generator.is_done():
        generator.generate_next_token()
    return {
        "prompt_ids": list(prompt),
        "token_ids": [int(i) for i in generator.get_sequence(0)[len(prompt) :]],
    }
