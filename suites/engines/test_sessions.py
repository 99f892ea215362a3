"""What every session must do, whatever engine is behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from fixtures.decoders import save_graph
from fixtures.effort import examples
from fixtures.sessions import SESSION_KINDS, open_session
from harness.engines.base import Session, TopLogits
from harness.errors import EngineFailedError, InputError

DTYPES = {
    "float32": (TensorProto.FLOAT, np.float32),
    "float16": (TensorProto.FLOAT16, np.float16),
    "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
    "float64": (TensorProto.DOUBLE, np.float64),
    "int64": (TensorProto.INT64, np.int64),
    "int32": (TensorProto.INT32, np.int32),
    "bool": (TensorProto.BOOL, np.bool_),
}
NO_SCALARS = {("nxrt", "bfloat16")}  # nxrt 0.1.0.dev6 takes a bfloat16 array of rank 0 for rank 1
WIDENED = {"oracle": {"float16", "bfloat16"}}  # it computes in float32 at least, and says so
FLOATS = ("float32", "float16", "bfloat16", "float64")

kinds = pytest.mark.parametrize("kind", SESSION_KINDS)


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Session]]:
    """A session whose output `y` is its input `x`, by session kind, dtype and rank."""
    folder = tmp_path_factory.mktemp("identity")
    sessions: list[Session] = []

    @cache
    def opened(kind: str, dtype: str, rank: int) -> Session:
        element_type, shape = DTYPES[dtype][0], [f"d{axis}" for axis in range(rank)]
        path = save_graph(
            folder / f"{dtype}{rank}.onnx",
            [helper.make_node("Identity", ["x"], ["y"])],
            [helper.make_tensor_value_info("x", element_type, shape)],
            [helper.make_tensor_value_info("y", element_type, shape)],
        )
        sessions.append(open_session(kind, path))
        return sessions[-1]

    yield opened
    for session in sessions:
        session.close()


@pytest.fixture(scope="module")
def appending(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`present` is `past` with `new` appended; `sum` is `state` + 1; both float32."""
    real = TensorProto.FLOAT
    return save_graph(
        tmp_path_factory.mktemp("appending") / "model.onnx",
        [
            helper.make_node("Concat", ["past", "new"], ["present"], axis=1),
            helper.make_node("Add", ["state", "one"], ["sum"]),
        ],
        [
            helper.make_tensor_value_info("past", real, ["batch", "past", 2]),
            helper.make_tensor_value_info("new", real, ["batch", "new", 2]),
            helper.make_tensor_value_info("state", real, ["batch", 3]),
        ],
        [
            helper.make_tensor_value_info("sum", real, ["batch", 3]),
            helper.make_tensor_value_info("present", real, ["batch", "all", 2]),
        ],
        {"one": np.array(1, np.float32)},
    )


@kinds
def test_ports_are_those_of_the_graph(kind: str, appending: Path) -> None:
    """Names, order, dtypes, ranks and concrete extents are the file's; symbols stay symbolic."""
    inventory = open_session(kind, appending).inventory

    assert [(p.name, p.dtype) for p in inventory.inputs] == [
        ("past", "float32"),
        ("new", "float32"),
        ("state", "float32"),
    ]
    assert [p.name for p in inventory.outputs] == ["sum", "present"]
    past, _, state = inventory.inputs
    assert (len(past.shape), past.shape[2], len(state.shape), state.shape[1]) == (3, 2, 2, 3)
    assert not isinstance(past.shape[1], int)


@kinds
@settings(deadline=None, max_examples=examples(60))  # opening a session takes its time
@given(data=st.data())
def test_a_tensor_survives_the_way_in_and_out(
    identity: Callable[..., Session], kind: str, data: st.DataObject
) -> None:
    """Any dtype, rank, extent (zero too) and stride: what comes out has the bits that went in."""
    dtypes = sorted(DTYPES.keys() - WIDENED.get(kind, set()))
    dtype = data.draw(st.sampled_from(dtypes))
    lowest = 1 if (kind, dtype) in NO_SCALARS else 0
    shape = data.draw(st.lists(st.integers(0, 3), min_size=lowest, max_size=4))
    seed = data.draw(st.integers(0, 2**16))
    whole = np.random.RandomState(seed).randint(-9, 9, size=[2 * extent for extent in shape])
    array = np.asarray(whole.astype(DTYPES[dtype][1]))[tuple(slice(None, None, 2) for _ in shape)]
    array = np.asarray(array.transpose(data.draw(st.permutations(range(len(shape))))))
    session = identity(kind, dtype, len(shape))

    placed = session.place(array)
    came = session.run({"x": placed}, ["y"])["y"]

    for handle in (placed, came):
        assert (handle.shape, handle.dtype) == (array.shape, dtype)
        out = session.copy_out(handle)
        assert (out.shape, out.dtype) == (array.shape, array.dtype)
        assert np.array_equal(out, array)


