"""Mutants that a person wrote: one change each to the derivation, and the test that must notice it.

A change is given as text of the source and what takes its place. A mutant whose text no longer stands in
its file exactly once is an error: it would prove nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from suites.mutation.call_phase import KILLED, KILLS_VARIABLE
from suites.mutation.tree import ROOT

__all__ = ["NamedMutant", "Verdict", "mutated", "named_mutants", "run_mutant", "run_unmutated", "source_with"]

_SECONDS = 300.0
"""A run that takes longer proves nothing either way."""

Status = Literal["killed", "survived", "broken", "timeout"]


@dataclass(frozen=True)
class NamedMutant:
    """One change of our own source, and what must notice it.

    Attributes:
        name: what the mutant does wrong.
        file: the source file, from the root of the checkout.
        old: text that stands in it once.
        new: text that takes its place.
        test: node ID of the test that must fail.
        because: why it must.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    because: str


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        status: `killed` by its test's call phase, `survived`, `broken` (failed otherwise) or `timeout`.
        killed_by: the first test that failed, None unless killed.
    """

    status: Status
    killed_by: str | None = None


def named_mutants() -> tuple[NamedMutant, ...]:
    """The mutants of `named_mutants.json`, in its order."""
    text = (Path(__file__).parent / "named_mutants.json").read_text(encoding="utf-8")
    return tuple(NamedMutant(**row) for row in json.loads(text))


def source_with(mutant: NamedMutant, root: Path = ROOT) -> str:
    """The source of the mutant's file under `root`, with its change.

    Raises:
        ValueError: the text to be replaced does not stand there exactly once.
    """
    source = (root / mutant.file).read_text(encoding="utf-8")
    count = source.count(mutant.old)
    if count != 1:
        raise ValueError(
            f"mutant {mutant.name!r}: its text stands {count} times in {mutant.file}, and must stand there "
            "once. Write the mutant anew for the source as it is."
        )
    return source.replace(mutant.old, mutant.new)


@contextmanager
def mutated(tree: Path, mutant: NamedMutant) -> Iterator[None]:
    """Change the file in `tree` for as long as the context lasts.

    Raises:
        ValueError: as `source_with`.
    """
    path = tree / mutant.file
    original = path.read_text(encoding="utf-8")
    path.write_text(source_with(mutant, tree), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(original, encoding="utf-8")


def run_unmutated(tree: Path, mutants: Iterable[NamedMutant]) -> Verdict:
    """Run the tests that `mutants` name on an unchanged tree, where each of them must pass."""
    return _run(tree, sorted({mutant.test for mutant in mutants}))


def run_mutant(tree: Path, mutant: NamedMutant) -> Verdict:
    """Apply a mutant to a copy of the tree and run the test that it names.

    Raises:
        ValueError: as `source_with`.
    """
    with mutated(tree, mutant):
        return _run(tree, [mutant.test])


def _run(tree: Path, tests: list[str]) -> Verdict:
    notes = tree / "kills.jsonl"
    notes.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),  # before the checkout, which an editable installation puts on the path
        "PYTHONDONTWRITEBYTECODE": "1",  # bytecode is matched by time and size, which a mutant may share
        "CI": "1",  # hypothesis then draws the same examples every time
        KILLS_VARIABLE: str(notes),
    }
    plugins = ["-p", "suites.mutation.call_phase", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *plugins, *tests]
    try:
        ended = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Verdict("timeout")
    if ended.returncode == 0:
        return Verdict("survived")
    if ended.returncode != KILLED or not notes.exists():
        return Verdict("broken")
    return Verdict("killed", json.loads(notes.read_text(encoding="utf-8").splitlines()[0])[1])
