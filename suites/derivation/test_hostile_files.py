"""Damaged and hostile `.onnx` files: a clear refusal or the right answer, never an exception or a flood.

Five models are written here and mutated with seeds; `onnx` itself is the witness for what is right where it
can still read the mutant.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper

from fixtures.bounded import BoundedProcess, kept_megabytes
from fixtures.effort import examples
from harness.errors import InputError
from harness.ports import PortInventory, read_external_files, read_ports
from harness.topology.dataflow import read_cache_flow

MUTATIONS = examples(1000)
KNOWN_TYPES = {
    number: {"float": "float32", "double": "float64"}.get(name.lower(), name.lower())
    for name, number in TensorProto.DataType.items()
}


def info(name: str, *shape: Any, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """A port."""
    return helper.make_tensor_value_info(name, kind, list(shape))


def weight(name: str, *, external: bool = False) -> TensorProto:
    """A weight of 64 bytes, or one that lies in another file."""
    if not external:
        return TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[16], raw_data=bytes(range(64)))
    tensor = TensorProto(
        name=name, data_type=TensorProto.FLOAT, dims=[16], data_location=TensorProto.EXTERNAL
    )
    tensor.external_data.add(key="location", value=f"{name}.bin")
    return tensor


def dense() -> onnx.ModelProto:
    """Ports with every sort of axis, and a chain of nodes."""
    nodes = [helper.make_node("Add", [f"v{i}", "w"], [f"v{i + 1}"]) for i in range(12)]
    inputs = [info("v0", "batch", 3), info("mask", "batch", None, kind=TensorProto.INT64), info("w", 16)]
    return helper.make_model(
        helper.make_graph(nodes, "dense", inputs, [info("v12", "batch", 3)], [weight("w")])
    )


def caches() -> onnx.ModelProto:
    """Forty cache ports and no node."""
    past = [info(f"past_key_values.{i}.key", "batch", 2, "past", 16) for i in range(20)]
    present = [info(f"present.{i}.key", "batch", 2, "past + 1", 16) for i in range(20)]
    return helper.make_model(helper.make_graph([], "caches", past, present))


def branches() -> onnx.ModelProto:
    """Subgraphs three deep."""
    inner = helper.make_graph([], "inner", [], [info("y", 1)], [weight("y", external=True)])
    for depth in range(3):
        node = helper.make_node("If", ["c"], [f"y{depth}"], then_branch=inner, else_branch=inner)
        condition = info("c", kind=TensorProto.BOOL)
        inner = helper.make_graph([node], f"g{depth}", [condition], [info(f"y{depth}", 1)])
    return helper.make_model(inner)


def functions() -> onnx.ModelProto:
    """A model-local function with a tensor of its own, and sparse weights."""
    node = helper.make_node("Constant", [], ["k"], value=weight("k", external=True))
    function = helper.make_function("local", "f", [], ["k"], [node], [helper.make_opsetid("", 21)])
    graph = helper.make_graph([], "functions", [info("x", 1)], [info("x", 1)], [weight("a", external=True)])
    sparse = helper.make_sparse_tensor(
        weight("s"), helper.make_tensor("i", TensorProto.INT64, [1], [0]), [16]
    )
    graph.sparse_initializer.append(sparse)
    return helper.make_model(graph, functions=[function])


def other_types() -> onnx.ModelProto:
    """Ports that are sequences and optionals, and metadata around the graph."""
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, ["n"])
    inputs = [
        helper.make_value_info("s", helper.make_sequence_type_proto(tensor)),
        helper.make_value_info("o", helper.make_optional_type_proto(tensor)),
    ]
    model = helper.make_model(helper.make_graph([], "types", inputs, [info("é ü", "x" * 200)]))
    helper.set_model_props(model, {"key": "value" * 20})
    return model


MODELS: tuple[Callable[[], onnx.ModelProto], ...] = (dense, caches, branches, functions, other_types)


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Flip, cut, double, or overwrite a few bytes, or plant a length that claims up to 2 GiB."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data))
        how = rng.randrange(6)
        if how == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del data[at:]
        elif how == 2:
            data[at:at] = data[at : at + rng.randint(1, 16)]
        elif how == 3:
            data[at] = rng.choice((0x00, 0x7F, 0x80, 0xFF))
        elif how == 4:
            data[at:at] = bytes.fromhex(rng.choice(("ffffffff07", "ffffffffffffffffff01", "ff" * 11)))
        else:
            del data[at : at + rng.randint(1, 8)]
        if not data:
            break
    return bytes(data)


def witness(content: bytes) -> list[tuple[str, str | None, list[Any] | None]] | None:
    """The ports as `onnx` reads them, None where it cannot."""
    try:
        graph = onnx.load_model_from_string(content).graph
        weights = {tensor.name for tensor in graph.initializer}
        weights |= {sparse.values.name for sparse in graph.sparse_initializer}
        ports = [port for port in graph.input if port.name not in weights] + list(graph.output)
        return [(port.name, *_type_of(port.type)) for port in ports]
    except (DecodeError, UnicodeDecodeError):
        return None


def _type_of(kind: onnx.TypeProto) -> tuple[str | None, list[Any] | None]:
    which = kind.WhichOneof("value")
    if which is None:
        return None, None
    if which != "tensor_type":
        return which.removesuffix("_type"), None
    number = kind.tensor_type.elem_type
    dtype = None if number == 0 else KNOWN_TYPES.get(number, f"type{number}")
    if not kind.tensor_type.HasField("shape"):
        return dtype, None
    extents = {"dim_value": lambda dim: dim.dim_value, "dim_param": lambda dim: dim.dim_param or None}
    return dtype, [
        extents[dim.WhichOneof("value")](dim) if dim.WhichOneof("value") else None
        for dim in kind.tensor_type.shape.dim
    ]


def ours(inventory: PortInventory) -> list[tuple[str, str | None, list[Any] | None]]:
    """An inventory in the form of `witness`."""
    return [
        (port.name, port.dtype, None if port.shape is None else list(port.shape))
        for port in (*inventory.inputs, *inventory.outputs)
    ]


def attempt(read: Callable[[Path], Any], path: Path) -> Any:
    """What `read` returns, or the input error that it raises; anything else fails the test."""
    try:
        return read(path)
    except InputError as error:
        return error


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_an_undamaged_model_reads_as_onnx_reads_it(
    tmp_path: Path, make: Callable[[], onnx.ModelProto]
) -> None:
    """The witness and the reader agree before anything is broken."""
    content = make().SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert ours(read_ports(path)) == witness(content)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_mutated_model_is_refused_or_read_right(
    tmp_path: Path, make: Callable[[], onnx.ModelProto]
) -> None:
    """Where both read the mutant they agree; otherwise the reader refuses, or the damage is elsewhere.

    Damage in nodes and weights goes unseen, since they are not looked at: the ports are those of the file.
    """
    content = make().SerializeToString()
    rng = random.Random(f"{make.__name__}")
    path = tmp_path / "model.onnx"
    agreed = 0
    for number in range(MUTATIONS // len(MODELS)):
        mutant = mutate(content, rng)
        path.write_bytes(mutant)
        inventory = attempt(read_ports, path)
        for error in (inventory, attempt(read_external_files, path), attempt(read_cache_flow, path)):
            if isinstance(error, InputError):
                assert str(path) in error.message
        if isinstance(inventory, InputError):
            continue
        expected = witness(mutant)
        if expected is not None:
            agreed += 1
            assert ours(inventory) == expected, f"mutation {number}"
    assert agreed > 0


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    """A base-128 integer."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def nested(number: int, depth: int) -> bytes:
    """Messages in messages, each in field `number` of the next."""
    content = b""
    for _ in range(depth):
        content = field(number, content)
    return content


