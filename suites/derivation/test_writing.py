"""What is written: sidecars that say what was derived, and nothing where a format cannot say it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.effort import examples
from fixtures.graphs import save_ports
from fixtures.layouts import (
    WHISPER_GENAI_CONFIG,
    dense_06b,
    hybrid_27b,
    static_cache,
    whisper_cross_kv,
)
from fixtures.odd_names import ODD_BLOCK, odd_names
from fixtures.strategies import Layout, layouts
from harness.cli.app import run
from harness.errors import InputError
from harness.package import open_package, write_sidecar
from harness.ports import Port, PortInventory, read_ports
from harness.topology.resolve import resolve, resolve_package
from harness.topology.sidecar import io_block
from harness.topology.spec import Outcome, Topology
from harness.topology.writing import sidecar_of

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "reports/schemas/derivation-1.schema.json").read_text(encoding="utf-8")
)


def topology(inventory: PortInventory, **options: Any) -> Topology:
    """The topology of a layout with what its package declares."""
    derivation = resolve(inventory, **options)
    assert derivation.topology is not None, derivation.refusal
    return derivation.topology


WRITABLE = {
    "hybrid_27b": hybrid_27b(layers=8),
    "dense_06b": dense_06b(layers=3),
    "whisper": whisper_cross_kv(layers=2),
    "odd_names": odd_names(),
    "static_cache": static_cache(layers=2),
}


_NAMES = {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"type": "string", "minLength": 1}}
PUBLISHED_IO_RULES: Mapping[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        **{
            key: {"type": "string", "minLength": 1}
            for key in (
                "token_input",
                "inputs_embeds_input",
                "attention_mask_input",
                "position_ids_input",
                "logits_output",
                "encoder_hidden_states_input",
            )
        },
        **dict.fromkeys(("kv_inputs", "kv_outputs", "cross_kv_inputs", "cross_kv_outputs"), _NAMES),
        "state_pairs": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["input", "output", "init", "update"],
                "properties": {"init": {"const": "zeros"}, "update": {"const": "replace"}},
            },
        },
        "optional_inputs": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["presence", "absent"],
                "properties": {"absent": {"type": "object", "required": ["kind", "shape"]}},
            },
        },
        "static_cache": {
            "type": "object",
            "additionalProperties": False,
            "required": [
                "write_indices_input",
                "kv_sequence_length_input",
                "key_cache_inputs",
                "value_cache_inputs",
                "key_cache_outputs",
                "value_cache_outputs",
            ],
            "properties": {
                "write_indices_input": {"type": "string"},
                "kv_sequence_length_input": {"type": "string"},
                "key_cache_inputs": _NAMES,
                "value_cache_inputs": _NAMES,
                "key_cache_outputs": _NAMES,
                "value_cache_outputs": _NAMES,
            },
        },
    },
}
"""The rules that the published metadata schema (onnx-genai, `ModelIoSpec`) has for these fields."""


@pytest.mark.parametrize("name", WRITABLE)
def test_a_written_io_block_keeps_the_published_rules(name: str) -> None:
    """Field names, required parts of a pair and of a static cache, and lists that pair by position."""
    wanted = topology(WRITABLE[name], declared=ODD_BLOCK if name == "odd_names" else None)
    block = sidecar_of(WRITABLE[name], wanted, "inference-metadata")["model"]["io"]
    jsonschema.validate(block, PUBLISHED_IO_RULES)
    assert len(block.get("kv_inputs", ())) == len(block.get("kv_outputs", ()))
    assert len(block.get("cross_kv_inputs", ())) == len(block.get("cross_kv_outputs", ()))


@pytest.mark.parametrize("name", WRITABLE)
def test_a_written_io_block_gives_the_topology_back(name: str) -> None:
    """Resolving with what was written gives every port the role and the partner that it had."""
    declared = ODD_BLOCK if name == "odd_names" else None
    wanted = topology(WRITABLE[name], declared=declared)
    written = sidecar_of(WRITABLE[name], wanted, "inference-metadata")
    again = resolve(WRITABLE[name], declared=written["model"]["io"])
    assert again.outcome is Outcome.DECLARED
    assert again.topology is not None
    assert io_block(again.topology) == io_block(wanted)


def test_a_written_genai_config_gives_the_topology_back() -> None:
    """Templates, cross templates and the rule for states say all that a dotted layout needs."""
    for inventory in (dense_06b(layers=3), whisper_cross_kv(layers=2), hybrid_27b(layers=8)):
        wanted = topology(inventory)
        written = sidecar_of(inventory, wanted, "genai-config")
        assert io_block(topology(inventory, genai_config=written)) == io_block(wanted)


def test_the_written_whisper_config_is_the_one_that_its_exporter_writes() -> None:
    """Keys, values, and cross keys and values each under its own template."""
    inventory = whisper_cross_kv()
    written = sidecar_of(inventory, topology(inventory), "genai-config")["model"]["decoder"]
    expected = WHISPER_GENAI_CONFIG["model"]["decoder"]
    assert written["inputs"] == expected["inputs"]
    assert expected["outputs"].items() <= written["outputs"].items()


def test_what_a_format_cannot_say_is_not_written() -> None:
    """Crosswise pairs have no template, and a branch switch has no field: the message names the ports."""
    inventory = odd_names()
    with pytest.raises(InputError, match="`c`") as error:
        sidecar_of(inventory, topology(inventory, declared=ODD_BLOCK), "genai-config")
    assert "genai_config.json" in error.value.message
    plain = dense_06b(layers=1)
    merged = PortInventory((*plain.inputs, Port("use_cache_branch", "bool", (1,))), plain.outputs)
    with pytest.raises(InputError, match="`use_cache_branch`"):
        sidecar_of(merged, topology(merged), "inference-metadata")


def test_optional_inputs_are_written_with_what_their_absence_means() -> None:
    """The published form asks for a presence key, and for the shape of the zeros."""
    plain = dense_06b(layers=1)
    extra = Port("deepstack_embeds", "float32", (1, "batch", "sequence_len", 64))
    inventory = PortInventory((*plain.inputs, extra), plain.outputs)
    written = sidecar_of(inventory, topology(inventory), "inference-metadata")
    assert written["model"]["io"]["optional_inputs"] == {
        "deepstack_embeds": {
            "presence": "deepstack_embeds",
            "absent": {"kind": "zeros", "shape": [1, "batch", "sequence_len", 64]},
        }
    }


SCHEMA = json.loads(
    (Path(__file__).parents[2] / "reports/schemas/derivation-1.schema.json").read_text(encoding="utf-8")
)
FORMS = {"inference-metadata": "inference_metadata.yaml", "genai-config": "genai_config.json"}


def reread(folder: Path) -> Topology:
    """The topology of the package in a folder, with what its sidecars say now."""
    package = open_package(folder)
    derivation = resolve_package(package, read_ports(package.model))
    assert derivation.topology is not None, derivation.refusal
    return derivation.topology


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None, max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
@given(layout=layouts(), as_file=st.booleans())
def test_a_written_package_resolves_to_the_same_topology(form: str, layout: Layout, as_file: bool) -> None:
    """Named by its folder or its graph: what `--write` leaves reads back the same, or it leaves nothing."""
    wanted = topology(layout.inventory)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graph = save_ports(folder / "decoder.onnx", layout.inventory)
        status = run(["derive", str(graph if as_file else folder), "--write", form])
        sidecar = folder / FORMS[form]
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            ["decoder.onnx", *([sidecar.name] if status == 0 else [])]
        )
        assert io_block(reread(folder)) == io_block(wanted)
        assert status in (0, 2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["dense_06b", "hybrid_27b", "whisper"])
def test_known_layouts_are_written_in_either_format(form: str, name: str, tmp_path: Path) -> None:
    """The formats can say these, so that a refusal to write would be a defect; the answer stays the same."""
    graph = save_ports(tmp_path / "model.onnx", WRITABLE[name])
    assert run(["derive", str(tmp_path), "--write", form]) == 0
    again = resolve_package(open_package(tmp_path), read_ports(graph))
    assert again.outcome is (Outcome.DECLARED if form == "inference-metadata" else Outcome.DERIVED)
    assert again.topology is not None
    assert io_block(again.topology) == io_block(topology(WRITABLE[name]))


@pytest.mark.parametrize("form", FORMS)
def test_a_sidecar_is_never_overwritten(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the file and the way out, and the file stays as it was."""
    save_ports(tmp_path / "model.onnx", dense_06b(layers=1))
    sidecar = tmp_path / FORMS[form]
    sidecar.write_text("{}", encoding="utf-8")
    assert run(["derive", str(tmp_path), "--write", form, "--json"]) == 2
    out, err = capsys.readouterr()
    document = json.loads(out)
    jsonschema.validate(document, SCHEMA)
    assert (document["outcome"], document["exit_code"]) == (None, 2)
    assert str(sidecar) in document["error"]["message"]
    assert "Move it away" in err
    assert sidecar.read_text(encoding="utf-8") == "{}"


