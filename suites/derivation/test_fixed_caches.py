"""Caches of fixed size without control ports: the attention that takes them says what it does with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from harness.package import open_package
from harness.ports import read_ports
from harness.topology.resolve import resolve_package
from harness.topology.spec import GraphFacts

KEY, VALUE = "past_key_values.0.key", "past_key_values.0.value"


def facts_of(
    folder: Path,
    before: Sequence[Any],
    after: Sequence[Any],
    *,
    operator: str,
    more: Sequence[onnx.NodeProto] = (),
    **attributes: int,
) -> GraphFacts:
    """The facts about a decoder whose one attention takes caches of these shapes, with `more` nodes."""

    def value(name: str, shape: Sequence[Any], dtype: int = TensorProto.FLOAT) -> Any:
        return helper.make_tensor_value_info(name, dtype, shape)

    grouped = operator == "GroupQueryAttention"
    inputs = ["q", "k", "v", KEY, VALUE, "last", "total"] if grouped else ["q", "k", "v", "", KEY, VALUE]
    node = helper.make_node(
        operator,
        inputs,
        ["context", "present.0.key", "present.0.value"],
        domain="com.microsoft" if grouped else "",
        kv_num_heads=2,
        **attributes,
    )
    graph = helper.make_graph(
        [node, *more, helper.make_node("MatMul", ["context", "head"], ["logits"])],
        "decoder",
        [value("input_ids", ["batch", "new"], TensorProto.INT64), value(KEY, before), value(VALUE, before)],
        [
            value("logits", ["batch", "new", 1000]),
            value("present.0.key", after),
            value("present.0.value", after),
        ],
    )
    (folder / "model.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    package = open_package(folder)
    derivation = resolve_package(package, read_ports(package.model))
    assert derivation.topology is not None, derivation.refusal
    return derivation.topology.facts


GROUPED = {"operator": "GroupQueryAttention", "num_heads": 4}
FIXED = ("batch", 2, 24, 16)


def test_rows_are_written_where_a_grouped_attention_takes_a_number_of_them(tmp_path: Path) -> None:
    """It writes behind those that it has seen, and gives back a buffer that is long enough."""
    facts = facts_of(tmp_path, FIXED, FIXED, **GROUPED)

    assert facts == GraphFacts(row_axes={KEY: 2, VALUE: 2})


def test_other_attention_says_nothing_of_a_number_of_rows(tmp_path: Path) -> None:
    """The standard operator appends: what becomes of the rest is another node's business."""
    assert facts_of(tmp_path, FIXED, FIXED, operator="Attention", q_num_heads=4) == GraphFacts()


@pytest.mark.parametrize(
    ("rows", "grown"), [(24, 24), ("past_sliding_length", "total_sliding_length"), ("window", "rolled")]
)
def test_an_attention_that_rolls_its_cache_says_how_much_of_it_a_query_sees(
    rows: int | str, grown: int | str, tmp_path: Path
) -> None:
    """Whether the ports give the number of rows, or a symbol that names a window."""
    before, after = ("batch", 2, rows, 16), ("batch", 2, grown, 16)

    facts = facts_of(tmp_path, before, after, **GROUPED, sliding_window_cache=1, local_window_size=12)

    assert facts == GraphFacts(windows={KEY: 12, VALUE: 12})


def test_a_window_of_the_attention_alone_rolls_nothing(tmp_path: Path) -> None:
    """Queries see a window of a cache that keeps everything."""
    before, after = ("batch", 2, "past_sliding_length", 16), ("batch", 2, "total_sliding_length", 16)

    assert facts_of(tmp_path, before, after, **GROUPED, local_window_size=12) == GraphFacts()


def test_a_cache_that_grows_is_none_of_these(tmp_path: Path) -> None:
    """Its length is neither a number nor a window's, so no node is asked."""
    before, after = ("batch", 2, "past", 16), ("batch", 2, "total", 16)

    facts = facts_of(tmp_path, before, after, **GROUPED, sliding_window_cache=1, local_window_size=12)

    assert facts == GraphFacts()


@pytest.mark.parametrize(("window", "known"), [({"local_window_size": 1}, True), ({}, False)])
def test_an_attention_that_rolls_without_a_window_says_nothing(
    window: dict[str, int], known: bool, tmp_path: Path
) -> None:
    """How much of the cache it keeps is not known; a window of one row is one."""
    facts = facts_of(tmp_path, FIXED, FIXED, **GROUPED, sliding_window_cache=1, **window)

    assert facts == GraphFacts(windows={KEY: 1, VALUE: 1} if known else {})


def test_a_cache_outside_its_slots_is_not_written(tmp_path: Path) -> None:
    """After the slots of keys and values come lengths, whatever stands there."""
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "", "", KEY],
        ["context"],
        domain="com.microsoft",
        kv_num_heads=2,
    )

    assert facts_of(tmp_path, FIXED, FIXED, operator="Attention", more=[node]) == GraphFacts()
