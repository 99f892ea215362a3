"""The verdicts, which of them is worst, and the exit status each stands for."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

__all__ = ["EXIT_PRECEDENCE", "Verdict", "exit_code_of", "first_exit_code", "worst_verdict"]


class Verdict(StrEnum):
    """What a check found; members stand from worst to best."""

    INVALID_RUN = "invalid-run"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    UNSUPPORTED = "unsupported"
    NONDETERMINISTIC = "nondeterministic"
    DIVERGENT = "divergent"
    STATE_DIVERGENT = "state-divergent"
    NEAR_TIE = "near-tie"
    INCONCLUSIVE = "inconclusive"
    IDENTICAL = "identical"


EXIT_PRECEDENCE: tuple[int, ...] = (2, 3, 6, 4, 5, 1, 0)
"""Of several exit statuses the first in this order decides."""

_ENGINE_FAILURES = frozenset({Verdict.CRASHED, Verdict.TIMEOUT, Verdict.UNSUPPORTED})


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of at least one verdict.

    Raises:
        ValueError: there is none: a check that judged nothing must not pass for one that did.
    """
    judged = set(verdicts)
    for verdict in Verdict:
        if verdict in judged:
            return verdict
    raise ValueError("no verdict: nothing was judged")


def exit_code_of(verdict: Verdict) -> int:
    """Exit status of the command for a verdict: 0 only for `identical`."""
    if verdict is Verdict.IDENTICAL:
        return 0
    if verdict is Verdict.INVALID_RUN:
        return 6
    return 4 if verdict in _ENGINE_FAILURES else 1


def first_exit_code(codes: Iterable[int]) -> int:
    """The exit status that decides when several occurred; 0 when there was none.

    Raises:
        ValueError: a status that is not in `EXIT_PRECEDENCE`.
    """
    return min(codes, key=EXIT_PRECEDENCE.index, default=0)
