"""The table of `docs/conformance.md` is what engines do: which relations hold, and which do not apply.

Whether a relation holds to the bit or within its band is left open: kernels differ from machine to machine.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fixtures.engine_limits import LIMITS
from harness.cli.app import run
from harness.engines.registry import parse_engine
from harness.parity.relations.catalogue import RELATIONS

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs/conformance.md").read_text(encoding="utf-8")
EVERYWHERE = (
    "run-to-run",
    "second-generation",
    "interleaved-prompts",
    "reused-buffers",
    "rewind",
    "copied-feeds",
)
"""Relations that hold to the bit on every engine and package, as the text above the table says."""

COLUMNS = tuple(r.name for r in RELATIONS if r.name not in (*EVERYWHERE, "graph-capture"))
MODELS = os.environ.get("ONNX_PARITY_EXPORTER_MODELS")
NO_MODELS = "set ONNX_PARITY_EXPORTER_MODELS to a folder of exporters' models"


def rows() -> dict[tuple[str, str], list[str]]:
    """The cells of the table, by package and engine."""
    head = "| package | engine | " + " | ".join(COLUMNS) + " |"
    _, found, rest = DOCUMENT.partition(head)
    assert found, "the table of docs/conformance.md has not the columns of the catalogue"
    table = rest.partition("\n\n")[0].strip().splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {(row[0], row[1]): row[2:] for row in cells}


TABLE = rows()
EXPORTED = [key for key in TABLE if key[0] not in ("demo", "demo-ops", "smollm2", "smollm2-int4")]
QUICK = ("mobius-llama-static-cache", "ort-cpu")


def test_every_relation_and_every_limit_is_documented() -> None:
    """The text has a row for each relation, and names each sample."""
    for relation in RELATIONS:
        assert f"| `{relation.name}` |" in DOCUMENT
    for limit in LIMITS:
        assert f"conformance-nxrt-{limit}" in DOCUMENT


@pytest.mark.parametrize(
    ("package", "engine"),
    [
        pytest.param(*key, marks=[] if key == QUICK else [pytest.mark.slow], id="-".join(key))
        for key in EXPORTED
    ],
)
@pytest.mark.skipif(MODELS is None, reason=NO_MODELS)
def test_a_row_of_the_table_is_found_again(
    package: str, engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the engine as it is installed."""
    state = parse_engine(engine).engine.availability()
    if not state.usable:
        pytest.skip(f"{state.reason} {state.next_action}")
    options = ["--engine", engine, "--in-process", "--prompt-ids", "1,5,3,9,2,7,4", "--max-new-tokens", "6"]
    status = run(
        ["conform", str(Path(MODELS or "") / package), *options, "--report-dir", str(tmp_path), "--json"]
    )
    document = json.loads(capsys.readouterr().out)
    cells = TABLE[package, engine]
    outcomes = {relation["name"]: relation["outcome"] for relation in document["relations"]}
    if cells[0].startswith(("crashed", "unsupported")):
        assert (status, document["verdict"]) == (4, cells[0].partition(":")[0])
        return
    assert status == 0
    for name, cell in zip(COLUMNS, cells, strict=True):
        assert (outcomes[name] == "not-applicable") == (cell == "·"), name
