"""The kill matrix fails a run for each survivor that nobody has declared, and says which."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from suites.mutation import syntactic
from suites.mutation.matrix import kill_matrix, summary_of
from suites.mutation.named import Verdict, named_mutants
from suites.mutation.syntactic import Equivalent, SyntacticMutant, declared_equivalents, run_syntactic
from suites.mutation.tree import ROOT

SCHEMA = json.loads((ROOT / "reports/schemas/mutation-1.schema.json").read_text(encoding="utf-8"))
NAMED = named_mutants()[0]
KILLED = [
    SyntacticMutant(
        f"harness.topology.a.x_f__mutmut_{n}", "harness.topology.a.f", "killed", killed_by="t.py::t"
    )
    for n in range(99)
]
SURVIVOR = SyntacticMutant(
    "harness.topology.a.x_g__mutmut_1",
    "harness.topology.a.g",
    "survived",
    "def g():",
    ("return 1",),
    ("return 2",),
)
EQUIVALENT = Equivalent("harness.topology.a.g", "def g():", ("return 1",), ("return 2",), "nobody calls it")


def matrix(**parts: Any) -> dict[str, Any]:
    """A kill matrix, checked against its schema and for being summed up with its verdict last."""
    document = kill_matrix(**parts)
    jsonschema.validate(document, SCHEMA)
    assert summary_of(document)[-1] == ("ok" if document["ok"] else "FAILED")
    return document


def test_all_killed_is_well() -> None:
    """Named mutants by their test, syntactic ones by any."""
    document = matrix(named=[(NAMED, Verdict("killed", NAMED.test))], syntactic=KILLED)
    assert document["ok"]
    assert "named mutants: 1 of 1 killed by the test each one names" in summary_of(document)
    assert "syntactic mutants: 99 of 99 killed, 0 declared equivalent, 0 open" in summary_of(document)


@pytest.mark.parametrize("status", ["survived", "broken", "timeout"])
def test_a_named_mutant_that_is_not_killed_fails_the_run(status: Any) -> None:
    """Whatever kept its test from failing in its call phase."""
    document = matrix(named=[(NAMED, Verdict(status))])
    assert not document["ok"]
    (problem,) = document["problems"]
    assert NAMED.name in problem
    assert NAMED.test in problem


@pytest.mark.parametrize("status", ["survived", "untested", "timeout", "broken", "unchecked"])
def test_a_syntactic_mutant_that_is_not_killed_must_be_declared(status: str) -> None:
    """Undeclared it fails the run, a timeout included; declared it is listed with its reason."""
    mutants = [*KILLED, replace(SURVIVOR, status=status)]
    document = matrix(syntactic=mutants)
    assert not document["ok"]
    assert document["syntactic"]["open"][0]["name"] == SURVIVOR.name
    declared = matrix(syntactic=mutants, equivalents=[EQUIVALENT])
    assert declared["ok"]
    assert declared["syntactic"]["equivalent"][0]["because"] == "nobody calls it"
    assert declared["syntactic"]["modules"] == {"harness.topology.a": {"equivalent": 1, "killed": 99}}


@pytest.mark.parametrize("part", ["function", "after", "removed", "added"])
def test_a_declaration_covers_its_own_change_only(part: str) -> None:
    """Another line, another place or another function is another mutant; what covers none is stale."""
    other = replace(EQUIVALENT, **{part: "else" if part in ("function", "after") else ("else",)})
    document = matrix(syntactic=[*KILLED, SURVIVOR], equivalents=[other])
    assert not document["ok"]
    assert len(document["syntactic"]["open"]) == len(document["syntactic"]["stale"]) == 1


def test_a_declared_mutant_that_is_killed_is_no_equivalent() -> None:
    """The declaration was wrong, and stays in nobody's way once it is taken out."""
    assert not matrix(syntactic=KILLED, equivalents=[EQUIVALENT])["ok"]


def test_too_many_declarations_fail_the_run() -> None:
    """Declaring is for the few that cannot be told apart: 95% must be killed."""
    assert matrix(syntactic=[*KILLED[:95], *[SURVIVOR] * 5], equivalents=[EQUIVALENT])["ok"]
    document = matrix(syntactic=[*KILLED[:94], *[SURVIVOR] * 6], equivalents=[EQUIVALENT])
    assert document["problems"] == ["94 of 100 killed is less than 95%"]


def test_no_mutants_at_all_is_no_success() -> None:
    """A run that tested nothing must not look like one in which all fell."""
    assert not matrix(syntactic=[])["ok"]


def test_every_declaration_has_its_reason() -> None:
    """And no change is declared twice."""
    declared = declared_equivalents()
    assert all(one.because and one.added for one in declared)
    changes = [(one.function, one.after, one.removed, one.added) for one in declared]
    assert len(set(changes)) == len(changes)


def test_kept_kills_are_told(tmp_path: Path) -> None:
    """A run for work on tests does not pass for a verdict."""
    assert any("kept" in line for line in summary_of(matrix(syntactic=KILLED, kept_kills=True)))


def test_a_mutant_that_hangs_is_tested_once_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By itself, so that it is the mutant and not the machine that decides; no other is tested again."""
    runs: list[tuple[list[str], int]] = []
    endings = {"m.x_f__mutmut_1": 1, "m.x_f__mutmut_2": -24, "m.x_f__mutmut_3": 0}

    def mutmut(work: Path, names: Iterable[str], *, children: int, notes: Path) -> None:
        runs.append((list(names), children))
        meta = work / "mutants" / "m.py.meta"
        meta.parent.mkdir(exist_ok=True)
        meta.write_text(json.dumps({"exit_code_by_key": endings}), encoding="utf-8")

    monkeypatch.setattr(syntactic, "copy_tree", lambda work: None)
    monkeypatch.setattr(syntactic, "_mutmut", mutmut)
    monkeypatch.setattr(syntactic, "_results", lambda work, kills: [])
    run_syntactic(tmp_path, only=["m.*"], children=3)
    assert runs == [(["m.*"], 3), (["m.x_f__mutmut_2"], 1)]
    del endings["m.x_f__mutmut_2"]
    run_syntactic(tmp_path)
    assert runs[2:] == [([], 2)]
