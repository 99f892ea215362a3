"""Write reports so that a reader never sees half of one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from harness.errors import InputError
from harness.events import CheckFinished, CheckStarted, PromptJudged
from harness.report.replacing import replacing

__all__ = ["Document", "ReportWriter", "write_json_atomically"]


class Document(Protocol):
    """A report of what has happened so far."""

    def mapping(self) -> Mapping[str, Any]:
        """It as plain data."""


def write_json_atomically(path: Path, document: Mapping[str, Any]) -> None:
    """Replace `path` by the document, indented, in one step: a reader sees the old file or the new.

    Raises:
        OSError: the folder cannot be written.
    """
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    if not _is_unicode(text):  # file names may hold bytes that are no text; JSON escapes those
        text = json.dumps(document, ensure_ascii=True, allow_nan=False, indent=1) + "\n"
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


class ReportWriter:
    """An event sink that keeps a report up to date in its folder: that of a check prompt by prompt.

    The folder is made when the check starts decoding, not before.
    """

    def __init__(
        self,
        folder: Path,
        document: Document,
        *,
        fresh: bool = False,
        name: str = "parity.json",
        events: tuple[type, ...] = (CheckStarted, PromptJudged, CheckFinished),
    ) -> None:
        """Write into `folder`.

        Args:
            folder: where the report goes; made with its parents.
            document: must receive each event before this sink does.
            fresh: take a folder that nobody else has: where `folder` exists, one with a number behind
                its name.
            name: of the file.
            events: at which kinds of event to write; the first kind begins the report.
        """
        self._folder = folder
        self._document = document
        self._fresh = fresh
        self._name = name
        self._events = events
        self._begun = False

    @property
    def path(self) -> Path | None:
        """The report, None as long as nothing has been written."""
        return self._folder / self._name if self._begun else None

    def __call__(self, event: object) -> None:
        """Write where the event changes what a reader wants to know.

        Raises:
            InputError: the report folder cannot be made or written.
        """
        if not (isinstance(event, self._events[0]) or self._begun):
            return
        if isinstance(event, self._events):
            try:
                if not self._begun and self._fresh:
                    self._folder = _new_folder(self._folder)
                self._begun = True
                self._folder.mkdir(parents=True, exist_ok=True)
                write_json_atomically(self._folder / self._name, self._document.mapping())
            except OSError as error:
                raise InputError(
                    f"{self._folder}: the report cannot be written: {error.strerror or error}.",
                    next_action="Choose another folder with --report-dir.",
                ) from error


def _new_folder(wanted: Path) -> Path:
    """Make `wanted`, or the first of `wanted-2`, `wanted-3`, ... that is not there.

    Of several processes each gets a folder of its own.
    """
    wanted.parent.mkdir(parents=True, exist_ok=True)
    folder, number = wanted, 1
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")
        else:
            return folder


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
