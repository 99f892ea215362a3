"""Whether a file that a package names is its own: in its folder, or in the store of a download cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["is_own"]


def is_own(folder: Path, named: str) -> bool:
    """True if `named`, relative to `folder`, is a file of the package there, be it there or not.

    As it is spelled, the name must stay within the folder. What lies under it may be a link, if that leads
    to the folder again, or into the store of the download cache that the folder is part of: Hugging Face's
    keeps `snapshots/<revision>/<file>` as a link to `blobs/<hash>` beside `snapshots`.

    Raises:
        OSError: a name that no file can have.
        RuntimeError: a loop of links.
        ValueError: a NUL character.
    """
    home = folder.resolve()
    if not Path(os.path.normpath(home / named)).is_relative_to(home):
        return False
    target = (home / named).resolve()
    return any(target.is_relative_to(place) for place in (home, *_stores(home)))


def _stores(home: Path) -> Iterator[Path]:
    """Where a download cache keeps the files of the snapshot that `home` is, or is part of."""
    for parent in home.parents:
        if parent.name == "snapshots":
            yield parent.parent / "blobs"