def deep_attributes(depth: int) -> bytes:
    """Graphs in attributes of nodes of graphs, with a word that makes each of them be looked into."""
    content = field(10, b"location")
    for _ in range(depth):
        content = field(1, field(5, field(6, content)))
    return content


def deep_graphs(depth: int) -> bytes:
    """Bodies of If nodes, one in another."""
    content = b""
    for _ in range(depth):
        branch = field(5, field(1, b"then_branch") + field(6, content))
        content = field(1, field(4, b"If") + branch)
    return content


def identity(source: bytes, target: bytes) -> bytes:
    """A node that hands a value on."""
    return field(1, field(1, source) + field(2, target) + field(4, b"Identity"))


def axes(content: bytes) -> bytes:
    """A model with one input, whose shape has the axes in `content`."""
    return field(7, field(11, field(2, field(1, field(2, content)))))


def external(location: bytes) -> bytes:
    """A weight that lies in the file `location`."""
    return field(5, b"\x70\x01" + field(13, field(1, b"location") + field(2, location)))


HOSTILE = {
    "claims-2-gib": field(7, b"")[:1] + varint((1 << 31) - 1),
    "claims-2-to-the-64": field(7, b"")[:1] + varint((1 << 64) - 1),
    "endless-integer": b"\x3a" + b"\xff" * 64,
    "field-number-zero": b"\x02\x00",
    "unknown-wire-type": b"\x3e\x00",
    "end-without-start": b"\x3c",
    "groups-without-end": b"\x3b" * 200_000,
    "deep-groups": b"\x3b" * 200_000 + b"\x3c" * 200_000,
    "a-flood-of-empty-inputs": field(7, field(11, b"") * 150_000),
    "a-flood-of-named-inputs": field(7, b"".join(field(11, field(1, b"%05x" % i)) for i in range(100_000))),
    "a-flood-of-axes": axes(field(1, b"") * 60_000),
    "distinct-symbols": axes(b"".join(field(1, field(2, b"%x" % i)) for i in range(40_000))),
    "a-flood-of-weights": field(7, field(5, b"") * 40_000),
    "a-flood-of-nodes": field(7, field(1, b"") * 60_000),
    "deep-attributes": field(7, deep_attributes(3_000)),
    "deep-graphs": field(7, deep_graphs(3_000)),
    "a-flood-of-steps": field(7, b"".join(identity(b"%x" % i, b"%x" % (i + 1)) for i in range(40_000))),
    "deep-types": field(7, field(11, nested(2, 5_000))),
    "a-flood-of-locations": field(7, b"".join(external(b"%05x" % i) for i in range(10_000))),
    "bad-utf8": field(7, field(11, field(1, b"\xff\xfe"))),
}


