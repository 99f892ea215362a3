"""A chat template in jinja2's sandbox, in a process that does nothing else: `harness.decode.chat` starts it.

A template sees the conversation and the special tokens, and nothing else. Whitespace, the filter `tojson` and
the statements `break`, `continue` and `generation` are as those of `tokenizer_config.json` expect them, and
there are no `tools` and no `documents`. It is always the same day, so that a prompt is the same every day.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2 import Template, nodes
    from jinja2.parser import Parser

__all__ = ["main"]

_Messages = Sequence[Mapping[str, Any]]

_TODAY = date(2024, 7, 26)
"""The day that templates are told: that which those of Llama 3.1 and later take where they are told none."""


class _EndlessError(Exception):
    """The text is longer than any prompt."""


def main() -> None:
    """Read a task from standard input, and write what comes of it to standard output.

    The task is a mapping: `template`, `special` tokens by name, `conversations`, the `characters` that a text
    may have more than twice its conversation, the bytes of `memory` that may be taken, and for how many
    `seconds` somebody waits. The answer has `texts`, or `failed`, which completes "the chat template".
    """
    task = json.load(sys.stdin.buffer)
    _limit(task["seconds"], task["memory"])
    try:
        template = _compiled(task["template"])
        answer: dict[str, Any] = {
            "texts": [
                _text(template, messages, task["special"], most=task["characters"])
                for messages in task["conversations"]
            ]
        }
    except MemoryError:
        answer = {"failed": f"takes more than {task['memory'] >> 20} MiB of memory"}
    except _EndlessError as error:
        answer = {"failed": str(error)}
    except Exception as error:  # a template is a program: it may raise whatever it likes
        detail = " ".join(str(error).split()) or type(error).__name__
        answer = {"failed": f"fails: {detail:.200}"}
    sys.stdout.buffer.write(json.dumps(answer).encode())


def _limit(seconds: float, memory: int) -> None:
    """Let nothing here take more, where the system has such limits.

    That of work is for when the parent is no more: otherwise it sees to the time itself.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    for which, most in ((resource.RLIMIT_CPU, 2 * math.ceil(seconds)), (resource.RLIMIT_AS, memory)):
        with contextlib.suppress(OSError, ValueError):  # it has no such limit, or a lower one
            resource.setrlimit(which, (most, most))


def _text(template: Template, messages: _Messages, special: Mapping[str, str], *, most: int) -> str:
    """The text of a conversation.

    Templates of models that see or hear take the content of a message as a list of parts, and some of them
    nothing else: what is said would not be in the text. To those it is given as a part.
    """
    said = messages[-1]["content"]
    said = said.strip() if isinstance(said, str) else ""
    most += 2 * len(json.dumps(messages, ensure_ascii=False))
    found: list[str | Exception] = []
    for form in (messages, [*map(_in_parts, messages)]):
        try:
            text = _rendered(template, form, special, most)
        except Exception as error:  # a template is a program: it may raise whatever it likes
            found.append(error)
        else:
            if said in text:
                return text
            found.append(text)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _rendered(template: Template, messages: _Messages, special: Mapping[str, str], most: int) -> str:
    pieces = []
    given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    for piece in template.generate(**given, **special):
        pieces.append(piece)
        most -= len(piece)
        if most < 0:
            raise _EndlessError("gives a text that is longer than any prompt")
    return "".join(pieces)


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": parts}


def _compiled(source: str) -> Template:
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant said, for training; here it is its content."""

        tags = {"generation"}  # noqa: RUF012 (the class declares a set, and nobody writes to it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """Plain JSON: jinja2's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    """What templates call on a conversation that they do not take."""
    raise ValueError(message)
