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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from onnx import TensorProto, helper

from fixtures.decoders import TinyDecoder, save_graph
from fixtures.misbehaving import END_OF_NOISE, ENGINE, MEGABYTES_OF_NOISE, isolated_misbehaviour
from harness.decode.loop import greedy_decode
from harness.decode.trace import Trace, TraceFailure
from harness.engines.base import Session
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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid of one attention and one recurrent layer."""
    return DECODER.save(tmp_path_factory.mktemp("tiny") / "model.onnx")


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


def test_a_memory_eater_is_ended_and_the_limit_named(model: Path) -> None:
    """Resident memory is watched from outside; what a limit allows is not touched."""
    limit = 512 << 20
    spec = isolated_misbehaviour("eat", at=2, limits=Limits(call_seconds=60.0, memory_bytes=limit))
    trace = decode(spec, model)
    assert trace.failure is not None
    assert (trace.failure.kind, trace.failure.step) == ("crashed", 2)
    assert trace.failure.details.limit == "memory 512 MiB"
    assert "--memory-limit" not in trace.failure.message
    assert len(trace.token_ids) == 2


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


def test_what_an_engine_started_ends_with_it(model: Path) -> None:
    """A child of the worker is no child of ours, and ends all the same."""
    session = isolated_misbehaviour("child").open(model)
    greedy_decode(session, DECODER.topology, PROMPT, max_new_tokens=1)
    (child,) = psutil.Process(pid_of(session)).children()
    session.close()
    assert gone(child.pid)


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


def test_a_reduction_that_came_along_answers_nothing_else(tmp_path: Path) -> None:
    """What was asked of the last run is done along with the next one; other questions are answered anew."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "n", 9]) for name in ("x", "y")]
    path = save_graph(
        tmp_path / "model.onnx", [helper.make_node("Identity", ["x"], ["y"])], ports[:1], ports[1:]
    )
    session = isolated(parse_engine("ort-cpu:threads=1"), Limits()).open(path)
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
session = isolated_misbehaviour(sys.argv[2]).open(Path(sys.argv[1]))
print(session.info.settings["pid"], flush=True)
try:
    if sys.argv[2] != "nothing":
        greedy_decode(session, DECODER.topology, PROMPT, max_new_tokens=TOKENS)
    sys.stdin.read()
except KeyboardInterrupt:
    session.close()
    sys.exit(130)
"""


@pytest.fixture(params=["nothing", "hang", "hang-native"])
def parent(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has opened a session, idle or in a call without end, and its worker's process ID."""
    command = [sys.executable, "-c", PARENT, str(model), request.param]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
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
