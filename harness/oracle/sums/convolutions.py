"""Known sums of convolutions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.oracle.sums.probe import TERMS, KnownSums, Probe, Site, loud, spread

__all__ = ["causal_conv", "conv"]

_MOST_CALLS = 16
"""Most rows of a batch, in each of which other channels are not zero."""

_STEEPEST = 1.1
"""Most by which silu changes what its argument changes."""


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
    calls = min(_MOST_CALLS, -(-depth // used))

    def probes(rng: np.random.Generator) -> Iterator[Probe]:
        x = np.zeros((calls, groups * depth, extent + 3 * stride), node.precision.dtype)
        by_group = x.reshape(calls, groups, depth, -1)
        order = np.resize(rng.permutation(depth), (calls, used))
        for row, some in zip(by_group, order, strict=True):
            values = spread(rng, (groups, used, x.shape[-1]), x.dtype)
            values[..., extent // 2] = loud(values[..., extent // 2])
            row[:, some] = values
        by_group = by_group.astype(np.float64)
        padded = np.pad(by_group, [(0, 0), (0, 0), (0, 0), (pads[0], pads[1])])
        positions = np.arange(0, padded.shape[-1] - extent + 1, stride)
        w = weight.astype(np.float64).reshape(groups, -1, depth * taps)
        windows = padded[..., positions[:, None] + np.arange(taps) * gap]  # [B, G, C/G, positions, taps]
        windows = windows.swapaxes(-1, -2).reshape(calls, groups, depth * taps, -1)
        shape = (calls, outputs, -1)
        expected = (w @ windows).reshape(shape)
        magnitude = (np.abs(w) @ np.abs(windows)).reshape(shape)
        arguments = site.arguments(x)
        if node.has_input(2):
            bias = site.constants[2]
            if bias is None:
                bias = arguments[2] = spread(rng, (outputs,), x.dtype)
            term = bias.astype(np.float64).reshape(-1, 1)
            expected, magnitude = expected + term, magnitude + np.abs(term)
        yield Probe(arguments, expected, magnitude)

    return KnownSums(f"Conv, {taps} taps, {depth} channels a group", weight.size, used * taps, probes)


def causal_conv(site: Site) -> KnownSums | None:
    """CausalConvWithState, behind its activation, at as many positions as it takes to leave the state."""
    node, weight = site.node, site.constants[1]
    if weight is None or weight.ndim != 3 or site.is_fed(2) or node.integer("channels_last", 0):
        return None
    if node.integer("state_window", 0) or node.integer("dilation", 1) != 1:
        return None
    if any(x is not None for index, x in enumerate(site.constants) if index not in (1, 2)):
        return None
    channels, _, taps = weight.shape
    activated = node.text("activation", "none") != "none"

    def probes(rng: np.random.Generator) -> Iterator[Probe]:
        rows = spread(rng, (channels, 2 * taps), node.precision.dtype)
        arguments = site.arguments(rows[None])
        if node.has_input(3):
            arguments[0], arguments[3] = rows[None, :, taps - 1 :], rows[None, :, : taps - 1]
        else:
            rows = np.pad(rows, ((0, 0), (taps - 1, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(rows.astype(np.float64), taps, axis=1)
        w = weight.astype(np.float64)
        expected, magnitude = (w * windows).sum(axis=-1), np.abs(w * windows).sum(axis=-1)
        if (bias := site.constants[2] if node.has_input(2) else None) is not None:
            term = bias.astype(np.float64)[:, None]
            expected, magnitude = expected + term, magnitude + np.abs(term)
        if activated:
            expected, magnitude = expected / (1 + np.exp(-expected)), _STEEPEST * magnitude
        yield Probe(arguments, expected, magnitude, lambda y: y[0], roundings=8 * activated)

    return KnownSums(f"CausalConvWithState, {taps} taps", weight.size, taps, probes)
