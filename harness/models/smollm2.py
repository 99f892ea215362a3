"""The built-in packages `smollm2` and `smollm2-int4`: a real language model with real weights.

SmolLM2-135M-Instruct (Apache-2.0), a decoder of the llama family: RMSNorm, rotary embedding,
grouped-query attention, SwiGLU, and a head that shares its weights with the embedding. The weights
must have been fetched before; writing a package downloads nothing.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from harness.models import blocks
from harness.models.builtin import BuiltinPackage
from harness.models.fetch import SMOLLM2_WEIGHTS, cached_smollm2
from harness.models.graph import OPSET, GraphBuilder
from harness.models.smollm2_int4 import ACCURACY_LEVEL, BLOCK_SIZE, QUANTISATION_RULE, linear_int4
from harness.models.smollm2_source import LlamaShape, Smollm2Source, read_smollm2
from harness.models.tokenizer import write_tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "SMOLLM2_INT4_SHA256",
    "SMOLLM2_PROMPTS",
    "SMOLLM2_SHA256",
    "smollm2_int4_package",
    "smollm2_package",
    "write_smollm2",
]

Weights: TypeAlias = Literal["fp32", "int4"]
"""How the projections of the layers are stored; everything else is fp32 either way."""

SMOLLM2_PROMPTS: tuple[str, ...] = (
    "The capital of France is",
    'def is_prime(n):\n    """Return True if n is a prime number."""\n',
    "Question: A pen costs 3 dollars. How much do 7 pens cost?\nAnswer:",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "Five things to pack for a trip to the mountains:\n1.",
    "Once upon a time, in a small village by the sea,",
)
"""One prompt of each kind: fact, code, arithmetic, dialogue, list, story. They were written down
before any engine had seen them, and none was exchanged for its result."""

MAX_NEW_TOKENS = 64

SMOLLM2_SHA256 = "c1ae404a3f1ccec4293449d008c80138a15f68c4f25ff153920caebd637512a0"
SMOLLM2_INT4_SHA256 = "4e0002d59a3c86e4aa9a44e7cdde753d2ac096697b2e0af2392bf454906cb427"
"""Hashes of the graph with its data, as `onnx-parity check` reports them: the bytes are the same on
every machine, and a change of the builder must change these too, so that no stale package is used."""


def smollm2_package() -> BuiltinPackage:
    """`smollm2`: every weight in fp32."""
    return BuiltinPackage(
        name="smollm2",
        description="SmolLM2-135M-Instruct, real weights in fp32 (run `onnx-parity fetch smollm2` first).",
        prompts=SMOLLM2_PROMPTS,
        max_new_tokens=MAX_NEW_TOKENS,
        content_version=SMOLLM2_SHA256[:12],
        write=partial(_write_fetched, weights="fp32"),
    )


def smollm2_int4_package() -> BuiltinPackage:
    """`smollm2-int4`: projections in four bits, int8 activations allowed (`accuracy_level` 4)."""
    return BuiltinPackage(
        name="smollm2-int4",
        description="SmolLM2-135M-Instruct, projections in int4 at accuracy level 4, rest in fp32.",
        prompts=SMOLLM2_PROMPTS,
        max_new_tokens=MAX_NEW_TOKENS,
        content_version=SMOLLM2_INT4_SHA256[:12],
        write=partial(_write_fetched, weights="int4"),
    )


def write_smollm2(folder: Path, source: Smollm2Source, *, weights: Weights) -> Path:
    """Write graph, data, tokenizer and `provenance.json` into the existing `folder`.

    Returns the graph file. The bytes are the same on every machine.
    """
    model = _build(source, weights).save(folder / "model.onnx")
    tokenizer = source.tokenizer
    write_tokenizer(folder, tokenizer, context=source.shape.context)
    special = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.padding_id,
    }
    _write_json(folder / "generation_config.json", special)
    _write_json(folder / "provenance.json", _provenance(source, weights, model))
    return model


def _write_fetched(folder: Path, *, weights: Weights) -> Path:
    return write_smollm2(folder, read_smollm2(cached_smollm2()), weights=weights)


def _build(source: Smollm2Source, weights: Weights) -> GraphBuilder:
    shape = source.shape
    graph = GraphBuilder("smollm2")
    tokens = graph.input("input_ids", "int64", ("batch", "sequence_len"))
    mask = graph.input("attention_mask", "int64", ("batch", "past_sequence_len + sequence_len"))
    positions = graph.input("position_ids", "int64", ("batch", "sequence_len"))
    graph.output("logits", "float32", ("batch", "sequence_len", shape.vocab))
    rotary = blocks.rotary_tables(graph, positions, _inverse_frequencies(shape))
    bias = blocks.causal_bias(graph, tokens, mask)
    embedding = graph.initializer("embed_tokens.weight", source.weight("token_embd.weight"))
    hidden = graph.add("Gather", embedding, tokens, name="embed_tokens")
    for layer in range(shape.layers):
        stored = f"blk.{layer}"
        with graph.scope(f"layers.{layer}"):
            normed = _norm(graph, source, hidden, f"{stored}.attn_norm", name="input_norm")
            with graph.scope("attention"):
                attended = _attention(graph, source, weights, normed, rotary, bias, layer)
            hidden = graph.add("Add", hidden, attended, name="after_attention")
            normed = _norm(graph, source, hidden, f"{stored}.ffn_norm", name="mlp_norm")

            def project(x: str, name: str, stored: str = stored) -> str:
                weight = source.weight(f"{stored}.ffn_{name.removesuffix('_proj')}.weight")
                return _linear(graph, weights, x, weight, name=name)

            with graph.scope("mlp"):
                mlp = blocks.swiglu(graph, normed, project)
            hidden = graph.add("Add", hidden, mlp, name="after_mlp")
    final = _norm(graph, source, hidden, "output_norm", name="final_norm")
    _tied_head(graph, final, tokens, embedding, shape)
    return graph


def _attention(
    graph: GraphBuilder,
    source: Smollm2Source,
    weights: Weights,
    x: str,
    rotary: blocks.Rotary,
    bias: str,
    layer: int,
) -> str:
    shape, stored = source.shape, f"blk.{layer}.attn"
    query_weight = source.rotary_rows_as_halves(f"{stored}_q.weight", heads=shape.heads)
    key_weight = source.rotary_rows_as_halves(f"{stored}_k.weight", heads=shape.kv_heads)
    projections = {
        "query": (query_weight, shape.heads),
        "key": (key_weight, shape.kv_heads),
        "value": (source.weight(f"{stored}_v.weight"), shape.kv_heads),
    }
    split = {
        kind: blocks.split_heads(
            graph,
            _linear(graph, weights, x, weight, name=f"{kind}_proj"),
            heads=heads,
            width=shape.head_width,
            name=f"{kind}_heads",
        )
        for kind, (weight, heads) in projections.items()
    }
    attended = blocks.attention(
        graph,
        blocks.rotate(graph, split["query"], rotary, name="query_rotated"),
        blocks.rotate(graph, split["key"], rotary, name="key_rotated"),
        split["value"],
        bias,
        layer=layer,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        width=shape.head_width,
    )
    merged = blocks.merge_heads(
        graph, attended.context, heads=shape.heads, width=shape.head_width, name="context_merged"
    )
    return _linear(graph, weights, merged, source.weight(f"{stored}_output.weight"), name="out_proj")


def _linear(graph: GraphBuilder, weights: Weights, x: str, weight: NDArray[np.float32], *, name: str) -> str:
    """A projection with `weight` [out, in], stored as `weights` says."""
    if weights == "int4":
        projected = linear_int4(graph, x, weight, name=name)
        # The checker knows nothing of this operator, so that its result needs a shape.
        return graph.declare(projected, "float32", ("batch", "sequence_len", weight.shape[0]))
    return blocks.linear(graph, x, weight.T, name=name)


def _norm(graph: GraphBuilder, source: Smollm2Source, x: str, stored: str, *, name: str) -> str:
    scale = source.weight(f"{stored}.weight")
    return blocks.rms_norm(graph, x, scale, name=name, epsilon=source.shape.norm_epsilon)


def _tied_head(graph: GraphBuilder, x: str, tokens: str, embedding: str, shape: LlamaShape) -> None:
    """Logits for every position, with the embedding [vocab, hidden] as the head's weight.

    `Gemm` takes the matrix as it lies: a `Transpose` would be folded into a second copy of the largest
    weight by one engine, and carried out at every step by another (ten times slower). It wants
    matrices, hence the reshapes.
    """
    with graph.scope("lm_head"):
        rows = graph.add("Reshape", x, graph.ints(-1, shape.hidden), name="rows")
        products = graph.add("Gemm", rows, embedding, name="products", transB=1)
        batch_and_sequence = graph.add("Shape", tokens, name="batch_and_sequence")
        full = graph.add("Concat", batch_and_sequence, graph.ints(shape.vocab), name="shape", axis=0)
        graph.add("Reshape", products, full, name="logits", output="logits")


def _inverse_frequencies(shape: LlamaShape) -> NDArray[np.float32]:
    """Radians a position, base^(-2i/D), computed in float64 and rounded once (Su et al., RoFormer, 2021)."""
    import numpy as np

    exponents = np.arange(0, shape.head_width, 2, dtype=np.float64) / shape.head_width
    return np.asarray(shape.rope_base**-exponents, dtype=np.float32)


def _provenance(source: Smollm2Source, weights: Weights, model: Path) -> dict[str, Any]:
    """Where the weights come from and all that was done to them, for a reader of the package."""
    pinned = SMOLLM2_WEIGHTS
    quantisation = {
        "operator": "com.microsoft::MatMulNBits",
        "bits": 4,
        "block_size": BLOCK_SIZE,
        "accuracy_level": ACCURACY_LEVEL,
        "zero_points": "uint4 integers",
        "rule": QUANTISATION_RULE,
        "quantised": "the 7 projections of every layer",
        "kept_in_float32": "embedding and head (one tensor), norms, all activations in the graph",
        "why_requantised": "The source has a float minimum for each block, which only float zero points"
        " could carry over exactly; with those, engines ignore accuracy_level 4. Rounding to integer zero"
        " points costs accuracy against the source.",
    }
    files = [model, model.with_name(model.name + ".data")]
    return {
        "schema": "onnx-parity/provenance/1",
        "package": "smollm2" if weights == "fp32" else "smollm2-int4",
        "written_by": {"name": "onnx-parity", "version": version("onnx-parity"), "opset": OPSET},
        "source": {
            "model": source.name,
            "licence": pinned.licence,
            "distribution": pinned.distribution,
            "version": pinned.version,
            "wheel_sha256": pinned.wheel_sha256,
            "file": pinned.member,
            "sha256": pinned.sha256,
            "tensors": source.storage(),
        },
        "conversion": [
            "Every tensor dequantised to float32, exactly as the source defines its blocks.",
            "Rows of the query and key projections reordered from interleaved to half rotary form.",
            "The head shares the embedding, as in the source.",
            "Tokenizer, special tokens and chat template rebuilt from the tables in the source.",
        ],
        "quantisation": quantisation if weights == "int4" else None,
        "files": {file.name: _sha256(file) for file in files},
    }


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8", newline="\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
