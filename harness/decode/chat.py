"""From a conversation to the text that a model was trained on: the chat template of its package.

A template is a program by whoever made the package: it runs in jinja2's sandbox, sees the conversation and
the special tokens, and nothing else. Whitespace, the filter `tojson` and the statements `break`, `continue`
and `generation` are as the templates of `tokenizer_config.json` expect them; no template is told the date,
so that a prompt is the same every day.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from harness.errors import InputError
from harness.package.reading import is_there

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser

__all__ = ["render_chat"]

_CONFIG = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_WITHOUT = "Leave --chat out, or add the model's tokenizer_config.json."


def render_chat(package_folder: Path, messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of a conversation that is for the assistant to go on, by the package's chat template.

    The template is that of `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`: one text,
    or a list of named ones, of which `default` is taken.

    Args:
        package_folder: where these files are.
        messages: mappings with `role` and `content`, in order.

    Raises:
        InputError: there is no template, or it cannot be parsed, or it fails on these messages.
    """
    config = _config(package_folder)
    source = _template(package_folder, config)
    special = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
    try:
        rendered = _compile(source).render(messages=list(messages), add_generation_prompt=True, **special)
    except Exception as error:  # a template is a program: it may raise whatever it likes
        detail = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{package_folder}: the chat template fails: {detail:.200}.",
            next_action="Leave --chat out and give the whole prompt as text, or correct the template.",
        ) from error
    return str(rendered)


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / _CONFIG
    if not is_there(path):
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON: {error}.", next_action=_WITHOUT) from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: holds a {type(config).__name__}, not a mapping.", next_action=_WITHOUT)
    return config


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / _TEMPLATE_FILE
    if is_there(path):
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: not readable as text: {error}.", next_action=_WITHOUT) from error
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        what = "has no chat_template" if found is None else "has a chat_template that is no text"
        where = folder / _CONFIG if (folder / _CONFIG).is_file() else folder
        raise InputError(f"{where} {what}, so --chat has nothing to go by.", next_action=_WITHOUT)
    return found


def _token_text(token: object) -> str | None:
    """A special token stands as a text, or as a mapping with its `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _compile(source: str) -> Any:
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
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """Plain JSON: jinja2's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    """What templates call on a conversation that they do not take."""
    raise ValueError(message)
