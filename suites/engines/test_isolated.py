"""Engines in processes of their own: every way to fail has its name, and nothing of it stays or spreads.

Each engine here is a real one in a real process, that at a given call does one thing which engines do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from onnx import TensorProto, helper

from fixtures.decoders import TinyDecoder, save_graph
from fixtures.misbehaving import (
    END_OF_NOISE,
    ENGINE,
    MEGABYTES_OF_NOISE,
    SHARED_NAME,
    STARTS,
    isolated_misbehaviour,
)
from harness.decode.loop import greedy_decode
from harness.decode.trace import Trace, TraceFailure
from harness.engines.base import Session
from harness.engines.isolated import memory
from harness.engines.isolated.engine import isolated
from harness.engines.isolated.limits import Limits, memory_text, read_memory
from harness.engines.reduce import top_logits_of
from harness.engines.registry import EngineSpec, parse_engine
from harness.errors import EngineFailedError, InputError, InvalidRunError, ParityError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="isolation needs POSIX signals")

ROOT = Path(__file__).parents[2]
DECODER = TinyDecoder(layers="ar", seed=3)
PROMPT = (1, 2, 3)
TOKENS = 6
_KIND = "`kind` of an error is 'weird', and must be one of crashed, timeout, unsupported"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid of one attention and one recurrent layer."""
    return DECODER.save(tmp_path_factory.mktemp("tiny") / "model.onnx")


def identity(folder: Path) -> Path:
    """A graph whose output `y` is its input `x`, of shape [1, n, 9]."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "n", 9]) for name in ("x", "y")]
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    return save_graph(folder / "model.onnx", nodes, ports[:1], ports[1:])


def shared_with_others() -> tuple[set[int], int]:
    """Child processes, and how many open descriptors could be shared with them (the latter on Linux)."""
    here = psutil.Process()
    links = []
    for link in Path(f"/proc/{here.pid}/fd").glob("*"):
        with contextlib.suppress(OSError):  # that of the listing itself
            links.append(str(link.readlink()))
    shared = [link for link in links if link.startswith(("pipe:", "socket:", "/memfd:onnx-parity"))]
    return {child.pid for child in here.children(recursive=True)}, len(shared)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Each test leaves as many processes and shared descriptors as it found."""
    before = shared_with_others()
    yield
    assert shared_with_others() == before


def decode(spec: EngineSpec, model: Path) -> Trace:
    """Decode on a session of its own."""
    session = spec.open(model)
    try:
        return greedy_decode(session, DECODER.topology, PROMPT, max_new_tokens=TOKENS)
    finally:
        session.close()


def failure_of(spec: EngineSpec, model: Path) -> EngineFailedError | TraceFailure:
    """How opening a session, or decoding on it, fails."""
    try:
        failure = decode(spec, model).failure
    except EngineFailedError as error:
        return error
    assert failure is not None
    return failure


def pid_of(session: Session) -> int:
    """The process that a session of the misbehaving engine lives in."""
    return int(session.info.settings["pid"])


def gone(pid: int, *, within: float = 20.0) -> bool:
    """Whether a process ends in time; a zombie has ended."""
    try:
        psutil.Process(pid).wait(within)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_a_decode_is_the_same_as_in_process(model: Path) -> None:
    """Tokens and logits, to the last bit: only tokens and largest logits have crossed."""
    spec = parse_engine("ort-cpu:threads=1")
    alone = decode(isolated(spec, Limits()), model)
    assert alone.token_ids == DECODER.greedy(PROMPT, TOKENS)
    assert alone.steps == decode(spec, model).steps
    assert alone.session == spec.open(model).info


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize(
    ("does", "details"),
    [
        ("abort", {"signal": "SIGABRT"}),
        ("segfault", {"signal": "SIGSEGV"}),
        ("be-killed", {"signal": "SIGKILL"}),
        ("exit", {"exit_code": 0}),
        ("raise-exit", {"exit_code": 7}),
    ],
)
def test_a_death_in_a_run_is_a_crash_that_keeps_what_came_before(
    model: Path, does: str, at: int, details: dict[str, Any]
) -> None:
    """The step, and the signal or the exit code, also of a death that calls itself a success."""
    trace = decode(isolated_misbehaviour(does, at=at), model)

    assert trace.token_ids == DECODER.greedy(PROMPT, TOKENS)[:at]
    assert trace.failure is not None
    assert (trace.failure.kind, trace.failure.step) == ("crashed", at)
    found = {name: getattr(trace.failure.details, name) for name in ("signal", "exit_code", "limit")}
    assert found == {"signal": None, "exit_code": None, "limit": None} | details
    assert all(str(value) in trace.failure.message for value in details.values())


