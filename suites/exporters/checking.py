"""Check what the exporters built: runs in our environment, through the command that users have.

For each package: the topology is derived and compared with what the exporter's own configuration declares and
with the layers of the source model's cache; ONNX Runtime decodes it and the oracle verifies every token; and
the tokens of the source model, recorded where it was built, are the third witness.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from harness.cli.app import app
from harness.decode.trace import Trace
from harness.engines.base import SessionInfo, TopLogits
from harness.events import FirstDivergence, SourceDivergence
from harness.parity.attribution import attribute as attribute_tokens
from harness.parity.attribution import compare_with_source, overall_attribution
from harness.parity.compare import TokenComparison
from harness.parity.verdict import Verdict
from suites.exporters.attribution import attribute
from suites.exporters.recipes import EXPORTERS

__all__ = ["check", "check_package", "decode_facts", "source_facts"]

_CANDIDATE = "ort-cpu"
_FEATURES = ("input_features", "audio_features")
"""What exporters call the features that an encoder hears."""
_ROUNDING = 2e-5
"""What float32 may make of logits, in parts of the largest: 170 times its spacing. A record shows no more."""
_SIDECARS = ("genai_config.json", "inference_metadata.yaml")


def check(folder: Path, *, only: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The rows of the matrix: one for each record below the build folder, in the exporters' order.

    Args:
        folder: the build folder.
        only: names of packages; empty for all.
    """
    for exporter in EXPORTERS:
        for path in sorted((folder / exporter / "records").glob("*.json")):
            if not only or path.stem in only:
                row = check_package(folder / exporter, path.stem)
                ended = f"{row['attribution']}: {row['evidence']}" if row["attribution"] else "agrees"
                print(f"{exporter} {path.stem}: {ended:.160}", file=sys.stderr)  # noqa: T201 (progress)
                yield row


def check_package(folder: Path, name: str) -> dict[str, Any]:
    """The row of one package.

    Args:
        folder: what one exporter built.
        name: of the package.
    """
    record = json.loads((folder / "records" / f"{name}.json").read_text(encoding="utf-8"))
    recipe = record["recipe"]
    package, source = folder / "packages" / name, folder / "sources" / recipe["source"]["name"]
    row: dict[str, Any] = {
        "package": name,
        "exporter": recipe["exporter"],
        "architecture": recipe["source"]["name"],
        "family": recipe["source"]["family"],
        "variant": recipe["variant"],
        "precision": recipe["precision"],
        "planted": recipe["options"].get("fault"),
        "distributions": record["distributions"],
        "build_error": record["error"],
        "configuration": None,
        "topology": None,
        "layers": None,
        "decode": None,
        "source": None,
        "peer": None,
    }
    if record["error"] is None:
        witness = json.loads((source / "witness.json").read_text(encoding="utf-8"))
        derived = _derive(package, "--ignore-declared")
        row["topology"] = _topology(derived)
        row["configuration"] = _configuration(package, derived)
        row["layers"] = _layers(derived, witness["cache"])
        peer = _peer_record(folder, name)
        report = _decode(package, source, witness, _tokens(witness, peer))
        row["decode"] = decode_facts(report)
        row["source"] = source_facts(report, witness, precision=recipe["precision"])
        row["peer"] = _peer(report, peer)
    row["attribution"], row["evidence"] = attribute(row)
    return row


def _run(*arguments: str) -> dict[str, Any]:
    """One call of the command, and the document that it prints."""
    result = CliRunner().invoke(app, [*arguments, "--json"])
    lines = result.stdout.splitlines()
    if not lines:
        shown = "".join(result.stderr.splitlines()[-1:]) or repr(result.exception)
        return {"error": {"message": f"no document: {shown}", "next": ""}, "exit_code": result.exit_code}
    return dict(json.loads(lines[-1]))


def _derive(package: Path, *options: str) -> dict[str, Any]:
    return _run("derive", str(package), *options)


def _topology(document: Mapping[str, Any]) -> dict[str, Any]:
    io = document.get("io") or {}
    return {
        "outcome": document.get("outcome"),
        "kv_inputs": len(io.get("kv_inputs") or ()),
        "state_pairs": len(io.get("state_pairs") or ()),
        "static_cache": bool(io.get("static_cache")),
        "error": _error(document),
    }


def _error(document: Mapping[str, Any]) -> str | None:
    """The one line of what went wrong; None where nothing did."""
    refusal, error = document.get("refusal"), document.get("error")
    if refusal:
        return f"{refusal['code']}: {refusal['message']}"
    return str(error["message"]) if error else None


