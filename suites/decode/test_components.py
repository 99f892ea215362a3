"""Packages of several graphs: the same weights, in one graph and in many, decode the same tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from fixtures.decoders import TinyDecoder
from fixtures.sessions import SESSION_KINDS, open_session
from fixtures.splitting import EMBEDDED_FORMS, cut, save_embedded, save_pipeline
from harness.decode.assembling import Assembly, assemble
from harness.decode.diagnose import first_non_finite
from harness.decode.feeds import plan_feeds
from harness.decode.loop import greedy_decode, one_pass_decode
from harness.decode.parts import decoder_inventory
from harness.decode.wired import WiredEngine, WiredSession
from harness.engines.base import Session
from harness.engines.registry import parse_engine
from harness.errors import EngineFailedError, InputError, NotDrivableError
from harness.package import open_package
from harness.topology.resolve import resolve_package

PROMPT = (1, 2, 3, 4)
DECODER = TinyDecoder("rrar", vocab=29, width=8, seed=12)
NODES = 70
"""How many nodes the graph of `DECODER` has; each may be where a part ends."""


def assembly_of(folder: Path) -> Assembly:
    """A package's decoder with all its graphs."""
    package = open_package(folder)
    derivation = resolve_package(package, decoder_inventory(package))
    assert derivation.topology is not None, derivation.refusal
    return assemble(package, derivation.topology)


def open_whole(kind: str, assembly: Assembly) -> Session:
    """A session over all graphs, each on an engine of this kind."""
    steps = assembly.wiring.steps
    return WiredSession(assembly.wiring, {step.name: open_session(kind, step.graph) for step in steps})


def test_every_node_is_cut_once(tmp_path: Path) -> None:
    """The number of nodes below is that of the graph, so that no cut is left out."""
    assert len(onnx.load(DECODER.save(tmp_path / "model.onnx")).graph.node) == NODES


@pytest.mark.parametrize("at", range(1, NODES))
def test_wherever_a_decoder_is_cut_it_decodes_the_same(at: int, tmp_path: Path) -> None:
    """Two parts, run in order, are the whole: whatever passes between them, whichever part has a cache."""
    whole = DECODER.save(tmp_path / "whole.onnx")
    assembly = assembly_of(save_pipeline(tmp_path / "parts", cut(whole, tmp_path / "parts", [at])))

    session = open_whole("ort-cpu", assembly)
    trace = greedy_decode(session, assembly.topology, PROMPT, max_new_tokens=6)

    assert trace.failure is None
    assert trace.token_ids == DECODER.greedy(PROMPT, 6)
    assert set(assembly.topology.kv_inputs) == set(DECODER.topology.kv_inputs)
    assert set(assembly.topology.state_pairs) == set(DECODER.topology.state_pairs)


@pytest.mark.parametrize("kind", SESSION_KINDS)
def test_many_parts_decode_on_every_engine_and_in_one_pass(kind: str, tmp_path: Path) -> None:
    """Seven parts: step by step and in one pass, on each engine."""
    whole = DECODER.save(tmp_path / "whole.onnx")
    pieces = cut(whole, tmp_path / "parts", [1, 9, 20, 34, 51, NODES - 1])
    assembly = assembly_of(save_pipeline(tmp_path / "parts", pieces))
    session = open_whole(kind, assembly)

    trace = greedy_decode(session, assembly.topology, PROMPT, max_new_tokens=10)
    at_once = one_pass_decode(session, assembly.topology, PROMPT, trace.token_ids)

    assert trace.token_ids == DECODER.greedy(PROMPT, 10)
    assert at_once is not None
    assert tuple(step.argmax for step in at_once.steps) == trace.token_ids


@pytest.mark.parametrize("kind", SESSION_KINDS)
@pytest.mark.parametrize("form", EMBEDDED_FORMS)
def test_an_embedding_graph_and_its_decoder_are_a_text_model(form: str, kind: str, tmp_path: Path) -> None:
    """However the package says so: tokens go in, images are none, and the tokens of one graph come out."""
    whole = DECODER.save(tmp_path / "whole.onnx")
    assembly = assembly_of(save_embedded(whole, tmp_path / form, form))
    session = open_whole(kind, assembly)

    trace = greedy_decode(session, assembly.topology, PROMPT, max_new_tokens=10)

    assert trace.failure is None
    assert trace.token_ids == DECODER.greedy(PROMPT, 10)
    assert assembly.topology.token_input == "input_ids"
    assert assembly.topology.inputs_embeds_input is None
    assert session.info.settings["text_only"].endswith("is given no image_features")