@kinds
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(1, 2, 0, 4), (1, 2, 300, 4), ()])
def test_zeros_are_zero(
    identity: Callable[..., Session], kind: str, dtype: str, shape: tuple[int, ...]
) -> None:
    """Memory that was just used and freed must not show through; length zero is a legal length."""
    if not shape and (kind, dtype) in NO_SCALARS:
        shape = (1,)
    session = identity(kind, dtype, len(shape))
    used = session.run({"x": session.place(np.ones((1, 2, 300, 4)[: len(shape)], DTYPES[dtype][1]))}, ["y"])
    del used

    zeros = session.zeros(shape, dtype)

    assert (zeros.shape, zeros.dtype) == (shape, dtype)
    for handle in (zeros, session.run({"x": zeros}, ["y"])["y"]):
        out = session.copy_out(handle)
        assert out.shape == shape
        assert not out.astype(np.float32).any()


@kinds
def test_handles_of_earlier_runs_stay_as_they_were(kind: str, appending: Path) -> None:
    """A later run writes neither to what it is fed nor to what earlier runs gave."""
    session = open_session(kind, appending)
    past, state = session.zeros((1, 0, 2), "float32"), session.zeros((1, 3), "float32")
    new = session.place(np.arange(2, dtype=np.float32).reshape(1, 1, 2))
    pasts, states = [past], [state]
    for _ in range(5):
        feeds = {"past": pasts[-1], "new": new, "state": states[-1]}
        outputs = session.run(feeds, ["present", "sum"])
        pasts.append(outputs["present"])
        states.append(outputs["sum"])

    for rows, handle in enumerate(pasts):
        assert np.array_equal(session.copy_out(handle), np.tile([[[0.0, 1.0]]], (1, rows, 1)))
    for count, handle in enumerate(states):
        assert np.array_equal(session.copy_out(handle), np.full((1, 3), count))


@kinds
def test_only_what_is_asked_for_comes_back(kind: str, appending: Path) -> None:
    """Outputs are by name, in any order and any subset, also after a run that asked for others."""
    session = open_session(kind, appending)
    feeds = {
        "past": session.zeros((1, 0, 2), "float32"),
        "new": session.zeros((1, 4, 2), "float32"),
        "state": session.zeros((1, 3), "float32"),
    }

    for asked in (["present", "sum"], ["sum"], ["present"], ["sum", "present"]):
        outputs = session.run(feeds, asked)
        assert list(outputs) == asked
        assert {name: outputs[name].shape for name in asked} == {
            name: {"sum": (1, 3), "present": (1, 4, 2)}[name] for name in asked
        }


@kinds
def test_a_missing_input_fails_the_run(kind: str, appending: Path) -> None:
    """An input that is not fed must not keep its value of the run before."""
    session = open_session(kind, appending)
    feeds = {
        "past": session.zeros((1, 0, 2), "float32"),
        "new": session.zeros((1, 4, 2), "float32"),
        "state": session.zeros((1, 3), "float32"),
    }
    session.run(feeds, ["sum"])
    del feeds["state"]

    with pytest.raises(EngineFailedError, match="state") as caught:
        session.run(feeds, ["sum"])
    assert caught.value.kind == "crashed"


@kinds
def test_closing_twice_is_harmless(kind: str, appending: Path) -> None:
    """`close` frees the session once; whoever uses it afterwards has a defect and is told."""
    session = open_session(kind, appending)
    handle = session.zeros((1, 3), "float32")
    session.close()
    session.close()

    with pytest.raises(RuntimeError, match="closed"):
        session.run({"state": handle}, ["sum"])


def reference_top(row: list[float], k: int) -> TopLogits:
    """Sort in plain Python: larger first, NaN last, then by ID."""
    order = sorted(
        range(len(row)), key=lambda i: (math.isnan(row[i]), 0 if math.isnan(row[i]) else -row[i], i)
    )
    chosen = order[:k]
    return TopLogits(tuple(chosen), tuple(row[i] for i in chosen), any(map(math.isnan, row)))


def same(left: TopLogits, right: TopLogits) -> bool:
    """Equality in which NaN equals NaN."""
    return (left.token_ids, left.has_nan) == (right.token_ids, right.has_nan) and np.array_equal(
        left.values, right.values, equal_nan=True
    )


