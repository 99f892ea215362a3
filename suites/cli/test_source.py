"""`--source` of `check` and `verify`: what is refused before torch would be imported, each in one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from fixtures.decoders import TinyDecoder
from fixtures.exported import Family, Fault, TinySource, export
from fixtures.seq2seq import TinySeq2Seq
from harness.cli.app import run

Checked = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Checked:
    """Runs `check --json` on a tiny package, or `verify` of a trace of it.

    hf counts as installed, as nothing here comes to loading it.
    """
    monkeypatch.setattr("harness.engines.hf.util.find_spec", lambda name: name)
    monkeypatch.setattr("harness.engines.hf.metadata.version", lambda name: "0")
    package = tmp_path / "package"
    package.mkdir()
    TinyDecoder().save(package / "model.onnx")

    def call(
        *arguments: str | Path, package: Path = package, trace: Sequence[Path] = ()
    ) -> tuple[dict[str, Any], str]:
        capsys.readouterr()
        report = tmp_path / "report"
        verb = ["verify", *map(str, trace)] if trace else ["check"]
        run([*verb, "--json", "--report-dir", str(report), str(package), *map(str, arguments)])
        assert not report.exists(), "what is refused leaves no report"
        out, err = capsys.readouterr()
        *warnings, error = err.splitlines()
        assert all(line.startswith("onnx-parity: warning: ") for line in warnings)
        assert "warning" not in error
        return json.loads(out), err

    return call


def recorded(package: Path, trace: Path, *options: str) -> Path:
    """A trace of the package."""
    asked = ["--engine", "ort-cpu", "--in-process", "--max-new-tokens", "2", *options]
    assert run(["record", str(package), "-o", str(trace), *asked]) == 0
    return trace


def tokenizer(folder: Path, *tokens: str) -> Path:
    """A tokenizer of words, whose IDs are their places."""
    folder.mkdir(exist_ok=True)
    words = WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=tokens[0])
    Tokenizer(words).save(str(folder / "tokenizer.json"))
    return folder


def test_a_folder_that_is_not_there_is_named(check: Checked, tmp_path: Path) -> None:
    """With what it should hold."""
    document, err = check("--source", tmp_path / "nowhere", "--prompt-ids", "1")
    assert document["exit_code"] == 2
    assert f"--source {tmp_path / 'nowhere'}: no such folder" in err


def test_an_engine_without_a_source_is_a_mistake(check: Checked) -> None:
    """Whoever names one wants a source compared."""
    document, err = check("--source-engine", "hf", "--prompt-ids", "1")
    assert document["exit_code"] == 2
    assert "--source-engine hf has no source model to run" in err


def test_what_is_not_installed_is_said_with_the_command_that_installs_it(
    check: Checked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 5, as for any engine that is not available here."""
    monkeypatch.setattr("harness.engines.hf.util.find_spec", lambda name: None)
    document, err = check("--source", tmp_path, "--prompt-ids", "1")
    assert document["exit_code"] == 5
    assert "transformers and torch are not installed. Run `pip install 'onnx-parity[hf]'`." in err


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (("a", "x", "c"), "token 1 is 'x' there, and 'b' in the package"),
        (("b", "a", "c"), "token 0 is 'b' there, and 'a' in the package"),
    ],
)
def test_a_source_with_other_tokens_is_refused(
    check: Checked, tmp_path: Path, theirs: tuple[str, ...], said: str
) -> None:
    """An ID would mean one thing to the source, and another to the package."""
    tokenizer(tmp_path / "package", "a", "b", "c")
    document, err = check("--source", tokenizer(tmp_path / "source", *theirs), "--prompt-ids", "1")
    assert document["exit_code"] == 2
    assert said in err
    assert "it is the model of another tokenizer.json" in err


def test_a_token_with_two_ids_is_refused(check: Checked, tmp_path: Path) -> None:
    """Where both know a token, and no ID in common means something else."""
    tokenizer(tmp_path / "package", "a", "b")
    source = tokenizer(tmp_path / "source", "a")
    words = WordLevel({"a": 0, "b": 5}, unk_token="a")
    Tokenizer(words).save(str(source / "tokenizer.json"))
    document, err = check("--source", source, "--prompt-ids", "1")
    assert document["exit_code"] == 2
    assert "'b' is token 5 there, and 1 in the package" in err


