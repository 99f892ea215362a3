"""Inputs that are fed the same value at every call, and never what an output gave."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from fixtures.decoders import save_graph
from fixtures.sessions import SESSION_KINDS, open_session
from harness.decode.feeds import plan_feeds
from harness.decode.loop import forced_decode, greedy_decode, one_pass_decode
from harness.errors import NotDrivableError
from harness.ports import read_ports
from harness.topology.spec import PortRole, Role, StatePair, Topology

VOCAB, WIDTH = 7, 5
TOPOLOGY = Topology(
    token_input="input_ids",
    logits_output="logits",
    state_pairs=(StatePair("past", "present"),),
    encoder_hidden_states_input="context",
    roles=(PortRole("context", "input", Role.ENCODER_HIDDEN_STATES, because="test"),),
)


def save(path: Path) -> Path:
    """State 0.97 * past + E[id], logits tanh(state + context) @ W: what the R1 recipe is, and a context."""
    rng = np.random.RandomState(4)
    real = TensorProto.FLOAT
    return save_graph(
        path,
        [
            helper.make_node("Gather", ["embedding", "input_ids"], ["x"]),
            helper.make_node("ReduceSum", ["x", "axis"], ["fed"], keepdims=0),
            helper.make_node("Mul", ["past", "fade"], ["faded"]),
            helper.make_node("Add", ["faded", "fed"], ["present"]),
            helper.make_node("Add", ["present", "context"], ["seen"]),
            helper.make_node("Tanh", ["seen"], ["squashed"]),
            helper.make_node("MatMul", ["squashed", "head"], ["logits"]),
        ],
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "new"]),
            helper.make_tensor_value_info("past", real, ["batch", WIDTH]),
            helper.make_tensor_value_info("context", real, ["batch", WIDTH]),
        ],
        [
            helper.make_tensor_value_info("logits", real, ["batch", VOCAB]),
            helper.make_tensor_value_info("present", real, ["batch", WIDTH]),
        ],
        {
            "embedding": rng.standard_normal((VOCAB, WIDTH)).astype(np.float32),
            "head": rng.standard_normal((WIDTH, VOCAB)).astype(np.float32),
            "fade": np.array(0.97, np.float32),
            "axis": np.array([1], np.int64),
        },
    )


def tokens(first: int, count: int, context: np.ndarray) -> list[int]:
    """The same in numpy, float64."""
    rng = np.random.RandomState(4)
    embedding, head = rng.standard_normal((VOCAB, WIDTH)), rng.standard_normal((WIDTH, VOCAB))
    state, token, found = np.zeros(WIDTH), first, []
    for _ in range(count):
        state = 0.97 * state + embedding[token]
        token = int((np.tanh(state + context) @ head).argmax())
        found.append(token)
    return found


@pytest.mark.parametrize("kind", SESSION_KINDS)
@pytest.mark.parametrize("as_handle", [False, True])
def test_what_is_given_is_fed_at_every_call(kind: str, as_handle: bool, tmp_path: Path) -> None:
    """Arrays and the session's own handles alike: each step sees the context, which changes the tokens."""
    session = open_session(kind, save(tmp_path / "model.onnx"))
    context = np.array([[1.5, -1, 0.5, 2, -2]], np.float32)
    expected = tokens(4, 12, context[0])
    assert expected != tokens(4, 12, np.zeros(WIDTH))

    extra = {"context": session.place(context) if as_handle else context}
    trace = greedy_decode(session, TOPOLOGY, (4,), max_new_tokens=12, extra=extra)
    forced = forced_decode(session, TOPOLOGY, (4,), trace.token_ids, extra=extra)

    assert list(trace.token_ids) == expected
    assert forced.steps == trace.steps


def test_one_pass_is_fed_it_as_well(tmp_path: Path) -> None:
    """The one call of one-pass verification has every input; this graph gives the last logits alone."""
    session = open_session("ort-cpu", save(tmp_path / "model.onnx"))
    context = np.ones((1, WIDTH), np.float32)

    assert one_pass_decode(session, TOPOLOGY, (4,), (1, 2), extra={"context": context}) is None


def test_a_value_for_no_input_is_refused(tmp_path: Path) -> None:
    """A misspelt port is noticed, and so is the one that then has no value."""
    ports = read_ports(save(tmp_path / "model.onnx"))

    with pytest.raises(NotDrivableError) as caught:
        plan_feeds(TOPOLOGY, ports, extra={"contxt": np.zeros(1)})
    assert set(caught.value.ports) == {"context", "contxt"}
    assert "contxt is given a value, and is no input of the graph" in caught.value.message
