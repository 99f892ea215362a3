"""How far a decode may go: what is refused is what engines cannot run, and nothing else is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from fixtures.decoders import TinyDecoder
from fixtures.effort import examples
from fixtures.position_forms import ENDLESS, ROWS, SEEN, LookUp, Positions, unseen
from fixtures.sessions import open_session
from fixtures.splitting import cut, save_embedded
from harness.decode.assembling import assemble
from harness.decode.feeds import plan_feeds
from harness.decode.loop import forced_decode
from harness.decode.parts import decoder_inventory
from harness.decode.reach import Reach, declared_lengths
from harness.decode.trace import Trace
from harness.errors import InputError
from harness.package import Package, open_package
from harness.topology.resolve import resolve_package
from harness.topology.spec import Topology

DECODER = TinyDecoder(layers="a")
PROMPT = (3, 1, 4)


def save(folder: Path, look_up: LookUp, config: Mapping[str, Any] | None = None) -> Path:
    """A package whose decoder looks its positions up in this way."""
    DECODER.save(folder / "model.onnx", Positions(look_up))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def topology_of(package: Package) -> Topology:
    """As it is derived."""
    topology = resolve_package(package, decoder_inventory(package)).topology
    assert topology is not None
    return topology


def checked(folder: Path, prompt: tuple[int, ...], new: int) -> str | None:
    """What a decode of this length is warned of."""
    package = open_package(folder)
    assembly = assemble(package, topology_of(package))
    plan = plan_feeds(assembly.topology, assembly.wiring.inventory)
    reach = Reach(assembly, package.config("config.json"), declared_lengths(package))
    return reach.check(plan, str(assembly.topology.token_input), prompt, new)


def decoded(folder: Path, kind: str, prompt: tuple[int, ...], new: int) -> Trace:
    """What an engine makes of it; which tokens it follows is all the same."""
    package = open_package(folder)
    return forced_decode(open_session(kind, package.model), topology_of(package), prompt, [2] * new)


@pytest.mark.parametrize("kind", ["ort-cpu", "oracle"])
@pytest.mark.parametrize("form", SEEN)
def test_refused_is_just_what_engines_cannot_run(form: str, kind: str, tmp_path: Path) -> None:
    """As many tokens as there are positions run; one more fails, in steps or at once, and is bad input."""
    look_up, most = SEEN[form]
    folder = save(tmp_path, look_up)
    long = tuple([2] * most)

    for prompt, new in ((PROMPT, most - len(PROMPT) + 1), (long, 1)):
        assert checked(folder, prompt, new) is None
        assert decoded(folder, kind, prompt, new).failure is None
    for prompt, new in ((PROMPT, most - len(PROMPT) + 2), ((*long, 2), 1)):
        with pytest.raises(InputError) as caught:
            checked(folder, prompt, new)
        assert caught.value.message.startswith(f"model.onnx has rows for {most} positions (")
        assert decoded(folder, kind, prompt, new).failure is not None


@pytest.mark.parametrize("kind", ["ort-cpu", "oracle"])
@pytest.mark.parametrize("form", ENDLESS)
def test_what_never_comes_to_the_end_of_a_table_goes_on(form: str, kind: str, tmp_path: Path) -> None:
    """Whatever tables the graph holds: three times their rows run.

    What nobody needs is run by ONNX Runtime as well, and fails there: that is for a verdict to say.
    """
    if (form, kind) == ("beside what nobody needs", "ort-cpu"):
        kind = "oracle"
    folder = save(tmp_path, ENDLESS[form])

    for new in (10, 3 * ROWS):
        assert checked(folder, PROMPT, new) is None
        assert decoded(folder, kind, PROMPT, new).failure is None


@settings(deadline=None)
@drawn(st.integers(2, 40), st.integers(0, 3), st.integers(1, 50), st.integers(1, 50))
def test_the_numbers_say_what_would_fit(rows: int, before: int, prompt: int, new: int) -> None:
    """Tables of any length, read from any row: refused is one token more than fits, and the way out fits."""
    before = min(before, rows - 1)

    def look_up(graph: Any) -> str:
        graph.weights["table"] = graph.weights["position_table"][:rows]
        graph.weights["before"] = np.array(before, np.int64)
        given = graph.input("position_ids", graph.decoder.id_dtype, ["batch", "new"])
        return str(graph.add("Gather", "table", graph.add("Add", given, "before")))

    most = rows - before
    ids = (1,) * prompt
    with TemporaryDirectory() as folder:
        save(Path(folder), look_up)
        if prompt + new - 1 <= most:
            assert checked(Path(folder), ids, new) is None
            return
        with pytest.raises(InputError) as caught:
            checked(Path(folder), ids, new)
        assert caught.value.message == (
            f"model.onnx has rows for {most} positions (table [{rows}, 4]), and a prompt of {prompt} with "
            f"{new} new tokens takes {prompt + new - 1}: all but the last are fed."
        )
        left = most - prompt + 1
        if left > 0:
            assert f"at most {left} new tokens" in caught.value.next_action
            checked(Path(folder), ids, left)
        else:
            assert "Give a shorter prompt" in caught.value.next_action


@settings(max_examples=examples(20), deadline=None)
@drawn(st.integers(1, 11), st.lists(st.integers(0, 10), min_size=1, max_size=5))
def test_a_token_needs_a_row_of_the_embedding(rows: int, prompt: list[int]) -> None:
    """Also where logits are wider, as exporters pad them."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        model = onnx.load(save(folder, SEEN["as given"][0]) / "model.onnx")
        (embedding,) = (each for each in model.graph.initializer if each.name == "embedding")
        fewer = onnx.numpy_helper.to_array(embedding)[:rows]
        embedding.CopyFrom(onnx.numpy_helper.from_array(fewer, "embedding"))
        onnx.save(model, folder / "model.onnx")
        if max(prompt) < rows:
            assert checked(folder, tuple(prompt), 4) is None
            return
        with pytest.raises(InputError) as caught:
            checked(folder, tuple(prompt), 4)

    bad = next(index for index, token in enumerate(prompt) if token >= rows)
    assert f"Token ID {prompt[bad]} at position {bad} is outside the vocabulary (0 to" in caught.value.message
    assert f"embedding [{rows}, 4] of model.onnx" in caught.value.message


