"""What packages declare: read, trusted over names, checked against the graph, and written back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest

from fixtures.layouts import (
    WHISPER_GENAI_CONFIG,
    dense_06b,
    hybrid_27b,
    interface,
    static_cache,
    whisper_cross_kv,
)
from harness.errors import InputError
from harness.ports import Port, PortInventory
from harness.topology.resolve import resolve
from harness.topology.sidecar import declared_io_of, io_block
from harness.topology.spec import Outcome, Refusal, Role, Topology
from harness.topology.writing import sidecar_of

GROWING = ("batch", 2, "past", 16)
GROWN = ("batch", 2, "total", 16)


def odd_names() -> PortInventory:
    """A decoder none of whose names says anything."""
    return PortInventory(
        (
            Port("a", "int64", ("batch", "s")),
            Port("b", "int64", ("batch", "t")),
            Port("c", "float32", GROWING),
            Port("d", "float32", GROWING),
            Port("e", "float32", ("batch", 64, 3)),
        ),
        (
            Port("x", "float32", ("batch", "s", 1000)),
            Port("y", "float32", GROWN),
            Port("z", "float32", GROWN),
            Port("w", "float32", ("batch", 64, 3)),
        ),
    )


ODD_BLOCK: Mapping[str, Any] = {
    "token_input": "a",
    "attention_mask_input": "b",
    "logits_output": "x",
    "kv_inputs": ["c", "d"],
    "kv_outputs": ["z", "y"],
    "state_pairs": [{"input": "e", "output": "w", "init": "zeros", "update": "replace"}],
}


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


def test_a_partial_declaration_is_completed_from_the_names() -> None:
    """Only the past side of the caches is declared; outputs, tokens, mask and logits are derived."""
    inventory = hybrid_27b(layers=4)
    derived = topology(inventory)
    declared = {
        "kv_inputs": list(derived.kv_inputs),
        "state_pairs": [{"input": pair.input, "output": pair.output} for pair in derived.state_pairs],
    }
    assert io_block(topology(inventory, declared=declared)) == io_block(derived)


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
    ],
)
def test_a_malformed_block_is_bad_input_at_its_place(block: Mapping[str, Any], place: str) -> None:
    """The wrong type is the author's mistake, and no refusal: the message gives the path of the field."""
    with pytest.raises(InputError) as error:
        resolve(dense_06b(layers=1), declared=block)
    assert error.value.message.startswith(f"{place} must be")


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


def genai(**names: str) -> Mapping[str, Any]:
    """A `genai_config.json`; keys that start with present or are logits stand among the outputs."""
    outputs = {
        key: value for key, value in names.items() if "present" in key or key in ("logits", "rnn_states")
    }
    inputs = {key: value for key, value in names.items() if key not in outputs}
    return {"model": {"decoder": {"inputs": inputs, "outputs": outputs}}}


def test_genai_templates_name_caches_that_no_convention_knows() -> None:
    """The four templates pair whatever they name, layer by layer, and keys stay keys."""
    ports = interface(vocab=1000)
    inventory = PortInventory(
        (*ports.inputs, Port("mem/0/K", "float32", GROWING), Port("mem/0/V", "float32", GROWING)),
        (*ports.outputs, Port("mem2/0/K", "float32", GROWN), Port("mem2/0/V", "float32", GROWN)),
    )
    assert resolve(inventory).outcome is Outcome.REFUSED
    config = genai(
        past_key_names="mem/%d/K",
        past_value_names="mem/%d/V",
        present_key_names="mem2/%d/K",
        present_value_names="mem2/%d/V",
    )
    found = topology(inventory, genai_config=config)
    assert dict(zip(found.kv_inputs, found.kv_outputs, strict=True)) == {
        "mem/0/K": "mem2/0/K",
        "mem/0/V": "mem2/0/V",
    }
    assert {port.name: port.role for port in found.roles}["mem/0/V"] is Role.KV_VALUE


def test_genai_names_of_fused_and_recurrent_caches_are_read() -> None:
    """`past_names` pair stacked caches, `rnn_prev_states` a recurrent state without an index."""
    ports = interface(vocab=1000)
    inventory = PortInventory(
        (
            *ports.inputs,
            Port("h.0", "float32", (2, "batch", 4, "past", 8)),
            Port("r", "float32", (3, "batch", 8)),
        ),
        (
            *ports.outputs,
            Port("g.0", "float32", (2, "batch", 4, "total", 8)),
            Port("q", "float32", (3, "batch", 8)),
        ),
    )
    config = genai(past_names="h.%d", present_names="g.%d", rnn_prev_states="r", rnn_states="q")
    found = topology(inventory, genai_config=config)
    assert (found.kv_inputs, found.kv_outputs) == (("h.0",), ("g.0",))
    assert [(pair.input, pair.output) for pair in found.state_pairs] == [("r", "q")]


def test_a_port_that_the_genai_config_names_must_exist() -> None:
    """Names given one by one are as binding as an `io` block."""
    found = refusal(dense_06b(layers=1), genai_config=genai(position_ids="positions"))
    assert (found.code, found.ports) == ("E_DECLARED_PORT_MISSING", ("positions",))


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"model": []}, "model"),
        (genai(past_key_names="past.%d.key"), "model.decoder.inputs.past_value_names"),
        (
            genai(
                past_key_names="past.key",
                past_value_names="past.%d.value",
                present_key_names="present.%d.key",
                present_value_names="present.%d.value",
            ),
            "model.decoder.inputs.past_key_names",
        ),
        (genai(past_names="past_%d"), "model.decoder.outputs.present_names"),
    ],
)
def test_a_malformed_genai_config_is_bad_input_at_its_place(config: Mapping[str, Any], place: str) -> None:
    """Half a set of templates, or a template without its index, names nothing."""
    with pytest.raises(InputError) as error:
        resolve(dense_06b(layers=1), genai_config=config)
    assert error.value.message.startswith(f"{place} must be")


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


