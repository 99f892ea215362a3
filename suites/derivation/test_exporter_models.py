"""Tiny models from real exporters: which of them the conventions settle so far."""

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
    "genai-llama-int4-matmulnbits",
    "mobius-bamba-mamba2-hybrid",
    "mobius-gemma4_text-kvshared",
    "mobius-llama-attention",
    "mobius-llama-gqa-cpu",
    "mobius-qwen3_5-gated-deltanet-hybrid",
)
REFUSED = (
    "dynamo-llama-default-names",
    "genai-lfm2-conv-hybrid",
    "genai-qwen3_5-hybrid",
    "genai-whisper-decoder",
    "mobius-llama-static-cache",
    "mobius-mamba2-pure-ssm",
    "optimum-whisper-merged",
)


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


@pytest.mark.parametrize("name", DERIVABLE + REFUSED)
def test_ports_are_those_that_the_exporter_recorded(name: str) -> None:
    """Names, dtypes, ranks and order of a graph's ports agree with the record beside it.

    The record has extents from a run where the graph has symbols, so extents are not compared.
    """
    recorded, _ = inventory_from_json({"ports": truth(name)["ports"]})
    assert signature(read_ports(model_folder(name) / "model.onnx")) == signature(recorded)


@pytest.mark.parametrize("name", DERIVABLE)
def test_topology_is_what_the_exporter_means(name: str) -> None:
    """Token, mask, positions, logits, KV pairs and state pairs are those of the exporter's code."""
    expected = truth(name)["truth"]
    topology = resolve(read_ports(model_folder(name) / "model.onnx")).topology
    assert topology is not None
    assert topology.token_input == expected["token_input"]
    assert topology.attention_mask_input == expected["attention_mask"]
    assert topology.position_ids_input == expected["position_ids"]
    assert topology.logits_output == expected["logits"]
    assert set(zip(topology.kv_inputs, topology.kv_outputs, strict=True)) == {
        (pair["input"], pair["output"]) for pair in expected["kv"]
    }
    assert {(pair.input, pair.output) for pair in topology.state_pairs} == {
        (pair["input"], pair["output"]) for pair in expected["state"]
    }


@pytest.mark.parametrize("name", REFUSED)
def test_other_namings_are_refused_by_name(name: str) -> None:
    """A naming that no convention knows is refused, and the refusal names cache ports of that graph."""
    derivation = resolve(read_ports(model_folder(name) / "model.onnx"))
    assert derivation.outcome is Outcome.REFUSED
    assert derivation.refusal is not None
    expected = truth(name)["truth"]
    caches = {pair["input"] for pair in expected["kv"] + expected["state"]}
    assert caches & set(derivation.refusal.ports)
    assert derivation.refusal.message
