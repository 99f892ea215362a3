"""What a built-in package is, and how it gets into the user's cache: once, whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from harness.errors import InputError

__all__ = ["CACHE_VARIABLE", "BuiltinPackage", "BuiltinPrompt", "cache_dir", "write_once"]

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


@dataclass(frozen=True, slots=True)
class BuiltinPackage:
    """A package that comes with the command, written on the fly.

    Attributes:
        name: on the command line.
        description: one line for people.
        prompts: what it is decoded on unless the user says otherwise.
        max_new_tokens: how many tokens each prompt is continued by unless the user says otherwise.
        content_version: part of the folder name; another content has another version.
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
        return write_once(folder, self.write)
