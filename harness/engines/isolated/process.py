"""A worker process as its parent sees it: asked, watched, and ended, come what may.

One call at a time: the parent sends a document and waits for the answer. Until that is whole, it reads what
the worker writes to standard output and error, watches its memory and the clock. There are no threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn, TypeVar, cast

from harness.engines.isolated.answers import FailureKind, error_in
from harness.engines.isolated.arena import Arena
from harness.engines.isolated.limits import Limits, RunClock, memory_text
from harness.engines.isolated.memory import HeldMemory
from harness.engines.isolated.protocol import Arriving, Document, MalformedError, framed
from harness.errors import EngineFailedError, FailureDetails

__all__ = ["Worker"]

_Answer = TypeVar("_Answer")

_WATCH_SECONDS = 0.05
"""How often memory and clock are looked at."""

_GRACE_SECONDS = 5.0
"""How long a worker may take to end by itself once nobody needs it."""

_TAIL = 4096
"""Bytes of standard output and error that are kept."""

_READ = 1 << 16
_MOST_READS = 64

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from harness.engines.isolated.worker import main; main()"
)
"""What the worker runs. It finds modules where its parent does."""

_REPORT_IT = "Report it to the engine with the model; the report has the end of what the engine wrote."

_NOTHING = FailureDetails()


class Worker:
    """One worker process. It never outlives its parent, nor this object.

    Attributes:
        arena: memory that it shares with its parent.
    """

    def __init__(self, engine: str, *, limits: Limits, clock: RunClock) -> None:
        """Start a process; `engine` is the name for messages.

        Raises:
            EngineFailedError: the system starts no process, or gives no memory to share.
        """
        self._engine = engine
        self._limits = limits
        self._clock = clock
        self._tail = b""
        self._failure: EngineFailedError | None = None
        self._busy = False
        try:
            self.arena = Arena.create()
            self._process, self._channel, lifeline, self._output = _spawn(self.arena.descriptor)
        except OSError as error:
            raise EngineFailedError(
                f"{engine}: no process could be started for it: {error.strerror or error}.",
                kind="crashed",
                next_action="Free memory or processes, or run it with --in-process.",
            ) from error
        self._channel.setblocking(False)
        self._calls = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(self._output, selectors.EVENT_READ)
        self._memory = HeldMemory(self._process.pid)
        self._looked = time.monotonic()
        self._end = weakref.finalize(
            self,
            _end,
            self._process,
            (self._channel.close, self._selector.close, self.arena.close),
            lifeline,
            self._output,
        )

    def ask(self, doing: str, question: Mapping[str, Any], read: Callable[[Document], _Answer]) -> _Answer:
        """Its answer to `question`, as `read` makes it; `doing` completes "it died while" in messages.

        Raises:
            EngineFailedError: it died, broke a limit, or gave what `read` finds malformed, and can be asked
                no more; or its engine failed.
            ParityError: whatever else of ours the engine raised.
        """
        if self._failure is not None:
            raise self._failure
        began = time.monotonic()
        self._busy = True
        self._calls += 1
        try:
            document = self._exchange(framed({**question, "call": self._calls}), doing, began)
            if document.get("call") != self._calls:
                raise MalformedError("it does not say which call it answers")
            raised = error_in(document)
            answer = read(document) if raised is None else None
        except MalformedError as error:
            self._fail(
                f"{self._engine} gave no answer that can be used, while {doing}: {error}.",
                next_action=_REPORT_IT,
            )
        except (EOFError, OSError):  # it closed its end
            self._died(doing)
        finally:
            self._clock.spent += time.monotonic() - began
        self._busy = False
        if raised is not None:
            self._drain()
            if isinstance(raised, EngineFailedError):
                raised.details = FailureDetails(stderr_tail=self._written())
            raise raised
        return cast("_Answer", answer)

    def no_room(self, doing: str, error: Exception) -> NoReturn:
        """Fail, since there is no memory to share for a tensor."""
        self._fail(
            f"{self._engine} has a tensor for which no memory can be shared, while {doing}: {error}.",
            next_action="Free memory, or run it with --in-process.",
        )

    def close(self) -> None:
        """Let it end by itself if it is idle, end it otherwise. May be called twice."""
        if self._end.alive and not self._busy:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_WR)
            self._await_end()
        self._end()

    def _exchange(self, question: bytes, doing: str, began: float) -> Document:
        """Send a question and wait until the answer is whole.

        Raises:
            EOFError, OSError: it closed its end.
            MalformedError: what it wrote is no document.
            EngineFailedError: it broke a limit.
        """
        deadline = self._deadline(began)
        unsent, arriving = self._send(memoryview(question)), Arriving()
        if unsent:  # which is rare, and a change of the selector costs
            self._selector.modify(self._channel, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while True:
            ready = {key.fileobj: events for key, events in self._selector.select(_WATCH_SECONDS)}
            if self._output in ready and not self._read_output():
                self._selector.unregister(self._output)
            now = time.monotonic()
            if now - self._looked > _WATCH_SECONDS:
                self._looked = now
                self._check_memory(doing)
            events = ready.get(self._channel, 0)
            if events & selectors.EVENT_WRITE:
                unsent = self._send(unsent)
                if not unsent:
                    self._selector.modify(self._channel, selectors.EVENT_READ)
            if events & selectors.EVENT_READ and (document := arriving.read(self._channel)) is not None:
                return document
            if deadline is not None and now > deadline:
                self._too_slow(doing, began)

    def _send(self, data: memoryview) -> memoryview:
        """Send what there is room for; the rest."""
        try:
            return data[self._channel.send(data) :]
        except BlockingIOError:
            return data

    def _deadline(self, began: float) -> float | None:
        limits = self._limits
        ends = [] if limits.call_seconds is None else [began + limits.call_seconds]
        if limits.run_seconds is not None:
            ends.append(began + limits.run_seconds - self._clock.spent)
        return min(ends, default=None)

    def _check_memory(self, doing: str) -> None:
        most = self._limits.memory_bytes
        held = None if most is None else self._memory.bytes_beyond(most)
        if most is not None and held is not None:
            self._fail(
                f"{self._engine} held {memory_text(held)} of memory while {doing}, and may hold "
                f"{memory_text(most)}.",
                next_action="Allow it more with --memory-limit.",
                details=FailureDetails(limit=f"memory {memory_text(most)}"),
            )

    def _too_slow(self, doing: str, began: float) -> NoReturn:
        took, call, run = time.monotonic() - began, self._limits.call_seconds, self._limits.run_seconds
        if call is not None and took >= call:
            what, option, limit = f"a call may take {call:g} s", "--call-timeout", f"call {call:g} s"
        else:
            what, option, limit = f"its calls together may take {run:g} s", "--timeout", f"run {run:g} s"
        self._fail(
            f"{self._engine} gave no answer for {took:.1f} s while {doing}, and {what}.",
            kind="timeout",
            next_action=f"Allow it more with {option}.",
            details=FailureDetails(limit=limit),
        )

    def _died(self, doing: str) -> NoReturn:
        """It ended the conversation: say how, and see to it that it is no more."""
        self._await_end()
        status = self._process.returncode
        if status is None:
            self._fail(f"{self._engine} closed its channel while {doing}.", next_action=_REPORT_IT)
        if status >= 0:
            self._fail(
                f"{self._engine} ended its process with exit code {status} while {doing}.",
                next_action=_REPORT_IT,
                details=FailureDetails(exit_code=status),
            )
        name = _signal_name(-status)
        memory = ": out of memory, perhaps" if name == "SIGKILL" else ""
        self._fail(
            f"{self._engine} died of {name} while {doing}{memory}.",
            next_action=_REPORT_IT,
            details=FailureDetails(signal=name),
        )

    def _fail(
        self,
        message: str,
        *,
        next_action: str,
        kind: FailureKind = "crashed",
        details: FailureDetails = _NOTHING,
    ) -> NoReturn:
        self._drain()
        self._end()
        self._failure = EngineFailedError(
            message,
            next_action=next_action,
            kind=kind,
            details=replace(details, stderr_tail=self._written()),
        )
        raise self._failure

    def _await_end(self) -> None:
        """Give it time to end, and read what it writes meanwhile."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            self._drain()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_WATCH_SECONDS)

    def _drain(self) -> None:
        """Read what it has written, unless it writes without end."""
        for _ in range(_MOST_READS):
            try:
                if not self._read_output():
                    break
            except BlockingIOError:
                break

    def _read_output(self) -> bool:
        """Take a piece of its output; False when there will be no more."""
        piece = os.read(self._output, _READ)
        self._tail = (self._tail + piece)[-_TAIL:]
        return bool(piece)

    def _written(self) -> str | None:
        return self._tail.decode(errors="replace") or None


