"""Several prompts as rows of one pass of the oracle, run ahead of what will be asked of each alone.

A row stands for a pass of its own where the graph keeps its rows apart. Whether it does is tried: a probe
runs among rows that are longer than any before, and must give what it gave alone, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.decode.batch import Continued, one_pass_batch
from harness.decode.trace import Trace
from harness.engines.base import BatchingSession, Session
from harness.parity.finite import not_finite, watch
from harness.parity.spread import spread_between
from harness.topology.spec import Topology

__all__ = ["BatchedPasses"]

_MOST_TOKENS = 256
"""Positions of a batch, those that are filled up included: far beyond, a row costs as much as a pass of its
own, and what a pass keeps in memory grows with them."""


class BatchedPasses:
    """What rows of batches gave. There are none before a probe is known, nor once it has refuted them."""

    def __init__(self, session: Session, topology: Topology, *, top_k: int) -> None:
        """Nothing runs yet; arguments as of `harness.decode.batch.one_pass_batch`."""
        self._session = session
        self._topology = topology
        self._top_k = top_k
        self._probe: tuple[Trace, float] | None = None
        self._is_refuted = not isinstance(session, BatchingSession)
        self._longest_proven = 0
        self._rows: dict[tuple[tuple[int, ...], tuple[int, ...]], Trace] = {}

    def prove_by(self, probe: Trace, band: float) -> None:
        """Let `probe`, which is exact and ran alone, run among rows, and be off by half of `band` at most."""
        self._probe = probe, band

    def gathers(self, decoded: Sequence[Continued]) -> bool:
        """Whether one more prompt had better be decoded before these run, to share their batch.

        Args:
            decoded: prompts and their tokens, at least one.
        """
        if self._probe is None or self._is_refuted:
            return False
        return (len(decoded) + 1) * _longest(decoded) <= _MOST_TOKENS

    def run(self, batches: Sequence[Sequence[Continued]]) -> None:
        """Run batches of prompts with their tokens, in place of those before: all of them, or none."""
        self.forget()
        if self._probe is None or self._is_refuted:
            return
        for rows in batches:
            traces = self._run(rows, *self._probe)
            if traces is None:
                self._is_refuted = True
                self.forget()
                return
            self._rows |= {(trace.prompt_ids, trace.token_ids): trace for trace in traces}

    def row(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Trace | None:
        """What a pass over these gave as a row; None where it was none."""
        return self._rows.get((tuple(prompt_ids), tuple(token_ids)))

    def forget(self) -> None:
        """Drop what ran."""
        self._rows.clear()

    def _run(self, decoded: Sequence[Continued], probe: Trace, band: float) -> list[Trace] | None:
        """One pass; None where there is none, or where it does not stand for passes of its rows alone."""
        longest = _longest(decoded)
        is_probed = longest > self._longest_proven
        rows = [*decoded, (probe.prompt_ids, probe.token_ids)] if is_probed else decoded
        watch(self._session, self._topology)
        traces = one_pass_batch(self._session, self._topology, rows, top_k=self._top_k)
        # Rows are filled up, so what a cache holds at the end may not be a row's own.
        if traces is None or not_finite(self._session):
            return None
        if is_probed:
            # A band is twice what one logit may be off.
            if 2 * spread_between(probe, traces.pop()) > band:
                return None
            self._longest_proven = longest
        return traces


def _longest(decoded: Sequence[Continued]) -> int:
    return max(len(prompt) + len(tokens) for prompt, tokens in decoded)
