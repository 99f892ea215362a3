"""What packages declare: read, trusted over names, and checked against the graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fixtures.layouts import (
    dense_06b,
    hybrid_27b,
    interface,
    static_cache,
    whisper_cross_kv,
)
from fixtures.odd_names import GROWING, GROWN, ODD_BLOCK, odd_names
from harness.errors import InputError
from harness.ports import Port, PortInventory
from harness.topology.resolve import resolve
from harness.topology.sidecar import declared_io_of, io_block
from harness.topology.spec import Outcome, Refusal, Role, Topology


def topology(inventory: PortInventory, **options: Any) -> Topology:
    """The topology of a layout with what its package declares."""
    derivation = resolve(inventory, **options)
    assert derivation.topology is not None, derivation.refusal
    return derivation.topology


def refusal(inventory: PortInventory, **options: Any) -> Refusal:
    """The refusal of a layout with what its package declares."""
    derivation = resolve(inventory, **options)
    assert derivation.refusal is not None, derivation.topology
    return derivation.refusal


def test_an_io_block_settles_what_no_name_says() -> None:
    """Ports named by letters have the roles and pairs of the block, against the order of the graph."""
    derivation = resolve(odd_names(), declared=ODD_BLOCK)
    assert derivation.outcome is Outcome.DECLARED
    found = derivation.topology
    assert found is not None
    assert (found.kv_inputs, found.kv_outputs) == (("c", "d"), ("z", "y"))
    assert [(pair.input, pair.output) for pair in found.state_pairs] == [("e", "w")]
    assert (found.token_input, found.attention_mask_input, found.logits_output) == ("a", "b", "x")


def test_a_declared_pairing_wins_over_the_names() -> None:
    """A package may pair layers crosswise; its names would say otherwise, and lose."""
    inventory = dense_06b(layers=2)
    past = [port.name for port in inventory.inputs[3:]]
    crossed = ["present.1.key", "present.1.value", "present.0.key", "present.0.value"]
    found = topology(inventory, declared={"kv_inputs": past, "kv_outputs": crossed})
    assert found.kv_outputs == tuple(crossed)
    assert topology(inventory).kv_outputs != found.kv_outputs


@pytest.mark.parametrize("side", ["kv_inputs", "kv_outputs"])
def test_a_partial_declaration_is_completed_from_the_names(side: str) -> None:
    """Only one side of the caches is declared; the other, tokens, mask and logits are derived."""
    inventory = hybrid_27b(layers=4)
    derived = topology(inventory)
    declared = {
        side: io_block(derived)[side],
        "state_pairs": [{"input": pair.input, "output": pair.output} for pair in derived.state_pairs],
    }
    assert io_block(topology(inventory, declared=declared)) == io_block(derived)


@pytest.mark.parametrize(
    "inventory",
    [dense_06b(layers=2), whisper_cross_kv(layers=2), static_cache(layers=2)],
    ids=["dense", "cross-attention", "static"],
)
def test_declaring_what_is_derived_changes_the_evidence_and_nothing_else(inventory: PortInventory) -> None:
    """Roles, partners and layers of all ports are those of the names that the block repeats."""

    def facts(found: Topology) -> list[tuple[str, str, Role, str | None, int | None]]:
        return [(port.name, port.direction, port.role, port.pair, port.layer) for port in found.roles]

    derived = topology(inventory)
    declared = topology(inventory, declared=io_block(derived))
    assert facts(declared) == facts(derived)
    assert {port.because for port in declared.roles if port.pair} == {"declared by the package's io block"}


def test_declared_cross_kv_may_be_only_read() -> None:
    """An encoder gives it once, so no output does; names that nobody knows say nothing against it."""
    plain = dense_06b(layers=1)
    inventory = PortInventory(
        (*plain.inputs, *(Port(name, "float32", ("batch", 2, "frames", 16)) for name in ("mem_k", "mem_v"))),
        plain.outputs,
    )
    found = topology(inventory, declared={"cross_kv_inputs": ["mem_k", "mem_v"]})
    assert (found.cross_kv_inputs, found.cross_kv_outputs) == (("mem_k", "mem_v"), ())


def test_an_empty_block_declares_nothing() -> None:
    """Empty lists and nulls are as good as absent: the topology is derived."""
    empty = {"kv_inputs": [], "state_pairs": [], "token_input": None}
    assert resolve(hybrid_27b(layers=4), declared=empty).outcome is Outcome.DERIVED


def test_ignore_declared_derives_whatever_the_package_says() -> None:
    """A wrong sidecar is looked past on request."""
    wrong = {"token_input": "absent"}
    assert refusal(dense_06b(), declared=wrong).code == "E_DECLARED_PORT_MISSING"
    assert resolve(dense_06b(), declared=wrong, ignore_declared=True).outcome is Outcome.DERIVED


@pytest.mark.parametrize(
    ("block", "code", "named"),
    [
        ({"token_input": "nobody"}, "E_DECLARED_PORT_MISSING", {"nobody"}),
        ({"logits_output": "input_ids"}, "E_DECLARED_PORT_MISSING", {"input_ids"}),
        ({"kv_inputs": ["nobody"], "kv_outputs": ["present.0.key"]}, "E_DECLARED_PORT_MISSING", {"nobody"}),
        (
            {"token_input": "input_ids", "position_ids_input": "input_ids"},
            "E_ROLE_OVERLAP",
            {"input_ids"},
        ),
        (
            {
                "kv_inputs": ["past_key_values.0.key", "past_key_values.0.key"],
                "kv_outputs": ["present.0.key", "present.0.value"],
            },
            "E_ROLE_OVERLAP",
            {"past_key_values.0.key"},
        ),
        (
            {
                "kv_inputs": ["past_key_values.0.key", "past_key_values.0.value"],
                "kv_outputs": ["present.0.key"],
            },
            "E_UNPAIRED_PAST",
            {"past_key_values.0.value"},
        ),
        (
            {"kv_inputs": ["past_key_values.0.key"], "kv_outputs": ["present.0.key"]},
            "E_UNKNOWN_INPUT",
            {"past_key_values.0.value"},
        ),
    ],
    ids=["no-port", "wrong-side", "no-cache", "two-roles", "twice", "one-side", "left-out"],
)
def test_a_declaration_that_does_not_fit_the_graph_is_refused_by_name(
    block: Mapping[str, Any], code: str, named: set[str]
) -> None:
    """Absent ports, ports declared twice or on one side only, and caches that the lists leave out."""
    found = refusal(dense_06b(layers=1), declared=block)
    assert code in {found.code, *found.also}
    assert named <= set(found.ports)


def test_a_declared_pair_must_still_be_able_to_feed_itself() -> None:
    """A declaration settles roles; it cannot make a float16 output fit a float32 input."""
    inventory = odd_names()
    broken = PortInventory(
        inventory.inputs,
        (*inventory.outputs[:3], Port("w", "float16", ("batch", 64, 3))),
    )
    found = refusal(broken, declared=ODD_BLOCK)
    assert found.code == "E_DTYPE_MISMATCH"
    assert set(found.ports) == {"e", "w"}


@pytest.mark.parametrize(
    ("block", "place"),
    [
        ({"token_input": 5}, "io.token_input"),
        ({"kv_inputs": "past"}, "io.kv_inputs"),
        ({"kv_outputs": ["a", 1]}, "io.kv_outputs[1]"),
        ({"state_pairs": [{"input": "a"}]}, "io.state_pairs[0].output"),
        ({"state_pairs": [{"input": "a", "output": "b", "init": "ones"}]}, "io.state_pairs[0].init"),
        ({"state_pairs": [{"input": "a", "output": "b", "update": "add"}]}, "io.state_pairs[0].update"),
        ({"static_cache": ["a"]}, "io.static_cache"),
        ({"optional_inputs": {"a": {"absent": {"kind": "ones"}}}}, "io.optional_inputs.a.absent.kind"),
        ({"inputs": "input_ids"}, "io.inputs"),
        ({"inputs": {"name": "input_ids"}}, "io.inputs"),
        ({"outputs": [{"name": "logits"}, "logits"]}, "io.outputs[1]"),
        ({"outputs": [{"dtype": "fp32"}]}, "io.outputs[0].name"),
    ],
)
def test_a_malformed_block_is_bad_input_at_its_place(block: Mapping[str, Any], place: str) -> None:
    """The wrong type is the author's mistake, and no refusal: the message gives the path of the field."""
    with pytest.raises(InputError) as error:
        resolve(dense_06b(layers=1), declared=block)
    assert error.value.message.startswith(f"{place} must be")


