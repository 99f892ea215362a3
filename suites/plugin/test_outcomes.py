"""Each outcome of `parity.check` in a project's tests is that of `onnx-parity check`, and says what to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import onnx
import pytest

from suites.plugin.conftest import DECODER, Run

pytest_plugins = ("pytester",)

PROMPTS = "prompts=[(1, 2, 3), (4,)], max_new_tokens=6"


def test_identical_passes_and_gives_what_the_command_would(project: pytest.Pytester, run: Run) -> None:
    """The document and the report are those of the command, but for the time that it took.

    The tokens are known from the decoder's own reference.
    """
    project.makepyfile(
        f"""
        import json
        def test_it(parity, parity_report_dir):
            result = parity.check("models/one", {PROMPTS})
            assert result.verdict == "identical"
            assert json.loads(result.report.read_text()) == result.document
            assert result.report.is_relative_to(parity_report_dir)
            print(json.dumps(result.document))
            with open("document.json", "w") as out:
                json.dump(result.document, out)
        """
    )
    run().assert_outcomes(passed=1)
    document = json.loads((project.path / "document.json").read_text(encoding="utf-8"))
    command = "from harness.cli import main; main()"
    options = ["--prompt-ids=1,2,3", "--prompt-ids=4", "--max-new-tokens=6", "--json"]
    printed = subprocess.run(
        [sys.executable, "-c", command, "check", "models/one", *options],
        cwd=project.path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert _timeless(document) == _timeless(json.loads(printed))
    for ids, prompt in zip([(1, 2, 3), (4,)], document["prompts"], strict=True):
        assert prompt["candidate_ids"] == list(DECODER.greedy(ids, 6))


def _timeless(document: dict[str, Any]) -> dict[str, Any]:
    for prompt in document["prompts"]:
        prompt["timing"] = None
    document["oracle"]["proof"]["seconds"] = None
    return document


def test_a_divergence_fails_with_all_there_is_to_know(project: pytest.Pytester, run: Run) -> None:
    """Prompt, index, both tokens and margins, the report's path, and the command that does it again."""
    project.makepyfile(f"def test_it(parity): parity.check('models/one', candidate='wrong', {PROMPTS})")
    ended = run("--parity-report-dir=kept")
    ended.assert_outcomes(failed=1)
    first, second = DECODER.logits([1, 2, 3, *DECODER.greedy((1, 2, 3), 2)])[-1].argsort()[:-3:-1]
    ended.stdout.fnmatch_lines(
        [
            f"models/one: divergent: prompt 1 parts at generated token 2: *{second}, oracle {first}*",
            "1  1 2 3 *divergent * 6/6 * 2 *",
            f"*oracle *{first} *",
            f"*candidate {second} *",
            "*the candidate's own margin is *",
            "verdict: divergent",
            "report: *parity.json",
            "again:  onnx-parity check models/one --candidate=wrong --prompt-ids=1,2,3 --prompt-ids=4 *",
        ]
    )
    named = re.search(r"^report: (.+)$", ended.stdout.str(), re.MULTILINE)
    assert named is not None
    assert named[1].startswith(str(project.path / "kept"))
    with open(named[1], encoding="utf-8") as report:  # noqa: PTH123 (a path as it was printed)
        assert json.load(report)["verdict"] == "divergent"


def test_a_crash_fails_and_the_session_goes_on(project: pytest.Pytester, run: Run) -> None:
    """The signal and the step are named; the next test runs."""
    project.makepyfile(
        f"""
        def test_crash(parity):
            parity.check("models/one", candidate="misbehaving:does=segfault,at=3", {PROMPTS})
        def test_next(parity):
            parity.check("models/one", {PROMPTS})
        """
    )
    ended = run()
    ended.assert_outcomes(failed=1, passed=1)
    ended.stdout.fnmatch_lines(
        ["models/one: crashed: *SIGSEGV*", "The candidate crashed at step 3: *", "report: *parity.json"]
    )


