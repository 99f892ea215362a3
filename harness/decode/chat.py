"""From a conversation to the text that a model was trained on: the chat template of its package.

A template is a program by whoever made the package. jinja2's sandbox (`harness.decode.chat_template`) keeps
it from everything but the conversation and the special tokens, and not from running for ever or filling the
memory. So the sandbox has a process of its own, with a limit of time, and one of memory where there is one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.json_keys import unique_keys
from harness.package.reading import is_there

__all__ = ["render_chats"]

_CONFIG = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_WITHOUT = "Leave --chat out, or add the model's tokenizer_config.json."

_SECONDS = 20.0
"""What rendering may take. It takes milliseconds: the rest is for a busy machine to start a process."""
_SECONDS_EACH = 0.1
"""What each conversation may take besides."""
_MEMORY = 1 << 28
"""Bytes of address space that the process may take, where the system keeps to it. It takes a sixth of it."""
_MEMORY_EACH = 32
"""Bytes that it may take besides for each that it is given."""
_CHARACTERS = 1_000_000
"""How much longer a text may be than twice its conversation. No model reads more tokens than that."""

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from harness.decode.chat_template import main; main()"
)
"""What the process runs. It finds modules where its parent does."""


def render_chats(package_folder: Path, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """The text of each conversation that is for the assistant to go on, by the package's chat template.

    The template is that of `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`: one text,
    or a list of named ones, of which `default` is taken.

    Args:
        package_folder: where these files are.
        conversations: of each its messages, mappings with `role` and `content`, in order.

    Raises:
        InputError: there is no template, or it cannot be parsed, or it fails on these messages, or takes too
            much time or memory, or gives a text without end.
    """
    config = _config(package_folder)
    source = _template(package_folder, config)
    special = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
    given = {
        "template": source,
        "special": special,
        "conversations": [list(messages) for messages in conversations],
    }
    size = len(json.dumps(given))
    limits = {
        "seconds": _SECONDS + _SECONDS_EACH * len(conversations),
        "memory": _MEMORY + _MEMORY_EACH * size,
        "characters": _CHARACTERS,
    }
    answer = _asked({**given, **limits}, limits["seconds"])
    if isinstance(answer, str):
        raise InputError(
            f"{package_folder}: the chat template {answer}.",
            next_action="Leave --chat out and give the whole prompt as text, or correct the template.",
        )
    return answer


def _asked(task: Mapping[str, Any], seconds: float) -> list[str] | str:
    """The texts that the process gives; what is wrong with the template, where it gives none."""
    command = [sys.executable, "-P", "-c", _BOOT, json.dumps([str(place) for place in sys.path])]
    try:
        ended = subprocess.run(
            command, input=json.dumps(task).encode(), capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"takes more than {seconds:g} seconds"
    except OSError as error:
        return f"runs in a process of its own, and none could be started: {error.strerror or error}"
    try:
        answer = json.loads(ended.stdout)
    except ValueError:
        last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"ended its process with {ended.returncode}" + (f": {last:.200}" if last else "")
    return str(answer["failed"]) if "failed" in answer else [str(text) for text in answer["texts"]]


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / _CONFIG
    if not is_there(path):
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
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