@pytest.mark.parametrize("when", ["open", "run", "top"])
def test_the_stack_of_a_crash_is_in_the_tail_of_its_stderr(model: Path, when: str) -> None:
    """A native crash names the Python line that led to it, whatever call it was in."""
    at = 1 if when == "top" else 0
    failure = failure_of(isolated_misbehaviour("segfault", when=when, at=at), model)
    assert failure.message.startswith("misbehaving died of SIGSEGV while")
    assert "in _segfault" in str(failure.details.stderr_tail)


@pytest.mark.parametrize(
    ("does", "kind"),
    [("abort", "crashed"), ("exit", "crashed"), ("raise", "crashed"), ("lack", "unsupported")],
)
def test_a_death_while_the_graph_is_loaded_is_the_same_failure(model: Path, does: str, kind: str) -> None:
    """No session comes to be, and no process stays."""
    assert failure_of(isolated_misbehaviour(does, when="open"), model).kind == kind


@pytest.mark.parametrize("does", ["hang", "hang-native"])
@pytest.mark.parametrize("when", ["open", "run"])
def test_a_call_without_end_is_a_timeout(model: Path, does: str, when: str) -> None:
    """The limit of a call is named, with the option that changes it, and the process is ended."""
    spec = isolated_misbehaviour(does, when=when, limits=Limits(call_seconds=2.0))
    failure = failure_of(spec, model)
    assert failure.kind == "timeout"
    assert failure.details.limit == "call 2 s"
    assert "a call may take 2 s" in failure.message


def test_calls_that_take_too_long_together_are_a_timeout(model: Path) -> None:
    """The limit of a run counts the calls of all sessions of an engine: a new one has what is left."""
    spec = isolated_misbehaviour("hang", at=1, limits=Limits(call_seconds=60.0, run_seconds=5.0))
    first = decode(spec, model)
    assert first.failure is not None
    assert (first.failure.kind, first.failure.step) == ("timeout", 1)
    assert first.failure.details.limit == "run 5 s"
    with pytest.raises(EngineFailedError, match="its calls together may take 5 s") as caught:
        spec.open(model)
    assert caught.value.kind == "timeout"


@pytest.mark.parametrize("does", ["begin", "drip"])
@pytest.mark.parametrize("limits", [Limits(call_seconds=2.0), Limits(call_seconds=None, run_seconds=4.0)])
def test_an_answer_that_has_begun_is_none(model: Path, does: str, limits: Limits) -> None:
    """A limit is for the whole of an answer, however much of it came, and whenever the last of it did."""
    failure = failure_of(isolated_misbehaviour(does, at=1, limits=limits), model)
    assert (failure.kind, failure.step) == ("timeout", 1)


@pytest.mark.parametrize("does", ["eat", "eat-shared", "child-eats", "begin-and-eat"])
def test_a_memory_eater_is_ended_and_the_limit_named(model: Path, does: str) -> None:
    """Resident memory is watched from outside, whoever holds it; what a limit allows is not touched."""
    limit = 512 << 20
    spec = isolated_misbehaviour(does, at=2, limits=Limits(call_seconds=60.0, memory_bytes=limit))
    trace = decode(spec, model)
    assert trace.failure is not None
    assert (trace.failure.kind, trace.failure.step) == ("crashed", 2)
    assert trace.failure.details.limit == "memory 512 MiB"
    assert "--memory-limit" not in trace.failure.message
    assert len(trace.token_ids) == 2


