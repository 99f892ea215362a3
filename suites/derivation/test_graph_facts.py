"""What the nodes of a graph say about its caches where the ports do not: widths, axes, and lengths.

Expected are the extents that each graph was made with: heads are told apart by their widths, 16 for keys and
24 for values.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fixtures.flows import info
from harness.errors import InputError
from harness.package import open_package
from harness.ports import read_ports
from harness.topology.graph_facts import read_graph_facts
from harness.topology.resolve import resolve, resolve_package
from harness.topology.spec import GraphFacts, Topology

KEY, VALUE = "past_key_values.0.key", "past_key_values.0.value"
OPEN = ["batch", 2, "past", "kv_cache_dim"]
CONCRETE = ["batch", 2, "past", 16]
MICROSOFT = "com.microsoft"
WIDTHS = {KEY: {3: 16}, VALUE: {3: 24}}
OPERATORS = {
    "attention": ("Attention", "", 4, "kv_num_heads"),
    "grouped-query": ("GroupQueryAttention", MICROSOFT, 3, "kv_num_heads"),
    "sparse": ("SparseAttention", MICROSOFT, 3, "kv_num_heads"),
    "multi-head": ("MultiHeadAttention", MICROSOFT, 6, "num_heads"),
}
"""Operator, domain, position of the past keys, and the attribute that counts the heads."""


def grown(shape: Sequence[Any]) -> list[Any]:
    """The shape of a cache after a call."""
    return ["total" if extent == "past" else extent for extent in shape]


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    *,
    caches: Sequence[tuple[onnx.ValueInfoProto, onnx.ValueInfoProto]] | None = None,
    values: dict[str, list[Any]] | None = None,
    weights: dict[str, tuple[int, ...]] | None = None,
    controls: Sequence[str] = (),
) -> Path:
    """A decoder with these nodes; without `caches` its keys and values are of unknown width."""
    if caches is None:
        caches = [cache(KEY), cache(VALUE)]
    given = {name for node in nodes for name in node.output}
    others = [name for name in ("logits", *(present.name for _, present in caches)) if name not in given]
    graph = helper.make_graph(
        [*nodes, helper.make_node("Rest", [], others, domain="unknown")],
        "decoder",
        [
            info("input_ids", ["batch", "s"], TensorProto.INT64),
            *(info(name, ["batch"], TensorProto.INT64) for name in controls),
            *(past for past, _ in caches),
        ],
        [info("logits", ["batch", "s", 1000]), *(present for _, present in caches)],
        [numpy_helper.from_array(np.zeros(shape, np.int8), name) for name, shape in (weights or {}).items()],
        value_info=[info(name, shape) for name, shape in (values or {}).items()],
    )
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return path


def cache(
    past: str, shape: Sequence[Any] = OPEN, after: Sequence[Any] | None = None
) -> tuple[onnx.ValueInfoProto, onnx.ValueInfoProto]:
    """Both ports of a cache."""
    present = past.replace("past_key_values", "present").replace("cache.", "updated_cache.")
    return info(past, list(shape)), info(present, grown(shape) if after is None else list(after))


def topology(path: Path) -> Topology:
    """The roles of the ports, by their names."""
    derivation = resolve(read_ports(path))
    assert derivation.topology is not None, derivation.refusal
    return derivation.topology


def facts(path: Path, config: Any = None) -> GraphFacts:
    """What the graph and its configuration say."""
    return read_graph_facts([path], read_ports(path), topology(path), config)


def attention(kind: str = "grouped-query", *given: str, **attributes: int) -> onnx.NodeProto:
    """An attention that takes both caches, and `q`, `k` and `v` or what is given in their place."""
    operator, domain, position, number = OPERATORS[kind]
    inputs = [*(given or ("q", "k", "v")), *[""] * (position - 3), KEY, VALUE]
    return helper.make_node(operator, inputs, ["y"], domain=domain, **({number: 2} | attributes))


@pytest.mark.parametrize("kind", OPERATORS)
def test_an_attention_says_how_wide_a_head_of_its_caches_is(tmp_path: Path, kind: str) -> None:
    """Keys of two heads are twice as wide as one, and values have a width of their own."""
    values = {"k": ["batch", "s", 32], "v": ["batch", "s", 48]}
    assert facts(save(tmp_path / "m.onnx", [attention(kind)], values=values)).extents == WIDTHS


def test_heads_on_an_axis_of_their_own_are_counted_there(tmp_path: Path) -> None:
    """Keys of rank 4 are as wide as a head, with or without the attribute that counts heads."""
    values = {"k": ["batch", 2, "s", 16], "v": ["batch", 2, "s", 24]}
    path = tmp_path / "m.onnx"
    assert facts(save(path, [attention("attention")], values=values)).extents == WIDTHS
    node = helper.make_node("Attention", ["q", "k", "v", "", KEY, VALUE], ["y"])
    assert facts(save(path, [node], values=values)).extents == WIDTHS


def test_queries_keys_and_values_may_stand_side_by_side(tmp_path: Path) -> None:
    """Six heads of queries, two of keys and two of values are ten heads in a row."""
    values = {"qkv": ["batch", "s", 160]}
    path = tmp_path / "m.onnx"
    node = attention("grouped-query", "qkv", "", "", num_heads=6)
    assert facts(save(path, [node], values=values)).extents == {KEY: {3: 16}, VALUE: {3: 16}}
    single = attention("multi-head", "qkv", "", "", num_heads=1)
    assert facts(save(path, [single], values={"qkv": ["batch", "s", 48]})).extents == {
        KEY: {3: 16},
        VALUE: {3: 16},
    }
    unsaid = attention("grouped-query", "qkv", "", "")
    assert facts(save(path, [unsaid], values=values)).extents == {}


def test_keys_and_values_may_stand_side_by_side(tmp_path: Path) -> None:
    """`MultiHeadAttention` takes both in one value of rank 5, whose last axis is a head.

    Of rank 3 it holds the keys alone, and values that are left out beside them are of no known width.
    """
    path = tmp_path / "m.onnx"
    node = attention("multi-head", "q", "kv", "")
    values = {"q": ["batch", "s", 7], "kv": ["batch", "s", 2, 2, 16]}
    assert facts(save(path, [node], values=values)).extents == {KEY: {3: 16}, VALUE: {3: 16}}
    values["kv"] = ["batch", "s", 48]
    assert facts(save(path, [node], values=values)).extents == {KEY: {3: 24}}


@pytest.mark.parametrize(("bits", "width"), [(8, 16), (4, 8)])
def test_two_values_of_four_bits_share_a_byte(tmp_path: Path, bits: int, width: int) -> None:
    """A quantised cache is as wide as its bytes; an odd width takes half a byte more than it needs."""
    values = {"k": ["batch", "s", 32], "v": ["batch", "s", 34]}
    path = save(tmp_path / "m.onnx", [attention(kv_cache_bit_width=bits)], values=values)
    assert facts(path).extents == {KEY: {3: width}, VALUE: {3: 17 if bits == 8 else 9}}


MADE = {
    "product": ([helper.make_node("MatMul", ["x", "w"], ["k"])], {"w": (7, 32)}),
    "product of many": (
        [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["k"])],
        {"w": (7, 32)},
    ),
    "gemm": ([helper.make_node("Gemm", ["x", "w", "b"], ["k"])], {"w": (7, 32)}),
    "gemm, transposed": ([helper.make_node("Gemm", ["x", "w"], ["k"], transB=1)], {"w": (32, 7)}),
    "quantised": (
        [helper.make_node("MatMulNBits", ["x", "w", "s"], ["k"], domain=MICROSOFT, N=32, K=7)],
        {"w": (32, 1, 16)},
    ),
    "turned": (
        [
            helper.make_node("MatMul", ["x", "w"], ["m"]),
            helper.make_node("RMSNormalization", ["m", "g"], ["n"]),
            helper.make_node("RotaryEmbedding", ["n", "p", "c", "s"], ["k"], domain=MICROSOFT),
        ],
        {"w": (7, 32)},
    ),
    "moved": (
        [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Transpose", ["m"], ["k"])],
        {"w": (7, 32)},
    ),
    "product by a stack": ([helper.make_node("MatMul", ["x", "w"], ["k"])], {"w": (3, 7, 32)}),
    "product by a vector": ([helper.make_node("MatMul", ["x", "w"], ["k"])], {"w": (32,)}),
    "product by what is computed": ([helper.make_node("MatMul", ["x", "w"], ["k"])], {}),
    "product of one": ([helper.make_node("MatMul", ["x"], ["k"])], {"x": (7, 32)}),
    "made of nothing": ([helper.make_node("Identity", [], ["k"])], {}),
    "no multiple of the heads": ([helper.make_node("MatMul", ["x", "w"], ["k"])], {"w": (7, 33)}),
    "second output": ([helper.make_node("Split", ["x"], ["z", "k"])], {"x": (7, 32)}),
}
"""How keys are made, and the shapes of weights."""
SILENT = list(MADE)[list(MADE).index("moved") :]


@pytest.mark.parametrize("name", MADE)
def test_keys_are_as_wide_as_the_product_that_gives_them(tmp_path: Path, name: str) -> None:
    """Where the graph does not say their shape, the weight does; and where that does not, nobody guesses."""
    nodes, weights = MADE[name]
    found = facts(save(tmp_path / "m.onnx", [*nodes, attention()], weights=weights)).extents
    assert found == ({} if name in SILENT else {KEY: {3: 16}})


@pytest.mark.parametrize("operator", ["MatMul", "MatMulNBits"])
def test_a_shape_in_the_graph_goes_before_the_node(tmp_path: Path, operator: str) -> None:
    """A weight of another shape says nothing where the graph has the shape of the product."""
    node = helper.make_node(operator, ["x", "w"], ["k"], N=64)
    path = save(
        tmp_path / "m.onnx", [node, attention()], values={"k": ["b", "s", 32]}, weights={"w": (7, 64)}
    )
    assert facts(path).extents == {KEY: {3: 16}}


def test_a_symbol_in_the_shape_of_the_keys_leaves_it_to_the_node(tmp_path: Path) -> None:
    """Neither does a scalar have a width, nor a weight whose extents are symbols."""
    node = helper.make_node("MatMul", ["x", "w"], ["k"])
    path = tmp_path / "m.onnx"
    for shape in (["b", "s", "hidden"], []):
        save(path, [node, attention()], values={"k": shape}, weights={"w": (7, 32)})
        assert facts(path).extents == {KEY: {3: 16}}
    assert facts(save(path, [node, attention()], values={"w": ["in", "out"]})).extents == {}


@pytest.mark.parametrize(("between", "found"), [(7, {KEY: {3: 16}}), (8, {})])
def test_eight_nodes_are_asked_and_no_more(tmp_path: Path, between: int, found: object) -> None:
    """A product that is farther from the attention says nothing about its keys."""
    names = [f"v{number}" for number in range(between)] + ["k"]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["v0"])]
    nodes += [helper.make_node("Identity", [before], [after]) for before, after in itertools.pairwise(names)]
    assert facts(save(tmp_path / "m.onnx", [*nodes, attention()], weights={"w": (7, 32)})).extents == found


@pytest.mark.parametrize(
    "node",
    [
        attention(kv_num_heads=0),
        helper.make_node("GroupQueryAttention", ["q", "k", "v", KEY, VALUE], ["y"], domain=MICROSOFT),
        helper.make_node("GroupQueryAttention", ["q", "k", "v", KEY, VALUE], ["y"], kv_num_heads=2),
        helper.make_node("GroupQueryAttention", ["k", KEY, VALUE], ["y"], domain=MICROSOFT, kv_num_heads=2),
        helper.make_node(
            "GroupQueryAttention", ["", "", "", KEY, VALUE], ["y"], domain=MICROSOFT, kv_num_heads=2
        ),
    ],
    ids=["no-heads", "no-count", "another-domain", "not-as-a-cache", "nothing-given"],
)
def test_an_attention_that_does_not_say_it_is_not_asked_further(tmp_path: Path, node: onnx.NodeProto) -> None:
    """Without a number of heads, or outside its slots, nothing follows from the shape of its keys."""
    values = {"q": ["b", "s", 32], "k": ["b", "s", 32], "v": ["b", "s", 48]}
    assert facts(save(tmp_path / "m.onnx", [node], values=values)).extents == {}


def test_an_attention_may_take_one_cache_of_two(tmp_path: Path) -> None:
    """Values that are left out end its inputs; keys of which the width is known need no answer."""
    values = {"k": ["b", "s", 32], "v": ["b", "s", 48]}
    path = tmp_path / "m.onnx"
    node = helper.make_node(
        "GroupQueryAttention", ["q", "k", "v", KEY], ["y"], domain=MICROSOFT, kv_num_heads=2
    )
    assert facts(save(path, [node], values=values)).extents == {KEY: {3: 16}}
    caches = [cache(KEY, CONCRETE), cache(VALUE)]
    assert facts(save(path, [attention()], caches=caches, values=values)).extents == {VALUE: {3: 24}}


def test_the_configuration_says_it_where_the_nodes_do_not(tmp_path: Path) -> None:
    """`head_size` holds for every cache that no attention speaks of."""
    path = save(tmp_path / "m.onnx", [attention()], values={"v": ["b", "s", 48]})
    config = {"model": {"decoder": {"head_size": 128}}}
    assert facts(path, config).extents == {KEY: {3: 128}, VALUE: {3: 24}}


def test_each_layer_has_its_own_width(tmp_path: Path) -> None:
    """Layers may differ; a node that gives nothing is passed over."""
    caches = [cache(KEY), cache(KEY.replace("0", "1"))]
    nodes = [
        helper.make_node(
            "GroupQueryAttention", ["q", given, "v", past], ["y"], domain=MICROSOFT, kv_num_heads=2
        )
        for given, past in (("k", KEY), ("kk", KEY.replace("0", "1")))
    ]
    values = {"k": ["b", "s", 32], "kk": ["b", "s", 48]}
    path = save(tmp_path / "m.onnx", [helper.make_node("Nop", [], []), *nodes], caches=caches, values=values)
    assert facts(path).extents == {KEY: {3: 16}, KEY.replace("0", "1"): {3: 24}}


def test_all_parts_of_a_decoder_are_asked_before_its_configuration(tmp_path: Path) -> None:
    """Each part knows of its own layers; what a part says goes before what is said for all of them."""
    whole = save(
        tmp_path / "whole.onnx",
        [],
        caches=[cache(KEY), cache(VALUE), *static_caches()],
        controls=(*CONTROLS, "seqlens_k", "past_seq_len"),
    )
    values = {"k": ["b", "s", 32], "v": ["b", "s", 48]}
    one = helper.make_node(
        "GroupQueryAttention", ["q", "k", "v", KEY], ["y"], domain=MICROSOFT, kv_num_heads=2
    )
    parts = [
        save(tmp_path / "1.onnx", [one, scatter("key_cache.0", axis=1), takes("seqlens_k")], values=values),
        save(
            tmp_path / "2.onnx", [attention(), scatter("value_cache.0"), takes("past_seq_len")], values=values
        ),
    ]
    config = {"model": {"decoder": {"head_size": 128}}}
    found = read_graph_facts(parts, read_ports(whole), topology(whole), config)
    assert found.extents == WIDTHS
    assert found.row_axes == {"key_cache.0": 1, "value_cache.0": -2}
    assert found.last_token_indices == {"seqlens_k", "past_seq_len"}


def test_a_package_knows_what_its_graph_and_its_configuration_say(tmp_path: Path) -> None:
    """A folder with a graph is resolved with its facts, and with the ports as its file spells them."""
    path = save(tmp_path / "model.onnx", [attention()], values={"k": ["b", "s", 32]})
    config = {"model": {"decoder": {"head_size": 24}}}
    (tmp_path / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    found = resolve_package(open_package(tmp_path), read_ports(path)).topology
    assert found is not None
    assert found.facts.extents == WIDTHS
    assert found.inventory == read_ports(path)
    assert resolve(read_ports(path)).topology == found


@pytest.mark.parametrize("place", ["model", "model.decoder"])
def test_a_configuration_of_another_form_is_bad_input_at_its_place(tmp_path: Path, place: str) -> None:
    """A list where a mapping is due."""
    path = save(tmp_path / "m.onnx", [])
    with pytest.raises(InputError) as error:
        facts(path, {"model": [] if place == "model" else {"decoder": []}})
    assert error.value.message.startswith(f"{place} must be")


@pytest.mark.parametrize("size", [None, True, 0, -1, "128", 1.5])
def test_a_head_size_that_is_no_extent_says_nothing(tmp_path: Path, size: object) -> None:
    """The same key may be absent or null."""
    path = save(tmp_path / "m.onnx", [])
    assert facts(path, {"model": {"decoder": {"head_size": size}}}).extents == {}
    assert facts(path, {"model": {"decoder": {"head_size": 1}}}).extents == {KEY: {3: 1}, VALUE: {3: 1}}


@pytest.mark.parametrize(
    ("past", "shape", "after", "axis"),
    [
        (KEY, OPEN, None, 3),
        (KEY, ["batch", "past", "width"], None, 2),
        (KEY, ["batch", 2, "past", ""], ["batch", 2, "total", ""], 3),
        (KEY, CONCRETE, None, None),
        (KEY, ["batch", 2, 16, "past"], None, None),
        ("past_key_values.0.key_scale", OPEN, None, None),
        ("past_key_values.0.conv_state", ["batch", 64, 3], ["batch", 64, 3], None),
    ],
    ids=["width", "rank-3", "nameless", "known", "grows", "scale", "state"],
)
def test_the_width_is_a_last_axis_that_is_spelled_alike_on_both_sides(
    tmp_path: Path, past: str, shape: list[Any], after: list[Any] | None, axis: int | None
) -> None:
    """It is open where it is no number and does not grow; scales and states have no heads."""
    shape = [extent or None for extent in shape]
    path = save(tmp_path / "m.onnx", [], caches=[cache(past, shape, after), cache(VALUE, CONCRETE)])
    found = facts(path, {"model": {"decoder": {"head_size": 128}}}).extents
    assert found == ({} if axis is None else {past: {axis: 128}})


def test_a_cache_of_no_known_shape_is_not_asked_about(tmp_path: Path) -> None:
    """The present may be silent; the past must say that it has a last axis."""
    config = {"model": {"decoder": {"head_size": 128}}}
    silent = helper.make_value_info("present.0.key", helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    path = tmp_path / "m.onnx"
    save(path, [], caches=[(info(KEY, OPEN), silent)])
    assert facts(path, config).extents == {KEY: {3: 128}}
    unknown = helper.make_value_info(KEY, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    save(path, [], caches=[(unknown, silent), cache(VALUE)])
    assert facts(path, config).extents == {VALUE: {3: 128}}


BUFFER = ["batch", 128, 32]
CONTROLS = ("write_indices", "nonpad_kv_seqlen")


def static_caches() -> list[tuple[onnx.ValueInfoProto, onnx.ValueInfoProto]]:
    """Two layers of buffers of fixed size."""
    return [
        (info(f"{kind}_cache.{layer}", BUFFER), info(f"updated_{kind}_cache.{layer}", BUFFER))
        for layer in range(2)
        for kind in ("key", "value")
    ]


def scatter(past: str, domain: str = "", **attributes: int) -> onnx.NodeProto:
    """A node that writes rows into a buffer."""
    inputs = [past, "rows", "write_indices"]
    return helper.make_node("TensorScatter", inputs, [f"updated_{past}"], domain=domain, **attributes)


def test_rows_are_written_along_the_axis_that_the_scatter_names(tmp_path: Path) -> None:
    """The last but one where it names none; other operators and other inputs of it are no such word."""
    nodes = [
        helper.make_node("Constant", [], ["c"], value_int=1),
        scatter("key_cache.0", axis=1),
        scatter("value_cache.0"),
        scatter("key_cache.1", domain="other", axis=0),
        helper.make_node("TensorScatter", ["other", "value_cache.1", "write_indices"], ["z"], axis=0),
    ]
    path = save(tmp_path / "m.onnx", nodes, caches=static_caches(), controls=CONTROLS)
    found = facts(path)
    assert found.row_axes == {"key_cache.0": 1, "value_cache.0": -2}
    assert (found.extents, found.last_token_indices) == ({}, frozenset())


SLOT = ["q", "k", "v", "", ""]


def takes(length: str) -> onnx.NodeProto:
    """An attention that takes a length as the index of the last token."""
    return helper.make_node("GroupQueryAttention", [*SLOT, length], [f"y.{length}"], domain=MICROSOFT)


def test_a_length_is_an_index_where_an_attention_takes_it_as_one(tmp_path: Path) -> None:
    """Directly or after a change of form; what is computed from it is another thing."""
    controls = ("seqlens_k", "past_seq_len", "cache_length", "total_seq_len", "kv_length", "past_len")
    nodes = [
        helper.make_node("Identity", ["past_len"], []),
        helper.make_node("Cast", ["past_seq_len"], ["cast"], to=TensorProto.INT32),
        helper.make_node("Reshape", ["cast", "shape"], ["flat"]),
        helper.make_node("Sub", ["cache_length", "one"], ["less"]),
        helper.make_node("Cast", ["less", "kv_length"], ["less.cast"], to=TensorProto.INT32),
        takes("seqlens_k"),
        takes("flat"),
        takes("less.cast"),
        helper.make_node("GroupQueryAttention", [*SLOT, "other", "total_seq_len"], ["z"], domain=MICROSOFT),
        helper.make_node("GroupQueryAttention", [*SLOT, "kv_length"], ["zz"]),
        helper.make_node("GroupQueryAttention", SLOT, ["short"], domain=MICROSOFT),
    ]
    path = save(
        tmp_path / "m.onnx", nodes, caches=[cache(KEY, CONCRETE), cache(VALUE, CONCRETE)], controls=controls
    )
    assert facts(path).last_token_indices == {"seqlens_k", "past_seq_len"}


def test_the_lengths_of_a_static_cache_mean_what_its_declaration_says(tmp_path: Path) -> None:
    """Whatever else takes them."""
    nodes = [scatter("key_cache.0"), takes("nonpad_kv_seqlen"), takes("seqlens_k")]
    path = save(tmp_path / "m.onnx", nodes, caches=static_caches(), controls=(*CONTROLS, "seqlens_k"))
    assert facts(path).last_token_indices == {"seqlens_k"}
    assert facts(path).row_axes == {"key_cache.0": -2}


def test_a_graph_of_which_nothing_is_open_is_not_read(tmp_path: Path) -> None:
    """The nodes of a model may be many, and the ports say all there is to say."""
    path = save(tmp_path / "m.onnx", [], caches=[cache(KEY, CONCRETE)])
    ports, roles = read_ports(path), topology(path)
    path.unlink()
    assert read_graph_facts([path], ports, roles) == GraphFacts()


def test_a_graph_that_is_cut_off_is_bad_input(tmp_path: Path) -> None:
    """Its ports may be read where its nodes are not; the message has its name, and says what to do."""
    path = save(tmp_path / "m.onnx", [])
    ports, roles = read_ports(path), topology(path)
    path.write_bytes(bytes.fromhex("3a040a020a09"))  # a graph with a node whose input is longer than the file
    with pytest.raises(InputError) as error:
        read_graph_facts([path], ports, roles)
    assert error.value.message.startswith(f"{path} is not a complete ONNX model: ")
    assert error.value.next_action == (
        "Export or download the file again; compare its size with the original's."
    )
