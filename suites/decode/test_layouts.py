"""Port layouts of real exporters: whatever a derivation accepts can be fed, but for what is named here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fixtures.recorded import RecordedLayout, recorded_layouts
from harness.decode.feeds import plan_feeds
from harness.decode.plan import FeedPlan
from harness.errors import NotDrivableError
from harness.topology.resolve import resolve
from harness.topology.spec import GraphFacts, Role, Topology

FROM_ELSEWHERE = frozenset(
    {
        Role.AUXILIARY,
        Role.EMBEDS,
        Role.CROSS_KV_KEY,
        Role.CROSS_KV_VALUE,
        Role.ENCODER_HIDDEN_STATES,
        Role.ENCODER_ATTENTION_MASK,
    }
)
"""What another graph computes: `suites/decode/test_encoder.py`, `test_components.py` and their like."""

NOT_FED = {
    # A batch of the beams of one search, or of several sources: a session reduces the logits of one sequence.
    "genai-test__marian-batch-beams__decoder": "input_ids takes a batch of 4",
    "genai-test__marian-batch-values__decoder": "input_ids takes a batch of 2",
    "genai-test__marian-batch__decoder": "input_ids takes a batch of 2",
    # It judges a block of tokens that are proposed: fed one by one, three rows of each call would have to be
    # taken back out of its cache.
    "onnx-genai__onnx_genai_workflows-speculative-verifier": "proposed_tokens takes exactly 4 tokens a call",
    # Heads that are counted with the batch: the ports do not say how many, the nodes do (`test_extents.py`).
    "synth__optimum-bloom-legacy": "batch_size * num_heads",
    "synth__transformersjs-falcon-legacy": "batch_size * num_heads",
}
"""Layouts that name no way to feed them, each with what the refusal says."""

HEAD_WIDTH = 16


def derived() -> dict[str, tuple[RecordedLayout, Topology]]:
    """The layouts that derive, with the width that their nodes would say for heads of symbolic width."""
    found = {}
    for layout in recorded_layouts():
        topology = resolve(layout.inventory, declared=layout.declared).topology
        if topology is None:
            continue
        open_widths = {
            port.name: {len(port.shape) - 1: HEAD_WIDTH}
            for port in layout.inventory.inputs
            if port.shape and port.shape[-1] == "kv_cache_dim"
        }
        found[layout.name] = (layout, replace(topology, facts=GraphFacts(extents=open_widths)))
    return found


LAYOUTS = derived()


def planned(name: str) -> FeedPlan | NotDrivableError:
    """The plan of a layout, or the refusal."""
    layout, topology = LAYOUTS[name]
    try:
        return plan_feeds(topology, layout.inventory)
    except NotDrivableError as error:
        return error


def test_most_layouts_derive() -> None:
    """Otherwise what follows says little."""
    assert len(LAYOUTS) > 130


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_port_is_fed_or_named_with_its_reason(name: str) -> None:
    """A plan feeds each input once; a refusal is for what another graph computes, or is listed here.

    Of Gemma 4 that is the product of a second embedding.
    """
    layout, topology = LAYOUTS[name]
    inputs = {port.name for port in layout.inventory.inputs}
    roles = {port.name: port.role for port in topology.roles if port.direction == "input"}

    plan = planned(name)

    if isinstance(plan, NotDrivableError):
        if name in NOT_FED:
            assert NOT_FED[name] in plan.message
        else:
            assert {roles[port] for port in plan.ports} <= FROM_ELSEWHERE
        return
    assert name not in NOT_FED
    fed = [call.name for call in plan.calls] + [port for cache in plan.caches for port in cache.inputs]
    assert sorted(fed) == sorted(inputs)
    assert set(plan.outputs) <= {port.name for port in layout.inventory.outputs}


def test_what_is_not_fed_is_a_layout() -> None:
    """No name is left over."""
    assert set(NOT_FED) <= set(LAYOUTS)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("mobius__mamba__f16-ep_cuda__model", 1),
        ("mobius__jamba__hybrid_moe__model", 1),
        ("synth__rwkv-mobile", 1),
        ("mobius__mamba2__default__model", None),
        ("mobius__bamba__f32-ep_onnx-standard__model", None),
    ],
)
def test_a_model_that_takes_one_token_a_call_is_known_by_its_ports(name: str, tokens: int | None) -> None:
    """By its token port, or by a state that comes back in its own shape after one token only."""
    plan = planned(name)

    assert isinstance(plan, FeedPlan)
    assert plan.tokens_a_call == tokens
    assert plan.one_pass == (tokens is None)


@pytest.mark.parametrize(
    ("name", "capacity"),
    [
        ("mobius__apertus__static_cache__model", 64),
        ("mobius__modernbert-decoder__static_cache__model", 64),
        ("onnx-genai__onnx-genai-engine-model-package-cpu-cpu", 16),
        ("mobius__gemma4_text__static_hybrid_5sliding_1full__model", 128),
    ],
)
def test_a_static_cache_has_room_for_as_many_tokens_as_it_has_rows(name: str, capacity: int) -> None:
    """Also where other layers grow."""
    plan = planned(name)

    assert isinstance(plan, FeedPlan)
    assert plan.room is not None
    assert plan.room.tokens == capacity
    assert plan.one_pass


@pytest.mark.parametrize(
    ("name", "one_pass"),
    [
        ("genai0.18__llama__int4_cpu_kv_cache_quant_scheme-int8_per_tensor", False),
        ("genai0.18__qwen3_5__fp16_cuda_kv_cache_quant_scheme-int4_per_tensor", False),
        ("mobius__gemma3_text__f16_fp8kv-ep_cuda__model", False),
        ("genai0.18__gemma2__fp32_cpu", False),
        ("genai0.18__lfm2__fp16_cuda", True),
        ("genai0.18__qwen3_5__fp32_cpu_state_window-4", True),
        ("genai-test__tiny-random-gpt2-fp32-cuda__past", True),
    ],
)
def test_one_pass_is_for_caches_that_keep_what_was_computed(name: str, one_pass: bool) -> None:
    """Not for rows in eight bits or four, nor for those that a window drops."""
    plan = planned(name)

    assert isinstance(plan, FeedPlan)
    assert plan.one_pass == one_pass
