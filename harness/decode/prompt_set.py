"""Sets of prompts in a file: JSON lines, one prompt each.

A line is an object with exactly one of `text`, `prompt_ids` (the fields of a report, so that a report's
prompts can be run again) and `messages`, a conversation for the package's chat template. Keys that begin
with `x-` are left alone, and so are empty lines.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from harness.errors import InputError

__all__ = ["Conversation", "PromptRequest", "read_prompts"]

_FORMS = ("text", "prompt_ids", "messages")
_PRIVATE = "x-"
_EXAMPLE = '{"text": "Once upon a time"}, {"prompt_ids": [1, 2]} or {"messages": [...]}'


@dataclass(frozen=True, slots=True)
class Conversation:
    """What was said, for the chat template: mappings with `role` and `content`."""

    messages: tuple[Mapping[str, Any], ...]


PromptRequest: TypeAlias = str | tuple[int, ...] | Conversation
"""A prompt as it is asked for: a text, token IDs, or a conversation."""


def read_prompts(path: Path) -> tuple[PromptRequest, ...]:
    """The prompts of a JSONL file, in order; at least one.

    Raises:
        InputError: the file cannot be read, has no prompt, or a line is not of the form above; the message
            names the line.
    """
    try:
        # Only a line feed ends a line: JSON may hold the other characters that text calls ends of lines.
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(
            f"--prompts: {path} cannot be read: {reason}.", next_action="Name a file of JSON lines."
        ) from error
    prompts = [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InputError(f"--prompts: {path} has no prompt.", next_action=f"Write lines such as {_EXAMPLE}.")
    return tuple(prompts)


def _prompt(line: str, place: str) -> PromptRequest:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _misfit(place, f"is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise _misfit(place, f"is a {type(entry).__name__}, not an object")
    for key in entry:
        if key not in _FORMS and not key.startswith(_PRIVATE):
            near = difflib.get_close_matches(key, _FORMS, n=1)
            raise _misfit(place, f"has the key {key!r:.60}" + (f"; did you mean {near[0]}?" if near else ""))
    given = [key for key in _FORMS if key in entry]
    if len(given) != 1:
        raise _misfit(place, f"has {' and '.join(given) or 'none'} of {', '.join(_FORMS)}")
    value = entry[given[0]]
    match given[0]:
        case "text" if isinstance(value, str):
            return value
        case "prompt_ids" if isinstance(value, list) and all(type(item) is int for item in value):
            return tuple(value)
        case "messages" if isinstance(value, list) and value and all(map(_is_message, value)):
            return Conversation(tuple(value))
    raise _misfit(place, f"has a value of {given[0]} that it cannot have: {value!r:.60}")


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _misfit(place: str, what: str) -> InputError:
    return InputError(f"--prompts: {place} {what}.", next_action=f"Write one prompt a line: {_EXAMPLE}.")
