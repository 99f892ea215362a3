"""The tokens that a decoder is fed first, as its package declares them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.decode.prefix import forced_prefix
from harness.errors import InputError
from harness.package import Component, Components, Package

GENERATION, CONFIG, GENAI = "generation_config.json", "config.json", "genai_config.json"


def prefix_of(folder: Path, files: dict[str, Any]) -> tuple[int, ...]:
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
        # Whisper: language, task, no timestamps; a null leaves a position open, and what follows as well.
        (
            {GENERATION: {"decoder_start_token_id": 0, "forced_decoder_ids": [[1, 5], [2, 6], [3, 9]]}},
            (0, 5, 6, 9),
        ),
        ({GENERATION: {"decoder_start_token_id": 0, "forced_decoder_ids": [[2, 6], [1, 5]]}}, (0, 5, 6)),
        ({GENERATION: {"decoder_start_token_id": 0, "forced_decoder_ids": [[1, None], [2, 6]]}}, (0,)),
        ({GENERATION: {"decoder_start_token_id": 0, "forced_decoder_ids": []}}, (0,)),
        # BART: the first token after the start is the beginning of the text.
        ({CONFIG: {"decoder_start_token_id": 2, "forced_bos_token_id": 0}}, (2, 0)),
    ],
)
def test_prefixes(tmp_path: Path, files: dict[str, Any], prefix: tuple[int, ...]) -> None:
    """Start token, then forced tokens up to the first open position, or else the forced beginning."""
    assert prefix_of(tmp_path, files) == prefix


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
