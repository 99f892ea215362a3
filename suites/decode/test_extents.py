"""Caches with an extent that the ports leave open: that of what the graph appends to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from fixtures.cache_forms import CountedHeads
from fixtures.decoder_graphs import CacheForm, GraphOfDecoder
from fixtures.decoders import TinyDecoder
from fixtures.sessions import open_session
from harness.cli.app import run
from harness.decode.assembling import Assembly, assemble
from harness.decode.feeds import plan_feeds
from harness.decode.loop import greedy_decode
from harness.decode.parts import decoder_inventory
from harness.errors import NotDrivableError
from harness.package import open_package
from harness.topology.resolve import resolve_package

DECODER = TinyDecoder("aa", vocab=29, width=8, seed=4)
PROMPT = (1, 2, 3, 4)

FORMS = {
    "falcon": lambda: CountedHeads(),
    "bloom": lambda: CountedHeads(turned=True),
    "four heads": lambda: CountedHeads(heads=4),
    "optimum": lambda: CountedHeads(symbol="batch_size x num_heads"),
}


class Opaque(CountedHeads):
    """The same, and the rows come out of an operator of which nobody knows the shape."""

    def append(self, graph: GraphOfDecoder, name: str, new: str) -> str:
        """Through an operator of another domain, which no engine is asked to run here."""
        hidden = f"hidden.{name}"
        graph.add_all(helper.make_node("Unknown", [new], [hidden], domain="com.unknown"))
        return super().append(graph, name, hidden)


def assembly_of(folder: Path) -> Assembly:
    """A package's decoder with all its graphs."""
    package = open_package(folder)
    topology = resolve_package(package, decoder_inventory(package)).topology
    assert topology is not None
    return assemble(package, topology)


@pytest.mark.parametrize("kind", ["ort-cpu", "nxrt", "oracle"])
@pytest.mark.parametrize("form", FORMS)
def test_heads_that_are_counted_with_the_batch_are_driven(form: str, kind: str, tmp_path: Path) -> None:
    """However many there are, and whatever the axis is called: the tokens are those of the reference."""
    DECODER.save(tmp_path / "model.onnx", FORMS[form]())
    assembly = assembly_of(tmp_path)

    trace = greedy_decode(
        open_session(kind, tmp_path / "model.onnx"), assembly.topology, PROMPT, max_new_tokens=12
    )

    assert trace.failure is None
    assert trace.token_ids == DECODER.greedy(PROMPT, 12)


def test_caches_of_any_type_say_it(tmp_path: Path) -> None:
    """Those of the layers behind the first one follow from what came before, in the type that it has."""
    half = TinyDecoder("aaa", vocab=29, width=8, float_dtype=TensorProto.FLOAT16)
    half.save(tmp_path / "model.onnx", CountedHeads(turned=True))

    assembly = assembly_of(tmp_path)

    names = [f"past_key_values.{i}.{kind}" for i in range(3) for kind in ("key", "value")]
    assert assembly.topology.facts.extents == {name: {0: 2} for name in names}
    plan_feeds(assembly.topology, assembly.wiring.inventory)


def test_what_shows_nowhere_is_refused_by_name(tmp_path: Path) -> None:
    """Nothing is guessed."""
    DECODER.save(tmp_path / "model.onnx", Opaque())
    assembly = assembly_of(tmp_path)

    with pytest.raises(NotDrivableError, match=r"axis 0 of its shape \[batch_size \* num_heads"):
        plan_feeds(assembly.topology, assembly.wiring.inventory)


def test_nothing_is_looked_for_where_nothing_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of which the ports say all are not parsed for it."""
    DECODER.save(tmp_path / "model.onnx", CacheForm())
    monkeypatch.setattr("harness.decode.tables.Tables", None)

    assert assembly_of(tmp_path).topology.facts.extents == {}


def test_a_check_of_such_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the ports to the verdict."""
    (tmp_path / "p").mkdir()
    DECODER.save(tmp_path / "p" / "model.onnx", CountedHeads(turned=True))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))

    status = run(
        ["check", "p", "--prompt-ids", "1,2,3,4", "--candidate", "ort-cpu", "--json", "--in-process"]
    )

    document = json.loads(capsys.readouterr().out)
    assert (status, document["verdict"]) == (0, "identical")
    assert document["prompts"][0]["candidate_ids"] == list(DECODER.greedy(PROMPT, 16))
