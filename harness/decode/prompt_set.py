"""Sets of prompts in a file: JSON lines, one prompt each.

A line is an object with exactly one of `text`, `prompt_ids` (the fields of a report, so that a report's
prompts can be run again) and `messages`, a conversation for the package's chat template. The content of each
message is a text, or a list of parts that are texts, which are put together. Keys that begin with `x-` are
left alone, and so are empty lines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from harness.errors import InputError, shown
from harness.json_keys import unique_keys

__all__ = ["Conversation", "PromptRequest", "read_prompts"]

_FORMS = ("text", "prompt_ids", "messages")
_PRIVATE = "x-"
_EXAMPLE = '{"text": "Once upon a time"}, {"prompt_ids": [1, 2]} or {"messages": [...]}'


@dataclass(frozen=True, slots=True)
class Conversation:
    """What was said, for the chat template: mappings with `role` and `content`, a text or null."""

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
        entry = json.loads(line, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise _misfit(place, f"cannot be read as JSON: {error}") from error
    if not isinstance(entry, dict):
        raise _misfit(place, f"is a {type(entry).__name__}, not an object")
    given = [key for key in _FORMS if key in entry]
    for key, value in entry.items():
        if key not in _FORMS and not key.startswith(_PRIVATE):
            meant = None if given else _form_of(value)
            hint = f"did you mean {meant}?" if meant else f"a key of your own begins with {_PRIVATE}"
            raise _misfit(place, f"has the key {key!r:.60}; {hint}")
    if len(given) != 1:
        raise _misfit(place, f"has {' and '.join(given) or 'none'} of {', '.join(_FORMS)}")
    value = entry[given[0]]
    if _form_of(value) != given[0]:
        raise _misfit(place, f"has a value of {given[0]} that it cannot have: {shown(value)}")
    match value:
        case str():
            return value
        case [int(), *_] | []:
            return tuple(value)
    return Conversation(tuple(_message(each, f"{place} message {n}") for n, each in enumerate(value, 1)))


def _form_of(value: object) -> str | None:
    """The key under which a value of this form stands; None for one that stands nowhere."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    if all(type(item) is int for item in value):
        return "prompt_ids"
    return "messages" if all(isinstance(item, dict) for item in value) else None


def _message(message: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """A message with its parts, where it has any, put together as templates do: with nothing between."""
    if not isinstance(message.get("role"), str):
        raise _misfit(place, "has no role, such as user")
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return {**message, "content": content}
    if not isinstance(content, list) or not content:
        raise _misfit(place, f"has no text as its content, but {shown(content)}")
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise _misfit(place, f"has {shown(part)} in its content, and text alone is decoded")
    return {**message, "content": "".join(part["text"] for part in content)}


def _misfit(place: str, what: str) -> InputError:
    return InputError(f"--prompts: {place} {what}.", next_action=f"Write one prompt a line: {_EXAMPLE}.")
