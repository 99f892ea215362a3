"""Graph ports: names, dtypes and shapes of a graph's inputs and outputs.

Reading them needs neither numpy nor a runtime, and neither weights nor nodes are parsed. An inventory
comes from an `.onnx` file, from an engine's session, or from JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from harness.errors import InputError, shown
from harness.onnx_file import open_model
from harness.wire import WireError

__all__ = [
    "Dimension",
    "Port",
    "PortInventory",
    "inventory_from_json",
    "inventory_from_session",
    "read_external_files",
    "read_ports",
]

_Parsed = TypeVar("_Parsed")

Dimension: TypeAlias = int | str | None
"""One axis of a shape: concrete (int), or symbolic (a name, or None where it has none)."""


@dataclass(frozen=True, slots=True)
class Port:
    """A named graph input or output.

    Attributes:
        name: as in the graph.
        dtype: element type in numpy's spelling (`float32`, `int64`, `bool`, `bfloat16`,
            `float8e4m3fn`, ...); None where the graph does not say. A port that is no tensor has
            `sequence`, `map`, `optional`, `sparse_tensor` or `opaque`.
        shape: one `Dimension` an axis; None where the graph does not say even the rank.
    """

    name: str
    dtype: str | None = None
    shape: tuple[Dimension, ...] | None = None


@dataclass(frozen=True, slots=True)
class PortInventory:
    """All ports of a graph, in graph order. Initialisers that are also listed as inputs are left out."""

    inputs: tuple[Port, ...] = ()
    outputs: tuple[Port, ...] = ()


def read_ports(path: Path | str) -> PortInventory:
    """Read the ports of an `.onnx` file, of any size, without parsing its nodes or weights.

    Raises:
        InputError: the file cannot be read, or is no ONNX model.
    """
    with open_model(path) as model:
        inputs, outputs = _parsed(path, lambda: model.ports(Port))
    return PortInventory(tuple(inputs), tuple(outputs))


def read_external_files(path: Path | str) -> tuple[str, ...]:
    """Locations of the external data files that a model names, as written, each once, in file order.

    Looks at the initialisers of the graph and of its subgraphs, at tensor attributes, and into
    model-local functions. Whether the files exist, or lie inside the package, is not checked here.

    Raises:
        InputError: the file cannot be read, or is no ONNX model.
    """
    with open_model(path) as model:
        return _parsed(path, model.external_locations)


def inventory_from_json(
    document: Any, *, source: str = "port inventory"
) -> tuple[PortInventory, Mapping[str, Any] | None]:
    """Read `{"ports": {"inputs": [{"name", "dtype", "shape"}], "outputs": [...]}, "declared": {...}}`.

    `dtype`, `shape` and each of its axes may be null; `declared` (an `io` block) may be absent. Returns
    the inventory and what is declared. `source` names the document in errors.

    Raises:
        InputError: a field is missing or has another type; the message gives its place.
    """
    try:
        return _inventory_and_declared(document)
    except _MisfitError as error:
        raise InputError(
            f"{source}: {error}.",
            next_action='Write {"ports": {"inputs": [{"name", "dtype", "shape"}], "outputs": [...]}}.',
        ) from error


class _MisfitError(ValueError):
    """A field of a port inventory that has the wrong type; the message gives its place."""


def _inventory_and_declared(document: Any) -> tuple[PortInventory, Mapping[str, Any] | None]:
    body = _mapping(document, "the document")
    ports = _mapping(body.get("ports"), "ports")
    declared = body.get("declared")
    if declared is not None:
        declared = _mapping(declared, "declared")
    inventory = PortInventory(
        inputs=_ports_from_json(ports.get("inputs"), "ports.inputs"),
        outputs=_ports_from_json(ports.get("outputs"), "ports.outputs"),
    )
    return inventory, declared


def inventory_from_session(session: Any) -> PortInventory:
    """Read the ports that a runtime's session reports, by duck typing.

    `session` offers `get_inputs()` and `get_outputs()`; each item has `name`, `shape`, and `type` such
    as `tensor(float)`, in the manner of ONNX Runtime's `NodeArg`.
    """
    return PortInventory(
        inputs=tuple(_port_from_argument(argument) for argument in session.get_inputs()),
        outputs=tuple(_port_from_argument(argument) for argument in session.get_outputs()),
    )


_RUNTIME_TYPES = {
    "float": "float32",
    "double": "float64",
}
"""Element types that ONNX Runtime spells otherwise than numpy; all others are alike."""


def _port_from_argument(argument: Any) -> Port:
    kind = str(argument.type)
    element = kind.removeprefix("tensor(").removesuffix(")")
    if not kind.startswith("tensor("):
        element = {"seq": "sequence"}.get(kind.partition("(")[0], kind.partition("(")[0])
    shape = argument.shape
    return Port(
        name=str(argument.name),
        dtype=_RUNTIME_TYPES.get(element, element),
        shape=None
        if shape is None
        else tuple(axis if isinstance(axis, int | str) else None for axis in shape),
    )


def _parsed(path: Path | str, parse: Callable[[], _Parsed]) -> _Parsed:
    try:
        return parse()
    except WireError as error:
        raise InputError(
            f"{path} is not a complete ONNX model: {error}.",
            next_action="Export or download the file again; compare its size with the original's.",
        ) from error


def _mapping(value: object, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _misfit(place, "an object", value)
    return value


def _ports_from_json(value: object, place: str) -> tuple[Port, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _misfit(place, "an array of ports", value)
    return tuple(_port_from_json(item, f"{place}[{index}]") for index, item in enumerate(value))


def _port_from_json(value: object, place: str) -> Port:
    item = _mapping(value, place)
    name, dtype, shape = item.get("name"), item.get("dtype"), item.get("shape")
    if not isinstance(name, str):
        raise _misfit(f"{place}.name", "a string", name)
    if dtype is not None and not isinstance(dtype, str):
        raise _misfit(f"{place}.dtype", "a string or null", dtype)
    if shape is None:
        return Port(name=name, dtype=dtype)
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise _misfit(f"{place}.shape", "an array or null", shape)
    for axis, extent in enumerate(shape):
        if isinstance(extent, bool) or not isinstance(extent, int | str | None):
            raise _misfit(f"{place}.shape[{axis}]", "an integer, a name or null", extent)
    return Port(name=name, dtype=dtype, shape=tuple(shape))


def _misfit(place: str, wanted: str, value: object) -> _MisfitError:
    return _MisfitError(f"{place} must be {wanted}, not {shown(value)}")
