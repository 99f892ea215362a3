"""What reading ports costs beside `onnx.load`, and how the cost of a derivation grows with the layers.

Both readers go side by side in one run. Run it with `tox -e bench`, or with `pytest suites/bench -m bench`;
the figures stand under `extra_info` in the benchmark's JSON.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import pytest
from onnx import TensorProto, helper

from fixtures.layouts import dense_06b, hybrid_27b
from harness.ports import read_ports
from harness.topology.dataflow import read_cache_flow
from harness.topology.resolve import resolve

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

WEIGHT_BYTES = 125_000_000
WEIGHTS = 12
NODES = 20_000
LAYERS = (10, 100, 1_000, 10_000)
MEBIBYTE = 1 << 20


def varint(value: int) -> bytes:
    """A base-128 integer."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def write_big_model(path: Path) -> Path:
    """A single-file model of 1.5 GB. The weights are holes in the file, so that writing it costs nothing."""
    ports = helper.make_graph(
        [],
        "big",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", 3])],
    ).SerializeToString()
    weights = []
    for index in range(WEIGHTS):
        head = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=[WEIGHT_BYTES // 4])
        tensor = head.SerializeToString() + b"\x4a" + varint(WEIGHT_BYTES)
        weights.append(b"\x2a" + varint(len(tensor) + WEIGHT_BYTES) + tensor)
    size = len(ports) + sum(map(len, weights)) + WEIGHTS * WEIGHT_BYTES
    with path.open("wb") as file:
        file.write(helper.make_model(onnx.GraphProto()).SerializeToString())
        file.write(b"\x3a" + varint(size) + ports)
        for weight in weights:
            file.write(weight)
            file.seek(WEIGHT_BYTES - 1, 1)
            file.write(b"\0")
    return path


def write_many_nodes(path: Path) -> Path:
    """A chain of additions."""
    nodes = [
        helper.make_node("Add", [f"v{i}", f"w{i % 50}"], [f"v{i + 1}"], name=f"/model/layers.{i}/add")
        for i in range(NODES)
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b"]) for name in ("v0", f"v{NODES}")]
    graph = helper.make_graph(nodes, "chain", ports[:1], ports[1:])
    onnx.save_model(helper.make_model(graph), str(path))
    return path


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("anonymous memory is read from /proc/self/status, which this system lacks")
    lines = dict(line.split(":", 1) for line in status.read_text(encoding="ascii").splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


def seconds(call: Callable[[], object], *, times: int) -> float:
    """The fastest of some calls."""
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


@pytest.mark.bench
def test_ports_of_a_big_model_cost_nothing(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """At least 500 times faster than `onnx.load` on 1.5 GB in one file, in less than 30 MB of memory."""
    path = write_big_model(tmp_path / "big.onnx")
    before = anonymous_bytes()
    inventory = benchmark.pedantic(lambda: read_ports(path), rounds=5, warmup_rounds=1)
    grown = anonymous_bytes() - before
    ours = seconds(lambda: read_ports(path), times=5)
    theirs = seconds(lambda: onnx.load(str(path)), times=1)
    gc.collect()
    benchmark.extra_info |= {
        "ours_s": ours,
        "onnx_s": theirs,
        "ratio": theirs / ours,
        "anonymous_bytes": grown,
    }
    assert [port.name for port in (*inventory.inputs, *inventory.outputs)] == ["x", "y"]
    assert theirs / ours >= 500, benchmark.extra_info
    assert grown < 30 * MEBIBYTE, benchmark.extra_info


@pytest.mark.bench
def test_ports_among_many_nodes_cost_less_than_loading(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """20,000 nodes are stepped over at least as fast as `onnx.load` reads them; dataflow parses them all."""
    path = write_many_nodes(tmp_path / "nodes.onnx")
    benchmark.pedantic(lambda: read_ports(path), rounds=5, warmup_rounds=1)
    ours = seconds(lambda: read_ports(path), times=5)
    theirs = seconds(lambda: onnx.load(str(path)), times=3)
    flow = seconds(lambda: read_cache_flow(path), times=3)
    benchmark.extra_info |= {"ours_s": ours, "onnx_s": theirs, "dataflow_s": flow, "ratio": theirs / ours}
    assert theirs >= ours, benchmark.extra_info


@pytest.mark.bench
@pytest.mark.parametrize("make", [dense_06b, hybrid_27b], ids=lambda make: make.__name__)
def test_derivation_is_linear_in_the_layers(benchmark: BenchmarkFixture, make: Callable[..., object]) -> None:
    """From 10 to 10,000 layers; ten thousand cost at most fifteen times as much as a thousand."""
    inventories = {layers: make(layers=layers) for layers in LAYERS}
    benchmark.pedantic(lambda: resolve(inventories[100]), rounds=5, warmup_rounds=1)
    milliseconds = {
        layers: 1e3 * seconds(lambda inventory=inventory: resolve(inventory), times=3)
        for layers, inventory in inventories.items()
    }
    benchmark.extra_info |= {f"{layers}_layers_ms": value for layers, value in milliseconds.items()}
    assert milliseconds[10_000] <= 15 * milliseconds[1_000], benchmark.extra_info
