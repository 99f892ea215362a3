"""The oracle's operators, in rooms by family.

Importing this package fills the registry.
"""

from __future__ import annotations

from harness.oracle.kernels import (
    attention,
    cast,
    control,
    elementwise,
    experts,
    fused,
    gated_delta,
    gather_quantised,
    generate,
    group_query,
    indexing,
    linear,
    linear_quantisation,
    logic,
    multi_head,
    normalisation,
    quantised,
    recurrent,
    reduction,
    rotary,
    tensor,
)
from harness.oracle.kernels.registry import LEFT_OUT, claims, find, is_standard, operator_version

__all__ = [
    "LEFT_OUT",
    "attention",
    "cast",
    "claims",
    "control",
    "elementwise",
    "experts",
    "find",
    "fused",
    "gated_delta",
    "gather_quantised",
    "generate",
    "group_query",
    "indexing",
    "is_standard",
    "linear",
    "linear_quantisation",
    "logic",
    "multi_head",
    "normalisation",
    "operator_version",
    "quantised",
    "recurrent",
    "reduction",
    "rotary",
    "tensor",
]