@pytest.mark.parametrize(
    ("block", "place", "meant"),
    [
        ({"kv_input": ["past_key_values.0.key"]}, "io has the key 'kv_input'", "kv_inputs"),
        ({"Token_input": "input_ids"}, "io has the key 'Token_input'", "token_input"),
        ({"static_cache": {"write_indices": "w"}}, "io.static_cache has the key", "write_indices_input"),
        (
            {"state_pairs": [{"input": "a", "output": "b", "inti": "ones"}]},
            "io.state_pairs[0] has the key 'inti'",
            "init",
        ),
        ({"inputs": [{"name": "input_ids", "type": "int64"}]}, "io.inputs[0] has the key 'type'", "dtype"),
        ({7: "input_ids"}, "io has the key 7", "Known are"),
        ({None: "input_ids"}, "io has the key None", "token_input"),
        ({"zzz": 1}, "io has the key 'zzz'", "kv_inputs"),
    ],
)
def test_a_key_that_means_nothing_is_not_dropped(block: Any, place: str, meant: str) -> None:
    """A misspelt key declares nothing, so that its author must hear of it, with the key that is near."""
    with pytest.raises(InputError) as error:
        resolve(dense_06b(layers=1), declared=block)
    assert error.value.message.startswith(place)
    assert meant in error.value.message


