"""The tokens that a decoder is fed first, as its package declares them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.decode.prefix import Prefix, forced_prefix
from harness.errors import InputError
from harness.package import Component, Components, Package

POSITIONS = st.lists(st.integers(0, 9), min_size=1, max_size=6)
GENERATION, CONFIG, GENAI = "generation_config.json", "config.json", "genai_config.json"


def prefix_of(folder: Path, files: dict[str, Any]) -> Prefix:
    """The prefix of a package with these files."""
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return forced_prefix(Package(folder, Components((Component("d", folder / "d.onnx"),))))


@pytest.mark.parametrize(
    ("files", "prefix"),
    [
        ({}, ()),
        ({GENERATION: {"decoder_start_token_id": 7}}, (7,)),
        ({CONFIG: {"decoder_start_token_id": 7}}, (7,)),
        ({GENAI: {"model": {"decoder_start_token_id": 7}}}, (7,)),
        # Generation's file before genai's before the model's; a null says nothing.
        ({GENERATION: {"decoder_start_token_id": None}, CONFIG: {"decoder_start_token_id": 8}}, (8,)),
        ({GENERATION: {"decoder_start_token_id": 7}, CONFIG: {"decoder_start_token_id": 8}}, (7,)),
        ({GENAI: {"model": {"decoder_start_token_id": 7}}, CONFIG: {"decoder_start_token_id": 8}}, (7,)),
        # A start token of its own, in whatever file, goes before the beginning of any sequence.
        ({GENERATION: {"bos_token_id": 1}, CONFIG: {"decoder_start_token_id": 2}}, (2,)),
        ({CONFIG: {"bos_token_id": 1}}, (1,)),
        # Whisper: language, task, no timestamps.
        (
            {GENERATION: {"decoder_start_token_id": 0, "forced_decoder_ids": [[1, 5], [2, 6], [3, 9]]}},
            (0, 5, 6, 9),
        ),
        ({GENERATION: {"decoder_start_token_id": 0, "forced_decoder_ids": [[2, 6], [1, 5]]}}, (0, 5, 6)),
        ({GENERATION: {"decoder_start_token_id": 0, "forced_decoder_ids": []}}, (0,)),
        # BART: the first token after the start is the beginning of the text.
        ({CONFIG: {"decoder_start_token_id": 2, "forced_bos_token_id": 0}}, (2, 0)),
    ],
)
def test_prefixes(tmp_path: Path, files: dict[str, Any], prefix: tuple[int, ...]) -> None:
    """Start token, then forced tokens, or else the forced beginning."""
    assert prefix_of(tmp_path, files) == Prefix(prefix)


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(0, 60000)), min_size=1, max_size=8), st.randoms())
def test_nothing_that_is_forced_is_lost(tokens: list[int | None], random: Random) -> None:
    """In whatever order pairs stand: an ID is fed, or named as not forced, being behind an open position."""
    pairs = [[position, token] for position, token in enumerate(tokens, 1)]
    random.shuffle(pairs)
    first_open = tokens.index(None) if None in tokens else len(tokens)

    with TemporaryDirectory() as folder:
        content = {"decoder_start_token_id": 7, "forced_decoder_ids": pairs}
        prefix = prefix_of(Path(folder), {GENERATION: content})

    behind = ((position, token) for position, token in enumerate(tokens, 1) if position > first_open)
    assert prefix.token_ids == (7, *tokens[:first_open])
    assert prefix.not_forced == tuple((position, token) for position, token in behind if token is not None)


@settings(deadline=None)
@given(POSITIONS.filter(lambda positions: sorted(positions) != [*range(1, len(positions) + 1)]))
@example([1, 3])
@example([2])
@example([1, 1])
@example([0, 1])
def test_positions_that_are_not_in_a_row_are_bad_input(positions: list[int]) -> None:
    """A gap, a position twice, one before the first: nothing is dropped in silence."""
    with TemporaryDirectory() as folder:
        content = {"decoder_start_token_id": 0, "forced_decoder_ids": [[p, 5] for p in positions]}
        with pytest.raises(
            InputError, match=r"generation_config\.json: forced_decoder_ids is .* position \d"
        ):
            prefix_of(Path(folder), {GENERATION: content})


@pytest.mark.parametrize(
    "content",
    [
        {"decoder_start_token_id": "0"},
        {"decoder_start_token_id": -1},
        {"decoder_start_token_id": True},
        {"decoder_start_token_id": 0, "forced_decoder_ids": {"1": 2}},
        {"decoder_start_token_id": 0, "forced_decoder_ids": [[1, 2, 3]]},
        {"decoder_start_token_id": 0, "forced_decoder_ids": [[1, "x"]]},
    ],
)
def test_values_that_are_no_ids_are_bad_input(tmp_path: Path, content: dict[str, Any]) -> None:
    """The file and the key are named."""
    with pytest.raises(
        InputError, match=r"generation_config\.json: (decoder_start_token_id|forced_decoder_ids)"
    ):
        prefix_of(tmp_path, {GENERATION: content})