def test_memory_that_processes_share_counts_once(model: Path) -> None:
    """Three of them with the same 256 MiB hold less than 700."""
    spec = isolated_misbehaviour(
        "share-with-children", at=1, limits=Limits(call_seconds=60.0, memory_bytes=700 << 20)
    )
    trace = decode(spec, model)
    assert trace.failure is None
    assert len(trace.token_ids) == TOKENS


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells what is shared")
def test_a_process_that_has_just_ended_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted when sizes were added up, and is gone when shares are: those of the others still count."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    watched = memory.HeldMemory(os.getpid())
    monkeypatch.setattr(watched, "_look", lambda: None)
    monkeypatch.setattr(watched, "_known", [os.getpid(), ended.pid])
    monkeypatch.setattr(memory, "_own", lambda pid: 1 << 40)
    assert watched.bytes_beyond(1 << 39) is None


def test_a_python_error_is_a_crash_with_its_traceback(model: Path) -> None:
    """Type and text in one line; the traceback is in the tail, and names the line."""
    trace = decode(isolated_misbehaviour("raise", at=1), model)
    assert trace.failure is not None
    assert (trace.failure.kind, trace.failure.step) == ("crashed", 1)
    assert trace.failure.message == "misbehaving raised ValueError: two lines"
    assert "in _raise" in str(trace.failure.details.stderr_tail)


def test_an_operator_that_is_lacked_is_unsupported(model: Path) -> None:
    """An error of ours comes through as it is."""
    trace = decode(isolated_misbehaviour("lack", at=1), model)
    assert trace.failure is not None
    assert (trace.failure.kind, trace.failure.message) == ("unsupported", "there is no kernel for Scan")


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [("elsewhere", InvalidRunError, "MatMul ran on the CPU"), ("no file", InputError, r"model\.onnx")],
)
def test_errors_that_are_no_failure_of_the_engine_come_through(
    model: Path, tmp_path: Path, damage: str, error: type[ParityError], said: str
) -> None:
    """A run that proves nothing, and a file that cannot be read, keep their class and exit code."""
    spec = isolated_misbehaviour("elsewhere" if damage == "elsewhere" else "nothing", when="open")
    with pytest.raises(error, match=said) as caught:
        spec.open(model if damage == "elsewhere" else tmp_path / "model.onnx")
    assert not isinstance(caught.value, EngineFailedError)


@pytest.mark.parametrize(
    ("does", "when", "said"),
    [
        ("raise-wordless", "open", "raised _WordlessError: it has no text"),
        ("raise-unmade", "run", "raised _UnmadeError"),
        ("close-streams", "top", "raised ValueError: after closing"),
        ("fail-weird", "open", _KIND),
        ("fail-weird", "run", _KIND),
        ("fail-in-no-way", "top", "`kind` of an error is "),
        ("answer-another", "run", "it does not say which call it answers"),
        ("answer-deeply", "open", "it is no JSON that can be read"),
        ("answer-a-list", "top", "it is [1], and must be an object"),
        ("answer-twice", "run", "more follows where it should end"),
        ("claim-a-long-answer", "run", f"it says that it has {1 << 60} bytes"),
    ],
)
def test_what_is_no_error_and_no_answer_is_a_crash(model: Path, does: str, when: str, said: str) -> None:
    """One line says what was raised, or what the answer lacks."""
    failure = failure_of(isolated_misbehaviour(does, when=when, at=1 if when == "top" else 0), model)
    assert (failure.kind, "\n" in failure.message) == ("crashed", False)
    assert failure.message.startswith("misbehaving ")
    assert said in failure.message


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("dtype-objects", "dtype('float32') of class numpy"),
        ("unknown-dtypes", "'banana', and must be an element type of ONNX"),
        ("negative-shapes", "[-1, -1, -1], and must be a list of integers from 0 on"),
        ("shapes-of-letters", "['a', 'b', 'c'], and must be a list of integers from 0 on"),
        ("no-handles", "'NoneType' object has no attribute 'dtype'"),
        ("nan-setting", "setting 'scale' is nan"),
        ("nested-setting", "setting 'scale' is {'a': [1]}"),
        ("endless-settings", "`info` has "),
        ("no-version", "its version is None"),
        ("unknown-mode", "its mode is 'fancy'"),
        ("nan-placement", "`placement` is no JSON"),
    ],
)
def test_what_an_engine_says_is_looked_at(model: Path, does: str, said: str) -> None:
    """Of its session and of its tensors: field, value and rule stand in one line."""
    failure = failure_of(isolated_misbehaviour(does), model)
    assert failure.kind == "crashed"
    assert said in failure.message


