"""The matrix as a document, and as a table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["MARK", "matrix_of", "table_of"]

MARK = "<!-- What follows is written by `python -m suites.exporters table`. -->"
SCHEMA = "onnx-parity/exporters/1"


def matrix_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON document: every row, and what they come to."""
    kept = list(rows)
    return {"schema": SCHEMA, "summary": _summary(kept), "rows": kept}


def table_of(matrix: Mapping[str, Any]) -> str:
    """Markdown: the figures, a table for each exporter, and every failure with its evidence."""
    rows: Sequence[Mapping[str, Any]] = matrix["rows"]
    lines = ["", "## Figures", "", "| what | pairs |", "|---|---|"]
    lines += [f"| {label} | {count} |" for label, count in matrix["summary"].items()]
    for exporter in dict.fromkeys(row["exporter"] for row in rows):
        mine = [row for row in rows if row["exporter"] == exporter]
        made = ", ".join(f"{name} {version}" for name, version in mine[0]["distributions"].items())
        lines += ["", f"## {exporter}", "", f"{made}.", ""]
        lines += ["| architecture | family | variant | topology | configuration | decode | source | peer |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        lines += [_line(row) for row in mine]
    failed = [row for row in rows if row["attribution"] is not None]
    lines += ["", "## Failures", "", "| package | attribution | evidence |", "|---|---|---|"]
    lines += [
        f"| {row['exporter']}: {row['package']} | {row['attribution']} | {_cell(row['evidence'])} |"
        for row in failed
    ]
    return "\n".join(lines) + "\n"


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    built = [row for row in rows if row["build_error"] is None]
    decoded = [row for row in built if row["decode"]["verdict"] is not None]
    judged = [row for row in built if (row["source"] or {}).get("judged")]
    peers = [row for row in built if row["peer"] is not None]
    counts = {
        "asked for": len(rows),
        "built": len(built),
        "built, in fp32": sum(row["precision"] == "fp32" for row in built),
        "topology derived": sum(row["topology"]["outcome"] == "derived" for row in built),
        "as the exporter's own configuration says": sum(
            bool((row["configuration"] or {}).get("agrees")) for row in built
        ),
        "layers as in the source model's cache": sum(
            bool((row["layers"] or {}).get("agrees")) for row in built
        ),
        "decoded by ONNX Runtime": sum(row["decode"]["tokens"] > 0 for row in decoded),
        "identical to the oracle": sum(row["decode"]["verdict"] == "identical" for row in decoded),
        "agreeing three ways in fp32": sum(row["source"]["agrees"] for row in judged),
        "where onnxruntime-genai generates our tokens": sum(row["peer"]["agrees"] is True for row in peers),
        "that onnxruntime-genai loads only with what `derive --write` wrote": sum(
            bool(row["peer"]["before"]) and row["peer"]["agrees"] is True for row in peers
        ),
    }
    blamed = Counter(row["attribution"] for row in rows if row["attribution"] is not None)
    return counts | {f"failures laid to: {who}": count for who, count in sorted(blamed.items())}


def _line(row: Mapping[str, Any]) -> str:
    cells = [row["architecture"], row["family"], f"{row['variant']}, {row['precision']}"]
    if row["build_error"] is not None:
        return _joined([*cells, "not built", "", "", "", ""])
    topology, declared, decode = row["topology"], row["configuration"], row["decode"]
    ports = f"{topology['kv_inputs']} KV, {topology['state_pairs']} states"
    cells.append(f"{ports}, static" if topology["static_cache"] else ports)
    if topology["outcome"] != "derived":
        cells[-1] = str(topology["outcome"])
    cells.append("-" if declared is None else "agrees" if declared["agrees"] else "differs")
    cells.append(decode["verdict"] or "none")
    return _joined([*cells, _source_cell(row["source"]), _peer_cell(row["peer"])])


def _source_cell(source: Mapping[str, Any] | None) -> str:
    if source is None:
        return "-"
    if not source["judged"]:
        return "another precision"
    return (
        f"agrees, {source['tokens']}"
        if source["agrees"]
        else f"parts at {source['first_difference']['index']}"
    )


def _peer_cell(peer: Mapping[str, Any] | None) -> str:
    if peer is None:
        return "-"
    if peer["agrees"] is None:
        return "does not load"
    return f"agrees, {peer['tokens']}" if peer["agrees"] else "differs"


def _joined(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
