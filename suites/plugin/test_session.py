"""What a session with the plugin tells: table, properties, gates; and nothing where it is not used."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from suites.plugin.conftest import DECODER, Run

pytest_plugins = ("pytester",)

CHECK = "prompts=(1, 2, 3), max_new_tokens=6"
TWO_VERDICTS = f"""
def test_good(parity): parity.check("models/one", {CHECK})
def test_wrong(parity): parity.check("models/two", candidate="wrong", {CHECK})
"""


def properties(path: Path) -> dict[str, dict[str, str]]:
    """Those of each test in a JUnit file."""
    cases = ET.parse(path).iter("testcase")
    return {
        c.attrib["name"]: {p.attrib["name"]: p.attrib["value"] for p in c.iter("property")} for c in cases
    }


@pytest.mark.parametrize("workers", [[], ["-n", "2", "--dist", "loadgroup"]], ids=["alone", "xdist"])
def test_verdicts_reach_the_table_and_junit(workers: list[str], project: pytest.Pytester, run: Run) -> None:
    """The same with and without workers, and reports are where the properties say."""
    project.makepyfile(TWO_VERDICTS)
    ended = run("--junitxml=junit.xml", "--parity-report-dir=kept", *workers)
    ended.assert_outcomes(passed=1, failed=1)
    ended.stdout.fnmatch_lines_random(
        [
            "*= onnx-parity =*",
            "verdict *package *candidate *placement *oracle *prompts *parts at *margin *test",
            "identical *models/one *ort-cpu * CPUExecutionProvider *oracle * 1/1 *::test_good",
            "divergent *models/two *wrong * CPUExecutionProvider *oracle * 0/1 * 1:2 *::test_wrong",
        ]
    )
    found = properties(project.path / "junit.xml")
    assert [found[name]["parity_verdict"] for name in ("test_good", "test_wrong")] == [
        "identical",
        "divergent",
    ]
    assert found["test_wrong"]["parity_package"] == "models/two"
    assert found["test_wrong"]["parity_parts_at"] == "1:2"
    for values in found.values():
        report = Path(values["parity_report"])
        assert report.is_relative_to(project.path / "kept")
        document = json.loads(report.read_text(encoding="utf-8"))
        assert document["verdict"] == values["parity_verdict"]
        assert document["model"]["sha256"] == values["parity_model_sha256"]


def test_the_header_says_what_can_be_used(project: pytest.Pytester, run: Run) -> None:
    """Versions and placement of what is usable, the reason for what is not, once a test wants to know."""
    project.makepyfile(TWO_VERDICTS)
    run("-k", "good").stdout.fnmatch_lines(
        [
            "onnx-parity *, usable engines: *oracle *ort-cpu * on CPUExecutionProvider*",
            "onnx-parity: absent is not usable: *",
        ]
    )


@pytest.mark.parametrize("gives", ["right", "nan", "empty"])
def test_what_an_engine_says_is_not_obeyed(gives: str, project: pytest.Pytester, run: Run) -> None:
    """Header, table and the message of a test that fails: no control characters, and no row in two lines."""
    installed = project.mkdir("answering-1.0.dist-info")
    metadata = "Metadata-Version: 2.1\nName: answering\nVersion: 1.0\n"
    (installed / "METADATA").write_text(metadata, encoding="utf-8")
    entry = "[onnx_parity.engines]\nanswering = fixtures.answering:ENGINE\n"
    (installed / "entry_points.txt").write_text(entry, encoding="utf-8")
    engine = f"answering:says=terminal,gives={gives}"
    project.makepyfile(f"def test_it(parity): parity.check('models/one', candidate={engine!r}, {CHECK})")
    ended = run("--junitxml=junit.xml")
    ended.assert_outcomes(passed=gives == "right", failed=gives != "right")
    text = "\n".join(ended.outlines)
    assert text.count("owned") >= 2
    assert [line for line in ended.outlines if not line.isprintable()] == []
    (row,) = [
        line for line in ended.outlines if line.endswith("::test_it") and ("1/1" in line or "0/1" in line)
    ]
    assert "models/one" in row
    assert "owned" in row or gives == "empty"
    assert "test_it" in properties(project.path / "junit.xml")


def test_a_package_and_an_engine_at_a_time(project: pytest.Pytester, run: Run) -> None:
    """A test for each package of the folder and each installed engine; one not usable is skipped by name."""
    project.makepyfile(
        test_each=f"""
        def test_package(parity, parity_package): parity.check(parity_package, {CHECK})
        def test_engine(parity, parity_engine): parity.check("models/one", candidate=parity_engine, {CHECK})
        """
    )
    ended = run("--parity-model-dir=models", "-v", "-k", "test_package or absent or misbehaving")
    ended.assert_outcomes(passed=3, skipped=1, deselected=ended.parseoutcomes()["deselected"])
    ended.stdout.fnmatch_lines(
        [
            "*::test_package[[]one[]] PASSED*",
            "*::test_package[[]two[]] PASSED*",
            "*::test_engine[[]absent[]] SKIPPED*",
            "*::test_engine[[]misbehaving[]] PASSED*",
        ]
    )
    chosen = run("--parity-candidate=ort-cpu:threads=1", "--collect-only", "-q", "-k", "test_engine")
    chosen.stdout.fnmatch_lines(["*::test_engine[[]ort-cpu:threads=1[]]", "1/2 tests collected*"])


GATES: dict[str, tuple[list[str], dict[str, int], int, str]] = {
    "not named": ([], {"skipped": 2}, 0, "SKIPPED *ONNX_PARITY_MODEL_DIR*ONNX_PARITY_REQUIRE=model*"),
    "required": (["--parity-require=model"], {"errors": 2}, 1, "*model is required*"),
    "not there": (
        ["--parity-model-dir=nowhere"],
        {"errors": 2},
        1,
        "nowhere: there is no folder of packages*",
    ),
    "empty": (
        ["--parity-model-dir=planted-1.0.dist-info"],
        {"errors": 2},
        1,
        "planted-*: there is no folder of packages*",
    ),
}


@pytest.mark.parametrize("name", GATES)
def test_real_models_that_are_not_there(name: str, project: pytest.Pytester, run: Run) -> None:
    """Undeclared: skipped, and the variable named. Required, or declared and missing: never skipped."""
    arguments, outcome, status, line = GATES[name]
    project.makepyfile(
        """
        import pytest
        def test_by_fixture(parity, parity_package): parity.check(parity_package)
        @pytest.mark.real_model
        def test_by_marker(parity): pass
        """
    )
    ended = run(*arguments)
    ended.assert_outcomes(**outcome)
    assert ended.ret == status
    ended.stdout.fnmatch_lines([line])


def test_a_promised_lane_that_ran_nothing_is_an_error(project: pytest.Pytester, run: Run) -> None:
    """All green and nothing on the GPU, or nothing at all: the session fails and says why."""
    project.makepyfile("def test_it(): pass")
    for selection in ([], ["-k", "nothing"]):
        ended = run("--parity-require=cuda", *selection)
        assert ended.ret == pytest.ExitCode.TESTS_FAILED
        ended.stdout.fnmatch_lines(["ERROR: cuda is required*no test ran with it."])


CLAIMED = ("-p", "fixtures.claimed_cuda")
"""`ort-cuda` is usable, and computes on the CPU."""

PROMISED: dict[str, tuple[str, str, str, bool]] = {
    # What is required, the test, the provider that ort-cuda claims (empty: it is not usable), and whether
    # something ran with what is required. Each test passes, but those that need what is not there.
    "a marker": ("cuda", "@pytest.mark.gpu\ndef test_it(): pass", "", False),
    "a marker, and a GPU that it leaves alone": (
        "cuda",
        "@pytest.mark.gpu\ndef test_it(): pass",
        "CUDA",
        False,
    ),
    "the fixture alone": ("cuda", "@pytest.mark.gpu\ndef test_it(parity): pass", "CUDA", False),
    "another engine": (
        "cuda",
        f"@pytest.mark.gpu\ndef test_it(parity): parity.check('models/one', candidate='ort-cpu', {CHECK})",
        "CUDA",
        False,
    ),
    "nodes on the CPU": (
        "cuda",
        f"@pytest.mark.gpu\ndef test_it(parity): parity.check('models/one', candidate='ort-cuda', {CHECK})",
        "CPU",
        False,
    ),
    "a check": (
        "cuda",
        f"def test_it(parity): parity.check('models/one', candidate='ort-cuda', {CHECK})",
        "CUDA",
        True,
    ),
    "an oracle": (
        "cuda",
        f"def test_it(parity): parity.check('models/one', candidate='ort-cpu', oracle='ort-cuda', {CHECK})",
        "CUDA",
        True,
    ),
    "a marker for models": ("model", "@pytest.mark.real_model\ndef test_it(): pass", "", False),
    "a folder, and no model of it": (
        "model",
        "@pytest.mark.real_model\ndef test_it(parity): pass",
        "",
        False,
    ),
    "a model of another folder": ("model", f"def test_it(parity): parity.check('other', {CHECK})", "", False),
    "a model that was checked": (
        "model",
        f"def test_it(parity): parity.check('models/one', {CHECK})",
        "",
        True,
    ),
    "a model that was given": ("model", "def test_it(parity_package): pass", "", True),
    "an engine": ("misbehaving", "def test_it(parity_engine): pass", "", False),
    "an engine that was checked": (
        "misbehaving",
        f"def test_it(parity): parity.check('models/one', candidate='misbehaving', {CHECK})",
        "",
        True,
    ),
}


@pytest.mark.parametrize("name", PROMISED)
def test_what_ran_counts_and_no_marker(
    name: str, project: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tests pass, and whether the session does depends on what really ran with what is required."""
    gate, source, claimed, ran = PROMISED[name]
    DECODER.save(project.mkdir("other") / "model.onnx")
    project.makepyfile(f"import pytest\n{source}")
    monkeypatch.setenv("CLAIMED_PROVIDER", f"{claimed}ExecutionProvider")
    engine = ["--parity-candidate=misbehaving"] if "parity_engine" in source else []
    ended = run(
        f"--parity-require={gate}", "--parity-model-dir=models", *engine, *(CLAIMED if claimed else ())
    )
    assert set(ended.parseoutcomes()) == {"passed"}
    missing = [line for line in ended.outlines if line.startswith(f"ERROR: {gate} is required")]
    assert (ended.ret, len(missing)) == ((0, 0) if ran else (pytest.ExitCode.TESTS_FAILED, 1))


