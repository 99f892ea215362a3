"""Prompts from text and from IDs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from harness.decode.prompts import check_prompt_ids, decode_tokens, encode_prompt, vocabulary_size
from harness.errors import InputError
from harness.ports import Port, PortInventory
from harness.topology.spec import Topology


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a tokenizer of five words that puts `<s>` first."""
    vocabulary = {"<s>": 0, "the": 1, "capital": 2, "of": 3, "France": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_text_is_encoded_as_its_tokenizer_says(package: Path) -> None:
    """Special tokens that the tokenizer adds are part of the prompt."""
    assert encode_prompt(package, "the capital of France") == (0, 1, 2, 3, 4)


def test_tokens_are_shown_as_text_with_their_special_ones(package: Path) -> None:
    """What was fed and decoded is shown as it was, special tokens included."""
    assert decode_tokens(package, (0, 2, 4)) == "<s> capital France"


def test_an_edited_tokenizer_is_read_again(package: Path) -> None:
    """A file that changed is another tokenizer, also within one process."""
    encode_prompt(package, "the")
    Tokenizer(models.WordLevel({"the": 41}, unk_token="the")).save(str(package / "tokenizer.json"))

    assert encode_prompt(package, "the") == (41,)


def test_an_empty_text_is_bad_input(package: Path) -> None:
    """Nothing to continue."""
    with pytest.raises(InputError, match="empty"):
        encode_prompt(package, "")


def test_a_text_without_any_token_is_bad_input(package: Path) -> None:
    """A tokenizer that knows none of the words and adds none gives nothing to feed."""
    Tokenizer(models.BPE({"a": 0}, [])).save(str(package / "tokenizer.json"))

    with pytest.raises(InputError, match="no token at all"):
        encode_prompt(package, "zzz")


def test_a_package_without_tokenizer_says_what_to_use_instead(tmp_path: Path) -> None:
    """The way out is in the message."""
    with pytest.raises(InputError, match=r"no tokenizer\.json.*--prompt-ids"):
        encode_prompt(tmp_path, "the")


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": {"type": "Unheard"}}'])
def test_a_broken_tokenizer_is_bad_input(tmp_path: Path, content: str) -> None:
    """Whatever is wrong with the file, it is one line that names it."""
    (tmp_path / "tokenizer.json").write_text(content)

    with pytest.raises(InputError, match=r"tokenizer\.json cannot be read") as caught:
        encode_prompt(tmp_path, "the")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "size"),
    [(("batch", "new", 100), 100), (("batch", 100), 100), (("batch", "new", "vocab"), None), (None, None)],
)
def test_the_vocabulary_is_as_wide_as_the_logits(
    shape: tuple[int | str, ...] | None, size: int | None
) -> None:
    """Known where the graph says it as a number."""
    inventory = PortInventory((), (Port("other", "float32", (7,)), Port("scores", "float32", shape)))

    assert vocabulary_size(inventory, Topology(logits_output="scores")) == size
    assert vocabulary_size(inventory, Topology()) is None


def test_ids_within_the_vocabulary_pass() -> None:
    """The first and the last ID are in; without a known vocabulary any ID from 0 is."""
    assert check_prompt_ids([0, 99], 100) == (0, 99)
    assert check_prompt_ids([10**9], None) == (10**9,)


@pytest.mark.parametrize(("ids", "bad"), [([1, 100], 100), ([-1], -1), ([5, -3, 100], -3)])
def test_ids_outside_the_vocabulary_are_bad_input(ids: list[int], bad: int) -> None:
    """The first offender is named, with its position and the bounds."""
    with pytest.raises(InputError, match=f"Token ID {bad} at position {ids.index(bad)} .*0 to 99"):
        check_prompt_ids(ids, 100)
