"""Files that a package names: its own, in its folder or in the store of a download cache, and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from harness.errors import InputError
from harness.package import model_files, model_sha256, open_package
from harness.package.links import is_own


def graph(location: str) -> bytes:
    """A graph whose one weight is in a file of that name."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    body = helper.make_graph([], "g", [], [], initializer=[weight])
    return bytes(helper.make_model(body).SerializeToString())


def cache(root: Path, location: str = "model.onnx_data", folder: str = "") -> Path:
    """A download cache as huggingface_hub lays it out; returns the folder of its snapshot's graph."""
    repository = root / "models--org--name"
    home = repository / "snapshots" / "0a1b" / folder
    home.mkdir(parents=True)
    (repository / "blobs").mkdir()
    up = "../" * (2 + len(Path(folder).parts)) + "blobs"
    config = {"model": {"decoder": {"filename": "model.onnx"}}}
    for name, blob, content in (
        ("model.onnx", "aa", graph(location)),
        ("model.onnx_data", "bb", b"1234"),
        ("genai_config.json", "cc", json.dumps(config).encode()),
    ):
        (repository / "blobs" / blob).write_bytes(content)
        (home / name).symlink_to(f"{up}/{blob}")
    return home


@pytest.mark.parametrize("folder", ["", "onnx", "onnx/cpu"])
def test_a_snapshot_of_a_download_cache_is_a_package(tmp_path: Path, folder: str) -> None:
    """Graph, weights and configuration are links into the store; the hash is that of the files themselves."""
    home = cache(tmp_path, folder=folder)
    package = open_package(home)
    assert package.model == home / "model.onnx"
    blobs = tmp_path / "models--org--name" / "blobs"
    assert model_files(package.model) == (home / "model.onnx", (blobs / "bb").resolve())
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "model.onnx").write_bytes(graph("model.onnx_data"))
    (plain / "model.onnx_data").write_bytes(b"1234")
    assert model_sha256(package.model) == model_sha256(plain / "model.onnx")


@pytest.mark.parametrize("location", ["../../blobs/bb", "x/../../../blobs/bb", "../0a1b/../../blobs/bb"])
def test_a_location_that_leads_up_is_refused_even_into_the_store(tmp_path: Path, location: str) -> None:
    """The store holds the files of every snapshot: a model may only name what its own links name."""
    home = cache(tmp_path, location)
    with pytest.raises(InputError, match="points outside the package") as caught:
        model_files(home / "model.onnx")
    assert location in caught.value.message


@pytest.mark.parametrize("folder", ["snapshots/0a1b", "plain"])
def test_a_link_to_anywhere_else_is_refused(tmp_path: Path, folder: str) -> None:
    """Neither a file beside the cache nor one beside a plain folder belongs to the package."""
    home = tmp_path / folder
    home.mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"1234")
    (tmp_path / "snapshots" / "other").mkdir(parents=True, exist_ok=True)
    (tmp_path / "snapshots" / "other" / "file").write_bytes(b"1234")
    (home / "model.onnx").write_bytes(graph("w.bin"))
    for target in (tmp_path / "secret", tmp_path / "snapshots" / "other" / "file"):
        (home / "w.bin").unlink(missing_ok=True)
        (home / "w.bin").symlink_to(target)
        with pytest.raises(InputError, match="points outside the package"):
            model_files(home / "model.onnx")


def test_a_store_is_that_of_a_cache_only(tmp_path: Path) -> None:
    """A folder called `blobs` is no store where no `snapshots` stand beside it."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "x").touch()
    for parts, own in ((("snapshots", "r"), True), (("snapshot", "r"), False), (("snapshots",), False)):
        home = tmp_path.joinpath(*parts)
        home.mkdir(parents=True, exist_ok=True)
        (home / "x").symlink_to(tmp_path / "blobs" / "x")
        assert is_own(home, "x") is own, parts
        (home / "x").unlink()


def test_a_link_inside_the_folder_is_the_packages_own(tmp_path: Path) -> None:
    """Also one that leads to a file that is not there (yet)."""
    (tmp_path / "a").symlink_to("sub/b")
    assert is_own(tmp_path, "a")
    assert is_own(tmp_path, "sub/../a")
    assert not is_own(tmp_path, "sub/../../a")


def test_a_graph_that_is_a_link_out_of_the_package_is_said_to_be_one(tmp_path: Path) -> None:
    """Its name is in the folder, so the message speaks of where it leads."""
    home = tmp_path / "package"
    home.mkdir()
    target = tmp_path / "elsewhere.onnx"
    target.write_bytes(graph("w"))
    (home / "model.onnx").symlink_to(target)
    for named, why in (
        ("model.onnx", f"is a link out of the package, to {target.resolve()}."),
        ("../elsewhere.onnx", "lies outside the package."),
    ):
        (home / "genai_config.json").write_text(json.dumps({"model": {"decoder": {"filename": named}}}))
        with pytest.raises(InputError) as caught:
            open_package(home)
        assert caught.value.message.endswith(f"is {named!r}, which {why}")