def test_keys_of_the_published_block_that_name_no_port_are_accepted() -> None:
    """How a runtime may go about its caches settles no role; a private key is its owner's business."""
    block = {
        "sequence_source": "token_ids",
        "kv_ownership": "owned",
        "kv_layout": "head_major_bnsh",
        "kv_update": "append",
        "aliasing": "forbidden",
        "x-note": {"any": "thing"},
    }
    assert resolve(dense_06b(layers=1), declared=block).outcome is Outcome.DERIVED
    assert io_block(topology(dense_06b(layers=1), declared=block)) == io_block(topology(dense_06b(layers=1)))


def test_ports_that_are_listed_have_no_role_by_that_and_must_exist() -> None:
    """An exporter describes each port beside its role: that says what there is, and not what it is for."""
    inventory = dense_06b(layers=1)
    block = {
        key: [
            {"name": p.name, "dtype": p.dtype, "rank": len(p.shape or ()), "shape": list(p.shape or ())}
            for p in side
        ]
        for key, side in (("inputs", inventory.inputs), ("outputs", inventory.outputs))
    }
    found = resolve(inventory, declared=block)
    assert found.outcome is Outcome.DERIVED
    assert found.topology == topology(inventory)
    for key, other in (("inputs", "logits"), ("outputs", "input_ids")):
        for name in ("nobody", other):
            missing = refusal(inventory, declared={**block, key: [*block[key], {"name": name}]})
            assert (missing.code, missing.ports) == ("E_DECLARED_PORT_MISSING", (name,))


