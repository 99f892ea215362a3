"""Real exporters' tiny models, driven by the loop and compared with what was recorded when they were made.

The models are not part of this repository. `ONNX_PARITY_EXPORTER_MODELS` names a folder with one model in
each subfolder: `model.onnx`, and `case.npz` with two recorded calls, the second of which is fed the caches
of the first (arrays `call0.in.PORT`, `call0.out.PORT`, `call1.in.PORT`, ...).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fixtures.sessions import open_session
from harness.decode.feeds import plan_feeds
from harness.decode.loop import forced_decode
from harness.errors import NotDrivableError
from harness.ports import read_ports
from harness.topology.resolve import resolve
from harness.topology.spec import Topology

DRIVEN = (
    "mobius-bamba-mamba2-hybrid",
    "mobius-gemma4_text-kvshared",
    "mobius-llama-attention",
    "mobius-llama-gqa-cpu",
    "mobius-mamba2-pure-ssm",
    "mobius-qwen3_5-gated-deltanet-hybrid",
)
"""Token IDs in, growing KV or fixed states, at most a mask and positions of rank 2."""

NOT_DRIVEN = {
    "genai-lfm2-conv-hybrid": "past_key_values.1.key",  # the width of a head is the symbol kv_cache_dim
    "genai-llama-int4-matmulnbits": "past_key_values.0.key",  # the same
    "genai-qwen3_5-hybrid": "position_ids",  # rank 3
    "genai-whisper-decoder": "past_key_cross_0",
    "mobius-llama-static-cache": "key_cache.0",
    "optimum-whisper-merged": "encoder_hidden_states",
}
"""A port, for each, that the loop cannot feed."""

VOCABULARY = 256


def model_of(name: str) -> Path:
    """The graph of one model; skips by the name of the variable to set."""
    folder = os.environ.get("ONNX_PARITY_EXPORTER_MODELS")
    if not folder:
        pytest.skip("set ONNX_PARITY_EXPORTER_MODELS to a folder of exporters' models")
    return Path(folder) / name / "model.onnx"


def topology_of(model: Path) -> Topology:
    """What the ports settle."""
    topology = resolve(read_ports(model)).topology
    assert topology is not None
    return topology


@pytest.mark.parametrize("kind", ["ort-cpu", "nxrt", "oracle"])
@pytest.mark.parametrize("name", DRIVEN)
def test_the_loop_reproduces_both_recorded_calls(name: str, kind: str) -> None:
    """All logits after the prompt, and after the next token with threaded caches, are the recorded ones."""
    model = model_of(name)
    topology = topology_of(model)
    case = np.load(model.with_name("case.npz"))
    prompt, more = (case[f"call{call}.in.{topology.token_input}"][0].tolist() for call in (0, 1))

    # The token after the last recorded one is fed to nobody: any will do.
    trace = forced_decode(open_session(kind, model), topology, prompt, [*more, 0], top_k=VOCABULARY)

    assert trace.failure is None
    for call, step in ((0, trace.steps[0]), (1, trace.steps[-1])):
        recorded = case[f"call{call}.out.{topology.logits_output}"][0, -1]
        found = np.empty_like(recorded)
        found[list(step.token_ids)] = step.values
        assert np.allclose(found, recorded, atol=1e-4)


@pytest.mark.parametrize("name", NOT_DRIVEN)
def test_what_cannot_be_fed_is_refused_by_name(name: str) -> None:
    """Before anything runs, from the ports alone; never a crash."""
    model = model_of(name)

    with pytest.raises(NotDrivableError) as caught:
        plan_feeds(topology_of(model), read_ports(model))
    assert NOT_DRIVEN[name] in caught.value.ports
