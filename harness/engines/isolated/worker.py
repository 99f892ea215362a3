"""The worker process: one engine, one session, and answers to what the parent asks of it.

Standard output and error are the parent's to read as noise; answers take a channel of their own. Errors of
ours go back as they are, any other is a crash that the traceback on standard error explains. Whether an
answer holds what it must is for the parent to see.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.engines.base import Engine, Session, TensorHandle
from harness.engines.isolated.arena import Arena
from harness.engines.isolated.keeper import become_kept
from harness.engines.isolated.protocol import (
    Document,
    error_document,
    framed,
    info_document,
    ports_document,
    receive,
    top_document,
)
from harness.engines.tensor_types import dtype_of_array, numpy_dtype
from harness.errors import EngineFailedError, ParityError

__all__ = ["main"]

_LONGEST_TRACEBACK = 4000
"""Characters; the parent keeps little more."""


def main() -> None:
    """Serve the parent until it has no more questions, or is no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel, life, arena = map(int, sys.argv[1:])
    become_kept(life, (channel, arena))
    _live_by(life)
    _be_first_out_of_memory()
    faulthandler.enable(all_threads=False)
    status = 0
    try:
        _serve(socket.socket(fileno=channel), _Worker(Arena(arena, os.fstat(arena).st_size)))
    except Exception as error:  # the channel is broken, so the parent hears it from the exit code
        _complain(error)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # an engine may have closed it, or put another there
            stream.flush()
    os._exit(status)  # what libraries do when a process ends in good order is nobody's finding


def _serve(channel: socket.socket, worker: _Worker) -> None:
    while (question := receive(channel)) is not None:
        channel.sendall(_answer(worker, question))
    worker.close()


def _answer(worker: _Worker, question: Document) -> bytes:
    """The answer to a question, whatever the engine raises or gives."""
    call = {"call": question["call"]}
    try:
        answer = worker.answer(question)
    except Exception as error:
        return framed({"error": worker.error(error), **call})
    try:
        return framed({**answer, **call})
    except (TypeError, ValueError, RecursionError) as error:
        return framed({"error": error_document(worker.unfit(error)), **call})