def test_the_other_spelling_of_the_metadata_name_counts_as_taken(tmp_path: Path) -> None:
    """Of `.yaml` and `.yml` only one would be read, so both are never there."""
    (tmp_path / "inference_metadata.yml").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=r"inference_metadata\.yml exists"):
        write_sidecar(tmp_path, "inference_metadata.yaml", {"model": {}})
    assert [path.name for path in tmp_path.iterdir()] == ["inference_metadata.yml"]


def test_a_folder_that_cannot_be_written_to_is_the_users_error(tmp_path: Path) -> None:
    """The error names the file; what a folder that is none has to say is no traceback."""
    with pytest.raises(InputError, match=r"genai_config\.json cannot be written"):
        write_sidecar(tmp_path / "absent", "genai_config.json", {})


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        st.lists(st.text(st.characters(exclude_categories=["Cs"]))),
        max_size=4,
    )
)
@settings(deadline=None)
def test_names_come_back_from_a_sidecar_letter_by_letter(block: dict[str, list[str]]) -> None:
    """Whatever is in a port name, quotes, line ends or `no`, both formats keep it."""
    with tempfile.TemporaryDirectory() as name:
        for form in FORMS.values():
            text = write_sidecar(Path(name), form, {"io": block}).read_text(encoding="utf-8")
            read = json.loads(text) if form.endswith("json") else yaml.safe_load(text)
            assert read == {"io": block}


