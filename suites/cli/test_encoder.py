"""Checks of models that answer to an encoder, and of packages in several graphs: what the command says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from fixtures.decoders import TinyDecoder
from fixtures.seq2seq import TinySeq2Seq
from fixtures.splitting import cut, save_embedded
from harness.cli.app import run

if TYPE_CHECKING:
    from numpy.typing import NDArray

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "reports/schemas/parity-1.schema.json").read_text(encoding="utf-8")
)
SPOKEN = TinySeq2Seq(seed=4)
WRITTEN = TinySeq2Seq(text=True, seed=13)
SPOKEN_IN_SIX = TinySeq2Seq(places=6, seed=9)
WRITTEN_IN_SIX = TinySeq2Seq(text=True, places=6, seed=13)
PREFIX = (3, 1)
CONFIG = {"decoder_start_token_id": 3, "forced_decoder_ids": [[1, 1], [2, None]]}


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory and a cache of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))


def check(
    package: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, dict[str, Any], str]:
    """Exit status, document and standard error."""
    fixed = ["--candidate", "ort-cpu", "--max-new-tokens", "8", "--in-process", "--json"]
    status = run(["check", str(package), *fixed, *options])
    out, err = capsys.readouterr()
    document = json.loads(out)
    jsonschema.validate(document, SCHEMA)
    return status, document, err


def test_a_decoder_of_features_needs_no_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It begins with the tokens that its package forces; the features come from the file."""
    package = SPOKEN.save(tmp_path / "p", "merged", config=CONFIG)
    features = SPOKEN.features(5)
    np.savez("f.npz", audio_features=features)

    status, document, _ = check(package, capsys, "--inputs", "f.npz")

    (prompt,) = document["prompts"]
    assert (status, document["verdict"]) == (0, "identical")
    assert prompt["prompt_ids"] == list(PREFIX)
    assert prompt["candidate_ids"] == list(SPOKEN.greedy(SPOKEN.hidden(features), PREFIX, 8))
    for side in ("candidate", "oracle"):
        settings = document[side]["settings"]
        assert settings["graphs"] == "encoder_model.onnx, decoder_model_merged.onnx"
        assert settings["encoder"] == "runs once"
        assert settings["encoder_inputs"] == "f.npz: audio_features [1, 5, 8]"


def test_features_that_nobody_gives_are_made_up_and_the_report_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same each time, and on both sides."""
    package = SPOKEN.save(tmp_path / "p", "cross inputs", config=CONFIG)

    documents = [check(package, capsys)[1] for _ in range(2)]

    tokens = [document["prompts"][0]["candidate_ids"] for document in documents]
    assert [document["verdict"] for document in documents] == ["identical"] * 2
    assert tokens[0] == tokens[1]
    said = documents[0]["candidate"]["settings"]["encoder_inputs"]
    assert said == "made up from seed 0: audio_features [1, 16, 8]"
    assert documents[0]["seed"] == 0


def test_ids_are_what_the_decoder_is_fed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts given as IDs are whole: what a report shows can be run again."""
    package = SPOKEN.save(tmp_path / "p", "pair", config=CONFIG)

    _, document, _ = check(package, capsys, "--prompt-ids", "3,1,7")

    assert document["prompts"][0]["prompt_ids"] == [3, 1, 7]


