"""Write reports so that a reader never sees half of one."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.events import CheckFinished, CheckStarted, Event, PromptJudged
from harness.report.document import ParityDocument

__all__ = ["ReportWriter", "to_json_line", "write_json_atomically"]


def to_json_line(document: Mapping[str, Any]) -> str:
    """One line of JSON without NaN or infinity.

    Raises:
        ValueError: the document holds a number that JSON cannot carry.
    """
    return json.dumps(document, ensure_ascii=False, allow_nan=False)


def write_json_atomically(path: Path, document: Mapping[str, Any]) -> None:
    """Replace `path` by the document, indented, in one step: a reader sees the old file or the new.

    Raises:
        OSError: the folder cannot be written.
    """
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(draft).chmod(0o644)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


class ReportWriter:
    """An event sink that keeps `parity.json` in the report folder up to date, prompt by prompt.

    The folder is made when the check starts decoding, not before.
    """

    def __init__(self, folder: Path, document: ParityDocument) -> None:
        """`document` must receive each event before this sink does."""
        self._folder = folder
        self._document = document
        self._begun = False

    @property
    def path(self) -> Path | None:
        """The report, None as long as nothing has been written."""
        return self._folder / "parity.json" if self._begun else None

    def __call__(self, event: Event) -> None:
        """Write where the event changes what a reader wants to know.

        Raises:
            InputError: the report folder cannot be made or written.
        """
        if isinstance(event, CheckStarted):
            self._begun = True
        if self._begun and isinstance(event, CheckStarted | PromptJudged | CheckFinished):
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_json_atomically(self._folder / "parity.json", self._document.mapping())
            except OSError as error:
                raise InputError(
                    f"{self._folder}: the report cannot be written: {error.strerror or error}.",
                    next_action="Choose another folder with --report-dir.",
                ) from error
