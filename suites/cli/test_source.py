"""`check --source`: what is refused before torch would be imported, each in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from fixtures.decoders import TinyDecoder
from fixtures.exported import TinySource
from fixtures.seq2seq import TinySeq2Seq
from harness.cli.app import run

Checked = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Checked:
    """Runs `check --json` on a tiny package; hf counts as installed, as nothing here comes to loading it."""
    monkeypatch.setattr("harness.engines.hf.util.find_spec", lambda name: name)
    monkeypatch.setattr("harness.engines.hf.metadata.version", lambda name: "0")
    package = tmp_path / "package"
    package.mkdir()
    TinyDecoder().save(package / "model.onnx")

    def call(*arguments: str | Path, package: Path = package) -> tuple[dict[str, Any], str]:
        report = tmp_path / "report"
        run(["check", "--json", "--report-dir", str(report), str(package), *map(str, arguments)])
        assert not report.exists(), "what is refused leaves no report"
        out, err = capsys.readouterr()
        assert err.count("\n") == 1
        return json.loads(out), err

    return call


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


def test_a_decoder_that_goes_by_an_encoder_has_no_source_to_compare(check: Checked, tmp_path: Path) -> None:
    """Its source would need what the encoder is given."""
    package = TinySeq2Seq(seed=4).save(tmp_path / "whisper", "merged", config={"decoder_start_token_id": 1})
    document, err = check("--source", tmp_path, package=package)
    assert document["exit_code"] == 2
    assert "goes by an encoder, and only decoders that stand alone are compared" in err


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