def test_a_declared_hidden_output_is_not_taken_for_the_logits() -> None:
    """By shape it would be the logits, being alone; the declaration says that it is not."""
    inventory = odd_names()
    block = {key: value for key, value in ODD_BLOCK.items() if key != "logits_output"}
    assert topology(inventory, declared=block).logits_output == "x"
    found = refusal(inventory, declared={**block, "hidden_output": "x"})
    assert found.code == "E_NO_LOGITS_OUTPUT"
    missing = refusal(inventory, declared={**ODD_BLOCK, "hidden_output": "h"})
    assert (missing.code, missing.ports) == ("E_DECLARED_PORT_MISSING", ("h",))


def test_declared_audio_features_are_placed_and_not_unknown() -> None:
    """An input that the block names has a role, although a decode has no value to feed it."""
    plain = dense_06b(layers=1)
    mel = Port("mel", "float32", ("batch", 80, 3000))
    inventory = PortInventory((*plain.inputs, mel), plain.outputs)
    assert refusal(inventory).ports == ("mel",)
    found = topology(inventory, declared={"audio_features_input": "mel"})
    assert {port.name: port.role for port in found.roles}["mel"] is Role.AUXILIARY


def test_a_declared_static_cache_needs_no_telling_names() -> None:
    """All six fields bind a cache of fixed size whose names no convention knows."""
    buffer = ("batch", 128, 32)
    ports = interface(vocab=1000)
    inventory = PortInventory(
        (
            *ports.inputs,
            *(Port(name, "float32", buffer) for name in ("kin", "vin")),
            *(Port(name, "int64", ("batch",)) for name in ("where", "length")),
        ),
        (*ports.outputs, *(Port(name, "float32", buffer) for name in ("kout", "vout"))),
    )
    block = {
        "static_cache": {
            "write_indices_input": "where",
            "kv_sequence_length_input": "length",
            "key_cache_inputs": ["kin"],
            "value_cache_inputs": ["vin"],
            "key_cache_outputs": ["kout"],
            "value_cache_outputs": ["vout"],
        }
    }
    found = topology(inventory, declared=block)
    assert found.static_cache == block["static_cache"]
    assert found.kv_inputs == ()
    roles = {port.name: port.role for port in found.roles}
    assert (roles["kin"], roles["vin"], roles["where"], roles["length"]) == (
        Role.KV_KEY,
        Role.KV_VALUE,
        Role.CONTROL,
        Role.CONTROL,
    )


@pytest.mark.parametrize(
    "missing", ["write_indices_input", "kv_sequence_length_input", "value_cache_outputs"]
)
def test_half_a_static_cache_is_refused(missing: str) -> None:
    """Without the write index, the valid length or an output the cache cannot be driven."""
    inventory = static_cache()
    block = dict(io_block(topology(inventory))["static_cache"])
    del block[missing]
    found = refusal(inventory, declared={"static_cache": block})
    assert found.code == "E_INCOMPLETE_CONTROL_PORTS"
    assert missing in found.message


def test_optional_inputs_are_read_in_their_published_form() -> None:
    """A mapping from port to what its absence means; zeros are the only fallback."""
    inventory = dense_06b(layers=1)
    extra = PortInventory((*inventory.inputs, Port("bias", "float32", (1, 8))), inventory.outputs)
    assert refusal(extra).code == "E_UNKNOWN_INPUT"
    block = {"optional_inputs": {"bias": {"presence": "bias", "absent": {"kind": "zeros", "shape": [1, 8]}}}}
    assert topology(extra, declared=block).optional_inputs == ("bias",)
    for silent in ({}, {"absent": {}}, {"absent": None}):
        assert topology(extra, declared={"optional_inputs": {"bias": silent}}).optional_inputs == ("bias",)


