"""A decoder in the shape of a 27B hybrid, in four bits, to measure with: its weights are random bytes.

64 layers of width 5120: every fourth is gated grouped-query attention, the others are gated-delta layers
with a convolution state and a recurrent state; 25.6 billion weights in `MatMulNBits`, activations in half
precision, operators and ports as recent exporters write them. All layers of a kind share the same bytes of
the external file, as do the embedding and the head, so that it fits into a gigabyte; the graph does not show
it, and every product is carried out. What it decodes means nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.models import blocks, gated_delta
from harness.models.graph import GraphBuilder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["HybridShape", "write_shape27b"]

DTYPE = "float16"
BLOCK = 32
"""Weights that share a scale."""

NORM_EPSILON = 1e-6
RESIDUAL_GAIN = 0.1
"""About 1/sqrt(2 * layers), so that the stream of 64 layers stays in the range of half precision."""

_CODE_STD = math.sqrt(17.5)
"""Standard deviation of code - 8, uniform over 1..15 with 8 twice as often."""

_CONTRIB = "com.microsoft"


DELTA = gated_delta.GatedDeltaShape(
    key_heads=16, value_heads=48, key_width=128, value_width=128, conv_kernel=4
)
"""Of the gated-delta layers of the 27B."""


@dataclass(frozen=True, slots=True)
class HybridShape:
    """Sizes of the model; the defaults are those of the 27B. All widths are multiples of 32.

    Attributes:
        layers: how many, every `attention_every`-th of which is attention.
        attention_every: see `layers`.
        hidden: width of the stream.
        intermediate: width inside the MLP.
        vocab: number of tokens.
        heads: query heads.
        kv_heads: key and value heads.
        head_width: of queries, keys and values.
        delta: widths of the gated-delta layers.
        max_positions: rows of the rotary tables.
    """

    layers: int = 64
    attention_every: int = 4
    hidden: int = 5120
    intermediate: int = 17408
    vocab: int = 248320
    heads: int = 24
    kv_heads: int = 4
    head_width: int = 256
    delta: gated_delta.GatedDeltaShape = DELTA
    max_positions: int = 4096


def write_shape27b(
    folder: Path, *, shape: HybridShape | None = None, seed: int = 27, shared: bool = True
) -> Path:
    """Write `model.onnx` and its external data into the existing `folder`; returns the model file.

    Args:
        folder: where to.
        shape: other sizes, for tests.
        seed: of the weights.
        shared: whether layers of a kind lie on the same bytes of the external file: 1 GB. Without, the same
            values are written again for each layer: 14 GB. Both take 1 GB of memory to write.
    """
    model = _Model(shape or HybridShape(), seed)
    model.build()
    return model.graph.save(folder / "model.onnx", shared=shared)


class _Model:
    """The graph in the making, and the weights of each kind of layer, drawn once."""

    def __init__(self, shape: HybridShape, seed: int) -> None:
        import numpy as np

        self.shape = shape
        self.graph = GraphBuilder("shape-27b")
        self._random = np.random.RandomState(seed)
        self._drawn: dict[str, NDArray[np.generic]] = {}

    def build(self) -> None:
        shape, graph = self.shape, self.graph
        tokens = graph.input("input_ids", "int64", ("batch", "sequence_len"))
        mask = graph.input("attention_mask", "int64", ("batch", blocks.ALL_POSITIONS))
        positions = graph.input("position_ids", "int64", ("batch", "sequence_len"))
        graph.output("logits", DTYPE, ("batch", "sequence_len", shape.vocab))
        lengths = self._lengths(mask)
        tables = self._rotary_tables()
        hidden = self._embedding(tokens)
        for layer in range(shape.layers):
            with graph.scope(f"layers.{layer}"):
                normed = self._norm(hidden, shape.hidden, "input_norm")
                if layer % shape.attention_every == shape.attention_every - 1:
                    with graph.scope("attention"):
                        mixed = self._attention(normed, lengths, tables, positions, layer)
                else:
                    with graph.scope("gated_delta"):
                        mixed = self._gated_delta(normed, layer)
                hidden = graph.add("Add", hidden, mixed, name="after_mixer")
                normed = self._norm(hidden, shape.hidden, "mlp_norm")
                with graph.scope("mlp"):
                    mlp = blocks.swiglu(graph, normed, self._mlp_projection)
                hidden = graph.add("Add", hidden, mlp, name="after_mlp")
        final = self._norm(hidden, shape.hidden, "final_norm")
        self._linear(final, "embed_tokens", shape.hidden, shape.vocab, gain=4.0, output="logits")

    def _embedding(self, tokens: str) -> str:
        """Rows of the head, scaled to a standard deviation of 1."""
        graph, hidden, vocab = self.graph, self.shape.hidden, self.shape.vocab
        codes, scales = self._quantised("embed_tokens", vocab, hidden, 4.0)
        rows = graph.add(
            "GatherBlockQuantized",
            graph.initializer("embed_tokens.table", codes.reshape(vocab, hidden // 2)),
            tokens,
            graph.initializer("embed_tokens.table_scales", scales),
            name="embed_tokens",
            domain=_CONTRIB,
            bits=4,
            block_size=BLOCK,
            gather_axis=0,
            quantize_axis=1,
        )
        graph.declare(rows, DTYPE, ("batch", "sequence_len", hidden))
        return graph.add("Mul", rows, graph.scalar(math.sqrt(hidden) / 4.0, DTYPE), name="embedded")

    def _lengths(self, mask: str) -> tuple[str, str]:
        """What GroupQueryAttention wants to know: tokens of each sequence less one, and all positions."""
        graph = self.graph
        with graph.scope("lengths"):
            counts = graph.add("ReduceSum", mask, graph.ints(1), name="tokens", keepdims=0)
            last = graph.add("Sub", counts, graph.scalar(1, "int64"), name="last")
            total = graph.add("Shape", mask, name="positions", start=1, end=2)
            return (
                graph.add("Cast", last, name="last_int32", to=6),
                graph.add("Cast", total, name="positions_int32", to=6),
            )

    def _rotary_tables(self) -> tuple[str, str]:
        import numpy as np

        half = self.shape.head_width // 2
        frequencies = 1e7 ** (-np.arange(half) / half)
        angles = np.arange(self.shape.max_positions)[:, None] * frequencies
        return (
            self.graph.initializer("rotary.cos", np.cos(angles).astype(DTYPE)),
            self.graph.initializer("rotary.sin", np.sin(angles).astype(DTYPE)),
        )

    def _attention(
        self, x: str, lengths: tuple[str, str], tables: tuple[str, str], positions: str, layer: int
    ) -> str:
        shape, graph = self.shape, self.graph
        projected = {}
        for kind, heads in (("query", shape.heads), ("key", shape.kv_heads), ("value", shape.kv_heads)):
            rows = self._linear(x, f"{kind}_proj", shape.hidden, heads * shape.head_width)
            if kind != "value":
                split = graph.add(
                    "Reshape", rows, graph.ints(0, 0, heads, shape.head_width), name=f"{kind}_heads"
                )
                normed = self._norm(split, shape.head_width, f"{kind}_norm")
                rows = graph.add(
                    "Reshape", normed, graph.ints(0, 0, heads * shape.head_width), name=f"{kind}_rows"
                )
            projected[kind] = rows
        cache = ("batch", shape.kv_heads, "past_sequence_len", shape.head_width)
        grown = ("batch", shape.kv_heads, blocks.ALL_POSITIONS, shape.head_width)
        pasts = [graph.input(f"past_key_values.{layer}.{kind}", DTYPE, cache) for kind in ("key", "value")]
        presents = [f"present.{layer}.{kind}" for kind in ("key", "value")]
        context, *_ = graph.add_fused(
            "GroupQueryAttention",
            *projected.values(),
            *pasts,
            *lengths,
            *tables,
            positions,
            name="attend",
            outputs=(graph.scoped("context"), *presents),
            num_heads=shape.heads,
            kv_num_heads=shape.kv_heads,
            do_rotary=1,
        )
        for present in presents:
            graph.output(present, DTYPE, grown)
        width = shape.heads * shape.head_width
        graph.declare(context, DTYPE, ("batch", "sequence_len", width))
        gate = graph.add("Sigmoid", self._linear(x, "attention_gate", shape.hidden, width), name="gate")
        gated = graph.add("Mul", context, gate, name="context_gated")
        return self._linear(gated, "attention_out", width, shape.hidden, gain=RESIDUAL_GAIN)

    def _gated_delta(self, x: str, layer: int) -> str:
        shape, delta, graph = self.shape, self.shape.delta, self.graph
        keys, values = delta.key_heads * delta.key_width, delta.value_heads * delta.value_width
        joined = self._linear(x, "qkv_proj", shape.hidden, delta.channels)
        kernel = graph.initializer(
            "conv.weight", self._floats("conv", 0.5, delta.channels, 1, delta.conv_kernel)
        )
        active = gated_delta.fused_causal_conv(graph, joined, kernel, layer=layer, shape=delta, dtype=DTYPE)
        query, key, value = graph.add_many(
            "Split",
            active,
            graph.ints(keys, keys, values),
            name="conv_split",
            outputs=("query", "key", "value"),
            axis=-1,
        )
        unit = {}
        for kind, rows in (("query", query), ("key", key)):
            split = graph.add(
                "Reshape", rows, graph.ints(0, 0, delta.key_heads, delta.key_width), name=f"{kind}_heads"
            )
            normed = graph.add("LpNormalization", split, name=f"{kind}_unit", axis=-1, p=2)
            unit[kind] = graph.add("Reshape", normed, graph.ints(0, 0, keys), name=f"{kind}_rows")
        log_decay, beta = self._gates(x)
        results = gated_delta.fused_gated_delta(
            graph,
            query=unit["query"],
            key=unit["key"],
            value=value,
            log_decay=log_decay,
            beta=beta,
            layer=layer,
            shape=delta,
            dtype=DTYPE,
        )
        split = graph.add(
            "Reshape", results, graph.ints(0, 0, delta.value_heads, delta.value_width), name="result_heads"
        )
        normed = self._norm(split, delta.value_width, "result_norm")
        merged = graph.add("Reshape", normed, graph.ints(0, 0, values), name="result")
        gate = blocks.silu(graph, self._linear(x, "z_proj", shape.hidden, values), name="gate")
        gated = graph.add("Mul", merged, gate, name="result_gated")
        return self._linear(gated, "delta_out", values, shape.hidden, gain=RESIDUAL_GAIN)

    def _gates(self, x: str) -> tuple[str, str]:
        """Logarithm of the decay -A softplus(a + dt_bias), and sigmoid(b): [B, S, heads] each."""
        graph, heads, hidden = self.graph, self.shape.delta.value_heads, self.shape.hidden
        projected = {
            name: blocks.linear(graph, x, self._floats(name, 1 / math.sqrt(hidden), hidden, heads), name=name)
            for name in ("a_proj", "b_proj")
        }
        bias = graph.initializer("dt_bias", self._between("dt_bias", -6.9, -2.3, heads))
        dt = graph.add("Softplus", graph.add("Add", projected["a_proj"], bias, name="dt_in"), name="dt")
        rate = graph.initializer("negative_a", self._between("negative_a", -16.0, -1.0, heads))
        decay = graph.add("Mul", dt, rate, name="log_decay")
        return decay, graph.add("Sigmoid", projected["b_proj"], name="beta")

    def _mlp_projection(self, x: str, name: str) -> str:
        hidden, inner = self.shape.hidden, self.shape.intermediate
        if name == "down_proj":
            return self._linear(x, name, inner, hidden, gain=RESIDUAL_GAIN)
        return self._linear(x, name, hidden, inner)

    def _norm(self, x: str, width: int, name: str) -> str:
        scale = self._between(f"norm.{width}", 0.75, 1.25, width)
        return blocks.rms_norm(self.graph, x, scale, name=name, epsilon=NORM_EPSILON)

    def _linear(
        self, x: str, name: str, fan_in: int, fan_out: int, *, gain: float = 1.0, output: str | None = None
    ) -> str:
        """A projection in four bits; weights of standard deviation gain / sqrt(fan_in)."""
        codes, scales = self._quantised(name, fan_out, fan_in, gain)
        y = self.graph.add(
            "MatMulNBits",
            x,
            self.graph.initializer(f"{name}.codes", codes),
            self.graph.initializer(f"{name}.scales", scales),
            name=name,
            output=output,
            domain=_CONTRIB,
            K=fan_in,
            N=fan_out,
            bits=4,
            block_size=BLOCK,
            accuracy_level=4,
        )
        return self.graph.declare(y, DTYPE, ("batch", "sequence_len", fan_out)) if output is None else y

    def _quantised(
        self, name: str, rows: int, depth: int, gain: float
    ) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
        """Codes [rows, blocks, 16] and scales [rows, blocks]."""
        import numpy as np

        blocks_in_row = depth // BLOCK
        if name not in self._drawn:
            codes = np.frombuffer(bytearray(self._random.bytes(rows * depth // 2)), dtype=np.uint8)
            # A code of 0 is -8, which nothing above 7 balances: all weights would share a mean of -1/2, and
            # a stack of layers turns every position into the same direction. It becomes 8, a weight of 0.
            codes |= ((codes & 0x0F) == 0).view(np.uint8) << 3
            codes |= ((codes & 0xF0) == 0).view(np.uint8) << 7
            self._drawn[name] = codes.reshape(rows, blocks_in_row, BLOCK // 2)
            scale = gain / (_CODE_STD * math.sqrt(depth))
            self._between(f"{name}.scales", 0.75 * scale, 1.25 * scale, rows, blocks_in_row)
        return self._drawn[name], self._drawn[f"{name}.scales"]  # type: ignore[return-value] # by construction

    def _floats(self, name: str, std: float, *shape: int) -> NDArray[np.float16]:
        """Uniform with mean 0 and the given standard deviation."""
        return self._between(name, -math.sqrt(3.0) * std, math.sqrt(3.0) * std, *shape)

    def _between(self, name: str, low: float, high: float, *shape: int) -> NDArray[np.float16]:
        import numpy as np

        if name not in self._drawn:
            self._drawn[name] = self._random.uniform(low, high, shape).astype(np.float16)
        return self._drawn[name]  # type: ignore[return-value] # by construction