@pytest.mark.parametrize("does", ["numpy-numbers", "numpy-shapes"])
def test_numbers_of_numpy_are_numbers(model: Path, does: str) -> None:
    """As token IDs, logits, flags and extents."""
    trace = decode(isolated_misbehaviour(does), model)
    assert trace.failure is None
    assert trace.token_ids == DECODER.greedy(PROMPT, TOKENS)


def test_a_tensor_too_large_to_share_is_a_crash(tmp_path: Path) -> None:
    """An engine may claim any extent: copying such a tensor is its failure, not ours."""
    session = isolated_misbehaviour("endless-shapes").open(identity(tmp_path))
    handle = session.run({"x": session.zeros((1, 1, 9), "float32")}, ("y",))["y"]
    with pytest.raises(EngineFailedError, match="no memory can be shared"):
        session.copy_out(handle)
    session.close()


@pytest.mark.parametrize(
    ("does", "kind"), [("raise-many-words", "crashed"), ("fail-many-words", "unsupported")]
)
def test_a_long_message_is_cut_and_says_so(model: Path, does: str, kind: str) -> None:
    """A million characters are not for a report; those of the stack are in the tail."""
    failure = failure_of(isolated_misbehaviour(does, at=1), model)
    assert failure.kind == kind
    assert len(failure.message) <= 4096
    assert failure.message.endswith(" more characters)")
    if does.startswith("raise"):
        assert "in _raise_many_words" in str(failure.details.stderr_tail)


def test_a_signal_to_its_parent_is_not_for_us(model: Path) -> None:
    """Whoever an engine takes for its parent, the check goes on."""
    trace = decode(isolated_misbehaviour("signal-the-parent", at=1), model)
    assert trace.failure is None