def _configuration(package: Path, derived: Mapping[str, Any]) -> dict[str, Any] | None:
    """Whether the exporter's own configuration gives every port the role that was derived for it.

    None where the exporter wrote none.
    """
    files = [name for name in _SIDECARS if (package / name).is_file()]
    if not files:
        return None
    declared = _derive(package)
    differs = {name for (_, name), _ in {*_roles(declared).items()} ^ {*_roles(derived).items()}}
    named = [port for port in declared.get("ports") or () if any(file in port["because"] for file in files)]
    whole = declared.get("outcome") == "declared"
    return {
        "files": files,
        "outcome": declared.get("outcome"),
        # A part of them is enough: the rest is derived with what is declared, and must come out the same.
        "ports": len(declared["ports"]) if whole else len(named),
        "agrees": not differs and (whole or bool(named)),
        "differs": sorted(differs)[:8],
        "error": _error(declared),
    }


def _roles(document: Mapping[str, Any]) -> dict[tuple[str, str], tuple[str, str | None]]:
    ports: Sequence[Mapping[str, Any]] = document.get("ports") or ()
    return {(port["direction"], port["name"]): (port["role"], port["pair"]) for port in ports}


def _layers(derived: Mapping[str, Any], cache: Mapping[str, list[int]] | None) -> dict[str, Any] | None:
    """How many layers keep keys and values, and how many keep states: in the graph and in the source model.

    None where the source model keeps its cache in a form of its own.
    """
    if cache is None or derived.get("outcome") != "derived":
        return None
    ports = [port for port in derived["ports"] if port["direction"] == "input"]
    graph = {
        "kv": len({port["layer"] for port in ports if port["role"] in {"kv_key", "kv_value", "kv_fused"}}),
        "states": len({port["layer"] for port in ports if port["role"] == "state"}),
    }
    wanted = {kind: len(layers) for kind, layers in cache.items()}
    return {"graph": graph, "source": wanted, "agrees": graph == wanted}


