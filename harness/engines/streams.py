"""Standard output is for documents and reports: what other code prints meanwhile goes to standard error."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

__all__ = ["reserved_stdout"]

_OUT, _ERR = 1, 2


@contextlib.contextmanager
def reserved_stdout() -> Iterator[None]:
    """Send what is written to standard output to standard error until the end of the block.

    By descriptor as well, since native libraries print past Python. Where a descriptor is closed, only what
    Python prints is sent elsewhere. May be nested; concerns all threads.
    """
    _flush()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            kept = os.dup(_OUT)
            stack.callback(_restore, kept)
            os.dup2(_ERR, _OUT)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def _restore(kept: int) -> None:
    _flush()
    with contextlib.suppress(OSError):
        os.dup2(kept, _OUT)
    os.close(kept)


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