def test_what_cannot_be_required_is_a_usage_error(project: pytest.Pytester, run: Run) -> None:
    """A misspelt gate would never be missed."""
    project.makepyfile("def test_it(): pass")
    ended = run("--parity-require=cude")
    assert ended.ret == pytest.ExitCode.USAGE_ERROR
    ended.stderr.fnmatch_lines(["ERROR: --parity-require *'cude'*"])


def test_tests_of_a_package_go_to_one_worker(project: pytest.Pytester, run: Run) -> None:
    """As a package and its GPU are held once; a group that a test has keeps it."""
    project.makepyfile(
        """
        import pytest
        def test_first(parity_package): pass
        def test_second(parity_package): pass
        @pytest.mark.gpu
        def test_gpu(parity): pass
        @pytest.mark.xdist_group("mine")
        def test_mine(parity): pass
        def test_plain(): pass
        """
    )
    project.makeconftest(
        """
        def pytest_collection_finish(session):
            for item in session.items:
                marks = item.iter_markers("xdist_group")
                print("GROUP", item.name, [mark.args[0].rsplit("/", 1)[-1] for mark in marks])
        """
    )
    ended = run("--parity-model-dir=models", "--collect-only", "-q")
    ended.stdout.fnmatch_lines_random(
        [
            "*GROUP test_first[[]one[]] [[]'one'[]]",
            "*GROUP test_second[[]one[]] [[]'one'[]]",
            "*GROUP test_second[[]two[]] [[]'two'[]]",
            "*GROUP test_gpu [[]'onnx-parity-gpu'[]]",
            "*GROUP test_mine [[]'mine'[]]",
            "*GROUP test_plain [[][]]",
        ]
    )


