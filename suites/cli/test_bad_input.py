"""What a user can get wrong: one clear line, the right exit status, nothing written, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import onnx
import pytest

from fixtures.cache_forms import Static
from fixtures.decoders import TinyDecoder
from harness.cli.app import run

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "reports/schemas/parity-1.schema.json").read_text(encoding="utf-8")
)
IDS = ["--prompt-ids", "1,2"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny package without a tokenizer, in a working directory of its own."""
    folder = tmp_path / "package"
    folder.mkdir()
    TinyDecoder(layers="ar").save(folder / "model.onnx")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def externalise(folder: Path, location: str) -> None:
    """Rewrite the graph so that its weights are said to lie in `location`."""
    model = onnx.load(folder / "model.onnx")
    onnx.save(
        model,
        folder / "model.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def truncate(folder: Path) -> None:
    """Cut the graph file in half."""
    path = folder / "model.onnx"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def missing_weights(folder: Path) -> None:
    """Weights in a file that is not there."""
    externalise(folder, "gone.bin")


def weights_outside(folder: Path) -> None:
    """Weights in a file beside the package."""
    externalise(folder, "../secret.bin")
    (folder.parent / "secret.bin").write_bytes(b"x" * 100_000)


def weights_absolute(folder: Path) -> None:
    """Weights named by an absolute path."""
    externalise(folder, str((folder / "weights.bin").absolute()))


def no_graph(folder: Path) -> None:
    """A directory without any graph."""
    (folder / "model.onnx").unlink()


def two_graphs(folder: Path) -> None:
    """Two graphs, none of them model.onnx."""
    (folder / "model.onnx").rename(folder / "a.onnx")
    (folder / "b.onnx").write_bytes((folder / "a.onnx").read_bytes())


def broken_yaml(folder: Path) -> None:
    """A sidecar that is no YAML."""
    (folder / "inference_metadata.yaml").write_text("model: [unclosed", encoding="utf-8")


def yaml_that_is_no_mapping(folder: Path) -> None:
    """A sidecar whose top level is a list."""
    (folder / "inference_metadata.yaml").write_text("- a\n- b\n", encoding="utf-8")


def broken_genai_config(folder: Path) -> None:
    """A sidecar that is no JSON."""
    (folder / "genai_config.json").write_text("{", encoding="utf-8")


def broken_tokenizer(folder: Path) -> None:
    """A tokenizer file without a tokenizer."""
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")


def empty_file(folder: Path) -> None:
    """A graph file of no bytes."""
    (folder / "model.onnx").write_bytes(b"")


def text_file(folder: Path) -> None:
    """A graph file that is prose."""
    (folder / "model.onnx").write_text("this is no model", encoding="utf-8")


def odd_yaml(folder: Path) -> None:
    """A value that PyYAML's own constructor chokes on."""
    (folder / "inference_metadata.yaml").write_text("model: !!bool maybe", encoding="utf-8")


def graph_named_outside(folder: Path) -> None:
    """A configuration that names a graph beside the package."""
    TinyDecoder().save(folder.parent / "other.onnx")
    config = {"model": {"decoder": {"filename": "../other.onnx"}}}
    (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")


def graph_name_too_long(folder: Path) -> None:
    """A configuration whose file name no file system takes."""
    config = {"model": {"decoder": {"filename": "x" * 300}}}
    (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")


def graph_name_is_a_number(folder: Path) -> None:
    """A configuration whose file name is no name."""
    (folder / "genai_config.json").write_text('{"model": {"decoder": {"filename": 3}}}', encoding="utf-8")


def weights_name_too_long(folder: Path) -> None:
    """External data under a name that no file system takes."""
    externalise(folder, "x" * 300)


def weights_name_with_nul(folder: Path) -> None:
    """External data under a name that no path can hold."""
    externalise(folder, "a\0b")


def weights_in_a_loop(folder: Path) -> None:
    """External data behind a link to itself."""
    externalise(folder, "loop.bin")
    (folder / "loop.bin").symlink_to("loop.bin")


def weights_too_short(folder: Path) -> None:
    """External data that ends before the weights do."""
    externalise(folder, "weights.bin")
    (folder / "weights.bin").write_bytes(b"x")


def tokenizer_that_cannot_encode(folder: Path) -> None:
    """A tokenizer that loads, and knows no word and no unknown token."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}), encoding="utf-8")


def open_vocabulary(folder: Path) -> None:
    """A graph that does not say how many tokens there are."""
    model = onnx.load(folder / "model.onnx")
    (logits,) = (port for port in model.graph.output if port.name == "logits")
    logits.type.tensor_type.shape.dim[-1].dim_param = "vocab"
    onnx.save(model, folder / "model.onnx")


def static_cache(folder: Path) -> None:
    """Buffers of eight rows."""
    TinyDecoder(mask=False).save(folder / "model.onnx", Static(capacity=8))


def few_embeddings(folder: Path) -> None:
    """Logits that are wider than there are tokens, as exporters pad them."""
    model = onnx.load(folder / "model.onnx")
    (embedding,) = (tensor for tensor in model.graph.initializer if tensor.name == "embedding")
    rows = onnx.numpy_helper.to_array(embedding)[:9]
    embedding.CopyFrom(onnx.numpy_helper.from_array(rows, "embedding"))
    onnx.save(model, folder / "model.onnx")


def broken_config(folder: Path) -> None:
    """What could declare a number of positions is no JSON."""
    (folder / "config.json").write_text("{", encoding="utf-8")


def as_it_is(folder: Path) -> None:
    """A package with nothing wrong in it."""


CASES: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "directory without a graph": (no_graph, IDS, "no graph in this directory"),
    "two graphs": (two_graphs, IDS, "a.onnx, b.onnx"),
    "truncated graph": (truncate, IDS, "model.onnx"),
    "empty graph file": (empty_file, IDS, "model.onnx"),
    "a text file called model.onnx": (text_file, IDS, "model.onnx"),
    "missing external data": (missing_weights, IDS, "gone.bin"),
    "external data outside the package": (weights_outside, IDS, "secret.bin"),
    "external data by absolute path": (weights_absolute, IDS, "outside the package"),
    "text without tokenizer": (as_it_is, ["--prompt", "hello"], "--prompt-ids"),
    "no prompt and no tokenizer": (as_it_is, [], "--prompt-ids"),
    "broken tokenizer": (broken_tokenizer, ["--prompt", "hello"], "tokenizer.json"),
    "empty prompt": (as_it_is, ["--prompt", ""], "empty"),
    "empty ID list": (as_it_is, ["--prompt-ids", ""], "empty"),
    "IDs that are no numbers": (as_it_is, ["--prompt-ids", "1,x"], "whole numbers"),
    "ID beyond the vocabulary": (as_it_is, ["--prompt-ids", "1,11"], "Token ID 11"),
    "negative ID": (as_it_is, ["--prompt-ids", "-1"], "Token ID -1"),
    "unknown engine": (as_it_is, [*IDS, "--candidate", "ort-cpuu"], "Did you mean ort-cpu?"),
    "unknown oracle": (as_it_is, [*IDS, "--oracle", "orakle"], "Did you mean oracle?"),
    "unknown engine option": (as_it_is, [*IDS, "--candidate", "ort-cpu:thread=1"], "threads"),
    "bad engine option": (as_it_is, [*IDS, "--candidate", "ort-cpu:threads=many"], "threads"),
    "no tokens to decode": (as_it_is, [*IDS, "--max-new-tokens", "0"], "--max-new-tokens"),
    "stop without an end": (as_it_is, [*IDS, "--stop-on-eos"], "eos_token_id"),
    "option that does not exist": (as_it_is, [*IDS, "--bogus"], "--bogus"),
    "broken YAML": (broken_yaml, IDS, "inference_metadata.yaml"),
    "YAML that is no mapping": (yaml_that_is_no_mapping, IDS, "inference_metadata.yaml"),
    "odd YAML": (odd_yaml, IDS, "inference_metadata.yaml"),
    "graph named outside the package": (graph_named_outside, IDS, "outside the package"),
    "graph under a name too long": (graph_name_too_long, IDS, "genai_config.json"),
    "graph under a number": (graph_name_is_a_number, IDS, "genai_config.json"),
    "external data under a name too long": (weights_name_too_long, IDS, "xxx"),
    "external data under a name with NUL": (weights_name_with_nul, IDS, "external data"),
    "external data in a loop of links": (weights_in_a_loop, IDS, "loop.bin"),
    "external data too short": (weights_too_short, IDS, "weights.bin"),
    "prompt that is no UTF-8": (tokenizer_that_cannot_encode, ["--prompt", "\udcff"], "UTF-8"),
    "tokenizer that cannot encode": (tokenizer_that_cannot_encode, ["--prompt", "b"], "tokenizer.json"),
    "ID beyond a vocabulary found late": (open_vocabulary, ["--prompt-ids", "11"], "Token ID 11"),
    "ID with an underscore": (as_it_is, ["--prompt-ids", "1_0"], "whole numbers"),
    "ID in other digits": (as_it_is, ["--prompt-ids", "\u0663"], "whole numbers"),
    "ID of many digits": (as_it_is, ["--prompt-ids", "9" * 5000], "whole numbers"),
    "too many threads": (as_it_is, [*IDS, "--candidate", "ort-cpu:threads=999999"], "threads"),
    "an engine against itself": (as_it_is, [*IDS, "--candidate", "oracle"], "same options"),
    "a limit without a process": (as_it_is, [*IDS, "--in-process", "--timeout", "9"], "--timeout"),
    "a time below zero": (as_it_is, [*IDS, "--call-timeout", "-1"], "--call-timeout"),
    "a time that is no number": (as_it_is, [*IDS, "--timeout", "nan"], "--timeout"),
    "a memory limit that is no size": (as_it_is, [*IDS, "--memory-limit", "much"], "--memory-limit"),
    "empty report folder": (as_it_is, [*IDS, "--report-dir", ""], "--report-dir"),
    "no room in a static cache": (
        static_cache,
        [*IDS, "--max-new-tokens", "8"],
        "holds 8 tokens (key_cache.0), and a prompt of 2 with 8 new ones takes 9",
    ),
    "no room in a static cache for the prompt": (
        static_cache,
        ["--prompt-ids", "1,2,3,4,5,6,7,8,9", "--max-new-tokens", "1"],
        "Give a shorter prompt",
    ),
    "no position for the last token": (
        as_it_is,
        [*IDS, "--max-new-tokens", "64"],
        "has rows for 64 positions (position_table [64, 4]), and a prompt of 2 with 64 new tokens takes 65",
    ),
    "no position for the prompt": (
        as_it_is,
        ["--prompt-ids", ",".join("1" * 65), "--max-new-tokens", "1"],
        "Give a shorter prompt",
    ),
    "ID that the embedding has not": (
        few_embeddings,
        ["--prompt-ids", "1,9"],
        "embedding [9, 4] of model.onnx",
    ),
    "broken JSON": (broken_genai_config, IDS, "genai_config.json"),
    "broken config.json": (broken_config, IDS, "config.json"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_clear_line_and_exit_2(
    name: str, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names what is wrong; nothing is written; with --json one valid document says the same."""
    spoil, arguments, named = CASES[name]
    spoil(package)
    assert run(["check", str(package), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("onnx-parity: ")
    assert named in line
    assert list(Path.cwd().iterdir()) == []

    assert run(["check", str(package), *arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    document = json.loads(line)
    jsonschema.validate(document, SCHEMA)
    assert (document["verdict"], document["exit_code"]) == (None, 2)
    assert named in document["error"]["message"] + document["error"]["next"]
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["check"],
        ["conform", "--engine", "ort-cpu"],
        ["record", "--engine", "ort-cpu", "-o", "t.trace"],
        ["golden", "record", "-o", "g.json"],
    ],
)
def test_every_verb_that_decodes_sees_where_positions_end(
    arguments: list[str], package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is decoded or written."""
    assert run([*arguments, str(package), *IDS, "--max-new-tokens", "64"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has rows for 64 positions" in line
    assert list(Path.cwd().iterdir()) == []


def test_a_declared_length_is_a_warning_where_the_graph_goes_on(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what was trained; the longest of the prompts is what is said of, once."""
    (package / "config.json").write_text('{"max_position_embeddings": 8}', encoding="utf-8")

    assert run(["check", str(package), *IDS, "--prompt-ids", "1,2,3", "--max-new-tokens", "7", "--json"]) == 0
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "warning" in line)
    assert "config.json: max_position_embeddings is 8, and a prompt of 3 with 7 new tokens takes 9." in line
    assert run(["check", str(package), *IDS, "--max-new-tokens", "7", "--json"]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "x" * 300, "a\0b", "/dev/null"])
def test_a_package_that_can_be_none_is_one_clear_line(
    package: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No name, a name that no file can have, a device: all are bad input, in `check` and `ports` alike."""
    for verb in ("check", "ports"):
        assert run([verb, name]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("onnx-parity: ")


def test_a_missing_directory_names_the_built_in_packages(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt built-in name gets the nearest one."""
    assert run(["check", "dmo"]) == 2
    assert "did you mean demo" in capsys.readouterr().err
    assert run(["check", str(package / "nowhere")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nowhere: no such file or directory" in line


def test_a_report_folder_that_cannot_be_made_is_the_users_error(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found before anything is decoded."""
    (Path.cwd() / "file").write_text("", encoding="utf-8")
    assert run(["check", str(package), *IDS, "--report-dir", "file/deeper"]) == 2
    assert "--report-dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    "verb",
    ["check", "conform", "derive", "engines", "fetch", "golden check", "ports", "record", "verify"],
)
def test_every_verb_prints_one_document_even_for_a_wrong_flag(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json, standard output has exactly one line that says what is wrong."""
    assert run([*verb.split(), "--json", "--bogus"]) == 2
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    document = json.loads(line)
    assert document["schema"].startswith("onnx-parity/")
    assert "--bogus" in document["error"]["message"]
    assert "Traceback" not in err


def test_a_verb_that_does_not_exist_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    """No verb is half there: what is not built does not exist."""
    assert run(["localise", "x.json"]) == 2
    assert "localise" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--json", "chek"], ["--json"], ["localise", "x", "--json"]])
def test_a_command_line_without_a_verb_has_a_document_too(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is wrong, --json gets one line that says so."""
    assert run(arguments) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["exit_code"] == 2


def test_the_bare_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """As it is meant to be read, with every verb."""
    assert run([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) > 10
    assert "check" in err