def test_a_written_genai_config_names_its_graph(tmp_path: Path) -> None:
    """Beside other graphs the folder is read as the one that was asked about."""
    save_ports(tmp_path / "encoder.onnx", whisper_cross_kv(layers=1))
    graph = save_ports(tmp_path / "decoder.onnx", dense_06b(layers=1))
    assert run(["derive", str(graph), "--write", "genai-config"]) == 0
    assert open_package(tmp_path).model == graph
    assert io_block(reread(tmp_path)) == io_block(topology(dense_06b(layers=1)))


def test_metadata_is_not_written_where_it_would_speak_of_another_graph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An `io` block does not say whose it is: beside `model.onnx` it is read as that one's."""
    save_ports(tmp_path / "model.onnx", whisper_cross_kv(layers=1))
    graph = save_ports(tmp_path / "other.onnx", dense_06b(layers=1))
    assert run(["derive", str(graph), "--write", "inference-metadata"]) == 2
    assert "model.onnx" in capsys.readouterr().err
    assert not (tmp_path / "inference_metadata.yaml").exists()


def test_a_sidecar_that_another_one_contradicts_is_taken_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sidecars are read together; if that is no longer the topology, nothing is left behind."""
    graph = save_ports(tmp_path / "model.onnx", dense_06b(layers=1))
    config = {"model": {"decoder": {"inputs": {"past_key_values_length": "position_ids"}}}}
    (tmp_path / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert run(["derive", str(graph), "--write", "inference-metadata"]) == 2
    assert "position_ids" in capsys.readouterr().err
    assert not (tmp_path / "inference_metadata.yaml").exists()


@pytest.mark.parametrize("form", FORMS)
def test_what_has_no_folder_of_the_users_gets_no_sidecar(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A port inventory is no graph, and a built-in package lies in the cache."""
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    document = {"ports": {"inputs": [], "outputs": []}}
    for side in ("inputs", "outputs"):
        document["ports"][side] = [
            {"name": port.name, "dtype": port.dtype, "shape": list(port.shape or ())}
            for port in getattr(dense_06b(layers=1), side)
        ]
    (tmp_path / "ports.json").write_text(json.dumps(document), encoding="utf-8")
    assert run(["derive", "ports.json", "demo", "--write", form]) == 2
    err = capsys.readouterr().err
    assert err.count("a sidecar is written beside a graph") == 2
    assert list(tmp_path.rglob(FORMS[form])) == []


def test_nothing_is_written_for_a_refusal(tmp_path: Path) -> None:
    """Without a topology there is nothing to say, and the exit status is the refusal's."""
    ports = dense_06b(layers=1)
    save_ports(tmp_path / "model.onnx", PortInventory(ports.inputs, ports.outputs[:-1]))
    assert run(["derive", str(tmp_path), "--write", "inference-metadata"]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_format_that_cannot_say_it_writes_nothing_and_names_the_ports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A branch switch has no field in an `io` block."""
    plain = dense_06b(layers=1)
    merged = PortInventory((*plain.inputs, Port("use_cache_branch", "bool", (1,))), plain.outputs)
    save_ports(tmp_path / "model.onnx", merged)
    assert run(["derive", str(tmp_path), "--write", "inference-metadata", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert "`use_cache_branch`" in document["error"]["message"]
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
