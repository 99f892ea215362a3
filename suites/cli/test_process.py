"""The process around the command: streams that break, and Ctrl-C at the worst moments."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.cli.process import OutputStream, deferred_interrupts

COMMAND = [sys.executable, "-c", "from harness.cli import main; main()"]
PORTS = {"ports": {"inputs": [{"name": "x", "dtype": None, "shape": None}], "outputs": []}}
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX shells and signals")


class Failing(io.StringIO):
    """A stream that fails on every write."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code

    def write(self, text: str) -> int:
        """Fail."""
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize(("code", "lost"), [(errno.EPIPE, False), (errno.ENOSPC, True)])
def test_a_failing_stream_is_remembered_and_written_no_more(code: int, lost: bool) -> None:
    """A reader that went away has what it wanted; on a full disk something was lost."""
    stream = OutputStream(Failing(code))
    assert stream.write("one") == 3
    assert stream.write("two") == 3
    stream.flush()
    assert stream.failure is not None
    assert stream.broken is lost


def test_a_closed_stream_swallows_all() -> None:
    """Python has None for a stream that was closed before it started."""
    stream = OutputStream(None)
    stream.write("text")
    stream.flush()
    assert not stream.isatty()
    assert not stream.broken


@pytest.fixture
def refused(tmp_path: Path) -> Path:
    """A port inventory that is refused: exit 3."""
    path = tmp_path / "ports.json"
    path.write_text(json.dumps(PORTS), encoding="utf-8")
    return path


@posix
@pytest.mark.parametrize(
    ("redirection", "status"),
    [("", 3), ("| true", 3), (">&-", 3), ("2>&-", 3), ("2>/dev/full", 3), (">/dev/full", 2)],
)
def test_broken_streams_never_change_what_was_found(refused: Path, redirection: str, status: int) -> None:
    """The verb's own exit status wins, except where its result was lost; there is never a traceback."""
    if "/dev/full" in redirection and not Path("/dev/full").exists():
        pytest.skip("needs the device /dev/full")
    script = f'"$@" derive --json "{refused}" {redirection}; exit ${{PIPESTATUS[0]}}'
    run = subprocess.run(
        ["bash", "-c", script, "bash", *COMMAND], capture_output=True, text=True, check=False
    )
    assert run.returncode == status, run.stderr
    assert "Traceback" not in run.stderr


@posix
def test_ctrl_c_waits_for_the_end_of_an_import() -> None:
    """Held back in the block, raised at its end; a second one is not held back; then all is as before."""
    reached: list[int] = []

    def press(times: int) -> None:
        with deferred_interrupts():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            reached.append(times)

    with pytest.raises(KeyboardInterrupt):
        press(1)
    with pytest.raises(KeyboardInterrupt):
        press(2)
    assert reached == [1]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_off_the_main_thread_interrupts_are_left_alone() -> None:
    """Signals arrive in the main thread only, so there is nothing to hold back elsewhere."""
    ran = []

    def work() -> None:
        with deferred_interrupts():
            ran.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [True]