@pytest.fixture(scope="module")
def bounded() -> Iterator[BoundedProcess]:
    """A process with all readers."""
    with BoundedProcess(read_ports, read_external_files, read_cache_flow, kept_megabytes) as process:
        yield process


FLOODS_OF_PORTS = frozenset({"a-flood-of-empty-inputs", "a-flood-of-named-inputs"})
FOR_DATAFLOW = ("a-flood-of-steps", "a-flood-of-nodes", "deep-graphs", "deep-attributes", "claims-2-gib")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        pytest.param(name, read, id=f"{name}-{read.__name__}")
        for name in HOSTILE
        for read in (read_ports, read_external_files)
        if read is read_ports or name not in FLOODS_OF_PORTS
    ]
    + [pytest.param(name, read_cache_flow, id=f"{name}-read_cache_flow") for name in FOR_DATAFLOW],
)
def test_a_hostile_file_costs_no_more_than_its_size_allows(
    tmp_path: Path, bounded: BoundedProcess, name: str, read: Callable[[Path], object]
) -> None:
    """Lengths that overflow, claims of gigabytes, floods of tiny messages, deep nesting: refused or read.

    Anonymous memory grows by at most twice the file plus 10 MB.
    """
    content = HOSTILE[name]
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    refused = bounded.call(read, path, limit=2 * len(content) + 10 * 2**20)
    assert not refused or str(path) in refused


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts anonymous memory towards the limit")
def test_the_limit_on_memory_bites(tmp_path: Path, bounded: BoundedProcess) -> None:
    """A reader that keeps twelve small megabytes is found out, one that keeps eight is not."""
    path = tmp_path / "megabytes"
    path.write_text("8", encoding="utf-8")
    assert bounded.call(kept_megabytes, path, limit=10 * 2**20) == ""
    path.write_text("12", encoding="utf-8")
    with pytest.raises(MemoryError):
        bounded.call(kept_megabytes, path, limit=10 * 2**20)


@pytest.mark.parametrize(
    "name",
    [
        "claims-2-gib",
        "claims-2-to-the-64",
        "endless-integer",
        "field-number-zero",
        "unknown-wire-type",
        "end-without-start",
        "groups-without-end",
        "deep-groups",
        "a-flood-of-empty-inputs",
        "bad-utf8",
    ],
)
def test_what_is_plainly_no_model_is_refused(tmp_path: Path, name: str) -> None:
    """These have no reading at all, so an answer would be invented."""
    path = tmp_path / "model.onnx"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(InputError):
        read_ports(path)
