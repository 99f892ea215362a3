"""Sidecar files as mappings: a key stands once in each, and the top level is a mapping."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cli.app import run
from harness.errors import InputError, shown
from harness.package import open_package
from harness.package.reading import METADATA_NAMES, read_json, read_yaml

Reader = Callable[[Path], Mapping[str, Any]]
READERS: Mapping[str, Reader] = {"x.json": read_json, "x.yaml": read_yaml}


def said(reader: Reader, path: Path, text: str) -> str:
    """What is said of a file with this text."""
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        reader(path)
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"a": 1, "b": 2, "a": 1}', "a"),
        ('{"model": {"io": {"kv_inputs": ["x"], "token_input": "t", "kv_inputs": ["y"]}}}', "kv_inputs"),
        ('{"list": [{"input": "a", "output": "b", "input": "c"}]}', "input"),
        ('{"": {}, "": {}}', ""),
    ],
)
def test_a_key_that_stands_twice_is_refused_and_named(tmp_path: Path, text: str, key: str) -> None:
    """At any depth, in either format (each of these texts is also YAML); parsers keep the last one."""
    last = json.loads(text)
    assert read_json_of(tmp_path, json.dumps(last)) == last
    doubled = f"the key {key!r} stands twice in one mapping"
    path = tmp_path / "x.json"
    assert said(read_json, path, text) == f"{path}: not readable as JSON: {doubled}."
    path = tmp_path / "x.yaml"
    assert said(read_yaml, path, text) == f"{path}: not readable as YAML: {doubled}, again on line 1."


def read_json_of(folder: Path, text: str) -> Mapping[str, Any]:
    """The mapping in a JSON file with this text."""
    path = folder / "once.json"
    path.write_text(text, encoding="utf-8")
    return read_json(path)


def test_the_second_line_of_a_doubled_key_is_named(tmp_path: Path) -> None:
    """Quotes make no other key."""
    text = "model:\n  io:\n    logits_output: a\n    token_input: b\n    'logits_output': c\n"
    assert "the key 'logits_output' stands twice in one mapping, again on line 5." in said(
        read_yaml, tmp_path / "x.yaml", text
    )


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a: {x: 1}\nb: {x: 1}", {"a": {"x": 1}, "b": {"x": 1}}),
        ("1: a\n'1': b", {1: "a", "1": "b"}),
        (
            "base: &base {x: 1, y: 2}\nc: {inner: &inner {<<: *base, x: 3}}\nd: {<<: *inner, x: 5, y: 4}",
            {
                "base": {"x": 1, "y": 2},
                "c": {"inner": {"x": 3, "y": 2}},
                "d": {"x": 5, "y": 4},
            },
        ),
    ],
    ids=["in two mappings", "of two types", "merged in and set anew"],
)
def test_keys_that_only_look_doubled_are_read(tmp_path: Path, text: str, meant: object) -> None:
    """A key may stand in several mappings, and what a merge brings in may be set anew (YAML merge keys)."""
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    assert read_yaml(path) == meant


def test_a_key_that_is_no_scalar_is_unreadable(tmp_path: Path) -> None:
    """As before: a list cannot be a key, however often it stands there."""
    assert "unhashable key" in said(read_yaml, tmp_path / "x.yaml", "? [a]\n: 1\n? [a]\n: 2\n")


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("null", "null"),
        ("[]", "a list"),
        ('"x"', "a string"),
        ("1", "a number"),
        ("1.5", "a number"),
        ("true", "a boolean"),
    ],
)
def test_what_is_no_mapping_is_called_as_its_format_calls_it(
    tmp_path: Path, name: str, text: str, kind: str
) -> None:
    """The message speaks of the file, not of Python."""
    path = tmp_path / name
    message = said(READERS[name], path, text)
    assert message == f"{path}: holds {kind}; a sidecar is a mapping at the top level."


def test_a_port_inventory_with_a_doubled_key_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stands beside ports in a `.json` source is as binding as a sidecar."""
    path = tmp_path / "ports.json"
    path.write_text('{"ports": {"inputs": [], "outputs": [], "inputs": []}}', encoding="utf-8")
    assert run(["ports", str(path)]) == 2
    assert "the key 'inputs' stands twice in one mapping" in capsys.readouterr().err


BOMB = "".join(
    f"{name}: &{name} [{','.join([f'*{before}' if before else 'x'] * 9)}]\n"
    for before, name in zip(["", *"abcdefghi"], "abcdefghij", strict=True)
)
"""Ten lines that stand for 9**10 values."""


@pytest.mark.parametrize("text", [BOMB, "a: &a {b: *a}", "a: &a [*a]"], ids=["bomb", "mapping", "list"])
def test_aliases_that_stand_for_too_much_are_refused(tmp_path: Path, text: str) -> None:
    """A bomb, and what contains itself: nothing that walks through the values would come to an end."""
    assert "more than a million values, or for themselves" in said(read_yaml, tmp_path / "x.yaml", text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=30,
    )
)
def test_a_value_is_shown_as_python_writes_it(value: object) -> None:
    """As far as there is room, whatever JSON or YAML make."""
    assert shown(value) == repr(value)[:60]


def test_no_more_of_a_value_is_looked_at_than_is_shown() -> None:
    """Nested 50 times, each twice the one before: 2**50 values. Nor does one that contains itself matter."""
    value: list[object] = ["x"]
    for _ in range(50):
        value = [value, value]
    assert shown(value) == ("[" * 51 + "'x'], ['x']]")[:60]
    value.append(value)
    value.reverse()
    assert shown(value) == "[" * 60
    assert shown([10**5000]) == "[a number of thousands of digits]"


UNREADABLE: Mapping[str, Callable[[Path], None]] = {
    "a link that leads nowhere": lambda path: path.symlink_to("nowhere"),
    "a link that leads to itself": lambda path: path.symlink_to(path.name),
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.skipif(sys.platform == "win32", reason="needs pipes, devices and links")
@pytest.mark.parametrize("what", UNREADABLE)
@pytest.mark.parametrize("name", ["genai_config.json", *METADATA_NAMES, "config.json"])
def test_a_sidecar_that_cannot_be_read_is_not_passed_over(tmp_path: Path, name: str, what: str) -> None:
    """What it declares would be dropped, and nobody would notice. Nobody waits for a pipe either."""
    (tmp_path / "model.onnx").touch()
    UNREADABLE[what](tmp_path / name)
    with pytest.raises(InputError) as caught:
        open_package(tmp_path).eos_token_ids()
    assert caught.value.message.startswith(f"{tmp_path / name}: cannot be read: it is ")
