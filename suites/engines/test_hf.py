"""The engine of source models: what is refused without torch, and what transformers would let pass."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.exported import TinySource, export
from harness.engines.base import Engine
from harness.engines.hf import ENGINE, LOGITS, TOKENS
from harness.engines.hf_folder import check_model_folder
from harness.engines.registry import parse_engine
from harness.errors import EngineFailedError, EngineUnavailableError, InputError


def write_folder(folder: Path, *, config: object = None, files: dict[str, str] | None = None) -> Path:
    """A folder with a config and files; weights are empty files, as nothing here reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama"} if config is None else config
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, text in ({"model.safetensors": ""} if files is None else files).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def doubled(folder: Path) -> Path:
    """The folder, whose config has a key twice."""
    (folder / "config.json").write_text('{"model_type": "llama", "model_type": "qwen2"}', encoding="utf-8")
    return folder


def index(*shards: str) -> str:
    """The index of weights in several files."""
    return json.dumps({"weight_map": {f"w{number}": shard for number, shard in enumerate(shards)}})


def test_the_engine_keeps_the_protocol_and_is_found_by_its_name() -> None:
    """The check itself knows it by name alone."""
    assert isinstance(ENGINE, Engine)
    assert parse_engine("hf:precision=float64").options == {"precision": "float64"}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "nowhere", "no such folder"),
        (lambda folder: write_folder(folder) / "model.safetensors", "a file; a source model is a folder"),
        (lambda folder: folder, "has no config.json"),
        (lambda folder: write_folder(folder, config=[1]), "holds no mapping"),
        (lambda folder: write_folder(folder, config={}), "names no model_type"),
        (
            lambda folder: write_folder(folder, config={"model_type": "t5", "is_encoder_decoder": True}),
            "t5 has an encoder",
        ),
        (lambda folder: write_folder(folder, files={}), "without weights a model would compute with random"),
        (
            lambda folder: write_folder(folder, files={"pytorch_model.bin": ""}),
            "has neither model.safetensors nor model.safetensors.index.json",
        ),
        (
            lambda folder: write_folder(
                folder,
                files={
                    "model.safetensors.index.json": index("a-1.safetensors", "a-2.safetensors"),
                    "a-1.safetensors": "",
                },
            ),
            "a-2.safetensors of the weights of model.safetensors.index.json is missing",
        ),
        (
            lambda folder: write_folder(
                folder, files={"model.safetensors.index.json": index(*(f"a-{i}" for i in range(5)))}
            ),
            "a-0, a-1, a-2 and 2 more of the weights of model.safetensors.index.json are missing",
        ),
        (lambda folder: write_folder(folder, files={"model.safetensors.index.json": "{"}), "not readable as"),
        (
            lambda folder: write_folder(
                folder, files={"model.safetensors.index.json": '{"weight_map": {}, "weight_map": {}}'}
            ),
            "'weight_map' stands twice",
        ),
        (
            lambda folder: doubled(write_folder(folder)),
            r"config\.json: not readable .* 'model_type' stands twice",
        ),
        (
            lambda folder: write_folder(folder, files={"model.safetensors.index.json": "{}"}),
            "has no weight_map",
        ),
    ],
)
def test_a_folder_that_is_no_source_model_is_refused_without_torch(
    tmp_path: Path, make: Callable[[Path], Path], said: str
) -> None:
    """One line that names the file and says what to do, before anything slow is imported."""
    with pytest.raises(InputError, match=said) as raised:
        check_model_folder(make(tmp_path))
    assert str(tmp_path) in raised.value.message
    assert "\n" not in str(raised.value)
    assert raised.value.next_action


