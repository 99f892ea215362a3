"""What a user reads: the evidence for each role and the text of each refusal, as committed.

The texts are the product: they name the port, the rule and the way out. A change of one is a change of
`expected/`, to be read and approved there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.layouts import WHISPER_GENAI_CONFIG, dense_06b, hybrid_27b, static_cache, whisper_cross_kv
from fixtures.odd_names import ODD_BLOCK, odd_names
from fixtures.recorded import recorded_layouts, recorded_reports
from harness.errors import InputError
from harness.ports import Port, PortInventory, inventory_from_json
from harness.topology.resolve import resolve
from harness.topology.sidecar import declared_io_of, derivation_document
from harness.topology.spec import Derivation, Outcome, Refusal
from harness.topology.writing import differing, sidecar_of

EXPECTED = json.loads((Path(__file__).parent / "expected" / "messages.json").read_text(encoding="utf-8"))
CORPUS = recorded_layouts() + recorded_reports()


def evidence() -> dict[str, int]:
    """How often each role comes with each line of evidence, over all recorded layouts that derive."""
    found: Counter[str] = Counter()
    for layout in CORPUS:
        topology = resolve(layout.inventory, declared=layout.declared).topology
        for port in () if topology is None else topology.roles:
            found[f"{port.direction} {port.role.value}, layer {port.layer is not None}: {port.because}"] += 1
    return dict(sorted(found.items()))


def refusals() -> dict[str, Any]:
    """What is said of each recorded layout that is refused."""
    found = {}
    for layout in CORPUS:
        refusal = resolve(layout.inventory, declared=layout.declared).refusal
        if refusal is not None:
            found[layout.name] = [refusal.message, list(refusal.ports), list(refusal.also)]
    return found


def dense(*, more_in: tuple[Port, ...] = (), more_out: tuple[Port, ...] = ()) -> PortInventory:
    """One layer of attention, with further ports."""
    ports = dense_06b(layers=1)
    return PortInventory((*ports.inputs, *more_in), (*ports.outputs, *more_out))


def without(*names: str) -> PortInventory:
    """One layer of attention, without some of its ports."""
    ports = dense_06b(layers=1)
    return PortInventory(
        *(tuple(p for p in side if p.name not in names) for side in (ports.inputs, ports.outputs))
    )


def beside(*outputs: Port) -> PortInventory:
    """One layer of attention with these outputs in the place of the logits."""
    ports = without("logits")
    return PortInventory(ports.inputs, (*ports.outputs, *outputs))


def changed(name: str, **what: Any) -> PortInventory:
    """One layer of each kind of the hybrid, of which one port is changed."""
    ports = hybrid_27b(layers=4)
    return PortInventory(
        *(
            tuple(replace(p, **what) if p.name == name else p for p in side)
            for side in (ports.inputs, ports.outputs)
        )
    )


def floats(*names: str, shape: tuple[Any, ...] = ("batch", 64, 3)) -> tuple[Port, ...]:
    """Float ports of one shape."""
    return tuple(Port(name, "float16", shape) for name in names)


def asked(inventory: PortInventory, **options: Any) -> Callable[[], Derivation]:
    """A derivation that is refused."""
    return lambda: resolve(inventory, **options)


def io(**block: Any) -> Callable[[], Derivation]:
    """A dense decoder with an `io` block that does not fit it."""
    return asked(dense_06b(layers=1), declared=block)


def static(**lists: list[str]) -> Callable[[], Derivation]:
    """A decoder with buffers of fixed size, of whose declaration some lists are others."""
    return asked(static_cache(layers=1), declared={"static_cache": {**STATIC_BLOCK, **lists}})


STATIC_BLOCK: Mapping[str, Any] = {
    "write_indices_input": "write_indices",
    "kv_sequence_length_input": "nonpad_kv_seqlen",
    "key_cache_inputs": ["key_cache.0"],
    "value_cache_inputs": ["value_cache.0"],
    "key_cache_outputs": ["updated_key_cache.0"],
    "value_cache_outputs": ["updated_value_cache.0"],
}
REFUSALS: Mapping[str, Callable[[], Derivation]] = {
    "no name": asked(dense(more_in=floats(""))),
    "nul": asked(dense(more_in=floats("a\0b"))),
    "extent": asked(dense(more_out=(Port("x", "float32", (-1,)),))),
    "twice in": asked(dense(more_in=floats("p", "p"))),
    "twice out": asked(dense(more_out=floats("logits", "logits"))),
    "unknown": asked(dense(more_in=floats("a", "b", "c", "d", "e", "f"))),
    "line end in a name": asked(dense(more_in=floats("a\nb"))),
    "accent and line end in a name": asked(dense(more_in=floats("caf\u00e9\n\\"))),
    "paged names": asked(dense(more_in=(Port("block_table", "int32", ("batch", 4)),))),
    "paged shape": asked(changed("past_key_values.3.key", shape=("num_blocks", 16, 4, 256))),
    "no token": asked(without("input_ids")),
    "no inputs": asked(PortInventory((), dense_06b(layers=1).outputs)),
    "no token of rank 2": asked(
        PortInventory(
            (Port("frame", "int64", ("b",)), *without("input_ids").inputs), dense_06b(layers=1).outputs
        )
    ),
    "two tokens": asked(
        PortInventory(
            (*(Port(name, "int64", ("b", "s")) for name in ("left", "right")), *without("input_ids").inputs),
            dense_06b(layers=1).outputs,
        )
    ),
    "ids and embeddings": asked(dense(more_in=(Port("inputs_embeds", "float16", ("b", "s", 64)),))),
    "no logits": asked(without("logits")),
    "two logits": asked(
        PortInventory(dense_06b(layers=1).inputs, (*without("logits").outputs, *floats("a", "b")))
    ),
    "hidden state for logits": asked(
        PortInventory(dense_06b(layers=1).inputs, (*without("logits").outputs, *floats("hidden_states")))
    ),
    "hidden state beside another": asked(
        PortInventory(dense_06b(layers=1).inputs, (*without("logits").outputs, *floats("hidden_states", "b")))
    ),
    "an output without a shape beside another": asked(
        PortInventory(
            dense_06b(layers=1).inputs,
            (*without("logits").outputs, *floats("a"), Port("b", "float16", None)),
        )
    ),
    "rival of the logits": asked(beside(*floats("lm_logits", "b", shape=("b", "s", 9)))),
    "other scores": asked(beside(*floats("router_logits"))),
    "one score": asked(beside(*floats("lm_logits", shape=("b", "s", 1)))),
    "one number a token": asked(beside(*floats("lm_logits", shape=("b", "s")))),
    "logits of a width that is not known": asked(beside(*floats("a", shape=("b", "s", "d")))),
    "part of the network for logits": asked(beside(*floats("predictor_out", shape=("b", "s", 9)))),
    "as wide as heads": asked(beside(*floats("a", shape=("b", "s", 512)))),
    "logits of another rank beside another": asked(
        beside(*floats("a", shape=("b", "s", 9)), *floats("b_logits", shape=(9,)))
    ),
    "no cache": asked(
        PortInventory((Port("input_ids", "int64", ("b", "s")),), (Port("logits", "float32", ("b", "s", 9)),))
    ),
    "declined": asked(dense_06b(layers=1), gate="recurrent-only"),
    "declined, one integer": asked(
        PortInventory((Port("t", "int64", ("b", "s")),), dense_06b(layers=1).outputs), gate="recurrent-only"
    ),
    "declined, no integer": asked(PortInventory((), dense_06b(layers=1).outputs), gate="recurrent-only"),
    "past alone": asked(without("present.0.key")),
    "past alone, candidates": asked(
        PortInventory(
            dense_06b(layers=1).inputs,
            (*without("present.0.key").outputs, Port("cat_17", "float16", ("batch", 8, "total", 128))),
        )
    ),
    "past alone, outputs of other sorts": asked(
        PortInventory(
            dense_06b(layers=1).inputs,
            (
                *without("present.0.key").outputs,
                Port("cat_17", "float16", ("batch", "total")),
                Port("cat_18", "float32", ("batch", 8, "total", 128)),
                Port("cat_19", "float16", None),
            ),
        )
    ),
    "present alone": asked(without("past_key_values.0.key")),
    "layers apart": asked(dense(more_in=floats("past_key_values.7.key"), more_out=floats("present.8.key"))),
    "layers apart, and a present alone": asked(
        dense(
            more_in=floats("past_key_values.7.key"),
            more_out=floats("present.8.key", "present_states.9.ssm"),
        )
    ),
    "two presents": asked(
        dense(more_in=floats("past_states.0.ssm"), more_out=floats("present.0.ssm", "present_states.0.ssm"))
    ),
    "two pasts": asked(dense(more_in=floats("past.0.key", shape=("batch", 8, "past_sequence_len", 128)))),
    "dtype": asked(changed("present.3.key", dtype="float32")),
    "rank": asked(changed("present.3.key", shape=("batch", 4, "total"))),
    "width": asked(changed("present.3.key", shape=("batch", 4, "total", 9))),
    "two axes": asked(changed("past_key_values.3.key", shape=("batch", "heads", "past", 256))),
    "length": asked(changed("present.3.key", shape=("batch", 4, 1, 256))),
    "this call": asked(changed("present.3.key", shape=("batch", 4, "sequence_len", 256))),
    "symbolic state": asked(changed("past_key_values.0.conv_state", shape=("batch", "channels", None))),
    "state without shape": asked(changed("past_key_values.0.conv_state", shape=None)),
    "exact": asked(hybrid_27b(layers=4), match="exact"),
    "encoder length": asked(changed("past_key_values.3.key", shape=("batch", 4, "encoder_len", 256))),
    "vague buffer": asked(dense(more_in=floats("key_1_in"), more_out=floats("key_1_out"))),
    "scatter without controls": asked(PortInventory(static_cache().inputs[:-2], static_cache().outputs)),
    "scatter without length": asked(PortInventory(static_cache().inputs[:-1], static_cache().outputs)),
    "declared missing": io(token_input="nobody"),
    "declared missing, then there": io(
        kv_inputs=["nobody", "past_key_values.0.key", "past_key_values.0.value"],
        kv_outputs=["nothing", "present.0.key", "present.0.value"],
    ),
    "declared state without its input": asked(
        odd_names(), declared={**ODD_BLOCK, "state_pairs": [{"input": "nobody", "output": "w"}]}
    ),
    "declared state without its output": asked(
        odd_names(), declared={**ODD_BLOCK, "state_pairs": [{"input": "e", "output": "nothing"}]}
    ),
    "declared buffer without its input": static(key_cache_inputs=["nobody"]),
    "declared buffer without its output": static(key_cache_outputs=["nothing"]),
    "declared cross on one side": asked(
        whisper_cross_kv(layers=1),
        declared={
            "cross_kv_inputs": [f"past_key_values.0.encoder.{kind}" for kind in ("key", "value")],
            "cross_kv_outputs": ["present.0.encoder.key"],
        },
    ),
    "declared twice": io(token_input="input_ids", position_ids_input="input_ids"),
    "declared one side too long": io(kv_inputs=["past_key_values.0.key", "b"], kv_outputs=["present.0.key"]),
    "declared other side too long": io(kv_inputs=["a"], kv_outputs=["b", "c", "d"]),
    "declared alone in": asked(odd_names(), declared={**ODD_BLOCK, "kv_outputs": None}),
    "declared alone out": asked(odd_names(), declared={**ODD_BLOCK, "kv_inputs": None}),
    "declared left out": io(kv_inputs=["past_key_values.0.key"], kv_outputs=["present.0.key"]),
    "declared without state": asked(
        hybrid_27b(layers=1),
        declared={
            "state_pairs": [{"input": "past_key_values.0.conv_state", "output": "present.0.conv_state"}]
        },
    ),
    "declared without cross": asked(
        whisper_cross_kv(layers=1), declared={"cross_kv_inputs": ["past_key_values.0.encoder.key"]}
    ),
    "declared half static": asked(
        static_cache(layers=1),
        declared={
            "static_cache": {"write_indices_input": "write_indices", "key_cache_inputs": ["key_cache.0"]}
        },
    ),
    "declared uneven static": static(key_cache_outputs=["updated_key_cache.0", "x"]),
}
GENAI_INPUTS = {"past_key_names": "past_key_values.%d.key"}
INPUT_ERRORS: Mapping[str, Callable[[], object]] = {
    "token type": io(token_input=5),
    "token empty": io(token_input=""),
    "list type": io(kv_inputs="past"),
    "list item": io(kv_outputs=["a", 1]),
    "pairs type": io(state_pairs="a"),
    "pair type": io(state_pairs=["a"]),
    "pair input": io(state_pairs=[{"output": "a"}]),
    "pair output": io(state_pairs=[{"input": "a"}]),
    "pair init": io(state_pairs=[{"input": "a", "output": "b", "init": "ones"}]),
    "pair update": io(state_pairs=[{"input": "a", "output": "b", "update": "add"}]),
    "optional type": io(optional_inputs="a"),
    "optional spec": io(optional_inputs={"a": 1}),
    "optional absent": io(optional_inputs={"a": {"absent": 1}}),
    "optional kind": io(optional_inputs={"a": {"absent": {"kind": "ones"}}}),
    "static type": io(static_cache=["a"]),
    "static port": io(static_cache={"write_indices_input": 1}),
    "static list": io(static_cache={"key_cache_inputs": "a"}),
    "auxiliary type": io(hidden_output=1),
    "listed type": io(inputs="input_ids"),
    "listed item": io(outputs=[{"name": "logits"}, "present"]),
    "listed name": io(outputs=[{"dtype": "fp32"}]),
    "listed key": io(inputs=[{"name": "input_ids", "type": "int64"}]),
    "misspelt": io(kv_input=["a"]),
    "unknown key": io(zzz=1),
    "model type": lambda: declared_io_of({"model": []}),
    "io type": lambda: declared_io_of({"model": {"io": []}}),
    "pipeline type": lambda: declared_io_of({"pipeline": 1}),
    "workflow type": lambda: declared_io_of({"pipeline": {"workflow": 1}}),
    "genai type": asked(dense_06b(layers=1), genai_config={"model": []}),
    "genai decoder": asked(dense_06b(layers=1), genai_config={"model": {"decoder": []}}),
    "genai inputs": asked(dense_06b(layers=1), genai_config={"model": {"decoder": {"inputs": []}}}),
    "genai name": asked(
        dense_06b(layers=1), genai_config={"model": {"decoder": {"inputs": {"input_ids": 1}}}}
    ),
    "genai half": asked(dense_06b(layers=1), genai_config={"model": {"decoder": {"inputs": GENAI_INPUTS}}}),
    "genai three of four": asked(
        dense_06b(layers=1),
        genai_config={
            "model": {
                "decoder": {
                    "inputs": {**GENAI_INPUTS, "past_value_names": "past_key_values.%d.value"},
                    "outputs": {"present_key_names": "present.%d.key"},
                }
            }
        },
    ),
    "genai no index": asked(
        dense_06b(layers=1),
        genai_config={
            "model": {"decoder": {"inputs": {"past_names": "past"}, "outputs": {"present_names": "p"}}}
        },
    ),
    "genai missing": asked(
        dense_06b(layers=1), genai_config={"model": {"decoder": {"inputs": {"position_ids": "positions"}}}}
    ),
    "unwritable pairs": lambda: sidecar_of(
        odd_names(), resolved(odd_names(), declared=ODD_BLOCK), "genai-config"
    ),
    "unwritable control": lambda: sidecar_of(
        dense(more_in=(Port("use_cache_branch", "bool", (1,)),)),
        resolved(dense(more_in=(Port("use_cache_branch", "bool", (1,)),))),
        "inference-metadata",
    ),
    "inventory": lambda: inventory_from_json([], source="x.json"),
    "inventory ports": lambda: inventory_from_json({}),
    "inventory inputs": lambda: inventory_from_json({"ports": {"inputs": "x"}}),
    "inventory outputs": lambda: inventory_from_json({"ports": {"inputs": [], "outputs": 1}}),
    "inventory item": lambda: inventory_from_json({"ports": {"inputs": [1], "outputs": []}}),
    "inventory name": lambda: inventory_from_json({"ports": {"inputs": [{}], "outputs": []}}),
    "inventory name type": lambda: inventory_from_json({"ports": {"inputs": [{"name": 5}], "outputs": []}}),
    "inventory dtype": lambda: inventory_from_json(
        {"ports": {"inputs": [{"name": "x", "dtype": 1}], "outputs": []}}
    ),
    "inventory shape": lambda: inventory_from_json(
        {"ports": {"inputs": [{"name": "x", "shape": 1}], "outputs": []}}
    ),
    "inventory text for a shape": lambda: inventory_from_json(
        {"ports": {"inputs": [{"name": "x", "shape": "b"}], "outputs": []}}
    ),
    "inventory axis": lambda: inventory_from_json(
        {"ports": {"inputs": [], "outputs": [{"name": "x", "shape": [1, 1.5]}]}}
    ),
    "inventory declared": lambda: inventory_from_json(
        {"ports": {"inputs": [], "outputs": []}, "declared": []}
    ),
}


def resolved(inventory: PortInventory, **options: Any) -> Any:
    """The topology, which there must be."""
    topology = resolve(inventory, **options).topology
    assert topology is not None
    return topology


def refusal_of(name: str) -> list[Any]:
    """What is said in a case of `REFUSALS`."""
    refusal = REFUSALS[name]().refusal
    assert refusal is not None
    return [refusal.code, refusal.message, list(refusal.ports), list(refusal.also)]


def error_of(name: str) -> list[str]:
    """What is said in a case of `INPUT_ERRORS`."""
    try:
        found = INPUT_ERRORS[name]()
    except InputError as error:
        return [error.message, error.next_action]
    assert isinstance(found, Derivation)
    assert found.refusal is not None
    return [found.refusal.code, found.refusal.message]


def documents() -> dict[str, Any]:
    """Whole documents: a static cache, cross KV by configuration, and declared topologies."""
    extra = dense(
        more_in=(Port("mel", "float32", ("batch", 80, 3000)), Port("bias", "float32", (1, 8))),
        more_out=(Port("h", "float32", ("batch", "s", 64)),),
    )
    extra_block = {"audio_features_input": "mel", "optional_inputs": ["bias"], "hidden_output": "h"}
    lengths = dense(more_in=(Port("n", "int64", ()),))
    lengths_config = {"model": {"decoder": {"inputs": {"total_sequence_length": "n"}}}}
    return {
        "static cache": derivation_document("x", resolve(static_cache(layers=1))),
        "whisper": derivation_document(
            "x", resolve(whisper_cross_kv(layers=1), genai_config=WHISPER_GENAI_CONFIG)
        ),
        "hybrid": derivation_document("x", resolve(hybrid_27b(layers=4))),
        "declared": derivation_document("x", resolve(odd_names(), declared=ODD_BLOCK)),
        "declared buffers": derivation_document(
            "x", resolve(static_cache(layers=1), declared={"static_cache": STATIC_BLOCK})
        ),
        "declared beside caches": derivation_document("x", resolve(extra, declared=extra_block)),
        "configured lengths": derivation_document("x", resolve(lengths, genai_config=lengths_config)),
        "malformed": derivation_document("x", REFUSALS["nul"]()),
        "refused": derivation_document("x", REFUSALS["unknown"]()),
        "declined": derivation_document("x", REFUSALS["declined"]()),
    }


def written() -> dict[str, Any]:
    """What is written of some layouts, in each format that can say them."""
    deepstack = dense(more_in=(Port("deepstack_embeds", "float32", (1, "batch", "s", 64)),))
    vague = dense(more_in=(Port("token_type_ids", "int64", None),))
    half_vague = dense(more_in=(Port("token_type_ids", "int64", ("b", None)),))
    lengths = dense(more_in=(Port("total_sequence_length", "int64", ()),))
    embeds = PortInventory(
        (Port("inputs_embeds", "float16", ("batch", "s", 64)), *without("input_ids").inputs),
        dense_06b(layers=1).outputs,
    )
    encoder = Port("encoder_hidden_states", "float32", ("batch", "e", 64))
    encoder_mask = Port("encoder_attention_mask", "int64", ("batch", "e"))
    plain = without(
        *(f"{side}.0.{kind}" for side in ("past_key_values", "present") for kind in ("key", "value"))
    )
    fused = PortInventory(
        (*plain.inputs, Port("past_0", "float16", (2, "b", 8, "past", 128))),
        (*plain.outputs, Port("present_0", "float16", (2, "b", 8, "total", 128))),
    )
    cases: dict[str, PortInventory] = {
        "hybrid": hybrid_27b(layers=8),
        "dense": dense_06b(layers=2),
        "whisper": whisper_cross_kv(layers=2),
        "static": static_cache(layers=2),
        "optional": deepstack,
        "optional without a shape": vague,
        "optional without an extent": half_vague,
        "lengths": lengths,
        "switch": dense(more_in=(Port("use_cache_branch", "bool", (1,)),)),
        "embeddings": embeds,
        "encoder": dense(more_in=(encoder,)),
        "encoder with mask": dense(more_in=(encoder, encoder_mask)),
        "fused": fused,
    }
    declared = resolved(odd_names(), declared=ODD_BLOCK)
    found: dict[str, Any] = {"declared": sidecar_of(odd_names(), declared, "inference-metadata")}
    for name, inventory in cases.items():
        for form in ("inference-metadata", "genai-config"):
            try:
                found[f"{name}, {form}"] = sidecar_of(inventory, resolved(inventory), form)
            except InputError as error:
                found[f"{name}, {form}"] = error.message
    return found


def test_sidecars_are_written_as_committed() -> None:
    """Every key of both formats, and what is said where a format lacks one."""
    assert written() == EXPECTED["written"]


def test_the_evidence_over_the_corpus_is_as_committed() -> None:
    """Each role with its line of evidence, and how many ports have it."""
    assert evidence() == EXPECTED["evidence"]


def test_refusals_over_the_corpus_read_as_committed() -> None:
    """Message, ports and further codes of each recorded layout that is refused."""
    assert refusals() == EXPECTED["corpus"]


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_reads_as_committed(name: str) -> None:
    """Code, message, ports in order, and further codes."""
    assert refusal_of(name) == EXPECTED["refusals"][name]


@pytest.mark.parametrize("name", INPUT_ERRORS)
def test_an_input_error_reads_as_committed(name: str) -> None:
    """The place, what is due there, what stands there, and what to do."""
    assert error_of(name) == EXPECTED["errors"][name]


def test_documents_read_as_committed() -> None:
    """Every field of the document of a derivation, with each port's evidence."""
    assert documents() == EXPECTED["documents"]


def test_what_reads_back_otherwise_is_named() -> None:
    """The ports of a refusal, or every port where it names none; else those that come out otherwise."""
    wanted = resolved(dense_06b(layers=1))
    names = [port.name for port in wanted.roles]
    assert differing(wanted, resolve(dense_06b(layers=1))) == []
    assert differing(wanted, Derivation(Outcome.REFUSED, refusal=Refusal("E", "m", ("a", "b")))) == ["a", "b"]
    assert differing(wanted, Derivation(Outcome.REFUSED, refusal=Refusal("E", "m"))) == names
    assert differing(wanted, Derivation(Outcome.REFUSED)) == names
    swapped = {"present.0.key": "present.0.value", "present.0.value": "present.0.key"}
    block = {"kv_inputs": list(wanted.kv_inputs), "kv_outputs": [swapped[name] for name in wanted.kv_outputs]}
    assert differing(wanted, resolve(dense_06b(layers=1), declared=block)) == [
        *wanted.kv_inputs,
        *wanted.kv_outputs,
    ]
