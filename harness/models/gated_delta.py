"""The gated delta rule with its causal convolution: in standard operators, and in fused ones.

Shapes are written with B batch, S new positions, Hk and Hv key and value heads, Dk and Dv their widths.
The rule (Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024), for each value head and position:

    S  = decay * S
    S += k^T (beta * (v - k S))
    o  = q S / sqrt(Dk)

with the state S [Dk, Dv], q, k and v rows, decay and beta numbers in (0, 1). The fused operators,
`CausalConvWithState` and `LinearAttention` of com.microsoft, are those that recent exporters write.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.models.graph import GraphBuilder

__all__ = [
    "GatedDeltaShape",
    "causal_conv",
    "fused_causal_conv",
    "fused_gated_delta",
    "gated_delta",
    "l2_normalised",
    "per_step",
]

_CONTRIB = "com.microsoft"

_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class GatedDeltaShape:
    """Widths of one gated-delta layer; `value_heads` is a multiple of `key_heads`."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    conv_kernel: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width


def causal_conv(graph: GraphBuilder, x: str, weight: str, *, layer: int, shape: GatedDeltaShape) -> str:
    """Depthwise causal convolution of x [B, S, channels] with `weight` [channels, 1, kernel].

    Declares `past_key_values.{layer}.conv_state` and `present.{layer}.conv_state`: the last kernel - 1
    inputs, [B, channels, kernel - 1], oldest first.
    """
    taps = shape.conv_kernel - 1
    past = graph.input(f"past_key_values.{layer}.conv_state", "float32", ("batch", shape.channels, taps))
    columns = graph.add("Transpose", x, name="conv_columns", perm=[0, 2, 1])
    window = graph.add("Concat", past, columns, name="conv_window", axis=-1)
    graph.add(
        "Slice",
        window,
        graph.ints(-taps),
        graph.ints(_INT64_MAX),
        graph.ints(2),
        name="conv_keep",
        output=f"present.{layer}.conv_state",
    )
    _symbolic_output(graph, "conv_state", layer=layer, rank=3)
    convolved = graph.add(
        "Conv", window, weight, name="conv", group=shape.channels, kernel_shape=[shape.conv_kernel]
    )
    graph.declare(convolved, "float32", ("batch", shape.channels, "sequence_len"))
    return graph.add("Transpose", convolved, name="conv_rows", perm=[0, 2, 1])


def per_step(graph: GraphBuilder, x: str, *, heads: int, width: int, repeat: int, name: str) -> str:
    """[B, S, heads*width] to [S, B, heads*repeat, 1, width]: one row a head, one step at a time.

    Each head stands `repeat` times in a row, as value heads h*repeat to h*repeat + repeat - 1 share
    key head h.
    """
    steps = graph.add("Transpose", x, name=f"{name}_steps", perm=[1, 0, 2])
    if repeat == 1:
        return graph.add("Reshape", steps, graph.ints(0, 0, heads, 1, width), name=name)
    split = graph.add("Reshape", steps, graph.ints(0, 0, heads, 1, width), name=f"{name}_split")
    repeated = graph.add("Expand", split, graph.ints(1, 1, 1, repeat, 1), name=f"{name}_repeated")
    return graph.add("Reshape", repeated, graph.ints(0, 0, heads * repeat, 1, width), name=name)


def l2_normalised(graph: GraphBuilder, x: str, *, name: str, epsilon: float) -> str:
    """`x / sqrt(sum(x^2) + epsilon)` over the last axis."""
    squares = graph.add("ReduceSumSquare", x, graph.ints(-1), name=f"{name}_squares", keepdims=1)
    safe = graph.add("Add", squares, graph.scalar(epsilon), name=f"{name}_safe")
    return graph.add("Div", x, graph.add("Sqrt", safe, name=f"{name}_length"), name=name)


def gated_delta(
    graph: GraphBuilder,
    *,
    query: str,
    key: str,
    value: str,
    decay: str,
    beta: str,
    layer: int,
    shape: GatedDeltaShape,
) -> str:
    """The recurrence over all new positions; gives [S, B, Hv, 1, Dv].

    Each sequence comes as one block a step: query and key [S, B, Hv, 1, Dk], value [S, B, Hv, 1, Dv],
    decay and beta [S, B, Hv, 1, 1]. The query is scaled here, by `1/sqrt(Dk)`. Declares
    `past_key_values.{layer}.recurrent_state` and `present.{layer}.recurrent_state` [B, Hv, Dk, Dv].
    """
    scaled = graph.add("Mul", query, graph.scalar(1 / math.sqrt(shape.key_width)), name="query_scaled")
    past = graph.input(
        f"past_key_values.{layer}.recurrent_state",
        "float32",
        ("batch", shape.value_heads, shape.key_width, shape.value_width),
    )
    _, results = graph.scan(
        _step(graph.scoped("step"), shape),
        states=(past,),
        sequences=(scaled, key, value, decay, beta),
        name="recurrence",
        outputs=(f"present.{layer}.recurrent_state", graph.scoped("recurrence")),
    )
    _symbolic_output(graph, "recurrent_state", layer=layer, rank=4)
    return results


