"""A model directory and what it declares, as plain mappings.

A package is a folder with a graph (`*.onnx` and its external data) and, optionally,
`inference_metadata.yaml`, `genai_config.json` and tokenizer files. Nothing here interprets what is
declared (`harness.topology` does) and neither numpy nor a runtime is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.ports import read_external_files

__all__ = ["Package", "model_files", "model_sha256", "open_package", "write_sidecar"]

_METADATA_NAMES = ("inference_metadata.yaml", "inference_metadata.yml")
_HASH_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Package:
    """A model directory.

    Attributes:
        folder: the directory.
        model: the decoder's graph file inside it.
        metadata: `inference_metadata.yaml` as a mapping, None where there is none.
        genai_config: `genai_config.json` as a mapping, None where there is none.
    """

    folder: Path
    model: Path
    metadata: Mapping[str, Any] | None = None
    genai_config: Mapping[str, Any] | None = None

    @property
    def tokenizer(self) -> Path | None:
        """The `tokenizer.json` of the package, None where there is none."""
        path = self.folder / "tokenizer.json"
        return path if path.is_file() else None

    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence token IDs that the package declares, in the first file that names any.

        Looked up as `model.eos_token_id` of `genai_config.json`, then `eos_token_id` of
        `generation_config.json` and `config.json`; empty where none of them says.

        Raises:
            InputError: one of these files cannot be read, or its value is not an ID or a list of IDs.
        """
        declared = [("genai_config.json", (self.genai_config or {}).get("model"))]
        for name in ("generation_config.json", "config.json"):
            path = self.folder / name
            if path.is_file():
                declared.append((name, _read_json(path)))
        for name, section in declared:
            value = section.get("eos_token_id") if isinstance(section, Mapping) else None
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
                raise InputError(
                    f"{self.folder / name}: eos_token_id is {value!r}; a token ID or a list of them is due.",
                    next_action="Correct the file.",
                )
            return tuple(ids)
        return ()


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
        return Package(folder=path.parent, model=path)
    folder = path
    metadata = next((folder / n for n in _METADATA_NAMES if (folder / n).is_file()), None)
    genai = folder / "genai_config.json"
    declared = _read_yaml(metadata) if metadata else None
    config = _read_json(genai) if genai.is_file() else None
    return Package(folder=folder, model=_choose_graph(folder, config), metadata=declared, genai_config=config)


def model_files(model: Path) -> tuple[Path, ...]:
    """The graph file and every external-data file that it names, the latter in order of their path.

    Raises:
        InputError: the graph cannot be read, or an external file is missing or outside the package.
    """
    folder = model.parent.resolve()
    files = [model]
    for location in sorted(set(read_external_files(model))):
        try:
            target = (folder / location).resolve()
            readable = target.is_file()
        except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a NUL character
            raise InputError(
                f"{model}: external data {location[:80]!r} cannot be the name of a file: {error}.",
                next_action="Export the model again with its data beside the graph.",
            ) from error
        if Path(location).is_absolute() or not target.is_relative_to(folder):
            raise InputError(
                f"{model}: external data {location!r} points outside the package {folder}; "
                "a package may only name files in its own folder.",
                next_action="Export the model again with its data beside the graph.",
            )
        if not readable:
            raise InputError(
                f"{model}: external data file {location!r} is missing from {folder}.",
                next_action="Copy it beside the graph, or export the model again.",
            )
        files.append(target)
    return tuple(files)


