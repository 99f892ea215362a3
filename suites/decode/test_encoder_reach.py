"""What encoders can read: what is refused is what engines cannot run, or would read as something else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, settings
from hypothesis import given as drawn
from hypothesis import strategies as st
from onnx import TensorProto, helper

from fixtures.decoders import save_graph
from fixtures.effort import examples
from fixtures.seq2seq import TinySeq2Seq
from fixtures.sessions import open_session
from harness.decode.assembling import GivenInput, GivenKind
from harness.decode.encoder_reach import check_encoder, fitted
from harness.decode.tables import Tables
from harness.errors import EngineFailedError, InputError
from harness.ports import Port, read_ports

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
WRITTEN = TinySeq2Seq(text=True, places=6, seed=13)
VOCABULARY = WRITTEN.vocab
WHISPER = {"model_type": "whisper", "num_mel_bins": 4, "max_source_positions": 15}


def given_of(graph: Path) -> list[GivenInput]:
    """The inputs of an encoder."""

    def kind(name: str) -> GivenKind:
        return "tokens" if name == "input_ids" else "mask" if "mask" in name else "features"

    return [GivenInput(port, port.name, kind(port.name), "") for port in read_ports(graph).inputs]


def refusal(graph: Path, fed: Mapping[str, NDArray[Any]], config: Mapping[str, Any] | None = None) -> str:
    """What is wrong with what an encoder is fed; empty where nothing is."""
    try:
        check_encoder(Tables(graph), given_of(graph), fed, config or {})
    except InputError as error:
        return str(error)
    return ""


def runs(kind: str, graph: Path, fed: Mapping[str, NDArray[Any]]) -> bool:
    """Whether an engine does."""
    session = open_session(kind, graph)
    try:
        handles = session.run(
            {name: session.place(array) for name, array in fed.items()},
            [port.name for port in session.inventory.outputs],
        )
        for handle in handles.values():
            session.copy_out(handle)
    except EngineFailedError:
        return False
    finally:
        session.close()
    return True


def text(*ids: int) -> dict[str, NDArray[Any]]:
    """Token IDs and a mask of ones."""
    return {"input_ids": np.array([ids], np.int64), "attention_mask": np.ones((1, len(ids)), np.int64)}


@pytest.mark.parametrize("kind", ["ort-cpu", "oracle"])
@settings(max_examples=examples(40), deadline=None)
@drawn(ids=st.lists(st.integers(-VOCABULARY - 2, VOCABULARY + 2), min_size=1, max_size=8))
@example(ids=[0, VOCABULARY - 1] * 3)
@example(ids=[0] * 7)
@example(ids=[-1])
@example(ids=[VOCABULARY])
def test_a_source_text_is_refused_just_where_it_cannot_be_read(kind: str, ids: list[int]) -> None:
    """A token without a row, one that would be another, counted from the end, and one place too many."""
    with TemporaryDirectory() as folder:
        graph = WRITTEN.save(Path(folder), "merged") / "encoder_model.onnx"
        said, works = refusal(graph, text(*ids)), runs(kind, graph, text(*ids))

    outside = [index for index, token in enumerate(ids) if not 0 <= token < VOCABULARY]
    if outside:
        assert f"input_ids[0, {outside[0]}] = {ids[outside[0]]}, which is outside the vocabulary" in said
        assert f"source [{VOCABULARY}, 8] has {VOCABULARY} rows" in said
        assert works == (min(ids) >= -VOCABULARY and max(ids) < VOCABULARY and len(ids) <= 6)
    elif len(ids) > 6:
        assert f"input_ids [1, {len(ids)}]" in said
        assert f"becomes {len(ids)} places, and places [6, 8] has 6" in said
        assert not works
    else:
        assert said == ""
        assert works


def spectral(path: Path, *, domain: str = "", places: int = 15) -> Path:
    """An encoder that halves the frames of a spectrum, as Whisper's does; the activation is of `domain`."""
    nodes = [
        helper.make_node("Conv", ["input_features", "kernel"], ["halved"], pads=[1, 1], strides=[2]),
        helper.make_node("Gelu", ["halved"], ["active"], domain=domain),
        helper.make_node("Transpose", ["active"], ["rows"], perm=[0, 2, 1]),
        helper.make_node("Add", ["rows", "table"], ["last_hidden_state"]),
    ]
    random = np.random.RandomState(0)
    weights: dict[str, NDArray[np.generic]] = {
        "kernel": random.standard_normal((8, 4, 3)).astype(np.float32),
        "table": random.standard_normal((places, 8)).astype(np.float32),
    }
    takes = helper.make_tensor_value_info("input_features", FLOAT, ["batch", 4, "frames"])
    gives = helper.make_tensor_value_info("last_hidden_state", FLOAT, ["batch", "places", 8])
    return save_graph(path, nodes, [takes], [gives], weights)


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
@pytest.mark.parametrize("kind", ["ort-cpu", "oracle"])
@pytest.mark.parametrize("frames", [1, 2, 3, 28, 29, 30, 31, 60])
def test_a_spectrum_is_refused_just_where_it_becomes_other_places(
    frames: int, kind: str, domain: str, tmp_path: Path
) -> None:
    """A single place goes with all rows of the table: the graph runs, though not for Whisper."""
    graph = spectral(tmp_path / "e.onnx", domain=domain)
    fed = {"input_features": np.ones((1, 4, frames), np.float32)}

    said, works = refusal(graph, fed), runs(kind, graph, fed)

    assert works == (said == "")
    assert ("takes 30" in refusal(graph, fed, WHISPER)) == (frames in (1, 2))
    if said:
        assert f"input_features [1, 4, {frames}], which becomes {(frames + 1) // 2} places" in said
        assert "table [15, 8] has 15. It takes input_features [1, 4, 30]." in said


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
@pytest.mark.parametrize(("places", "frames"), [(15, 30), (8, None), (1500, 3000)])
def test_what_is_made_up_gets_the_length_that_fits(
    places: int, frames: int | None, domain: str, tmp_path: Path
) -> None:
    """Where 16 frames do not: the longest that become as many places as the table has rows."""
    graph = spectral(tmp_path / "e.onnx", domain=domain, places=places)
    given = given_of(graph)
    other = GivenInput(Port("style", "float32", (1, 4)), "style", "features", "")

    changed = fitted(Tables(graph), [other, *given], {"input_features": np.ones((1, 4, 16), np.float32)})

    assert changed[0] == other
    assert changed[1].port.shape == ("batch", 4, "frames" if frames is None else frames)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"vocab_size": 9}, "vocab_size of config.json is 9"),
        ({"vocab_size": 99, "src_vocab_size": 9}, "src_vocab_size of config.json is 9"),
        ({"vocab_size": 99, "encoder": {"vocab_size": 9}}, "encoder.vocab_size of config.json is 9"),
        ({"vocab_size": 99}, ""),
        ({"vocab_size": True}, ""),
        ({"vocab_size": "9"}, ""),
        ({}, ""),
    ],
)
def test_a_vocabulary_that_the_graph_does_not_show_is_declared(
    config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Negative IDs are none, whatever else is known; and where the graph shows it, the graph counts."""
    takes = helper.make_tensor_value_info("input_ids", INT64, ["batch", "n"])
    gives = helper.make_tensor_value_info("last_hidden_state", FLOAT, ["batch", "n", 10])
    nodes = [helper.make_node("OneHot", ["input_ids", "ten", "values"], ["last_hidden_state"])]
    weights: dict[str, NDArray[np.generic]] = {
        "ten": np.array(10, np.int64),
        "values": np.array([0, 1], np.float32),
    }
    hidden = save_graph(tmp_path / "e.onnx", nodes, [takes], [gives], weights)
    shown = WRITTEN.save(tmp_path / "p", "merged") / "encoder_model.onnx"

    fed = {"input_ids": np.array([[3, 9]])}

    assert says in refusal(hidden, fed, config)
    assert (refusal(hidden, fed, config) == "") == (says == "")
    assert "input_ids[0, 0] = -1" in refusal(hidden, {"input_ids": np.array([[-1]])}, config)
    assert refusal(shown, text(9), config) == ""


@pytest.mark.parametrize("frames", [16, 29, 30, 31])
def test_frames_that_the_graph_does_not_show_are_declared(frames: int, tmp_path: Path) -> None:
    """Of Whisper, whose encoder takes one length; others may take what they like."""
    graph = spectral(tmp_path / "e.onnx", domain="com.unknown")
    fed = {"input_features": np.ones((1, 4, frames), np.float32)}

    assert ("takes 30" in refusal(graph, fed, WHISPER)) == (frames not in (29, 30))
    assert refusal(graph, fed, {**WHISPER, "model_type": "other"}) == ""
    assert refusal(graph, {"input_features": np.ones((1, 5, frames), np.float32)}, WHISPER) == ""


def test_an_input_that_is_no_token_may_count_from_the_end(tmp_path: Path) -> None:
    """Rows of a table are looked up by other integers too: what it has not is named, what it has is read."""
    takes = helper.make_tensor_value_info("token_type_ids", INT64, ["batch", "n"])
    gives = helper.make_tensor_value_info("last_hidden_state", FLOAT, ["batch", "n", 4])
    nodes = [helper.make_node("Gather", ["kinds", "token_type_ids"], ["last_hidden_state"])]
    graph = save_graph(tmp_path / "e.onnx", nodes, [takes], [gives], {"kinds": np.ones((2, 4), np.float32)})

    for ids, bad in (([0, 1, -2], None), ([0, 1, 2], 2), ([0, -3, 2], 1)):
        fed = {"token_type_ids": np.array([ids])}
        said = refusal(graph, fed)
        assert runs("ort-cpu", graph, fed) == (bad is None) == (said == "")
        if bad is not None:
            assert f"token_type_ids[0, {bad}] = {ids[bad]}, which is no row of kinds [2, 4]" in said