@posix
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("module", ["click", "harness.cli.check", "numpy", "onnx", "harness.parity.check"])
def test_ctrl_c_while_a_module_is_imported_is_an_interruption(
    tmp_path: Path, module: str, times: int
) -> None:
    """Exit 130 and one JSON document at every stage of start-up; never a traceback, never a finding.

    The second one ends all at once.

    The signal is raised exactly when Python looks for the module.
    """
    code = (
        "import signal, sys\n"
        "class Press:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r} and self in sys.meta_path:\n"
        "            sys.meta_path.remove(self)\n"
        f"            for _ in range({times}):\n"
        "                signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Press())\n"
        "sys.argv = ['onnx-parity', 'check', 'demo', '--max-new-tokens', '1', '--json']\n"
        "from harness.cli import main\n"
        "main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 130, run.stderr
    assert "Traceback" not in run.stderr
    if times > 1:
        assert run.stdout == ""
    elif module != "click":  # before that nothing has read the command line
        (line,) = run.stdout.splitlines()
        assert json.loads(line)["interrupted"] is True
    assert list(tmp_path.iterdir()) == []


STAGES = {
    "judging the second prompt": (("harness.parity.check", "_Check", "_judge", 2), False),
    "closing": (("harness.parity.candidate", "Candidate", "close", 1), False),
    "printing": (("harness.cli.running", None, "print_json_line", 1), True),
    "leaving": (("threading", None, "_shutdown", 1), True),
}
"""Where Ctrl-C is pressed (a module, a class of it, a function, at which call), and whether it is the end."""

PRESSING = """
import importlib, json, signal, sys
module, owner, name, at, times, number = json.loads(sys.argv.pop())
def press(left):
    try:
        signal.raise_signal(number)
    finally:
        if left > 1:
            press(left - 1)
def plant():
    home = importlib.import_module(module)
    home = getattr(home, owner) if owner else home
    inner, calls = getattr(home, name), []
    def pressing(*args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            press(times)
        return inner(*args, **kwargs)
    setattr(home, name, pressing)
plant()
sys.argv[0] = "onnx-parity"
from harness.cli import main
main()
"""


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_however_often_ctrl_c_is_pressed_it_is_an_interruption(
    tmp_path: Path, stage: str, times: int, number: signal.Signals
) -> None:
    """Exit 130, or what was found where that is being said; never a traceback, and the report is whole.

    A second one ends what the first one left to do, and a third ends all at once. When the end is being said,
    the first is not heeded, and the second ends all at once. SIGTERM is as good.
    """
    place, is_ending = STAGES[stage]
    asked = ["check", "demo", "--max-new-tokens", "1", "--prompt-ids", "1", "--prompt-ids", "2"]
    run = subprocess.run(
        [
            *(sys.executable, "-c", PRESSING, *asked, "--in-process", "--json", "--report-dir", "r"),
            json.dumps([*place, times, number]),
        ],
        cwd=tmp_path,
        env={**os.environ, "ONNX_PARITY_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in run.stderr
    assert run.returncode == (0 if is_ending and times == 1 else 130), run.stderr
    report = json.loads((tmp_path / "r" / "parity.json").read_text(encoding="utf-8"))
    assert report["interrupted"] is not is_ending
    assert [prompt["verdict"] for prompt in report["prompts"]][:1] == ["identical"]
    if times <= (1 if is_ending else 2):
        (line,) = run.stdout.splitlines()
        assert json.loads(line) == report
        assert f"report: {Path('r') / 'parity.json'}" in run.stderr
        assert ("the report holds what was judged before" in run.stderr) is not is_ending
    elif stage != "leaving":
        assert run.stdout == ""
        assert "Interrupted again, and ended at once" in run.stderr


WRITING = {
    "a built-in package": (["derive", "demo", "--json"], ("harness.models.demo", None, "_attention", 1)),
    "weights": (["fetch", "smollm2", "--json"], ("harness.models.fetch", None, "_download", 1)),
    "a trace": (
        ["record", "demo", "-o", "x.trace", "--max-new-tokens", "1", "--prompt-ids", "1", "--in-process"],
        ("safetensors.numpy", None, "save_file", 1),
    ),
}
"""What is written, by which command, and where in that the signal comes."""


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("what", WRITING)
def test_what_is_half_written_is_cleared_away(tmp_path: Path, what: str, number: signal.Signals) -> None:
    """Also by SIGTERM, as of `timeout` or a job that is cancelled: exit 130, and no draft stays anywhere."""
    arguments, place = WRITING[what]
    folders = {name: tmp_path / name for name in ("work", "cache", "temporary")}
    for folder in folders.values():
        folder.mkdir()
    run = subprocess.run(
        [sys.executable, "-c", PRESSING, *arguments, json.dumps([*place, 1, number])],
        cwd=folders["work"],
        env={
            **os.environ,
            "ONNX_PARITY_CACHE_DIR": str(folders["cache"]),
            "TMPDIR": str(folders["temporary"]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 130, run.stderr
    assert "Traceback" not in run.stderr
    assert list(folders["temporary"].iterdir()) == list(folders["work"].iterdir()) == []
    assert [path for path in folders["cache"].rglob(".*") if not path.name.endswith(".lock")] == []


@posix
def test_sigterm_that_nobody_listens_to_is_left_alone(tmp_path: Path) -> None:
    """Whoever started the command deaf to it has reasons."""
    code = (
        "import signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "from harness.cli.process import take_interrupts\n"
        "take_interrupts()\n"
        "signal.raise_signal(signal.SIGTERM)\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "False\n")