def test_a_text_follows_what_the_package_forces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The prefix goes first, and the tokenizer adds no special tokens of its own in between."""
    package = SPOKEN.save(tmp_path / "p", "hidden states", config=CONFIG)
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "seven": 7}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(package / "tokenizer.json"))

    status, document, _ = check(package, capsys, "--prompt", "seven")

    assert (status, document["verdict"]) == (0, "identical")
    assert document["prompts"][0]["prompt_ids"] == [*PREFIX, 7]


def test_a_text_encoder_reads_the_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each prompt is a source of its own; the decoder begins with its start token alone."""
    package = WRITTEN.save(tmp_path / "p", "pair", config={"decoder_start_token_id": 3})
    tokenizer = Tokenizer(models.WordLevel({"one": 5, "two": 2}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(package / "tokenizer.json"))

    status, document, _ = check(package, capsys, "--prompt", "one two", "--prompt-ids", "9,4,5")

    assert (status, document["verdict"]) == (0, "identical")
    assert [(p["text"], p["prompt_ids"]) for p in document["prompts"]] == [
        ("one two", [5, 2]),
        (None, [9, 4, 5]),
    ]
    for prompt in document["prompts"]:
        hidden = WRITTEN.hidden(np.array([prompt["prompt_ids"]]))
        assert prompt["candidate_ids"] == list(WRITTEN.greedy(hidden, (3,), 8))
    settings = document["candidate"]["settings"]
    assert (settings["encoder_inputs"], settings["decoder_prefix"]) == ("the prompt", "3")


def test_the_hash_is_over_every_graph_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after another, in the order in which they run."""
    package = SPOKEN.save(tmp_path / "p", "merged", config=CONFIG)

    _, document, _ = check(package, capsys)

    files = ("encoder_model.onnx", "decoder_model_merged.onnx")
    whole = b"".join((package / name).read_bytes() for name in files)
    assert document["model"]["sha256"] == hashlib.sha256(whole).hexdigest()


def test_an_embedding_graph_is_part_of_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens as those of the graph in one piece; the report says that no image was given."""
    decoder = TinyDecoder("ar", vocab=29, width=8, seed=2)
    package = save_embedded(decoder.save(tmp_path / "whole.onnx"), tmp_path / "p", "genai_config")

    status, document, _ = check(package, capsys, "--prompt-ids", "1,2,3,4")

    assert (status, document["verdict"]) == (0, "identical")
    assert document["prompts"][0]["candidate_ids"] == list(decoder.greedy((1, 2, 3, 4), 8))
    assert document["oracle"]["settings"]["text_only"] == "embedding is given no image_features"
    assert {entry["node"].split(": ")[0] for entry in document["oracle"]["proof"]["entries"]} == {"decoder"}


@pytest.mark.parametrize(
    ("options", "warns"), [((), True), (("--prompt-ids", "3,1"), False), (("--prompt-ids", "3"), True)]
)
def test_what_a_package_forces_behind_an_open_position_is_said(
    options: tuple[str, ...], warns: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whisper's language is null, as it is detected: what follows it is decoded too, with a warning."""
    config = {"decoder_start_token_id": 3, "forced_decoder_ids": [[1, None], [2, 5], [3, 6]]}
    package = SPOKEN.save(tmp_path / "p", "merged", config=config)

    status, document, err = check(package, capsys, *options)

    assert status == 0
    assert document["candidate"]["settings"]["not_forced"] == "5 at position 2, 6 at position 3"
    assert ("5 at position 2, 6 at position 3, is not forced" in err) == warns


def test_a_gap_in_what_a_package_forces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would be dropped in silence, and transformers refuses it as well."""
    config = {"decoder_start_token_id": 3, "forced_decoder_ids": [[1, 1], [3, 5]]}
    package = SPOKEN.save(tmp_path / "p", "merged", config=config)

    status, document, err = check(package, capsys)

    assert (status, err.count("\n")) == (2, 1)
    assert "forced_decoder_ids is [[1, 1], [3, 5]]: it leaves out position 2" in document["error"]["message"]
    assert not Path("reports").exists()


WRONG_INPUTS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a wrong width": (
        lambda: {"audio_features": np.zeros((1, 5, 9), np.float32)},
        "has audio_features as float32 [1, 5, 9], and the graph takes float32 [batch, frames, 8]",
    ),
    "a batch of two": (lambda: {"audio_features": np.zeros((2, 5, 8), np.float32)}, "[2, 5, 8]"),
    "a wrong rank": (lambda: {"audio_features": np.zeros((5, 8), np.float32)}, "[5, 8]"),
    "a wrong dtype": (lambda: {"audio_features": np.zeros((1, 5, 8))}, "float64 [1, 5, 8]"),
    "nothing": (dict, "has no array for audio_features, [batch, frames, 8]"),
    "a misspelt name": (
        lambda: {"audio_feature": np.zeros((1, 5, 8), np.float32)},
        "has no array for audio_features",
    ),
    "a stray array": (
        lambda: {"audio_features": np.zeros((1, 5, 8), np.float32), "audio_featurs": np.zeros(1)},
        "has an array audio_featurs, which is no input here. Did you mean audio_features?",
    ),
    "objects": (lambda: {"audio_features": np.array([{}], object)}, "cannot be read"),
    "no frames": (lambda: {"audio_features": np.zeros((1, 0, 8), np.float32)}, "its axis 1 is empty"),
    "a frame that is no number": (
        lambda: {
            "audio_features": np.where(np.arange(8) == 5, np.nan, np.ones((1, 3, 8))).astype(np.float32)
        },
        "has nan in audio_features[0, 0, 5], the first of 3",
    ),
    "a frame without bounds": (
        lambda: {"audio_features": np.full((1, 1, 8), -np.inf, np.float32)},
        "has -inf in audio_features[0, 0, 0], the first of 8",
    ),
}

IDS = np.array([[5, 2, 9]])
WRONG_TEXTS: dict[str, tuple[dict[str, NDArray[Any]], str]] = {
    "no tokens": (
        {"input_ids": IDS[:, :0], "attention_mask": IDS[:, :0]},
        "has input_ids as int64 [1, 0]: its axis 1 is empty",
    ),
    "a mask that is too short": (
        {"input_ids": IDS, "attention_mask": np.ones((1, 2), np.int64)},
        "has attention_mask as int64 [1, 2] beside input_ids as int64 [1, 3]",
    ),
    "a mask alone": (
        {"attention_mask": np.ones((1, 2), np.int64)},
        "has attention_mask and no input_ids, so that the encoder reads the prompt",
    ),
}


@pytest.mark.parametrize("case", WRONG_TEXTS)
def test_texts_that_do_not_fit_are_one_clear_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same for token IDs and masks."""
    arrays, says = WRONG_TEXTS[case]
    package = WRITTEN.save(tmp_path / "p", "merged", config=CONFIG)
    np.savez("f.npz", **arrays)

    status, document, err = check(package, capsys, "--inputs", "f.npz", "--prompt-ids", "3,1")

    assert (status, document["exit_code"], err.count("\n")) == (2, 2, 1)
    assert says in document["error"]["message"]
    assert not Path("reports").exists()


def sources(*sources: tuple[int, ...]) -> list[str]:
    """Token IDs for a text encoder."""
    return [option for ids in sources for option in ("--prompt-ids", ",".join(map(str, ids)))]


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (
            (5, 23),
            "input_ids[0, 1] = 23, which is outside the vocabulary of the encoder: source [23, 8] has 23",
        ),
        ((5, -1), "-1"),
        (
            (5,) * 7,
            "input_ids [1, 7], attention_mask [1, 7], which becomes 7 places, and places [6, 8] has 6",
        ),
    ],
)
def test_a_source_that_the_encoder_cannot_read(
    ids: tuple[int, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a prompt and in a file alike: one clear line before anything is opened; what it can read is read."""
    package = WRITTEN_IN_SIX.save(tmp_path / "p", "merged", config={"decoder_start_token_id": 3})
    np.savez("f.npz", input_ids=np.array([ids]))
    fine = (5, 2, 9, 4, 22, 0)

    for options in ([*sources(fine), *sources(ids)], ["--inputs", "f.npz", *sources((3,))]):
        status, document, err = check(package, capsys, *options)
        assert (status, document["exit_code"], err.count("\n")) == (2, 2, 1)
        assert says in document["error"]["message"]
        assert not Path("reports").exists()
    status, document, _ = check(package, capsys, *sources(fine))
    assert (status, document["verdict"]) == (0, "identical")


def test_features_of_another_length_than_the_encoder_has_places_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad input that says what is due; and what nobody gives is made up in that length."""
    package = SPOKEN_IN_SIX.save(tmp_path / "p", "merged", config=CONFIG)
    np.savez("f.npz", audio_features=SPOKEN_IN_SIX.features(5))

    status, document, err = check(package, capsys, "--inputs", "f.npz")

    assert (status, err.count("\n")) == (2, 1)
    assert "which becomes 5 places, and places [6, 8] has 6. It takes audio_features [1, 6, 8]." in err
    assert not Path("reports").exists()
    status, document, _ = check(package, capsys)
    assert (status, document["verdict"]) == (0, "identical")
    said = document["candidate"]["settings"]["encoder_inputs"]
    assert said == "made up from seed 0: audio_features [1, 6, 8]"


@pytest.mark.parametrize("case", WRONG_INPUTS)
def test_inputs_that_do_not_fit_are_one_clear_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 before anything is opened or written, with the name, what is there and what is due."""
    make, says = WRONG_INPUTS[case]
    package = SPOKEN.save(tmp_path / "p", "merged", config=CONFIG)
    np.savez("f.npz", **make())

    status, document, err = check(package, capsys, "--inputs", "f.npz")

    error = document["error"]
    assert status == document["exit_code"] == 2
    assert says in f"{error['message']} {error['next']}"
    assert err.count("\n") == 1
    assert not Path("reports").exists()


@pytest.mark.parametrize("content", [None, b"", b"not an archive", b"\x93NUMPY"])
def test_a_file_that_is_no_archive_is_one_clear_line(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing, empty, or something else."""
    package = SPOKEN.save(tmp_path / "p", "merged", config=CONFIG)
    if content is not None:
        Path("f.npz").write_bytes(content)

    status, document, err = check(package, capsys, "--inputs", "f.npz")

    assert (status, err.count("\n")) == (2, 1)
    assert "f.npz cannot be read" in document["error"]["message"]


def test_inputs_for_a_model_without_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An option that would do nothing is a mistake."""
    TinyDecoder().save(tmp_path / "model.onnx")
    np.savez("f.npz", x=np.zeros(1))

    status, document, _ = check(tmp_path, capsys, "--prompt-ids", "1", "--inputs", "f.npz")

    assert status == 2
    assert "takes nothing of one" in document["error"]["message"]


def test_a_start_token_that_nobody_declares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without it nobody knows what the decoder of a text is fed first."""
    package = WRITTEN.save(tmp_path / "p", "merged")

    status, document, _ = check(package, capsys, "--prompt-ids", "1,2")

    assert status == 2
    assert "decoder_start_token_id" in document["error"]["next"]


def declare(folder: Path, name: str, content: Any) -> None:
    """Write a JSON sidecar, which YAML reads as well."""
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def missing_encoder(folder: Path) -> None:
    """The configuration names an encoder that is not there."""
    SPOKEN.save(folder, "cross inputs")
    (folder / "encoder.onnx").unlink()
    decoder = {"filename": "decoder.onnx"}
    declare(
        folder, "genai_config.json", {"model": {"decoder": decoder, "encoder": {"filename": "encoder.onnx"}}}
    )


def missing_part(folder: Path) -> None:
    """A decoder in two parts, one of which is not there."""
    TinyDecoder().save(folder / "a.onnx")
    parts = [{"a": {"filename": "a.onnx"}, "b": {"filename": "b.onnx"}}]
    declare(folder, "genai_config.json", {"model": {"decoder": {"pipeline": parts}}})


def two_decoders(folder: Path) -> None:
    """Two decoders in folders of their own."""
    for name in ("decoder", "text_decoder"):
        (folder / name).mkdir()
        TinyDecoder().save(folder / name / "model.onnx")


def no_first_call(folder: Path) -> None:
    """A pair without the graph for the first call; the encoder lies there."""
    SPOKEN.save(folder, "pair", config=CONFIG)
    (folder / "decoder_model.onnx").unlink()


def no_later_calls(folder: Path) -> None:
    """A pair without the graph for later calls."""
    SPOKEN.save(folder, "pair", config=CONFIG)
    (folder / "decoder_with_past_model.onnx").unlink()


def pipeline(folder: Path, names: tuple[str, str], silent: str | None = None) -> None:
    """A decoder in two parts; at the calls that `silent` names the last of them does not run."""
    parts = cut(TinyDecoder().save(folder.parent / "whole.onnx"), folder, [30])
    stages: list[dict[str, dict[str, Any]]] = [
        {name: {"filename": part.path.name}} for name, part in zip(names, parts, strict=True)
    ]
    if silent is not None:
        stages[-1][names[-1]][silent] = False
    declare(folder, "genai_config.json", {"model": {"decoder": {"pipeline": stages}}})


def two_declared_decoders(folder: Path) -> None:
    """Two decoders that the metadata declares."""
    for name in ("a", "b"):
        TinyDecoder().save(folder / f"{name}.onnx")
    entries = {name: {"filename": f"{name}.onnx", "type": "decoder"} for name in ("a", "b")}
    declare(folder, "inference_metadata.yaml", {"pipeline": {"models": entries}})


def two_encoders(folder: Path) -> None:
    """Two encoders that could both be meant."""
    SPOKEN.save(folder, "merged")
    (folder / "encoder.onnx").write_bytes((folder / "encoder_model.onnx").read_bytes())


def transducer(folder: Path) -> None:
    """What exporters of transducers write."""
    for name in ("encoder-model.onnx", "decoder_joint-model.onnx"):
        TinyDecoder().save(folder / name)


def declared_transducer(folder: Path) -> None:
    """A transducer by its configuration."""
    TinyDecoder().save(folder / "decoder.onnx")
    declare(
        folder,
        "genai_config.json",
        {"model": {"type": "parakeet-tdt", "decoder": {"filename": "decoder.onnx"}}},
    )


def speculative(folder: Path) -> None:
    """A target and its draft."""
    TinyDecoder().save(folder / "target.onnx")
    strategy = {"kind": "speculative", "draft": {"session": "draft"}}
    declare(folder, "genai_config.json", {"pipeline": {"strategy": strategy}})


def diffusion(folder: Path) -> None:
    """A pipeline that denoises."""
    TinyDecoder().save(folder / "unet.onnx")
    models = {"unet": {"filename": "unet.onnx"}}
    declare(
        folder,
        "inference_metadata.yaml",
        {"pipeline": {"models": models, "strategy": {"kind": "iterative_denoise"}}},
    )


def diffusion_by_name(folder: Path) -> None:
    """A folder for each of its graphs."""
    for name in ("unet", "vae_decoder"):
        (folder / name).mkdir()
        TinyDecoder().save(folder / name / "model.onnx")


def encoder_alone(folder: Path, form: str = "merged", *, model: TinySeq2Seq = SPOKEN) -> None:
    """What is left where nobody copied the decoder."""
    model.save(folder, form)
    for graph in folder.glob("decoder*.onnx"):
        graph.unlink()


def encoder_in_a_folder(folder: Path) -> None:
    """The same, under the name of its folder."""
    encoder_alone(folder)
    (folder / "encoder").mkdir()
    (folder / "encoder_model.onnx").rename(folder / "encoder" / "model.onnx")


def encoder_of_any_name(folder: Path) -> None:
    """A graph that takes features and gives hidden states, whatever it is called."""
    encoder_alone(folder)
    (folder / "encoder_model.onnx").rename(folder / "model.onnx")


def encoder_and_embedding(folder: Path) -> None:
    """Two graphs, neither of which is a decoder."""
    encoder_alone(folder)
    (folder / "embed_tokens.onnx").write_bytes((folder / "encoder_model.onnx").read_bytes())


PACKAGES: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "missing encoder": (missing_encoder, 2, "needs encoder (encoder.onnx), which the package declares"),
    "an encoder alone": (
        encoder_alone,
        2,
        "encoder_model.onnx is an encoder: it gives last_hidden_state and no logits, and the decoder",
    ),
    "an encoder of texts alone": (
        lambda folder: encoder_alone(folder, model=WRITTEN),
        2,
        "encoder_model.onnx is an encoder",
    ),
    "an encoder with cross KV alone": (
        lambda folder: encoder_alone(folder, "cross inputs"),
        2,
        "encoder.onnx is an encoder: it gives encoder_hidden_states and no logits",
    ),
    "an encoder in its folder": (encoder_in_a_folder, 2, "encoder/model.onnx is an encoder"),
    "an encoder of any name": (encoder_of_any_name, 2, "model.onnx is an encoder"),
    "an encoder and an embedding": (
        encoder_and_embedding,
        2,
        "the decoder is missing, to which embed_tokens.onnx, encoder_model.onnx belong",
    ),
    "missing part": (missing_part, 2, "model.decoder.pipeline.b.filename is 'b.onnx', which is missing"),
    "two decoders": (two_decoders, 2, "2 decoders, decoder, text_decoder"),
    "no graph for the first call": (no_first_call, 2, "decoder_model.onnx is missing, the partner of"),
    "no graph for later calls": (no_later_calls, 2, "decoder_with_past_model.onnx is missing, the partner"),
    "no logits later": (
        lambda folder: pipeline(folder, ("a", "b"), "run_on_token_gen"),
        2,
        "no part gives logits after the prompt, when b does not run",
    ),
    "no logits at first": (
        lambda folder: pipeline(folder, ("a", "b"), "run_on_prompt"),
        2,
        "no part gives logits at the prompt, when b does not run",
    ),
    "parts of one name": (lambda folder: pipeline(folder, ("a", "a")), 2, "two graphs of the name 'a'"),
    "two declared decoders": (two_declared_decoders, 2, "has 2 decoders, a, b"),
    "two encoders": (two_encoders, 2, "encoder, encoder_model could all give encoder_hidden_states"),
    "transducer": (transducer, 3, "is a transducer (decoder_joint-model.onnx)"),
    "declared transducer": (declared_transducer, 3, "is a transducer"),
    "speculative pair": (speculative, 3, "is a speculative pair"),
    "diffusion": (diffusion, 3, "is a pipeline of the kind iterative_denoise"),
    "diffusion by name": (diffusion_by_name, 3, "is a diffusion pipeline (unet/model.onnx)"),
}


@pytest.mark.parametrize("case", PACKAGES)
def test_packages_that_cannot_be_driven_are_one_clear_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is missing or ambiguous is bad input; what is no decode token after token is refused by name."""
    make, exit_code, says = PACKAGES[case]
    folder = tmp_path / "p"
    folder.mkdir()
    make(folder)

    status, document, err = check(folder, capsys, "--prompt-ids", "1,2")

    found = document["error"] if exit_code == 2 else document["refusal"]
    assert (status, document["exit_code"]) == (exit_code, exit_code)
    assert says in found["message"]
    assert exit_code == 2 or found["code"] == "E_NOT_DRIVABLE"
    assert err.count("\n") == 1
    assert not Path("reports").exists()


def test_a_graph_that_may_be_a_decoder_is_no_encoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes token IDs, gives hidden states, and is called a model: perhaps a decoder without its head."""
    encoder_alone(tmp_path, model=WRITTEN)
    (tmp_path / "encoder_model.onnx").rename(tmp_path / "model.onnx")

    status, document, _ = check(tmp_path, capsys, "--prompt-ids", "1,2")

    assert (status, document["refusal"]["code"]) == (3, "E_NO_LOGITS_OUTPUT")