def model_sha256(model: Path, *, cache: Path | None = None) -> str:
    """SHA-256 over the bytes of `model_files(model)`, one after another, in hex.

    Args:
        model: the graph file.
        cache: a folder that remembers the hash by path, size and modification time of every file;
            None hashes anew.

    Raises:
        InputError: as `model_files`.
    """
    files = model_files(model)
    state = [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    entry = None
    if cache is not None:
        key = hashlib.sha256(json.dumps(state[0][0]).encode()).hexdigest()[:32]
        entry = cache / "sha256" / f"{key}.json"
        try:
            known = json.loads(entry.read_text(encoding="utf-8"))
            if known["files"] == state:
                return str(known["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # absent or damaged: the entry is only a memory, and is written anew below
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(_HASH_CHUNK):
                digest.update(chunk)
    value = digest.hexdigest()
    if entry is not None:
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            draft = entry.with_suffix(f".{os.getpid()}.tmp")
            draft.write_text(json.dumps({"files": state, "sha256": value}), encoding="utf-8")
            draft.replace(entry)
        except OSError:
            pass  # a cache that cannot be written costs time on the next run, and nothing else
    return value


def write_sidecar(folder: Path, name: str, document: Mapping[str, Any]) -> Path:
    """Write a sidecar file called `name` into `folder`, as YAML or JSON by its suffix; returns its path.

    The file appears at once or not at all, and none is ever overwritten.

    Raises:
        InputError: the folder has a sidecar of this kind already, or cannot be written to.
    """
    path = folder / name
    kin = _METADATA_NAMES if name in _METADATA_NAMES else (name,)
    taken = next((folder / n for n in kin if os.path.lexists(folder / n)), None)
    if taken is not None:
        raise InputError(
            f"{taken} exists, and nothing is overwritten.",
            next_action="Move it away and write again, or keep it: it declares the topology already.",
        )
    if path.suffix == ".json":
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    else:
        import yaml  # only packages that have a YAML sidecar pay for the import

        # ASCII only: unescaped, some characters (U+0085) would be read back as ends of lines.
        text = yaml.safe_dump(document, sort_keys=False, width=1 << 16)
    draft = folder / f".{name}.{os.getpid()}.tmp"
    try:
        try:
            draft.write_text(text, encoding="utf-8")
            os.link(draft, path)  # unlike a rename, this fails where the name is taken meanwhile
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror or error}.",
            next_action="Check the folder, its permissions and the disk.",
        ) from error
    return path


def _choose_graph(folder: Path, genai_config: Mapping[str, Any] | None) -> Path:
    decoder = (genai_config or {}).get("model")
    decoder = decoder.get("decoder") if isinstance(decoder, Mapping) else None
    named = decoder.get("filename") if isinstance(decoder, Mapping) else None
    if named is not None:
        return _named_graph(folder, named)
    graphs = sorted(graph for graph in folder.glob("*.onnx") if graph.is_file())
    if not graphs:
        raise InputError(
            f"{folder}: no graph in this directory; a package holds a *.onnx file.",
            next_action="Name the directory that holds model.onnx.",
        )
    if len(graphs) == 1:
        return graphs[0]
    for graph in graphs:
        if graph.name == "model.onnx":
            return graph
    raise InputError(
        f"{folder}: {len(graphs)} graphs and none is model.onnx: {', '.join(g.name for g in graphs)}.",
        next_action="Name the decoder's .onnx file instead of the directory.",
    )


def _named_graph(folder: Path, named: object) -> Path:
    """The graph that `genai_config.json` names; it must be in the package."""
    why = "is not a file name"
    if isinstance(named, str):
        try:
            graph = folder / named
            inside = graph.resolve().is_relative_to(folder.resolve())
            why = "is missing" if inside else "lies outside the package"
            if inside and graph.is_file():
                return graph
        except (OSError, RuntimeError, ValueError):  # too long, a loop of links, a NUL character
            why = "cannot be the name of a file"
    raise InputError(
        f"{folder / 'genai_config.json'}: model.decoder.filename is {str(named)[:80]!r}, which {why}.",
        next_action="Correct the file, or name the graph itself instead of its folder.",
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise _unreadable(path, "JSON", error) from error
    return _mapping(path, value)


def _read_yaml(path: Path) -> Mapping[str, Any]:
    import yaml  # only packages that have a YAML sidecar pay for the import

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except Exception as error:  # besides YAMLError, a value of the wrong form raises whatever it likes
        raise _unreadable(path, "YAML", error) from error
    return _mapping(path, value)


def _unreadable(path: Path, kind: str, error: Exception) -> InputError:
    detail = " ".join(str(error).split())
    return InputError(
        f"{path}: not readable as {kind}: {detail}.",
        next_action="Correct the file, or remove it to have the topology derived from the ports.",
    )


def _mapping(path: Path, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(
            f"{path}: holds a {type(value).__name__}; a sidecar is a mapping at the top level.",
            next_action="Correct the file, or remove it to have the topology derived from the ports.",
        )
    return value
