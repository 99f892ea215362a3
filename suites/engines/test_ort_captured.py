"""Captured runs give what eager runs give, though a replay knows only the memory of its capture.

The session here is a real one on the CPU that treats graph IDs as the CUDA provider does: the first run with
an ID is kept with its binding, each later one reads and writes that memory again, whatever is bound then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from fixtures.decoders import save_graph
from fixtures.effort import examples
from harness.engines.base import SessionInfo, TensorHandle
from harness.engines.ort_captured import CapturedRuns
from harness.engines.ort_device import DevicePrograms
from harness.engines.ort_session import OrtSession

CPU = "CPUExecutionProvider"
LONGEST = 3


class Replaying:
    """A session that replays; `runs` notes for each run its graph ID and what was done."""

    def __init__(self, model: Path) -> None:
        self._real = onnxruntime.InferenceSession(str(model), providers=[CPU])
        self._captured: dict[str, Any] = {}
        self.runs: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        """As a session of the CUDA provider with `enable_cuda_graph`."""
        graph = options.get_run_config_entry("gpu_graph_id")
        if graph == "-1":
            self.runs.append((graph, "eager"))
            self._real.run_with_iobinding(binding)
            return
        self.runs.append((graph, "replayed" if graph in self._captured else "captured"))
        self._real.run_with_iobinding(self._captured.setdefault(graph, binding))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state that adds up what it is fed, and a cache that grows by it."""
    real = TensorProto.FLOAT
    return save_graph(
        tmp_path_factory.mktemp("captured") / "model.onnx",
        [
            helper.make_node("ReduceSum", ["x", "axes"], ["sum"], keepdims=1),
            helper.make_node("Add", ["state", "sum"], ["new_state"]),
            helper.make_node("Concat", ["cache", "x"], ["new_cache"], axis=0),
        ],
        [
            helper.make_tensor_value_info("x", real, ["n", 2]),
            helper.make_tensor_value_info("state", real, [1, 2]),
            helper.make_tensor_value_info("cache", real, ["past", 2]),
        ],
        [
            helper.make_tensor_value_info("new_state", real, [1, 2]),
            helper.make_tensor_value_info("new_cache", real, ["total", 2]),
        ],
        {"axes": np.array([0], np.int64)},
    )


def captured_session(model: Path) -> tuple[OrtSession, Replaying]:
    """Ours, and the one behind it."""
    behind = Replaying(model)
    programs = DevicePrograms(onnxruntime, [CPU], engine="replaying")
    runs = CapturedRuns(onnxruntime, behind, programs, device="cpu", device_id=0)
    info = SessionInfo(engine="replaying", version="0", mode="captured")
    return OrtSession(onnxruntime, behind, info=info, captured=runs), behind


@settings(deadline=None, max_examples=examples(40))
@given(
    steps=st.lists(
        st.tuples(st.integers(1, LONGEST), st.integers(0, 2), st.booleans()), min_size=1, max_size=9
    )
)
def test_every_handle_of_any_sequence_of_runs_holds_what_eager_runs_give(
    model: Path, steps: list[tuple[int, int, bool]]
) -> None:
    """Lengths that come again and that do not, states fed back or begun anew, all looked at at the end."""
    session, _ = captured_session(model)
    state: TensorHandle = session.zeros((1, 2), "float32")
    expected_state = np.zeros((1, 2), np.float32)
    kept: list[tuple[TensorHandle, np.ndarray]] = []
    for number, (length, past, anew) in enumerate(steps):
        if anew:
            state, expected_state = session.zeros((1, 2), "float32"), np.zeros((1, 2), np.float32)
        x = np.arange(number, number + 2 * length, dtype=np.float32).reshape(length, 2)
        cache = np.full((past, 2), number, np.float32)
        made = session.run(
            {"x": session.place(x), "state": state, "cache": session.place(cache)}, ("new_state", "new_cache")
        )
        state, expected_state = made["new_state"], expected_state + x.sum(axis=0, keepdims=True)
        kept += [(made["new_state"], expected_state), (made["new_cache"], np.concatenate([cache, x]))]
    for handle, expected in kept:
        assert np.array_equal(session.copy_out(handle), expected)


def test_a_signature_is_eager_once_captured_once_and_replayed_from_then_on(model: Path) -> None:
    """Each with a graph of its own; a cache that grows never comes again, and is never captured."""
    session, behind = captured_session(model)

    def run(length: int, past: int) -> None:
        feeds = {
            "x": session.place(np.ones((length, 2), np.float32)),
            "state": session.zeros((1, 2), "float32"),
            "cache": session.place(np.ones((past, 2), np.float32)),
        }
        session.run(feeds, ("new_state", "new_cache"))

    for length, past in [(1, 1), (1, 1), (2, 1), (1, 1), (2, 1), (1, 1)]:
        run(length, past)
    assert behind.runs == [
        ("-1", "eager"),
        ("0", "captured"),
        ("-1", "eager"),
        ("0", "replayed"),
        ("1", "captured"),
        ("0", "replayed"),
    ]
    behind.runs.clear()
    for past in range(3, 7):
        run(1, past)
    assert behind.runs == [("-1", "eager")] * 4
