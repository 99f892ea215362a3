"""The built-in `demo-ops` says in fused operators what the demo says in plain ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from fixtures.sessions import open_session
from harness.decode.loop import greedy_decode
from harness.engines.base import Session
from harness.models import builtin_package
from harness.models.demo import DEMO_PROMPTS, DEMO_SHA256, write_demo
from harness.models.demo_ops import DEMO_OPS_SHA256, write_demo_ops
from harness.package import model_sha256, open_package
from harness.ports import read_ports
from harness.topology.resolve import resolve_package
from harness.topology.spec import Outcome, Topology

ENGINES = ("ort-cpu", "nxrt", "oracle")
NEW_TOKENS = 32

Outputs = Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both variants, written once."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("demo", "demo-ops")}
    return {"demo": write_demo(folders["demo"]), "demo-ops": write_demo_ops(folders["demo-ops"])}


@pytest.fixture(scope="module")
def topology(models: Mapping[str, Path]) -> Topology:
    """As derived from the ports."""
    model = models["demo-ops"]
    derivation = resolve_package(open_package(model.parent), read_ports(model))
    assert derivation.outcome is Outcome.DERIVED
    assert derivation.topology is not None
    return derivation.topology


@pytest.fixture(scope="module")
def session(models: Mapping[str, Path]) -> Callable[[str, str], Session]:
    """A variant on an engine, loaded once; skips, by name, an extra that is missing."""
    return cache(lambda variant, engine: open_session(engine, models[variant]))


@pytest.fixture(scope="module")
def decoded(
    session: Callable[[str, str], Session], topology: Topology
) -> Callable[[str, str], list[tuple[int, ...]]]:
    """Token IDs of every built-in prompt, by variant and engine."""

    def decode(variant: str, engine: str) -> list[tuple[int, ...]]:
        opened = session(variant, engine)
        traces = [greedy_decode(opened, topology, p, max_new_tokens=NEW_TOKENS) for p in DEMO_PROMPTS]
        return [tuple(trace.token_ids) for trace in traces]

    return cache(decode)


def passed(
    session: Session, topology: Topology, tokens: Sequence[int], chunks: Sequence[int] | None = None
) -> dict[str, np.ndarray]:
    """Logits [positions, vocab] and the last caches of `tokens`, fed from zero states in chunks."""
    pairs = {**dict(zip(topology.kv_inputs, topology.kv_outputs, strict=True))}
    pairs.update({pair.input: pair.output for pair in topology.state_pairs})
    shapes = {port.name: port.shape or () for port in session.inventory.inputs}
    caches: dict[str, Any] = {
        name: session.zeros([1, *(x if isinstance(x, int) else 0 for x in shapes[name][1:])], "float32")
        for name in pairs
    }
    logits = []
    for start, end in pairwise(np.cumsum([0, *(chunks or [len(tokens)])]).tolist()):
        feeds = {
            "input_ids": np.array([tokens[start:end]], np.int64),
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(start, end, dtype=np.int64)[None],
        }
        placed = {name: session.place(array) for name, array in feeds.items()}
        results = session.run({**placed, **caches}, ["logits", *pairs.values()])
        logits.append(np.asarray(session.copy_out(results["logits"]))[0])
        caches = {past: results[present] for past, present in pairs.items()}
    last = {name: np.asarray(session.copy_out(handle)) for name, handle in caches.items()}
    return {"logits": np.concatenate(logits), **last}


def test_ports_and_topology_are_the_demo_s(models: Mapping[str, Path], topology: Topology) -> None:
    """Same ports in the same order, and nothing declared: 32 KV and 96 states are derived."""
    assert read_ports(models["demo-ops"]) == read_ports(models["demo"])
    assert sorted(file.name for file in models["demo-ops"].parent.iterdir()) == [
        "model.onnx",
        "model.onnx.data",
    ]
    assert (len(topology.kv_inputs), len(topology.state_pairs)) == (32, 96)


def test_bytes_are_pinned(models: Mapping[str, Path]) -> None:
    """Every machine writes the same bytes; the hash is part of the package's place in the cache."""
    assert model_sha256(models["demo-ops"]) == DEMO_OPS_SHA256 != DEMO_SHA256
    package = builtin_package("demo-ops")
    assert package is not None
    assert package.content_version == DEMO_OPS_SHA256[:12]
    assert (package.prompts, package.max_new_tokens) == (DEMO_PROMPTS, NEW_TOKENS)


def test_recurrence_is_fused_and_weights_are_the_demo_s(models: Mapping[str, Path]) -> None:
    """48 of each fused operator instead of Scan and Conv, over the very initialisers of the demo."""
    protos = {name: onnx.load(path) for name, path in models.items()}
    counts = Counter((node.domain, node.op_type) for node in protos["demo-ops"].graph.node)
    assert counts["com.microsoft", "LinearAttention"] == counts["com.microsoft", "CausalConvWithState"] == 48
    assert not counts.keys() & {("", "Scan"), ("", "Conv")}
    opsets = {opset.domain: opset.version for opset in protos["demo-ops"].opset_import}
    assert opsets == {"": 24, "com.microsoft": 1}
    weights = {
        name: {t.name: t.raw_data for t in proto.graph.initializer if len(t.raw_data) >= 64}
        for name, proto in protos.items()
    }
    assert weights["demo"] == weights["demo-ops"]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_decodes_what_the_demo_decodes(
    decoded: Callable[[str, str], list[tuple[int, ...]]], engine: str
) -> None:
    """Fused or plain, engine or oracle: the same 32 IDs on each prompt."""
    assert decoded("demo-ops", engine) == decoded("demo", "oracle")


def test_no_choice_is_close(
    session: Callable[[str, str], Session],
    topology: Topology,
    decoded: Callable[[str, str], list[tuple[int, ...]]],
) -> None:
    """The smallest top-2 margin is at least 10 times the difference of any logit between engines."""
    margin, noise = np.inf, 0.0
    for prompt, ids in zip(DEMO_PROMPTS, decoded("demo-ops", "oracle"), strict=True):
        tokens = [*prompt, *ids[:-1]]
        rows = [
            passed(session("demo-ops", engine), topology, tokens)["logits"][len(prompt) - 1 :]
            for engine in ("oracle", "ort-cpu")
        ]
        noise = max(noise, float(np.abs(rows[0] - rows[1]).max()))
        ordered = np.sort(rows[0], axis=-1)
        margin = min(margin, float((ordered[:, -1] - ordered[:, -2]).min()))
    assert noise > 0
    assert margin >= 10 * noise


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("chunks", [None, (4, 1, 1), (1, 1, 1, 1, 1, 1)])
def test_states_are_those_of_the_plain_operators(
    session: Callable[[str, str], Session], topology: Topology, engine: str, chunks: tuple[int, ...] | None
) -> None:
    """Logits and each of the 128 caches agree with the demo's on the oracle, whole or in chunks.

    Within 2e-5 of the scale of what is compared: rounding, ten times below what any lost state moves.
    """
    tokens = DEMO_PROMPTS[2][:6]
    plain = passed(session("demo", "oracle"), topology, tokens)
    fused = passed(session("demo-ops", engine), topology, tokens, chunks)
    assert len(plain) == 129
    for name, expected in plain.items():
        assert np.abs(fused[name] - expected).max() <= 2e-5 * np.abs(expected).max(), name
