"""`record` on one machine, `verify` on another: the report of `check`, and clear words for what cannot be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from fixtures.decoders import TinyDecoder
from fixtures.misbehaving import ENGINE as MISBEHAVING
from fixtures.seq2seq import TinySeq2Seq
from fixtures.smollm2 import fetched_smollm2_path
from fixtures.tokenizers import word_tokenizer
from harness.cli.app import run
from harness.parity.trace_reading import read_trace
from harness.parity.trace_writing import write_trace

ROOT = Path(__file__).parents[2]
SCHEMAS = {
    name: json.loads((ROOT / f"reports/schemas/{name}-1.schema.json").read_text(encoding="utf-8"))
    for name in ("parity", "recording")
}
IDS = ["--prompt-ids", "1,2,3", "--prompt-ids", "4"]

Capsys = pytest.CaptureFixture[str]


def ask(capsys: Capsys, verb: str, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, document, and what stood on standard error."""
    status = run([verb, *arguments, "--json"])
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    document = json.loads(line)
    jsonschema.validate(document, SCHEMAS["recording" if verb == "record" else "parity"])
    assert document["exit_code"] == status
    assert "Traceback" not in err
    return status, document, err


def without_the_clock(document: Mapping[str, Any]) -> dict[str, Any]:
    """A report, but for what no two runs have alike."""
    found: dict[str, Any] = json.loads(json.dumps(document))
    for prompt in found["prompts"]:
        del prompt["timing"]
    if found["oracle"] and found["oracle"]["proof"]:
        del found["oracle"]["proof"]["seconds"]
    if found["candidate"]:
        found["candidate"]["settings"].pop("pid", None)
    return found


def assert_same_report(capsys: Capsys, package: str, engine: str, *options: str) -> dict[str, Any]:
    """`record` and `verify` have the exit status and the report of `check`; which is returned."""
    status, expected, _ = ask(capsys, "check", package, "--candidate", engine, *options)
    ask(capsys, "record", package, "--engine", engine, "-o", "x.trace", *options)
    found_status, found, _ = ask(capsys, "verify", "x.trace", package)
    assert (found_status, without_the_clock(found)) == (status, without_the_clock(expected))
    return found


@pytest.mark.parametrize(
    ("act", "verdict"),
    [
        ("nothing", "identical"),
        ("nan,at=2", "divergent"),
        ("segfault,at=3", "crashed"),
        ("abort,when=open", "crashed"),
        ("lack,when=open", "unsupported"),
        ("raise,at=1", "crashed"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="isolation needs POSIX signals")
def test_a_trace_has_the_report_of_a_check(package: Path, capsys: Capsys, act: str, verdict: str) -> None:
    """With the engine in a process of its own: placement, settings, and how it ended, word by word."""
    found = assert_same_report(capsys, str(package), f"misbehaving:does={act}", *IDS, "--max-new-tokens", "5")
    assert found["verdict"] == verdict


@pytest.mark.parametrize("name", ["demo", "demo-ops"])
def test_the_demos_have_the_report_of_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys, name: str
) -> None:
    """Built-in packages with their own prompts, on a real engine."""
    monkeypatch.chdir(tmp_path)
    found = assert_same_report(capsys, name, "ort-cpu:threads=1", "--max-new-tokens", "6")
    assert (found["verdict"], found["model"]["path"]) == ("identical", name)


@pytest.mark.parametrize(("name", "verdict"), [("smollm2", "identical"), ("smollm2-int4", "divergent")])
def test_real_weights_have_the_report_of_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys, name: str, verdict: str
) -> None:
    """SmolLM2, in int4 with int8 activations, on a prompt whose first token the oracle decides by 0.06."""
    fetched_smollm2_path()
    monkeypatch.chdir(tmp_path)
    prompt = ["--prompt", "Once upon a time, in a small village by the sea,"]
    found = assert_same_report(capsys, name, "ort-cpu", *prompt, "--max-new-tokens", "3")
    assert found["verdict"] == verdict


