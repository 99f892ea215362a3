"""A copy of what the derivation tests need, to be mutated in place of the checkout."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["ROOT", "copy_tree"]

ROOT = Path(__file__).parents[2]
_PARTS = ("harness", "fixtures", "suites/derivation", "suites/mutation", "docs", "reports/schemas")
_IGNORED = shutil.ignore_patterns("__pycache__", ".*")


def copy_tree(target: Path) -> None:
    """Make `target` like the checkout, as far as the derivation and its tests go.

    Modification times are kept, so that what did not change does not look changed. Files that the checkout
    no longer has are deleted; anything else in `target` is left alone.
    """
    for part in _PARTS:
        _remove_strangers(ROOT / part, target / part)
        shutil.copytree(ROOT / part, target / part, dirs_exist_ok=True, ignore=_IGNORED)
    shutil.copy2(ROOT / "pyproject.toml", target / "pyproject.toml")


def _remove_strangers(source: Path, copy: Path) -> None:
    for path in copy.rglob("*") if copy.is_dir() else ():
        if path.is_file() and not (source / path.relative_to(copy)).is_file():
            path.unlink()
