"""Built-in packages, written on the fly."""

from __future__ import annotations

from harness.models.builtin import BuiltinPackage

__all__ = ["BUILTIN_NAMES", "builtin_package"]

_FACTORIES: dict[str, str] = {
    # Name on the command line: module and function that gives its `BuiltinPackage`. The modules load
    # on demand, and import numpy and onnx only when they write.
    "demo": "harness.models.demo:demo_package",
    "demo-ops": "harness.models.demo_ops:demo_ops_package",
    "smollm2": "harness.models.smollm2:smollm2_package",
    "smollm2-int4": "harness.models.smollm2:smollm2_int4_package",
}

BUILTIN_NAMES: tuple[str, ...] = tuple(_FACTORIES)
"""Names that `onnx-parity` takes in place of a model folder."""


def builtin_package(name: str) -> BuiltinPackage | None:
    """The built-in package called `name`, or None where there is none; nothing is written yet."""
    location = _FACTORIES.get(name)
    if location is None:
        return None
    from importlib import import_module

    module, _, function = location.partition(":")
    package = getattr(import_module(module), function)()
    if not isinstance(package, BuiltinPackage):
        raise TypeError(f"{location} gave {package!r} where a BuiltinPackage is due.")
    return package
