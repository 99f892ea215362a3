"""What the oracle costs beside ONNX Runtime, onnx's reference evaluator, and itself step by step.

Whatever is compared goes in turns on the same machine in the same run, so that what else the machine does
hits both; medians are compared. Figures stand under `extra_info` of the benchmark's JSON. SmolLM2 must have
been fetched (`onnx-parity fetch smollm2`).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from harness.decode.loop import greedy_decode
from harness.engines.base import Session
from harness.engines.oracle import ENGINE
from harness.errors import InputError
from harness.models import builtin_package
from harness.models.demo import DEMO_PROMPTS, write_demo
from harness.models.graph import GraphBuilder
from harness.ports import read_ports
from harness.topology.resolve import resolve

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

PROMPT = (504, 3575, 282, 4649, 314)
NEW_TOKENS = 64
SETTLED_S = 0.1
"""Between turns: the threads of a BLAS and of ONNX Runtime spin on for some hundredths of a second when they
are done, on the processor where the next one's second thread should be.
"""

pytestmark = pytest.mark.bench

Feeds = Mapping[str, np.ndarray]


def taken(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def in_turns(
    benchmark: BenchmarkFixture, first: Callable[[], object], second: Callable[[], object], *, rounds: int
) -> float:
    """Median seconds of `first` over median seconds of `second`, called in turns after one of each."""
    first(), second()
    seconds: tuple[list[float], list[float]] = ([], [])

    def both() -> None:
        for call, kept in zip((first, second), seconds, strict=True):
            time.sleep(SETTLED_S)
            kept.append(taken(call))

    benchmark.pedantic(both, rounds=rounds)
    medians = [statistics.median(kept) for kept in seconds]
    benchmark.extra_info |= {"first_s": medians[0], "second_s": medians[1], "ratio": medians[0] / medians[1]}
    return medians[0] / medians[1]


def smollm2(name: str) -> Path:
    """The graph of a built-in package of real weights; skips, by name, where they are not there."""
    package = builtin_package(name)
    assert package is not None
    try:
        return package.materialise() / "model.onnx"
    except InputError as error:
        pytest.skip(str(error))


def whole_prompt(model: Path, tokens: np.ndarray) -> Feeds:
    """All inputs of a decoder for tokens [1, positions] with nothing before them."""
    feeds = {}
    for port in read_ports(model).inputs:
        if port.name == "input_ids":
            feeds[port.name] = tokens
        elif port.name == "attention_mask":
            feeds[port.name] = np.ones_like(tokens)
        elif port.name == "position_ids":
            feeds[port.name] = np.arange(tokens.shape[1])[None]
        else:
            extents = [x if isinstance(x, int) else 0 for x in (port.shape or ())[1:]]
            feeds[port.name] = np.zeros((1, *extents), np.float32)
    return feeds


def judged(session: Session, feeds: Feeds) -> None:
    """One pass, and the two largest logits of every position."""
    placed = {name: session.place(array) for name, array in feeds.items()}
    session.top_logits(session.run(placed, ["logits"])["logits"], k=2)


@pytest.mark.parametrize("positions", [32, 128])
def test_a_pass_in_fp32_against_onnxruntime(benchmark: BenchmarkFixture, positions: int) -> None:
    """SmolLM2: at most 2 times the prefill of ONNX Runtime's CPU provider, on its own choice of threads."""
    model = smollm2("smollm2")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    theirs = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    ours = ENGINE.open(model, {})
    feeds = whole_prompt(model, np.arange(1, positions + 1, dtype=np.int64)[None] * 37)
    ratio = in_turns(
        benchmark, lambda: judged(ours, feeds), lambda: theirs.run(["logits"], dict(feeds)), rounds=9
    )
    assert ratio <= 2, benchmark.extra_info


