"""How much memory a worker and all that it started hold, as its parent sees it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

__all__ = ["HeldMemory"]

_LOOK_SECONDS = 0.5
"""How often processes are looked for: that takes far longer than looking at those that are known."""

_LARGEST_SHARE = 0.01
"""Of the time, for looking."""

_OWN = re.compile(r"^Rss(?:Anon|Shmem):\s*(\d+) kB$", re.MULTILINE)
_SHARE = re.compile(r"^Pss_(?:Anon|Shmem):\s*(\d+) kB$", re.MULTILINE)


class HeldMemory:
    """The resident memory of the descendants of a process that no file backs.

    Files that are mapped can be taken back by the system at any time. What several of the processes share
    counts once, if the system tells it.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._known: list[int] = []
        self._look_at = 0.0

    def bytes_beyond(self, most: int) -> int | None:
        """How much they hold, if that is more than `most` bytes."""
        self._look()
        held = sum(_own(pid) for pid in self._known)
        if held > most and len(self._known) > 1:
            held = _shared_once(self._known) or held
        return held if held > most else None

    def _look(self) -> None:
        now = time.monotonic()
        if self._known and now < self._look_at:
            return
        try:
            self._known = [child.pid for child in psutil.Process(self._pid).children(recursive=True)]
        except psutil.Error:
            self._known = []
        done = time.monotonic()
        self._look_at = done + max(_LOOK_SECONDS, (done - now) / _LARGEST_SHARE)


def _own(pid: int) -> int:
    """Bytes of one process; 0 once it is gone."""
    try:
        found = _OWN.findall(Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace"))
        if found:
            return 1024 * sum(map(int, found))
    except OSError:
        pass  # not Linux, or gone
    try:
        told = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return int(told.rss - getattr(told, "shared", 0))


def _shared_once(pids: Iterable[int]) -> int | None:
    """Bytes of several processes, where each has its share of a common page; None where nobody tells."""
    total = 0
    for pid in pids:
        try:
            found = _SHARE.findall(Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # gone, or this system has no such file at all
        except OSError:
            return None
        total += 1024 * sum(map(int, found))
    return total or None
