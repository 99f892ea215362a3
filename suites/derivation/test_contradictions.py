"""What packages declare and the graph contradicts, or never heard of: kept or refused, and always said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import onnx
import pytest
from onnx import TensorProto, helper

from fixtures.flows import GROWING, GROWN, STATE, concat, derive, info, model
from fixtures.layouts import dense_06b, hybrid_27b, static_cache, whisper_cross_kv
from fixtures.recorded import recorded_layouts
from harness.cli.app import run
from harness.cli.planning import derive_decoder
from harness.errors import InputError
from harness.package import open_package
from harness.ports import Port, PortInventory, read_ports
from harness.topology.dataflow import read_cache_flow
from harness.topology.genai import genai_config_of
from harness.topology.resolve import resolve
from harness.topology.sidecar import io_block
from harness.topology.spec import Derivation, Outcome, PortRole, Role, Topology
from harness.topology.writing import sidecar_of

KEEP = "hat is declared is kept; correct it where it is wrong."
TWO_LAYERS = {f"past_key_values.{layer}.key": GROWING for layer in (0, 1)}
BOTH_PRESENTS = {f"present.{layer}.key": GROWN for layer in (0, 1)}


def two_layers(path: Path) -> Path:
    """A decoder whose nodes append to each of two caches, as the names have it."""
    nodes = [
        *concat("past_key_values.0.key", "present.0.key"),
        *concat("past_key_values.1.key", "present.1.key"),
    ]
    return model(path, nodes, TWO_LAYERS, BOTH_PRESENTS)


def declared(path: Path, block: Mapping[str, Any]) -> Derivation:
    """The derivation of a graph with an `io` block, nodes and all."""
    return resolve(read_ports(path), declared=block, flow=read_cache_flow(path))


def because(topology: Topology | None, name: str) -> str:
    """The evidence for one port."""
    assert topology is not None
    return next(port.because for port in topology.roles if port.name == name)


def test_a_declared_pairing_that_the_graph_contradicts_is_kept_and_said(tmp_path: Path) -> None:
    """A package declares layers crosswise that its graph feeds straight: each pair has its contradiction."""
    presents = ["present.1.key", "present.0.key"]
    found = declared(two_layers(tmp_path / "m.onnx"), {"kv_inputs": list(TWO_LAYERS), "kv_outputs": presents})
    assert found.outcome is Outcome.DECLARED
    assert found.topology is not None
    assert found.topology.kv_outputs == tuple(presents)
    said = [
        f"As declared, `past_key_values.{layer}.key` goes with `present.{1 - layer}.key`, but the graph "
        f"feeds it to `present.{layer}.key`. W{KEEP}"
        for layer in (0, 1)
    ]
    assert list(found.warnings) == said
    for layer in (0, 1):
        expected = f"declared by the package's io block. {said[layer]}"
        assert because(found.topology, f"past_key_values.{layer}.key") == expected
        assert because(found.topology, f"present.{1 - layer}.key") == expected


def test_a_declaration_that_the_graph_confirms_says_so(tmp_path: Path) -> None:
    """The same block as the names would give has no warning, and both witnesses."""
    found = declared(
        two_layers(tmp_path / "m.onnx"), {"kv_inputs": list(TWO_LAYERS), "kv_outputs": list(BOTH_PRESENTS)}
    )
    assert found.warnings == ()
    assert because(found.topology, "past_key_values.1.key") == (
        "declared by the package's io block; confirmed by dataflow through Concat"
    )


def test_without_its_nodes_a_declaration_stands_alone(tmp_path: Path) -> None:
    """Ports say nothing about where a cache goes."""
    block = {"kv_inputs": list(TWO_LAYERS), "kv_outputs": ["present.1.key", "present.0.key"]}
    found = resolve(read_ports(two_layers(tmp_path / "m.onnx")), declared=block)
    assert found.warnings == ()
    assert because(found.topology, "past_key_values.1.key") == "declared by the package's io block"


@pytest.mark.parametrize("kind", ["kv", "state"])
def test_a_declared_kind_of_cache_that_an_operator_contradicts_is_kept_and_said(
    tmp_path: Path, kind: str
) -> None:
    """Keys in the slot of values, and a recurrent state that is declared to grow."""
    if kind == "kv":
        node = helper.make_node(
            "Attention", ["q", "k", "v", "", "a.value", "a.key"], ["y", "b.value", "b.key"]
        )
        pasts, presents = {"a.key": GROWING, "a.value": GROWING}, {"b.key": GROWN, "b.value": GROWN}
        taken, role = "Attention", {"a.key": "kv_key", "a.value": "kv_value"}
        other = {"a.key": "kv_value", "a.value": "kv_key"}
    else:
        node = helper.make_node("GRU", ["x", "w", "r", "", "", "a.key"], ["y", "b.key"])
        pasts, presents = {"a.key": STATE}, {"b.key": STATE}
        taken, role, other = "GRU", {"a.key": "kv_key"}, {"a.key": "state"}
    path = model(tmp_path / "m.onnx", [node], pasts, presents)
    found = declared(path, {"kv_inputs": list(pasts), "kv_outputs": list(presents)})
    assert found.outcome is Outcome.DECLARED
    assert found.warnings == tuple(
        f"As declared, `{name}` is {role[name]}, {taken} takes it as {other[name]}: w{KEEP}" for name in pasts
    )


def test_an_output_that_is_declared_to_be_something_else_is_no_cache_that_is_reached(tmp_path: Path) -> None:
    """Logits are computed from every cache: that a way leads there contradicts nothing, declared or not."""
    nodes = [
        *concat("past_key_values.0.key", "present.0.key"),
        helper.make_node("Identity", ["past_key_values.0.key"], ["scores"]),
        helper.make_node("Add", ["present.0.key", "w"], ["shown"]),
    ]
    pasts = {"past_key_values.0.key": GROWING}
    path = model(tmp_path / "m.onnx", nodes, pasts, {"present.0.key": GROWN, "scores": ["batch", "s", 1000]})
    block = {"kv_inputs": list(pasts), "kv_outputs": ["present.0.key"], "logits_output": "scores"}
    found = declared(path, block)
    assert found.warnings == ()
    assert because(found.topology, "present.0.key").endswith("confirmed by dataflow through Concat")


def test_the_command_warns_of_a_contradiction_and_still_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error, with the document on standard output; with `--ignore-declared` there is none."""
    two_layers(tmp_path / "model.onnx")
    io = {"kv_inputs": list(TWO_LAYERS), "kv_outputs": ["present.1.key", "present.0.key"]}
    (tmp_path / "inference_metadata.yaml").write_text(json.dumps({"model": {"io": io}}), encoding="utf-8")
    assert run(["derive", "--json", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["outcome"] == "declared"
    assert output.err.splitlines() == [
        f"onnx-parity: warning: As declared, `past_key_values.{layer}.key` goes with "
        f"`present.{1 - layer}.key`, but the graph feeds it to `present.{layer}.key`. W{KEEP}"
        for layer in (0, 1)
    ]
    derive_decoder(open_package(tmp_path), ignore_declared=False)
    assert capsys.readouterr().err == output.err
    assert run(["derive", "--json", "--ignore-declared", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert (json.loads(output.out)["outcome"], output.err) == ("derived", "")


GENAI = {
    "past_key_names": ("inputs", "past_key_values.%d.key", Role.KV_KEY),
    "past_value_names": ("inputs", "past_key_values.%d.value", Role.KV_VALUE),
    "present_key_names": ("outputs", "present.%d.key", Role.KV_KEY),
    "present_value_names": ("outputs", "present.%d.value", Role.KV_VALUE),
}


def config(**other: str) -> dict[str, Any]:
    """A `genai_config.json` with the four usual templates, of which some are others."""
    sides: dict[str, dict[str, str]] = {"inputs": {}, "outputs": {}}
    for key, (side, template, _) in GENAI.items():
        sides[side][key] = other.get(key, template)
    for key in other.keys() - GENAI.keys():
        sides["outputs" if "present" in key or key == "rnn_states" else "inputs"][key] = other[key]
    return {"model": {"decoder": sides}}


@pytest.mark.parametrize("key", GENAI)
def test_a_template_that_no_port_follows_is_said(key: str) -> None:
    """The ports are derived, and their evidence names the template and its key; others are not touched."""
    side, template, role = GENAI[key]
    direction = side.removesuffix("s")
    plain = resolve(dense_06b(layers=2), genai_config=config())
    assert plain.warnings == ()
    found = resolve(dense_06b(layers=2), genai_config=config(**{key: f"my.{template}"}))
    what = f"o {direction} is named like `my.{template}`, {key} of genai_config.json"
    assert found.warnings == (f"N{what}: it is left aside. Correct it, or remove it.",)
    assert found.topology is not None
    assert plain.topology is not None
    noted = {
        (port.name, port.direction) for port in found.topology.roles if port.because.endswith(f"; n{what}")
    }
    assert noted == {
        (port.name, port.direction)
        for port in plain.topology.roles
        if (port.role, port.direction) == (role, direction)
    }
    assert io_block(found.topology) == io_block(plain.topology)


def test_a_template_that_the_graph_contradicts_is_said(tmp_path: Path) -> None:
    """Presents configured crosswise: the graph settles which is whose, and each template has its warning."""
    kinds = ("key", "value")
    pasts = {f"past_key_values.{layer}.{kind}": GROWING for layer in (0, 1) for kind in kinds}
    presents = {f"present.{layer}.{kind}": GROWN for layer in (0, 1) for kind in kinds}
    nodes = [node for past, present in zip(pasts, presents, strict=True) for node in concat(past, present)]
    path = model(tmp_path / "m.onnx", nodes, pasts, presents)
    crosswise = {f"present_{kind}_names": f"present.%d.{other}" for kind, other in (kinds, kinds[::-1])}
    for names, warnings in (
        ({}, ()),
        (
            crosswise,
            tuple(
                f"By present_{kind}_names of genai_config.json `present.0.{other}`, `present.1.{other}` "
                f"would be kv_{kind}. Kept is kv_{other}: the graph feeds it to `present.0.{other}` through "
                "Concat. Correct the configuration."
                for kind, other in (kinds, kinds[::-1])
            ),
        ),
    ):
        found = resolve(read_ports(path), genai_config=config(**names), flow=read_cache_flow(path))
        assert found.warnings == warnings
        assert found.topology is not None
        assert found.topology.kv_outputs == tuple(presents)


def test_a_port_that_is_refused_has_no_such_warning() -> None:
    """A port of no role is in the refusal, and nothing else is kept for it."""
    inventory = dense_06b(layers=1)
    more = Port("present.7.key", "float32", ("b", 8, "t", 128))
    found = resolve(PortInventory(inventory.inputs, (*inventory.outputs, more)), genai_config=config())
    assert (found.outcome, found.warnings) == (Outcome.REFUSED, ())


@pytest.mark.parametrize(
    ("key", "direction"),
    [
        ("cross_past_key_names", "input"),
        ("cross_past_value_names", "input"),
        ("cross_present_key_names", "output"),
        ("cross_present_value_names", "output"),
    ],
)
def test_a_cross_template_that_no_port_follows_is_said(key: str, direction: str) -> None:
    """A configuration may name cross attention that the graph lacks; what it does not name is not missed."""
    side = ("cross_past_key_names", "cross_past_value_names") if direction == "output" else ()
    found = resolve(dense_06b(layers=1), genai_config=config(**dict.fromkeys((*side, key), "x.%d")))
    expected = (
        f"No {direction} is named like `x.%d`, {key} of genai_config.json: it is left aside. Correct it, or "
        "remove it."
    )
    assert expected in found.warnings
    assert len(found.warnings) == len(side) + 1


@pytest.mark.parametrize(("past", "present"), [("h.%d", "g.%d"), ("h", "g")])
def test_fused_templates_and_names_of_states(past: str, present: str) -> None:
    """A template without a port is said; a name without one is a declared port that is missing."""
    if "%d" in past:
        found = resolve(dense_06b(layers=1), genai_config=config(past_names=past, present_names=present))
        assert [warning.split(",")[0] for warning in found.warnings] == [
            "No input is named like `h.%d`",
            "No output is named like `g.%d`",
        ]
        return
    inventory = dense_06b(layers=1)
    names = config(rnn_prev_states=past, rnn_states=present)
    refusal = resolve(inventory, genai_config=names).refusal
    assert refusal is not None
    assert (refusal.code, refusal.ports) == ("E_DECLARED_PORT_MISSING", ("h", "g"))
    state = Port("h", "float32", (3, 8)), Port("g", "float32", (3, 8))
    whole = PortInventory((*inventory.inputs, state[0]), (*inventory.outputs, state[1]))
    assert resolve(whole, genai_config=names).warnings == ()
    pairs = [{"input": "h", "output": "g"}]
    other = config(rnn_prev_states="r", rnn_states="q")
    assert resolve(whole, genai_config=other, declared={"state_pairs": pairs}).outcome is Outcome.DECLARED


def test_a_contradiction_and_a_template_left_aside_are_both_said(tmp_path: Path) -> None:
    """Each is a warning of its own, whichever was found first."""
    path = two_layers(tmp_path / "m.onnx")
    crosswise = {"kv_inputs": list(TWO_LAYERS), "kv_outputs": ["present.1.key", "present.0.key"]}
    found = resolve(
        read_ports(path),
        declared=crosswise,
        genai_config=config(past_key_names="my.%d"),
        flow=read_cache_flow(path),
    )
    assert sum(warning.endswith(KEEP) for warning in found.warnings) == len(TWO_LAYERS)
    assert any(warning.startswith("No input is named like `my.%d`") for warning in found.warnings)


def test_a_refusal_keeps_its_warnings() -> None:
    """What was left aside may be why there is a refusal."""
    inventory = dense_06b(layers=1)
    odd = PortInventory((*inventory.inputs, Port("odd", "float32", (3,))), inventory.outputs)
    found = resolve(odd, genai_config=config(past_key_names="my.%d.key"))
    assert found.outcome is Outcome.REFUSED
    assert len(found.warnings) == 1


def produced(path: Path, *, weights: tuple[str, ...] = (), sparse: bool = False, also: str = "more") -> Path:
    """A decoder with one more output, which no node gives, and weights of these names."""
    two_layers(path)
    read = onnx.load(path)
    read.graph.output.append(info(also, [2, 3]))
    for name in weights:
        values = helper.make_tensor(name, TensorProto.FLOAT, [1], [1.0])
        if sparse:
            indices = helper.make_tensor(f"{name}.at", TensorProto.INT64, [1], [0])
            read.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2, 3]))
        else:
            read.graph.initializer.append(values)
    onnx.save(read, path)
    return path


@pytest.mark.parametrize("weights", [(), ("other",)])
def test_an_output_that_nothing_gives_is_refused(tmp_path: Path, weights: tuple[str, ...]) -> None:
    """Whatever its name promises; ports alone cannot tell."""
    path = produced(tmp_path / "m.onnx", weights=weights)
    assert resolve(read_ports(path)).outcome is Outcome.DERIVED
    refusal = derive(path).refusal
    assert refusal is not None
    assert (refusal.code, refusal.ports, refusal.also) == ("E_MALFORMED_PORT", ("more",), ())
    assert refusal.message == (
        "The output `more` is given by no node, and is neither an input nor a weight. Export the graph again."
    )


@pytest.mark.parametrize("name", list(BOTH_PRESENTS))
def test_a_cache_that_nothing_gives_is_refused(tmp_path: Path, name: str) -> None:
    """Names pair it all the same."""
    path = two_layers(tmp_path / "m.onnx")
    read = onnx.load(path)
    nodes = [node for node in read.graph.node if name not in node.output]
    del read.graph.node[:]
    read.graph.node.extend(nodes)
    onnx.save(read, path)
    refusal = derive(path).refusal
    assert refusal is not None
    assert (refusal.code, refusal.ports) == ("E_MALFORMED_PORT", (name,))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_weight_may_be_an_output(tmp_path: Path, sparse: bool) -> None:
    """ONNX lets a graph give an initialiser back as it is."""
    path = produced(tmp_path / "m.onnx", weights=("first", "more", "last"), sparse=sparse)
    assert derive(path).outcome is Outcome.DERIVED


def test_an_input_may_be_an_output(tmp_path: Path) -> None:
    """As it may give an input back."""
    path = produced(tmp_path / "m.onnx", also="input_ids")
    assert derive(path).outcome is Outcome.DERIVED


def with_dtype(inventory: PortInventory, role: Role, dtype: str | None) -> PortInventory:
    """The layout with all ports of one role retyped, on both sides."""
    found = resolve(inventory).topology
    assert found is not None
    names = {port.name for port in found.roles if port.role is role}
    inputs, outputs = (
        tuple(replace(port, dtype=dtype) if port.name in names else port for port in side)
        for side in (inventory.inputs, inventory.outputs)
    )
    return PortInventory(inputs, outputs)


FLOATS = [
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "float4e2m1",
    "float6e2m3",
    "float6e3m2",
    "float8e4m3fn",
    "float8e4m3fnuz",
    "float8e5m2",
    "float8e5m2fnuz",
    "float8e8m0",
]
QUANTISED = ["int8", "uint8", "int4", "uint4", "int2", "uint2"]
COUNTERS = ["int16", "uint16", "int32", "uint32", "int64", "uint64"]
IMPOSSIBLE = [
    "string",
    "bool",
    "complex64",
    "complex128",
    "sequence",
    "map",
    "optional",
    "sparse_tensor",
    "opaque",
    "type99",
]
KV = dense_06b(layers=1)
KEPT = {
    Role.KV_KEY: (KV, [*FLOATS, *QUANTISED]),
    Role.KV_VALUE: (KV, [*FLOATS, *QUANTISED]),
    Role.CROSS_KV_KEY: (whisper_cross_kv(layers=1), [*FLOATS, *QUANTISED]),
    Role.STATE: (hybrid_27b(layers=4), [*FLOATS, *QUANTISED, *COUNTERS]),
    Role.KV_SCALE: (
        PortInventory(
            (
                *KV.inputs,
                Port("past_key_values.0.key_scale", "float32", ("batch", 8, "past_sequence_len", 1)),
                Port("past_key_values.0.value_scale", "float32", ("batch", 8, "past_sequence_len", 1)),
            ),
            (
                *KV.outputs,
                Port("present.0.key_scale", "float32", ("batch", 8, "past_sequence_len + sequence_len", 1)),
                Port("present.0.value_scale", "float32", ("batch", 8, "past_sequence_len + sequence_len", 1)),
            ),
        ),
        FLOATS,
    ),
}


@pytest.mark.parametrize("role", KEPT, ids=str)
@pytest.mark.parametrize("dtype", [None, *FLOATS, *QUANTISED, *COUNTERS, *IMPOSSIBLE])
def test_a_cache_is_kept_in_numbers_that_fit_it(role: Role, dtype: str | None) -> None:
    """Of the dtypes of ONNX: keys and values in floats or few bits, states also counts, scales in floats."""
    inventory, kept = KEPT[role]
    found = resolve(with_dtype(inventory, role, dtype))
    if dtype is None or dtype in kept:
        assert found.outcome is Outcome.DERIVED
    else:
        assert found.refusal is not None
        assert (found.refusal.code, found.refusal.also) == ("E_DTYPE_MISMATCH", ())


def test_what_is_said_of_a_dtype_that_no_cache_has() -> None:
    """Both ports are named; one that is only read has no second one."""
    refusal = resolve(with_dtype(KV, Role.KV_KEY, "string")).refusal
    assert refusal is not None
    assert refusal.ports == ("past_key_values.0.key", "present.0.key")
    assert refusal.message == (
        "`past_key_values.0.key` is kv_key with the dtype string, and none is kept in that. Export it with "
        "numbers, or declare what the port is under model.io."
    )
    refusal = resolve(with_dtype(whisper_cross_kv(layers=1), Role.CROSS_KV_VALUE, "bool")).refusal
    assert refusal is not None
    assert {name.partition(".")[0] for name in refusal.ports} <= {"past_key_values", "present"}


CONTROLS = [
    "batch_ids",
    "beam",
    "beams",
    "bos",
    "cache_ids",
    "count",
    "counts",
    "duration",
    "durations",
    "eos",
    "index",
    "indices",
    "label",
    "labels",
    "language",
    "len",
    "length",
    "lengths",
    "mask",
    "num",
    "number",
    "offset",
    "offsets",
    "pad",
    "padding",
    "penalty",
    "pos",
    "position_of",
    "positions_of",
    "random",
    "rng",
    "seed",
    "seeds",
    "segment",
    "segments",
    "size",
    "sizes",
    "slot",
    "slots",
    "speaker",
    "step",
    "steps",
    "task",
    "temperature",
    "timestep",
    "timesteps",
    "tone",
    "tones",
    "top_k",
    "type",
    "types",
    "x_lens",
    "xs_lens",
    "seqlens",
    "num_tokens",
    "random_seed",
    "token_count",
    "tokens_len",
]


def with_token(name: str) -> PortInventory:
    """A decoder whose only integer input of rank 2, beside mask and positions, has this name."""
    ports = dense_06b(layers=1)
    return PortInventory(
        tuple(replace(port, name=name) if port.name == "input_ids" else port for port in ports.inputs),
        ports.outputs,
    )


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_is_no_token_input(name: str) -> None:
    """Though it has the dtype and rank of one, and nothing else has: lengths, seeds, counts and so on."""
    refusal = resolve(with_token(name)).refusal
    assert refusal is not None
    assert {refusal.code, *refusal.also} >= {"E_NO_TOKEN_INPUT"}
    assert name in refusal.ports


@pytest.mark.parametrize("name", ["x", "y", "input", "prompt", "targets", "tgt", "lenses", "stepping", "ids"])
def test_whatever_else_is_called_may_be_the_token_input(name: str) -> None:
    """The only integer input of rank 2 whose name says nothing else."""
    found = resolve(with_token(name)).topology
    assert found is not None
    assert found.token_input == name


def layers(topology: Topology) -> list[tuple[str, str, int | None]]:
    """The layer of each port."""
    return [(port.direction, port.name, port.layer) for port in topology.roles]


@pytest.mark.parametrize(
    "inventory",
    [hybrid_27b(layers=8), dense_06b(layers=3), whisper_cross_kv(layers=2), static_cache(layers=3)],
    ids=["hybrid", "dense", "whisper", "static"],
)
def test_layers_come_back_as_they_were_derived(inventory: PortInventory) -> None:
    """From what is written, and from the plain block."""
    derived = resolve(inventory).topology
    assert derived is not None
    assert any(layer is not None for _, _, layer in layers(derived))
    for block in (sidecar_of(inventory, derived, "inference-metadata")["model"]["io"], io_block(derived)):
        again = resolve(inventory, declared=block).topology
        assert again is not None
        assert layers(again) == layers(derived)


def test_layers_of_all_recorded_layouts_come_back() -> None:
    """However their exporters spell the index."""
    compared = 0
    for layout in recorded_layouts():
        derived = resolve(layout.inventory).topology
        if derived is None:
            continue
        again = resolve(layout.inventory, declared=io_block(derived)).topology
        if again is not None:
            compared += 1
            assert layers(again) == layers(derived), layout.name
    assert compared > 100


def test_layers_of_caches_that_only_the_graph_pairs_come_back(tmp_path: Path) -> None:
    """No name says which output is whose: the layer is that of the input."""
    path = model(
        tmp_path / "m.onnx",
        [*concat("past_key_values_key_cache_3", "cat_17"), *concat("past_states.5.conv", "cat_18")],
        {"past_key_values_key_cache_3": GROWING, "past_states.5.conv": STATE},
        {"cat_17": GROWN, "cat_18": STATE},
    )
    derived = derive(path).topology
    assert derived is not None
    again = resolve(read_ports(path), declared=io_block(derived)).topology
    assert again is not None
    assert layers(again) == layers(derived)
    assert {layer for _, _, layer in layers(again)} == {None, 3, 5}


def test_templates_that_only_one_side_has_are_not_written(tmp_path: Path) -> None:
    """Outputs named by a tracer have no template; the message names all ports that stay unsaid."""
    pasts = {f"past_key_values_key_cache_{layer}": GROWING for layer in (0, 1)}
    nodes = [
        *concat("past_key_values_key_cache_0", "cat_17"),
        *concat("past_key_values_key_cache_1", "cat_19"),
    ]
    path = model(tmp_path / "m.onnx", nodes, pasts, {"cat_17": GROWN, "cat_19": GROWN})
    derived = derive(path).topology
    assert derived is not None
    with pytest.raises(InputError) as caught:
        sidecar_of(read_ports(path), derived, "genai-config")
    assert caught.value.message == (
        "genai_config.json has no way to say what `past_key_values_key_cache_0`, "
        "`past_key_values_key_cache_1`, `cat_17`, `cat_19` are."
    )


def test_cross_templates_of_one_side_are_written() -> None:
    """Cross attention that is only read has no present."""
    roles = tuple(
        PortRole(f"cross.3.{role.value}", "input", role, "", layer=3)
        for role in (Role.CROSS_KV_KEY, Role.CROSS_KV_VALUE)
    )
    assert genai_config_of(Topology(roles=roles))["model"]["decoder"] == {
        "inputs": {
            "cross_past_key_names": "cross.%d.cross_kv_key",
            "cross_past_value_names": "cross.%d.cross_kv_value",
        },
        "outputs": {},
    }


@pytest.mark.parametrize("role", [Role.KV_KEY, Role.KV_VALUE])
@pytest.mark.parametrize("direction", ["input", "output"])
def test_templates_that_belong_together_are_written_together_or_not_at_all(
    role: Role, direction: Literal["input", "output"]
) -> None:
    """Where one of the four has no number for its layer, none stands there: three alone cannot be read."""
    kinds: list[tuple[Role, Literal["input", "output"]]] = [
        (Role.KV_KEY, "input"),
        (Role.KV_VALUE, "input"),
        (Role.KV_KEY, "output"),
        (Role.KV_VALUE, "output"),
    ]
    roles = tuple(
        PortRole("odd" if kind == (role, direction) else f"{kind[0]}.0", kind[1], kind[0], "", layer=0)
        for kind in kinds
    )
    assert genai_config_of(Topology(roles=roles))["model"]["decoder"] == {"inputs": {}, "outputs": {}}