def test_each_gpu_has_a_worker_of_its_own(project: pytest.Pytester, run: Run) -> None:
    """The device of the engine decides, whatever else its options say."""
    project.makepyfile(
        """
        import pytest
        @pytest.mark.parametrize(
            "parity_engine",
            ["ort-cuda", "ort-cuda:tf32=1,device=0", "ort-cuda:tf32=1,device=1", "ort-cpu:threads=1"],
            indirect=True,
        )
        def test_it(parity_engine): pass
        """
    )
    project.makeconftest(
        """
        def pytest_collection_finish(session):
            print("GROUPS", [[m.args[0] for m in item.iter_markers("xdist_group")] for item in session.items])
        """
    )
    run("--collect-only", "-q").stdout.fnmatch_lines(
        ["*GROUPS [[][[]'onnx-parity-gpu'], [[]'onnx-parity-gpu'], [[]'onnx-parity-gpu-1'], [[]]]"]
    )


ALONE = """
import os, time
import pytest
{mark}
@pytest.mark.parametrize("number", range(6))
def test_it({fixture}, number):
    held = f"held-{{getattr({fixture}, 'name', '')}}"
    with open(held, "x"):  # fails where another worker holds it
        time.sleep(0.2)
    os.remove(held)
    with open("workers", "a") as out:
        out.write(os.environ["PYTEST_XDIST_WORKER"] + chr(10))
"""


