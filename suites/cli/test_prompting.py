"""Which prompts a check runs: options, files and chat templates, to the tokens in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from fixtures.decoders import TinyDecoder
from harness.cli.app import run

WORDS = {"<s>": 0, "the": 1, "capital": 2, "of": 3, "France": 4, "ask": 5, ":": 6}


def write_tokenizer(folder: Path, words: dict[str, int]) -> Tokenizer:
    """A tokenizer of whole words that puts `<s>` first."""
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny package of 11 tokens, with a tokenizer of seven words and a chat template."""
    folder = tmp_path / "package"
    folder.mkdir()
    TinyDecoder(layers="ar").save(folder / "model.onnx")
    write_tokenizer(folder, WORDS)
    template = {"chat_template": "ask : {{ messages[-1].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(template), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def check(
    package: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, dict[str, Any], str]:
    """Exit status, document and standard error."""
    status = run(
        ["check", str(package), "--max-new-tokens", "1", "--candidate", "ort-cpu", "--json", *options]
    )
    out, err = capsys.readouterr()
    return status, json.loads(out), err


def test_texts_then_ids_then_the_file(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts run in this order, each kind in the order it was given."""
    lines = ['{"prompt_ids": [7]}', '{"text": "France"}', '{"messages": [{"role": "user", "content": "of"}]}']
    Path("set.jsonl").write_text("\n".join(lines), encoding="utf-8")

    _, document, _ = check(
        package, capsys, "--prompts", "set.jsonl", "--prompt-ids", "2,1", "--prompt", "the", "--prompt", "of"
    )

    assert [(p["text"], p["prompt_ids"]) for p in document["prompts"]] == [
        ("the", [0, 1]),
        ("of", [0, 3]),
        (None, [2, 1]),
        (None, [7]),
        ("France", [0, 4]),
        ("ask : of", [5, 6, 3]),
    ]


def test_chat_puts_texts_into_the_template(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report shows the text that was encoded; the tokenizer adds nothing to it; IDs stay as they are."""
    _, document, _ = check(package, capsys, "--chat", "--prompt", "the capital", "--prompt-ids", "2")

    assert [(p["text"], p["prompt_ids"]) for p in document["prompts"]] == [
        ("ask : the capital", [5, 6, 1, 2]),
        (None, [2]),
    ]


def test_a_tokenizer_of_another_model_is_one_clear_line(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 before anything is opened, also where the text at hand happens to encode to known IDs."""
    write_tokenizer(package, {**WORDS, "else": 11})

    status, document, err = check(package, capsys, "--prompt", "the")

    assert status == document["exit_code"] == 2
    assert "token IDs up to 11, and the model knows 0 to 10" in document["error"]["message"]
    assert err.count("\n") == 1
    assert not Path("reports").exists()


def test_added_tokens_may_lie_beyond_the_vocabulary(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Models that know fewer tokens than were added to their tokenizer are common, and decode."""
    tokenizer = write_tokenizer(package, {f"w{i}": i for i in range(5, 11)} | {"<s>": 0, "the": 1})
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.add_tokens([f"extra{i}" for i in range(9)])
    assert max(tokenizer.get_vocab().values()) > 10
    tokenizer.save(str(package / "tokenizer.json"))

    status, _, _ = check(package, capsys, "--prompt", "the")

    assert status in (0, 1)


def test_a_message_in_parts_is_what_its_texts_say(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Put together, for a template that takes texts; a part that is none is refused, by its line."""
    parts = [{"type": "text", "text": "of "}, {"type": "text", "text": "France"}]
    image = [{"type": "image", "url": "a.png"}]
    for name, content in (("set.jsonl", parts), ("more.jsonl", image)):
        talk = {"messages": [{"role": "user", "content": content}]}
        Path(name).write_text(json.dumps(talk), encoding="utf-8")

    _, document, _ = check(package, capsys, "--prompts", "set.jsonl")
    assert [(p["text"], p["prompt_ids"]) for p in document["prompts"]] == [("ask : of France", [5, 6, 3, 4])]

    status, document, _ = check(package, capsys, "--prompts", "more.jsonl")
    assert status == 2
    assert "more.jsonl:1 message 1 has {'type': 'image'" in document["error"]["message"]


def test_a_template_that_takes_too_much_is_bad_input(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 and one line, with nothing written."""
    template = "{% for i in range(9 ** 5) %}{% for j in range(9 ** 5) %}the {% endfor %}{% endfor %}"
    (package / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")

    status, document, err = check(package, capsys, "--chat", "--prompt", "the")

    assert (status, err.count("\n")) == (2, 1)
    assert "the chat template gives a text that is longer than any prompt" in document["error"]["message"]
    assert not Path("reports").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--chat", "--prompt-ids", "1"], "every prompt here is token IDs"),
    ],
)
def test_options_that_cannot_be_followed(
    package: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    """Exit 2 and one line."""
    status, document, _ = check(package, capsys, *options)

    assert status == 2
    assert says in document["error"]["message"]
