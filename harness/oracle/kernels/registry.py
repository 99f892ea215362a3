"""Which operators the oracle has: kernels by domain, operator and version.

A kernel claims exact operator versions ("since versions"), so that a version with new semantics is
unsupported until someone has read its specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import onnx

from harness.oracle.node import Compute, Node

__all__ = [
    "CONTRIB",
    "LEFT_OUT",
    "Bind",
    "Kernel",
    "always",
    "claims",
    "find",
    "kernel",
    "operator_version",
    "register",
]

CONTRIB = "com.microsoft"
"""The domain of ONNX Runtime's own operators; all of them have version 1."""

Bind: TypeAlias = Callable[[Node], Compute]
"""Resolves a node's attributes and constants once, and returns what computes it."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """An operator in the versions that it claims.

    Attributes:
        bind: makes the function that computes a node.
        raw: positions of inputs whose constants it takes in the dtype of the file, not widened.
        moves: it only moves elements, so that constants of any dtype pass through it as they are.
        pure: the same inputs give the same outputs, so that a node of constants is computed once.
        streams: positions of inputs that it takes as codes with scales (`Node.streamed`).
    """

    bind: Bind
    raw: tuple[int, ...] = ()
    moves: bool = False
    pure: bool = True
    streams: tuple[int, ...] = ()


LEFT_OUT: dict[tuple[str, str], str] = {
    (CONTRIB, "PackedAttention"): "rows of unequal lengths packed into one",
    (CONTRIB, "PackedMultiHeadAttention"): "rows of unequal lengths packed into one",
    (CONTRIB, "PagedAttention"): "a cache in pages",
    (CONTRIB, "SparsePagedAttention"): "a cache in pages",
    (CONTRIB, "VarlenCausalConvWithState"): "rows of unequal lengths packed into one",
}
"""Operators that the oracle leaves out on purpose, and what of them no decode loop here can feed."""

_KERNELS: dict[tuple[str, str], dict[int, Kernel]] = {}


def always(compute: Compute) -> Bind:
    """Binds every node to the same function: for operators without attributes."""
    return lambda node: compute


def register(op_type: str, since: int | Iterable[int], entry: Kernel, *, domain: str = "") -> None:
    """Claim versions `since` of an operator."""
    versions = _KERNELS.setdefault((domain, op_type), {})
    for version in [since] if isinstance(since, int) else since:
        if version in versions:
            raise ValueError(f"{domain}:{op_type} version {version} is claimed twice")
        versions[version] = entry


def kernel(
    op_type: str,
    since: int | Iterable[int] = 1,
    *,
    domain: str = "",
    raw: tuple[int, ...] = (),
    moves: bool = False,
    pure: bool = True,
    streams: tuple[int, ...] = (),
) -> Callable[[Bind], Bind]:
    """Decorator: register `bind` for `op_type`; see `Kernel` for the options."""

    def add(bind: Bind) -> Bind:
        register(op_type, since, Kernel(bind, raw, moves, pure, streams), domain=domain)
        return bind

    return add


def operator_version(domain: str, op_type: str, opset: int) -> int:
    """The version of an operator that `opset` of its domain brings.

    From the operator definitions of the installed onnx; for an operator that these do not define (all of
    `com.microsoft`), the latest claimed one that is not newer than `opset`, or `opset` itself.
    """
    try:
        return onnx.defs.get_schema(op_type, opset, domain).since_version
    except onnx.defs.SchemaError:
        known = [version for version in _KERNELS.get((domain, op_type), {}) if version <= opset]
        return max(known, default=opset)


def is_standard(domain: str, op_type: str, opset: int) -> bool:
    """Whether the installed onnx defines the operator in `opset` of its domain."""
    return bool(onnx.defs.has(op_type, opset, domain))


def find(domain: str, op_type: str, version: int) -> Kernel | None:
    """The kernel that claims this very version, if any."""
    return _KERNELS.get((domain, op_type), {}).get(version)


def claims() -> list[tuple[str, str, int]]:
    """Every claim: domain, operator, version."""
    return sorted((domain, op, version) for (domain, op), entry in _KERNELS.items() for version in entry)
