"""`golden record` and `golden check`: expected tokens, of which model they are, and who found them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from fixtures.decoders import TinyDecoder
from fixtures.seq2seq import TinySeq2Seq
from fixtures.smollm2 import fetched_smollm2_path
from fixtures.tokenizers import word_tokenizer
from harness.cli.app import run
from harness.errors import InputError
from harness.package import model_sha256
from harness.parity.golden import read_golden, write_golden

ROOT = Path(__file__).parents[2]
SCHEMAS = {
    name: json.loads((ROOT / f"reports/schemas/{name}-1.schema.json").read_text(encoding="utf-8"))
    for name in ("golden", "golden-run")
}
IDS = ["--prompt-ids", "1,2,3", "--prompt-ids", "4"]
PROMPTS = ((1, 2, 3), (4,))
CORPUS = sorted((ROOT / "fixtures/goldens").glob("*.json"))

Capsys = pytest.CaptureFixture[str]


def ask(capsys: Capsys, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, document, and what stood on standard error."""
    status = run(["golden", *arguments, "--in-process", "--json"])
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    document = json.loads(line)
    jsonschema.validate(document, SCHEMAS["golden-run"])
    assert document["exit_code"] == status
    assert "Traceback" not in err
    return status, document, err


def recorded(capsys: Capsys, package: Path, *options: str) -> dict[str, Any]:
    """A golden of the package, in `g.json`."""
    asked = options or ("--max-new-tokens", "6", *IDS)
    assert ask(capsys, "record", str(package), "-o", "g.json", "--candidate", "ort-cpu", *asked)[0] == 0
    golden: dict[str, Any] = json.loads(Path("g.json").read_text(encoding="utf-8"))
    return golden


def change(**fields: Any) -> None:
    """Replace top-level fields of `g.json`."""
    golden = json.loads(Path("g.json").read_text(encoding="utf-8")) | fields
    Path("g.json").write_text(json.dumps(golden), encoding="utf-8")


def test_a_golden_has_the_tokens_of_candidate_and_oracle_with_their_provenance(
    package: Path, decoder: TinyDecoder, capsys: Capsys
) -> None:
    """The tokens are those of the reference that knows no cache; the rest says how they came about."""
    golden = recorded(capsys, package)
    jsonschema.validate(golden, SCHEMAS["golden"])
    assert golden["model"] == {"name": "tiny", "sha256": model_sha256(package / "model.onnx")}
    assert [(p["prompt_ids"], p["token_ids"]) for p in golden["prompts"]] == [
        (list(ids), list(decoder.greedy(ids, 6))) for ids in PROMPTS
    ]
    provenance = golden["provenance"]
    assert provenance["onnx_parity"] == version("onnx-parity")
    assert provenance["verdict"] == "identical"
    assert provenance["candidate"]["engine"] == "ort-cpu"
    assert provenance["oracle"]["settings"]["precision"] == "float32"
    assert str(package.parent) not in json.dumps(golden)


def test_an_engine_that_gives_the_golden_tokens_passes(package: Path, capsys: Capsys) -> None:
    """On any engine, without an oracle."""
    recorded(capsys, package)
    for engine in ("ort-cpu", "oracle"):
        status, document, err = ask(capsys, "check", "g.json", str(package), "--candidate", engine)
        assert (status, document["outcome"], err) == (0, "identical", "")
        assert [p["first_difference"] for p in document["prompts"]] == [None, None]
    assert run(["golden", "check", "g.json", str(package), "--in-process"]) == 0
    assert "prompt 2: 6 of 6 tokens as expected" in capsys.readouterr().out