class _Worker:
    """One session, and the tensors that the parent holds handles of."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._name = "the engine"
        self._session: Session | None = None
        self._handles: dict[int, TensorHandle] = {}
        self._signatures: dict[int, tuple[list[str], list[str]]] = {}
        self._answers: dict[str, Callable[[Document], Document]] = {
            "open": self._open,
            "run": self._run,
            "top": self._top,
            "copy": self._copy,
        }

    def answer(self, question: Document) -> Document:
        """Do what is asked."""
        self._arena.see(question.get("arena", 0))
        for number in question.get("drop", ()):
            self._handles.pop(number, None)
        for number, dtype, shape, offset in question.get("new", ()):
            self._handles[number] = self._new(dtype, shape, offset)
        return self._answers[question["ask"]](question)

    def error(self, error: Exception) -> Document:
        """What an exception from within the engine means: one of ours is itself, any other is a crash."""
        if isinstance(error, ParityError):
            with contextlib.suppress(Exception):  # a class of the engine's own, perhaps
                return error_document(error)
        _complain(error)
        return error_document(
            EngineFailedError(
                f"{self._name} raised {_in_words(error)}",
                kind="crashed",
                next_action="Report it to the engine; the report has the traceback.",
            )
        )

    def unfit(self, error: Exception) -> EngineFailedError:
        """The failure to give what can be told to another process."""
        return EngineFailedError(
            f"{self._name} gave what must be numbers, texts or lists of them, and is not: {error}.",
            kind="crashed",
            next_action="Mend the engine; harness/engines/base.py has the types.",
        )

    def close(self) -> None:
        """Free the session."""
        if self._session is not None:
            with contextlib.suppress(Exception):
                self._session.close()

    def _open(self, question: Document) -> Document:
        self._name = question["name"]
        engine = _load(question["engine"])
        self._session = engine.open(Path(question["model"]), question["options"])
        return {
            "info": info_document(self._session.info),
            "ports": ports_document(self._session.inventory),
        }

    def _new(self, dtype: str, shape: list[int], offset: int | None) -> TensorHandle:
        """Zeros, or what stands in the arena from `offset` on."""
        if offset is None:
            return self._live.zeros(tuple(shape), dtype)
        return self._live.place(self._arena.read(offset, shape, numpy_dtype(dtype)))

    def _run(self, question: Document) -> Document:
        if "names" in question:
            self._signatures[question["signature"]] = question["names"]
        inputs, outputs = self._signatures[question["signature"]]
        feeds = {name: self._handles[number] for name, number in zip(inputs, question["feeds"], strict=True)}
        results = self._live.run(feeds, outputs)
        made = [results[name] for name in outputs]
        self._handles.update(enumerate(made, question["first"]))
        kinds: dict[tuple[str, tuple[int, ...]], int] = {}
        of = [kinds.setdefault((handle.dtype, tuple(handle.shape)), len(kinds)) for handle in made]
        answer: Document = {"outputs": of, "kinds": list(kinds)}
        if "expected" in question:
            # Nobody has asked yet: should it fail, it fails when somebody does.
            with contextlib.suppress(Exception):
                output, (k, positions) = question["expected"]
                answer["tops"] = self._tops(results[output], k, positions)
        return answer

    def _top(self, question: Document) -> Document:
        k, positions = question["reduction"]
        return {"tops": self._tops(self._handles[question["handle"]], k, positions)}

    def _tops(self, handle: TensorHandle, k: int, positions: list[int] | None) -> list[Any]:
        return [top_document(top) for top in self._live.top_logits(handle, k=k, positions=positions)]

    def _copy(self, question: Document) -> Document:
        array = self._live.copy_out(self._handles[question["handle"]])
        if array.nbytes > self._arena.size:
            raise ValueError(f"a tensor said that it holds fewer than its {array.nbytes} bytes")
        self._arena.write(0, array)
        return {"shape": array.shape, "dtype": dtype_of_array(array.dtype)}

    @property
    def _live(self) -> Session:
        if self._session is None:
            raise RuntimeError("no session is open")
        return self._session


def _load(reference: str) -> Engine:
    """The engine that an entry point names, as `module:attribute`."""
    from importlib.metadata import EntryPoint

    engine = EntryPoint(name="engine", value=reference, group="").load()
    if not isinstance(engine, Engine):
        raise TypeError(f"{reference} is no engine")
    return engine


def _in_words(error: Exception) -> str:
    """Class and text of an exception in one line, whatever its `str` does."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "it has no text, as its str raises"
    return f"{type(error).__name__}{': ' if text else ''}{text}"


def _complain(error: Exception) -> None:
    """Write the traceback of an error to standard error, whatever an engine has made of `sys.stderr`."""
    with contextlib.suppress(Exception):
        text = "".join(traceback.format_exception(error))
        if len(text) > _LONGEST_TRACEBACK:  # a long message, which the answer has, would leave no room
            text = f"{''.join(traceback.format_tb(error.__traceback__))}{type(error).__name__}\n"
        os.write(2, text[-_LONGEST_TRACEBACK:].encode(errors="replace"))


def _live_by(life: int) -> None:
    """End at once when the parent does, whatever this process is doing then.

    The parent alone holds the other end of the pipe `life`, and never writes to it. Its closing comes as a
    signal, which ends also a process that is deep in native code; where there is no such signal, or it is
    blocked, a thread that waits for the same does it as soon as it may run.
    """
    import fcntl

    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)

    def wait() -> None:
        os.read(life, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _be_first_out_of_memory() -> None:
    """Where the system runs out of memory it shall take this process, and not the parent."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
