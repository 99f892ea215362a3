"""Events of one check, gathered into the JSON document `onnx-parity/parity/1`.

Field names and meanings are a contract: a change needs a new schema number. The JSON Schema of the
document is `reports/schemas/parity-1.schema.json`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from harness.events import (
    CheckFinished,
    CheckStarted,
    Event,
    FailureFacts,
    FirstDivergence,
    PromptJudged,
    PromptStarted,
    SessionOpened,
    SourceDivergence,
    SourceJudged,
)
from harness.report.parts import ending, failure, model
from harness.report.plain import finite, plain

__all__ = ["SCHEMA", "ParityDocument", "token_sha256"]

SCHEMA = "onnx-parity/parity/1"


def token_sha256(token_ids: Iterable[int]) -> str:
    """SHA-256, in hex, over token IDs as little-endian signed 64-bit integers."""
    ids = tuple(token_ids)
    return hashlib.sha256(struct.pack(f"<{len(ids)}q", *ids)).hexdigest()


class ParityDocument:
    """An event sink that always holds a valid report of what has happened so far.

    Until `CheckFinished` arrives the document reads as interrupted (`exit_code` 130): should the process
    be killed, what was written last says so by itself.
    """

    def __init__(self) -> None:
        self._model: dict[str, Any] | None = None
        self._sides: dict[str, dict[str, Any]] = {}
        self._compared: tuple[str, ...] = ("tokens",)
        self._warnings: tuple[str, ...] = ()
        self._seed = 0
        self._prompts: dict[int, dict[str, Any]] = {}
        self._witnessed: dict[int, dict[str, Any] | None] = {}
        self._started: dict[int, PromptStarted] = {}
        self._failures: dict[int, FailureFacts] = {}
        self._finished: CheckFinished | None = None

    def __call__(self, event: Event) -> None:
        """Take one event into the document."""
        match event:
            case CheckStarted():
                self._start(event)
            case SessionOpened():
                self._open(event)
            case PromptStarted():
                self._started[event.index] = event
            case PromptJudged():
                self._judge(event)
            case CheckFinished():
                self._finished = event

    def mapping(self) -> dict[str, Any]:
        """The document as plain data, in the field order of the schema."""
        end = self._finished
        return {
            "schema": SCHEMA,
            **ending(end),
            "seed": self._seed,
            "compared": list(self._compared),
            "attribution": end.attribution if end else None,
            "warnings": list(self._warnings),
            "model": self._model,
            "candidate": self._candidate(),
            "oracle": self._sides.get("oracle"),
            "source": self._source(),
            "prompts": [self._prompts[i] for i in sorted(self._prompts)],
        }

    def _start(self, event: CheckStarted) -> None:
        self._seed, self._compared, self._warnings = event.seed, event.compared, event.warnings
        self._model = model(event)
        self._sides["candidate"] = {
            "engine": event.candidate,
            "version": None,
            "settings": {},
            "placement": None,
            "mode": None,
            "process": event.candidate_process,
        }
        self._sides["oracle"] = {
            "engine": event.oracle,
            "version": None,
            "settings": {},
            "precision": None,
            "mode": event.oracle_mode,
            "proof": None,
        }
        if event.source is not None:
            self._sides["source"] = {
                "engine": event.source,
                "path": event.source_path,
                "version": None,
                "settings": {},
                "precision": None,
            }

    def _open(self, event: SessionOpened) -> None:
        side = self._sides[event.role]
        side.update(version=event.version, settings=dict(event.settings))
        if event.role == "candidate":
            side.update(placement=plain(event.placement), mode=event.mode)
        elif event.role == "source":
            side.update(precision=event.settings.get("precision"))
        else:
            side.update(precision=event.settings.get("precision"), proof=plain(event.proof))

    def _judge(self, event: PromptJudged) -> None:
        start = self._started[event.index]
        self._failures.pop(event.index, None)  # of an earlier judgement of this prompt
        if event.failure is not None:
            self._failures[event.index] = event.failure
        self._witnessed[event.index] = _witnessed(event.source)
        if event.oracle_mode is not None:
            self._sides["oracle"]["mode"] = event.oracle_mode
        tokens = len(event.candidate_ids)
        self._prompts[event.index] = {
            "text": start.text,
            "prompt_ids": list(start.prompt_ids),
            "max_new_tokens": start.max_new_tokens,
            "candidate_ids": list(event.candidate_ids),
            "oracle_ids": list(event.oracle_ids),
            "oracle_forced_ids": list(event.oracle_forced_ids),
            "candidate_sha256": token_sha256(event.candidate_ids),
            "oracle_sha256": token_sha256(event.oracle_ids),
            "verdict": event.verdict,
            "min_margin": finite(event.min_margin),
            "undecided": list(event.undecided),
            "first_divergence": _divergence(event.first_divergence),
            "timing": {
                "candidate_s": event.candidate_seconds,
                "oracle_s": event.oracle_seconds,
                "candidate_tokens_per_s": _rate(tokens, event.candidate_seconds),
                "oracle_tokens_per_s": _rate(len(event.oracle_forced_ids), event.oracle_seconds),
            },
        }

    def _source(self) -> dict[str, Any] | None:
        side = self._sides.get("source")
        prompts = [self._witnessed[i] for i in sorted(self._witnessed)]
        return None if side is None else {**side, "prompts": prompts}

    def _candidate(self) -> dict[str, Any] | None:
        side = self._sides.get("candidate")
        first = self._failures[min(self._failures)] if self._failures else None
        return None if side is None else {**side, "failure": failure(first)}


def _divergence(found: FirstDivergence | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "index": found.index,
        "candidate_token": found.candidate_token,
        "oracle_token": found.oracle_token,
        "oracle_margin": finite(found.oracle_margin),
        "noise_band": found.noise_band,
        "oracle_top": _pairs(found.oracle_top),
        "candidate_top": _pairs(found.candidate_top),
        "cause": found.cause,
        "evidence": found.evidence,
    }


def _witnessed(source: SourceJudged | None) -> dict[str, Any] | None:
    """What the source says of a prompt; None where nothing was decoded that it could speak of."""
    if source is None:
        return None
    return {
        "verdict": source.verdict,
        "attribution": source.attribution,
        "source_forced_ids": list(source.source_forced_ids),
        "source_sha256": token_sha256(source.source_forced_ids),
        "first_divergence": _source_divergence(source.first_divergence),
        "timing": {"source_s": source.seconds},
    }


def _source_divergence(found: SourceDivergence | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "index": found.index,
        "source_token": found.source_token,
        "oracle_token": found.oracle_token,
        "gap": finite(found.gap),
        "noise_band": found.noise_band,
        "source_top": _pairs(found.source_top),
        "oracle_top": _pairs(found.oracle_top),
        "evidence": found.evidence,
    }


def _pairs(top: Sequence[tuple[int, float]]) -> list[list[int | float | None]]:
    return [[token, finite(logit)] for token, logit in top]


def _rate(tokens: int, seconds: float) -> float | None:
    return finite(tokens / seconds) if seconds > 0 else None