def _spawn(arena: int) -> tuple[subprocess.Popen[bytes], socket.socket, int, int]:
    """A process, our end of the channel to it, what it lives by, and where its output arrives."""
    ours, theirs = socket.socketpair()
    life, lifeline = os.pipe()
    output, written = os.pipe()
    os.set_blocking(output, False)
    try:
        inherited = (theirs.fileno(), life, arena)
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                _BOOT,
                *map(str, inherited),
                json.dumps([str(place) for place in sys.path]),
            ],
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            pass_fds=inherited,
            # Ctrl-C at the terminal is for the parent, who ends the worker; and what the engine starts
            # can be ended with it.
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        os.close(lifeline)
        os.close(output)
        raise
    finally:
        theirs.close()
        os.close(life)
        os.close(written)
    return process, ours, lifeline, output


def _end(process: subprocess.Popen[bytes], closers: tuple[Any, ...], lifeline: int, output: int) -> None:
    """Have a worker ended with whatever it started, and free all that it shared with us."""
    os.close(output)  # what is full would keep those from ending who still write
    with contextlib.suppress(OSError):
        os.write(lifeline, b".")  # should somebody have a copy, closing alone would tell nothing
    os.close(lifeline)
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:  # a driver may hold on to the worker
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    for close in closers:
        close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
