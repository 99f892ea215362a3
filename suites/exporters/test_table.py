"""The matrix as a document and as a table: nothing that failed may be missing from either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from suites.exporters.table import matrix_of, merged, table_of, text_of

COMMITTED = Path(__file__).parents[2] / "docs" / "exporters.json"


def row(package: str, **changes: Any) -> dict[str, Any]:
    """The row of a package that is built and agrees three ways."""
    return {
        "package": package,
        "exporter": "dynamo",
        "architecture": package,
        "family": "dense",
        "variant": "plain",
        "precision": "fp32",
        "planted": None,
        "distributions": {"torch": "1"},
        "build_error": None,
        "topology": {"outcome": "derived", "kv_inputs": 4, "state_pairs": 0, "static_cache": False},
        "configuration": None,
        "layers": {"agrees": True},
        "decode": {"verdict": "identical", "tokens": 64},
        "source": {"agrees": True, "judged": True, "tokens": 64},
        "peer": None,
        "attribution": None,
        "evidence": "",
        **changes,
    }


FAILED = {"attribution": "exporter", "evidence": "token 3 | of prompt 1"}
PARTED = {"agrees": False, "judged": True, "tokens": 64, "first_difference": {"index": 3}}


def test_every_row_is_in_the_table_and_every_failure_once_more() -> None:
    """A bar in the evidence would end its cell."""
    matrix = matrix_of([row("one"), row("two", source=PARTED, **FAILED)])

    table = table_of(matrix)
    assert table.count("| one |") == 1
    assert table.count("| two |") == 1
    assert "parts at 3" in table
    assert "| dynamo: two | exporter | token 3 \\| of prompt 1 |" in table
    assert "dynamo: one" not in table


def test_planted_faults_are_counted_for_themselves() -> None:
    """They are neither pairs that agree nor failures of the exporter."""
    planted = row("three", planted="rope-base", source=PARTED, **FAILED)
    summary = matrix_of([row("one"), planted])["summary"]

    assert (summary["asked for"], summary["agreeing three ways in fp32"]) == (1, 1)
    assert (summary["planted faults"], summary["of these laid at the exporter's door"]) == (1, 1)
    assert "failures laid to: exporter" not in summary


def test_newer_rows_take_the_places_of_older_ones() -> None:
    """Order stays, so that a matrix of which a part was checked again differs in that part alone."""
    older = [row("one"), row("two"), {**row("one"), "exporter": "genai"}]
    again, new = row("two", **FAILED), row("three")

    assert merged(older, [new, again]) == [older[0], again, older[2], new]


def test_the_text_is_the_document() -> None:
    """A row a line, and JSON all the same."""
    matrix = matrix_of([row("one"), row("two")])

    assert json.loads(text_of(matrix)) == matrix
    assert sum(line.startswith('{"architecture"') for line in text_of(matrix).splitlines()) == 2


def test_the_committed_matrix_leaves_no_failure_open() -> None:
    """Sixty built, thirty agreeing three ways, every plant found, an attribution for whatever failed."""
    if not COMMITTED.is_file():
        pytest.fail(f"{COMMITTED} is missing: docs/exporters.md says how it is written")
    matrix = json.loads(COMMITTED.read_text(encoding="utf-8"))
    rows, summary = matrix["rows"], matrix["summary"]

    assert summary == matrix_of(rows)["summary"]
    assert summary["built"] >= 60
    assert summary["agreeing three ways in fp32"] >= 30
    assert summary["of these over 64 tokens"] >= 10
    assert summary["of these identical to the oracle"] == summary["decoded in fp32"]
    assert summary["of these laid at the exporter's door"] == summary["planted faults"] > 0
    assert all(each["evidence"] for each in rows if each["attribution"] is not None)
    assert "unknown" not in {each["attribution"] for each in rows}