def test_what_is_missing_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither looking nor refusing imports anything."""
    monkeypatch.setattr("harness.engines.hf.util.find_spec", lambda name: None)
    found = ENGINE.availability()
    assert (found.usable, found.reason) == (False, "transformers and torch are not installed.")
    monkeypatch.setattr("harness.engines.hf.util.find_spec", lambda name: None if name == "torch" else 1)
    assert ENGINE.availability().reason == "the package torch is not installed."
    with pytest.raises(EngineUnavailableError, match=r"pip install 'onnx-parity\[hf\]'"):
        ENGINE.open(write_folder(tmp_path), {})


def test_looking_for_the_engine_imports_neither_package() -> None:
    """Torch takes seconds to import: listing engines must not."""
    code = (
        "import sys; from harness.engines.hf import ENGINE; ENGINE.availability(); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_graph_is_no_source_model(tmp_path: Path) -> None:
    """`--candidate hf` says what hf is for."""
    graph = tmp_path / "model.onnx"
    graph.write_bytes(b"")
    with pytest.raises(InputError, match="runs the model that a package was exported from"):
        ENGINE.open(graph, {})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights."""
    return TinySource().save(tmp_path_factory.mktemp("source"))


def altered(source: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The model with other weights in its file."""
    from safetensors.numpy import load_file, save_file

    weights = dict(load_file(source / "model.safetensors"))
    change(weights)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.hf
def test_it_computes_what_the_exported_graph_computes(source: Path, tmp_path: Path) -> None:
    """The oracle on the graph shares no code with torch: in float64 both agree to float32's rounding.

    Not closer, as transformers computes norms, softmax and rotary tables in float32 whatever the type.
    """
    from harness.oracle import OracleModel

    ids = np.arange(1, 41, dtype=np.int64)[None] % TinySource().vocab
    session = ENGINE.open(source, {"precision": "float64"})
    logits = session.run({TOKENS: session.place(ids)}, (LOGITS,))[LOGITS]
    assert (logits.dtype, logits.shape) == ("float64", (1, 40, TinySource().vocab))
    model = OracleModel.load(export(source, tmp_path / "model.onnx"), precision="float64")
    empty = {spec.name: np.zeros((1, 2, 0, 8), np.float32) for spec in model.inputs if "past" in spec.name}
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(40)[None]}
    expected = model.run({**feeds, **empty}, ("logits",))["logits"]
    np.testing.assert_allclose(session.copy_out(logits), expected, atol=1e-4 * np.abs(expected).max())
    (top,) = session.top_logits(logits, k=3, positions=(-1,))
    assert list(top.token_ids) == list(np.argsort(-session.copy_out(logits)[0, -1])[:3])


@pytest.mark.hf
def test_what_runs_stands_in_the_report(source: Path) -> None:
    """Precision, attention and versions; the vocabulary is that of the head."""
    session = ENGINE.open(source, {"threads": 1})
    assert session.info.settings == {
        "precision": "float32",
        "threads": 1,
        "attention": "eager",
        "unused_weights": 0,
    }
    assert session.info.version.split(", ")[1].startswith("torch ")
    assert session.inventory.outputs[0].shape == ("batch", "sequence", TinySource().vocab)
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.run({}, ())


@pytest.mark.hf
def test_a_missing_weight_is_refused_and_never_made_up(source: Path, tmp_path: Path) -> None:
    """Transformers would draw it at random and go on."""
    lost = "model.layers.1.mlp.up_proj.weight"
    folder = altered(source, tmp_path, lambda weights: weights.pop(lost))
    with pytest.raises(InputError, match=f"lack {lost}: transformers would go on with random numbers"):
        ENGINE.open(folder, {})


@pytest.mark.hf
def test_a_tied_head_is_no_missing_weight(tmp_path: Path) -> None:
    """It is written once, as the embedding."""
    session = ENGINE.open(TinySource(tied=True).save(tmp_path), {})
    assert session.inventory.outputs[0].shape == ("batch", "sequence", TinySource().vocab)


@pytest.mark.hf
def test_a_weight_of_another_shape_is_refused(source: Path, tmp_path: Path) -> None:
    """Also where transformers was told to pass over it, which it would fill with random numbers."""

    def cut(weights: dict[str, Any]) -> None:
        weights["lm_head.weight"] = weights["lm_head.weight"][:-1].copy()

    with pytest.raises(
        InputError, match=r"weights lm_head\.weight have another shape than config\.json says"
    ):
        ENGINE.open(altered(source, tmp_path, cut), {})


def extra(*names: str) -> Callable[[dict[str, Any]], None]:
    """Weights that the model does not have."""
    return lambda weights: weights.update({name: np.zeros((2, 2), np.float32) for name in names})


@pytest.mark.hf
def test_weights_of_a_part_that_is_left_out_are_counted(source: Path, tmp_path: Path) -> None:
    """What sees, or predicts further, and the masks of older files; the report says how many."""
    others = extra(
        "vision.layers.0.mlp.up_proj.weight", "mtp.norm.weight", "model.layers.0.self_attn.masked_bias"
    )
    session = ENGINE.open(altered(source, tmp_path, others), {})
    assert session.info.settings["unused_weights"] == 3


@pytest.mark.hf
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.7.mlp.up_proj.weight",  # a config with too few layers
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.sinks",
        "model.layers.0.self_attn.q_proj.bias",
        "lm_head.bias",
    ],
)
def test_a_weight_of_what_the_model_has_is_refused_where_it_takes_nothing_of_it(
    source: Path, tmp_path: Path, name: str
) -> None:
    """The weights are those of another model, and what it would say witnesses nothing."""
    with pytest.raises(InputError, match=f"of the type llama, .* takes nothing of the weights {name}"):
        ENGINE.open(altered(source, tmp_path, extra(name)), {})


@pytest.mark.hf
@pytest.mark.parametrize(
    ("made", "said_to_be", "fits"),
    [
        ("llama", "mistral", True),
        ("qwen3", "llama", False),  # norms of query and key are left over
        ("qwen2", "llama", False),  # and biases
        ("llama", "qwen3", False),  # norms are missing
        ("llama", "qwen2", False),
        ("llama", "gemma", True),  # other scales, with the same names: nothing shows it
        ("llama", "gpt2", False),
    ],
)
def test_weights_under_a_config_of_another_type(
    tmp_path: Path, made: Any, said_to_be: str, fits: bool
) -> None:
    """They fit, or what is missing or left over is named; nothing is made up."""
    TinySource(made).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": said_to_be, "architectures": None}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if fits:
        assert ENGINE.open(tmp_path, {}).info.settings["unused_weights"] == 0
    else:
        with pytest.raises(
            InputError, match=r"lack (model|transformer)\.|takes nothing of the weights model\."
        ):
            ENGINE.open(tmp_path, {})


@pytest.mark.hf
@pytest.mark.parametrize(
    ("name", "content"),
    [("model.safetensors", "not safetensors"), ("config.json", '{"model_type": "no-such-model"}')],
)
def test_what_transformers_cannot_load_is_said_in_one_line(
    source: Path, tmp_path: Path, name: str, content: str
) -> None:
    """Damaged weights and an unknown architecture: no traceback."""
    altered(source, tmp_path, lambda weights: None)
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(EngineFailedError, match="transformers cannot load") as raised:
        ENGINE.open(tmp_path, {})
    assert "\n" not in raised.value.message


@pytest.mark.hf
def test_code_that_comes_with_a_model_is_not_run(source: Path, tmp_path: Path) -> None:
    """A config may name Python files of its own; whoever trusts them can load them elsewhere."""
    altered(source, tmp_path, lambda weights: None)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", encoding="utf-8")
    with pytest.raises(EngineFailedError, match="transformers cannot load"):
        ENGINE.open(tmp_path, {})
    assert not (tmp_path / "ran").exists()


_SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
OTHERS: dict[str, dict[str, Any]] = {
    "mixtral": _SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba2": {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
    },
    "gemma3_text": _SHAPE | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
}


@pytest.mark.hf
@pytest.mark.parametrize("kind", OTHERS)
def test_experts_states_and_windows_run_in_both_precisions(kind: str, tmp_path: Path) -> None:
    """What is fused for float32 alone is computed plainly; the two differ by the rounding of float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(kind, **OTHERS[kind], **special)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ids = np.arange(10, dtype=np.int64)[None]
    given = []
    for precision in ("float32", "float64"):
        session = ENGINE.open(tmp_path, {"precision": precision})
        logits = session.run({TOKENS: session.place(ids)}, (LOGITS,))[LOGITS]
        given.append(session.copy_out(logits))
        assert session.info.settings["unused_weights"] == 0
    np.testing.assert_allclose(*given, atol=1e-5 * np.abs(given[1]).max())
    assert np.any(given[0] != given[1])
