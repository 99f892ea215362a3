"""The rebuilt tokenizer, on small tables made here and against byte-pair encoding written out again."""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fixtures.smollm2 import fetched_smollm2
from harness.models.tokenizer import TokenizerTables, build_tokenizer, write_tokenizer

MERGES = ("Ġ t", "h e", "Ġt he", "1 2", "12 3", "Ġ 1", "a n", "an d", "' s", "Ċ Ċ", "Ġ Ġ")
"""Merges of digits among them, which the rule `smollm` must never use."""


MERGES_DIGITS = "the 123 12 11"
"""Text in which those merges would apply."""


def byte_symbols() -> list[str]:
    """GPT-2's printable character for every byte: itself where it is printable, else the next from 256."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + hidden.index(byte)) for byte in range(256)]


def small_tables() -> TokenizerTables:
    """A control token, all bytes, and the results of `MERGES`."""
    tokens = ("<|end|>", *byte_symbols(), *(merge.replace(" ", "") for merge in MERGES))
    return TokenizerTables(
        pre_tokenizer="smollm",
        tokens=tokens,
        token_types=(3,) + (1,) * (len(tokens) - 1),
        merges=MERGES,
        bos_id=0,
        eos_id=0,
        unknown_id=0,
        padding_id=0,
        add_bos=False,
        chat_template="{{ messages }}",
    )


@pytest.fixture(scope="module", params=["small tables", "smollm2"])
def tables(request: pytest.FixtureRequest) -> TokenizerTables:
    """The tables made here, and those of the fetched weights."""
    if request.param == "small tables":
        return small_tables()
    return fetched_smollm2().tokenizer


@pytest.fixture(scope="module")
def tokenizer(tables: TokenizerTables) -> Tokenizer:
    """The tokenizer that these tables describe."""
    return build_tokenizer(tables)


TEXTS = st.text(
    st.one_of(
        st.sampled_from("the and 's'll\n\t  0123456789 .,!?_-(){}"),
        # Letters, numerals, punctuation and symbols of several scripts, all older than any Unicode
        # version that the two sides could have.
        st.characters(min_codepoint=0x20, max_codepoint=0x7E),
        st.characters(min_codepoint=0xA0, max_codepoint=0x3FF, exclude_categories=("Cn", "Cf")),
        st.characters(min_codepoint=0x400, max_codepoint=0x52F),
        st.characters(min_codepoint=0x2150, max_codepoint=0x2188),
        st.characters(min_codepoint=0x4E00, max_codepoint=0x4FFF),
        st.characters(min_codepoint=0x1F600, max_codepoint=0x1F64F),
    ),
    max_size=40,
)

_WORDS = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
"""GPT-2's words, for text without digits: contractions, letters, the rest, white space."""


class Definition:
    """Byte-level BPE written out: digits apart, GPT-2's words, the lowest-ranked merge first."""

    def __init__(self, tables: TokenizerTables) -> None:
        self._ids = {token: index for index, token in enumerate(tables.tokens)}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(tables.merges)}
        self._symbols = byte_symbols()

    def encode(self, text: str) -> list[int]:
        """Token IDs of `text`; bytes without a token are left out."""
        pieces = split_digits(text)
        words = [word for piece in pieces for word in ([piece] if is_digit(piece) else _WORDS.findall(piece))]
        return [self._ids[part] for word in words for part in self._parts(word)]

    def _parts(self, word: str) -> list[str]:
        symbols = (self._symbols[byte] for byte in word.encode())
        parts = [symbol for symbol in symbols if symbol in self._ids]
        while True:
            pairs = [pair for pair in itertools.pairwise(parts) if pair in self._ranks]
            if not pairs:
                return parts
            parts = merged(parts, *min(pairs, key=lambda pair: self._ranks[pair]))


@pytest.fixture(scope="module")
def definition(tables: TokenizerTables) -> Definition:
    """The definition on the same tables."""
    return Definition(tables)


def merged(parts: list[str], left: str, right: str) -> list[str]:
    """`parts` with every occurrence of the pair joined, from the left."""
    joined: list[str] = []
    for part in parts:
        if joined and joined[-1] == left and part == right:
            joined[-1] = left + right
        else:
            joined.append(part)
    return joined


def is_digit(text: str) -> bool:
    """Whether `text` is one character of a Unicode number category."""
    return len(text) == 1 and unicodedata.category(text).startswith("N")


def split_digits(text: str) -> list[str]:
    """`text` cut before and after every digit."""
    pieces: list[str] = []
    open_piece = False
    for character in text:
        if is_digit(character):
            pieces.append(character)
            open_piece = False
        elif open_piece:
            pieces[-1] += character
        else:
            pieces.append(character)
            open_piece = True
    return pieces


@example(text=MERGES_DIGITS)
@given(text=TEXTS)
def test_ids_are_those_of_the_definition(definition: Definition, tokenizer: Tokenizer, text: str) -> None:
    """The library's tokenizer, as we set it up, gives what byte-pair encoding written out gives."""
    assert tokenizer.encode(text).ids == definition.encode(text)


@example(text=MERGES_DIGITS)
@given(text=TEXTS)
def test_each_digit_is_a_token_of_its_own(tokenizer: Tokenizer, text: str) -> None:
    """No token but the digit's own covers a digit, whatever the merges offer."""
    encoding = tokenizer.encode(text)
    for start, end in encoding.offsets:
        assert end - start == 1 or not any(is_digit(character) for character in text[start:end])


@given(text=st.text(st.characters(exclude_categories=("Cs",))))
def test_text_survives_the_round_trip(tables: TokenizerTables, tokenizer: Tokenizer, text: str) -> None:
    """Decoding gives the text back, whatever it is, as far as its bytes have tokens.

    In the fetched tables six control characters have none, nor has anything in the unassigned planes 4 to 11.
    """
    symbols = byte_symbols()
    assume(all(symbols[byte] in tables.tokens for byte in text.encode()))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_bytes_without_a_token() -> None:
    """A byte that the tables lack is left out of the IDs: never an ID of something else."""
    tables = small_tables()
    gap = replace(tables, tokens=tuple("<gap>" if token == "!" else token for token in tables.tokens))
    assert build_tokenizer(gap).encode("a!b").ids == build_tokenizer(gap).encode("ab").ids


def test_control_tokens_are_recognised_in_text(tables: TokenizerTables, tokenizer: Tokenizer) -> None:
    """A chat template writes them as text; each is one ID, and its neighbours are split as usual."""
    control = [index for index, kind in enumerate(tables.token_types) if kind == 3]
    for index in control:
        around = tokenizer.encode(f"he{tables.tokens[index]}he").ids
        assert around == [*tokenizer.encode("he").ids, index, *tokenizer.encode("he").ids]


def test_the_files_hold_the_same_tokenizer(
    tables: TokenizerTables, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """What is written reads back as the same tokenizer, with its special tokens and the chat template."""
    write_tokenizer(tmp_path, tables, context=8192)
    read = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    sample = "The year 1998, he'll say: <|end|>\n\n  and then"
    assert read.encode(sample).ids == tokenizer.encode(sample).ids
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == tables.chat_template
    assert read.token_to_id(config["eos_token"]) == tables.eos_id
    assert read.token_to_id(config["bos_token"]) == tables.bos_id


def test_another_splitting_rule_is_refused() -> None:
    """Splitting by a guess would give other IDs in silence."""
    with pytest.raises(ValueError, match="smollm"):
        build_tokenizer(replace(small_tables(), pre_tokenizer="gpt-2"))
