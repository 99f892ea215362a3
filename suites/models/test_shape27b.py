"""The 27B-shaped package: its layout, its sharing, and that no weight is left out."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from fixtures.layouts import hybrid_27b
from fixtures.sessions import open_session
from harness.decode.loop import greedy_decode
from harness.models.gated_delta import GatedDeltaShape
from harness.models.shape27b import HybridShape, write_shape27b
from harness.oracle import OracleModel
from harness.package import open_package
from harness.ports import read_ports
from harness.topology.resolve import resolve_package
from harness.topology.spec import Outcome

SMALL = HybridShape(
    layers=8,
    hidden=64,
    intermediate=96,
    vocab=320,
    heads=4,
    kv_heads=2,
    head_width=32,
    delta=GatedDeltaShape(key_heads=2, value_heads=4, key_width=32, value_width=32, conv_kernel=4),
    max_positions=64,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight narrow layers."""
    return write_shape27b(tmp_path_factory.mktemp("small"), shape=SMALL)


def products(shape: HybridShape) -> Counter[tuple[int, int]]:
    """How often which [N, K] is multiplied with, from the sizes alone: each layer, then the head."""
    delta, counts = shape.delta, Counter[tuple[int, int]]()
    values = delta.value_heads * delta.value_width
    for layer in range(shape.layers):
        if layer % shape.attention_every == shape.attention_every - 1:
            query, cache = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
            counts.update([(query, shape.hidden)] * 2 + [(cache, shape.hidden)] * 2)
            counts[shape.hidden, query] += 1
        else:
            counts.update([(delta.channels, shape.hidden), (values, shape.hidden), (shape.hidden, values)])
        counts.update([(shape.intermediate, shape.hidden)] * 2 + [(shape.hidden, shape.intermediate)])
    counts[shape.vocab, shape.hidden] += 1
    return counts


def multiplied(model: Path) -> Counter[tuple[int, int]]:
    """[N, K] of each `MatMulNBits` of the graph."""
    counts = Counter[tuple[int, int]]()
    for node in onnx.load(model, load_external_data=False).graph.node:
        if node.op_type == "MatMulNBits":
            attributes = {item.name: item.i for item in node.attribute}
            counts[attributes["N"], attributes["K"]] += 1
    return counts


def test_the_default_is_a_27b() -> None:
    """25.6 billion weights in four bits, counted from the sizes."""
    weights = sum(rows * depth * times for (rows, depth), times in products(HybridShape()).items())
    assert 25.5e9 < weights < 25.7e9


def test_every_layer_multiplies(small: Path) -> None:
    """The graph has each product that its sizes ask for, whatever bytes are shared."""
    assert multiplied(small) == products(SMALL)


def test_ports_are_those_of_the_27b_layout(small: Path) -> None:
    """Half-precision ports in the order and with the symbols of the real exporter; topology is derived."""
    assert read_ports(small) == hybrid_27b(
        layers=8,
        kv_heads=2,
        head_width=32,
        conv_channels=256,
        value_heads=4,
        key_width=32,
        value_width=32,
        vocab=320,
    )
    derivation = resolve_package(open_package(small.parent), read_ports(small))
    assert derivation.outcome is Outcome.DERIVED
    assert derivation.topology is not None
    assert (len(derivation.topology.kv_inputs), len(derivation.topology.state_pairs)) == (4, 12)


def test_layers_of_a_kind_share_bytes_and_unshared_ones_do_not(small: Path, tmp_path: Path) -> None:
    """Shared, the file has the codes of each kind once; unshared, once a layer. The values are the same."""
    apart = write_shape27b(tmp_path, shape=SMALL, shared=False)
    sizes = {path: path.with_name("model.onnx.data").stat().st_size for path in (small, apart)}
    counts = products(SMALL)
    whole = sum(rows * depth * times for (rows, depth), times in counts.items()) // 2
    assert sizes[apart] > whole > 2 * sizes[small]
    loaded = [onnx.load(path) for path in (small, apart)]
    for one, other in zip(*(model.graph.initializer for model in loaded), strict=True):
        assert (one.name, one.raw_data) == (other.name, other.raw_data)


def test_codes_have_mean_zero(small: Path) -> None:
    """A code is never 0, and the weights' mean is within five standard errors of 0.

    Uniform codes read as q - 8 have mean -1/2: each product would add the same vector to all positions.
    """
    tensors = {t.name: t for t in onnx.load(small).graph.initializer}
    codes = numpy_helper.to_array(tensors["layers.0/mlp/up_proj.codes"])
    values = np.stack([codes & 15, codes >> 4]).astype(float).ravel() - 8
    assert values.min() == -7
    assert abs(values.mean()) < 5 * math.sqrt(17.5 / values.size)


def test_positions_differ(small: Path) -> None:
    """Logits are finite, of a scale near 4, and no two positions point in the same direction."""
    model = OracleModel.load(small)
    tokens = np.arange(6, dtype=np.int64)[None] * 50
    feeds = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "position_ids": np.arange(6)[None]}
    for spec in model.inputs:
        if spec.name not in feeds:
            assert spec.shape is not None
            extents = [x if isinstance(x, int) else 0 for x in spec.shape[1:]]
            feeds[spec.name] = np.zeros((1, *extents), np.float16)
    (logits,) = model.run(feeds, ["logits"])["logits"]
    assert 1 < logits.std() < 10
    cosines = np.corrcoef(logits)[np.triu_indices(6, 1)]
    assert np.abs(cosines).max() < 0.9


def test_it_decodes(small: Path) -> None:
    """The loop drives it on the oracle: the derived topology is one that can be driven."""
    derivation = resolve_package(open_package(small.parent), read_ports(small))
    assert derivation.topology is not None
    trace = greedy_decode(open_session("oracle", small), derivation.topology, (5, 6), max_new_tokens=4)
    assert len(trace.token_ids) == 4
