"""The fixture `parity`: what `onnx-parity check` does, with its outcome as that of a test."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from harness.cli.app import run
from harness.cli.check import command
from harness.engines.registry import parse_engine
from harness.pytest_plugin.findings import Finding, note
from harness.pytest_plugin.gates import missing
from harness.pytest_plugin.messages import explain
from harness.pytest_plugin.settings import CANDIDATE, gate_of, label

__all__ = ["OptionValue", "Parity", "ParityResult", "PromptValue"]

PromptValue: TypeAlias = str | Sequence[int]
"""A text, or token IDs."""

OptionValue: TypeAlias = bool | int | str | os.PathLike[str] | None
"""Of an option of `onnx-parity check`: True for one that takes no value; None and False leave it out."""

_UNAVAILABLE = 5
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class ParityResult:
    """What a check found.

    Attributes:
        verdict: such as `identical`.
        document: `onnx-parity/parity/1`, as `onnx-parity check --json` prints it.
        report: the file that holds it.
    """

    verdict: str
    document: Mapping[str, Any]
    report: Path


class Parity:
    """Checks packages in one test."""

    def __init__(self, item: pytest.Item, folder: Path) -> None:
        """`folder` is where the reports of the test `item` go."""
        self._item = item
        self._folder = folder
        self._count = 0

    def check(
        self,
        package: str | os.PathLike[str],
        *,
        candidate: str | None = None,
        oracle: str | None = None,
        prompts: PromptValue | Sequence[PromptValue] | os.PathLike[str] | None = None,
        **options: OptionValue,
    ) -> ParityResult:
        """Decode a package on a candidate engine, and every token must be the oracle's.

        The test fails, with what the command would say, on any verdict but `identical`, on a refused topology
        and on bad input. It is skipped where an engine that it needs is not available here; with
        `--parity-require` it fails then too.

        Args:
            package: a model directory, an `.onnx` file or a built-in name.
            candidate: engine under test with its options; by default that of `--parity-candidate`, else that
                of the command.
            oracle: the engine to trust; by default that of the command.
            prompts: a text, token IDs, several of them, or a file; by default those of the command.
            options: any other option of `onnx-parity check`, with underscores: `max_new_tokens=64`.
        """
        __tracebackhide__ = True
        _require_known(package, options)
        candidate = candidate or CANDIDATE.of(self._item.config)
        name = os.fspath(package)
        engines = {"candidate": candidate, "oracle": oracle}
        asked = _ordered(name, *_options(engines), *_prompts(prompts), *_options(options))
        self._count += 1
        folder = self._folder / f"{self._count}-{label(Path(name).name)}"
        kept = [] if options.get("report_dir") else [f"--report-dir={folder}"]
        document = _run([*kept, *asked])
        if document["exit_code"] == _INTERRUPTED:
            raise KeyboardInterrupt
        report = Path(str(options.get("report_dir") or folder)) / "parity.json"
        note(self._item, Finding.of(document, package=name, report=report if document["model"] else None))
        if document["exit_code"] == 0:
            return ParityResult(document["verdict"], document, report)
        if document["exit_code"] == _UNAVAILABLE:
            error = document["error"]
            missing(
                self._item, _unavailable(candidate, oracle, options), f"{error['message']} {error['next']}"
            )
        pytest.fail(
            explain(
                document, package=name, report=report, command=shlex.join(["onnx-parity", "check", *asked])
            ),
            pytrace=False,
        )


_OURS = frozenset({"json"})
"""Options of the command that the fixture gives itself."""


def _require_known(package: str | os.PathLike[str], options: Mapping[str, OptionValue]) -> None:
    """Fail a test that names what is no option of a check: the command would do something else."""
    __tracebackhide__ = True
    named = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    known = sorted(flag.removeprefix("--").replace("-", "_") for flag in named if flag.startswith("--"))
    for name in options:
        if name in _OURS or name not in known:
            raise pytest.fail.Exception(
                f"{package}: not checked: {name!r} is no option of a check. "
                f"They are: {', '.join(each for each in known if each not in _OURS)}.",
                pytrace=False,
            )


def _run(arguments: Sequence[str]) -> dict[str, Any]:
    """The document of the command, whose progress goes to standard error."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run(["check", "--json", *arguments])
    document: dict[str, Any] = json.loads(out.getvalue())
    return document


def _options(options: Mapping[str, OptionValue]) -> Iterator[str]:
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            yield flag
        elif value is not None and value is not False:
            yield f"{flag}={os.fspath(value) if isinstance(value, os.PathLike) else value}"


def _prompts(prompts: PromptValue | Sequence[PromptValue] | os.PathLike[str] | None) -> Iterator[str]:
    """A text or a sequence of numbers is one prompt, any other sequence several."""
    if prompts is None:
        return
    if isinstance(prompts, os.PathLike):
        yield f"--prompts={os.fspath(prompts)}"
        return
    several = [prompts] if isinstance(prompts, str) or not _holds_prompts(prompts) else list(prompts)
    for prompt in several:
        if isinstance(prompt, str):
            yield f"--prompt={prompt}"
        elif isinstance(prompt, Sequence):
            yield f"--prompt-ids={','.join(map(str, prompt))}"
        else:
            raise TypeError(f"prompts: {prompt!r} is neither a text nor a sequence of token IDs")


def _holds_prompts(prompts: Sequence[Any]) -> bool:
    return any(isinstance(each, str | Sequence) for each in prompts)


def _ordered(package: str, *options: str) -> list[str]:
    """The package first, so that no option that lacks its value takes it for one."""
    return [*options, "--", package] if package.startswith("-") else [package, *options]


def _unavailable(candidate: str | None, oracle: str | None, options: Mapping[str, OptionValue]) -> set[str]:
    """The gates of the engines that a check lacks; where no candidate is named, `ort-cpu` stands for all."""
    names = [candidate or "ort-cpu", oracle or "oracle"]
    if options.get("source"):
        names.append(str(options.get("source_engine") or "hf"))
    named = [parse_engine(text).engine for text in names]
    lacking = [engine for engine in named if not engine.availability().usable]
    return {gate_of(engine.name) for engine in lacking or named[:1]}
