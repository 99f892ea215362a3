"""Execution providers that ONNX Runtime loads from a library of their own."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.errors import InputError

__all__ = ["plugin_devices"]


def plugin_devices(runtime: Any, *, engine: str, library: str, provider: str) -> list[Any]:
    """The devices on which `provider` of `library` can run, each an `OrtEpDevice`; at least one.

    Loading a library runs its code, in this process.

    Args:
        runtime: the module `onnxruntime`.
        engine: the engine's name, for messages.
        library: path of the library; empty where none was given.
        provider: name of the provider; empty where none was given.

    Raises:
        InputError: one is given without the other, the file is no provider library, or has no such provider.
    """
    if not library:
        raise InputError(
            f"{engine}: provider={provider} comes from no library.",
            next_action=f"Write {engine}:provider={provider},library=PATH.",
        )
    path = str(Path(library).absolute())
    _register(runtime, engine, path)
    # A device carries the path that it was registered by.
    found = [device for device in runtime.get_ep_devices() if _library_of(device) == path]
    chosen = [device for device in found if device.ep_name == provider]
    if not chosen:
        names = ", ".join(sorted({device.ep_name for device in found}))
        what = (
            f"has no provider {provider!r} that can run here" if provider else "needs the name of a provider"
        )
        raise InputError(
            f"{engine}: library={library} {what}.",
            next_action=f"It offers: {names}." if names else "It offers none on this machine.",
        )
    return chosen


@lru_cache
def _register(runtime: Any, engine: str, path: str) -> None:
    """Load a library, once a process: ONNX Runtime refuses to do it twice, and keeps it to the end."""
    try:
        runtime.register_execution_provider_library(path, path)
    except Exception as error:  # ONNX Runtime raises RuntimeError and ten classes of its own
        text = " ".join(str(error).split())
        raise InputError(
            f"{engine}: library={path} is no library of an execution provider: {text}",
            next_action="Give the path of the shared library, as its distribution names it.",
        ) from error


def _library_of(device: Any) -> str:
    return str(device.ep_metadata.get("library_path", ""))
