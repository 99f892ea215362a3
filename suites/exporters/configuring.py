"""Give packages that came without it the `genai_config.json` that `derive --write` writes.

Runs in our environment.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection
from pathlib import Path

from click.testing import CliRunner

from harness.cli.app import app
from suites.exporters.recipes import EXPORTERS

__all__ = ["configure"]

_CONFIG = "genai_config.json"
_OWN = ("inference_metadata.yaml",)
"""Sidecars that are left behind: what is written must not come from them."""


def configure(folder: Path, *, only: Collection[str] = ()) -> None:
    """Write `EXPORTER/configured/NAME`: the package as it is, with a configuration that was derived.

    Args:
        folder: the build folder.
        only: names of packages; empty for every package of one graph without a configuration of that name.
    """
    for exporter in EXPORTERS:
        for package in sorted((folder / exporter / "packages").glob("*")):
            graphs = list(package.rglob("*.onnx"))
            if (only and package.name not in only) or (package / _CONFIG).exists() or len(graphs) != 1:
                continue
            to = folder / exporter / "configured" / package.name
            shutil.rmtree(to, ignore_errors=True)
            shutil.copytree(package, to, ignore=shutil.ignore_patterns(*_OWN))
            result = CliRunner().invoke(app, ["derive", str(to), "--write", "genai-config"])
            if not (to / _CONFIG).is_file():
                shutil.rmtree(to)
                said = " ".join(result.stderr.split())
                print(f"{exporter} {package.name}: {said:.200}", file=sys.stderr)  # noqa: T201
