from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.streams import crashed_stream, divergent_stream
from harness.errors import InputError
from harness.events import CheckFinished, CheckStarted, Event, PromptJudged
from harness.report.document import ParityDocument, token_sha256
from harness.report.writer import ReportWriter, write_json_atomically

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "reports/schemas/parity-1.schema.json").read_text(encoding="utf-8")
)
STREAMS = {"divergent": divergent_stream(), "crashed": crashed_stream()}


def document_of(events: list[Event]) -> dict[str, Any]:
    """The document after `events`, through JSON and checked against the schema."""
    document = ParityDocument()
    for event in events:
        document(event)
    parsed: dict[str, Any] = json.loads(json.dumps(document.mapping(), allow_nan=False))
    jsonschema.validate(parsed, SCHEMA)
    return parsed


@pytest.mark.parametrize("name", STREAMS)
def test_the_document_is_valid_after_every_event(name: str) -> None:
    """Wherever a run is cut off, what was written last fits the schema and says that it was cut off."""
    events = STREAMS[name]
    for length in range(len(events) + 1):
        document = document_of(events[:length])
        finished = length == len(events)
        assert document["interrupted"] is not finished
        assert (document["exit_code"] == 130) is not finished
        judged = sum(isinstance(e, PromptJudged) for e in events[:length])
        assert len(document["prompts"]) == judged


def test_what_was_found_stands_in_the_document() -> None:
    """Verdicts, IDs, both sides' logits and settings arrive unchanged; -inf has no JSON form: null."""
    document = document_of(divergent_stream())
    assert document["verdict"] == "divergent"
    assert document["exit_code"] == 1
    assert document["model"]["topology"] == {"outcome": "derived", "kv_inputs": 32, "state_pairs": 96}
    assert document["candidate"]["settings"] == {"threads": 2, "opt": "all"}
    assert document["oracle"]["precision"] == "float32"
    first, second = document["prompts"]
    assert first["first_divergence"] is None
    assert first["timing"]["candidate_tokens_per_s"] == 2 / 0.25
    assert first["timing"]["oracle_tokens_per_s"] == 2 / 1.0
    assert second["oracle_ids"] == [1, 4]
    assert second["oracle_forced_ids"] == [1, 4, 3]
    assert second["first_divergence"]["candidate_top"][2] == [0, None]
    assert second["first_divergence"]["cause"] is None


def test_warnings_stand_in_the_document() -> None:
    """Once it is known that there is a result of which they are to be known."""
    start, *rest = divergent_stream()
    assert isinstance(start, CheckStarted)
    warned = document_of([replace(start, warnings=("One.", "Two.")), *rest])
    assert warned == document_of([start, *rest]) | {"warnings": ["One.", "Two."]}
    assert document_of([])["warnings"] == []


def test_a_failure_keeps_the_tokens_from_before_it() -> None:
    """A crash is a verdict with its step and message; nothing that was decoded is lost."""
    document = document_of(crashed_stream())
    assert document["verdict"] == "crashed"
    assert document["candidate"]["failure"]["step"] == 1
    assert document["prompts"][0]["candidate_ids"] == [1]
    assert document["prompts"][0]["min_margin"] is None


def test_the_schema_refuses_an_identical_report_that_judged_nothing() -> None:
    """The schema itself knows that nothing judged is not a pass."""
    events = [*divergent_stream()[:3], CheckFinished("identical", 0)]
    document = ParityDocument()
    for event in events:
        document(event)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document.mapping(), SCHEMA)


@given(st.lists(st.integers(0, 2**31)))
def test_token_hashes_are_over_little_endian_int64(token_ids: list[int]) -> None:
    """The hash is SHA-256 over the bytes that numpy gives for dtype `<i8`."""
    assert token_sha256(token_ids) == hashlib.sha256(np.array(token_ids, dtype="<i8").tobytes()).hexdigest()


def test_a_report_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """When the new document cannot be written, the old one stays and no draft is left behind."""
    path = tmp_path / "parity.json"
    write_json_atomically(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json_atomically(path, {"a": float("nan")})
    with pytest.raises(TypeError):
        write_json_atomically(path, {"a": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["parity.json"]


def test_the_folder_is_made_when_decoding_begins_and_holds_every_judged_prompt(tmp_path: Path) -> None:
    """A check that never began writes nothing; from `CheckStarted` on the file is always valid."""
    folder = tmp_path / "deep" / "reports"
    document = ParityDocument()
    writer = ReportWriter(folder, document)
    for event in [CheckFinished(None, 2, error={"message": "m", "next": "n"})]:
        document(event)
        writer(event)
    assert writer.path is None
    assert not folder.exists()

    document = ParityDocument()
    writer = ReportWriter(folder, document)
    judged = 0
    for event in divergent_stream():
        document(event)
        writer(event)
        judged += isinstance(event, PromptJudged)
        written = json.loads((folder / "parity.json").read_text(encoding="utf-8"))
        jsonschema.validate(written, SCHEMA)
        assert len(written["prompts"]) == judged
    assert written["verdict"] == "divergent"


def test_two_fresh_reports_never_share_a_folder(tmp_path: Path) -> None:
    """Checks that begin in the same second each get a folder of their own; one that is named is reused."""
    paths = set()
    for fresh in (True, True, True, False):
        document = ParityDocument()
        writer = ReportWriter(tmp_path / "now-tiny", document, fresh=fresh)
        for event in divergent_stream():
            document(event)
            writer(event)
        assert writer.path is not None
        paths.add(writer.path.parent.name)
    assert paths == {"now-tiny", "now-tiny-2", "now-tiny-3"}


def test_a_file_name_that_is_no_text_can_be_reported(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 reach Python as surrogates, and the report escaped."""
    path = tmp_path / "parity.json"
    write_json_atomically(path, {"path": "model-\udcff", "text": "é"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"path": "model-\udcff", "text": "é"}


def test_a_folder_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    """The message names the folder and the option."""
    blocker = tmp_path / "file"
    blocker.write_text("x", encoding="utf-8")
    document = ParityDocument()
    writer = ReportWriter(blocker / "reports", document)
    event = divergent_stream()[0]
    document(event)
    with pytest.raises(InputError, match="--report-dir") as caught:
        writer(event)
    assert str(blocker) in caught.value.message


def test_the_later_judgement_of_a_prompt_holds() -> None:
    """Its verdict, and whether the candidate failed: nothing of the earlier one is left."""
    document = document_of(
        [*crashed_stream()[:-1], PromptJudged(0, "identical", (1,), (1,), (1,), 1.0, 0.5, 2.0)]
    )
    assert [prompt["verdict"] for prompt in document["prompts"]] == ["identical"]
    assert document["candidate"]["failure"] is None
