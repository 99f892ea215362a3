"""What counts as a kill: a failure in the call phase of a test, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from suites.mutation.call_phase import KILLED, KILLS_VARIABLE, NOT_A_KILL

CASES = {
    "passes": ("def test_it(): pass", 0),
    "call": ("def test_it(): assert 0", KILLED),
    "call raises": ("def test_it(): raise KeyError", KILLED),
    "setup": ("import pytest\n@pytest.fixture\ndef f(): assert 0\ndef test_it(f): pass", NOT_A_KILL),
    "teardown": (
        "import pytest\n@pytest.fixture\ndef f():\n    yield\n    assert 0\ndef test_it(f): pass",
        NOT_A_KILL,
    ),
    "collection": ("raise RuntimeError", NOT_A_KILL),
    "no tests": ("", NOT_A_KILL),
    "internal": ("def test_it(): pytest_is_not_there", KILLED),
}

pytest_plugins = ("pytester",)


@pytest.mark.parametrize("name", CASES)
def test_only_a_failed_call_is_a_kill(
    name: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit status tells kills from everything else, and the notes say which test it was."""
    source, status = CASES[name]
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv(KILLS_VARIABLE, "kills.jsonl")
    monkeypatch.setenv("MUTANT_UNDER_TEST", "module.x_f__mutmut_1")
    pytester.makepyfile(test_case=source)
    ended = pytester.runpytest_inprocess("-p", "suites.mutation.call_phase")
    assert ended.ret == status
    notes = Path(pytester.path / "kills.jsonl")
    lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    expected = [["module.x_f__mutmut_1", "test_case.py::test_it"]] if status == KILLED else []
    assert [json.loads(line) for line in lines] == expected


def test_committed_texts_run_first_and_the_corpus_next(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most mutants fall to the texts; the order of the others is kept."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("test_b", "test_messages", "test_a"):
        pytester.makepyfile(**{name: "def test_it(): pass\ndef test_all_over_the_corpus(): pass"})
    files = ["test_b.py", "test_a.py", "test_messages.py"]
    ended = pytester.runpytest_inprocess("-v", "-p", "suites.mutation.call_phase", *files)
    ended.stdout.fnmatch_lines(
        [
            "test_messages.py::test_it*",
            "*_over_the_corpus*",
            "*",
            "*",
            "test_b.py::test_it*",
            "test_a.py::test_it*",
        ]
    )


@pytest.mark.parametrize("count", [2, 30])
def test_only_the_tests_that_are_asked_for_run(
    count: int, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for one by one or found in their file, few or many: no other test may kill."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    tests = "\n".join(f"def test_{n}(): pass" for n in range(count))
    pytester.makepyfile(test_case=f"{tests}\ndef test_other(): assert 0", test_more="def test_it(): pass")
    wanted = [f"test_case.py::test_{n}" for n in range(count)]
    ended = pytester.runpytest_inprocess("-p", "suites.mutation.call_phase", *wanted, "test_more.py")
    ended.assert_outcomes(passed=count + 1)
