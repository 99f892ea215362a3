"""What a model consists of on disk, and its hash."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from harness.errors import InputError
from harness.package.links import is_own
from harness.ports import read_external_files

__all__ = ["model_files", "model_sha256"]

_HASH_CHUNK = 1 << 22


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
            own = is_own(folder, location) and not Path(location).is_absolute()
        except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a NUL character
            raise InputError(
                f"{model}: external data {location[:80]!r} cannot be the name of a file: {error}.",
                next_action="Export the model again with its data beside the graph.",
            ) from error
        if not own:
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


def model_sha256(*models: Path, cache: Path | None = None) -> str:
    """SHA-256 over the bytes of the `model_files` of each graph, one after another, in hex.

    Args:
        models: the graph files, at least one.
        cache: a folder that remembers the hash by path, size and modification time of every file;
            None hashes anew.

    Raises:
        InputError: as `model_files`.
    """
    files = [file for model in models for file in model_files(model)]
    state = [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    entry = None
    if cache is not None:
        graphs = state[0][0] if len(models) == 1 else [str(model.resolve()) for model in models]
        key = hashlib.sha256(json.dumps(graphs).encode()).hexdigest()[:32]
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
