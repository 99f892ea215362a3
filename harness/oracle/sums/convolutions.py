"""Known sums of convolutions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.oracle.sums.probe import TERMS, KnownSums, Probe, Site, spread

__all__ = ["causal_conv", "conv"]

_SATURATED = 64.0
"""From here on sigmoid is 1 in float64, and silu the identity."""


def conv(site: Site) -> KnownSums | None:
    """Conv along one axis."""
    node, weight = site.node, site.constants[1]
    if weight is None or weight.ndim != 3 or node.text("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    groups, (outputs, depth, taps) = node.integer("group", 1), weight.shape
    gap, stride = (node.integers("dilations") or [1])[0], (node.integers("strides") or [1])[0]
    pads = node.integers("pads") or [0, 0]
    extent = (taps - 1) * gap + 1
    used = max(1, min(depth, TERMS // taps))

    def probes(rng: np.random.Generator) -> Iterator[Probe]:
        x = np.zeros((1, groups * depth, extent + 3 * stride), node.precision.dtype)
        by_group = x.reshape(groups, depth, -1)
        by_group[:, :used] = spread(rng, (groups, used, x.shape[-1]), x.dtype)
        padded = np.pad(by_group.astype(np.float64), [(0, 0), (0, 0), (pads[0], pads[1])])
        positions = np.arange(0, padded.shape[-1] - extent + 1, stride)
        w = weight.astype(np.float64).reshape(groups, -1, depth, taps)
        windows = padded[:, :, positions[:, None] + np.arange(taps) * gap]  # [G, C/G, positions, taps]
        expected = np.einsum("gmct,gcpt->gmp", w, windows)
        magnitude = np.einsum("gmct,gcpt->gmp", np.abs(w), np.abs(windows))
        arguments = site.arguments(x)
        shape = (outputs, -1)
        expected, magnitude = expected.reshape(shape), magnitude.reshape(shape)
        if (bias := site.constants[2] if node.has_input(2) else None) is not None:
            term = bias.astype(np.float64).reshape(-1, 1)
            expected, magnitude = expected + term, magnitude + np.abs(term)
        elif node.has_input(2):
            arguments[2] = np.zeros(outputs, x.dtype)
        yield Probe(arguments, expected, magnitude, lambda y: y[0])

    return KnownSums(f"Conv, {taps} taps, {depth} channels a group", weight.size, used * taps, probes)


def causal_conv(site: Site) -> KnownSums | None:
    """CausalConvWithState, with sums so large that silu leaves them as they are."""
    node, weight = site.node, site.constants[1]
    if weight is None or weight.ndim != 3 or site.is_fed(2) or node.integer("channels_last", 0):
        return None
    if node.integer("state_window", 0) or node.integer("dilation", 1) != 1:
        return None
    channels, _, taps = weight.shape

    def probes(rng: np.random.Generator) -> Iterator[Probe]:
        w = weight.astype(np.float64)[:, 0]
        rows = np.abs(spread(rng, (channels, taps + 2), node.precision.dtype)) * 2**12
        # In the middle position all terms are positive, whatever the signs of the weights.
        rows[:, 1 : taps + 1] *= np.where(w < 0, -1, 1)
        past, x = rows[None, :, : taps - 1], rows[None, :, taps - 1 :]
        exact = rows[:, 1 : taps + 1].astype(np.float64)
        expected, magnitude = (w * exact).sum(axis=1), np.abs(w * exact).sum(axis=1)
        if (bias := site.constants[2] if node.has_input(2) else None) is not None:
            expected, magnitude = expected + bias, magnitude + np.abs(bias.astype(np.float64))
        loud = (expected > _SATURATED) | ~np.isfinite(expected)
        arguments = site.arguments(x)
        if node.has_input(3):
            arguments[3] = past
            at = 1
        else:
            arguments[0], at = rows[None], taps
        yield Probe(arguments, expected[loud], magnitude[loud], lambda y: y[0, loud, at])

    return KnownSums(f"CausalConvWithState, {taps} taps", weight.size, taps, probes)
