"""Events of tried relations, gathered into the JSON document `onnx-parity/conformance/1`.

Field names and meanings are a contract: a change needs a new schema number. The JSON Schema of the
document is `reports/schemas/conformance-1.schema.json`.
"""

from __future__ import annotations

from typing import Any

from harness.relation_events import (
    BandsMeasured,
    FirstDifference,
    ReferenceDecoded,
    RelationEvent,
    RelationJudged,
    RelationsFinished,
    RelationsStarted,
)
from harness.report.parts import ending, failure, model
from harness.report.plain import finite, plain

__all__ = ["SCHEMA", "ConformanceDocument"]

SCHEMA = "onnx-parity/conformance/1"


class ConformanceDocument:
    """An event sink that always holds a valid report of what has happened so far.

    Until `RelationsFinished` arrives the document reads as interrupted, as a check's does.
    """

    def __init__(self) -> None:
        self._started: RelationsStarted | None = None
        self._reference: ReferenceDecoded | None = None
        self._relations: list[RelationJudged] = []
        self._bands: BandsMeasured | None = None
        self._finished: RelationsFinished | None = None

    def __call__(self, event: RelationEvent) -> None:
        """Take one event into the document."""
        match event:
            case RelationsStarted():
                self._started = event
            case ReferenceDecoded():
                self._reference = event
            case RelationJudged():
                self._relations.append(event)
            case BandsMeasured():
                self._bands = event
            case RelationsFinished():
                self._finished = event

    def mapping(self) -> dict[str, Any]:
        """The document as plain data, in the field order of the schema."""
        end, start = self._finished, self._started
        return {
            "schema": SCHEMA,
            **ending(end),
            "seed": start.seed if start else 0,
            "warnings": list(start.warnings) if start else [],
            "model": None if start is None else model(start),
            "engine": None if start is None else self._engine(start),
            "prompt": None if start is None else self._prompt(start),
            "band": None if self._bands is None else _band(self._bands),
            "relations": [_relation(judged) for judged in self._relations],
        }

    def _engine(self, start: RelationsStarted) -> dict[str, Any]:
        seen = self._reference
        return {
            "engine": start.engine,
            "version": seen.version if seen else None,
            "settings": dict(seen.settings) if seen else {},
            "placement": plain(seen.placement) if seen else None,
            "mode": seen.mode if seen else None,
            "process": start.process,
            "failure": failure(self._finished.failure) if self._finished else None,
        }

    def _prompt(self, start: RelationsStarted) -> dict[str, Any]:
        return {
            "text": start.text,
            "prompt_ids": list(start.prompt_ids),
            "max_new_tokens": start.max_new_tokens,
            "token_ids": list(self._reference.token_ids) if self._reference else [],
        }


def _band(measured: BandsMeasured) -> dict[str, Any]:
    return {
        "oracle": measured.oracle,
        "factor": measured.factor,
        "spreads": dict(measured.spreads),
        "reason": measured.reason,
    }


def _relation(judged: RelationJudged) -> dict[str, Any]:
    return {
        "name": judged.name,
        "statement": judged.statement,
        "outcome": judged.outcome,
        "reason": judged.reason,
        "must": judged.must,
        "cases": judged.cases,
        "case": judged.case,
        "compared": {"tokens": judged.tokens, "logits": judged.tokens, "states": judged.states},
        "tokens_part_at": judged.tokens_part_at,
        "first_difference": _difference(judged.first),
        "largest": None
        if judged.port is None
        else {"port": judged.port, "size": finite(judged.size), "band": finite(judged.band)},
        "failure": failure(judged.failure),
        "seconds": judged.seconds,
    }


def _difference(found: FirstDifference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "step": found.step,
        "port": found.port,
        "differing": found.differing,
        "elements": found.elements,
        "index": None if found.index is None else list(found.index),
        "expected": finite(found.expected),
        "found": finite(found.found),
        "size": finite(found.size),
        "note": found.note,
    }
