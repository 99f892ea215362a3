"""What `check` is to continue: from options and files to token IDs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.output import report_warning
from harness.decode.chat import render_chats
from harness.decode.prompt_set import Conversation, read_prompts
from harness.decode.prompts import check_prompt_ids, encode_prompt
from harness.errors import InputError

if TYPE_CHECKING:
    from harness.cli.planning import Conditioning
    from harness.decode.prompt_set import PromptRequest
    from harness.models.builtin import BuiltinPackage
    from harness.package import Package
    from harness.parity.check import Prompt

__all__ = ["PromptOptions", "check_texts", "encode_prompts", "requested_prompts"]

_DEFAULT_PROMPT = "The capital of France is"
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The options that say what to continue.

    Attributes:
        texts: of `--prompt`, in order.
        id_lists: of `--prompt-ids`, in order, as written.
        file: of `--prompts`; None where it is not given.
        chat: whether a text is what a user says in a conversation.
    """

    texts: tuple[str, ...] = ()
    id_lists: tuple[str, ...] = ()
    file: Path | None = None
    chat: bool = False


@dataclass(frozen=True, slots=True)
class _Templated:
    """The text of a conversation. The template has written every special token itself."""

    text: str


def requested_prompts(
    options: PromptOptions, package: Package, builtin: BuiltinPackage | None, *, conditioning: Conditioning
) -> tuple[PromptRequest, ...]:
    """What is asked for: texts, then ID lists, then those of the file; else what the package brings.

    A decoder that answers to an encoder's features needs no prompt: it begins with its prefix.

    Raises:
        InputError: an ID list or the file is not well formed; nothing is asked for and there is no default;
            or `--chat` is asked for where every prompt is token IDs.
    """
    asked: list[PromptRequest] = [*options.texts, *map(_parse_ids, options.id_lists)]
    if options.file is not None:
        asked += read_prompts(options.file)
    if not asked and builtin is not None:
        asked = list(builtin.prompts)
    if not asked and conditioning.prefix and not conditioning.takes_source:
        asked = [conditioning.prefix]
    if not asked:
        if package.tokenizer is None:
            raise InputError(
                f"{package.folder}: no prompt, and no tokenizer.json to encode the default one.",
                next_action="Give token IDs with --prompt-ids 1,2,3.",
            )
        asked = [_DEFAULT_PROMPT]
    if options.chat and all(isinstance(prompt, tuple) for prompt in asked):
        raise InputError(
            "--chat puts texts into the package's chat template, and every prompt here is token IDs.",
            next_action="Give texts with --prompt, or leave --chat out.",
        )
    return tuple(asked)


def encode_prompts(
    requests: tuple[PromptRequest, ...],
    package: Package,
    *,
    chat: bool,
    vocabulary: int | None,
    conditioning: Conditioning,
) -> tuple[Prompt, ...]:
    """The prompts as token IDs; the text of a conversation is that of the chat template.

    For a text encoder a prompt is the source, and the decoder is fed its prefix alone. Any other decoder
    with a prefix is fed that before a text; IDs are taken as they are.

    Args:
        requests: as `requested_prompts` gives them.
        package: brings the tokenizer and the template.
        chat: whether a text is what a user says in a conversation.
        vocabulary: how many IDs the decoder has; None where that is not known.
        conditioning: what the decoder goes by.

    Raises:
        InputError: a text cannot be encoded, an ID lies outside the vocabulary, or there is no template.
    """
    from harness.parity.check import Prompt

    conditioning.warn_of_what_is_not_forced(requests)
    if conditioning.takes_source and not conditioning.prefix:
        raise InputError(
            f"{package.folder}: no file of the package says with which token its decoder starts.",
            next_action="Add generation_config.json with decoder_start_token_id.",
        )
    prefix = check_prompt_ids(conditioning.prefix, vocabulary) if conditioning.prefix else ()
    prompts = []
    for request in _templated(requests, package, chat=chat):
        ids, text = _encoded(
            request,
            package,
            vocabulary=vocabulary,
            bare=bool(prefix and not conditioning.takes_source),
        )
        if conditioning.takes_source:
            source = check_prompt_ids(ids, None)
            prompts.append(Prompt(prefix, text, source, conditioning.source(source)))
        else:
            whole = ids if text is None else (*prefix, *ids)
            prompts.append(Prompt(check_prompt_ids(whole, vocabulary), text, extra=conditioning.feeds))
    return tuple(prompts)


def check_texts(
    prompts: Iterable[tuple[str | None, tuple[int, ...] | None]],
    package: Package,
    conditioning: Conditioning,
    *,
    of: str,
) -> list[str]:
    """See that each text of a file is the one of the token IDs beside it.

    A text was encoded by itself, or came out of a chat template with its special tokens, and may stand
    behind the prefix of its decoder. Where that cannot be seen it is said on standard error.

    Args:
        prompts: text and IDs of each; nothing is to be seen where one of them is None.
        package: brings the tokenizer.
        conditioning: has the prefix.
        of: names the file, in front of "contradicts itself".

    Returns:
        What was said, for a report.

    Raises:
        InputError: a text and its IDs contradict each other.
    """
    unchecked: dict[str, list[str]] = {}
    for number, (text, ids) in enumerate(prompts, 1):
        if text is None or ids is None:
            continue
        try:
            if package.tokenizer is None:
                raise InputError(f"{package.folder} has no tokenizer.json.", next_action="")
            found = {encode_prompt(package.folder, text, special_tokens=special) for special in (True, False)}
        except InputError as error:
            unchecked.setdefault(error.message.rstrip("."), []).append(str(number))
            continue
        if ids not in {whole for bare in found for whole in (bare, (*conditioning.prefix, *bare))}:
            raise InputError(
                f"{of} contradicts itself: the text of prompt {number} ({text!r:.60}) does not encode to its "
                f"prompt_ids by the tokenizer of {package.folder}.",
                next_action="Correct the one that is wrong, or record it anew.",
            )
    said = [
        f"{of} has a text of prompt {', '.join(numbers)} that was not checked against its prompt_ids, which "
        f"count: {reason}."
        for reason, numbers in unchecked.items()
    ]
    for warning in said:
        report_warning(warning)
    return said


def _templated(
    requests: Sequence[PromptRequest], package: Package, *, chat: bool
) -> list[str | tuple[int, ...] | _Templated]:
    """The prompts, with the text of the chat template for each conversation.

    All in one go, as a process is started for it.
    """
    asked = [
        Conversation(({"role": "user", "content": request},))
        if chat and isinstance(request, str)
        else request
        for request in requests
    ]
    talks = [request.messages for request in asked if isinstance(request, Conversation)]
    texts = iter(render_chats(package.folder, talks) if talks else ())
    return [_Templated(next(texts)) if isinstance(each, Conversation) else each for each in asked]


def _encoded(
    request: str | tuple[int, ...] | _Templated, package: Package, *, vocabulary: int | None, bare: bool
) -> tuple[tuple[int, ...], str | None]:
    """IDs and text of one prompt; `bare`: the tokenizer adds no special tokens, as a prefix has them."""
    if isinstance(request, tuple):
        return request, None
    text = request if isinstance(request, str) else request.text
    special = isinstance(request, str) and not bare
    return encode_prompt(package.folder, text, special_tokens=special, vocabulary=vocabulary), text


def _parse_ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    for part in parts:
        if not _TOKEN_ID.fullmatch(part):
            raise InputError(
                f"--prompt-ids: {part[:40]!r} is no token ID: they are whole numbers, separated by commas.",
                next_action="Write --prompt-ids 1,2,3.",
            )
    return tuple(map(int, parts))
