"""What the axes of a port mean: which one counts sequences, and how long the others are."""

from __future__ import annotations

import re

from harness.ports import Dimension, Port

__all__ = ["UnfeedableError", "batch_axis", "extra_rows", "is_quantised", "known", "written"]

_PACKED = frozenset({"int4", "uint4", "int2", "uint2", "float4e2m1"})
_QUANTISED = frozenset({"int8", "uint8", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"})
_SUM = re.compile(r"\s*([A-Za-z_]\w*)\s*\+\s*(\d+)\s*|\s*(\d+)\s*\+\s*([A-Za-z_]\w*)\s*")
_ARITHMETIC = re.compile(r"[*/+-]|\sx\s")
"""What makes a symbol a term; Optimum writes a product as `batch_size x num_heads`."""


class UnfeedableError(Exception):
    """Nobody can feed this port; the text says why, as a clause."""


def known(port: Port) -> tuple[str, tuple[Dimension, ...]]:
    """Dtype and shape of a port, if both are known and each element has bytes of its own.

    Raises:
        UnfeedableError: one of them is not known, or elements share a byte.
    """
    if port.dtype is None or port.shape is None:
        raise UnfeedableError("the graph does not say its dtype and rank")
    if port.dtype in _PACKED:
        raise UnfeedableError(f"its dtype {port.dtype} packs several elements into a byte")
    return port.dtype, port.shape


def batch_axis(shape: tuple[Dimension, ...], batch: Dimension) -> int | None:
    """The axis that counts sequences; None where there is none.

    It is the one with the token port's symbol `batch`, else the first one, unless that is concrete and
    another calls itself a batch (a stack of layers may stand before it). An axis that is a product with the
    batch (`batch_size * num_heads`) counts something else as well.
    """
    alike = [axis for axis, extent in enumerate(shape) if isinstance(batch, str) and extent == batch]
    if len(alike) == 1:
        return alike[0]
    if not shape:
        return None
    first = shape[0]
    if isinstance(first, int):
        named = [axis for axis, extent in enumerate(shape) if isinstance(extent, str) and "batch" in extent]
        return named[0] if len(named) == 1 and not _ARITHMETIC.search(str(shape[named[0]])) else None
    return None if isinstance(first, str) and _ARITHMETIC.search(first) else 0


def is_quantised(dtype: str) -> bool:
    """Whether a cache of this dtype holds numbers rounded to eight bits or fewer."""
    return dtype in _QUANTISED


def extra_rows(extent: Dimension, sequence: Dimension) -> int | None:
    """By how much an extent such as `sequence_len + 2` is longer than the tokens of a call.

    Args:
        extent: of a present port.
        sequence: how the token port spells the tokens of a call.

    Returns:
        None where `extent` is no such sum.
    """
    found = _SUM.fullmatch(extent) if isinstance(extent, str) else None
    if found is None:
        return None
    symbol, rows = (found[1], found[2]) if found[1] else (found[4], found[3])
    return int(rows) if symbol == sequence else None


def written(shape: tuple[Dimension, ...]) -> str:
    """A shape for a message."""
    return "[" + ", ".join("?" if extent is None else str(extent) for extent in shape) + "]"
