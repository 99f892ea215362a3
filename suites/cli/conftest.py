"""A package that several verbs are tried on."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.decoders import TinyDecoder
from fixtures.installed import install_engines


@pytest.fixture
def decoder() -> TinyDecoder:
    """What `package` holds."""
    return TinyDecoder(layers="ar", seed=3)


@pytest.fixture
def package(decoder: TinyDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny package in a folder of its own; the misbehaving engine is installed beside the usual ones."""
    install_engines(monkeypatch, misbehaving="fixtures.misbehaving:ENGINE")
    monkeypatch.setenv("ONNX_PARITY_CACHE_DIR", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    folder = tmp_path / "tiny"
    folder.mkdir()
    decoder.save(folder / "model.onnx")
    return folder