@pytest.mark.parametrize("when", ["open", "run", "top", "close"])
def test_noise_on_both_streams_changes_nothing(
    model: Path, when: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Megabytes on standard output and error: the answers are what they were, and ours stay silent."""
    assert MEGABYTES_OF_NOISE << 20 > 10 * (1 << 16)  # far more than a pipe holds
    trace = decode(isolated_misbehaviour("noise", when=when, at=TOKENS if when == "close" else 1), model)
    assert trace.failure is None
    assert trace.token_ids == DECODER.greedy(PROMPT, TOKENS)
    assert capfd.readouterr() == ("", "")


def test_only_the_end_of_much_noise_is_kept(model: Path) -> None:
    """A few kilobytes, of which the last are the last ones written."""
    session = isolated_misbehaviour("noise", when="run", at=0).open(model)
    greedy_decode(session, DECODER.topology, PROMPT, max_new_tokens=1)
    with pytest.raises(EngineFailedError) as caught:
        session.run({}, ["logits"])
    session.close()
    tail = str(caught.value.details.stderr_tail)
    assert len(tail.encode()) <= 4096
    assert "\N{SNOWMAN}" in tail
    assert tail.endswith(f"{END_OF_NOISE}\n")


@pytest.mark.parametrize("does", ["close-descriptors", "write-everywhere"])
def test_a_channel_that_is_closed_or_littered_is_a_crash(model: Path, does: str) -> None:
    """What cannot be an answer is none: never an error of this project, never taken for data."""
    trace = decode(isolated_misbehaviour(does, at=1), model)
    assert trace.failure is not None
    assert (trace.failure.kind, trace.failure.step) == ("crashed", 1)


class Leavings:
    """All that was started in an environment that is marked, whoever its parent is now."""

    def __init__(self) -> None:
        self.environment = {SHARED_NAME: f"onnx-parity-{uuid.uuid4().hex}"}

    def processes(self) -> list[psutil.Process]:
        """Processes that are alive."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # another user's, or gone meanwhile
                same = process.environ().get(SHARED_NAME) == self.environment[SHARED_NAME]
                if same and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def shared(self) -> list[Path]:
        """Named shared memory."""
        return list(Path("/dev/shm").glob(self.environment[SHARED_NAME]))


@pytest.fixture
def leavings() -> Iterator[Leavings]:
    """What this test starts; a test that is red leaves nothing either."""
    made = Leavings()
    yield made
    for process in made.processes():
        with contextlib.suppress(psutil.Error):
            process.kill()
    for path in made.shared():
        path.unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere orphans are handed to nobody")
@pytest.mark.parametrize("end", ["close", "segfault", "hang", "forget"])
@pytest.mark.parametrize("starts", STARTS[1:])
def test_what_an_engine_started_ends_with_it(
    model: Path, leavings: Leavings, monkeypatch: pytest.MonkeyPatch, starts: str, end: str
) -> None:
    """Children, whatever they call themselves, and shared memory, whatever the end."""
    for name, value in leavings.environment.items():
        monkeypatch.setenv(name, value)
    does = end if end in ("segfault", "hang") else "nothing"
    limits = Limits(call_seconds=2.0 if end == "hang" else 60.0)
    session = isolated_misbehaviour(does, starts=starts, limits=limits).open(model)
    assert len(leavings.processes()) == 3  # the worker, its keeper, and what was started
    assert len(leavings.shared()) == (starts == "sharing")
    if does == end:
        with pytest.raises(EngineFailedError):
            session.run({}, [])
    elif end == "close":
        session.close()
    del session
    assert (leavings.processes(), leavings.shared()) == ([], [])


def test_a_session_that_failed_fails_again_and_closes(model: Path) -> None:
    """Whoever asks a dead worker is told how it died."""
    session = isolated_misbehaviour("abort").open(model)
    for _ in range(2):
        with pytest.raises(EngineFailedError, match="SIGABRT"):
            session.run({}, [])
    session.close()
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.run({}, [])


def test_a_session_that_nobody_closes_ends_with_the_last_reference(model: Path) -> None:
    """A worker is no longer there than the object that asks it."""
    session = isolated_misbehaviour("nothing").open(model)
    pid = pid_of(session)
    del session
    assert gone(pid)


def test_tensors_of_any_size_cross_whole(model: Path) -> None:
    """Many and large ones in one call: shared memory grows, and nothing overlaps."""
    session = isolated_misbehaviour("nothing").open(model)
    arrays = [np.random.RandomState(i).standard_normal(7 ** (i + 1)).astype(np.float32) for i in range(7)]
    handles = [session.place(array) for array in arrays]
    for array, handle in zip(arrays, handles, strict=True):
        assert np.array_equal(session.copy_out(handle), array)
    session.close()


def test_a_question_longer_than_the_channel_holds_arrives_whole(model: Path) -> None:
    """All that gathered since the last call goes along with the next, however much that is."""
    session = isolated_misbehaviour("nothing", limits=Limits(call_seconds=20.0)).open(model)
    handles = [session.zeros((1,), "float32") for _ in range(30_000)]
    assert session.copy_out(handles[-1]).tolist() == [0.0]
    session.close()


def test_a_reduction_that_came_along_answers_nothing_else(tmp_path: Path) -> None:
    """What was asked of the last run is done along with the next one; other questions are answered anew."""
    session = isolated(parse_engine("ort-cpu:threads=1"), Limits()).open(identity(tmp_path))
    questions: list[tuple[int, tuple[int, ...] | None]] = [
        (2, (-1,)),
        (2, (-1,)),
        (3, (-1,)),
        (2, (0, 2)),
        (2, None),
        (1, (2,)),
    ]
    for run, (k, positions) in enumerate(questions):
        array = np.random.RandomState(run).standard_normal((1, 3 - run % 2, 9)).astype(np.float32)
        logits = session.run({"x": session.place(array)}, ("y",))["y"]
        for again in ((k, positions), (k + 1, (0,)), (k, positions)):
            if again[1] is None or max(again[1]) < array.shape[1]:
                found = session.top_logits(logits, k=again[0], positions=again[1])
                assert found == top_logits_of(array, *again)
    session.close()


def test_a_dropped_tensor_is_freed_in_the_worker(model: Path) -> None:
    """Handles that nobody holds cost no memory there: 40 times 64 MiB pass a limit of 1 GiB."""
    spec = isolated_misbehaviour("nothing", limits=Limits(call_seconds=60.0, memory_bytes=1 << 30))
    session = spec.open(model)
    for _ in range(40):
        handle = session.place(np.ones(1 << 24, np.float32))
        assert session.copy_out(handle)[-1] == 1.0
        del handle
    session.close()


PARENT = """
import sys
from pathlib import Path
from fixtures.misbehaving import isolated_misbehaviour
from harness.decode.loop import greedy_decode
from suites.engines.test_isolated import DECODER, PROMPT, TOKENS
session = isolated_misbehaviour(sys.argv[2], starts=sys.argv[3]).open(Path(sys.argv[1]))
print(session.info.settings["pid"], flush=True)
try:
    if sys.argv[2] != "nothing":
        greedy_decode(session, DECODER.topology, PROMPT, max_new_tokens=TOKENS)
    sys.stdin.read()
except KeyboardInterrupt:
    session.close()
    sys.exit(130)
"""


@contextlib.contextmanager
def parent_of(
    model: Path, does: str, starts: str, environment: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has opened a session, and its worker's process ID."""
    command = [sys.executable, "-c", PARENT, str(model), does, starts]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        time.sleep(0.5)  # until it is deep in its call
        yield process, worker
        process.kill()


@pytest.fixture(params=["nothing", "hang", "hang-native"])
def parent(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Such a process whose session is idle, or in a call without end."""
    with parent_of(model, request.param, "nothing", {}) as found:
        yield found


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere orphans are handed to nobody")
@pytest.mark.parametrize(
    ("starts", "number"),
    [
        *((starts, signal.SIGKILL) for starts in STARTS[1:]),
        ("child", signal.SIGTERM),
        ("child", signal.SIGHUP),
    ],
)
def test_what_an_engine_started_ends_with_the_parent(
    model: Path, leavings: Leavings, starts: str, number: signal.Signals
) -> None:
    """Also while the engine is deep in C, and also where nobody could tell it."""
    with parent_of(model, "hang-native", starts, leavings.environment) as (process, _):
        assert len(leavings.processes()) == 4
        assert len(leavings.shared()) == (starts == "sharing")
        process.send_signal(number)
        process.wait(20)
        assert all(gone(left.pid) for left in leavings.processes())
        assert leavings.shared() == []


def test_a_worker_ends_with_its_parent(parent: tuple[subprocess.Popen[str], int]) -> None:
    """Nobody can tell it after SIGKILL, and it need not be told: neither idle, nor busy, nor deep in C."""
    process, worker = parent
    process.kill()
    process.wait(20)
    assert gone(worker)


def test_ctrl_c_ends_both_without_a_traceback(parent: tuple[subprocess.Popen[str], int]) -> None:
    """As a terminal does it: the signal goes to the whole group of the parent."""
    process, worker = parent
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == ""
    assert gone(worker)


def test_a_worker_loads_what_its_engine_needs_and_no_more(model: Path) -> None:
    """Neither the command, nor the oracle, nor a library of the report is imported there."""
    code = (
        "import sys\n"
        "import harness.engines.isolated.worker\n"
        "print(*sorted({name for name in sys.modules if name.startswith('harness.')}))\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    ours, all_of_them = (set(line.split()) for line in run.stdout.splitlines())
    assert not {"numpy", "onnx", "onnxruntime", "click", "rich", "psutil", "yaml"} & all_of_them
    rooms = {name.split(".")[1] for name in ours}
    assert rooms == {"engines", "errors", "onnx_file", "ports", "wire"}


def test_an_engine_that_no_entry_point_leads_to_stays_in_process() -> None:
    """A worker could not find it."""
    spec = EngineSpec(ENGINE, {})
    assert isolated(spec, Limits()) is spec


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", 1), ("4GiB", 4 << 30), ("4 gb", 4 << 30), ("512M", 512 << 20), ("1.5k", 1536), ("2T", 2 << 40)],
)
def test_a_size_is_read_as_people_write_it(text: str, count: int) -> None:
    """A unit is a power of 1024."""
    assert read_memory(text) == count


@pytest.mark.parametrize("text", ["", "0", "GiB", "-1", "1e3", "4 GiB more", "1PB", "9" * 16])
def test_what_is_no_size_is_none(text: str) -> None:
    """Zero, nothing, signs, exponents, unknown units."""
    assert read_memory(text) is None


def test_a_size_is_written_as_it_is_read() -> None:
    """What a message says can be given back."""
    for count in (1, 1023, 1 << 10, 3 << 20, 5 << 30):
        assert read_memory(memory_text(count).removesuffix("bytes")) == count
