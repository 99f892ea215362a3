"""The sample reports in the repository are real, whole, and what the README shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from harness.parity.verdict import Verdict, exit_code_of, worst_verdict
from harness.report.document import token_sha256

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "reports/schemas/parity-1.schema.json").read_text(encoding="utf-8"))
SAMPLES = sorted((ROOT / "reports/samples").glob("*/parity.json"))


def read(path: Path) -> dict[str, Any]:
    """A sample as it stands."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.parent.name)
def test_a_sample_is_consistent_in_itself(path: Path) -> None:
    """Schema, hashes, verdicts and exit status agree: no hand edited it, and no machine shows."""
    document = read(path)
    jsonschema.validate(document, SCHEMA)
    verdicts = []
    for prompt in document["prompts"]:
        assert prompt["candidate_sha256"] == token_sha256(prompt["candidate_ids"])
        assert prompt["oracle_sha256"] == token_sha256(prompt["oracle_ids"])
        identical = prompt["candidate_ids"] == prompt["oracle_forced_ids"]
        assert identical == (prompt["verdict"] == "identical")
        verdicts.append(Verdict(prompt["verdict"]))
    assert document["verdict"] == worst_verdict(verdicts)
    assert document["exit_code"] == exit_code_of(worst_verdict(verdicts))
    assert document["oracle"]["proof"]["passed"] is True
    assert not Path(document["model"]["path"]).is_absolute()


def test_the_readme_shows_the_sample_it_links() -> None:
    """Every prompt's row on the first screen has the sample's verdict, position and margin."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = "reports/samples/smollm2-int4-ort-cpu/parity.json"
    assert linked in readme
    document = read(ROOT / linked)
    assert document["verdict"] == "divergent"
    for number, prompt in enumerate(document["prompts"], 1):
        found = prompt["first_divergence"]
        margin = prompt["min_margin"] if found is None else found["oracle_margin"]
        (row,) = (line for line in readme.splitlines() if line.startswith(f"{number}  "))
        assert row.split()[-4:] == [
            prompt["verdict"],
            f"{len(prompt['candidate_ids'])}/{prompt['max_new_tokens']}",
            "-" if found is None else str(found["index"]),
            f"{margin:.4f}",
        ]