def _step(prefix: str, shape: GatedDeltaShape) -> GraphBuilder:
    """One position of the rule: no constants, nothing from outside."""
    body = GraphBuilder("gated_delta_step", prefix=prefix)
    heads = ("batch", shape.value_heads)
    ports = {
        "state": (*heads, shape.key_width, shape.value_width),
        "query": (*heads, 1, shape.key_width),
        "key": (*heads, 1, shape.key_width),
        "value": (*heads, 1, shape.value_width),
        "decay": (*heads, 1, 1),
        "beta": (*heads, 1, 1),
    }
    state, query, key, value, decay, beta = (
        body.input(body.scoped(port), "float32", extents) for port, extents in ports.items()
    )
    decayed = body.add("Mul", state, decay, name="decayed")
    recalled = body.add("MatMul", key, decayed, name="recalled")
    error = body.add("Sub", value, recalled, name="error")
    correction = body.add("Mul", error, beta, name="correction")
    column = body.add("Transpose", key, name="key_column", perm=[0, 1, 3, 2])
    update = body.add("MatMul", column, correction, name="update")
    next_state = body.add("Add", decayed, update, name="next_state")
    result = body.add("MatMul", query, next_state, name="result")
    body.output(next_state, "float32", ports["state"])
    body.output(result, "float32", ports["value"])
    return body


def fused_causal_conv(
    graph: GraphBuilder, x: str, weight: str, *, layer: int, shape: GatedDeltaShape, dtype: str = "float32"
) -> str:
    """As `causal_conv`, with silu behind it, in one operator; both sides [B, S, channels]."""
    taps = shape.conv_kernel - 1
    past = graph.input(f"past_key_values.{layer}.conv_state", dtype, ("batch", shape.channels, taps))
    columns = graph.add("Transpose", x, name="conv_columns", perm=[0, 2, 1])
    convolved, _ = graph.add_fused(
        "CausalConvWithState",
        columns,
        weight,
        "",
        past,
        name="conv",
        outputs=(graph.scoped("conv"), f"present.{layer}.conv_state"),
        activation="silu",
        ndim=1,
    )
    graph.declare(convolved, dtype, ("batch", shape.channels, "sequence_len"))
    _symbolic_output(graph, "conv_state", layer=layer, rank=3, dtype=dtype)
    return graph.add("Transpose", convolved, name="conv_rows", perm=[0, 2, 1])


def fused_gated_delta(
    graph: GraphBuilder,
    *,
    query: str,
    key: str,
    value: str,
    log_decay: str,
    beta: str,
    layer: int,
    shape: GatedDeltaShape,
    dtype: str = "float32",
) -> str:
    """As `gated_delta`, in one operator; gives [B, S, Hv*Dv].

    Query and key come as [B, S, Hk*Dk], value as [B, S, Hv*Dv], the logarithm of the decay and beta as
    [B, S, Hv]. The state has the same ports.
    """
    past = graph.input(
        f"past_key_values.{layer}.recurrent_state",
        dtype,
        ("batch", shape.value_heads, shape.key_width, shape.value_width),
    )
    result, _ = graph.add_fused(
        "LinearAttention",
        query,
        key,
        value,
        past,
        log_decay,
        beta,
        name="recurrence",
        outputs=(graph.scoped("recurrence"), f"present.{layer}.recurrent_state"),
        q_num_heads=shape.key_heads,
        kv_num_heads=shape.value_heads,
        update_rule="gated_delta",
        scale=1 / math.sqrt(shape.key_width),
    )
    graph.declare(result, dtype, ("batch", "sequence_len", shape.value_heads * shape.value_width))
    _symbolic_output(graph, "recurrent_state", layer=layer, rank=4, dtype=dtype)
    return result


def _symbolic_output(
    graph: GraphBuilder, kind: str, *, layer: int, rank: int, dtype: str = "float32"
) -> None:
    """Declare a present state the way real exporters of this layout do: no extent is concrete."""
    symbols = tuple(f"{kind}_{layer}_dim_{axis}" for axis in range(rank))
    graph.output(f"present.{layer}.{kind}", dtype, symbols)
