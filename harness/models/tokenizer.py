"""A tokenizer rebuilt from the tables of a GGUF, as `tokenizer.json` and `tokenizer_config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["TokenizerTables", "build_tokenizer", "write_tokenizer"]

_CONTROL = 3
"""GGUF token type of tokens that stand for no text, such as the end of a turn."""


@dataclass(frozen=True, slots=True)
class TokenizerTables:
    """What a GGUF says of its tokenizer.

    Attributes:
        pre_tokenizer: name of the rule that splits text before the merges.
        tokens: every token in the byte-level alphabet, by ID.
        token_types: GGUF token type of each token.
        merges: byte-pair merges, the two sides parted by a space, first merge first.
        bos_id: begin of text; in this family the begin of a turn.
        eos_id: end of text.
        unknown_id: declared for text that has no token; byte-level encoding does not use it.
        padding_id: for batches.
        add_bos: whether `bos_id` stands before every prompt.
        chat_template: Jinja template of a conversation.
    """

    pre_tokenizer: str
    tokens: tuple[str, ...] = field(repr=False)
    token_types: tuple[int, ...] = field(repr=False)
    merges: tuple[str, ...] = field(repr=False)
    bos_id: int
    eos_id: int
    unknown_id: int
    padding_id: int
    add_bos: bool
    chat_template: str = field(repr=False)


def build_tokenizer(tables: TokenizerTables) -> Any:
    """The `tokenizers.Tokenizer` that these tables describe.

    The rule called `smollm` splits off every digit, then splits words the way GPT-2 did; what is left
    is byte-pair encoding over bytes. Control tokens are recognised in text. A byte without a token of
    its own is left out, as in the tokenizer these tables were made from.

    Raises:
        ValueError: another splitting rule, or the model wants a token before each prompt.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if tables.pre_tokenizer != "smollm" or tables.add_bos:
        raise ValueError(f"Only the splitting rule 'smollm' without a BOS token is known, not {tables!r}.")
    vocabulary = {token: index for index, token in enumerate(tables.tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in tables.merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        token for token, kind in zip(tables.tokens, tables.token_types, strict=True) if kind == _CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def write_tokenizer(folder: Path, tables: TokenizerTables, *, context: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (special tokens, chat template) into `folder`.

    Args:
        folder: an existing folder.
        tables: the tokenizer.
        context: the longest sequence the model was trained for.
    """
    build_tokenizer(tables).save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": tables.add_bos,
        "bos_token": tables.tokens[tables.bos_id],
        "chat_template": tables.chat_template,
        "clean_up_tokenization_spaces": False,
        "eos_token": tables.tokens[tables.eos_id],
        "model_max_length": context,
        "pad_token": tables.tokens[tables.padding_id],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tables.tokens[tables.unknown_id],
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8", newline="\n")
