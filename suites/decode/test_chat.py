"""Chat templates: what a conversation is turned into, and what a template may not do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.effort import examples
from harness.decode import chat
from harness.decode.chat import render_chats
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


def render_chat(folder: Path, messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of one conversation."""
    (text,) = render_chats(folder, [messages])
    return text


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
        ("{{ strftime_now('%d %B %Y') }}", {}, "26 July 2024"),
        ("{{ tools is none }}, {{ documents is none }}", {}, "True, True"),
    ],
)
def test_templates_see_what_they_are_written_for(
    tmp_path: Path, template: Any, more: dict[str, Any], text: str
) -> None:
    """Special tokens as text or mapping, named templates, whitespace, usual statements; always one day."""
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
        ('{"chat_template": "a", "chat_template": "b"}', "'chat_template' stands twice"),
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


TOO_MUCH = [
    "{{ 'w5 ' * 10 ** 9 }}",
    "{{ 'x'.center(10 ** 10) }}",
    "{{ 'x' | center(10 ** 10) }}",
    "{{ 'x' | indent(10 ** 10, true) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ [0] * 10 ** 9 }}",
    "{{ (messages * 10 ** 9) | length }}",
]
"""Each is one value of many gigabytes."""

WITHOUT_END = "{% for i in range(10 ** 5) %}{% for j in range(10 ** 5) %}SAID{% endfor %}{% endfor %}"
"""Ten thousand million times around; the sandbox keeps one range to a hundred thousand."""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's to keep")
@pytest.mark.parametrize("template", TOO_MUCH)
def test_a_template_cannot_fill_the_memory(tmp_path: Path, template: str) -> None:
    """However it asks for it, when it is compiled or when it runs: one clear line."""
    with pytest.raises(
        InputError, match=r"template takes more than \d+ MiB of memory\. Leave --chat"
    ) as caught:
        render_chat(package(tmp_path, template), ASKED)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("work", [WITHOUT_END.replace("SAID", ""), "{{ 9 ** (9 ** 9) }}"])
def test_a_template_cannot_run_for_ever(tmp_path: Path, work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not jinja2 is asked in between: it is ended."""
    monkeypatch.setattr(chat, "_SECONDS", 1.0)

    with pytest.raises(InputError, match=r"the chat template takes more than 1\.1 seconds\. Leave --chat"):
        render_chat(package(tmp_path, work), ASKED)


def test_a_text_without_end_is_no_prompt(tmp_path: Path) -> None:
    """It is stopped where it is longer than what any model reads, and not where the memory ends."""
    with pytest.raises(InputError, match="gives a text that is longer than any prompt"):
        render_chat(package(tmp_path, WITHOUT_END.replace("SAID", "word ")), ASKED)


def test_a_long_conversation_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are the template's, and not those of what is said: ten million characters here."""
    monkeypatch.setattr(chat, "_MEMORY", 1 << 26)
    said = "word " * 2_000_000

    assert render_chat(package(tmp_path, CHATML), [{"role": "user", "content": said}]) == (
        f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of work")
def test_a_template_does_not_outlive_who_asked(tmp_path: Path) -> None:
    """Nobody waits for the process here, and it ends all the same."""
    task = {
        "template": WITHOUT_END.replace("SAID", ""),
        "special": {},
        "conversations": [ASKED],
        "characters": 1,
        "memory": 1 << 30,
        "seconds": 0.1,
    }
    command = [sys.executable, "-c", chat._BOOT, json.dumps(sys.path)]

    ended = subprocess.run(command, input=json.dumps(task).encode(), capture_output=True, check=False)

    assert (ended.returncode < 0, ended.stdout) == (True, b"")


def test_a_process_that_dies_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended it, and the last line that it wrote."""
    monkeypatch.setattr(chat, "_BOOT", "import sys; sys.stdin.read(); sys.exit('no jinja2 here')")
    with pytest.raises(InputError, match=r"ended its process with 1: no jinja2 here\. Leave"):
        render_chat(package(tmp_path, CHATML), ASKED)

    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="none could be started: No such file"):
        render_chat(package(tmp_path, CHATML), ASKED)


def test_modules_that_lie_about_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process imports what its parent would, whatever is called alike where the command is run."""
    (tmp_path / "jinja2.py").write_text("raise SystemExit('theirs')")
    (tmp_path / "json.py").write_text("raise SystemExit('theirs')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])

    assert render_chat(package(tmp_path, "mine"), ASKED) == "mine"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            "{% for p in messages[0].content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}",
            "Why?",
        ),
        ("{{ messages[0].content[0].text + '!' }}", "Why?!"),
        (
            "{% if messages[0].content is string %}s{{ messages[0].content }}{% else %}"
            "p{{ messages[0].content[0].text }}{% endif %}",
            "sWhy?",
        ),
        ("{{ messages[0].content | trim }}.", "Why?."),
        ("nothing", "nothing"),
    ],
)
def test_templates_that_take_parts_alone_are_given_parts(tmp_path: Path, template: str, text: str) -> None:
    """Otherwise what the user says would not be in the prompt, and nobody would notice."""
    assert render_chat(package(tmp_path, template), ASKED) == text


@settings(max_examples=examples(10), deadline=None)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=20))
def test_conversations_come_back_in_order(tmp_path_factory: pytest.TempPathFactory, said: list[str]) -> None:
    """Whatever characters they hold, and with one process for all of them."""
    folder = package(tmp_path_factory.mktemp("package"), "[{{ messages[-1].content }}]")
    talks = [[{"role": "user", "content": text}] for text in said]

    assert render_chats(folder, talks) == [f"[{text}]" for text in said]
