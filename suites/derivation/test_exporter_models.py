"""Tiny models from real exporters: what their ports settle by name, and what they leave open."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness.ports import PortInventory, inventory_from_json, read_ports
from harness.topology.resolve import resolve
from harness.topology.spec import Outcome

DERIVABLE = (
    "genai-lfm2-conv-hybrid",
    "genai-llama-int4-matmulnbits",
    "genai-qwen3_5-hybrid",
    "genai-whisper-decoder",
    "mobius-bamba-mamba2-hybrid",
    "mobius-gemma4_text-kvshared",
    "mobius-llama-attention",
    "mobius-llama-gqa-cpu",
    "mobius-llama-static-cache",
    "mobius-mamba2-pure-ssm",
    "mobius-qwen3_5-gated-deltanet-hybrid",
    "optimum-whisper-merged",
)
NAMELESS = "dynamo-llama-default-names"


def model_folder(name: str) -> Path:
    """The folder of one model; skips by name where the models are not at hand."""
    root = os.environ.get("ONNX_PARITY_EXPORTER_MODELS")
    if not root:
        pytest.skip("set ONNX_PARITY_EXPORTER_MODELS to a folder of exported models with meta.json")
    return Path(root) / name


def truth(name: str) -> dict[str, Any]:
    """What the exporter's own code says about the ports."""
    loaded: dict[str, Any] = json.loads((model_folder(name) / "meta.json").read_text(encoding="utf-8"))
    return loaded


def signature(inventory: PortInventory) -> list[tuple[str, str | None, int]]:
    """Name, dtype and rank of each port, in order."""
    return [
        (port.name, port.dtype, len(port.shape or ())) for port in (*inventory.inputs, *inventory.outputs)
    ]


@pytest.mark.parametrize("name", [*DERIVABLE, NAMELESS])
def test_ports_are_those_that_the_exporter_recorded(name: str) -> None:
    """Names, dtypes, ranks and order of a graph's ports agree with the record beside it.

    The record has extents from a run where the graph has symbols, so extents are not compared.
    """
    recorded, _ = inventory_from_json({"ports": truth(name)["ports"]})
    assert signature(read_ports(model_folder(name) / "model.onnx")) == signature(recorded)


@pytest.mark.parametrize("name", DERIVABLE)
def test_topology_is_what_the_exporter_means(name: str) -> None:
    """Token, mask, positions, logits, and each KV, state and cross KV pair are as the exporter has them."""
    expected = truth(name)["truth"]
    topology = resolve(read_ports(model_folder(name) / "model.onnx")).topology
    assert topology is not None
    assert topology.token_input == expected["token_input"]
    assert topology.attention_mask_input == expected["attention_mask"]
    assert topology.position_ids_input == expected["position_ids"]
    assert topology.logits_output == expected["logits"]
    static = topology.static_cache or {}
    assert {
        *zip(topology.kv_inputs, topology.kv_outputs, strict=True),
        *zip(static.get("key_cache_inputs", ()), static.get("key_cache_outputs", ()), strict=True),
        *zip(static.get("value_cache_inputs", ()), static.get("value_cache_outputs", ()), strict=True),
    } == {(pair["input"], pair["output"]) for pair in expected["kv"]}
    assert {(pair.input, pair.output) for pair in topology.state_pairs} == {
        (pair["input"], pair["output"]) for pair in expected["state"]
    }
    assert set(topology.cross_kv_inputs) == {pair["input"] for pair in expected["cross_kv"]}


def test_the_static_cache_has_its_control_ports() -> None:
    """The write index and the valid length are told apart, and the buffers are no growing KV."""
    topology = resolve(read_ports(model_folder("mobius-llama-static-cache") / "model.onnx")).topology
    assert topology is not None
    assert topology.static_cache is not None
    assert topology.static_cache["write_indices_input"] == "write_indices"
    assert topology.static_cache["kv_sequence_length_input"] == "nonpad_kv_seqlen"
    assert topology.kv_inputs == ()


def test_outputs_without_names_are_refused_by_name() -> None:
    """`cat_17` to `cat_20` fit all four past ports: the ports alone do not say which is whose."""
    derivation = resolve(read_ports(model_folder(NAMELESS) / "model.onnx"))
    assert derivation.outcome is Outcome.REFUSED
    assert derivation.refusal is not None
    assert derivation.refusal.code == "E_AMBIGUOUS_STATE_PAIRING"
    expected = truth(NAMELESS)["truth"]
    assert {name for pair in expected["kv"] for name in (pair["input"], pair["output"])} <= set(
        derivation.refusal.ports
    )