@pytest.mark.parametrize("theirs", [("a", "b", "c", "d"), ("a", "b")])
def test_a_token_that_one_of_them_lacks_is_no_contradiction(
    check: Checked, tmp_path: Path, theirs: tuple[str, ...]
) -> None:
    """Exporters leave out added tokens: what is refused then is the folder without a model, or the engine."""
    tokenizer(tmp_path / "package", "a", "b", "c")
    _, err = check("--source", tokenizer(tmp_path / "source", *theirs), "--prompt-ids", "1")
    assert "of another tokenizer.json" not in err
    assert "has no config.json" in err or "transformers and torch are not installed" in err


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": None,
}


def configs(tmp_path: Path, ours: object, theirs: object) -> Path:
    """The config of the package, and a source with one of its own; returns the latter's folder."""
    source = tmp_path / "source"
    source.mkdir()
    for folder, config in ((tmp_path / "package", ours), (source, theirs)):
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return source


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (
            LLAMA,
            {**LLAMA, "hidden_size": 16},
            "its config.json has hidden_size 16, and that of the package 8",
        ),
        (LLAMA, {**LLAMA, "num_hidden_layers": 3}, "num_hidden_layers 3, and that of the package 2"),
        (LLAMA, {"model_type": "mllama", "text_config": {**LLAMA, "num_attention_heads": 2}}, "heads 2, and"),
        ({"text_config": LLAMA, "hidden_size": 4}, {**LLAMA, "hidden_size": 4}, "hidden_size 4, and"),
    ],
)
def test_a_source_of_other_sizes_is_refused(
    check: Checked, tmp_path: Path, ours: object, theirs: object, said: str
) -> None:
    """It is another model, whatever its type: where it differs would be put down to the exporter."""
    document, err = check("--source", configs(tmp_path, ours, theirs), "--prompt-ids", "1")
    assert document["exit_code"] == 2
    assert said in err
    assert "it is not what the package was exported from" in err


@pytest.mark.parametrize(
    ("ours", "theirs", "warned"),
    [
        (LLAMA, {**LLAMA, "model_type": "qwen3"}, "is of the type qwen3, and the package of the type llama"),
        (
            LLAMA,
            {"model_type": "mllama", "text_config": LLAMA},
            "of the type mllama, and the package of the type",
        ),
        (LLAMA, LLAMA, None),
        (LLAMA, {**LLAMA, "num_key_value_heads": 4}, None),
        ({"hidden_size": 8}, LLAMA, None),
        (LLAMA, [1], None),
    ],
)
def test_a_source_of_another_type_is_named(
    check: Checked, tmp_path: Path, ours: object, theirs: object, warned: str | None
) -> None:
    """With both types: some exporters write another one. Here the folder has no weights, which comes next."""
    document, err = check("--source", configs(tmp_path, ours, theirs), "--prompt-ids", "1")
    assert err.count("warning") == (warned is not None)
    assert warned is None or warned in err
    assert "without weights" in err or "holds no mapping" in err or "not installed" in err
    assert document["exit_code"] in (2, 5)


@pytest.mark.parametrize(
    ("written", "warned"),
    [("5.12.1", True), ("4.24.0", True), ("5.24.9", False), (None, False), (5, False)],
)
def test_a_source_that_another_version_wrote_is_named(
    check: Checked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: object, warned: bool
) -> None:
    """What transformers makes of the same weights has changed between versions: mamba2's gated norm, once."""
    monkeypatch.setattr(metadata, "version", lambda name: "5.24.0")
    source = configs(tmp_path, LLAMA, {**LLAMA, "transformers_version": written})
    _, err = check("--source", source, "--prompt-ids", "1")
    assert (f"was written by transformers {written} (config.json), and 5.24.0 runs it" in err) == warned


@pytest.mark.parametrize("later", [False, True])
def test_a_decoder_that_goes_by_an_encoder_has_no_source_to_compare(
    check: Checked, tmp_path: Path, later: bool
) -> None:
    """Its source would need what the encoder is given; also where a trace of it is judged later."""
    package = TinySeq2Seq(seed=4).save(tmp_path / "whisper", "merged", config={"decoder_start_token_id": 1})
    trace = [recorded(package, tmp_path / "x.trace")] if later else []
    document, err = check("--source", tmp_path, package=package, trace=trace)
    assert document["exit_code"] == 2
    assert "goes by an encoder, and only decoders that stand alone are compared" in err


