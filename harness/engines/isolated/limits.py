"""How long an engine may take and how much memory it may hold, before it is ended."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Limits", "RunClock", "memory_text", "most_memory", "read_memory"]

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(?P<number>[0-9]{1,15}(\.[0-9]{1,3})?)\s*(?P<unit>[kmgt]?)(i?b)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one engine; None is no limit.

    Attributes:
        call_seconds: of one call: loading the graph, or a step.
        run_seconds: of all calls of a run together, over all its sessions.
        memory_bytes: of resident memory, its own and that of all processes it started; mapped files, which
            the system can take back at any time, do not count.
    """

    call_seconds: float | None = 600.0
    run_seconds: float | None = None
    memory_bytes: int | None = None


class RunClock:
    """How much of `Limits.run_seconds` is spent. Shared by all sessions of a run."""

    def __init__(self) -> None:
        self.spent = 0.0


def most_memory() -> int:
    """Bytes that an engine may hold where nobody says: most of what is free now, so that the system lives."""
    import psutil

    return int(psutil.virtual_memory().available) * 9 // 10


def read_memory(text: str) -> int | None:
    """Bytes that a text such as `4GiB`, `512M` or `1000000` means; None where it means none.

    A unit is a power of 1024, with or without `B` or `iB`.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    return int(float(found["number"]) * _UNITS[found["unit"].lower()]) or None


def memory_text(count: int) -> str:
    """A number of bytes as a person reads it."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} bytes"
