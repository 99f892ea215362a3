"""The process around the command: its output streams, Ctrl-C and SIGTERM.

A reader that goes away, a full disk behind a redirection, or a signal in the middle of an import must not
turn a finding into a pass, a pass into a finding, or anything into a traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn, TextIO, cast

__all__ = [
    "INTERRUPTED",
    "OutputStream",
    "deferred_interrupts",
    "ending",
    "guarded_streams",
    "take_interrupts",
]

INTERRUPTED = 130
"""Exit status: 128 + SIGINT, as shells have it."""


class OutputStream(io.TextIOBase):
    """A text stream whose failures are remembered instead of raised; characters it lacks are escaped.

    Attributes:
        failure: the first error in writing, None as long as everything went out.
    """

    def __init__(self, inner: TextIO | None) -> None:
        self.failure: OSError | None = None
        self._inner = inner
        if isinstance(inner, io.TextIOWrapper):
            inner.reconfigure(errors="backslashreplace")

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the stream behind."""
        return getattr(self._inner, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether a person reads it."""
        return self._inner is not None and self._inner.isatty()

    def fileno(self) -> int:
        """Descriptor of the stream behind."""
        if self._inner is None:
            raise io.UnsupportedOperation("fileno")
        return self._inner.fileno()

    def writable(self) -> bool:
        """Always: what cannot be written is remembered as `failure`."""
        return True

    def write(self, text: str) -> int:
        """Write, unless an earlier write failed."""
        if self._inner is not None and self.failure is None:
            try:
                self._inner.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Flush, unless an earlier write failed."""
        if self._inner is not None and self.failure is None:
            try:
                self._inner.flush()
            except OSError as error:
                self._give_up(error)

    @property
    def broken(self) -> bool:
        """Whether output was lost for a reason other than that its reader went away."""
        return self.failure is not None and self.failure.errno != errno.EPIPE

    def _give_up(self, error: OSError) -> None:
        self.failure = error
        # What is still buffered is flushed at exit: it must find an open end then.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def guarded_streams() -> Iterator[OutputStream]:
    """Standard output and error behind `OutputStream`s; yields that of standard output."""
    before = sys.stdout, sys.stderr
    out, err = OutputStream(sys.stdout), OutputStream(sys.stderr)
    sys.stdout, sys.stderr = cast("TextIO", out), cast("TextIO", err)
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


class _Interrupts:
    """What Ctrl-C does to the command, and SIGTERM, which is another way to say it.

    The first one ends what runs; what was judged before is then judged and reported. The second one ends
    that, too. While the end is reported one is not heeded, as there is nothing left to end. Any other one
    ends the process at once, whatever it hangs in.
    """

    def __init__(self) -> None:
        self.is_ending = False
        self._left = 2

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self._left == 0:
            self.leave()
        self._left = 0 if self.is_ending else self._left - 1
        if not self.is_ending:
            raise KeyboardInterrupt

    def leave(self) -> NoReturn:
        """End the process at once: no handler, no traceback."""
        shown = b"\x1b[?25h" if os.isatty(2) else b""  # a progress bar may have hidden the cursor
        with contextlib.suppress(OSError):
            os.write(2, shown + b"onnx-parity: Interrupted again, and ended at once.\n")
        os._exit(INTERRUPTED)


def take_interrupts() -> None:
    """From now on Ctrl-C ends this process with exit status 130, however often and whenever it is pressed.

    So does SIGTERM, by which others end it: what is half done is cleared away, and the report closed.
    Python's own way with a Ctrl-C that nobody caught is a traceback, and death by the signal. A signal that
    is not listened to, such as Ctrl-C in a job that a shell started in the background, is left alone.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    taken = [number for number, handler in usual.items() if signal.getsignal(number) is handler]
    raised, ignored = sys.excepthook, sys.unraisablehook

    def on_raised(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            os._exit(INTERRUPTED)
        raised(kind, error, trace)

    def on_ignored(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            ignored(unraisable)

    sys.excepthook, sys.unraisablehook = on_raised, on_ignored
    handler = _Interrupts()
    for number in taken:
        # What is registered first runs last. Then Python forgets its handlers, and the signal would kill.
        atexit.register(signal.signal, number, signal.SIG_IGN)
        signal.signal(number, handler)


def ending() -> None:
    """From now on the end is reported: a Ctrl-C more does not keep it from being said."""
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if isinstance(handler, _Interrupts):
            handler.is_ending = True


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block, for code that cannot be interrupted safely.

    An import that is interrupted half-way leaves a half-initialised module behind (numpy then recurses
    without end). A second Ctrl-C is not held back: it ends the process at once where the command runs
    (`take_interrupts`), and is raised elsewhere. Where the command runs, SIGTERM is held back as well. Does
    nothing outside the main thread.

    Raises:
        KeyboardInterrupt: at the end of the block, when the user pressed Ctrl-C in it.
    """
    pressed = False
    held: dict[int, Any] = {}

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            if isinstance(held[number], _Interrupts):
                held[number].leave()
            raise KeyboardInterrupt
        pressed = True

    try:
        held[signal.SIGINT] = signal.signal(signal.SIGINT, hold)
    except ValueError:  # not the main thread: signals do not arrive here
        yield
        return
    if isinstance(signal.getsignal(signal.SIGTERM), _Interrupts):
        held[signal.SIGTERM] = signal.signal(signal.SIGTERM, hold)
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
    if pressed:
        taken = next((handler for handler in held.values() if isinstance(handler, _Interrupts)), None)
        if taken is None:
            raise KeyboardInterrupt
        taken(signal.SIGINT, None)
