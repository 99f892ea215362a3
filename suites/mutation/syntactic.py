"""Mutants that a machine writes: every function of the derivation, by mutmut, in a copy of the tree.

What counts is read from the results that mutmut keeps for each mutant; its exit status says nothing (it is
0 with survivors). mutmut resumes: a mutant has its verdict until its function changes. A changed test can
turn any verdict, which mutmut does not see, so all of them are dropped then.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from suites.mutation.call_phase import KILLED, KILLS_VARIABLE
from suites.mutation.tree import copy_tree

__all__ = ["Equivalent", "SyntacticMutant", "declared_equivalents", "mutmut_version", "run_syntactic"]

_STATUS = {KILLED: "killed", 0: "survived", 5: "untested", 33: "untested", None: "unchecked"}
_TIMEOUTS = frozenset({-24, 24, 36, 152, 255})
_INPUTS_OF_TESTS = ("fixtures", "suites", "docs", "reports/schemas", "pyproject.toml")
_FINGERPRINT = "tests.sha256"


@dataclass(frozen=True)
class SyntacticMutant:
    """One mutant of mutmut's, and what became of it.

    Attributes:
        name: mutmut's name for it; its number changes whenever its function does.
        function: dotted name of the function, of a method with its class.
        after: the line before the change, without indentation.
        removed: lines of the function that the mutant lacks.
        added: lines that stand in their place.
        status: killed, survived, untested, timeout, broken or unchecked.
        killed_by: the first test whose call phase failed, None unless killed (or unless that was not noted).
    """

    name: str
    function: str
    status: str
    after: str = ""
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    killed_by: str | None = None


@dataclass(frozen=True)
class Equivalent:
    """A change that no test can notice, since it changes nothing that holds.

    Attributes:
        function: where it is, as in `SyntacticMutant`.
        after: the line before them.
        removed: the lines as they stand.
        added: the lines of the mutant.
        because: why nothing changes.
    """

    function: str
    after: str
    removed: tuple[str, ...]
    added: tuple[str, ...]
    because: str

    def covers(self, mutant: SyntacticMutant) -> bool:
        """True if this is the change that the mutant makes."""
        mine = (self.function, self.after, self.removed, self.added)
        return mine == (mutant.function, mutant.after, mutant.removed, mutant.added)


def mutmut_version() -> str:
    """The version of mutmut that is installed."""
    return version("mutmut")


def declared_equivalents() -> tuple[Equivalent, ...]:
    """What `equivalent.json` declares."""
    rows = json.loads((Path(__file__).parent / "equivalent.json").read_text(encoding="utf-8"))
    return tuple(
        Equivalent(row["function"], row["after"], tuple(row["removed"]), tuple(row["added"]), row["because"])
        for row in rows
    )


def run_syntactic(
    work: Path, *, only: Iterable[str] = (), children: int = 2, keep_kills: bool = False
) -> list[SyntacticMutant]:
    """Run mutmut on a copy of the tree in `work`, and return every mutant with its verdict.

    A mutant whose tests do not end in time is tested once more: on a busy machine some hang for no reason
    of their own.

    Args:
        work: folder for the copy and for mutmut's results, which a later run takes up again.
        only: patterns of mutant names to run; all that have no verdict where there are none.
        children: how many mutants are tested at a time.
        keep_kills: keep kills although tests have changed since; for work on tests, not for a verdict.

    Raises:
        RuntimeError: mutmut ended before it tested mutants, for example since a test fails without any.
    """
    work = work.resolve()  # mutmut runs the tests in a folder of its own
    work.mkdir(parents=True, exist_ok=True)
    copy_tree(work)
    _drop_stale_verdicts(work, keep_kills=keep_kills)
    notes = work / "kills.jsonl"
    _mutmut(work, only, children=children, notes=notes)
    hung = [name for name, code in _exit_codes(work).items() if code in _TIMEOUTS]
    if hung:  # by the mutant, or by the machine: once more, one at a time
        _mutmut(work, hung, children=1, notes=notes)
    return _results(work, _kills(notes))


def _mutmut(work: Path, names: Iterable[str], *, children: int, notes: Path) -> None:
    """Let mutmut test the mutants of these names, or all that have no verdict where there are none."""
    environment = {
        **os.environ,
        "CI": "1",  # hypothesis then draws the same examples every time
        "PYTHONDONTWRITEBYTECODE": "1",
        KILLS_VARIABLE: str(notes),
    }
    script = Path(sys.executable).parent / "mutmut"
    command = [sys.executable, str(script), "run", "--max-children", str(children), *names]
    log = work / "mutmut.log"
    with log.open("w", encoding="utf-8") as stream:
        subprocess.run(command, cwd=work, env=environment, stdout=stream, stderr=stream, check=False)
    ended = log.read_text(encoding="utf-8", errors="replace")
    if "mutations/second" not in ended:
        raise RuntimeError(f"mutmut tested nothing: {' '.join(ended.split())[-600:]}")


def _exit_codes(work: Path) -> dict[str, int | None]:
    """How the tests of each mutant ended."""
    codes: dict[str, int | None] = {}
    for path in (work / "mutants").rglob("*.meta"):
        codes |= json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"]
    return codes


def _drop_stale_verdicts(work: Path, *, keep_kills: bool) -> None:
    """Forget verdicts that came of other tests, data or settings than those of the copy."""
    digest = hashlib.sha256()
    for part in _INPUTS_OF_TESTS:
        place = work / part
        files = [place] if place.is_file() else sorted(p for p in place.rglob("*") if p.is_file())
        for file in files:
            if "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(work)}\0".encode() + file.read_bytes())
    fingerprint = work / _FINGERPRINT
    if fingerprint.is_file() and fingerprint.read_text(encoding="utf-8") == digest.hexdigest():
        return
    for path in (work / "mutants").rglob("*.meta"):
        meta = json.loads(path.read_text(encoding="utf-8"))
        codes = meta["exit_code_by_key"]
        meta["exit_code_by_key"] = {
            name: code if keep_kills and code == KILLED else None for name, code in codes.items()
        }
        path.write_text(json.dumps(meta), encoding="utf-8")
    (work / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)  # which test runs which function
    fingerprint.write_text(digest.hexdigest(), encoding="utf-8")


def _kills(notes: Path) -> Mapping[str, str]:
    """The test that killed each mutant last."""
    if not notes.is_file():
        return {}
    return dict(json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines())


def _results(work: Path, kills: Mapping[str, str]) -> list[SyntacticMutant]:
    mutants = []
    with contextlib.chdir(work):
        from mutmut.mutation.data import SourceFileMutationData
        from mutmut.mutation.diff_apply import get_diff_for_mutant
        from mutmut.utils.file_utils import walk_mutatable_files

        for path in sorted(walk_mutatable_files()):
            data = SourceFileMutationData(path=path)
            data.load()
            for name, code in data.exit_code_by_key.items():
                status = "timeout" if code in _TIMEOUTS else _STATUS.get(code, "broken")
                function = _function_of(name)
                if status == "killed":
                    mutants.append(SyntacticMutant(name, function, status, killed_by=kills.get(name)))
                    continue
                change = _change(get_diff_for_mutant(name, path=path))
                mutants.append(SyntacticMutant(name, function, status, *change))
    return mutants


def _function_of(name: str) -> str:
    """`harness.a.xǁBǁc__mutmut_1` is about `harness.a.B.c`, `harness.a.x_d__mutmut_1` about `harness.a.d`."""
    module, _, mangled = name.rpartition(".")
    mangled = mangled.rpartition("__mutmut_")[0]
    if mangled.startswith("xǁ"):
        return f"{module}.{mangled.removeprefix('xǁ').replace('ǁ', '.')}"
    return f"{module}.{mangled.removeprefix('x_')}"


def _change(diff: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Of a unified diff: the line before the change, the lines that it takes away, those that it adds."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "@@"))]
    first = next((at for at, line in enumerate(lines) if line[:1] in ("-", "+")), 0)
    return (
        lines[first - 1].strip() if first else "",
        tuple(line[1:].strip() for line in lines if line.startswith("-")),
        tuple(line[1:].strip() for line in lines if line.startswith("+")),
    )
