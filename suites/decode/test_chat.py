"""Chat templates: what a conversation is turned into, and what a template may not do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.decode.chat import render_chat
from harness.errors import InputError

ASKED = [{"role": "user", "content": "Why?"}]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The form that ChatML is usually published in."""


def package(folder: Path, template: Any, **more: Any) -> Path:
    """A folder whose tokenizer_config.json holds `template`."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **more}))
    return folder


def test_a_conversation_ends_where_the_assistant_begins(tmp_path: Path) -> None:
    """ChatML, by hand: each turn between its marks, then the mark of the assistant's turn."""
    messages = [{"role": "system", "content": "Be brief."}, *ASKED]

    assert render_chat(package(tmp_path, CHATML), messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("template", "more", "text"),
    [
        ("{{ bos_token }}!", {"bos_token": "<s>"}, "<s>!"),
        ("{{ bos_token }}!", {"bos_token": {"content": "<s>", "lstrip": False}}, "<s>!"),
        ("{{ eos_token is defined }}", {"eos_token": None}, "False"),
        ([{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}], {}, "yes"),
        ("{% if true %}\n  {{ messages[0].content }}\n{% endif %}\n", {}, "  Why?\n"),
        ("{{ messages | tojson }}", {}, '[{"role": "user", "content": "Why?"}]'),
        ("{{ '<é>' | tojson }}", {}, '"<é>"'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", {}, "01"),
        ("a{% generation %}b{{ 1 }}{% endgeneration %}c", {}, "ab1c"),
        ("{{ strftime_now is defined }}", {}, "False"),
    ],
)
def test_templates_see_what_they_are_written_for(
    tmp_path: Path, template: Any, more: dict[str, Any], text: str
) -> None:
    """Special tokens as text or mapping, named templates, whitespace, and the usual statements; no date."""
    assert render_chat(package(tmp_path, template, **more), ASKED) == text


def test_a_template_in_its_own_file_goes_first(tmp_path: Path) -> None:
    """Newer packages keep it apart from the configuration, which may hold an old one."""
    (tmp_path / "chat_template.jinja").write_text("mine", encoding="utf-8")

    assert render_chat(package(tmp_path, "theirs"), ASKED) == "mine"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% include 'tokenizer_config.json' %}",
        "{{ raise_exception('only one turn, please') }}",
        "{{ 1 / 0 }}",
        "{% if %}",
        "{{ range(10 ** 9) | list }}",
        "{{ nobody.knows }}",
    ],
)
def test_what_a_template_must_not_do_is_one_clear_line(tmp_path: Path, template: str) -> None:
    """Out of the sandbox, over other files, or simply wrong: the folder and the reason, in one line."""
    with pytest.raises(InputError, match="the chat template fails: ") as caught:
        render_chat(package(tmp_path, template), ASKED)
    assert str(tmp_path) in caught.value.message
    assert "\n" not in str(caught.value)


def test_a_refusal_of_the_template_is_told_in_its_own_words(tmp_path: Path) -> None:
    """Templates refuse conversations with `raise_exception`."""
    with pytest.raises(InputError, match="Roles must alternate"):
        render_chat(package(tmp_path, "{{ raise_exception('Roles must alternate') }}"), ASKED)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "has no chat_template"),
        ("{}", "has no chat_template"),
        ('{"chat_template": 3}', "that is no text"),
        ('{"chat_template": [{"name": "rag", "template": "x"}, 7]}', "has no chat_template"),
        ("{", "not readable as JSON"),
        ("[]", "not a mapping"),
    ],
)
def test_a_package_without_template_says_so(tmp_path: Path, content: str | None, says: str) -> None:
    """The message names what is missing, and the option to leave out."""
    if content is not None:
        (tmp_path / "tokenizer_config.json").write_text(content)

    with pytest.raises(InputError, match=says) as caught:
        render_chat(tmp_path, ASKED)
    assert "--chat" in str(caught.value)