def test_an_encoder_is_fed_from_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    """`verify` is given no file: what the encoder was fed is in the trace, and the report says where from.

    Likewise what was made up, and the source of a text encoder.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    spoken, written = TinySeq2Seq(seed=4), TinySeq2Seq(text=True, seed=13)
    config = {"decoder_start_token_id": 3, "forced_decoder_ids": [[1, 1], [2, None]]}
    np.savez("f.npz", audio_features=spoken.features(5))
    speech = str(spoken.save(tmp_path / "speech", "merged", config=config))
    text = str(written.save(tmp_path / "text", "pair", config={"decoder_start_token_id": 3}))
    for package, options, said in (
        (speech, ["--inputs", "f.npz"], "f.npz: audio_features [1, 5, 8]"),
        (speech, [], "made up from seed 0: audio_features [1, 16, 8]"),
        (text, ["--prompt-ids", "9,4,5", "--prompt-ids", "5,2"], "the prompt"),
    ):
        found = assert_same_report(capsys, package, "ort-cpu", *options, "--max-new-tokens", "4")
        assert found["verdict"] == "identical"
        for side in ("candidate", "oracle"):
            assert found[side]["settings"]["encoder_inputs"] == said


def test_a_trace_says_how_large_it_is_and_what_it_is_of(
    package: Path, decoder: TinyDecoder, capsys: Capsys
) -> None:
    """Size and hash are those of the file; the second decode came out bit for bit."""
    import hashlib

    status, document, _ = ask(capsys, "record", str(package), "--engine", "ort-cpu", "-o", "x.trace", *IDS)
    whole = Path("x.trace").read_bytes()
    assert status == 0
    assert document["trace"] == {
        "path": "x.trace",
        "bytes": len(whole),
        "sha256": hashlib.sha256(whole).hexdigest(),
    }
    for prompt in document["prompts"]:
        assert prompt["token_ids"] == list(decoder.greedy(prompt["prompt_ids"], 16))
        assert prompt["repeats"] is True

    assert run(["record", str(package), "--engine", "ort-cpu", "-o", "y.trace", "--states", *IDS]) == 0
    out, err = capsys.readouterr()
    assert Path("y.trace").stat().st_size > len(whole)
    assert f"y.trace  {Path('y.trace').stat().st_size / 1024:.1f} KiB" in out
    assert "2 of 2 repeated bit for bit" in out
    assert err.count("prompt ") == 4


def test_an_engine_that_draws_its_answers_does_not_repeat(package: Path, capsys: Capsys) -> None:
    """Said when it is recorded already; and it is nondeterministic when it is verified."""
    engine = "misbehaving:does=random"
    status, document, _ = ask(capsys, "record", str(package), "--engine", engine, "-o", "x.trace", *IDS)
    assert status == 0
    assert [prompt["repeats"] for prompt in document["prompts"]] == [False, False]
    status, document, _ = ask(capsys, "verify", "x.trace", str(package))
    assert (status, document["verdict"]) == (1, "nondeterministic")


def test_an_engine_that_fails_leaves_a_trace_and_exit_4(package: Path, capsys: Capsys) -> None:
    """What it decoded before is worth a report; the line says at which step of which prompt it failed."""
    engine = "misbehaving:does=raise,at=2"
    status, document, err = ask(capsys, "record", str(package), "--engine", engine, "-o", "x.trace", *IDS)
    assert status == 4
    assert document["outcome"] == "recorded"
    assert [len(prompt["token_ids"]) for prompt in document["prompts"]] == [2, 2]
    assert "crashed at step 2 of prompt 1" in document["error"]["message"]
    assert err.splitlines()[-1].startswith("onnx-parity: misbehaving crashed at step 2")


def test_a_run_that_proves_nothing_leaves_no_trace(package: Path, capsys: Capsys) -> None:
    """Exit 6: an engine that ran elsewhere, or on the CPU where that was forbidden."""
    for options in (["--engine", "misbehaving:does=elsewhere,when=open"], ["--strict-placement"]):
        status, document, _ = ask(capsys, "record", str(package), "-o", "x.trace", *IDS, *options)
        assert (status, document["outcome"], document["trace"]) == (6, None, None)
    assert list(Path.cwd().iterdir()) == []


def test_the_topology_is_that_of_the_trace(package: Path, capsys: Capsys) -> None:
    """Recorded whatever the sidecars say, verified likewise; sidecars that say otherwise are noticed."""
    ask(capsys, "record", str(package), "--engine", "ort-cpu", "-o", "x.trace", *IDS)
    ask(capsys, "record", str(package), "--engine", "ort-cpu", "-o", "y.trace", *IDS, "--ignore-declared")
    declared = {"io": {"token_input": "input_ids", "optional_inputs": ["position_ids"]}}
    (package / "inference_metadata.yaml").write_text(json.dumps({"model": declared}), encoding="utf-8")
    assert ask(capsys, "verify", "y.trace", str(package))[0] == 0
    status, document, _ = ask(capsys, "verify", "x.trace", str(package))
    assert (status, document["verdict"]) == (2, None)
    assert "recorded with another topology" in document["error"]["message"]


def test_only_the_oracle_runs_when_a_trace_is_verified(
    package: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that recorded need not be installed, and no runtime under test is even loaded."""
    ask(capsys, "record", str(package), "--engine", "misbehaving", "-o", "x.trace", *IDS)
    monkeypatch.undo()
    code = (
        "import sys\n"
        "from harness.cli.app import run\n"
        f"status = run(['verify', 'x.trace', {str(package)!r}, '--json', '--report-dir', 'r'])\n"
        "print(sorted({'onnxruntime', 'nxrt'} & set(sys.modules)), file=sys.stderr)\n"
        "sys.exit(status)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=package.parent / "work",
        env={**os.environ, "ONNX_PARITY_CACHE_DIR": str(package.parent / "cache"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["candidate"]["engine"] == "misbehaving"
    assert ended.stderr.splitlines()[-1] == "[]"


def test_a_trace_of_another_model_is_refused(package: Path, capsys: Capsys, tmp_path: Path) -> None:
    """Before anything runs, with nothing written: other weights are another model."""
    ask(capsys, "record", str(package), "--engine", "ort-cpu", "-o", "x.trace", *IDS)
    other = TinyDecoder(layers="ar", seed=4).save(tmp_path / "other.onnx")
    status, document, err = ask(capsys, "verify", "x.trace", str(other))
    assert (status, document["verdict"]) == (2, None)
    assert "of another model" in document["error"]["message"]
    assert "of another model" in err
    assert [each.name for each in Path.cwd().iterdir()] == ["x.trace"]


def test_what_is_warned_of_stands_in_the_report(package: Path, capsys: Capsys) -> None:
    """A declared pairing that the graph contradicts, and a declared length: of `check` and `verify`.

    What one run warned of is not told of the next.
    """
    ask(capsys, "record", str(package), "--engine", "ort-cpu", "-o", "x.trace", *IDS)
    assert ask(capsys, "verify", "x.trace", str(package))[1]["warnings"] == []
    kv = ["past_key_values.0.key", "past_key_values.0.value"]
    block = {"kv_inputs": kv, "kv_outputs": ["present.0.value", "present.0.key"]}
    (package / "inference_metadata.yaml").write_text(json.dumps({"model": {"io": block}}), encoding="utf-8")
    (package / "config.json").write_text('{"max_position_embeddings": 8}', encoding="utf-8")
    ask(capsys, "record", str(package), "--engine", "ort-cpu", "-o", "x.trace", *IDS)
    for asked in (
        ["check", str(package), "--candidate", "ort-cpu", *IDS],
        ["verify", "x.trace", str(package)],
    ):
        status, document, err = ask(capsys, *asked, "--report-dir", "r")
        said = [line.partition("warning: ")[2] for line in err.splitlines() if "warning: " in line]
        assert status == 0
        assert document["warnings"] == said
        assert json.loads(Path("r/parity.json").read_text(encoding="utf-8"))["warnings"] == said
        assert any("`past_key_values.0.key` goes with `present.0.value`" in each for each in said)
        assert any("max_position_embeddings is 8" in each for each in said)
    (package / "inference_metadata.yaml").unlink()
    (package / "config.json").unlink()
    assert ask(capsys, "check", str(package), "--candidate", "ort-cpu", *IDS)[1]["warnings"] == []


@pytest.mark.parametrize("adds", [False, True], ids=["bare", "with a special token"])
def test_a_text_and_its_ids_are_of_one_another(package: Path, capsys: Capsys, adds: bool) -> None:
    """A report shows the text, and the IDs were decoded; without a tokenizer that works it is said."""
    word_tokenizer(package, adds=adds)
    ask(capsys, "record", str(package), "--engine", "ort-cpu", "-o", "x.trace", "--prompt", "w1 w2")
    assert ask(capsys, "verify", "x.trace", str(package))[0] == 0
    recording = read_trace(Path("x.trace"))
    (each,) = recording.prompts
    other = replace(each, prompt=replace(each.prompt, text="w1 w3"))
    write_trace(Path("x.trace"), replace(recording, prompts=(other,)))
    status, document, _ = ask(capsys, "verify", "x.trace", str(package))
    assert (status, document["verdict"]) == (2, None)
    assert "the text of prompt 1 ('w1 w3') does not encode to its prompt_ids" in document["error"]["message"]
    for content in (None, "{}"):
        (package / "tokenizer.json").unlink()
        if content is not None:
            (package / "tokenizer.json").write_text(content, encoding="utf-8")
        status, document, _ = ask(capsys, "verify", "x.trace", str(package))
        assert (status, document["verdict"]) == (0, "identical")
        (warning,) = document["warnings"]
        assert "has a text of prompt 1 that was not checked" in warning
        (package / "tokenizer.json").touch()


@pytest.mark.parametrize(
    ("engine", "oracle"),
    [
        ("oracle", "oracle"),
        ("oracle:threads=2", "oracle"),
        ("oracle", "oracle:threads=1"),
        ("oracle:threads=1,precision=float64", "oracle:precision=float64"),
        ("oracle:rounding=model", "oracle:rounding=model,threads=3"),
        ("ort-cpu:threads=1", "ort-cpu:threads=2"),
    ],
)
def test_an_engine_does_not_judge_itself(package: Path, capsys: Capsys, engine: str, oracle: str) -> None:
    """It agrees with itself whatever it computes, on any number of threads: by `check` and by `verify`."""
    ask(capsys, "record", str(package), "--engine", engine, "-o", "x.trace", *IDS)
    for asked in (["verify", "x.trace", str(package)], ["check", str(package), "--candidate", engine, *IDS]):
        status, document, _ = ask(capsys, *asked, "--oracle", oracle)
        assert (status, document["verdict"]) == (2, None)
        assert "would agree whatever they compute" in document["error"]["message"]


@pytest.mark.parametrize(
    ("engine", "oracle"),
    [
        ("oracle:precision=float64", "oracle"),
        ("oracle", "oracle:precision=float64,threads=1"),
        ("oracle:rounding=model", "oracle"),
        ("oracle", "ort-cpu"),
        ("ort-cpu:opt=disable", "ort-cpu"),
    ],
)
def test_what_computes_otherwise_may_judge(package: Path, capsys: Capsys, engine: str, oracle: str) -> None:
    """Another precision, rounding or optimisation of the same engine, or another engine."""
    ask(capsys, "record", str(package), "--engine", engine, "-o", "x.trace", *IDS)
    for asked in (["verify", "x.trace", str(package)], ["check", str(package), "--candidate", engine, *IDS]):
        assert ask(capsys, *asked, "--oracle", oracle)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["record", "PACKAGE", *IDS], "-o"),
        (["record", "PACKAGE", *IDS, "-o", "."], "-o . is a folder"),
        (["record", "PACKAGE", *IDS, "-o", "no/such/x.trace"], "which is no folder"),
        (["record", "PACKAGE", *IDS, "-o", "x", "--engine", "ort-cpuu"], "Did you mean ort-cpu?"),
        (["record", "PACKAGE", "-o", "x"], "--prompt-ids"),
        (["record", "nowhere", "-o", "x"], "nowhere"),
        (["verify", "x.trace", "PACKAGE"], "does not exist"),
        (["verify", "PACKAGE/model.onnx", "PACKAGE"], "is damaged, or no trace"),
        (["verify", "PACKAGE"], "PACKAGE"),
        (["verify", "", "PACKAGE"], "is no regular file"),
        (["verify", "x" * 300, "PACKAGE"], "xxx"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value)[:60],
)
def test_bad_input_is_one_clear_line_and_exit_2(
    package: Path, capsys: Capsys, arguments: list[str], named: str
) -> None:
    """The line names what is wrong, the document says the same, and nothing is written."""
    asked = [each.replace("PACKAGE", str(package)) for each in arguments]
    status, document, err = ask(capsys, *asked)
    (line,) = err.splitlines()
    assert status == 2
    assert named in line
    assert document["error"]["message"]
    assert list(Path.cwd().iterdir()) == []


def test_a_damaged_trace_is_one_clear_line_and_exit_2(package: Path, capsys: Capsys) -> None:
    """Cut short, with a bit flipped in a token, of a newer version: each by name. Nothing else is written."""
    ask(capsys, "record", str(package), "--engine", "ort-cpu", "-o", "x.trace", *IDS)
    path = Path("x.trace")
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    newer = whole.replace(b"onnx-parity/trace/1", b"onnx-parity/trace/2")  # its entries are in no order
    for spoilt, named in (
        (whole[:-1], "is damaged, or no trace"),
        (bytes(flipped), "was changed: the tensor 'prompt.1.decode.1.has_nan'"),
        (newer, "of a newer onnx-parity"),
    ):
        path.write_bytes(spoilt)
        status, document, err = ask(capsys, "verify", "x.trace", str(package))
        assert (status, document["verdict"]) == (2, None)
        (line,) = err.splitlines()
        assert named in line
    assert [each.name for each in Path.cwd().iterdir()] == ["x.trace"]


def test_what_writes_the_trace_is_missed_before_anything_is_decoded(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a broken installation nobody waits for a decode that cannot be kept."""
    from harness.parity import recording

    decoded: list[object] = []
    monkeypatch.setattr(recording, "record", lambda *asked, **_: decoded.append(asked))
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match="safetensors"):
        run(["record", str(package), "--engine", "ort-cpu", "-o", "x.trace", *IDS])
    assert decoded == []


def test_ctrl_c_leaves_the_old_trace(package: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 130 with one document; the trace of an earlier run is as it was, and there is no draft."""
    from fixtures import misbehaving

    Path("x.trace").write_bytes(b"the old one")
    monkeypatch.setitem(misbehaving._ACTS, "nothing", lambda: signal.raise_signal(signal.SIGINT))
    assert MISBEHAVING.name == "misbehaving"
    status, document, err = ask(
        capsys,
        "record",
        str(package),
        "--engine",
        "misbehaving:does=nothing,at=3",
        "-o",
        "x.trace",
        "--in-process",
        *IDS,
    )
    assert (status, document["outcome"]) == (130, None)
    assert "Interrupted" in err
    assert Path("x.trace").read_bytes() == b"the old one"
    assert [each.name for each in Path.cwd().iterdir()] == ["x.trace"]


def test_ctrl_c_while_verifying_keeps_what_was_judged(
    package: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a check: the report is valid and says that it was interrupted."""
    from harness.parity import check

    ask(capsys, "record", str(package), "--engine", "ort-cpu", "-o", "x.trace", *IDS)
    judge = check._Check._judge
    judged: list[int] = []

    def impatient(self: Any, *arguments: Any) -> Any:
        judged.append(1)
        if len(judged) == 2:
            signal.raise_signal(signal.SIGINT)
        return judge(self, *arguments)

    monkeypatch.setattr(check._Check, "_judge", impatient)
    status, document, _ = ask(capsys, "verify", "x.trace", str(package), "--report-dir", "r")
    assert (status, document["interrupted"], len(document["prompts"])) == (130, True, 1)
    assert json.loads(Path("r/parity.json").read_text(encoding="utf-8")) == document
