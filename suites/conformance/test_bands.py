"""Bands are measured on the oracle, tensor by tensor, in the types of the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from fixtures.cache_forms import OneToken
from fixtures.decoders import TinyDecoder
from harness.engines.base import OptionValue, Session
from harness.engines.oracle import OracleEngine
from harness.engines.registry import EngineSpec, parse_engine
from harness.errors import EngineFailedError
from harness.package import open_package
from harness.parity.relations.band import BAND_FACTOR, Bands, Oracle
from harness.parity.relations.comparing import Comparison
from harness.parity.relations.laboratory import Laboratory, Subject
from harness.ports import read_ports
from harness.topology.resolve import resolve_package


class FailingOracle(OracleEngine):
    """An oracle that lacks what the graph needs."""

    def open(self, model: Path, options: Mapping[str, OptionValue]) -> Session:  # type: ignore[override]
        """Fail."""
        raise EngineFailedError("there is no kernel for Scan", kind="unsupported", next_action="-")


def subject(folder: Path, decoder: TinyDecoder) -> Subject:
    """A decoder in a folder."""
    model = decoder.save(folder / "model.onnx")
    return Subject(model=model, topology=decoder.topology, prompt=(1, 5, 3, 9), steps=3)


def spreads(of: Subject) -> Mapping[str, float]:
    """What the oracle measures."""
    lab = Laboratory(parse_engine("ort-cpu:threads=1"), of)
    bands = Oracle(parse_engine("oracle"), of, lambda: lab.tokens).bands()
    assert bands is not None
    return bands.spreads


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [(TensorProto.FLOAT, 1e-9, 1e-4), (TensorProto.FLOAT16, 1e-5, 1.0)]
)
def test_a_narrower_type_has_a_wider_band(dtype: int, least: float, most: float, tmp_path: Path) -> None:
    """Half precision rounds 8192 times as much as single; every tensor has a spread of its own."""
    found = spreads(subject(tmp_path, TinyDecoder("aa", float_dtype=dtype)))
    assert least < found["logits"] < most
    assert set(found) == {"logits"} | {f"present.{i}.{kind}" for i in (0, 1) for kind in ("key", "value")}
    assert len(set(found.values())) > 1


def test_half_precision_spreads_more_than_single(tmp_path: Path) -> None:
    """The same weights, up to their rounding."""
    single, half = (tmp_path / name for name in ("single", "half"))
    single.mkdir()
    half.mkdir()
    wide = spreads(subject(half, TinyDecoder("aa", float_dtype=TensorProto.FLOAT16)))
    narrow = spreads(subject(single, TinyDecoder("aa")))
    assert wide["logits"] > 100 * narrow["logits"]


def test_a_graph_that_takes_one_token_a_call_is_measured_in_steps(tmp_path: Path) -> None:
    """There is no call of many tokens to measure in."""
    decoder = TinyDecoder("aa", mask=False)
    model = decoder.save(tmp_path / "model.onnx", OneToken())
    topology = resolve_package(open_package(tmp_path), read_ports(model)).topology
    assert topology is not None
    assert spreads(Subject(model=model, topology=topology, prompt=(1, 5, 3), steps=3))["logits"] > 0


def test_an_oracle_that_cannot_run_the_graph_says_so_once(tmp_path: Path) -> None:
    """There are no bands then, nobody to ask about the graph, and a reason."""
    of = subject(tmp_path, TinyDecoder("ar"))
    oracle = Oracle(EngineSpec(FailingOracle(), {}), of, lambda: (1, 2, 3))
    assert not oracle.was_asked
    assert oracle.bands() is None
    assert oracle.laboratory() is None
    assert oracle.was_asked
    assert "there is no kernel for Scan" in (oracle.reason or "")


def test_an_oracle_that_cannot_prove_its_precision_has_no_bands(tmp_path: Path) -> None:
    """A weight that is not finite has no sum that could be known, so that nothing measured on it counts."""
    of = subject(tmp_path, TinyDecoder("aa"))
    model = onnx.load(of.model)
    (head,) = (weight for weight in model.graph.initializer if weight.name == "head")
    nan = numpy_helper.to_array(head).copy()
    nan[:, 3] = np.nan
    head.CopyFrom(numpy_helper.from_array(nan, "head"))
    onnx.save(model, of.model)
    oracle = Oracle(parse_engine("oracle"), of, lambda: (1, 2, 3))
    assert oracle.bands() is None
    assert "No result of this model proves anything" in (oracle.reason or "")


def test_the_tensor_that_decides_is_the_furthest_out_of_its_own_band() -> None:
    """Not the one with the largest difference."""
    bands = Bands({"logits": 1.0, "state": 1e-6})
    found = Comparison(first=None, largest={"logits": 2.0, "state": 2e-5})
    assert bands.furthest(found) == "state"
    assert not bands.holds(found)
    assert bands.holds(Comparison(first=None, largest={"logits": BAND_FACTOR, "state": BAND_FACTOR * 1e-6}))
    assert bands.furthest(Comparison(first=None)) is None
