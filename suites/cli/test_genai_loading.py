from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures.graphs import save_ports
from fixtures.layouts import dense_06b, hybrid_27b
from harness.cli.app import run

CONFIG = {
    "max_position_embeddings": 4096,
    "num_attention_heads": 24,
    "bos_token_id": 1,
    "eos_token_id": [2, 7],
    "pad_token_id": 0,
}


def written(folder: Path, inventory: Any, config: dict[str, Any] | None) -> dict[str, Any]:
    """The configuration that is written beside a graph with these ports."""
    save_ports(folder / "model.onnx", inventory)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert run(["derive", str(folder), "--write", "genai-config"]) == 0
    return dict(json.loads((folder / "genai_config.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("nested", [False, True])
def test_what_a_loader_asks_for_is_written(tmp_path: Path, nested: bool) -> None:
    """Sizes as the ports have them, the rest as the model's configuration does, also in a part of it."""
    config = {"text_config": CONFIG, "eos_token_id": [2, 7]} if nested else CONFIG
    document = written(tmp_path, dense_06b(layers=3), config)

    model, decoder = document["model"], document["model"]["decoder"]
    cache = next(p for p in dense_06b(layers=3).inputs if p.name == decoder["inputs"]["past_key_names"] % 0)
    logits = next(p for p in dense_06b(layers=3).outputs if p.name == decoder["outputs"]["logits"])
    assert (decoder["num_key_value_heads"], decoder["head_size"]) == (cache.shape[1], cache.shape[3])
    assert (decoder["num_hidden_layers"], decoder["num_attention_heads"]) == (3, 24)
    assert model["vocab_size"] == logits.shape[-1]
    assert (model["context_length"], document["search"]["max_length"]) == (4096, 4096)
    assert (model["bos_token_id"], model["eos_token_id"], model["pad_token_id"]) == (1, [2, 7], 0)
    assert document["search"]["past_present_share_buffer"] is False


def test_layers_are_counted_to_the_last_one_that_has_a_cache(tmp_path: Path) -> None:
    """Names are numbered by layer, and only some layers of a hybrid have keys and values."""
    document = written(tmp_path, hybrid_27b(layers=8), {"max_position_embeddings": 16})

    assert document["model"]["decoder"]["num_hidden_layers"] == 8


def test_what_nobody_says_is_said_to_be_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is written all the same: a person can add it."""
    document = written(tmp_path, dense_06b(layers=1), None)

    assert "context_length" not in document["model"]
    assert "say context_length: onnxruntime-genai asks for it" in capsys.readouterr().err