@pytest.mark.parametrize(
    ("fixture", "mark", "count"),
    [("parity_package", "", 12), ("parity", "@pytest.mark.xdist_group('mine')", 6)],
    ids=["package", "group"],
)
def test_workers_take_turns_with_what_there_is_once(
    fixture: str, mark: str, count: int, project: pytest.Pytester, run: Run
) -> None:
    """However tests are distributed: two workers run, and never two tests of the same package or group."""
    project.makepyfile(ALONE.format(fixture=fixture, mark=mark))
    run("-n", "2", "--parity-model-dir=models").assert_outcomes(passed=count)
    workers = (project.path / "workers").read_text(encoding="utf-8").split()
    assert len(workers) == count
    assert len(set(workers)) == 2


def test_markers_pass_under_strict(project: pytest.Pytester, run: Run) -> None:
    """Each is registered, and does nothing to a test that does not ask for `parity`."""
    marks = ("gpu", "real_model", "bench", "mutation", "slow")
    project.makepyfile(
        "import pytest\n" + "".join(f"@pytest.mark.{m}\ndef test_{m}(): pass\n" for m in marks)
    )
    run().assert_outcomes(passed=len(marks))


UNINVOLVED = """
import sys
def test_it(request):
    heavy = {"numpy", "onnx", "onnxruntime", "rich", "click", "yaml", "harness.cli", "harness.engines"}
    assert heavy.isdisjoint(sys.modules)
    assert not any("xdist_group" == mark.name for mark in request.node.iter_markers())
"""


def test_a_project_that_does_not_use_it_sees_nothing_of_it(project: pytest.Pytester, run: Run) -> None:
    """Nothing heavy is imported, and the output is that of a run without the plugin."""
    project.makepyfile(UNINVOLVED)
    others = [part for name in ("hypothesispytest", "benchmark") for part in ("-p", f"no:{name}")]
    ended = run(*others)
    ended.assert_outcomes(passed=1)
    assert [line for line in ended.outlines if "parity" in line and not line.startswith("plugins: ")] == []


def test_it_can_be_switched_off(project: pytest.Pytester, run: Run) -> None:
    """By the name of its entry point; then there is no fixture and no option."""
    project.makepyfile("def test_it(): pass\ndef test_other(parity): pass")
    ended = run("-p", "no:onnx-parity")
    ended.assert_outcomes(passed=1, errors=1)
    ended.stdout.fnmatch_lines(["*fixture 'parity' not found*"])
    assert run("-p", "no:onnx-parity", "--parity-require=cuda").ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_ctrl_c_in_a_check_ends_the_session(project: pytest.Pytester, run: Run) -> None:
    """It is the person's, and not a finding of the test: no further test runs."""
    project.makeconftest(
        """
        import os, signal
        import pytest

        @pytest.fixture
        def impatient(monkeypatch):
            from harness.cli import check
            def stop(request):
                os.kill(os.getpid(), signal.SIGINT)
                raise AssertionError("went on")
            monkeypatch.setattr(check, "plan_check", stop)
        """
    )
    project.makepyfile(
        f"""
        def test_it(parity, impatient): parity.check("models/one", {CHECK})
        def test_next(): raise AssertionError("went on")
        """
    )
    ended = run()
    assert ended.ret == pytest.ExitCode.INTERRUPTED
    ended.stdout.no_fnmatch_line("*went on*")
