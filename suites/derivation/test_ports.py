"""Ports are read from the file's bytes, and agree with what the `onnx` package reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from harness.errors import InputError
from harness.ports import Port, inventory_from_json, inventory_from_session, read_external_files, read_ports

SHAPES = (None, [], [1], ["batch", None, 3], [0, "a b", 7])


def tensor(name: str, *, location: str | None = None) -> TensorProto:
    """A weight of one number, in the file or beside it."""
    weight = helper.make_tensor(name, TensorProto.FLOAT, [1], [1.0])
    if location is not None:
        weight.ClearField("float_data")
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
    return weight


def save(path: Path, graph: onnx.GraphProto, **rest: Any) -> Path:
    """Write a model around `graph`."""
    onnx.save_model(helper.make_model(graph, **rest), str(path))
    return path


def test_ports_keep_name_dtype_shape_and_order(tmp_path: Path) -> None:
    """Concrete, symbolic, unnamed and zero axes, scalars and unknown ranks all come out as they went in."""
    infos = [
        helper.make_tensor_value_info(f"port é {rank}", TensorProto.FLOAT16, shape)
        for rank, shape in enumerate(SHAPES)
    ]
    graph = helper.make_graph([], "g", infos, infos[::-1])
    inventory = read_ports(save(tmp_path / "model.onnx", graph))
    expected = tuple(
        Port(f"port é {rank}", "float16", None if shape is None else tuple(shape))
        for rank, shape in enumerate(SHAPES)
    )
    assert inventory.inputs == expected
    assert inventory.outputs == expected[::-1]


def test_every_element_type_is_known(tmp_path: Path) -> None:
    """Each `TensorProto` type has a name; the names are numpy's where numpy has the type."""
    types = [kind for kind in TensorProto.DataType.values() if kind != TensorProto.UNDEFINED]
    infos = [helper.make_tensor_value_info(str(kind), kind, [1]) for kind in types]
    graph = helper.make_graph([], "g", infos, [])
    spelled = {port.name: port.dtype for port in read_ports(save(tmp_path / "m.onnx", graph)).inputs}
    for kind in types:
        name = TensorProto.DataType.Name(kind).lower()
        expected = {"float": "float32", "double": "float64"}.get(name, name)
        assert spelled[str(kind)] == expected


def test_a_port_that_is_no_tensor_says_so(tmp_path: Path) -> None:
    """Sequences and optionals are ports too, without a shape."""
    infos = [
        helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [1]),
        helper.make_value_info(
            "o", helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [1]))
        ),
    ]
    inventory = read_ports(save(tmp_path / "m.onnx", helper.make_graph([], "g", infos, [])))
    assert [(port.dtype, port.shape) for port in inventory.inputs] == [("sequence", None), ("optional", None)]


def test_weights_listed_as_inputs_are_no_ports(tmp_path: Path) -> None:
    """Old exporters list initialisers among the inputs; whoever runs the graph need not feed them."""
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "w")]
    graph = helper.make_graph([], "g", infos, [], initializer=[tensor("w")])
    assert [port.name for port in read_ports(save(tmp_path / "m.onnx", graph)).inputs] == ["x"]


def test_external_files_are_found_wherever_a_tensor_can_stand(tmp_path: Path) -> None:
    """In the graph, a subgraph, a tensor attribute and a model-local function; each file once, in order."""
    branch = helper.make_graph(
        [helper.make_node("Constant", [], ["y"], value=tensor("c", location="constant.bin"))],
        "branch",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
        initializer=[tensor("inner", location="inner.bin")],
    )
    graph = helper.make_graph(
        [helper.make_node("If", ["x"], ["z"], then_branch=branch, else_branch=branch)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.BOOL, [])],
        [],
        initializer=[tensor("a", location="a.bin"), tensor("b"), tensor("c", location="a.bin")],
    )
    function = helper.make_function(
        "local",
        "f",
        [],
        ["y"],
        [helper.make_node("Constant", [], ["y"], value=tensor("k", location="function.bin"))],
        [helper.make_opsetid("", 21)],
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(helper.make_model(graph, functions=[function]).SerializeToString())
    assert read_external_files(path) == ("constant.bin", "inner.bin", "a.bin", "function.bin")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not a complete ONNX model"),
        (b"\x08\x0a", "holds no graph"),
        (b"\x3a\xff\xff\xff\xff\x7f", "claims"),
        (b"\x3a\x04\x2a\x02\x0a\x09", "claims"),
    ],
    ids=["empty", "text", "no-graph", "huge-length", "length-beyond-parent"],
)
@pytest.mark.parametrize("read", [read_ports, read_external_files])
def test_what_is_no_model_is_refused_with_its_path(
    tmp_path: Path, read: Any, content: bytes, says: str
) -> None:
    """The error names the file, says what is wrong, and what to do."""
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read(path)
    assert str(path) in error.value.message
    assert says in error.value.message
    assert error.value.next_action


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    """No prefix of a model passes for the model: the graph is one field, and its length is checked."""
    infos = [helper.make_tensor_value_info(f"p{i}", TensorProto.INT64, ["n", i]) for i in range(4)]
    graph = helper.make_graph([helper.make_node("Add", ["p0", "p1"], ["s"])], "g", infos, infos)
    model = helper.make_model(graph)
    model.ClearField("opset_import")  # so that the graph is what the file ends with
    content = model.SerializeToString()
    path = tmp_path / "model.onnx"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(InputError):
            read_ports(path)
    path.write_bytes(content)
    assert [port.name for port in read_ports(path).inputs] == ["p0", "p1", "p2", "p3"]


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    """What cannot be opened is an input error, not a traceback."""
    for path in (tmp_path / "absent.onnx", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_ports(path)


class Argument:
    """A port as ONNX Runtime's session reports it."""

    def __init__(self, name: str, kind: str, shape: list[Any] | None) -> None:
        self.name, self.type, self.shape = name, kind, shape


class Session:
    """A session with ports of every sort."""

    def get_inputs(self) -> list[Argument]:
        """Tensors with every sort of axis, one whose axis is no axis, and one without a shape."""
        return [
            Argument("x", "tensor(double)", ["n", None, 3, 2.5]),
            Argument("h", "tensor(float)", None),
            Argument("i", "tensor(int64)", []),
        ]

    def get_outputs(self) -> list[Argument]:
        """A tensor, a sequence, a map and an optional."""
        return [
            Argument("y", "tensor(float8e4m3fn)", []),
            Argument("s", "seq(tensor(float))", []),
            Argument("m", "map(string,tensor(float))", None),
            Argument("o", "optional(tensor(float))", None),
        ]


def test_a_session_is_read_by_duck_typing() -> None:
    """Runtime spellings of element types become numpy's."""
    inventory = inventory_from_session(Session())
    assert inventory.inputs == (
        Port("x", "float64", ("n", None, 3, None)),
        Port("h", "float32", None),
        Port("i", "int64", ()),
    )
    assert [(port.name, port.dtype) for port in inventory.outputs] == [
        ("y", "float8e4m3fn"),
        ("s", "sequence"),
        ("m", "map"),
        ("o", "optional"),
    ]


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ([], "the document"),
        ({}, "ports"),
        ({"ports": {"inputs": "x", "outputs": []}}, "ports.inputs"),
        ({"ports": {"inputs": [{"name": 1}], "outputs": []}}, "ports.inputs[0].name"),
        ({"ports": {"inputs": [], "outputs": [{"name": "x", "dtype": 1}]}}, "ports.outputs[0].dtype"),
        ({"ports": {"inputs": [{"name": "x", "shape": [True]}], "outputs": []}}, "ports.inputs[0].shape[0]"),
        ({"ports": {"inputs": [], "outputs": []}, "declared": []}, "declared"),
    ],
)
def test_a_broken_inventory_is_refused_at_its_place(document: Any, place: str) -> None:
    """The message names the document and the field."""
    with pytest.raises(InputError) as error:
        inventory_from_json(document, source="ports.json")
    assert f"ports.json: {place} must be" in error.value.message


def test_an_inventory_is_read_as_it_is_written() -> None:
    """Every field, null or not, in order, on both sides; what is declared comes beside it."""
    document = {
        "ports": {
            "inputs": [
                {"name": "a", "dtype": "int64", "shape": ["b", 2, None]},
                {"name": "c", "dtype": None, "shape": []},
                {"name": "d", "dtype": "float16", "shape": None},
            ],
            "outputs": [{"name": "e"}],
        },
        "declared": {"token_input": "a"},
    }
    inventory, declared = inventory_from_json(document)
    assert inventory.inputs == (
        Port("a", "int64", ("b", 2, None)),
        Port("c", None, ()),
        Port("d", "float16", None),
    )
    assert inventory.outputs == (Port("e", None, None),)
    assert declared == {"token_input": "a"}
    assert inventory_from_json({"ports": document["ports"]})[1] is None


@pytest.mark.parametrize("read", [read_ports, read_external_files])
def test_the_error_for_a_broken_model_reads_as_committed(tmp_path: Path, read: Any) -> None:
    """The file, what is wrong with it, and what to do."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x3a\x05\x5a")
    with pytest.raises(InputError) as error:
        read(path)
    assert error.value.message.startswith(f"{path} is not a complete ONNX model: ")
    assert error.value.next_action == (
        "Export or download the file again; compare its size with the original's."
    )
