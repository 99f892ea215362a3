"""How exporters name the caches of a decoder, as data: a new family is one more entry here.

Each entry says where its naming comes from. Entries are independent of each other and of their order:
where two of them would pair an input with different outputs, the derivation refuses.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.topology.conventions import (
    Convention,
    Discipline,
    IndexedPatterns,
    PortPair,
    StemPair,
    WordSwap,
)
from harness.topology.spec import Role

__all__ = ["CONVENTIONS"]

SELF_KV: Mapping[str, Role] = {"key": Role.KV_KEY, "value": Role.KV_VALUE}
SCALES: Mapping[str, Role] = {"key_scale": Role.KV_SCALE, "value_scale": Role.KV_SCALE}
CROSS_KV: Mapping[str, Role] = {"key": Role.CROSS_KV_KEY, "value": Role.CROSS_KV_VALUE}
TUPLE: Mapping[str, Role] = {"0": Role.KV_KEY, "1": Role.KV_VALUE}
"""Positions in the tuple of one layer, as tracers flatten it."""
ENCODER_DECODER: Mapping[str, Role] = {
    **{f"decoder.{kind}": role for kind, role in SELF_KV.items()},
    **{f"encoder.{kind}": role for kind, role in CROSS_KV.items()},
    **{f"self.{kind}": role for kind, role in SELF_KV.items()},
    **{f"cross.{kind}": role for kind, role in CROSS_KV.items()},
}
DOTTED: Mapping[str, Role] = {**SELF_KV, **SCALES, **ENCODER_DECODER}
UNDERSCORED: Mapping[str, Role] = {kind.replace(".", "_"): role for kind, role in DOTTED.items()}
KIND_FIRST: Mapping[str, Role] = {
    **SELF_KV,
    **SCALES,
    **{f"{kind}_self": role for kind, role in SELF_KV.items()},
    **{f"{kind}_cross": role for kind, role in CROSS_KV.items()},
    **{f"self_{kind}": role for kind, role in SELF_KV.items()},
    **{f"cross_{kind}": role for kind, role in CROSS_KV.items()},
}


def _pairs(past: str, present: str, kinds: Mapping[str, Role]) -> tuple[PortPair, ...]:
    """One pair for each kind, which stands at `{}` in both patterns."""
    return tuple(PortPair(past.format(kind), present.format(kind), role) for kind, role in kinds.items())


def _fused(past: str, present: str) -> PortPair:
    """Key and value in one tensor. The names say only that it is a cache, so it must be seen to grow."""
    return PortPair(past, present, Role.KV_FUSED, Discipline.GROWING)


CONVENTIONS: tuple[Convention, ...] = (
    Convention(
        name="dotted",
        source="Hugging Face Optimum, onnxruntime-genai model builder, mobius, transformers.js",
        pairs=_pairs("past_key_values.%d.{}", "present.%d.{}", DOTTED),
        stems=IndexedPatterns().convention(name="dotted", source="").stems,
    ),
    Convention(
        name="dotted, present_key_values",
        source="Optimum exports before the short present names",
        pairs=_pairs("past_key_values.%d.{}", "present_key_values.%d.{}", DOTTED),
        stems=(StemPair("past_key_values.*", "present_key_values.*"),),
    ),
    Convention(
        name="past.N",
        source="onnxruntime-genai model builder 0.18 (convolution and recurrent states), onnx-genai",
        pairs=_pairs("past.%d.{}", "present.%d.{}", DOTTED),
        stems=(StemPair("past.*", "present.*"),),
    ),
    Convention(
        name="past_states.N",
        source="mobius, models without attention",
        pairs=_pairs("past_states.%d.{}", "present.%d.{}", DOTTED),
        stems=(StemPair("past_states.*", "present.*"), StemPair("past_states.*", "present_states.*")),
    ),
    Convention(
        name="underscored",
        source="graphs whose tool replaced the dots of the dotted naming; torch.onnx of a DynamicCache",
        pairs=(
            *_pairs("past_key_values_%d_{}", "present_key_values_%d_{}", UNDERSCORED),
            *_pairs("past_key_values_%d_{}", "present_%d_{}", UNDERSCORED),
            *_pairs("past_%d_{}", "present_%d_{}", UNDERSCORED),
            *_pairs("past_key_values_{}_cache_%d", "present_key_values_{}_cache_%d", SELF_KV),
            *_pairs("past_key_values_%d.{}", "present_key_values_%d.{}", TUPLE),
            *_pairs("past_key_values.%d.{}", "present.%d.{}", TUPLE),
        ),
        stems=(
            StemPair("past_key_values_*", "present_key_values_*"),
            StemPair("past_key_values_*", "present_*"),
        ),
    ),
    Convention(
        name="kind before index",
        source="onnxruntime transformers tools (Whisper, T5), onnxruntime-genai Whisper",
        pairs=(
            *_pairs("past_{}_%d", "present_{}_%d", KIND_FIRST),
            *_pairs("past_{}.%d", "present_{}.%d", KIND_FIRST),
        ),
    ),
    Convention(
        name="past_KIND",
        source="transformers.js, onnxruntime-genai (past_conv.N, past_recurrent.N)",
        stems=(StemPair("past_*", "present_*"),),
    ),
    Convention(
        name="cache_params",
        source="Optimum Intel, state-space hybrids",
        pairs=_pairs("cache_params.past.{}.%d", "cache_params.present.{}.%d", SELF_KV),
        stems=(StemPair("cache_params.past.*", "cache_params.present.*"),),
    ),
    Convention(
        name="stacked",
        source="onnxruntime GPT-2 helper, archai, MNN: key and value of a layer, or of all, in one tensor",
        pairs=(
            _fused("past_%d", "present_%d"),
            _fused("past.%d", "present.%d"),
            _fused("past_key_values.%d", "present.%d"),
            _fused("past_key_values.%d", "present_key_values.%d"),
            _fused("past_key_values_%d", "present_key_values_%d"),
            _fused("past", "present"),
            _fused("past_key_values", "presents"),
            _fused("past_key_values", "present_key_values"),
        ),
    ),
    Convention(
        name="scatter cache",
        source="mobius and onnx-genai, static cache written by TensorScatter",
        pairs=tuple(
            PortPair(past.format(kind), present.format(kind), role, Discipline.SCATTER)
            for past, present in (
                ("{}_cache.%d", "updated_{}_cache.%d"),
                ("{}_cache_%d", "updated_{}_cache_%d"),
                ("{}_cache", "updated_{}_cache"),
            )
            for kind, role in SELF_KV.items()
        ),
    ),
    Convention(
        name="in and out",
        source="RWKV exports, onnx-genai fixtures, Qualcomm exports",
        swaps=(
            WordSwap("in", "out"),
            WordSwap("input", "output"),
            WordSwap("", "out"),
            WordSwap("", "output"),
        ),
    ),
    Convention(
        name="next and new",
        source="sherpa and icefall streaming models, NeMo streaming encoders (next_, new_, _next)",
        swaps=(
            WordSwap("", "next"),
            WordSwap("", "new"),
            WordSwap("", "updated"),
            WordSwap("cur", "next"),
            WordSwap("old", "new"),
        ),
    ),
    Convention(
        name="previous",
        source="Marian exports (rnn_states_prev), recurrent networks in general",
        swaps=(
            WordSwap("prev", ""),
            WordSwap("previous", ""),
            WordSwap("prev", "next"),
            WordSwap("prev", "new"),
            WordSwap("past", "new"),
            WordSwap("past", "next"),
            WordSwap("past", "out"),
        ),
    ),
)
"""All conventions that are tried where a package declares nothing."""
