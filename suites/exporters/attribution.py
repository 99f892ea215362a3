"""Whose fault a row of the matrix is: by rule where the witnesses settle it, else by what was looked into.

Three witnesses decide a decode: source model, oracle on the graph, runtime on the graph, by the rules of
`harness.parity.attribution`. What never came so far is attributed by where it ended, and `findings.toml`
has, with its reason, each case that somebody looked into.
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["attribute"]


def attribute(row: Mapping[str, Any]) -> tuple[str | None, str]:
    """Who is to blame, and why: `exporter`, `runtime`, `us`, `unknown`, or None where nothing failed.

    Args:
        row: of the matrix, complete but for its attribution.
    """
    failure = _failure(row)
    if failure is None:
        return None, ""
    by_rule, evidence = failure
    for finding in _findings():
        if _is_about(finding, row, evidence):
            return finding["attribution"], f"{finding['because']} [{evidence}]"
    return by_rule, evidence


def _failure(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """What failed first, with the blame that goes by where it failed; None where nothing did."""
    for judge in (_build, _topology, _decode, _tokens, _configuration, _layers, _peer):
        found = judge(row)
        if found is not None:
            return found
    return None


def _build(row: Mapping[str, Any]) -> tuple[str, str] | None:
    error = row["build_error"]
    if error is None:
        return None
    # A source model that cannot be made up is a fault of our recipe.
    blame = "exporter" if error["stage"] == "export" else "us"
    return blame, f"{error['type']}: {error['message']} ({error['where']})"


def _topology(row: Mapping[str, Any]) -> tuple[str, str] | None:
    topology = row["topology"]
    return None if topology["outcome"] == "derived" else ("us", topology["error"])


def _decode(row: Mapping[str, Any]) -> tuple[str, str] | None:
    decode = row["decode"]
    verdict, failure = decode["verdict"], decode["failure"]
    if verdict in {"crashed", "timeout", "unsupported"}:
        return "runtime", f"{verdict}: {failure['message'] if failure else decode['error']}"
    if verdict != "identical" and decode["first_divergence"] is None:
        return "us", f"{verdict or 'no verdict'}: {decode['error']}"
    return None


def _tokens(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """What rounds to fp16 or int8 is measured, and not blamed: there the verdict stands in the row."""
    decode, source = row["decode"], row["source"]
    parted, verdict = decode["first_divergence"], decode["verdict"]
    if row["precision"] != "fp32" and verdict == "divergent":
        return None
    judged = source is not None and source["judged"]
    differs = source["first_difference"] if judged else None
    blame = source["attribution"] if judged else None
    if blame is None and parted is not None:
        blame = "runtime"
    if parted is not None and (blame == "runtime" or differs is None):
        return blame, (
            f"{verdict} at {parted['index']}: oracle {parted['oracle_token']}, "
            f"runtime {parted['candidate_token']}, margin {parted['oracle_margin']:.2g}"
        )
    return None if differs is None else (blame or "unknown", _source_evidence(differs, blame))


def _source_evidence(parted: Mapping[str, Any], blame: str | None) -> str:
    margin = parted["source_margin"]
    if blame is None:
        return f"token {parted['index']}: the source model puts both within {margin:.1g} of each other"
    behind = "is not among its five largest" if margin is None else f"is {margin:.2g} behind"
    return (
        f"token {parted['index']} of prompt {parted['prompt'] + 1}: source model {parted['source_token']}, "
        f"oracle and runtime {parted['oracle_token']}, which {behind}"
    )


def _configuration(row: Mapping[str, Any]) -> tuple[str, str] | None:
    declared = row["configuration"]
    if declared is None or declared["agrees"]:
        return None
    ports = ", ".join(declared["differs"])
    said = declared["error"] or (f"{ports} declared otherwise" if ports else "declares no ports")
    return "us", f"{', '.join(declared['files'])}: {said}"


def _layers(row: Mapping[str, Any]) -> tuple[str, str] | None:
    layers = row["layers"]
    if layers is None or layers["agrees"]:
        return None
    return "us", f"layers with a cache: graph {layers['graph']}, source model {layers['source']}"


def _peer(row: Mapping[str, Any]) -> tuple[str, str] | None:
    peer = row["peer"]
    if peer is None or peer["agrees"] is not False:
        return None  # what it cannot load is not about this package's tokens
    return "unknown", f"{peer['engine']} generates other tokens than our loop"


@cache
def _findings() -> Sequence[Mapping[str, str]]:
    document = tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))
    return list(document.get("finding", ()))


def _is_about(finding: Mapping[str, str], row: Mapping[str, Any], evidence: str) -> bool:
    return (
        finding["exporter"] == row["exporter"]
        and fnmatch.fnmatchcase(row["package"], finding["package"])
        and finding["says"] in evidence
    )