def test_a_workflow_without_decoder_declares_nothing() -> None:
    """A package of encoders has no decoder ports to declare."""
    assert declared_io_of({"pipeline": {"workflow": {"components": {"e": {"ports": {"roles": {}}}}}}}) is None


WRITABLE = {
    "hybrid_27b": hybrid_27b(layers=8),
    "dense_06b": dense_06b(layers=3),
    "whisper": whisper_cross_kv(layers=2),
    "odd_names": odd_names(),
    "static_cache": static_cache(layers=2),
}


_NAMES = {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"type": "string", "minLength": 1}}
PUBLISHED_IO_RULES: Mapping[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        **{
            key: {"type": "string", "minLength": 1}
            for key in (
                "token_input",
                "inputs_embeds_input",
                "attention_mask_input",
                "position_ids_input",
                "logits_output",
                "encoder_hidden_states_input",
            )
        },
        **dict.fromkeys(("kv_inputs", "kv_outputs", "cross_kv_inputs", "cross_kv_outputs"), _NAMES),
        "state_pairs": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["input", "output", "init", "update"],
                "properties": {"init": {"const": "zeros"}, "update": {"const": "replace"}},
            },
        },
        "optional_inputs": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["presence", "absent"],
                "properties": {"absent": {"type": "object", "required": ["kind", "shape"]}},
            },
        },
        "static_cache": {
            "type": "object",
            "additionalProperties": False,
            "required": [
                "write_indices_input",
                "kv_sequence_length_input",
                "key_cache_inputs",
                "value_cache_inputs",
                "key_cache_outputs",
                "value_cache_outputs",
            ],
            "properties": {
                "write_indices_input": {"type": "string"},
                "kv_sequence_length_input": {"type": "string"},
                "key_cache_inputs": _NAMES,
                "value_cache_inputs": _NAMES,
                "key_cache_outputs": _NAMES,
                "value_cache_outputs": _NAMES,
            },
        },
    },
}
"""The rules that the published metadata schema (onnx-genai, `ModelIoSpec`) has for these fields."""


@pytest.mark.parametrize("name", WRITABLE)
def test_a_written_io_block_keeps_the_published_rules(name: str) -> None:
    """Field names, required parts of a pair and of a static cache, and lists that pair by position."""
    wanted = topology(WRITABLE[name], declared=ODD_BLOCK if name == "odd_names" else None)
    block = sidecar_of(WRITABLE[name], wanted, "inference-metadata")["model"]["io"]
    jsonschema.validate(block, PUBLISHED_IO_RULES)
    assert len(block.get("kv_inputs", ())) == len(block.get("kv_outputs", ()))
    assert len(block.get("cross_kv_inputs", ())) == len(block.get("cross_kv_outputs", ()))


@pytest.mark.parametrize("name", WRITABLE)
def test_a_written_io_block_gives_the_topology_back(name: str) -> None:
    """Resolving with what was written gives every port the role and the partner that it had."""
    declared = ODD_BLOCK if name == "odd_names" else None
    wanted = topology(WRITABLE[name], declared=declared)
    written = sidecar_of(WRITABLE[name], wanted, "inference-metadata")
    again = resolve(WRITABLE[name], declared=written["model"]["io"])
    assert again.outcome is Outcome.DECLARED
    assert again.topology is not None
    assert io_block(again.topology) == io_block(wanted)


def test_a_written_genai_config_gives_the_topology_back() -> None:
    """Templates, cross templates and the rule for states say all that a dotted layout needs."""
    for inventory in (dense_06b(layers=3), whisper_cross_kv(layers=2), hybrid_27b(layers=8)):
        wanted = topology(inventory)
        written = sidecar_of(inventory, wanted, "genai-config")
        assert io_block(topology(inventory, genai_config=written)) == io_block(wanted)


def test_the_written_whisper_config_is_the_one_that_its_exporter_writes() -> None:
    """Keys, values, and cross keys and values each under its own template."""
    inventory = whisper_cross_kv()
    written = sidecar_of(inventory, topology(inventory), "genai-config")["model"]["decoder"]
    expected = WHISPER_GENAI_CONFIG["model"]["decoder"]
    assert written["inputs"] == expected["inputs"]
    assert expected["outputs"].items() <= written["outputs"].items()


def test_what_a_format_cannot_say_is_not_written() -> None:
    """Crosswise pairs have no template, and a branch switch has no field: the message names the ports."""
    inventory = odd_names()
    with pytest.raises(InputError, match="`c`") as error:
        sidecar_of(inventory, topology(inventory, declared=ODD_BLOCK), "genai-config")
    assert "genai_config.json" in error.value.message
    plain = dense_06b(layers=1)
    merged = PortInventory((*plain.inputs, Port("use_cache_branch", "bool", (1,))), plain.outputs)
    with pytest.raises(InputError, match="`use_cache_branch`"):
        sidecar_of(merged, topology(merged), "inference-metadata")


def test_optional_inputs_are_written_with_what_their_absence_means() -> None:
    """The published form asks for a presence key, and for the shape of the zeros."""
    plain = dense_06b(layers=1)
    extra = Port("deepstack_embeds", "float32", (1, "batch", "sequence_len", 64))
    inventory = PortInventory((*plain.inputs, extra), plain.outputs)
    written = sidecar_of(inventory, topology(inventory), "inference-metadata")
    assert written["model"]["io"]["optional_inputs"] == {
        "deepstack_embeds": {
            "presence": "deepstack_embeds",
            "absent": {"kind": "zeros", "shape": [1, "batch", "sequence_len", 64]},
        }
    }
