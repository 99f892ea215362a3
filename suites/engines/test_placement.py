"""Strict placement: an engine must have placed its nodes, and none of them on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from harness.engines.base import SessionInfo
from harness.engines.ort_placement import require_on_device
from harness.engines.placement import require_off_cpu
from harness.errors import InvalidRunError

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def info(placement: Mapping[str, Any] | None) -> SessionInfo:
    """What an engine says that has placed its nodes so."""
    return SessionInfo(engine="ort-cuda", version="1", placement=placement)


def test_nodes_on_a_device_alone_pass() -> None:
    """Also where the runtime lists the CPU and put nothing there."""
    require_off_cpu(info({"providers": {CUDA: {"MatMul": 12}}}))
    require_off_cpu(info({"providers": {CUDA: {"MatMul": 12}, CPU: {}}}))


def test_shape_arithmetic_on_the_cpu_is_an_invalid_run() -> None:
    """The allow-list of the engine, under which the same placement passes, counts for nothing here."""
    placement = {"providers": {CUDA: {"MatMul": 12}, CPU: {"Shape": 4, "Gather": 1}}}
    require_on_device(CUDA, placement)

    with pytest.raises(InvalidRunError, match=f"ort-cuda ran nodes on {CPU}: 4 Shape, 1 Gather") as caught:
        require_off_cpu(info(placement))
    assert caught.value.exit_code == 6


@pytest.mark.parametrize("placement", [None, {}, {"providers": {}}, {"providers": {CPU: {}}}])
def test_an_engine_that_shows_no_placement_is_an_invalid_run(placement: Mapping[str, Any] | None) -> None:
    """What was not shown is not assumed."""
    with pytest.raises(InvalidRunError, match="ort-cuda does not say where its nodes run"):
        require_off_cpu(info(placement))
