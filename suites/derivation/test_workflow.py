"""The newer form of inference metadata: every kind of state group, and every way to get one wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fixtures.graphs import save_ports
from fixtures.layouts import dense_06b, hybrid_27b
from harness.errors import InputError
from harness.package import open_package
from harness.ports import read_ports
from harness.topology.resolve import resolve_package
from harness.topology.sidecar import declared_io_of
from harness.topology.spec import Outcome


def cell(past: str, present: str | None, **more: Any) -> dict[str, Any]:
    """One port pair of a state group."""
    return {"input": past, **({} if present is None else {"output": present}), **more}


def workflow() -> dict[str, Any]:
    """A decoder with every kind of group, beside an encoder that the groups bind as well."""
    return {
        "components": {
            "encoder": {"ports": {"roles": {"audio": "audio_features"}}},
            "decoder": {
                "implementation": {"artifact": "onnx/decoder.onnx"},
                "ports": {
                    "roles": {
                        "t": "token_ids",
                        "e": "inputs_embeds",
                        "m": "attention_mask",
                        "p": "position_ids",
                        "h": "encoder_hidden_states",
                        "l": "logits",
                        "x": "something else",
                        "y": 3,
                        "z": ["token_ids"],
                    }
                },
            },
        },
        "serving": {
            "state_service": {
                "groups": {
                    "full": {
                        "kind": "full_attention",
                        "update": {"kind": "append"},
                        "ports": {
                            "encoder": {"c": cell("of", "another")},
                            "decoder": {
                                "b": cell("v1", "w1", role="value", layer=1),
                                "a": cell("k1", "j1", role="key", layer=1),
                                "d": cell("v0", "w0", role="value", layer=0),
                                "c": cell("k0", "j0", role="key", layer=0),
                                "r": cell("shared", "w9", role="key", layer=9, access="read_only"),
                            },
                        },
                    },
                    "sliding": {"kind": "sliding_attention", "ports": {"decoder": {"s": cell("s", "s2")}}},
                    "latent": {
                        "kind": "multi_latent_attention",
                        "ports": {"decoder": {"z": cell("z", "z2")}},
                    },
                    "cross": {
                        "kind": "cross_attention",
                        "ports": {
                            "decoder": {
                                "a": cell("ck", "cj", role="key"),
                                "b": cell("cv", "cw", role="value", access="read_only"),
                            }
                        },
                    },
                    "conv": {
                        "kind": "recurrent",
                        "ports": {
                            "decoder": {"b": cell("c2", "d2", layer=0), "a": cell("c1", "d1", layer=0)}
                        },
                    },
                    "ssm": {
                        "kind": "recurrent",
                        "ports": {
                            "decoder": {
                                "c": cell("s3", "t3", layer=2, role="A"),
                                "d": cell("s4", "t4", layer=2),
                                "a": cell("s1", "t1", layer=1),
                                "b": cell("s2", None),
                            }
                        },
                    },
                    "scatter": {
                        "kind": "full_attention",
                        "update": {
                            "kind": "indexed_scatter",
                            "write_indices_ports": {"decoder": "where", "encoder": "nowhere"},
                            "kv_length_ports": {"decoder": "length"},
                        },
                        "ports": {
                            "decoder": {
                                "a": cell("bk", "bk2", role="key", layer=0),
                                "b": cell("bv", "bv2", role="value", layer=0),
                                "c": cell("bx", None, role="value", layer=1),
                            }
                        },
                    },
                    "elsewhere": {"kind": "nobody knows", "ports": {"encoder": {"a": cell("q", "r")}}},
                }
            }
        },
    }


def test_every_kind_of_group_is_read() -> None:
    """Layer by layer, keys before values; what is only read has no output; other components do not count."""
    assert declared_io_of({"pipeline": {"workflow": workflow()}}, graph="decoder.onnx") == {
        "token_input": "t",
        "inputs_embeds_input": "e",
        "attention_mask_input": "m",
        "position_ids_input": "p",
        "encoder_hidden_states_input": "h",
        "logits_output": "l",
        "kv_inputs": ["k0", "v0", "k1", "v1", "s", "z"],
        "kv_outputs": ["j0", "w0", "j1", "w1", "s2", "z2"],
        "cross_kv_inputs": ["ck", "cv"],
        "cross_kv_outputs": ["cj"],
        "state_pairs": [
            {"input": "c2", "output": "d2"},
            {"input": "c1", "output": "d1"},
            {"input": "s1", "output": "t1"},
            {"input": "s4", "output": "t4"},
            {"input": "s3", "output": "t3"},
        ],
        "static_cache": {
            "write_indices_input": "where",
            "kv_sequence_length_input": "length",
            "key_cache_inputs": ["bk"],
            "key_cache_outputs": ["bk2"],
            "value_cache_inputs": ["bv"],
            "value_cache_outputs": ["bv2"],
        },
    }


def spoilt(*path: str, value: Any) -> Callable[[], dict[str, Any]]:
    """The workflow with another value at a place."""

    def make() -> dict[str, Any]:
        whole = copy.deepcopy(workflow())
        inner = whole
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        return whole

    return make


GROUPS = ("serving", "state_service", "groups")
SPOILT: dict[str, Callable[[], dict[str, Any]]] = {
    "components": spoilt("components", value=1),
    "components.decoder": spoilt("components", "decoder", value=1),
    "components.decoder.implementation": spoilt("components", "decoder", "implementation", value=1),
    "components.decoder.implementation.artifact": spoilt(
        "components", "decoder", "implementation", "artifact", value=1
    ),
    "components.decoder.ports": spoilt("components", "decoder", "ports", value=1),
    "components.decoder.ports.roles": spoilt("components", "decoder", "ports", "roles", value=1),
    "serving": spoilt("serving", value=1),
    "serving.state_service": spoilt("serving", "state_service", value=1),
    "serving.state_service.groups": spoilt(*GROUPS, value=1),
    "serving.state_service.groups.full": spoilt(*GROUPS, "full", value=1),
    "serving.state_service.groups.full.ports": spoilt(*GROUPS, "full", "ports", value=1),
    "serving.state_service.groups.full.ports.decoder": spoilt(*GROUPS, "full", "ports", "decoder", value=1),
    "serving.state_service.groups.full.ports.decoder.a": spoilt(
        *GROUPS, "full", "ports", "decoder", "a", value=1
    ),
    "serving.state_service.groups.full.ports.decoder.a.input": spoilt(
        *GROUPS, "full", "ports", "decoder", "a", "input", value=1
    ),
    "serving.state_service.groups.full.ports.decoder.a.output": spoilt(
        *GROUPS, "full", "ports", "decoder", "a", "output", value=1
    ),
    "serving.state_service.groups.full.ports.decoder.a.layer": spoilt(
        *GROUPS, "full", "ports", "decoder", "a", "layer", value=True
    ),
    "serving.state_service.groups.full.kind": spoilt(*GROUPS, "full", "kind", value="quantum"),
    "serving.state_service.groups.full.update": spoilt(*GROUPS, "full", "update", value=1),
    "serving.state_service.groups.scatter.update.write_indices_ports": spoilt(
        *GROUPS, "scatter", "update", "write_indices_ports", value=1
    ),
    "serving.state_service.groups.scatter.update.kv_length_ports.decoder": spoilt(
        *GROUPS, "scatter", "update", "kv_length_ports", "decoder", value=1
    ),
}
WANTED = {"artifact": "a port name", "input": "a port name", "output": "a port name", "layer": "an integer"}


@pytest.mark.parametrize("place", SPOILT)
def test_what_is_malformed_is_named_by_its_place(place: str) -> None:
    """The path of the field, what is due there, and what stands there."""
    with pytest.raises(InputError) as error:
        declared_io_of({"pipeline": {"workflow": SPOILT[place]()}}, graph="decoder.onnx")
    last = place.rpartition(".")[2]
    what = WANTED.get(last, "a mapping")
    value = "1"
    if last == "layer":
        value = "True"
    if last == "kind":
        what, value = "a kind of state that is known here", "'quantum'"
    if place.endswith("kv_length_ports.decoder"):
        what = "a port name"
    assert error.value.message == f"pipeline.workflow.{place} must be {what}, not {value}."


def test_a_port_without_a_name_is_named_by_its_place() -> None:
    """The key of the roles is the port."""
    metadata = {
        "pipeline": {"workflow": spoilt("components", "decoder", "ports", "roles", value={"": "logits"})()}
    }
    with pytest.raises(InputError) as error:
        declared_io_of(metadata)
    assert error.value.message == (
        "pipeline.workflow.components.decoder.ports.roles must be a port name, not ''."
    )


@pytest.mark.parametrize(
    ("roles", "declares"),
    [
        ({"t": "token_ids", "l": "logits"}, True),
        ({"e": "inputs_embeds", "l": "logits"}, True),
        ({"t": "token_ids"}, False),
        ({"e": "inputs_embeds"}, False),
        ({"l": "logits"}, False),
        ({"l": "logits", "m": "attention_mask"}, False),
    ],
)
def test_a_decoder_has_logits_and_something_to_drive_it(roles: dict[str, str], declares: bool) -> None:
    """Tokens or embeddings in, logits out; any other component declares nothing about a decoder."""
    metadata = {"pipeline": {"workflow": {"components": {"c": {"ports": {"roles": roles}}}}}}
    assert (declared_io_of(metadata) is not None) is declares


def test_two_ports_of_one_role_are_refused() -> None:
    """Which of them is meant, nobody can say."""
    metadata = {
        "pipeline": {"workflow": spoilt("components", "decoder", "ports", "roles", "u", value="token_ids")()}
    }
    with pytest.raises(InputError) as error:
        declared_io_of(metadata, graph="decoder.onnx")
    assert error.value.message == (
        "pipeline.workflow.components.decoder.ports.roles must be one port with the role token_ids, "
        "not 't, u'."
    )


@pytest.mark.parametrize("graph", ["other.onnx", None])
def test_several_decoders_and_no_artifact_that_fits_are_refused(graph: str | None) -> None:
    """The message lists them, and says what would decide."""
    whole = workflow()
    whole["components"]["draft"] = {"ports": {"roles": {"t": "token_ids", "l": "logits"}}}
    metadata = {"pipeline": {"workflow": whole}}
    with pytest.raises(InputError) as error:
        declared_io_of(metadata, graph=graph)
    assert error.value.message == (
        "pipeline.workflow.components has 2 decoders, decoder, draft, and it is not clear which one "
        f"{graph or 'the graph'} is."
    )
    assert error.value.next_action == (
        "Name the graph whose file is the artifact of one of them, or pass --ignore-declared."
    )
    chosen = declared_io_of(metadata, graph="decoder.onnx")
    assert chosen is not None
    assert chosen["kv_inputs"][:2] == ["k0", "v0"]


def test_a_package_asks_for_the_component_of_its_graph(tmp_path: Path) -> None:
    """Options and sidecars reach the resolver: the artifact, the gate, the match, and what to ignore."""
    path = save_ports(tmp_path / "model.onnx", dense_06b(layers=1))
    component = {"ports": {"roles": {"input_ids": "token_ids", "logits": "logits"}}}
    wrong = {"ports": {"roles": {"nobody": "token_ids", "logits": "logits"}}}
    metadata = {
        "pipeline": {
            "workflow": {
                "components": {
                    "a": {**wrong, "implementation": {"artifact": "draft.onnx"}},
                    "b": {**component, "implementation": {"artifact": "model.onnx"}},
                }
            }
        }
    }
    sidecar = tmp_path / "inference_metadata.yaml"
    sidecar.write_text(json.dumps(metadata), encoding="utf-8")
    ports = read_ports(path)
    assert resolve_package(open_package(tmp_path), ports).outcome is Outcome.DECLARED
    sidecar.write_text(json.dumps({"model": {"io": {"token_input": "nobody"}}}), encoding="utf-8")
    package = open_package(tmp_path)
    assert resolve_package(package, ports).outcome is Outcome.REFUSED
    assert resolve_package(package, ports, ignore_declared=True).outcome is Outcome.DERIVED
    declined = resolve_package(package, ports, ignore_declared=True, gate="recurrent-only")
    assert declined.outcome is Outcome.DECLINED


def test_a_package_hands_on_its_configuration_and_the_match(tmp_path: Path) -> None:
    """`genai_config.json` counts, and exact matching refuses a hybrid whose presents are all symbols."""
    path = save_ports(tmp_path / "model.onnx", hybrid_27b(layers=4))
    ports = read_ports(path)
    package = open_package(tmp_path)
    assert resolve_package(package, ports).outcome is Outcome.DERIVED
    assert resolve_package(package, ports, match="exact").outcome is Outcome.REFUSED
    config = {"model": {"decoder": {"inputs": {"position_ids": "positions"}}}}
    (tmp_path / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    refusal = resolve_package(open_package(tmp_path), ports).refusal
    assert refusal is not None
    assert refusal.ports[0] == "positions"