# Few distinct values, so that ties are the rule.
logit = st.sampled_from([0.0, -0.0, 1.0, 1.5, -3.0, 40.0, math.inf, -math.inf, math.nan])
any_logit = st.floats(width=32)


@kinds
@settings(deadline=None, max_examples=examples(60))  # opening a session takes its time
@given(data=st.data())
def test_the_largest_logits_are_exact(
    identity: Callable[..., Session], kind: str, data: st.DataObject
) -> None:
    """Top-k, has_nan and order agree with a plain sort at every position, ties going to the lowest ID."""
    dtype = data.draw(st.sampled_from(FLOATS))
    vocab, count = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    flat = data.draw(st.booleans()) and count == 1
    value = data.draw(st.sampled_from([logit, any_logit]))
    rows = data.draw(
        st.lists(st.lists(value, min_size=vocab, max_size=vocab), min_size=count, max_size=count)
    )
    k = data.draw(st.integers(1, vocab + 2))
    positions = data.draw(st.none() | st.lists(st.integers(-count, count - 1), max_size=3))
    with np.errstate(over="ignore"):
        array = np.array(rows, dtype=DTYPES[dtype][1]).reshape((1, vocab) if flat else (1, count, vocab))
    session = identity(kind, dtype, array.ndim)
    logits = session.run({"x": session.place(array)}, ["y"])["y"]

    found = session.top_logits(logits, k=k, positions=positions)

    wanted = range(count) if positions is None else positions
    exact = array.astype(np.float64).reshape(count, vocab).tolist()
    expected = [reference_top(exact[p], k) for p in wanted]
    assert len(found) == len(expected)
    assert all(map(same, found, expected)), (found, expected)


@kinds
def test_what_is_no_logits_is_refused(identity: Callable[..., Session], kind: str) -> None:
    """A batch, another rank, and a position outside are told apart from logits."""
    session = identity(kind, "float32", 3)

    with pytest.raises(InputError, match=r"\[2, 1, 4\]"):
        session.top_logits(session.zeros((2, 1, 4), "float32"), k=1)
    with pytest.raises(IndexError):
        session.top_logits(session.zeros((1, 2, 4), "float32"), k=1, positions=[2])
    with pytest.raises(ValueError, match="k must be"):
        session.top_logits(session.zeros((1, 2, 4), "float32"), k=0)


def _unknown_operator(folder: Path) -> Path:
    return save_graph(
        folder / "model.onnx",
        [helper.make_node("Frobnicate", ["x"], ["y"], domain="org.example")],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )


def _fails_at_run(folder: Path) -> Path:
    """Loads, then cannot reshape anything but three elements."""
    return save_graph(
        folder / "model.onnx",
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
        {"shape": np.array([3], np.int64)},
    )


@pytest.mark.parametrize("kind", ["ort-cpu", "nxrt"])
def test_an_operator_that_is_missing_is_unsupported(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error is one line that names engine and operator, and nothing is written anywhere."""
    model = _unknown_operator(tmp_path)

    with pytest.raises(EngineFailedError, match=f"(?s){kind}.*Frobnicate") as caught:
        open_session(kind, model)

    assert caught.value.kind == "unsupported"
    assert "\n" not in caught.value.message
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["ort-cpu", "nxrt"])
def test_a_failing_run_is_a_crash(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The runtime's own message is kept, and its log lines stay off stderr."""
    session = open_session(kind, _fails_at_run(tmp_path))

    with pytest.raises(EngineFailedError, match=f"(?s){kind}.*Reshape") as caught:
        session.run({"x": session.place(np.zeros(4, np.float32))}, ["y"])

    assert caught.value.kind == "crashed"
    assert "\n" not in caught.value.message
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["ort-cpu", "nxrt"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_file_that_is_no_model_is_bad_input(
    kind: str, damage: str, tmp_path: Path, appending: Path
) -> None:
    """A missing or truncated file is the user's mistake, not the engine's."""
    model = tmp_path / "model.onnx"
    if damage == "truncated":
        model.write_bytes(appending.read_bytes()[:60])

    with pytest.raises(InputError, match=r"model\.onnx"):
        open_session(kind, model)


@pytest.mark.parametrize("kind", ["ort-cpu", "nxrt"])
def test_info_is_plain_and_complete(kind: str, appending: Path) -> None:
    """Name and version stand from the start; settings and placement are JSON data."""
    info: Any = open_session(kind, appending).info

    assert info.engine == kind
    assert info.version[0].isdigit()
    assert all(isinstance(value, bool | int | str) for value in info.settings.values())
