"""Build the packages of one exporter: runs in the exporter's environment, and imports nothing of the harness.

A build folder has, for each exporter: `sources/NAME` (checkpoint, tokenizer, `witness.json`), `packages/NAME`
(what the exporter wrote, as it is) and `records/NAME.json` (what was asked for, with what, and how it ended).
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
import traceback
from collections.abc import Collection
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from suites.exporters.exporting import Exporter, exporter_named
from suites.exporters.recipes import Recipe, recipes
from suites.exporters.witness import write_source

__all__ = ["build"]

_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_CONFIGS = ("config.json", "generation_config.json")
"""What a user copies along where an exporter does not: prefixes of decoders are nowhere else."""


def build(exporter: str, to: Path, *, only: Collection[str] = (), again: bool = False) -> int:
    """Build every package of `exporter` below `to`; returns how many could not be built.

    Args:
        exporter: one of `EXPORTERS`.
        to: the build folder.
        only: names of packages or of source models; empty for all.
        again: whether what has a record is built anew.
    """
    module = exporter_named(exporter)
    folder = to / exporter
    (folder / "records").mkdir(parents=True, exist_ok=True)
    failed = 0
    for recipe in recipes(exporter):
        if only and not {recipe.name, recipe.source.name} & set(only):
            continue
        path = folder / "records" / f"{recipe.name}.json"
        if again or not path.is_file():
            record = _built(module, recipe, folder)
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        else:
            record = json.loads(path.read_text(encoding="utf-8"))
        failed += record["error"] is not None
        ended = (
            "built"
            if record["error"] is None
            else f"{record['error']['stage']}: {record['error']['message']}"
        )
        print(f"{exporter} {recipe.name}: {ended:.160}", file=sys.stderr)  # noqa: T201 (a command's progress)
    return failed


def _built(module: Exporter, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The record of one package; an exporter that raises is a result."""
    source, package = folder / "sources" / recipe.source.name, folder / "packages" / recipe.name
    shutil.rmtree(package, ignore_errors=True)
    began = time.monotonic()
    error, copied = None, []
    stage = "source"
    try:
        write_source(recipe.source, source)
        stage = "export"
        package.mkdir(parents=True)
        module.export(recipe, source, package)
        copied = _copy_configs(source, package)
    except (
        Exception,
        SystemExit,
    ) as raised:  # of libraries that raise anything; a command's exit is a failure
        error = {"stage": stage, **_error(raised, folder)}
        shutil.rmtree(package, ignore_errors=True)
    return {
        "recipe": asdict(recipe),
        "distributions": {name: version(name) for name in module.DISTRIBUTIONS},
        "seconds": round(time.monotonic() - began, 2),
        "copied": copied,
        "error": error,
    }


def _error(raised: BaseException, folder: Path) -> dict[str, str]:
    """What an exporter raised first: some wrap it in an error of their own, with advice."""
    while raised.__cause__ is not None:
        raised = raised.__cause__
    where = traceback.extract_tb(raised.__traceback__)[-1]
    # Where the build folder lies is not part of what went wrong.
    said = _COLOURS.sub("", str(raised)).replace(f"{folder}/", "")
    return {
        "type": type(raised).__name__,
        "message": " ".join(said.split())[:400],
        "where": f"{_library_path(where.filename)}:{where.lineno}",
    }


def _copy_configs(source: Path, package: Path) -> list[str]:
    """Copy the model's own configuration beside graphs that came without it; returns what was copied."""
    missing = [name for name in _CONFIGS if (source / name).is_file() and not (package / name).exists()]
    for name in missing:
        shutil.copyfile(source / name, package / name)
    return missing


def _library_path(path: str) -> str:
    """A file's path below the folder that libraries are installed in; for others, its name."""
    _, installed, below = path.rpartition("site-packages/")
    return below if installed else Path(path).name