def _decode(package: Path, source: Path, witness: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """The report of a check of `tokens` new tokens a prompt, over the prompts of the witness."""
    prompts = [f"--prompt-ids={','.join(map(str, trace['prompt_ids']))}" for trace in witness["prompts"]]
    options = ["--candidate", _CANDIDATE, "--max-new-tokens", str(tokens), *prompts]
    document: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        options += ["--report-dir", str(Path(folder, "report"))]
        for number, arrays in enumerate(_encoder_inputs(source)):
            given = []
            if arrays:
                path = Path(folder, f"inputs-{number}.npz")
                np.savez(path, **arrays)
                given = ["--inputs", str(path)]
            document = _run("check", str(package), *options, *given)
            if document.get("exit_code") == 2 and "--inputs" not in str(_error(document)):
                # What is declared cannot even be read: that is in the row, and here is the rest.
                document = _run("check", str(package), *options, *given, "--ignore-declared")
            if document.get("exit_code") != 2 or "--inputs" not in str(_error(document)):
                break
    return document


def _encoder_inputs(source: Path) -> list[dict[str, Any]]:
    """What an encoder hears under each name that exporters have for it, and last what it would say.

    A package that names no encoder gets the hidden states of the source model's. One empty mapping where the
    source model hears nothing.
    """
    path = source / "inputs.npz"
    if not path.is_file():
        return [{}]
    with np.load(path) as arrays:
        features, states = arrays["input_features"], arrays["encoder_hidden_states"]
    return [*({name: features} for name in _FEATURES), {"encoder_hidden_states": states}]


def decode_facts(report: Mapping[str, Any]) -> dict[str, Any]:
    """What a report of `check` says, as far as the matrix goes into it."""
    prompts, candidate = report.get("prompts") or [], report.get("candidate") or {}
    failures = [p["failure"] for p in prompts if p.get("failure")] or [candidate.get("failure")]
    divergence = next((p["first_divergence"] for p in prompts if p.get("first_divergence")), None)
    margins = [p["min_margin"] for p in prompts if p.get("min_margin") is not None]
    return {
        "engine": " ".join(filter(None, (candidate.get("engine"), candidate.get("version")))) or _CANDIDATE,
        "verdict": report.get("verdict"),
        "exit_code": report.get("exit_code"),
        "tokens": sum(len(p["candidate_ids"]) for p in prompts),
        "min_margin": min(margins, default=None),
        "first_divergence": divergence,
        "failure": failures[0],
        "error": _error(report),
    }


def source_facts(
    report: Mapping[str, Any], witness: Mapping[str, Any], *, precision: str
) -> dict[str, Any] | None:
    """Where the source model's own tokens part from the oracle's, and who made the tokens differ.

    None where the oracle decoded nothing. `check --source` asks the model along the candidate's tokens; here
    its own are recorded, and by the same rules they count as far as both have the same tokens before them. A
    package of another precision is another model: what is said of it blames nobody.
    """
    prompts = report.get("prompts") or []
    if not prompts or not all(p["oracle_ids"] for p in prompts):
        return None
    parted, blamed = [], []
    for number, (prompt, trace) in enumerate(zip(prompts, witness["prompts"], strict=True)):
        source = _trace(trace["prompt_ids"], trace["token_ids"], trace["top"])
        found = compare_with_source(
            _oracle_trace(prompt, trace), source, bands=[_ROUNDING * abs(top[0][1]) for top in trace["top"]]
        )
        blamed.append(attribute_tokens(_comparison(prompt), found))
        if found.first_divergence is not None:
            within = found.verdict is not Verdict.DIVERGENT
            parted.append((within, _first_difference(number, found.first_divergence)))
    return {
        "engine": witness["engine"],
        "agrees": not parted,
        "judged": precision == "fp32",
        "attribution": overall_attribution(blamed) if precision == "fp32" else None,
        "tokens": sum(len(trace["token_ids"]) for trace in witness["prompts"]),
        "min_margin": min(step[0][1] - step[1][1] for trace in witness["prompts"] for step in trace["top"]),
        # What rounding may explain hides nothing behind it.
        "first_difference": min(parted, key=lambda each: each[0])[1] if parted else None,
    }


def _oracle_trace(prompt: Mapping[str, Any], trace: Mapping[str, Any]) -> Trace:
    """The oracle along the candidate's tokens, by a report: its choices, and its logits where they part."""
    tops: list[Any] = [[[token, 0.0]] for token in prompt["oracle_forced_ids"]]
    if parted := prompt["first_divergence"]:
        tops[parted["index"]] = parted["oracle_top"]
    return _trace(trace["prompt_ids"], prompt["candidate_ids"], tops)


def _trace(prompt_ids: Sequence[int], token_ids: Sequence[int], tops: Sequence[Any]) -> Trace:
    steps = (TopLogits(*map(tuple, zip(*top, strict=True))) for top in tops)
    return Trace(tuple(prompt_ids), tuple(token_ids), tuple(steps), 0.0, SessionInfo("recorded", ""))


def _comparison(prompt: Mapping[str, Any]) -> TokenComparison:
    """What a report says of candidate and oracle."""
    parted = prompt["first_divergence"]
    return TokenComparison(
        Verdict(prompt["verdict"]),
        tuple(prompt["oracle_ids"]),
        tuple(prompt["oracle_forced_ids"]),
        prompt["min_margin"],
        None if parted is None else FirstDivergence(**parted),
    )


def _first_difference(prompt: int, parted: SourceDivergence) -> dict[str, Any]:
    logits = dict(parted.source_top)
    largest = logits[parted.source_token]
    theirs = logits.get(parted.oracle_token)
    return {
        "prompt": prompt,
        "index": parted.index,
        "source_token": parted.source_token,
        "oracle_token": parted.oracle_token,
        # How far the source model puts the oracle's token behind its own; None: further than its top.
        "source_margin": None if theirs is None else largest - theirs,
        "source_logit": abs(largest),
    }


def _peer_record(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / "peers" / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _tokens(witness: Mapping[str, Any], peer: Mapping[str, Any] | None) -> int:
    """New tokens to decode: as many as the longest of the other witnesses has."""
    traces = [*witness["prompts"], *((peer or {}).get("prompts") or ())]
    return max(len(trace["token_ids"]) for trace in traces)


def _peer(report: Mapping[str, Any], peer: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Whether onnxruntime-genai's own loop generated what ours did on ONNX Runtime, up to where it stopped.

    None where it was not tried, or where ours decoded nothing.
    """
    prompts = report.get("prompts") or []
    if peer is None or not prompts or not all(p["candidate_ids"] for p in prompts):
        return None
    agrees, tokens = None, 0
    if peer["prompts"] is not None:
        pairs = zip(prompts, peer["prompts"], strict=True)
        agrees = all(
            ours["candidate_ids"][: len(its["token_ids"])] == its["token_ids"] for ours, its in pairs
        )
        tokens = min(len(trace["token_ids"]) for trace in peer["prompts"])
    return {
        "engine": peer["engine"],
        "agrees": agrees,
        "tokens": tokens,
        "error": peer["error"],
        # Without the configuration that `derive --write` wrote, where it was given one.
        "before": peer.get("before"),
    }