WORKFLOW: Mapping[str, Any] = {
    "pipeline": {
        "workflow": {
            "components": {
                "vision": {
                    "implementation": {"artifact": "vision.onnx"},
                    "ports": {"roles": {"p": "pixels"}},
                },
                "decoder": {
                    "implementation": {"kind": "onnx", "artifact": "text/model.onnx"},
                    "ports": {"roles": {"a": "token_ids", "b": "attention_mask", "x": "logits"}},
                },
            },
            "serving": {
                "state_service": {
                    "groups": {
                        "kv": {
                            "kind": "full_attention",
                            "ports": {
                                "decoder": {
                                    "cell.1": {"input": "d", "output": "y", "role": "value", "layer": 0},
                                    "cell.0": {"input": "c", "output": "z", "role": "key", "layer": 0},
                                }
                            },
                        },
                        "conv": {
                            "kind": "recurrent",
                            "ports": {"decoder": {"s": {"input": "e", "output": "w"}}},
                        },
                    }
                }
            },
        }
    }
}


def test_a_workflow_says_the_same_as_an_io_block() -> None:
    """Roles of the decoder's ports and its state groups give the block that the older form spells out."""
    assert declared_io_of(WORKFLOW) == {
        **ODD_BLOCK,
        "state_pairs": [{"input": "e", "output": "w"}],
    }
    assert topology(odd_names(), declared=declared_io_of(WORKFLOW)) == topology(
        odd_names(), declared=ODD_BLOCK
    )


def test_a_workflow_declares_a_static_cache_by_its_update() -> None:
    """An indexed scatter is a cache of fixed size; its control ports are those of the update."""
    block = declared_io_of(
        {
            "pipeline": {
                "workflow": {
                    "components": {"d": {"ports": {"roles": {"input_ids": "token_ids", "logits": "logits"}}}},
                    "serving": {
                        "state_service": {
                            "groups": {
                                "kv": {
                                    "kind": "full_attention",
                                    "update": {
                                        "kind": "indexed_scatter",
                                        "write_indices_ports": {"d": "write_indices"},
                                        "kv_length_ports": {"d": "nonpad_kv_seqlen"},
                                    },
                                    "ports": {
                                        "d": {
                                            f"{kind}.{layer}": {
                                                "input": f"{kind}_cache.{layer}",
                                                "output": f"updated_{kind}_cache.{layer}",
                                                "role": kind,
                                                "layer": layer,
                                            }
                                            for layer in range(2)
                                            for kind in ("key", "value")
                                        }
                                    },
                                }
                            }
                        }
                    },
                }
            }
        }
    )
    assert block is not None
    derived = topology(static_cache(layers=2))
    assert topology(static_cache(layers=2), declared=block).static_cache == derived.static_cache


def test_a_workflow_with_two_decoders_needs_the_graph_to_choose() -> None:
    """Two components take tokens and give logits: the artifact's name decides, and nothing else."""
    component = {"ports": {"roles": {"input_ids": "token_ids", "logits": "logits"}}}
    workflow = {
        "pipeline": {
            "workflow": {
                "components": {
                    name: {**component, "implementation": {"artifact": f"{name}.onnx"}}
                    for name in ("big", "small")
                }
            }
        }
    }
    assert declared_io_of(workflow, graph="small.onnx") == {
        "token_input": "input_ids",
        "logits_output": "logits",
    }
    with pytest.raises(InputError, match="big, small"):
        declared_io_of(workflow, graph="other.onnx")


def test_the_entry_of_a_pipeline_whose_file_is_the_graph_declares_its_ports() -> None:
    """By the name of the file, wherever it lies; an entry without ports, or of another file, says nothing."""
    models = {
        "embedding": {"io": {"token_input": "e"}},
        "encoder": {"filename": "encoder.onnx", "io": {"token_input": "wrong"}},
        "bare": {"filename": "model.onnx", "io": None},
        "decoder": {"filename": "text/model.onnx", "io": {"token_input": "a"}},
    }
    metadata = {"pipeline": {"models": models, **WORKFLOW["pipeline"]}}
    assert declared_io_of(metadata, graph="model.onnx") == {"token_input": "a"}
    del models["decoder"]
    assert declared_io_of(metadata, graph="model.onnx") == declared_io_of(WORKFLOW)
    assert declared_io_of({"pipeline": {"models": models}}, graph="model.onnx") is None