@pytest.mark.parametrize("kind", ["ort-cpu", "oracle"])
def test_a_second_product_of_the_embedding_graph_is_passed_on(kind: str, tmp_path: Path) -> None:
    """Inputs for each layer beside the embeddings (Gemma 4): the decoder needs both, and gets them."""
    whole = DECODER.save(tmp_path / "whole.onnx")
    model = onnx.load(whole)
    (embeds,), (sum_,) = model.graph.node[0].output, model.graph.node[2].output
    model.graph.node[2].output[0] = "sum"
    model.graph.node.insert(1, onnx.helper.make_node("Neg", [embeds], ["negative"]))
    for index, (one, other, output) in enumerate((("negative", embeds, "none"), ("sum", "none", sum_)), 4):
        model.graph.node.insert(index, onnx.helper.make_node("Add", [one, other], [output]))
    onnx.save(model, whole)
    names = {embeds: "inputs_embeds", "negative": "per_layer_inputs"}
    pieces = cut(whole, tmp_path / "p", [2], names=names)
    for piece, name in zip(pieces, ("embed_tokens", "decoder"), strict=True):
        piece.path.rename(tmp_path / "p" / f"{name}.onnx")
    assembly = assembly_of(tmp_path / "p")

    trace = greedy_decode(open_whole(kind, assembly), assembly.topology, PROMPT, max_new_tokens=10)

    assert {"inputs_embeds", "per_layer_inputs"} <= {*pieces[1].inputs}
    assert trace.failure is None
    assert trace.token_ids == DECODER.greedy(PROMPT, 10)


def change(path: Path, *, op_type: str | None = None, weight: float | None = None) -> None:
    """Damage a graph: its last node does something else, or all its weights are one number."""
    model = onnx.load(path)
    if op_type is not None:
        model.graph.node[-1].op_type = op_type
    for tensor in model.graph.initializer if weight is not None else ():
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values = np.full(tuple(tensor.dims), weight, np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    onnx.save(model, path)


@pytest.mark.parametrize("kind", ["ort-cpu", "oracle"])
def test_an_engine_that_lacks_an_operator_says_in_which_graph(kind: str, tmp_path: Path) -> None:
    """Of several graphs, the message names the one that is at fault."""
    pieces = cut(DECODER.save(tmp_path / "whole.onnx"), tmp_path / "parts", [9, 34])
    assembly = assembly_of(save_pipeline(tmp_path / "parts", pieces))
    change(pieces[1].path, op_type="NobodysOperator")
    engine = WiredEngine(parse_engine(kind).engine, assembly.wiring)

    with pytest.raises((EngineFailedError, InputError), match=r"^part1 \(part1\.onnx\): "):
        engine.open(pieces[0].path, {}).run({}, ())


def test_numbers_that_are_not_finite_are_traced_to_their_graph(tmp_path: Path) -> None:
    """The oracle looks into each graph in turn, and names the node and the file."""
    pieces = cut(DECODER.save(tmp_path / "whole.onnx"), tmp_path / "parts", [9, 60])
    change(pieces[2].path, weight=float("inf"))
    assembly = assembly_of(save_pipeline(tmp_path / "parts", pieces))
    session = WiredEngine(parse_engine("oracle").engine, assembly.wiring).open(pieces[0].path, {})

    found = first_non_finite(session, assembly.topology, PROMPT)

    assert found is not None
    assert found.endswith(" of part2.onnx")


def test_an_embedding_graph_that_is_missing_is_named(tmp_path: Path) -> None:
    """It is declared and needed; the vision graph is declared, and nobody misses it."""
    folder = save_embedded(DECODER.save(tmp_path / "whole.onnx"), tmp_path / "p", "genai_config")
    assert assembly_of(folder)
    (folder / "embed.onnx").unlink()

    with pytest.raises(InputError, match=r"inputs_embeds .* needs embedding \(embed\.onnx\)") as caught:
        assembly_of(folder)
    assert "vision" not in caught.value.message


def test_a_decoder_of_embeddings_alone_is_refused_by_name(tmp_path: Path) -> None:
    """Nobody declares an embedding graph: the port that nobody can feed is named, as ever."""
    folder = save_embedded(DECODER.save(tmp_path / "whole.onnx"), tmp_path / "p", "folders")
    (folder / "embedding/model.onnx").unlink()
    assembly = assembly_of(folder)

    with pytest.raises(NotDrivableError) as caught:
        plan_feeds(assembly.topology, assembly.wiring.inventory)
    assert caught.value.ports == ("inputs_embeds",)
