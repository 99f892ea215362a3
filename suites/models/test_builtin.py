"""Built-in packages are written into the user's cache once, whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread

import pytest

import harness
from fixtures.decoders import TinyDecoder
from harness.errors import InputError
from harness.models import BUILTIN_NAMES, builtin_package
from harness.models.builtin import CACHE_VARIABLE, BuiltinPackage, cache_dir, write_once
from harness.package import model_sha256

FIRST, SECOND = TinyDecoder(seed=1), TinyDecoder(seed=2)


def test_each_name_gives_its_own_package() -> None:
    """Every built-in name gives a package of that name with something to decode; other names give None."""
    assert "demo" in BUILTIN_NAMES
    for name in BUILTIN_NAMES:
        package = builtin_package(name)
        assert package is not None
        assert package.name == name
        assert package.prompts
        assert package.max_new_tokens > 0
    assert builtin_package("no-such-package") is None


def test_knowing_a_package_imports_nothing_heavy() -> None:
    """Neither the table nor a package's description imports numpy or onnx: `--help` must stay quick."""
    code = (
        "import sys; from harness.models import builtin_package; builtin_package('demo');"
        "print(sorted({'numpy', 'onnx', 'onnxruntime', 'platformdirs'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_demo_reads_no_file_beside_its_code(tmp_path: Path) -> None:
    """The code alone is enough, as in an installed wheel: here it runs from an archive, without files."""
    archive = tmp_path / "code.zip"
    root = Path(harness.__file__).parent
    with zipfile.ZipFile(archive, "w") as bundle:
        for file in root.rglob("*.py"):
            bundle.write(file, file.relative_to(root.parent))
    code = (
        f"import sys; sys.path.insert(0, {str(archive)!r}); import harness;"
        "from harness.models import builtin_package; print(harness.__file__);"
        "print(builtin_package('demo').materialise())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={CACHE_VARIABLE: str(tmp_path / "cache")},
    )
    source, folder = done.stdout.splitlines()
    assert source.startswith(str(archive))
    assert sorted(file.name for file in Path(folder).iterdir()) == ["model.onnx", "model.onnx.data"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltinPackage:
    """A package of one file, with its cache in a folder of the test."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return _package(FIRST)


def _package(decoder: TinyDecoder, write: Callable[[Path], object] | None = None) -> BuiltinPackage:
    """A package of one graph; `write` does something else than it should."""
    with tempfile.TemporaryDirectory() as folder:
        version = model_sha256(decoder.save(Path(folder) / "model.onnx"))[:12]
    return BuiltinPackage(
        name="tiny",
        description="One file.",
        prompts=((1, 2),),
        max_new_tokens=1,
        content_version=version,
        write=write or (lambda folder: decoder.save(folder / "model.onnx")),
    )


def test_it_is_written_once(package: BuiltinPackage) -> None:
    """The second call finds the first one's folder and writes nothing."""
    folder = package.materialise()
    (folder / "mark").write_text("kept")
    assert package.materialise() == folder
    assert (folder / "mark").read_text() == "kept"


@pytest.mark.parametrize(
    "damage",
    [
        lambda model: model.unlink(),
        lambda model: model.write_bytes(model.read_bytes()[:-9]),
        lambda model: model.write_bytes(b""),
        lambda model: model.write_bytes(model.read_bytes()[::-1]),
        lambda model: SECOND.save(model),
    ],
    ids=["deleted", "truncated", "emptied", "garbled", "replaced"],
)
def test_a_damaged_package_is_written_anew(package: BuiltinPackage, damage: Callable[[Path], object]) -> None:
    """What is decoded under a built-in name is what that name means, whatever happened to the cache."""
    model = package.materialise() / "model.onnx"
    whole = model.read_bytes()
    damage(model)
    assert package.materialise() / "model.onnx" == model
    assert model.read_bytes() == whole


def test_what_killed_writers_left_behind_is_removed_in_time(package: BuiltinPackage) -> None:
    """A staging folder of today may be in use; one of more than a day is not."""
    packages = cache_dir() / "packages"
    old, new = (
        packages / f".tiny-{package.content_version}.old",
        packages / f".tiny-{package.content_version}.new",
    )
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    package.materialise()
    assert not old.exists()
    assert new.exists()


def test_another_content_has_another_folder(package: BuiltinPackage) -> None:
    """A newer release with other content does not use what an older one left in the cache."""
    older = package.materialise()
    newer = _package(SECOND).materialise()
    assert older != newer
    assert (older / "model.onnx").read_bytes() != (newer / "model.onnx").read_bytes()


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), ValueError("broken")])
def test_an_interrupted_write_leaves_nothing(package: BuiltinPackage, stop: BaseException) -> None:
    """Whatever ends the writing, no half-written folder remains, and the next call writes it whole."""

    def write(folder: Path) -> None:
        (folder / "model.onnx").write_text("half")
        raise stop

    with pytest.raises(type(stop)):
        _package(FIRST, write).materialise()
    assert list((cache_dir() / "packages").iterdir()) == []
    assert (package.materialise() / "model.onnx").read_text(errors="replace") != "half"


def test_writers_at_the_same_time_share_one_result(tmp_path: Path) -> None:
    """Of writers that all began before any had finished one wins; nobody fails, nothing is left over."""
    barrier = Barrier(4)
    target = tmp_path / "packages" / "tiny-1"
    results: list[Path] = []

    def write(folder: Path) -> None:
        (folder / "model.onnx").write_text("content")
        barrier.wait(timeout=30)

    threads = [Thread(target=lambda: results.append(write_once(target, write))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [target] * 4
    assert list(target.parent.iterdir()) == [target]
    assert (target / "model.onnx").read_text() == "content"


def test_a_cache_that_cannot_be_written_names_the_variable(
    package: BuiltinPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the folder and the variable that moves it."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv(CACHE_VARIABLE, str(blocked))
    with pytest.raises(InputError) as caught:
        package.materialise()
    assert str(blocked) in caught.value.message
    assert CACHE_VARIABLE in caught.value.next_action


def test_a_full_disk_is_the_users_to_know(package: BuiltinPackage) -> None:
    """An operating-system error while writing is reported with the folder, not as a traceback."""

    def write(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match=r"tiny-[0-9a-f]+ failed: No space left on device"):
        _package(FIRST, write).materialise()


def test_an_empty_variable_means_the_usual_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unset and empty are the same; a relative folder is taken from where the command runs."""
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    usual = cache_dir()
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert cache_dir() == usual
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, "here")
    assert cache_dir() == tmp_path / "here"