@pytest.mark.parametrize(
    ("models", "place"),
    [
        ([], "pipeline.models"),
        ({"decoder": "model.onnx"}, "pipeline.models.decoder"),
        ({"decoder": {"filename": 1}}, "pipeline.models.decoder.filename"),
        ({"decoder": {"filename": "model.onnx", "io": []}}, "pipeline.models.decoder.io"),
    ],
)
def test_a_malformed_entry_of_a_pipeline_is_bad_input_at_its_place(models: Any, place: str) -> None:
    """Whether the entry is that of the graph or not."""
    with pytest.raises(InputError) as error:
        declared_io_of({"pipeline": {"models": models}}, graph="model.onnx")
    assert error.value.message.startswith(f"{place} must be")


def test_a_workflow_without_decoder_declares_nothing() -> None:
    """A package of encoders has no decoder ports to declare."""
    assert declared_io_of({"pipeline": {"workflow": {"components": {"e": {"ports": {"roles": {}}}}}}}) is None


@pytest.mark.parametrize(
    ("field", "past", "role"),
    [
        ("kv", "k0", Role.KV_KEY),
        ("kv", "mem_k", Role.KV_KEY),
        ("kv", "mem_value", Role.KV_VALUE),
        ("kv", "cross_k", Role.KV_FUSED),
        ("kv", "mem", Role.KV_FUSED),
        ("kv", "past_key_values.0.0", Role.KV_KEY),
        ("kv", "past_key_values.0.1", Role.KV_VALUE),
        ("cross_kv", "mem_value", Role.CROSS_KV_VALUE),
        ("cross_kv", "enc_v", Role.CROSS_KV_VALUE),
        ("cross_kv", "enc_k", Role.CROSS_KV_KEY),
        ("cross_kv", "mem", Role.CROSS_KV_KEY),
        ("cross_kv", "past_key_values.0.value", Role.CROSS_KV_VALUE),
        ("kv", "past_key_values.0.encoder.value", Role.KV_FUSED),
    ],
)
def test_a_declared_cache_is_keys_or_values_as_its_name_says(field: str, past: str, role: Role) -> None:
    """The block says that it is a cache and of which attention; its own name says the rest, where it does."""
    present = past.replace("past_key_values", "present") if "past" in past else "zz"
    ports = interface(vocab=1000)
    inventory = PortInventory(
        (*ports.inputs, Port(past, "float32", GROWING), Port("past_key_values.7.key", "float32", GROWING)),
        (*ports.outputs, Port(present, "float32", GROWN), Port("present.7.key", "float32", GROWN)),
    )
    block = {f"{field}_inputs": [past], f"{field}_outputs": [present]}
    if field == "kv":
        block = {
            "kv_inputs": [past, "past_key_values.7.key"],
            "kv_outputs": [present, "present.7.key"],
        }
    roles = {port.name: port.role for port in topology(inventory, declared=block).roles}
    assert (roles[past], roles[present]) == (role, role)


def test_a_name_says_what_a_declared_cache_is_whatever_else_is_declared() -> None:
    """Both attentions, both sides: `0.0` and `0.1` still are keys and values."""
    pasts = ("past_key_values.0.0", "past_key_values.0.1")
    presents = ("present.0.0", "present.0.1")
    cross = ("past_key_values.0.encoder.key", "present.0.encoder.key")
    ports = interface(vocab=1000)
    inventory = PortInventory(
        (*ports.inputs, *(Port(name, "float32", GROWING) for name in (*pasts, cross[0]))),
        (*ports.outputs, *(Port(name, "float32", GROWN) for name in (*presents, cross[1]))),
    )
    block = {
        "kv_inputs": [*pasts],
        "kv_outputs": [*presents],
        "cross_kv_inputs": [cross[0]],
        "cross_kv_outputs": [cross[1]],
    }
    roles = {port.name: port.role for port in topology(inventory, declared=block).roles}
    assert [roles[name] for name in pasts] == [Role.KV_KEY, Role.KV_VALUE]