def test_a_pass_against_steps(benchmark: BenchmarkFixture) -> None:
    """SmolLM2 int4: judging 64 tokens in one pass is at least 5 times faster than decoding them."""
    model = smollm2("smollm2-int4")
    topology = resolve(read_ports(model)).topology
    assert topology is not None
    session = ENGINE.open(model, {})
    trace = greedy_decode(session, topology, PROMPT, max_new_tokens=NEW_TOKENS)
    feeds = whole_prompt(model, np.array([[*PROMPT, *trace.token_ids[:-1]]], np.int64))
    ratio = in_turns(
        benchmark,
        lambda: greedy_decode(session, topology, PROMPT, max_new_tokens=NEW_TOKENS),
        lambda: judged(session, feeds),
        rounds=3,
    )
    assert ratio >= 5, benchmark.extra_info


def test_scans_against_the_reference_evaluator(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """The demo, whose recurrence is a Scan: at least 2 times faster."""
    model = write_demo(tmp_path)
    reference = ReferenceEvaluator(str(model))
    ours = ENGINE.open(model, {})
    feeds = whole_prompt(model, np.array([DEMO_PROMPTS[2]], np.int64))
    ratio = in_turns(
        benchmark, lambda: reference.run(["logits"], dict(feeds)), lambda: judged(ours, feeds), rounds=5
    )
    assert ratio >= 2, benchmark.extra_info


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.5 G weights of float32 in 20 MLPs, 2 GB; standard operators only."""
    width, inner = 2048, 6144
    rng = np.random.default_rng(0)
    graph = GraphBuilder("dense")
    x = graph.input("x", "float32", (1, "positions", width))
    up, down = (rng.standard_normal(s, np.float32) / 64 for s in ((width, inner), (inner, width)))
    for layer in range(20):
        with graph.scope(f"layers.{layer}"):
            wide = graph.add("MatMul", x, graph.initializer("up", up), name="wide")
            active = graph.add("Mul", wide, graph.add("Sigmoid", wide, name="gate"), name="active")
            narrow = graph.add("MatMul", active, graph.initializer("down", down), name="narrow")
            output = "y" if layer == 19 else None
            x = graph.add("Add", x, narrow, name="sum", output=output)
    graph.output("y", "float32", (1, "positions", width))
    return graph.save(tmp_path_factory.mktemp("dense") / "model.onnx")


def test_dense_weights_against_the_reference_evaluator(benchmark: BenchmarkFixture, dense: Path) -> None:
    """0.5 G weights, 16 positions: at most 1.1 times its time."""
    x = np.ones((1, 16, 2048), np.float32)
    reference, ours = ReferenceEvaluator(str(dense)), ENGINE.open(dense, {})

    def run() -> Any:
        return ours.copy_out(ours.run({"x": ours.place(x)}, ["y"])["y"])

    ratio = in_turns(benchmark, run, lambda: reference.run(["y"], {"x": x}), rounds=7)
    assert ratio <= 1.1, benchmark.extra_info


MEMORY = """
import json, sys
from pathlib import Path
import numpy as np
kind, model = sys.argv[1:]
x = np.ones((1, 16, 2048), np.float32)
if kind == "oracle":
    from harness.oracle import OracleModel
    loaded = OracleModel.load(model, threads=0)
    run = lambda: loaded.run({"x": x}, ["y"])
else:
    from onnx.reference import ReferenceEvaluator
    loaded = ReferenceEvaluator(model)
    run = lambda: loaded.run(["y"], {"x": x})
run()
lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
print(json.dumps({words[0][:-1]: int(words[1]) >> 10 for words in lines if words[0].startswith("Rss")}))
"""
"""Loads, runs, and prints resident megabytes by kind."""


def test_memory_against_the_reference_evaluator(benchmark: BenchmarkFixture, dense: Path) -> None:
    """0.5 G weights, each in a process of its own: at most a third of its anonymous memory after a run."""

    def measured(kind: str) -> dict[str, int]:
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, kind, str(dense)], capture_output=True, text=True, check=True
        )
        sizes: dict[str, int] = json.loads(done.stdout)
        return sizes

    sizes: dict[str, dict[str, int]] = {}
    benchmark.pedantic(
        lambda: sizes.update({kind: measured(kind) for kind in ("oracle", "reference")}), rounds=1
    )
    benchmark.extra_info |= {f"{kind}_mb": size for kind, size in sizes.items()}
    assert 3 * sizes["oracle"]["RssAnon"] <= sizes["reference"]["RssAnon"], sizes
