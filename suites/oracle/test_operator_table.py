"""The table of operators is current, and complete for the decoders that exporters write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from fixtures.operator_table import CONTRIB_TESTS, DOCUMENT, UNCLAIMED, decoder_operators, table
from harness.errors import EngineFailedError
from harness.oracle import OracleModel
from harness.oracle.kernels import LEFT_OUT, claims
from harness.oracle.kernels.registry import CONTRIB

CLAIMED = {(domain, op) for domain, op, _ in claims()}


def test_the_document_is_current() -> None:
    """Whoever adds a kernel writes the table anew: `python -m fixtures.operator_table`."""
    assert DOCUMENT.read_text() == table()


def test_every_operator_of_two_decoders_is_claimed_or_left_out_by_name() -> None:
    """Of the standard domain and com.microsoft; nothing is both claimed and left out."""
    common = {key for key, count in decoder_operators().items() if count >= 2 and key[0] in ("", CONTRIB)}
    assert len(common) > 90
    assert common - CLAIMED - LEFT_OUT.keys() == set()
    assert CLAIMED.isdisjoint(LEFT_OUT)
    assert CLAIMED.isdisjoint(("", op) for names in UNCLAIMED.values() for op in names)


def test_newest_versions_of_what_decoders_have_are_claimed() -> None:
    """Up to opset 27 every version that a graph of opset 13 or later can bring is claimed."""
    lacking = []
    for domain, op in decoder_operators():
        if domain == "" and (domain, op) in CLAIMED and op != "SimplifiedLayerNormalization":
            for opset in range(13, 28):
                try:
                    since = onnx.defs.get_schema(op, opset, "").since_version
                except onnx.defs.SchemaError:
                    continue
                if (domain, op, since) not in claims():
                    lacking.append((op, since))
    assert lacking == []


def test_each_contrib_operator_is_in_the_suite_that_the_table_names() -> None:
    """The table covers the claims, and the module named mentions the operator."""
    assert {op for domain, op in CLAIMED if domain == CONTRIB} == CONTRIB_TESTS.keys()
    for op, (_, module) in CONTRIB_TESTS.items():
        assert f'"{op}"' in (Path(__file__).parent / module).read_text(), op


@pytest.mark.parametrize(("domain", "op"), sorted(LEFT_OUT))
def test_what_is_left_out_is_refused_with_its_reason(domain: str, op: str, tmp_path: Path) -> None:
    """One error, before anything runs, that names the operator, its domain and version, the node, and why."""
    node = helper.make_node(op, ["x"], ["y"], domain=domain, name="the_node")
    ports: list[Any] = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    graph = helper.make_graph([node], "g", ports[:1], ports[1:])
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(domain, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "m.onnx")
    with pytest.raises(EngineFailedError) as error:
        OracleModel.load(tmp_path / "m.onnx")
    message = error.value.message
    assert all(part in message for part in (op, domain, "version 1", "the_node", LEFT_OUT[domain, op]))


def test_a_claim_of_an_opset_beyond_the_specification_is_not_made() -> None:
    """Every claimed version is one that onnx defines, so that no kernel answers for semantics unread."""
    known = {
        (schema.name, schema.since_version)
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.domain == ""
    }
    known.add(("LayerNormalization", 1))  # ONNX Runtime's, from before opset 17 had one
    newest = max(version for _, version in known)
    claimed = {
        (op, version)
        for domain, op, version in claims()
        if domain == "" and op != "SimplifiedLayerNormalization" and version <= newest
    }
    assert claimed <= known
    assert np.all([version > 0 for _, version in claimed])
