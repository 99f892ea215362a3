"""Sums that are known: inputs for a node's own kernel, and what it must make of them, in float64.

Each operator that sums products gets inputs of which few are not zero, so that a sum has a few dozen terms of
full precision and of very different magnitudes: activations, caches, states, decays, whatever it is fed with.
What they must give is worked out here from the operator's description and the bytes of its weights, by other
code than the kernel's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from harness.oracle.kernels.registry import CONTRIB
from harness.oracle.sums import attention, convolutions, products, recurrences
from harness.oracle.sums.probe import KnownSums, Probe, Site

__all__ = ["SUMMING", "KnownSums", "Probe", "Site", "known_sums"]

_Find: TypeAlias = Callable[[Site], KnownSums | None]

_FAMILIES: Mapping[tuple[str, str], _Find] = {
    ("", "MatMul"): products.matmul,
    (CONTRIB, "FusedMatMul"): products.matmul,
    ("", "Gemm"): products.gemm,
    (CONTRIB, "MatMulNBits"): products.blockwise,
    ("", "Conv"): convolutions.conv,
    ("", "CausalConvWithState"): convolutions.causal_conv,
    (CONTRIB, "CausalConvWithState"): convolutions.causal_conv,
    ("", "LinearAttention"): recurrences.linear_attention,
    (CONTRIB, "LinearAttention"): recurrences.linear_attention,
    ("", "Attention"): attention.attention,
    (CONTRIB, "GroupQueryAttention"): attention.group_query,
    (CONTRIB, "MultiHeadAttention"): attention.multi_head,
    (CONTRIB, "GatedDeltaNet"): recurrences.gated_delta_net,
}

SUMMING = frozenset(_FAMILIES) | {
    ("", "Einsum"),
    (CONTRIB, "Attention"),
    (CONTRIB, "MoE"),
    (CONTRIB, "QMoE"),
}
"""Operators that sum products; those of them without a known sum are listed as not probed."""


def known_sums(site: Site) -> KnownSums | None:
    """What can be asked of a node; None for operators and configurations without a known sum."""
    find = _FAMILIES.get((site.node.domain, site.node.op_type))
    return None if find is None else find(site)
