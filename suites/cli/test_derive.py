"""`onnx-parity derive` on the command line: one document a source, whatever is wrong with one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fixtures.decoders import TinyDecoder
from fixtures.graphs import save_ports
from fixtures.layouts import dense_06b, hybrid_27b
from fixtures.splitting import cut, save_pipeline
from harness.cli import derive
from harness.cli.app import run
from harness.ports import PortInventory

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "reports/schemas/derivation-1.schema.json").read_text(encoding="utf-8")
)


def documents(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The documents on standard output, each valid."""
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for document in found:
        jsonschema.validate(document, SCHEMA)
    return found


def test_every_outcome_carries_its_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Derived 0, refused and declined 3, unreadable 2; the command ends with the first in their order."""
    good = save_ports(tmp_path / "good.onnx", hybrid_27b(layers=4))
    ports = dense_06b(layers=1)
    bad = save_ports(tmp_path / "bad.onnx", PortInventory(ports.inputs, ports.outputs[:-1]))
    dense = save_ports(tmp_path / "dense.onnx", ports)
    sources = [str(good), str(bad), str(tmp_path / "absent"), str(dense)]
    assert run(["derive", *sources, "--gate", "recurrent-only", "--json"]) == 2
    found = documents(capsys)
    assert [document["source"] for document in found] == sources
    assert [(document["outcome"], document["exit_code"]) for document in found] == [
        ("derived", 0),
        ("declined", 3),
        ("unreadable", 2),
        ("declined", 3),
    ]
    assert run(["derive", str(bad), str(good), "--json"]) == 3
    assert [document["exit_code"] for document in documents(capsys)] == [3, 0]


@pytest.mark.parametrize(
    "name",
    ["x" * 5000, "x/" * 3000 + "model.onnx", "a\0b", "a\0b.json", ""],
    ids=["long", "deep", "nul", "nul-json", "empty"],
)
def test_a_name_that_no_file_can_have_does_not_stop_the_others(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file system raises on some names; that is an unreadable source like any other."""
    good = save_ports(tmp_path / "good.onnx", dense_06b(layers=1))
    assert run(["derive", name, str(good), "--json"]) == 2
    found = documents(capsys)
    assert [(document["outcome"], document["source"]) for document in found] == [
        ("unreadable", name),
        ("derived", str(good)),
    ]
    assert found[0]["error"]["message"]


@pytest.mark.parametrize(
    "error", [OSError(36, "File name too long", "name"), ValueError("embedded null byte"), OSError("odd")]
)
def test_whatever_a_look_up_raises_is_that_sources_error(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One source after another: the first look-up fails, the second is derived."""
    good = save_ports(tmp_path / "good.onnx", dense_06b(layers=1))
    read = derive.read_source

    def fails_once(name: str) -> Any:
        if name == "first":
            raise error
        return read(name)

    monkeypatch.setattr(derive, "read_source", fails_once)
    assert run(["derive", "first", str(good), "--json"]) == 2
    assert [document["outcome"] for document in documents(capsys)] == ["unreadable", "derived"]


def test_a_misused_run_has_no_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was read, so nothing was unreadable."""
    assert run(["derive", "--json", "--bogus"]) == 2
    (document,) = documents(capsys)
    assert (document["outcome"], document["source"], document["exit_code"]) == (None, None, 2)


def test_an_interrupted_run_has_no_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was derived before the interruption stands; the last document says that there is no more."""
    good = save_ports(tmp_path / "good.onnx", dense_06b(layers=1))
    read = derive.read_source

    def interrupted(name: str) -> Any:
        if name == "second":
            raise KeyboardInterrupt
        return read(name)

    monkeypatch.setattr(derive, "read_source", interrupted)
    assert run(["derive", str(good), "second", "--json"]) == 130
    first, last = documents(capsys)
    assert first["outcome"] == "derived"
    assert (last["outcome"], last["source"], last["exit_code"]) == (None, None, 130)


def test_a_decoder_in_parts_is_derived_as_a_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every port of the whole has its role, and what passes between the parts has none."""
    decoder = TinyDecoder("ar", vocab=29, width=8, seed=2)
    whole = decoder.save(tmp_path / "whole.onnx")
    parts = save_pipeline(tmp_path / "parts", cut(whole, tmp_path / "parts", [1, 10, 20]))

    assert run(["derive", "--json", str(whole), str(parts)]) == 0
    one, many = documents(capsys)

    def roles(document: dict[str, Any]) -> set[tuple[str, str, str]]:
        return {(port["name"], port["direction"], port["role"]) for port in document["ports"]}

    assert roles(one) == roles(many)
    assert one["io"]["state_pairs"] == many["io"]["state_pairs"]
