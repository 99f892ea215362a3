"""The built-in `demo` is a 27B-shaped hybrid, and a witness whose testimony can be trusted.

The bars (identical IDs, 16 distinct of 32, a margin of 10 times and an effect of 100 times the noise)
are those of a good witness: below them a lost state could hide, or two correct engines could part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest

from fixtures.layouts import hybrid_27b
from fixtures.sessions import open_session
from harness.engines.base import Session, TensorHandle
from harness.engines.registry import parse_engine
from harness.models.demo import DEMO_PROMPTS, DEMO_SHA256, VOCAB, demo_package, write_demo
from harness.package import model_sha256, open_package
from harness.ports import read_ports
from harness.topology.resolve import resolve_package
from harness.topology.spec import Outcome

if TYPE_CHECKING:
    from numpy.typing import NDArray

ENGINES = ("ort-cpu", "nxrt", "oracle")
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's graph file, written once."""
    return write_demo(tmp_path_factory.mktemp("demo"))


class Decoder:
    """A session fed by hand, past port by past port, so that no code of the decode loop is involved."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pasts = {p.name: p for p in session.inventory.inputs if p.name.startswith("past_key_values.")}

    @property
    def pasts(self) -> tuple[str, ...]:
        """Names of the cache inputs, in graph order."""
        return tuple(self._pasts)

    def empty(self, batch: int) -> dict[str, NDArray[np.float32]]:
        """Zero states, and KV of length zero."""
        shapes = {name: (port.shape or ())[1:] for name, port in self._pasts.items()}
        return {
            name: np.zeros((batch, *(x if isinstance(x, int) else 0 for x in rest)), np.float32)
            for name, rest in shapes.items()
        }

    def call(
        self,
        tokens: NDArray[np.int64],
        caches: Mapping[str, NDArray[np.float32]],
        *,
        mask: NDArray[np.int64] | None = None,
        shift: int = 0,
    ) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]:
        """Logits [batch, new, vocab] and next caches for tokens [batch, new] after the cached ones."""
        batch, new = tokens.shape
        past = caches["past_key_values.3.key"].shape[2]
        positions = np.tile(np.arange(past, past + new, dtype=np.int64) + shift, (batch, 1))
        if mask is None:
            mask = np.ones((batch, past + new), np.int64)
        arrays = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, **caches}
        feeds: dict[str, TensorHandle] = {k: self._session.place(v) for k, v in arrays.items()}
        presents = {name: name.replace("past_key_values", "present") for name in self._pasts}
        outputs = self._session.run(feeds, ["logits", *presents.values()])
        fetched = {name: np.asarray(self._session.copy_out(h), np.float32) for name, h in outputs.items()}
        return fetched["logits"], {past: fetched[present] for past, present in presents.items()}

    def run(
        self, prompt: Sequence[int], chunks: Sequence[int]
    ) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]:
        """Logits [1, positions, vocab] at every position of the prompt, fed in chunks of these sizes."""
        bounds = np.cumsum([0, *chunks])
        assert bounds[-1] == len(prompt)
        caches, logits = self.empty(1), []
        for start, end in pairwise(bounds):
            chunk, caches = self.call(np.array([prompt[start:end]], np.int64), caches)
            logits.append(chunk)
        return np.concatenate(logits, axis=1), caches

    def greedy(self, prompt: Sequence[int], length: int) -> tuple[list[int], NDArray[np.float32]]:
        """New token IDs, and the logits [length, vocab] that they were chosen from."""
        tokens, caches = np.array([prompt], np.int64), self.empty(1)
        ids: list[int] = []
        rows = []
        for _ in range(length):
            logits, caches = self.call(tokens, caches)
            rows.append(logits[0, -1])
            ids.append(int(rows[-1].argmax()))
            tokens = np.array([ids[-1:]], np.int64)
        return ids, np.stack(rows)


@dataclass(frozen=True)
class Witness:
    """What the engines said on the built-in prompts.

    Attributes:
        ids: by engine, then prompt.
        logits: by engine, then prompt: [new tokens, vocab].
    """

    ids: Mapping[str, list[list[int]]]
    logits: Mapping[str, list[NDArray[np.float32]]]

    @property
    def noise(self) -> float:
        """Largest difference of any logit between any two engines."""
        rows = [np.concatenate(logits) for logits in self.logits.values()]
        return max(float(np.abs(a - b).max()) for a in rows for b in rows)


@pytest.fixture(scope="module")
def decoder(model: Path) -> Callable[[str], Decoder]:
    """The demo on the engine of that name, loaded once; skips, by name, an extra that is missing."""
    return cache(lambda engine: Decoder(open_session(engine, model)))


@pytest.fixture(scope="module")
def ort(decoder: Callable[[str], Decoder]) -> Decoder:
    """The demo on ONNX Runtime."""
    return decoder("ort-cpu")


@pytest.fixture(scope="module")
def witness(decoder: Callable[[str], Decoder]) -> Witness:
    """Greedy decoding of every built-in prompt on every engine that is here."""
    ids, logits = {}, {}
    for engine in ENGINES:
        if parse_engine(engine).engine.availability().usable:
            decoded = [decoder(engine).greedy(prompt, NEW_TOKENS) for prompt in DEMO_PROMPTS]
            ids[engine] = [tokens for tokens, _ in decoded]
            logits[engine] = [rows for _, rows in decoded]
    return Witness(ids, logits)


def test_ports_are_those_of_the_27b_layout(model: Path) -> None:
    """All ports, in order, with dtypes and symbols: the layout of the real exporter at small widths."""
    expected = hybrid_27b(
        kv_heads=2,
        head_width=16,
        conv_channels=160,
        value_heads=6,
        key_width=16,
        value_width=16,
        vocab=VOCAB,
        dtype="float32",
    )
    assert read_ports(model) == expected


def test_topology_must_be_derived(model: Path) -> None:
    """The package is a graph and its weights, with no sidecar; its ports settle 32 KV and 96 states."""
    assert sorted(file.name for file in model.parent.iterdir()) == ["model.onnx", "model.onnx.data"]
    derivation = resolve_package(open_package(model.parent), read_ports(model))
    assert derivation.outcome is Outcome.DERIVED
    assert derivation.topology is not None
    assert len(derivation.topology.kv_inputs) == 32
    assert len(derivation.topology.state_pairs) == 96


def test_bytes_are_pinned(model: Path, tmp_path: Path) -> None:
    """Every machine writes the same bytes, each time: the hash is part of the package's place in the cache.

    Whoever changes the graph or a weight pins the new hash, and must look at the whole of this file.
    """
    assert model_sha256(write_demo(tmp_path)) == model_sha256(model) == DEMO_SHA256
    assert demo_package().content_version == DEMO_SHA256[:12]


def test_graph_is_for_every_engine(model: Path) -> None:
    """Opset 24 and nothing else, and a Scan body with no constant and nothing from outside.

    onnxruntime 1.31 loads at most opset 26, and one engine refuses bodies that capture a value.
    """
    proto = onnx.load(model, load_external_data=False)
    assert [(opset.domain, opset.version) for opset in proto.opset_import] == [("", 24)]
    scans = [node for node in proto.graph.node if node.op_type == "Scan"]
    assert len(scans) == 48
    for scan in scans:
        (body,) = [attribute.g for attribute in scan.attribute if attribute.name == "body"]
        assert not body.initializer
        own = {port.name for port in body.input} | {name for node in body.node for name in node.output}
        assert {name for node in body.node for name in node.input} <= own


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "oracle"])
def test_engines_agree_on_every_token(
    decoder: Callable[[str], Decoder], witness: Witness, engine: str
) -> None:
    """Independent engines decode the very IDs of the oracle: the demo convicts nobody who is innocent."""
    decoder(engine)  # skips, by name, where the engine is missing
    assert witness.ids[engine] == witness.ids["oracle"]


def test_decoding_does_not_get_stuck(witness: Witness) -> None:
    """At least 16 distinct IDs of 32 on each prompt: a model that repeats itself sees little."""
    assert [len(ids) for ids in witness.ids["ort-cpu"]] == [NEW_TOKENS] * len(DEMO_PROMPTS)
    assert min(len(set(ids)) for ids in witness.ids["ort-cpu"]) >= 16


def test_no_choice_is_close(witness: Witness) -> None:
    """The smallest top-2 margin is at least 10 times the difference of any logit between engines."""
    ordered = np.sort(np.concatenate(witness.logits["oracle"]), axis=-1)
    margin = float((ordered[:, -1] - ordered[:, -2]).min())
    assert witness.noise > 0
    assert margin >= 10 * witness.noise


@pytest.mark.parametrize("prompt", range(len(DEMO_PROMPTS)))
def test_every_state_and_cache_matters(ort: Decoder, witness: Witness, prompt: int) -> None:
    """Zeroing any one of the 128 caches before every step moves some logit by over 100 times the noise.

    One row of a batch for each cache, and one that is left alone; all take the tokens of the clean
    decode. Four steps are enough, and a longer run can only raise the largest effect.
    """
    clean = witness.ids["ort-cpu"][prompt]
    _, caches = ort.run(DEMO_PROMPTS[prompt], [len(DEMO_PROMPTS[prompt])])
    rows = len(ort.pasts) + 1
    assert rows == 129
    caches = {name: np.repeat(value, rows, axis=0) for name, value in caches.items()}
    effect = np.zeros(rows)
    for token in clean[:4]:
        for row, name in enumerate(ort.pasts):
            caches[name][row] = 0
        logits, caches = ort.call(np.full((rows, 1), token, np.int64), caches)
        effect = np.maximum(effect, np.abs(logits[:, 0] - logits[-1, 0]).max(axis=-1))
    hidden = {name: e for name, e in zip(ort.pasts, effect, strict=False) if e <= 100 * witness.noise}
    assert hidden == {}


def test_a_state_lost_once_is_not_forgotten(ort: Decoder, witness: Witness) -> None:
    """A cache zeroed once, after the prompt, still moves some logit by over 100 times the noise 8 steps on.

    A model that forgets at once would let a state fault pass that happens between two looks at it.
    """
    prompt, clean = DEMO_PROMPTS[2], witness.ids["ort-cpu"][2]
    _, caches = ort.run(prompt, [len(prompt)])
    rows = len(ort.pasts) + 1
    caches = {name: np.repeat(value, rows, axis=0) for name, value in caches.items()}
    for row, name in enumerate(ort.pasts):
        caches[name][row] = 0
    for token in clean[:8]:
        logits, caches = ort.call(np.full((rows, 1), token, np.int64), caches)
    effect = np.abs(logits[:, 0] - logits[-1, 0]).max(axis=-1)
    forgotten = {name: e for name, e in zip(ort.pasts, effect, strict=False) if e <= 100 * witness.noise}
    assert forgotten == {}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("chunks", [(4, 1, 1), (3, 3), (1, 1, 1, 1, 1, 1)])
def test_chunks_do_not_matter(
    decoder: Callable[[str], Decoder], engine: str, chunks: tuple[int, ...]
) -> None:
    """Whole prefill, chunked prefill and single steps agree within 1e-5 of the scale of what they give.

    This holds for the logits at each position and for every cache at the end: the convolution and the
    recurrence carry over a boundary, whatever is shorter, the chunk or the convolution's window.
    """
    prompt = DEMO_PROMPTS[2][:6]
    whole, whole_caches = decoder(engine).run(prompt, [len(prompt)])
    logits, caches = decoder(engine).run(prompt, chunks)
    assert np.abs(logits - whole).max() <= 1e-5 * np.abs(whole).max()
    for name, expected in whole_caches.items():
        assert np.abs(caches[name] - expected).max() <= 1e-5 * np.abs(expected).max(), name


def test_rows_of_a_batch_do_not_touch(ort: Decoder) -> None:
    """Each row of a batch gives what it gives alone, prefill and step."""
    prompts = np.array([prompt[:2] for prompt in DEMO_PROMPTS], np.int64)
    together, caches = ort.call(prompts, ort.empty(len(prompts)))
    step, _ = ort.call(prompts[:, ::-1][:, :1], caches)
    for row, prompt in enumerate(prompts):
        alone, own = ort.call(prompt[None], ort.empty(1))
        alone_step, _ = ort.call(prompt[None, ::-1][:, :1], own)
        scale = np.abs(alone).max()
        assert np.abs(together[row] - alone[0]).max() <= 1e-5 * scale
        assert np.abs(step[row] - alone_step[0]).max() <= 1e-5 * scale


def test_later_tokens_change_nothing_before_them(ort: Decoder) -> None:
    """The model is causal: what follows a position leaves its logits alone."""
    prompt = DEMO_PROMPTS[2][:6]
    changed = (*prompt[:4], 500, 501)
    logits, _ = ort.run(prompt, [6])
    others, _ = ort.run(changed, [6])
    scale = np.abs(logits).max()
    assert np.abs(logits[0, :4] - others[0, :4]).max() <= 1e-5 * scale
    assert np.abs(logits[0, 4:] - others[0, 4:]).max() > 1e-2 * scale


def test_mask_is_obeyed(ort: Decoder, witness: Witness) -> None:
    """Masking one cached position moves logits by over 100 times the noise; it is not decoration."""
    tokens = np.array([DEMO_PROMPTS[1]], np.int64)
    clean, _ = ort.call(tokens, ort.empty(1))
    holed, _ = ort.call(tokens, ort.empty(1), mask=np.where(np.arange(tokens.shape[1]) == 2, 0, 1)[None])
    assert np.abs(clean - holed).max() > 100 * witness.noise


def test_positions_are_relative_and_kept_in_the_keys(ort: Decoder) -> None:
    """Positions that are all shifted leave the logits as they are and change every cached key.

    That is what a rotary embedding is; a fault that shifts positions is to be found in the keys.
    """
    tokens = np.array([DEMO_PROMPTS[1]], np.int64)
    logits, caches = ort.call(tokens, ort.empty(1))
    shifted, moved = ort.call(tokens, ort.empty(1), shift=7)
    assert np.abs(logits - shifted).max() <= 1e-5 * np.abs(logits).max()
    keys = [name for name in caches if name.endswith(".key")]
    assert len(keys) == 16
    for name in keys:
        assert np.abs(caches[name] - moved[name]).max() > 1e-2 * np.abs(caches[name]).max(), name


def test_the_rule_is_the_gated_delta_rule(ort: Decoder, model: Path) -> None:
    """One step of the first layer, worked out by hand in float64, gives the states of the graph.

    decay = exp(-A softplus(a + dt_bias)); S = decay S + k (beta (v - decay k S)), k of length 1, after
    a causal convolution of four taps and silu (Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024).
    """
    proto = onnx.load(model)
    named = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in proto.graph.initializer}
    weight = {
        name.removeprefix("layers.0/gated_delta/"): value
        for name, value in named.items()
        if name.startswith("layers.0/gated_delta/")
    }
    random = np.random.RandomState(0)
    caches = {name: random.standard_normal(v.shape).astype(np.float32) for name, v in ort.empty(1).items()}
    _, after = ort.call(np.array([[7]], np.int64), caches)
    x = named["embed_tokens.weight"][7]
    x = x / np.sqrt(np.mean(x**2) + 1e-6) * named["layers.0/input_norm.weight"]
    past = "past_key_values.0.conv_state"
    window = np.concatenate([caches[past][0], (x @ weight["qkv_proj.weight"])[:, None]], axis=1)
    np.testing.assert_allclose(after[past][0], window[:, 1:], atol=1e-5)
    mixed = (window * weight["conv.weight"][:, 0]).sum(axis=1)
    mixed = mixed / (1 + np.exp(-mixed))
    key = mixed[32:64].reshape(2, 16).repeat(3, axis=0)
    key = key / np.sqrt((key**2).sum(axis=1, keepdims=True) + 1e-6)
    value = mixed[64:].reshape(6, 16)
    dt = np.log1p(np.exp(x @ weight["a_proj.weight"] + weight["dt_bias"]))
    decay = np.exp(weight["negative_a"] * dt)
    beta = 1 / (1 + np.exp(-(x @ weight["b_proj.weight"])))
    past = "past_key_values.0.recurrent_state"
    state = caches[past][0] * decay[:, None, None]
    error = (value - np.einsum("hk,hkv->hv", key, state)) * beta[:, None]
    expected = state + key[:, :, None] * error[:, None, :]
    np.testing.assert_allclose(after[past][0], expected, atol=1e-5)
