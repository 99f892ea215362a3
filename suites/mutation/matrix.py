"""The kill matrix: which mutant fell to which test, as a JSON document and as a summary for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from suites.mutation.named import NamedMutant, Verdict
from suites.mutation.syntactic import Equivalent, SyntacticMutant

__all__ = ["LEAST_KILLED", "kill_matrix", "problems_of", "summary_of"]

SCHEMA = "onnx-parity/mutation/1"
LEAST_KILLED = 0.95
"""Share of all syntactic mutants that tests must kill; what is left must be declared equivalent."""


def kill_matrix(
    *,
    named: Sequence[tuple[NamedMutant, Verdict]] | None = None,
    syntactic: Sequence[SyntacticMutant] | None = None,
    equivalents: Sequence[Equivalent] = (),
    tool: str = "mutmut",
    kept_kills: bool = False,
) -> dict[str, Any]:
    """The document of a run. What was not run is null.

    Args:
        named: named mutants with their verdicts.
        syntactic: all syntactic mutants.
        equivalents: what is declared equivalent.
        tool: what wrote the syntactic mutants, with its version.
        kept_kills: whether kills of an earlier run stood although tests had changed since.
    """
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "ok": False,
        "named": None if named is None else [_named_row(mutant, verdict) for mutant, verdict in named],
        "syntactic": None if syntactic is None else _syntactic(syntactic, equivalents, tool, kept_kills),
    }
    document["problems"] = problems_of(document)
    document["ok"] = not document["problems"]
    return document


def _named_row(mutant: NamedMutant, verdict: Verdict) -> dict[str, Any]:
    return {
        "name": mutant.name,
        "file": mutant.file,
        "test": mutant.test,
        "because": mutant.because,
        "status": verdict.status,
        "killed_by": verdict.killed_by,
    }


def _syntactic(
    mutants: Sequence[SyntacticMutant], equivalents: Sequence[Equivalent], tool: str, kept_kills: bool
) -> dict[str, Any]:
    open_mutants = [mutant for mutant in mutants if mutant.status != "killed"]
    reasons = {
        mutant.name: one.because for mutant in open_mutants for one in equivalents if one.covers(mutant)
    }
    modules: dict[str, Counter[str]] = {}
    for mutant in mutants:
        status = "equivalent" if mutant.name in reasons else mutant.status
        modules.setdefault(mutant.name.rpartition(".")[0], Counter())[status] += 1
    return {
        "tool": tool,
        "kept_kills": kept_kills,
        "total": len(mutants),
        "killed": len(mutants) - len(open_mutants),
        "modules": {module: dict(sorted(counts.items())) for module, counts in sorted(modules.items())},
        "kills": {mutant.name: mutant.killed_by for mutant in mutants if mutant.status == "killed"},
        "equivalent": [
            {**_open_row(m), "because": reasons[m.name]} for m in open_mutants if m.name in reasons
        ],
        "open": [_open_row(mutant) for mutant in open_mutants if mutant.name not in reasons],
        "stale": [
            {"function": one.function, "removed": list(one.removed), "added": list(one.added)}
            for one in equivalents
            if not any(one.covers(mutant) for mutant in mutants)
        ],
    }


def _open_row(mutant: SyntacticMutant) -> dict[str, Any]:
    return {
        "name": mutant.name,
        "function": mutant.function,
        "status": mutant.status,
        "after": mutant.after,
        "removed": list(mutant.removed),
        "added": list(mutant.added),
    }


def problems_of(document: Mapping[str, Any]) -> list[str]:
    """Why a run fails, one line each; empty where it does not."""
    problems = [
        f"named mutant {row['name']!r} {row['status']}: {row['test']} must fail, since {row['because']}"
        for row in document["named"] or ()
        if row["status"] != "killed"
    ]
    found = document["syntactic"]
    if found is None:
        return problems
    problems += [
        f"{row['name']} {row['status']}: {' '.join(row['removed'])} -> {' '.join(row['added'])}"
        for row in found["open"]
    ]
    problems += [
        f"declared equivalent, and there is no such survivor: {row['function']}: {' '.join(row['added'])}"
        for row in found["stale"]
    ]
    if found["total"] == 0:
        problems.append("there are no syntactic mutants at all")
    elif found["killed"] < LEAST_KILLED * found["total"]:
        problems.append(f"{found['killed']} of {found['total']} killed is less than {LEAST_KILLED:.0%}")
    return problems


def summary_of(document: Mapping[str, Any]) -> list[str]:
    """Lines for the console: figures first, then every problem."""
    lines = []
    if document["named"] is not None:
        killed = sum(row["status"] == "killed" for row in document["named"])
        lines.append(f"named mutants: {killed} of {len(document['named'])} killed by the test each one names")
    found = document["syntactic"]
    if found is not None:
        lines.append(
            f"syntactic mutants: {found['killed']} of {found['total']} killed, {len(found['equivalent'])} "
            f"declared equivalent, {len(found['open'])} open"
        )
        if found["kept_kills"]:
            lines.append("  (kills of an earlier run were kept: not a verdict on the tests as they are)")
        for module, counts in found["modules"].items():
            lines.append(f"  {module}: {', '.join(f'{n} {status}' for status, n in counts.items())}")
    return [*lines, *document["problems"], "ok" if document["ok"] else "FAILED"]
