"""A process between the worker and its parent, which sees to it that nothing of the worker stays.

An engine can end in ways in which it cleans nothing up, and so can the parent. The keeper loads nothing that
could fail: it waits for either end, and then ends whatever the engine has started, also what called itself a
daemon: on Linux orphans are handed to it. First it asks them to, which lets Python's resource tracker remove
the shared memory that it watches. Then it ends as the worker did, so that the parent sees how that was.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from typing import NoReturn

__all__ = ["become_kept"]

_PATIENCE_SECONDS = 1.0
"""How long those may take that were asked to end, before they are ended."""

_LOOK_SECONDS = 0.01

# Of <sys/prctl.h>.
_SET_DEATH_SIGNAL = 1
_SET_SUBREAPER = 36


def become_kept(life: int, others: Iterable[int]) -> None:
    """Split in two: the keeper, who stays here, and the worker, to whom this returns.

    Call it while the process has one thread and has loaded nothing that minds.

    Args:
        life: a descriptor that can be read once the parent wants the worker to end, or is no more.
        others: descriptors that are the worker's alone.
    """
    adopts = _prctl(_SET_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    # It must be there before the worker can end, and do nothing but wake.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    worker = os.fork()
    if worker:
        for descriptor in others:
            os.close(descriptor)
        _keep(worker, life, woken, adopts=adopts)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(woken)
    os.close(wake)
    os.setsid()  # a signal that an engine sends to its own group is not for the keeper
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def _keep(worker: int, life: int, woken: int, *, adopts: bool) -> NoReturn:
    """Wait for either end; then leave nothing."""
    for number in signal.valid_signals() - {signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # the C library keeps some to itself
            signal.signal(number, signal.SIG_IGN)
    status = None
    while status is None:
        ready, _, _ = select.select([life, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        status = _reap(worker)[1]
        if life in ready and status is None:
            os.kill(worker, signal.SIGKILL)
            _, status = os.waitpid(worker, 0)
    _end_all(worker, adopts=adopts)
    _end_as(status)


def _reap(worker: int) -> tuple[bool, int | None]:
    """Whether a child is alive, and how the worker ended, if it is among those that have."""
    status = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                status = ended[1]
    except ChildProcessError:
        return False, status
    return True, status


def _end_all(group: int, *, adopts: bool) -> None:
    """End whatever the worker has left: all who descend from it if orphans are ours, else its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        told: set[int] = set()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (left := _left(group, adopts=adopts)) and time.monotonic() < deadline:
            for pid in left if number == signal.SIGKILL else left - told:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
            told |= left
            time.sleep(_LOOK_SECONDS)


def _left(group: int, *, adopts: bool) -> set[int]:
    """Processes that are left, as `os.kill` takes them: the negative number of a group is all of it."""
    if _reap(group)[0]:
        import psutil

        with contextlib.suppress(psutil.Error):
            return {child.pid for child in psutil.Process().children(recursive=True)}
    elif not adopts:
        with contextlib.suppress(OSError):
            os.kill(-group, 0)
            return {-group}
    return set()


def _end_as(status: int) -> NoReturn:
    """End with the exit code or by the signal of another."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        import resource

        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has left one, if one is wanted
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _prctl(what: int, value: int) -> bool:
    """Ask the kernel of Linux; False elsewhere, and where it does no such thing."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            return bool(ctypes.CDLL(None).prctl(what, value, 0, 0, 0) == 0)
    return False
