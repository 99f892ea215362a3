"""Whether a pair of cache ports can be what its names say: dtypes, ranks, extents, growth."""

from __future__ import annotations

from dataclasses import dataclass

from harness.ports import Dimension, Port
from harness.topology.conventions import Discipline
from harness.topology.findings import Finding, quoted
from harness.topology.shapes import StateShapeMatch, cannot_grow, dynamic_state_axes, growing_axes, mismatch
from harness.topology.spec import Role
from harness.topology.swaps import tokens

__all__ = ["CROSS_ROLES", "CacheBinding", "SELF_KV_ROLES", "check_binding"]

CROSS_ROLES = frozenset({Role.CROSS_KV_KEY, Role.CROSS_KV_VALUE})
SELF_KV_ROLES = frozenset({Role.KV_KEY, Role.KV_VALUE, Role.KV_FUSED, Role.KV_SCALE})

_ENCODER_WORDS = frozenset({"encoder", "encode", "cross"})
_PAGE_WORDS = frozenset({"block", "blocks", "page", "pages", "slots"})
_FLOATS = frozenset(
    {
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "float4e2m1",
        "float6e2m3",
        "float6e3m2",
        "float8e4m3fn",
        "float8e4m3fnuz",
        "float8e5m2",
        "float8e5m2fnuz",
        "float8e8m0",
    }
)
_QUANTISED = _FLOATS | {"int8", "uint8", "int4", "uint4", "int2", "uint2"}
_COUNTERS = frozenset({"int16", "uint16", "int32", "uint32", "int64", "uint64"})
_DTYPES = {Role.KV_SCALE: _FLOATS, Role.STATE: _QUANTISED | _COUNTERS}
"""What dtypes a cache may have by its role, if not `_QUANTISED`: a state may also count."""


@dataclass(frozen=True, slots=True)
class CacheBinding:
    """A past port and the present port that gives its next value.

    Attributes:
        past: the graph input.
        present: the graph output; None for cross-attention KV that is only read.
        role: of both.
        layer: the layer index in the names, None where they have none.
        because: the evidence, one line.
        discipline: what the shapes must show beyond agreeing.
    """

    past: Port
    present: Port | None
    role: Role
    layer: int | None
    because: str
    discipline: Discipline = Discipline.ANY


def check_binding(
    binding: CacheBinding, *, match: StateShapeMatch, batch: Dimension, sequence: Dimension
) -> list[Finding]:
    """Check that a pair can be fed back, and be initialised, as what it is called.

    `match`, `batch` and `sequence` are those of `derive_cache`. Where the graph does not say a dtype or a
    shape, it contradicts nothing.
    """
    findings = [*_check_paging(binding), *_check_dtype(binding)]
    if binding.role is Role.STATE:
        findings += _check_initial_state(binding.past, batch)
    if binding.present is None:
        return findings
    findings += _check_agreement(binding, binding.present, match, sequence)
    return findings or _check_discipline(binding, binding.present)


def _check_agreement(
    binding: CacheBinding, present: Port, match: StateShapeMatch, sequence: Dimension
) -> list[Finding]:
    past = binding.past
    names = (past.name, present.name)
    findings = []
    if past.dtype is not None and present.dtype is not None and past.dtype != present.dtype:
        findings.append(
            Finding(
                "E_DTYPE_MISMATCH",
                f"{quoted(past.name)} takes {past.dtype} and {quoted(present.name)} gives {present.dtype}: a "
                "cache keeps its dtype from step to step. Export both ports with one dtype.",
                names,
            )
        )
    problem = mismatch(past.shape, present.shape)
    if problem is None and binding.role is Role.STATE and not match.accepts(past.shape, present.shape):
        problem = f"shapes are not spelled alike, as {match.value} matching asks"
    if problem is None and binding.role not in CROSS_ROLES and binding.role is not Role.STATE:
        axes = growing_axes(past.shape, present.shape)
        problem = cannot_grow(past.shape, present.shape, sequence)
        if len(axes) > 1:
            problem = (
                f"axes {', '.join(str(one.axis) for one in axes)} all differ, and a cache grows along one"
            )
    if problem is not None:
        findings.append(
            Finding(
                "E_SHAPE_MISMATCH",
                f"{quoted(past.name)} and {quoted(present.name)}: {problem}. Both are one cache; if the "
                "declared shapes are wrong, correct them in the graph.",
                names,
            )
        )
    return findings


def _check_discipline(binding: CacheBinding, present: Port) -> list[Finding]:
    """Check what the shapes must show where the names alone leave room."""
    past = binding.past
    names = (past.name, present.name)
    symbols = _symbol_words(past)
    if binding.role in SELF_KV_ROLES and symbols & _ENCODER_WORDS:
        return [
            Finding(
                "E_EVIDENCE_CONFLICT",
                f"{quoted(past.name)} is self-attention KV by name, but the length in its shape "
                f"{list(past.shape or ())} is an encoder's. Declare it under model.io.kv_inputs or "
                "cross_kv_inputs.",
                names,
            )
        ]
    if binding.discipline is not Discipline.GROWING:
        return []
    axes = growing_axes(past.shape, present.shape)
    grows = len(axes) == 1 and (axes[0].before == 0 or not isinstance(axes[0].before, int))
    if grows and binding.role is not Role.STATE:
        return []
    return [
        Finding(
            "E_AMBIGUOUS_STATE_PAIRING",
            f"{quoted(past.name)} and {quoted(present.name)} are a pair by name, but nothing says whether it "
            "is a growing cache, a buffer of fixed size or a recurrent state. Declare it under "
            "model.io.kv_inputs and kv_outputs, or model.io.state_pairs.",
            names,
        )
    ]


def _check_paging(binding: CacheBinding) -> list[Finding]:
    if not _symbol_words(binding.past) & _PAGE_WORDS:
        return []
    return [
        Finding(
            "E_UNSUPPORTED_LAYOUT_PAGED",
            f"{quoted(binding.past.name)} is a pool of blocks, {list(binding.past.shape or ())}, that many "
            "sequences share: not a cache of one sequence. Export the graph without paged attention.",
            (binding.past.name,),
        )
    ]


def _check_dtype(binding: CacheBinding) -> list[Finding]:
    """Refuse a dtype in which nothing like this is kept, such as text, flags, or a sequence of tensors."""
    ports = (binding.past, *((binding.present,) if binding.present is not None else ()))
    possible = {None, *_DTYPES.get(binding.role, _QUANTISED)}
    return [
        Finding(
            "E_DTYPE_MISMATCH",
            f"{quoted(port.name)} is {binding.role.value} with the dtype {port.dtype}, and none is kept in "
            "that. Export it with numbers, or declare what the port is under model.io.",
            (port.name,),
        )
        for port in ports
        if port.dtype not in possible
    ]


def _symbol_words(port: Port) -> frozenset[str]:
    symbols = (extent for extent in port.shape or () if isinstance(extent, str))
    return frozenset(word for symbol in symbols for word in tokens(symbol))


def _check_initial_state(past: Port, batch: Dimension) -> list[Finding]:
    if past.shape is None:
        what = "the graph does not say its shape"
    else:
        axes = dynamic_state_axes(past, batch)
        if not axes:
            return []
        what = f"axis {', '.join(map(str, axes))} of {list(past.shape)} is symbolic and not the batch"
    return [
        Finding(
            "E_STATE_DYNAMIC_DIM",
            f"State {quoted(past.name)} starts as zeros, and {what}. Export it with concrete extents, or "
            "declare what the port is under model.io.",
            (past.name,),
        )
    ]