def test_no_oracle_runs_in_a_golden_check(
    package: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is what it saves."""
    from harness.engines import oracle

    recorded(capsys, package)
    monkeypatch.setattr(oracle.ENGINE.__class__, "open", lambda *_: pytest.fail("the oracle was opened"))
    assert ask(capsys, "check", "g.json", str(package), "--candidate", "ort-cpu")[0] == 0


@pytest.mark.parametrize("index", [0, 3, 5])
def test_another_token_is_found_where_it_is(package: Path, capsys: Capsys, index: int) -> None:
    """The first index at which the engine gives another token than the golden has."""
    prompts = recorded(capsys, package)["prompts"]
    golden = read_golden(Path("g.json"))
    tokens = list(golden.prompts[1].token_ids)
    tokens[index] += 1
    changed = replace(golden.prompts[1], token_ids=tuple(tokens))
    write_golden(Path("g.json"), replace(golden, prompts=(golden.prompts[0], changed)))
    status, document, _ = ask(capsys, "check", "g.json", str(package), "--candidate", "ort-cpu")
    assert (status, document["outcome"]) == (1, "divergent")
    assert [p["first_difference"] for p in document["prompts"]] == [None, index]
    assert document["prompts"][1]["token_ids"] == prompts[1]["token_ids"]


def test_prompts_may_be_of_different_lengths(package: Path, capsys: Capsys) -> None:
    """A decode that stopped early expects less; what follows is not looked at."""
    recorded(capsys, package)
    golden = read_golden(Path("g.json"))
    short = replace(golden.prompts[0], token_ids=golden.prompts[0].token_ids[:2])
    write_golden(Path("g.json"), replace(golden, prompts=(short, golden.prompts[1])))
    status, document, _ = ask(capsys, "check", "g.json", str(package), "--candidate", "ort-cpu")
    assert (status, [len(p["token_ids"]) for p in document["prompts"]]) == (0, [2, 6])


def test_a_golden_of_another_model_is_an_error_and_no_pass(
    package: Path, capsys: Capsys, tmp_path: Path
) -> None:
    """Exit 2, also where the tokens are the same: nobody has shown that they must be."""
    golden = recorded(capsys, package)
    change(model={"name": "another", "sha256": "0" * 64})
    status, document, err = ask(capsys, "check", "g.json", str(package), "--candidate", "ort-cpu")
    assert (status, document["outcome"], document["prompts"]) == (2, None, [])
    (line,) = err.splitlines()
    assert "of another model" in line
    assert golden["model"]["sha256"][:12] in line


@pytest.mark.parametrize("agrees", [True, False])
def test_a_golden_of_no_model_is_shown_and_decides_nothing(
    package: Path, capsys: Capsys, agrees: bool
) -> None:
    """Neither a pass nor a finding: inconclusive, with what agrees and what does not."""
    recorded(capsys, package)
    golden = read_golden(Path("g.json"))
    if not agrees:
        tokens = (golden.prompts[0].token_ids[0] + 1, *golden.prompts[0].token_ids[1:])
        golden = replace(golden, prompts=(replace(golden.prompts[0], token_ids=tokens), golden.prompts[1]))
    write_golden(Path("g.json"), replace(golden, sha256=None))
    status, document, err = ask(capsys, "check", "g.json", str(package), "--candidate", "ort-cpu")
    assert (status, document["outcome"]) == (1, "inconclusive")
    assert document["golden"]["advisory"] is True
    assert [p["first_difference"] for p in document["prompts"]] == [None if agrees else 0, None]
    assert "decides nothing" in err


def test_what_differs_from_the_oracle_is_no_golden(package: Path, capsys: Capsys) -> None:
    """Exit status and outcome of the check, and no file."""
    status, document, err = ask(
        capsys, "record", str(package), "-o", "g.json", "--candidate", "misbehaving:does=nan,at=1", *IDS
    )
    assert (status, document["outcome"], document["golden"]) == (1, "divergent", None)
    assert "No golden was written" in err
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("act", "outcome", "tokens"), [("lack,when=open", "unsupported", 0), ("lack,at=2", "unsupported", 2)]
)
def test_an_engine_that_fails_is_exit_4(
    package: Path, capsys: Capsys, act: str, outcome: str, tokens: int
) -> None:
    """With what it gave before; also where the golden decides nothing."""
    recorded(capsys, package)
    for advisory in (False, True):
        if advisory:
            change(model={"name": "another", "sha256": None})
        status, document, err = ask(
            capsys, "check", "g.json", str(package), "--candidate", f"misbehaving:does={act}"
        )
        assert (status, document["outcome"]) == (4, outcome)
        assert [p["first_difference"] for p in document["prompts"]] == [tokens, tokens]
        assert "there is no kernel for Scan" in err


def test_a_run_that_proves_nothing_is_exit_6(package: Path, capsys: Capsys) -> None:
    """On the CPU, where that was forbidden."""
    recorded(capsys, package)
    status, document, _ = ask(
        capsys, "check", "g.json", str(package), "--candidate", "ort-cpu", "--strict-placement"
    )
    assert (status, document["outcome"]) == (6, None)


def test_an_encoder_must_be_given_what_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    """Other features, or made-up ones, would have other tokens: that is said before anything runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    spoken = TinySeq2Seq(seed=4)
    config = {"decoder_start_token_id": 3, "forced_decoder_ids": [[1, 1], [2, None]]}
    package = spoken.save(tmp_path / "speech", "merged", config=config)
    np.savez("f.npz", audio_features=spoken.features(5))
    recorded(capsys, package, "--inputs", "f.npz", "--max-new-tokens", "4")
    engine = ("--candidate", "ort-cpu")
    assert ask(capsys, "check", "g.json", str(package), *engine, "--inputs", "f.npz")[0] == 0
    status, document, _ = ask(capsys, "check", "g.json", str(package), *engine)
    assert status == 2
    assert "other inputs of the encoder" in document["error"]["message"]


@pytest.mark.parametrize("adds", [False, True], ids=["bare", "with a special token"])
@pytest.mark.parametrize(
    ("text", "ids", "well"),
    [
        ("w1 w2", [1, 2], True),
        ("w1 w2", [9, 1, 2], None),
        ("w1 w3", [1, 2], False),
        ("w1", [1, 2], False),
        ("w1 w2 w3", [1, 2], False),
    ],
)
def test_a_text_and_its_ids_are_of_one_another(
    package: Path, capsys: Capsys, adds: bool, text: str, ids: list[int], well: bool | None
) -> None:
    """By the tokenizer of the package, with its special tokens or, as behind a chat template, without."""
    word_tokenizer(package, adds=adds)
    recorded(capsys, package, "--max-new-tokens", "3", "--prompt-ids", ",".join(map(str, ids)))
    (prompt,) = json.loads(Path("g.json").read_text(encoding="utf-8"))["prompts"]
    change(prompts=[prompt | {"text": text}])
    status, document, _ = ask(capsys, "check", "g.json", str(package), "--candidate", "ort-cpu")
    if well if well is not None else adds:
        assert (status, document["outcome"], document["warnings"]) == (0, "identical", [])
    else:
        assert (status, document["outcome"]) == (2, None)
        assert (
            f"the text of prompt 1 ({text!r}) does not encode to its prompt_ids"
            in document["error"]["message"]
        )


@pytest.mark.parametrize("adds", [False, True], ids=["bare", "with a special token"])
def test_what_is_recorded_of_a_text_is_of_one_another(package: Path, capsys: Capsys, adds: bool) -> None:
    """A golden of our own, by text, is never refused."""
    word_tokenizer(package, adds=adds)
    golden = recorded(capsys, package, "--max-new-tokens", "3", "--prompt", "w1 w2")
    assert golden["prompts"][0]["prompt_ids"] == [9, 1, 2][not adds :]
    status, document, _ = ask(capsys, "check", "g.json", str(package), "--candidate", "ort-cpu")
    assert (status, document["warnings"]) == (0, [])


@pytest.mark.parametrize("content", [None, "{}"], ids=["none", "broken"])
def test_a_text_that_cannot_be_checked_is_said_so(package: Path, capsys: Capsys, content: str | None) -> None:
    """Without a tokenizer that works the IDs decide, and both the document and a line say so."""
    (one, other) = recorded(capsys, package)["prompts"]
    change(prompts=[one, other | {"text": "hello"}])
    if content is not None:
        (package / "tokenizer.json").write_text(content, encoding="utf-8")
    status, document, err = ask(capsys, "check", "g.json", str(package), "--candidate", "ort-cpu")
    assert (status, document["outcome"]) == (0, "identical")
    (warning,) = document["warnings"]
    assert "has a text of prompt 2 that was not checked against its prompt_ids" in warning
    assert "tokenizer.json" in warning
    assert "warning: g.json: the golden has a text of prompt 2 that was not checked" in err


def set_prompt(**fields: Any) -> Any:
    """Change the first prompt of a golden."""
    return lambda golden: golden["prompts"][0].update(fields)


BROKEN: dict[str, tuple[Any, str]] = {
    "another token": (set_prompt(token_ids=[1, 2]), "tokens of prompt 1 are not those of token_sha256"),
    "no tokens": (set_prompt(token_ids=[]), "token IDs of prompt 1"),
    "a token that is none": (set_prompt(token_ids=["a"]), "token IDs of prompt 1"),
    "a token beyond 63 bits": (set_prompt(token_ids=[1 << 63]), "token IDs of prompt 1"),
    "neither text nor IDs": (set_prompt(text=None, prompt_ids=None), "neither text nor IDs of prompt 1"),
    "no prompt": (lambda golden: golden.update(prompts=[]), "has no prompt"),
    "prompts that are none": (lambda golden: golden.update(prompts=[3]), "another form"),
    "no model": (lambda golden: golden.pop("model"), "lacks 'model'"),
    "no provenance": (lambda golden: golden.pop("provenance"), "lacks 'provenance'"),
    "a hash that is none": (lambda golden: golden["model"].update(sha256="0"), "as the sha256 of its model"),
    "a newer version": (lambda golden: golden.update(schema="onnx-parity/golden/2"), "Update onnx-parity."),
    "another schema": (lambda golden: golden.update(schema="onnx-parity/parity/1"), "golden record"),
    "no schema": (lambda golden: golden.pop("schema"), "has no schema"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_golden_that_was_changed_is_refused_by_name(package: Path, capsys: Capsys, name: str) -> None:
    """Edited, of a newer version, or of another form: one line, exit 2."""
    spoil, named = BROKEN[name]
    golden = recorded(capsys, package)
    spoil(golden)
    Path("g.json").write_text(json.dumps(golden), encoding="utf-8")
    status, document, err = ask(capsys, "check", "g.json", str(package), "--candidate", "ort-cpu")
    assert (status, document["outcome"]) == (2, None)
    (line,) = err.splitlines()
    assert named in line
    assert "g.json" in line


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff", b'{"schema": 1, "schema": 1}', None])
def test_a_file_that_is_no_golden_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """Nothing, half of something, too deep, no text, a key twice, missing."""
    path = tmp_path / "g.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"g\.json: the golden cannot be read"):
        read_golden(path)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_committed_goldens_can_be_read_and_say_what_is_known_of_them(path: Path) -> None:
    """Each has the form of its schema; one without the hash of its model is advisory, and says so."""
    golden = read_golden(path)
    jsonschema.validate(json.loads(path.read_text(encoding="utf-8")), SCHEMAS["golden"])
    assert golden.advisory == (golden.provenance["verdict"] != "identical")
    assert not golden.advisory or "advisory" in golden.provenance["note"]


def test_the_golden_of_the_27b_export_is_as_it_was_given() -> None:
    """The IDs that were given with the int4 export, for the prompt "The capital of France is"."""
    (prompt,) = read_golden(ROOT / "fixtures/goldens/qwen3.6-27b-int4.json").prompts
    assert prompt.text == "The capital of France is"
    given = "11751 13 271 248068 271 248069 271 4639 369 4252 13 11751 369 279 6511 321"
    assert prompt.token_ids == tuple(map(int, given.split()))


@pytest.mark.parametrize("name", ["demo", "smollm2"])
def test_the_built_in_packages_give_their_goldens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys, name: str
) -> None:
    """What candidate and oracle gave when it was recorded, an engine of another maker gives today."""
    pytest.importorskip("nxrt", reason="needs the engine nxrt: pip install --pre 'onnx-parity[nxrt]'")
    if name == "smollm2":
        fetched_smollm2_path()
    monkeypatch.chdir(tmp_path)
    golden = str(ROOT / f"fixtures/goldens/{name}.json")
    status, document, _ = ask(capsys, "check", golden, name, "--candidate", "nxrt")
    assert (status, document["outcome"]) == (0, "identical")
    assert document["golden"]["model"]["name"] == name
