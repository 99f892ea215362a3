"""What one check found, as plain data for reports of pytest, and what can run here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.pytest_plugin.settings import MODEL_DIR, folder_named_by, gate_of
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
        gates: what it went through of what can be required: engines that ran, by name, and `cuda` where
            something ran on a GPU; `model` where the package is one of `--parity-model-dir`.
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
    gates: tuple[str, ...] = ()
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
        providers = (document["candidate"]["placement"] or {}).get("providers", {})
        return cls(
            verdict=_outcome(document),
            package=package,
            candidate=_engine(sides[0]),
            placement=", ".join(providers),
            oracle=_engine(sides[1]),
            gates=tuple(sorted(_gates(document, providers))),
            prompts=f"{sum(p['verdict'] == 'identical' for p in prompts)}/{len(prompts)}",
            parts_at=f"{parted[0][0]}:{parted[0][1]['index']}" if parted else "",
            margin="" if margin is None else f"{margin:.4f}",
            report=str(report or ""),
            model_sha256=document["model"]["sha256"],
        )

    def properties(self) -> Iterator[tuple[str, object]]:
        """For `user_properties` of a test, from where JUnit XML has them."""
        for name, value in asdict(self).items():
            if value and name != "gates":
                yield f"parity_{name}", value


def note(item: pytest.Item, finding: Finding) -> None:
    """Keep what a check in this test found."""
    folder = folder_named_by(MODEL_DIR, item.config)
    if (
        finding.gates
        and folder is not None
        and Path(finding.package).resolve().is_relative_to(folder.resolve())
    ):
        finding = replace(finding, gates=(*finding.gates, "model"))
    item.stash.setdefault(FINDINGS, []).append(asdict(finding))
    item.user_properties.extend(finding.properties())


def usable_engines() -> list[str]:
    """What can run here and what cannot, for people."""
    from importlib.metadata import version

    from harness.engines.registry import installed_engines
    from harness.report.plain import visible

    states = {engine.name: engine.availability() for engine in installed_engines()}
    usable = [
        f"{name} {state.version or ''}".strip() + (f" on {state.placement}" if state.placement else "")
        for name, state in states.items()
        if state.usable
    ]
    lines = [f"onnx-parity {version('onnx-parity')}, usable engines: {', '.join(usable) or 'none'}"]
    lines += [
        f"onnx-parity: {name} is not usable: {state.reason}"
        for name, state in states.items()
        if not state.usable
    ]
    return [visible(line) for line in lines]


def _outcome(document: Mapping[str, Any]) -> str:
    if document["verdict"] is not None:
        return str(document["verdict"])
    if document["refusal"] is not None:
        return f"refused {document['refusal']['code']}"
    return "unavailable" if document["exit_code"] == 5 else "not checked"


def _gates(document: Mapping[str, Any], providers: Mapping[str, Any]) -> set[str]:
    """What ran, as gates; a candidate ran on a GPU where it placed nodes there, whatever it is called."""
    candidate, *others = (document[side] for side in ("candidate", "oracle", "source"))
    gates = {gate_of(side["engine"]) for side in others if side and side["version"]}
    if candidate["version"]:
        name = gate_of(candidate["engine"])
        on_gpu = any("cuda" in provider.lower() and nodes for provider, nodes in providers.items())
        gates |= {"cuda"} if on_gpu else set()
        gates |= {name} - {"cuda"}
    return gates


def _engine(side: Mapping[str, Any]) -> str:
    return f"{side['engine']} {side['version'] or ''}".strip()
