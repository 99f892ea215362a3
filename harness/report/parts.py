"""What documents of checks and of relations have alike: how it ended, on what, and how an engine failed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from harness.events import CheckFinished, CheckStarted, FailureFacts
from harness.relation_events import RelationsFinished, RelationsStarted

__all__ = ["ending", "failure", "model"]

_INTERRUPTED = 130


def ending(end: CheckFinished | RelationsFinished | None) -> dict[str, Any]:
    """How it ended; as long as it has not, that reads as interrupted.

    Should the process be killed, what was written last says so by itself. A refusal says what to do in its
    message, so there is no error beside it.
    """
    if end is None:
        return {
            "verdict": None,
            "exit_code": _INTERRUPTED,
            "error": None,
            "refusal": None,
            "interrupted": True,
        }
    return {
        "verdict": end.verdict,
        "exit_code": end.exit_code,
        "error": dict(end.error) if end.error and not end.refusal else None,
        "refusal": dict(end.refusal) if end.refusal else None,
        "interrupted": end.interrupted,
    }


def model(start: CheckStarted | RelationsStarted) -> dict[str, Any]:
    """What it is about."""
    return {
        "path": start.model_path,
        "sha256": start.model_sha256,
        "topology": {
            "outcome": start.topology_outcome,
            "kv_inputs": start.kv_inputs,
            "state_pairs": start.state_pairs,
        },
    }


def failure(facts: FailureFacts | None) -> dict[str, Any] | None:
    """How an engine failed; None where it did not."""
    return None if facts is None else asdict(facts)
