"""Every relation, in the order in which they are tried: those that explain others come first."""

from __future__ import annotations

from harness.parity.relations.base import Relation
from harness.parity.relations.batching import Batch, LeftPadding
from harness.parity.relations.chunking import ChunkedPrefill, Recompute, TokenByToken
from harness.parity.relations.feeding import CopiedFeeds
from harness.parity.relations.repeating import (
    InterleavedPrompts,
    ReusedBuffers,
    Rewind,
    RunToRun,
    SecondGeneration,
)
from harness.parity.relations.settings import GraphCapture, Optimisation, Threads
from harness.parity.relations.unread import Canaries

__all__ = ["RELATIONS"]

RELATIONS: tuple[Relation, ...] = (
    RunToRun(),
    SecondGeneration(),
    InterleavedPrompts(),
    ReusedBuffers(),
    Rewind(),
    CopiedFeeds(),
    Canaries(),
    ChunkedPrefill(),
    TokenByToken(),
    Recompute(),
    Batch(),
    LeftPadding(),
    Threads(),
    Optimisation(),
    GraphCapture(),
)
