"""What a built-in package is, and how it gets into the user's cache: once, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from harness.errors import InputError
from harness.package import model_sha256

__all__ = ["CACHE_VARIABLE", "BuiltinPackage", "BuiltinPrompt", "cache_dir", "write_once"]

_ABANDONED_S = 24 * 3600

CACHE_VARIABLE = "ONNX_PARITY_CACHE_DIR"
"""Environment variable that names the cache folder instead of the platform's usual place."""

BuiltinPrompt: TypeAlias = str | tuple[int, ...]
"""A text, for packages with a tokenizer, or token IDs."""


def cache_dir() -> Path:
    """The folder for everything that we write once and read often; it need not exist yet."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return platformdirs.user_cache_path("onnx-parity")


def write_once(folder: Path, write: Callable[[Path], object]) -> Path:
    """Make sure that `folder` exists with what `write` puts into it, and return it.

    `write` gets an empty folder beside the final one, which is renamed when it is done: a reader never
    sees half a package, and of several processes that write at the same time one wins and the others
    take its result. An existing `folder` is returned as it is.

    Raises:
        InputError: the place cannot be written to.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise InputError(
            f"The cache folder {folder.parent} cannot be written to: {error.strerror or error}.",
            next_action=f"Set {CACHE_VARIABLE} to a folder that you may write to.",
        ) from error
    try:
        write(staging)
        try:
            staging.rename(folder)
        except OSError:
            # A folder that is not empty is never replaced: another process was faster, and wrote the
            # same content. Anything else is a failure of the disk or of access rights.
            if not folder.is_dir():
                raise
    except OSError as error:
        raise InputError(
            f"Writing {folder} failed: {error.strerror or error}.",
            next_action=f"Make room there, or set {CACHE_VARIABLE} to another folder.",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _remove_abandoned(folder: Path) -> None:
    """Remove what writers left behind that were killed: staging folders of more than a day."""
    for staging in folder.parent.glob(f".{folder.name}.*"):
        with contextlib.suppress(OSError):
            if time.time() - staging.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(staging, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class BuiltinPackage:
    """A package that comes with the command, written on the fly.

    Attributes:
        name: on the command line.
        description: one line for people.
        prompts: what it is decoded on unless the user says otherwise.
        max_new_tokens: how many tokens each prompt is continued by unless the user says otherwise.
        content_version: start of the SHA-256 of the graph with its data, and part of the folder name.
        write: puts the package into an empty folder, the same bytes each time.
    """

    name: str
    description: str
    prompts: tuple[BuiltinPrompt, ...]
    max_new_tokens: int
    content_version: str
    write: Callable[[Path], object]

    def materialise(self) -> Path:
        """The package's folder in the cache, written first where it is not there yet.

        Raises:
            InputError: the cache cannot be written to, or `write` lacks something (it says what).
        """
        folder = cache_dir() / "packages" / f"{self.name}-{self.content_version}"
        if folder.is_dir() and not self._is_whole(folder):
            # Damaged since it was written: nothing in it is the user's, so it is written anew.
            try:
                shutil.rmtree(folder)
            except OSError as error:
                raise InputError(
                    f"{folder} is damaged and cannot be removed: {error.strerror or error}.",
                    next_action=f"Remove it, or set {CACHE_VARIABLE} to another folder.",
                ) from error
        return write_once(folder, self.write)

    def _is_whole(self, folder: Path) -> bool:
        """Whether the graph and its data have the bytes that they were written with (see `model_sha256`)."""
        try:
            return model_sha256(folder / "model.onnx", cache=cache_dir()).startswith(self.content_version)
        except InputError:
            return False
