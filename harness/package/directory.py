"""What a package is, and how it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import InputError, shown
from harness.package.components import Component, Components, mapping_at
from harness.package.genai import genai_components
from harness.package.layouts import components_by_name
from harness.package.metadata import metadata_components
from harness.package.reading import METADATA_NAMES, is_there, read_json, read_yaml

__all__ = ["Package", "open_package"]


@dataclass(frozen=True, slots=True)
class Package:
    """A model directory.

    Attributes:
        folder: the directory.
        components: its graphs.
        metadata: `inference_metadata.yaml` as a mapping, None where there is none.
        genai_config: `genai_config.json` as a mapping, None where there is none.
    """

    folder: Path
    components: Components
    metadata: Mapping[str, Any] | None = None
    genai_config: Mapping[str, Any] | None = None

    @property
    def model(self) -> Path:
        """The graph file of the decoder; of one in parts, that of the part with the most to say: the last."""
        return self.components.decoder[-1].graph

    @property
    def tokenizer(self) -> Path | None:
        """The `tokenizer.json` of the package, None where there is none."""
        path = self.folder / "tokenizer.json"
        return path if path.is_file() else None

    def config(self, name: str) -> Mapping[str, Any]:
        """The mapping in a JSON file of the package; an empty one where there is no such file.

        Raises:
            InputError: it cannot be read, or holds something else.
        """
        if name == "genai_config.json" and self.genai_config is not None:
            return self.genai_config
        path = self.folder / name
        return read_json(path) if is_there(path) else {}

    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence token IDs that the package declares, in the first file that names any.

        Looked up as `model.eos_token_id` of `genai_config.json` (`tokens.eos` in its version 2), then
        `eos_token_id` of `generation_config.json` and `config.json`; empty where none of them says.

        Raises:
            InputError: one of these files cannot be read, or its value is not an ID or a list of IDs.
        """
        genai = self.genai_config or {}
        declared = [("genai_config.json", section) for section in (genai.get("model"), _version_2(genai))]
        for name in ("generation_config.json", "config.json"):
            path = self.folder / name
            if is_there(path):
                declared.append((name, read_json(path)))
        for name, section in declared:
            value = section.get("eos_token_id") if isinstance(section, Mapping) else None
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
                raise InputError(
                    f"{self.folder / name}: eos_token_id is {shown(value)}; a token ID or a list of them "
                    "is due.",
                    next_action="Correct the file.",
                )
            return tuple(ids)
        return ()


def _version_2(genai_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its end-of-sequence IDs under the name that all others have for them."""
    return {"eos_token_id": mapping_at(genai_config, "tokens").get("eos")}


def open_package(path: Path) -> Package:
    """Read what the package at `path` declares.

    `path` is a directory, or an `.onnx` file: a graph that is named itself stands for itself, and what
    sidecars in its folder declare (perhaps of another graph) is not read.

    Raises:
        InputError: there is no such path, no graph or more than one candidate graph in it, or a sidecar
            that cannot be parsed.
    """
    if not (path.is_dir() or path.is_file()):
        if path.exists():
            raise InputError(
                f"{path}: neither a directory nor a regular file.",
                next_action="Give a model directory or an .onnx file.",
            )
        raise InputError(
            f"{path}: no such file or directory.",
            next_action="Give a model directory, an .onnx file, or a built-in name such as demo.",
        )
    if path.is_file():
        return Package(folder=path.parent, components=Components((Component(path.stem, path),)))
    folder = path
    metadata = next((folder / n for n in METADATA_NAMES if is_there(folder / n)), None)
    genai = folder / "genai_config.json"
    declared = read_yaml(metadata) if metadata else None
    config = read_json(genai) if is_there(genai) else None
    components = _components(folder, declared, config)
    return Package(folder=folder, components=components, metadata=declared, genai_config=config)


def _components(
    folder: Path, metadata: Mapping[str, Any] | None, genai_config: Mapping[str, Any] | None
) -> Components:
    """What the sidecars name, else what the names of the files say."""
    found = None if genai_config is None else genai_components(folder, genai_config)
    if found is None and metadata is not None:
        found = metadata_components(folder, metadata)
    return found or components_by_name(folder)