def embedded(folder: Path) -> None:
    """An embedding graph before the decoder."""
    save_embedded(DECODER.save(folder.parent / "whole.onnx"), folder, "genai_config")


def in_parts(folder: Path) -> None:
    """A decoder in two parts, the second of which runs at each call as well."""
    folder.mkdir()
    parts = cut(DECODER.save(folder.parent / "whole.onnx"), folder, [8])
    stages = [{f"part{i}": {"filename": part.path.name}} for i, part in enumerate(parts)]
    config = {"model": {"decoder": {"pipeline": stages}}}
    (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize(("write", "shown"), [(embedded, False), (in_parts, True)])
def test_each_graph_of_a_package_is_looked_at(
    write: Callable[[Path], None], shown: bool, tmp_path: Path
) -> None:
    """The tokens go to one, the positions to another. Behind its tokens, one embedding has images."""
    folder = tmp_path / "p"
    write(folder)

    assert checked(folder, PROMPT, ROWS - len(PROMPT) + 1) is None
    with pytest.raises(InputError, match=rf"rows for {ROWS} positions \(position_table"):
        checked(folder, PROMPT, ROWS - len(PROMPT) + 2)
    if shown:
        with pytest.raises(InputError, match=r"Token ID 11 at position 1 .* embedding \[11, 4\]"):
            checked(folder, (3, 11), 1)


GPT2 = {"model_type": "gpt2", "n_positions": ROWS}


@pytest.mark.parametrize(
    ("look_up", "config", "refused"),
    [
        # A table of as many rows as the model type looks positions up in, and the graph does not show how.
        (unseen, GPT2, True),
        (unseen, {"model_type": "bart", "max_position_embeddings": ROWS - 2}, True),
        (unseen, {"text_config": {"model_type": "gpt2", "n_positions": ROWS}}, True),
        # What would be that table is not there.
        (unseen, {"model_type": "gpt2", "n_positions": ROWS - 1}, False),
        (unseen, {"model_type": "bart", "max_position_embeddings": ROWS}, False),
        # Rotary angles can be computed for any position.
        (unseen, {"model_type": "llama", "max_position_embeddings": ROWS}, False),
        # What the graph shows counts.
        (ENDLESS["over again"], {"model_type": "llama", "max_position_embeddings": ROWS}, False),
        (SEEN["by pairs"][0], {"model_type": "gpt2", "n_positions": ROWS - 1}, False),
        # A factor of a product is no table, however many rows it has.
        (ENDLESS["multiplied"], GPT2, False),
    ],
)
def test_a_declared_length_ends_a_decode_only_with_a_table(
    look_up: LookUp, config: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    """Elsewhere it is a warning, and no more than that, with the file and the key."""
    folder = save(tmp_path, look_up, config)
    most = (config.get("text_config") or config).get("n_positions") or config.get("max_position_embeddings")

    assert checked(folder, PROMPT, most - len(PROMPT) + 1) is None
    if refused:
        with pytest.raises(InputError, match=f"rows for {most} positions .*config.json: "):
            checked(folder, PROMPT, most - len(PROMPT) + 2)
        return
    warning = checked(folder, PROMPT, most - len(PROMPT) + 2)
    assert warning is not None
    assert warning.startswith("config.json: ")
    assert f"is {most}, and a prompt of 3 with {most - 1} new tokens takes {most + 1}" in warning


@pytest.mark.parametrize("config", [{}, {"n_positions": True}, {"n_positions": "many"}, {"n_positions": 0}])
def test_what_is_no_length_is_no_declaration(config: dict[str, Any], tmp_path: Path) -> None:
    """And the positions of T5 are distances, whatever its configuration counts."""
    for content in (config, {"model_type": "t5", "n_positions": 4}):
        assert declared_lengths(open_package(save(tmp_path, ENDLESS["over again"], content))) == ()


def test_the_context_length_of_genai_is_declared(tmp_path: Path) -> None:
    """The smallest of what is declared is what is warned of."""
    folder = save(tmp_path, ENDLESS["over again"], {"max_position_embeddings": 9})
    model = {"decoder": {"filename": "model.onnx"}, "context_length": 7}
    (folder / "genai_config.json").write_text(json.dumps({"model": model}), encoding="utf-8")

    warning = checked(folder, PROMPT, 8)

    assert warning is not None
    assert warning.startswith("genai_config.json: model.context_length is 7, and")


EXPORTED = {
    "genai-lfm2-conv-hybrid": 256,
    "genai-llama-int4-matmulnbits": 256,
    "genai-qwen3_5-hybrid": 256,
    "mobius-bamba-mamba2-hybrid": 128,
    "mobius-gemma4_text-kvshared": 128,
    "mobius-llama-attention": 128,
    "mobius-llama-gqa-cpu": 128,
    "mobius-qwen3_5-gated-deltanet-hybrid": 128,
}
"""Real exporters' models and how many positions their tables of angles have."""


@pytest.mark.parametrize("kind", ["ort-cpu", "oracle"])
@pytest.mark.parametrize("name", EXPORTED)
def test_tables_of_real_exporters_end_where_engines_fail(name: str, kind: str) -> None:
    """At the last position nothing is wrong, and at the next one everything."""
    models = os.environ.get("ONNX_PARITY_EXPORTER_MODELS")
    if not models:
        pytest.skip("set ONNX_PARITY_EXPORTER_MODELS to a folder of exporters' models")
    folder, most = Path(models) / name, EXPORTED[name]
    prompt = (5,) * (most - 2)

    assert checked(folder, prompt, 3) is None
    assert decoded(folder, kind, prompt, 3).failure is None
    with pytest.raises(InputError, match=f"rows for {most} positions"):
        checked(folder, prompt, 4)
    assert decoded(folder, kind, prompt, 4).failure is not None


@pytest.mark.parametrize("name", ["dynamo-llama-default-names", "mobius-mamba2-pure-ssm"])
def test_real_models_without_a_table_go_on(name: str) -> None:
    """Angles that are computed, and a recurrence, which has no positions."""
    models = os.environ.get("ONNX_PARITY_EXPORTER_MODELS")
    if not models:
        pytest.skip("set ONNX_PARITY_EXPORTER_MODELS to a folder of exporters' models")

    assert checked(Path(models) / name, (5, 9), 100_000) is None
