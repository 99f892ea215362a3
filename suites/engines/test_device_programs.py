"""The programs that reduce logits on a device: right whatever order a provider gives to equal values."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.effort import examples
from harness.engines.ort_device import DevicePrograms, host_view
from harness.engines.reduce import top_logits_of

RUNS: list[tuple[str, ...]] = []


@pytest.fixture(scope="module")
def contrary() -> DevicePrograms:
    """Programs of a provider whose TopK lets the highest index come first among equal values.

    ONNX asks for the lowest, ONNX Runtime's CPU provider obeys, and no device promises it. Notes in
    `RUNS` which outputs were asked for.
    """
    programs = DevicePrograms(onnxruntime, ["CPUExecutionProvider"], engine="contrary")
    honest = programs._reduction

    class Contrary:
        def __init__(self, program: Any, k: int) -> None:
            self._program, self._k = program, k

        def run(self, value: Any, hosts: Mapping[str, Any], outputs: Sequence[str]) -> list[Any]:
            RUNS.append(tuple(outputs))
            found = self._program.run(value, hosts, outputs)
            if "ids" in outputs:
                (rows,) = self._program.run(value, hosts, ("rows",))
                flipped = host_view(rows)[:, ::-1]
                ids = flipped.shape[1] - 1 - np.argsort(-flipped, axis=1, kind="stable")[:, : self._k]
                found[list(outputs).index("ids")] = onnxruntime.OrtValue.ortvalue_from_numpy(ids.copy())
            return found

    programs._reduction = lambda *key: Contrary(honest(*key), key[-1])
    return programs


def on_device(array: np.ndarray) -> Any:
    """As an OrtValue."""
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


@settings(deadline=None, max_examples=examples(60))
@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=3),
    k=st.integers(1, 7),
)
def test_ties_go_to_the_lowest_id_on_any_provider(
    contrary: DevicePrograms, rows: list[list[int]], k: int
) -> None:
    """Also where the tie runs across the k-th place."""
    array = np.array([rows], dtype=np.float32)

    found = contrary.top_logits(on_device(array), k=k, positions=None)

    assert found == top_logits_of(array, k)


def test_without_ties_only_the_largest_values_leave_the_device(contrary: DevicePrograms) -> None:
    """Rows come to the host for a tie or a NaN, one at a time, and else not at all."""
    array = np.array([[[5, 4, 3, 2, 1, 0], [1, 2, 2, 0, 0, 0], [9, 8, 7, 6, np.nan, 0]]], np.float32)

    for position, fetched in ((0, 0), (1, 1), (2, 1)):
        RUNS.clear()
        found = contrary.top_logits(on_device(array), k=3, positions=[position])
        assert found == top_logits_of(array, 3, [position])
        assert RUNS.count(("rows",)) == fetched


def test_a_view_keeps_its_tensor_alive_and_no_longer() -> None:
    """Memory of a tensor is freed when the last view of it is gone, never before."""
    value = on_device(np.arange(6, dtype=np.float32))
    alive = weakref.ref(value)
    view = host_view(value)[2:]

    del value
    gc.collect()
    assert alive() is not None
    assert view.tolist() == [2, 3, 4, 5]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1

    del view
    gc.collect()
    assert alive() is None
