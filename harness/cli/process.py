"""The process around the command: its output streams and Ctrl-C.

A reader that goes away, a full disk behind a redirection, or a signal in the middle of an import must not
turn a finding into a pass, a pass into a finding, or anything into a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TextIO, cast

__all__ = ["OutputStream", "deferred_interrupts", "guarded_streams"]


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


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block, for code that cannot be interrupted safely.

    An import that is interrupted half-way leaves a half-initialised module behind (numpy then recurses
    without end). A second Ctrl-C is not held back. Does nothing outside the main thread.

    Raises:
        KeyboardInterrupt: at the end of the block, when the user pressed Ctrl-C in it.
    """
    pressed = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    try:
        before = signal.signal(signal.SIGINT, hold)
    except ValueError:  # not the main thread: signals do not arrive here
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt
