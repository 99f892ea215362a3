from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from harness.errors import EngineFailedError, InputError
from harness.oracle import OracleModel
from harness.oracle.weights import TensorReader

ROWS, WIDTH = 4096, 256


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A graph with the 4-MB weight `table` in `weights.bin`, gathered from and multiplied with."""
    folder = tmp_path / "package"
    folder.mkdir()
    table = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    (folder / "weights.bin").write_bytes(b"\0" * 64 + table.tobytes())
    write_graph(folder / "model.onnx", location="weights.bin", offset="64", length=str(table.nbytes))
    return folder


def write_graph(path: Path, **entries: str) -> None:
    """`picked` is rows of `table`, `product` is x @ table^T; `entries` say where the table is."""
    tensor = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=[ROWS, WIDTH])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "rows"], ["picked"]),
            helper.make_node("Transpose", ["table"], ["turned"]),
            helper.make_node("MatMul", ["x", "turned"], ["product"]),
        ],
        "g",
        [
            helper.make_tensor_value_info("rows", TensorProto.INT64, ["n"]),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, WIDTH]),
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("picked", "product")],
        [tensor],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10), path)


def test_external_weights_are_mapped_and_never_copied(package: Path) -> None:
    """Loading, gathering rows and multiplying allocate a fraction of the weight that they use."""
    feeds = {"rows": np.array([0, ROWS - 1]), "x": np.ones((1, WIDTH), np.float32)}
    OracleModel.load(package / "model.onnx").run(feeds, ["picked", "product"])
    tracemalloc.start()
    results = OracleModel.load(package / "model.onnx").run(feeds, ["picked", "product"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(results["picked"][1], np.arange((ROWS - 1) * WIDTH, ROWS * WIDTH))
    assert results["product"].shape == (1, ROWS)
    assert peak < ROWS * WIDTH * 4 / 20


def test_a_link_may_lead_to_a_store_beside_the_model_file(package: Path, tmp_path: Path) -> None:
    """Download caches keep both files elsewhere under other names and put links into the package."""
    store, links = tmp_path / "store", tmp_path / "links"
    store.mkdir()
    links.mkdir()
    for name, stored in (("model.onnx", "a1b2"), ("weights.bin", "c3d4")):
        (package / name).rename(store / stored)
        (links / name).symlink_to(store / stored)
    feeds = {"rows": np.array([1])}
    picked = OracleModel.load(links / "model.onnx").run(feeds, ["picked"])["picked"]
    np.testing.assert_array_equal(picked[0], np.arange(WIDTH, 2 * WIDTH))


def break_missing(package: Path) -> None:
    """The external file is not there."""
    (package / "weights.bin").unlink()


def break_short(package: Path) -> None:
    """The external file was cut."""
    os.truncate(package / "weights.bin", 1000)


def break_empty(package: Path) -> None:
    """The external file is empty."""
    os.truncate(package / "weights.bin", 0)


def break_above(package: Path) -> None:
    """The location leads up and out."""
    (package / "weights.bin").rename(package.parent / "weights.bin")
    write_graph(package / "model.onnx", location="../weights.bin", offset="64")


def break_absolute(package: Path) -> None:
    """The location is absolute, though it leads into the package."""
    write_graph(package / "model.onnx", location=str(package / "weights.bin"), offset="64")


def break_link(package: Path) -> None:
    """The location is a link that leads out of the package."""
    (package / "weights.bin").rename(package.parent / "elsewhere.bin")
    (package / "weights.bin").symlink_to(package.parent / "elsewhere.bin")


def break_no_location(package: Path) -> None:
    """The tensor is external and says not where."""
    write_graph(package / "model.onnx", offset="64")


def break_length(package: Path) -> None:
    """The length is not that of the shape."""
    write_graph(package / "model.onnx", location="weights.bin", offset="64", length="128")


def break_offset(package: Path) -> None:
    """The offset is no number."""
    write_graph(package / "model.onnx", location="weights.bin", offset="sixty")


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (break_missing, r"weights\.bin, which holds tensor table, cannot be read: No such file"),
    "short": (
        break_short,
        r"weights\.bin ends at byte 1000, but tensor table of model\.onnx lies at bytes 64",
    ),
    "empty": (break_empty, r"weights\.bin ends at byte 0, but tensor table"),
    "above": (break_above, r"table of model\.onnx keeps its data in \.\./weights\.bin, which is outside"),
    "absolute": (break_absolute, r"table of model\.onnx keeps its data in /.*, which is outside"),
    "link": (break_link, r"table of model\.onnx keeps its data in weights\.bin, which is outside"),
    "no location": (break_no_location, r"table of model\.onnx keeps its data in no file"),
    "length": (break_length, r"Tensor table of model\.onnx cannot be read: it has 128 bytes where"),
    "offset": (break_offset, r"Tensor table of model\.onnx cannot be read: offset or length"),
}


@pytest.mark.parametrize(("broken", "message"), BROKEN.values(), ids=BROKEN)
def test_an_external_file_that_cannot_be_used_is_named_with_its_tensor(
    broken: Callable[[Path], None], message: str, package: Path
) -> None:
    """One line that names file and tensor, when the graph is loaded."""
    broken(package)
    with pytest.raises(InputError, match=message) as caught:
        OracleModel.load(package / "model.onnx")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 0.99])
def test_a_truncated_graph_is_an_error_of_the_file(share: float, package: Path) -> None:
    """Wherever the file ends: one line that names it, and no traceback of the parser."""
    path = package / "model.onnx"
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(InputError, match=r"model\.onnx .* truncated"):
        OracleModel.load(path)


def test_a_missing_graph_and_a_file_of_something_else_are_errors_of_the_file(tmp_path: Path) -> None:
    """No file, a folder, and text instead of a graph."""
    (tmp_path / "text.onnx").write_text("This is not a graph.")
    for path in (tmp_path / "none.onnx", tmp_path, tmp_path / "text.onnx"):
        with pytest.raises(InputError, match=str(path)):
            OracleModel.load(path)


def test_all_that_the_oracle_lacks_is_one_error_before_anything_runs(tmp_path: Path) -> None:
    """Operator, domain, version and node of each lack, those in subgraphs and functions too."""
    branch = {
        name: helper.make_graph(
            [helper.make_node("Det", ["x"], ["b"], name="hidden")],
            name,
            [],
            [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)],
        )
        for name in ("then_branch", "else_branch")
    }
    function = helper.make_function(
        "own",
        "Own",
        ["x"],
        ["y"],
        [helper.make_node("Unheard", ["x"], ["y"], domain="com.example", name="inner")],
        [helper.make_opsetid("com.example", 3)],
    )
    graph = helper.make_graph(
        [
            helper.make_node("If", ["flag"], ["a"], name="choice", **branch),
            helper.make_node("Own", ["x"], ["b"], name="call", domain="own"),
            helper.make_node("Neg", ["b"], ["c"]),
        ],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2]),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("a", "c")],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("own", 1)]
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=10), path)

    with pytest.raises(EngineFailedError) as caught:
        OracleModel.load(path)

    assert caught.value.kind == "unsupported"
    assert caught.value.message == (
        "The oracle lacks what this graph needs: operator Det of domain ai.onnx (opset 24, operator version "
        "22) at node choice.else_branch/hidden and 1 more; operator Unheard of domain com.example (opset 3, "
        "operator version 3) at node call/inner."
    )


def test_a_gemm_of_no_matrix_is_named_when_it_is_planned(tmp_path: Path) -> None:
    """A constant B of rank 1 breaks the operator's rule; onnx's checker does not see it."""
    node = helper.make_node("Gemm", ["x", "w"], ["y"], name="flat")
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    weight = onnx.numpy_helper.from_array(np.ones(4, np.float32), "w")
    graph = helper.make_graph([node], "g", ports[:1], ports[1:], initializer=[weight])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10), path)
    with pytest.raises(EngineFailedError, match=r"Gemm.*B of rank 1.*flat"):
        OracleModel.load(path)


def test_a_version_that_nobody_has_read_is_not_claimed(tmp_path: Path) -> None:
    """Slice had its bounds as attributes before version 10; that form is unsupported, not misread."""
    node = helper.make_node("Slice", ["x"], ["y"], starts=[0], ends=[1], name="old")
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph([node], "g", ports[:1], ports[1:])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=4), path)
    with pytest.raises(
        EngineFailedError, match=r"Slice of domain ai.onnx \(opset 9, operator version 1\) at node old"
    ):
        OracleModel.load(path)


def tensors() -> dict[str, Any]:
    """One tensor of each element type, 3 x 5 as 4-bit types end within a byte."""
    random = np.random.RandomState(5)
    found = {}
    for name, elem_type in TensorProto.DataType.items():
        if elem_type in (TensorProto.UNDEFINED, TensorProto.STRING):
            continue
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(elem_type))
        values = random.randint(-2, 2, (3, 5)) if "uint" not in dtype.name else random.randint(0, 4, (3, 5))
        found[name] = values.astype(dtype)
    return found


@pytest.mark.parametrize(("name", "array"), tensors().items(), ids=tensors())
@pytest.mark.parametrize("place", ["raw", "external"])
def test_every_element_type_is_read_as_onnx_reads_it(
    name: str, array: np.ndarray, place: str, tmp_path: Path
) -> None:
    """Bits in the file to values, packed types of 2 and 4 bits included."""
    tensor = numpy_helper.from_array(array, name)
    assert tensor.HasField("raw_data")
    if place == "external":
        (tmp_path / "w.bin").write_bytes(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="w.bin")
    read = TensorReader(tmp_path / "m.onnx").array(tensor)
    assert (read.dtype, read.shape) == (array.dtype, array.shape)
    assert read.tobytes() == array.tobytes()
