"""What the person who runs the tests asks for: on the command line, or by its twin in the environment."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = [
    "CANDIDATE",
    "MODEL_DIR",
    "OPTIONS",
    "REPORT_DIR",
    "REQUIRE",
    "Option",
    "folder_named_by",
    "gate_of",
    "is_ours",
    "label",
    "report_folder",
    "required",
]

_FIXTURES = frozenset({"parity", "parity_engine", "parity_package", "parity_report_dir"})


@dataclass(frozen=True, slots=True)
class Option:
    """An option of pytest with a twin in the environment; the option wins.

    Attributes:
        name: without prefix, in words with hyphens.
        metavar: what it takes.
        help: one line.
    """

    name: str
    metavar: str
    help: str

    @property
    def flag(self) -> str:
        """On pytest's command line."""
        return f"--parity-{self.name}"

    @property
    def variable(self) -> str:
        """In the environment."""
        return f"ONNX_PARITY_{self.name.replace('-', '_').upper()}"

    def of(self, config: pytest.Config) -> str | None:
        """Its value; None where it is not given, or empty."""
        given = config.getoption(f"parity_{self.name.replace('-', '_')}")
        return given or os.environ.get(self.variable) or None


MODEL_DIR = Option("model-dir", "DIR", "folder of real packages, for tests of `parity_package`")
REQUIRE = Option(
    "require", "NAMES", "cuda, model or engines, with commas: what is missing fails, never skips"
)
CANDIDATE = Option("candidate", "ENGINE", "engine under test where a test names none: ort-cpu:threads=1")
REPORT_DIR = Option("report-dir", "DIR", "where reports are kept; by default pytest's temporary folder")
OPTIONS = (MODEL_DIR, REQUIRE, CANDIDATE, REPORT_DIR)


def is_ours(item: pytest.Item) -> bool:
    """Whether a test asks for one of the plugin's fixtures."""
    return not _FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


def required(config: pytest.Config) -> frozenset[str]:
    """The gates that must open: `cuda`, `model`, or the name of an engine.

    Raises:
        UsageError: there is no such gate.
    """
    asked = {name.strip() for name in (REQUIRE.of(config) or "").split(",")} - {""}
    if not asked:
        return frozenset()
    from importlib.metadata import entry_points

    engines = {entry.name for entry in entry_points(group="onnx_parity.engines")}
    unknown = sorted(asked - engines - {"cuda", "model"})
    if unknown:
        raise pytest.UsageError(
            f"{REQUIRE.flag} (or {REQUIRE.variable}): there is no {unknown[0]!r} to require. "
            f"Name cuda, model, or an engine: {', '.join(sorted(engines))}."
        )
    return frozenset(map(gate_of, asked))


def gate_of(engine: str) -> str:
    """The gate that stands for an engine."""
    return "cuda" if engine == "ort-cuda" else engine


def folder_named_by(option: Option, config: pytest.Config) -> Path | None:
    """The folder that an option names, as seen from where pytest was started."""
    value = option.of(config)
    return None if value is None else config.invocation_params.dir / Path(value).expanduser()


def report_folder(item: pytest.Item, factory: pytest.TempPathFactory) -> Path:
    """Where the reports of a test go: the same folder in every run with `--parity-report-dir`."""
    kept = folder_named_by(REPORT_DIR, item.config)
    # To the node ID of an item pytest-xdist adds its group.
    test = item.name if item.parent is None else f"{item.parent.nodeid}::{item.name}"
    return (factory.getbasetemp() / "parity-reports" if kept is None else kept) / label(test)


def label(text: str) -> str:
    """A file name for a text, another one for another text."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")
    if plain == text and len(text) < 80:
        return plain
    import hashlib

    return f"{plain[-80:].strip('-.')}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:8]}"
