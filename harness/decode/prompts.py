"""From a text or token IDs to a prompt that can be fed, and from tokens back to text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.ports import PortInventory
from harness.topology.spec import Topology

__all__ = ["check_prompt_ids", "decode_tokens", "encode_prompt", "tokens_of", "vocabulary_size"]


def encode_prompt(
    package_folder: Path, text: str, *, special_tokens: bool = True, vocabulary: int | None = None
) -> tuple[int, ...]:
    """Token IDs of `text` by the package's `tokenizer.json`.

    Args:
        package_folder: where the file is.
        text: what to encode.
        special_tokens: whether the tokenizer adds its own around it; not where the text has them already.
        vocabulary: how many IDs the model has; None where that is not known.

    Raises:
        InputError: the text is empty or encodes to nothing; there is no `tokenizer.json`; it cannot be
            read; or it has IDs that the model has not, and so belongs to another model.
    """
    if not text:
        raise InputError("The prompt is empty.", next_action="Give at least one character.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"The prompt is not valid UTF-8: {error.reason}.", next_action="Give it in UTF-8."
        ) from error
    tokenizer = _tokenizer(package_folder)
    _check_belonging(package_folder, tokenizer, vocabulary)
    try:
        ids = tuple(int(i) for i in tokenizer.encode(text, add_special_tokens=special_tokens).ids)
    except Exception as error:  # the library raises plain Exception for every kind of broken tokenizer
        raise InputError(
            f"{package_folder / 'tokenizer.json'} cannot encode {text!r:.60}: {error}.",
            next_action="Copy the model's tokenizer.json again, or give token IDs with --prompt-ids.",
        ) from error
    if not ids:
        raise InputError(
            f"The prompt {text!r:.60} encodes to no token at all.", next_action="Give another text."
        )
    return ids


def decode_tokens(package_folder: Path, token_ids: Sequence[int]) -> str:
    """The text of `token_ids`, special tokens included; empty for IDs that the tokenizer has not.

    Raises:
        InputError: there is no `tokenizer.json`, or it cannot be read.
    """
    return str(_tokenizer(package_folder).decode(list(token_ids), skip_special_tokens=False))


def tokens_of(package_folder: Path) -> dict[str, int]:
    """Every token of the package's `tokenizer.json`, added ones among them, with its ID.

    Raises:
        InputError: there is no such file, or it cannot be read.
    """
    tokens: dict[str, int] = _tokenizer(package_folder).get_vocab(with_added_tokens=True)
    return tokens


def vocabulary_size(inventory: PortInventory, topology: Topology) -> int | None:
    """Width of the logits, where the ports say it as a number."""
    for port in inventory.outputs:
        if port.name == topology.logits_output and port.shape:
            width = port.shape[-1]
            return width if isinstance(width, int) else None
    return None


def check_prompt_ids(token_ids: Sequence[int], vocabulary: int | None) -> tuple[int, ...]:
    """The IDs as a tuple.

    Args:
        token_ids: IDs to feed.
        vocabulary: how many IDs there are; None where that is not known.

    Raises:
        InputError: there is none, or one lies outside the vocabulary.
    """
    ids = tuple(int(i) for i in token_ids)
    if not ids:
        raise InputError("The prompt is empty.", next_action="Give at least one token ID.")
    for index, token in enumerate(ids):
        if token < 0 or (vocabulary is not None and token >= vocabulary):
            bound = "0 and up" if vocabulary is None else f"0 to {vocabulary - 1}"
            raise InputError(
                f"Token ID {token} at position {index} is outside the vocabulary ({bound}).",
                next_action="Use IDs of the tokenizer that the model was exported with.",
            )
    return ids


def _check_belonging(package_folder: Path, tokenizer: Any, vocabulary: int | None) -> None:
    """Refuse a tokenizer of another model: its own tokens must all be in the vocabulary.

    Added tokens may lie beyond, as some models know fewer than their tokenizer has been given; logits may
    be wider than all of them, as exporters pad.
    """
    if vocabulary is None:
        return
    highest = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=0)
    if highest >= vocabulary:
        raise InputError(
            f"{package_folder / 'tokenizer.json'} has token IDs up to {highest}, and the model knows 0 to "
            f"{vocabulary - 1}: it is the tokenizer of another model.",
            next_action="Copy the tokenizer that the model was exported with, or give IDs with --prompt-ids.",
        )


def _tokenizer(package_folder: Path) -> Any:
    path = package_folder / "tokenizer.json"
    if not path.is_file():
        raise InputError(
            f"{package_folder} has no tokenizer.json, so a text cannot be turned into token IDs.",
            next_action="Give token IDs with --prompt-ids 1,2,3, or add the model's tokenizer.json.",
        )
    return _load_tokenizer(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _load_tokenizer(path: Path, changed: int) -> Any:
    """The tokenizer of a file; `changed` (its time of change) makes an edited file another one."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
        # Settings for training in batches: a prompt is fed as it is, neither filled up nor cut.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer
    except Exception as error:  # the library raises plain Exception for every kind of broken file
        raise InputError(
            f"{path} cannot be read as a tokenizer: {error}",
            next_action="Copy the model's tokenizer.json again, or give token IDs with --prompt-ids.",
        ) from error
