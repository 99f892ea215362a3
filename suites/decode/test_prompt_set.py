"""Prompt sets: JSON lines, one prompt each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.decode.prompt_set import Conversation, PromptRequest, read_prompts
from harness.errors import InputError

MESSAGES = [{"role": "user", "content": "Why?"}]


def line_of(prompt: PromptRequest) -> str:
    """The line that asks for `prompt`."""
    match prompt:
        case str():
            return json.dumps({"text": prompt}, ensure_ascii=False)
        case Conversation():
            return json.dumps({"messages": list(prompt.messages)})
    return json.dumps({"prompt_ids": list(prompt)})


texts = st.text()
ids = st.lists(st.integers(0, 10**6)).map(tuple)
talks = st.text().map(lambda text: Conversation(({"role": "user", "content": text},)))


@given(st.lists(texts | ids | talks, min_size=1))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[PromptRequest]
) -> None:
    """Any texts, IDs and conversations come back in order, whatever characters they hold."""
    path = tmp_path_factory.mktemp("set") / "prompts.jsonl"
    path.write_bytes("\n".join(map(line_of, prompts)).encode())

    assert read_prompts(path) == tuple(prompts)


def test_empty_lines_private_keys_and_a_byte_order_mark_are_left_alone(tmp_path: Path) -> None:
    """What editors and other tools leave in a file is no prompt, and no mistake."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a", "x-id": 7}\r\n\r\n  \n{"prompt_ids": [1]}\n')

    assert read_prompts(path) == ("a", (1,))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("hello", "cannot be read as JSON"),
        ('{"text": "a", "text": "b"}', "the key 'text' stands twice"),
        ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "'content' stands twice"),
        ('"hello"', "is a str, not an object"),
        ("{}", "has none of text, prompt_ids, messages"),
        ('{"text": "a", "prompt_ids": [1]}', "has text and prompt_ids of"),
        ('{"txet": "a"}', "the key 'txet'; did you mean text?"),
        ('{"prompt": "a"}', "the key 'prompt'; did you mean text?"),
        ('{"content": "a"}', "the key 'content'; did you mean text?"),
        ('{"prompt": [1, 2]}', "the key 'prompt'; did you mean prompt_ids?"),
        ('{"input_ids": [1, 2]}', "the key 'input_ids'; did you mean prompt_ids?"),
        ('{"conversation": [{"role": "user"}]}', "did you mean messages?"),
        ('{"prompt": 7}', "the key 'prompt'; a key of your own begins with x-"),
        ('{"text": "a", "id": "b"}', "the key 'id'; a key of your own begins with x-"),
        ('{"text": 3}', "has a value of text"),
        ('{"prompt_ids": [true]}', "has a value of prompt_ids"),
        ('{"prompt_ids": [1.5]}', "has a value of prompt_ids"),
        ('{"prompt_ids": 1}', "has a value of prompt_ids"),
        ('{"messages": []}', "has a value of messages"),
        ('{"messages": [{"role": "user"}]}', "message 1 has no text as its content, but None"),
        ('{"messages": [{"content": "a"}]}', "message 1 has no role"),
        ('{"messages": ["a"]}', "has a value of messages"),
        (
            '{"messages": [{"role": "user", "content": null}]}',
            "message 1 has no text as its content, but None",
        ),
        ('{"messages": [{"role": "user", "content": 7}]}', "message 1 has no text as its content, but 7"),
        ('{"messages": [{"role": "user", "content": []}]}', "message 1 has no text as its content, but []"),
        ('{"messages": [{"role": "user", "content": {"text": "a"}}]}', "has no text as its content"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "has 'a' in its content, and text alone"),
        (
            '{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": '
            '"image_url", "image_url": {"url": "b"}}, {"type": "text", "text": "c"}]}]}',
            "message 2 has {'type': 'image_url', ",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
            "message 1 has {'type': 'text'} in its content, and text alone is decoded",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    """The file, the number of the line, what is wrong with it, and how to write it."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "a"}\n' + line, encoding="utf-8")

    with pytest.raises(InputError, match=r"prompts\.jsonl:2 ") as caught:
        read_prompts(path)
    assert says in str(caught.value)


@given(st.lists(st.text(), min_size=1))
def test_parts_that_are_texts_are_put_together(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str]
) -> None:
    """As templates that take parts do: with nothing between them."""
    path = tmp_path_factory.mktemp("set") / "prompts.jsonl"
    content = [{"type": "text", "text": part} for part in parts]
    path.write_text(json.dumps({"messages": [{"role": "user", "content": content, "name": "n"}]}))

    assert read_prompts(path) == (Conversation(({"role": "user", "content": "".join(parts), "name": "n"},)),)


def test_who_calls_a_tool_need_say_nothing(tmp_path: Path) -> None:
    """Such messages have null for their content, or none."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": calls}]}))

    (talk,) = read_prompts(path)

    assert isinstance(talk, Conversation)
    assert talk.messages[1] == {"role": "assistant", "tool_calls": calls, "content": None}


@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot be read"), (b"\xff", "not UTF-8"), (b"\n\n", "has no prompt")]
)
def test_a_file_without_prompts_is_bad_input(tmp_path: Path, content: bytes | None, says: str) -> None:
    """Missing, not text, or empty."""
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(InputError, match=says):
        read_prompts(path)
