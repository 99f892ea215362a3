from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from fixtures.decoders import save_graph
from harness.engines.base import Engine, Session
from harness.engines.oracle import ENGINE
from harness.errors import EngineFailedError, InputError
from harness.models.demo import write_demo
from harness.ports import Port


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """`present` is `past` with x appended, `logits` [batch, n, 4] is x times the weight w; all float16."""
    half = TensorProto.FLOAT16
    return save_graph(
        tmp_path / "model.onnx",
        [
            helper.make_node("Concat", ["past", "x"], ["present"], axis=1),
            helper.make_node("Mul", ["x", "w"], ["logits"]),
        ],
        [
            helper.make_tensor_value_info("past", half, ["batch", "past", 4]),
            helper.make_tensor_value_info("x", half, ["batch", "n", 4]),
            helper.make_tensor_value_info("w", half, [1]),
        ],
        [
            helper.make_tensor_value_info("present", half, ["batch", "all", 4]),
            helper.make_tensor_value_info("logits", half, ["batch", "n", 4]),
        ],
        {"w": np.array([3], np.float16)},
    )


def test_the_engine_is_an_engine_that_is_always_there() -> None:
    """It satisfies the protocol, takes the option `precision`, and needs nothing that may be missing."""
    assert isinstance(ENGINE, Engine)
    assert (ENGINE.name, list(ENGINE.options)) == ("oracle", ["precision", "rounding", "threads"])
    assert ENGINE.availability().usable


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_session_says_what_runs_and_which_ports_there_are(precision: str, graph: Path) -> None:
    """Ports as declared, without the initialiser; settings hold the precision and the numpy behind it."""
    session = ENGINE.open(graph, {"precision": precision})
    assert session.inventory.inputs == (
        Port("past", "float16", ("batch", "past", 4)),
        Port("x", "float16", ("batch", "n", 4)),
    )
    assert [port.name for port in session.inventory.outputs] == ["present", "logits"]
    settings = session.info.settings
    assert (session.info.engine, settings["precision"], settings["numpy"]) == (
        "oracle",
        precision,
        np.__version__,
    )


def test_the_default_precision_is_float32_and_others_are_refused(graph: Path) -> None:
    """`oracle:precision=float16` is an error that names the choices."""
    assert ENGINE.open(graph, {}).info.settings["precision"] == "float32"
    with pytest.raises(InputError, match="precision=float16 must be one of float32, float64"):
        ENGINE.open(graph, {"precision": "float16"})


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_narrow_ports_are_widened_once_and_stay_wide(precision: str, graph: Path) -> None:
    """Zeros and arrays come in the port's dtype, outputs in the oracle's, and go back in as they are."""
    session = ENGINE.open(graph, {"precision": precision})
    past, x = session.zeros((1, 0, 4), "float16"), session.place(np.full((1, 2, 4), 0.5, np.float16))
    assert (past.shape, past.dtype, x.dtype) == ((1, 0, 4), "float16", "float16")
    first = session.run({"past": past, "x": x}, ["present"])
    second = session.run({"past": first["present"], "x": x}, ["present"])["present"]
    assert (second.shape, second.dtype) == ((1, 4, 4), precision)
    np.testing.assert_array_equal(session.copy_out(second), np.full((1, 4, 4), 0.5))


def test_logits_are_reduced_and_copies_are_copies(graph: Path) -> None:
    """`top_logits` over positions, ties to the lowest ID; writing to what was copied out changes nothing."""
    session = ENGINE.open(graph, {})
    x = session.place(np.array([[[0, 1, 1, 0], [2, 0, 0, 0]]], np.float32))
    logits = session.run({"past": session.zeros((1, 0, 4), "float32"), "x": x}, ["logits"])["logits"]
    tops = session.top_logits(logits, k=2)
    assert [(top.token_ids, top.values) for top in tops] == [((1, 2), (3.0, 3.0)), ((0, 1), (6.0, 0.0))]
    copy = session.copy_out(logits)
    copy[...] = 0
    assert session.top_logits(logits, k=1, positions=[-1])[0].values == (6.0,)


def test_a_wrong_feed_fails_the_run(graph: Path) -> None:
    """As on every engine: a missing input, or one of another dtype, is a failure of the run that names it."""
    session = ENGINE.open(graph, {})
    with pytest.raises(EngineFailedError, match="Input past is not fed"):
        session.run({"x": session.zeros((1, 1, 4), "float16")}, ["present"])
    with pytest.raises(EngineFailedError, match="Input x is fed as int64"):
        session.run({"x": session.zeros((1, 1, 4), "int64")}, ["logits"])


def test_a_closed_session_runs_no_more(graph: Path) -> None:
    """Closing twice is harmless; using it afterwards is a defect of the caller."""
    session = ENGINE.open(graph, {})
    session.close()
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.run({}, ["logits"])


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Session]:
    """The 64-layer demo on the oracle, by precision."""
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder)
    path = next(folder.glob("*.onnx"))
    return {precision: ENGINE.open(path, {"precision": precision}) for precision in ("float32", "float64")}


def decode(session: Session, chunks: list[list[int]]) -> dict[str, np.ndarray]:
    """Run chunks one behind the other from fresh states: logits [1, positions, vocab] and last states."""
    inventory = session.inventory
    names = [port.name for port in inventory.outputs]
    carried = {}
    for port in inventory.inputs:
        if port.name.startswith("past_key_values"):
            # The batch is the first axis, the length of a cache the only other symbol.
            extents = [
                extent if isinstance(extent, int) else 1 if axis == 0 else 0
                for axis, extent in enumerate(port.shape or ())
            ]
            carried[port.name] = session.zeros(extents, port.dtype or "float32")
    logits, done, results = [], 0, {}
    for chunk in chunks:
        total = done + len(chunk)
        fed = {
            "input_ids": np.array([chunk]),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(done, total)[None],
        }
        wanted = {port.name for port in inventory.inputs}
        feeds = {name: session.place(array) for name, array in fed.items() if name in wanted}
        results = session.run(feeds | carried, names)
        carried = {name: results[name.replace("past_key_values", "present")] for name in carried}
        logits.append(session.copy_out(results["logits"]))
        done = total
    states = {name: session.copy_out(handle) for name, handle in results.items() if name != "logits"}
    return states | {"logits": np.concatenate(logits, axis=1)}


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 2e-5), ("float64", 1e-12)])
def test_a_prompt_in_chunks_gives_what_the_whole_prompt_gives(
    precision: str, tolerance: float, demo: dict[str, Session]
) -> None:
    """64 layers of recurrence and attention: logits, states and caches, relative to their largest value."""
    prompt = [7, 3, 250, 99, 3, 41]
    whole = decode(demo[precision], [prompt])
    for cut in ([prompt[:1], prompt[1:]], [prompt[:4], prompt[4:5], prompt[5:]]):
        chunked = decode(demo[precision], cut)
        for name, array in whole.items():
            assert np.abs(chunked[name] - array).max() <= tolerance * np.abs(array).max(), name


def test_float32_is_float64_within_its_own_precision(demo: dict[str, Session]) -> None:
    """Over 64 layers the two precisions stay within 1e-5 of the scale of the logits."""
    single, double = (decode(demo[precision], [[7, 3, 250, 99]])["logits"] for precision in demo)
    assert single.dtype == np.float32
    assert double.dtype == np.float64
    assert 0 < np.abs(single - double).max() <= 1e-5 * np.abs(double).max()
