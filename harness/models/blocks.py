"""Building blocks of decoders, shared by the built-in models: standard operators only.

Shapes are written with B batch, S new positions, T all positions (cached and new), H heads, D the
width of a head. Every block takes and returns names of values in a `GraphBuilder`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from harness.models.graph import GraphBuilder

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "ALL_POSITIONS",
    "CachedAttention",
    "Project",
    "Rotary",
    "attention",
    "causal_bias",
    "linear",
    "merge_heads",
    "rms_norm",
    "rotary_tables",
    "rotate",
    "silu",
    "split_heads",
    "swiglu",
]

Project: TypeAlias = Callable[[str, str], str]
"""Adds the projection with the given name: `project(x, "gate_proj")`. The model decides how (in fp32,
quantised), the block where."""

ALL_POSITIONS = "past_sequence_len + sequence_len"
"""Symbol of T, spelled as exporters do."""

_MASKED = -1.0e9
"""Added to the score of a masked position. Finite, so that a fully masked row stays finite too."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosine and sine of the rotation at each new position, [B, 1, S, D/2] float32."""

    cos: str
    sin: str


@dataclass(frozen=True, slots=True)
class CachedAttention:
    """What `attention` gives: the context [B, H, S, D] and the grown cache, each [B, Hkv, T, D]."""

    context: str
    present_key: str
    present_value: str


def linear(graph: GraphBuilder, x: str, weight: NDArray[Any], *, name: str) -> str:
    """`x @ weight` with `weight` of shape [in, out]."""
    return graph.add("MatMul", x, graph.initializer(f"{name}.weight", weight), name=name)


def rms_norm(graph: GraphBuilder, x: str, scale: NDArray[Any], *, name: str, epsilon: float) -> str:
    """RMSNorm over the last axis: `x / sqrt(mean(x^2) + epsilon) * scale`."""
    weight = graph.initializer(f"{name}.weight", scale)
    return graph.add("RMSNormalization", x, weight, name=name, axis=-1, epsilon=epsilon)


def silu(graph: GraphBuilder, x: str, *, name: str) -> str:
    """`x * sigmoid(x)`."""
    return graph.add("Mul", x, graph.add("Sigmoid", x, name=f"{name}_sigmoid"), name=name)


def swiglu(graph: GraphBuilder, x: str, project: Project) -> str:
    """`down_proj(silu(gate_proj(x)) * up_proj(x))` (Shazeer, GLU Variants Improve Transformer, 2020)."""
    gate = silu(graph, project(x, "gate_proj"), name="silu")
    return project(graph.add("Mul", gate, project(x, "up_proj"), name="gated"), "down_proj")


def split_heads(graph: GraphBuilder, x: str, *, heads: int, width: int, name: str) -> str:
    """[B, S, H*D] to [B, H, S, D]."""
    split = graph.add("Reshape", x, graph.ints(0, 0, heads, width), name=f"{name}_split")
    return graph.add("Transpose", split, name=name, perm=[0, 2, 1, 3])


def merge_heads(graph: GraphBuilder, x: str, *, heads: int, width: int, name: str) -> str:
    """[B, H, S, D] to [B, S, H*D]."""
    swapped = graph.add("Transpose", x, name=f"{name}_swap", perm=[0, 2, 1, 3])
    return graph.add("Reshape", swapped, graph.ints(0, 0, heads * width), name=name)


def rotary_tables(graph: GraphBuilder, position_ids: str, inverse_frequencies: NDArray[Any]) -> Rotary:
    """Tables for `rotate` from position IDs [B, S] int64 and inverse frequencies [D/2] float32."""
    with graph.scope("rotary"):
        frequencies = graph.initializer("inverse_frequencies", inverse_frequencies)
        positions = graph.add("Cast", position_ids, name="positions", to=1)
        column = graph.add("Unsqueeze", positions, graph.ints(1, 3), name="positions_column")
        angles = graph.add("Mul", column, frequencies, name="angles")
        return Rotary(graph.add("Cos", angles, name="cos"), graph.add("Sin", angles, name="sin"))


def rotate(graph: GraphBuilder, x: str, rotary: Rotary, *, name: str) -> str:
    """Rotary position embedding, half form: element i of [B, H, S, D] is rotated with element i + D/2."""
    first, second = graph.add_many(
        "Split", x, name=f"{name}_halves", outputs=("first", "second"), axis=-1, num_outputs=2
    )
    with graph.scope(name):
        real = graph.add(
            "Sub",
            graph.add("Mul", first, rotary.cos, name="first_cos"),
            graph.add("Mul", second, rotary.sin, name="second_sin"),
            name="real",
        )
        imaginary = graph.add(
            "Add",
            graph.add("Mul", second, rotary.cos, name="second_cos"),
            graph.add("Mul", first, rotary.sin, name="first_sin"),
            name="imaginary",
        )
    return graph.add("Concat", real, imaginary, name=name, axis=-1)


