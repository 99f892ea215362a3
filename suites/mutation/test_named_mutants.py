"""Named mutants still mean something: each fits the source, and the test that it names exists and kills."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from suites.mutation.named import NamedMutant, named_mutants, run_mutant, run_unmutated, source_with
from suites.mutation.tree import ROOT, copy_tree

MUTANTS = named_mutants()
FAST = ("KV exclusion off", "dtype check dropped")


def by_name(name: str) -> NamedMutant:
    """The mutant of that name."""
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == name)
    return mutant


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout to be mutated."""
    folder = tmp_path_factory.mktemp("tree")
    copy_tree(folder)
    return folder


def test_there_are_enough_and_no_two_are_the_same() -> None:
    """At least 20, under names and with changes of their own."""
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_source_as_it_is(mutant: NamedMutant) -> None:
    """Its text stands in the file once, and what comes of it is Python that differs from the source."""
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    changed = source_with(mutant)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
    assert mutant.because


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_test_that_a_mutant_names_exists(mutant: NamedMutant) -> None:
    """A test function of that name stands in that file."""
    file, _, name = mutant.test.partition("::")
    module = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in module.body if isinstance(node, ast.FunctionDef)}


def test_a_mutant_whose_text_is_gone_is_an_error() -> None:
    """It would otherwise pass for a mutant that nothing needs to kill."""
    mutant = by_name(FAST[0])
    with pytest.raises(ValueError, match="stands 0 times"):
        source_with(replace(mutant, old="no such text in the file"))
    with pytest.raises(ValueError, match="and must stand there once"):
        source_with(replace(mutant, old="\n"))


@pytest.mark.parametrize("name", FAST)
def test_a_mutant_is_killed_by_the_test_that_it_names(name: str, tree: Path) -> None:
    """Some of them here, all of them under `tox -e mutation`; the copy is as it was afterwards."""
    mutant = by_name(name)
    before = (tree / mutant.file).read_text(encoding="utf-8")
    verdict = run_mutant(tree, mutant)
    assert verdict.status == "killed"
    assert verdict.killed_by is not None
    assert verdict.killed_by.startswith(mutant.test)
    assert (tree / mutant.file).read_text(encoding="utf-8") == before


def test_a_change_that_changes_nothing_survives(tree: Path) -> None:
    """The tests pass on the source as it is, so that a failure is the mutant's doing."""
    mutant = by_name(FAST[1])
    assert run_unmutated(tree, [mutant]).status == "survived"
    assert run_mutant(tree, replace(mutant, new=f"{mutant.old}  # the same")).status == "survived"


def test_a_mutant_that_cannot_be_imported_is_not_killed(tree: Path) -> None:
    """An error before any test ran says nothing about the test."""
    mutant = by_name(FAST[1])
    assert run_mutant(tree, replace(mutant, new=f"{mutant.old} 1 +")).status == "broken"
