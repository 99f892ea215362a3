"""Sidecar files as mappings: a key stands once in each, and the top level is a mapping."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.cli.app import run
from harness.errors import InputError
from harness.package.reading import read_json, read_yaml

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