def causal_bias(graph: GraphBuilder, input_ids: str, attention_mask: str) -> str:
    """What to add to attention scores, [B, 1, S, T] float32: 0 where a query may look, else `_MASKED`.

    Query i of the S new positions stands at index T - S + i of all T, and looks at itself and at
    what stands before it, as far as `attention_mask` [B, T] int64 is not zero there.
    """
    with graph.scope("causal_bias"):
        new = graph.add("Shape", input_ids, name="new_positions", start=1, end=2)
        total = graph.add("Shape", attention_mask, name="all_positions", start=1, end=2)
        new_scalar = graph.add("Squeeze", new, name="new")
        total_scalar = graph.add("Squeeze", total, name="all")
        zero, one = graph.scalar(0, "int64"), graph.scalar(1, "int64")
        keys = graph.add("Range", zero, total_scalar, one, name="key_index")
        first = graph.add("Sub", total_scalar, new_scalar, name="first_query")
        queries = graph.add("Range", first, total_scalar, one, name="query_index")
        column = graph.add("Unsqueeze", queries, graph.ints(1), name="query_column")
        causal = graph.add("LessOrEqual", keys, column, name="not_after")
        present = graph.add("Cast", attention_mask, name="not_masked", to=9)
        rows = graph.add("Unsqueeze", present, graph.ints(1, 2), name="not_masked_rows")
        visible = graph.add("And", causal, rows, name="visible")
        bias = graph.add("Where", visible, graph.scalar(0.0), graph.scalar(_MASKED), name="bias")
        return graph.declare(bias, "float32", ("batch", 1, "sequence_len", ALL_POSITIONS))


def attention(
    graph: GraphBuilder,
    query: str,
    key: str,
    value: str,
    bias: str,
    *,
    layer: int,
    heads: int,
    kv_heads: int,
    width: int,
) -> CachedAttention:
    """Grouped-query attention over a growing cache.

    Declares the ports `past_key_values.{layer}.key/.value` and `present.{layer}.key/.value`, appends
    `key` and `value` [B, Hkv, S, D] to the cache along axis 2, and attends with `query` [B, H, S, D],
    scaled by `1/sqrt(D)`, plus `bias` [B, 1, S, T]. Query heads h*G to h*G + G - 1 share KV head h.

    The G heads of a group and the S positions are one axis during the products, so that these are
    plain batched products without a repeated cache.
    """
    cache = []
    for kind, new in (("key", key), ("value", value)):
        past = graph.input(
            f"past_key_values.{layer}.{kind}", "float32", ("batch", kv_heads, "past_sequence_len", width)
        )
        present = graph.add(
            "Concat", past, new, name=f"grow_{kind}", output=f"present.{layer}.{kind}", axis=2
        )
        graph.output(present, "float32", ("batch", kv_heads, ALL_POSITIONS, width))
        cache.append(present)
    present_key, present_value = cache
    scaled = graph.add("Mul", query, graph.scalar(1 / math.sqrt(width)), name="query_scaled")
    group = f"{heads // kv_heads} * sequence_len"
    grouped = graph.add("Reshape", scaled, graph.ints(0, kv_heads, -1, width), name="query_grouped")
    graph.declare(grouped, "float32", ("batch", kv_heads, group, width))
    transposed = graph.add("Transpose", present_key, name="key_transposed", perm=[0, 1, 3, 2])
    scores = graph.add("MatMul", grouped, transposed, name="scores_grouped")
    per_head = graph.add("Reshape", scores, graph.ints(0, heads, -1, 0), name="scores")
    graph.declare(per_head, "float32", ("batch", heads, "sequence_len", ALL_POSITIONS))
    biased = graph.add("Add", per_head, bias, name="scores_biased")
    probabilities = graph.add("Softmax", biased, name="probabilities", axis=-1)
    weights = graph.add(
        "Reshape", probabilities, graph.ints(0, kv_heads, -1, 0), name="probabilities_grouped"
    )
    graph.declare(weights, "float32", ("batch", kv_heads, group, ALL_POSITIONS))
    context = graph.add("MatMul", weights, present_value, name="context_grouped")
    by_head = graph.add("Reshape", context, graph.ints(0, heads, -1, width), name="context")
    graph.declare(by_head, "float32", ("batch", heads, "sequence_len", width))
    return CachedAttention(by_head, present_key, present_value)
