"""What one check found, as plain data for reports of pytest, and what can run here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.pytest_plugin.summary import FINDINGS

if TYPE_CHECKING:
    import pytest

__all__ = ["Finding", "note", "usable_engines"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check, in words for tables and for properties of JUnit; empty where there is nothing to say.

    Attributes:
        verdict: of the report; or `refused` with the code, `unavailable`, or `not checked`.
        package: as the test named it.
        candidate: engine with version.
        placement: providers that ran its nodes.
        oracle: engine with version.
        engines: names of both, and of that of a source model, where they ran.
        prompts: how many are identical, and how many there are.
        parts_at: prompt and token where they part first.
        margin: the oracle's there, or its smallest anywhere.
        report: the file.
        model_sha256: of the model.
    """

    verdict: str
    package: str
    candidate: str = ""
    placement: str = ""
    oracle: str = ""
    engines: tuple[str, ...] = ()
    prompts: str = ""
    parts_at: str = ""
    margin: str = ""
    report: str = ""
    model_sha256: str = ""

    @classmethod
    def of(cls, document: Mapping[str, Any], *, package: str, report: Path | None) -> Finding:
        """What a document of the command says."""
        if document["model"] is None:
            return cls(_outcome(document), package)
        prompts = document["prompts"]
        parted = [(n, p["first_divergence"]) for n, p in enumerate(prompts, 1) if p["first_divergence"]]
        margins = [p["min_margin"] for p in prompts if p["min_margin"] is not None]
        margin = parted[0][1]["oracle_margin"] if parted else min(margins, default=None)
        sides = [document["candidate"], document["oracle"]]
        ran = [side for side in (*sides, document["source"]) if side and side["version"]]
        placement = document["candidate"]["placement"] or {}
        return cls(
            verdict=_outcome(document),
            package=package,
            candidate=_engine(sides[0]),
            placement=", ".join(placement.get("providers", {})),
            oracle=_engine(sides[1]),
            engines=tuple(side["engine"] for side in ran),
            prompts=f"{sum(p['verdict'] == 'identical' for p in prompts)}/{len(prompts)}",
            parts_at=f"{parted[0][0]}:{parted[0][1]['index']}" if parted else "",
            margin="" if margin is None else f"{margin:.4f}",
            report=str(report or ""),
            model_sha256=document["model"]["sha256"],
        )

    def properties(self) -> Iterator[tuple[str, object]]:
        """For `user_properties` of a test, from where JUnit XML has them."""
        for name, value in asdict(self).items():
            if value and name != "engines":
                yield f"parity_{name}", value


def note(item: pytest.Item, finding: Finding) -> None:
    """Keep what a check in this test found."""
    item.stash.setdefault(FINDINGS, []).append(asdict(finding))
    item.user_properties.extend(finding.properties())


def usable_engines() -> list[str]:
    """What can run here and what cannot, for people."""
    from importlib.metadata import version

    from harness.engines.registry import installed_engines

    states = {engine.name: engine.availability() for engine in installed_engines()}
    usable = [
        f"{name} {state.version or ''}".strip() + (f" on {state.placement}" if state.placement else "")
        for name, state in states.items()
        if state.usable
    ]
    lines = [f"onnx-parity {version('onnx-parity')}, usable engines: {', '.join(usable) or 'none'}"]
    return lines + [
        f"onnx-parity: {name} is not usable: {state.reason}"
        for name, state in states.items()
        if not state.usable
    ]


def _outcome(document: Mapping[str, Any]) -> str:
    if document["verdict"] is not None:
        return str(document["verdict"])
    if document["refusal"] is not None:
        return f"refused {document['refusal']['code']}"
    return "unavailable" if document["exit_code"] == 5 else "not checked"


def _engine(side: Mapping[str, Any]) -> str:
    return f"{side['engine']} {side['version'] or ''}".strip()