def test_an_engine_that_is_not_there_is_skipped_by_name(project: pytest.Pytester, run: Run) -> None:
    """The reason, and what would make it fail."""
    project.makepyfile(f"def test_it(parity): parity.check('models/one', candidate='absent', {PROMPTS})")
    ended = run()
    ended.assert_outcomes(skipped=1)
    assert ended.ret == 0
    ended.stdout.fnmatch_lines(["SKIPPED *test_*.py:1: absent is not usable*ONNX_PARITY_REQUIRE=absent*"])


@pytest.mark.parametrize("by", ["option", "environment"])
def test_an_engine_that_is_required_fails(
    by: str, project: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promised and not there: the test fails, and so does the session for want of a test that ran with it."""
    project.makepyfile(f"def test_it(parity): parity.check('models/one', candidate='absent', {PROMPTS})")
    if by == "environment":
        monkeypatch.setenv("ONNX_PARITY_REQUIRE", "absent")
    ended = run(*(["--parity-require=absent"] if by == "option" else []))
    ended.assert_outcomes(failed=1)
    ended.stdout.fnmatch_lines(
        ["absent is not usable*absent is required*", "ERROR: absent is required*no test ran with it."]
    )


def test_a_refusal_names_its_code_and_ports(project: pytest.Pytester, run: Run) -> None:
    """A past without a present: the code and the port, and no report, as nothing was decoded."""
    path = project.path / "models/one/model.onnx"
    model = onnx.load(path)
    kept = [output for output in model.graph.output if output.name != "present.0.key"]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    onnx.save(model, path)
    project.makepyfile(f"def test_it(parity): parity.check('models/one', {PROMPTS})")
    ended = run("--parity-report-dir=kept")
    ended.assert_outcomes(failed=1)
    ended.stdout.fnmatch_lines(["models/one: refused, E_UNPAIRED_PAST: *", "  port past_key_values.0.key"])
    ended.stdout.no_fnmatch_line("report: *")
    assert not (project.path / "kept").exists()


BAD = {
    "'models/three'": "*models/three: no such file or directory*",
    "'models/one', fancy=1": "*not checked: 'fancy' is no option of a check. They are: *max_new_tokens*",
    "'models/one', help=True": "*not checked: 'help' is no option of a check.*",
    "'models/one', json=False": "*not checked: 'json' is no option of a check.*",
    "'models/one', **{'max-new-tokens': 2}": "*not checked: 'max-new-tokens' is no option of a check.*",
    "'models/one', candidate='ort'": "*There is no engine named 'ort'*",
    "'models/one', inputs=True": "*not checked: *--inputs*",
}


def test_bad_input_fails_with_what_the_command_says(project: pytest.Pytester, run: Run) -> None:
    """A path, an option, an engine, an option without its value: a message each, and no traceback of ours."""
    tests = [
        f"def test_{i}(parity): parity.check({arguments}, prompts=(1, 2))" for i, arguments in enumerate(BAD)
    ]
    project.makepyfile("\n".join(tests))
    ended = run()
    ended.assert_outcomes(failed=len(BAD))
    ended.stdout.fnmatch_lines(list(BAD.values()))
    ended.stdout.no_fnmatch_line("*Traceback*")


def test_prompts_come_in_every_form(project: pytest.Pytester, run: Run) -> None:
    """One, several, and a file."""
    project.makepyfile(
        """
        from pathlib import Path
        def test_it(parity):
            for prompts in ([1, 2], [[1, 2]], Path("prompts.jsonl")):
                result = parity.check("models/one", prompts=prompts, max_new_tokens=2)
                assert [p["prompt_ids"] for p in result.document["prompts"]] == [[1, 2]]
        """
    )
    (project.path / "prompts.jsonl").write_text('{"prompt_ids": [1, 2]}\n', encoding="utf-8")
    run().assert_outcomes(passed=1)
