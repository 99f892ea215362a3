"""What a failed check says in a test report: what was found, the evidence, and how to run it again."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.cli.source import find_package
from harness.decode.prompts import decode_tokens
from harness.errors import ParityError
from harness.report.console import render_report
from harness.report.plain import legible

__all__ = ["explain"]

_WIDTH = 110


def explain(document: Mapping[str, Any], *, package: str, report: Path, command: str) -> str:
    """The message of a test that fails.

    Args:
        document: `onnx-parity/parity/1`, with any outcome but exit code 0.
        package: as the test named it.
        report: where it was written, if decoding began.
        command: does the same again.
    """
    raw, document = document, legible(document)
    parts = [f"{package}: {_headline(document)}"]
    refusal, error = document["refusal"], document["error"]
    if refusal is not None:
        parts += [f"  port {port}" for port in refusal["ports"]]
        if refusal["also"]:
            parts.append(f"also: {', '.join(refusal['also'])}")
    elif error is not None:
        parts.append(error["next"])
    if document["model"] is not None:
        parts += ["", _rendered(raw, package), f"report: {report}"]
    return "\n".join([*parts, f"again:  {command}"])


def _headline(document: Mapping[str, Any]) -> str:
    refusal, error, verdict = document["refusal"], document["error"], document["verdict"]
    if refusal is not None:
        return f"refused, {refusal['code']}: {refusal['message']}"
    if error is not None:
        return f"{verdict or 'not checked'}: {error['message']}"
    failure = document["candidate"]["failure"]
    if failure is not None:
        return f"{verdict}: {failure['message']}"
    for number, prompt in enumerate(document["prompts"], 1):
        found = prompt["first_divergence"]
        if found is not None and prompt["verdict"] == verdict:
            margin = found["oracle_margin"]
            return (
                f"{verdict}: prompt {number} parts at generated token {found['index']}: "
                f"candidate {found['candidate_token']}, oracle {found['oracle_token']}"
                + ("" if margin is None else f" by {margin:.4f}")
            )
    blamed = document["attribution"]
    return str(verdict) if blamed is None else f"{verdict}: the source model blames the {blamed}"


def _rendered(document: Mapping[str, Any], package: str) -> str:
    """What the command prints."""
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None, force_terminal=False).print(
        render_report(document, token_text=_token_text(package))
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _token_text(name: str) -> Callable[[int], str] | None:
    """Shows tokens as text; None where the package has no tokenizer."""
    try:
        package, _ = find_package(name)
        if package.tokenizer is None:
            return None
        decode_tokens(package.folder, (0,))
    except ParityError:
        return None
    return lambda token: decode_tokens(package.folder, (token,))