@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_a_trace_is_judged_against_a_source_as_an_engine_is(
    check: Checked, tmp_path: Path, folder: str
) -> None:
    """`verify` refuses what `check` refuses, in the same words."""
    (tmp_path / "empty").mkdir()
    trace = recorded(tmp_path / "package", tmp_path / "x.trace", "--prompt-ids", "1")
    asked, _ = check("--source", tmp_path / folder, "--prompt-ids", "1")
    judged, _ = check("--source", tmp_path / folder, trace=[trace])
    assert asked["error"] is not None
    assert (judged["exit_code"], judged["error"]) == (asked["exit_code"], asked["error"])


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by family; made before `check` says what is installed."""
    families: tuple[Family, ...] = ("llama", "qwen3")
    return {family: TinySource(family).save(tmp_path_factory.mktemp(family)) for family in families}


@pytest.mark.hf
@pytest.mark.parametrize(
    ("made", "said_to_be", "said"),
    [
        ("qwen3", "llama", "takes nothing of the weights model.layers.0.self_attn.k_norm.weight"),
        ("llama", "qwen3", "the files of the weights lack model.layers.0.self_attn.k_norm.weight"),
    ],
)
def test_a_source_whose_weights_do_not_fit_its_config_is_refused(
    sources: dict[str, Path], check: Checked, tmp_path: Path, made: str, said_to_be: str, said: str
) -> None:
    """With a warning before it, as the package still says what it was exported from."""
    source = Path(shutil.copytree(sources[made], tmp_path / "source"))
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for folder, kind in ((source, said_to_be), (tmp_path / "package", made)):
        (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}), encoding="utf-8")

    document, err = check("--source", source, "--prompt-ids", "1")

    assert document["exit_code"] == 2
    assert f"is of the type {said_to_be}, and the package of the type {made}" in err
    assert said in document["error"]["message"]


@pytest.mark.hf
@pytest.mark.parametrize("fault", [None, Fault.ROPE_BASE])
def test_a_recorded_decode_has_a_third_witness(
    sources: dict[str, Path], tmp_path: Path, fault: Fault | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verdicts and the attribution of `check --source`, without the engine."""
    graph = export(sources["llama"], tmp_path / "model.onnx", fault=fault)
    asked = ("--prompt-ids", "1,2,3", "--max-new-tokens", "16")
    trace = recorded(graph, tmp_path / "x.trace", *asked)
    found = []
    for number, verb in enumerate((["check", str(graph), *asked], ["verify", str(trace), str(graph)])):
        capsys.readouterr()
        report = str(tmp_path / f"report-{number}")
        run([*verb, "--source", str(sources["llama"]), "--report-dir", report, "--json"])
        document = json.loads(capsys.readouterr().out)
        witnessed = [(each["verdict"], each["source_forced_ids"]) for each in document["source"]["prompts"]]
        found.append((document["verdict"], document["attribution"], witnessed))
    assert found[0] == found[1]
    assert found[0][:2] == (("divergent", "exporter") if fault else ("identical", None))


@pytest.mark.hf
@pytest.mark.parametrize("asked", [False, True])
def test_torch_is_never_imported_where_the_command_runs(tmp_path: Path, asked: bool) -> None:
    """It takes seconds that nobody asked for; with a source it is loaded in a process of its own.

    The source is another model's, which is found out after it was loaded.
    """
    package = TinyDecoder().save(tmp_path / "model.onnx")
    source = ["--source", str(TinySource().save(tmp_path / "source"))] if asked else []
    asked_for = ["check", str(package), "--prompt-ids", "1", "--report-dir", str(tmp_path / "r"), *source]
    code = (
        f"import sys; from harness.cli.app import run; run({asked_for!r}); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("verdict: identical" in ended.stdout) is not asked
    assert ("source knows 61 tokens, and the package has logits for 11" in ended.stderr) is asked
    assert ended.stdout.splitlines()[-1] == "[]"
