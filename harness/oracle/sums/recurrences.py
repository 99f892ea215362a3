"""Known sums of recurrences: a few positions in float64, from a state, with every factor of full precision.

The state of a linear attention is a polynomial of its inputs, and so is what is read of it. Each of its terms
is rounded as often as there are operations on the way, m times, so an output is off by at most g(m) times the
sum of the magnitudes of its terms (`harness.oracle.proof`). The same recurrence gives that sum, with sums for
all differences and magnitudes for all factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.oracle.precision import Array
from harness.oracle.sums.probe import KnownSums, Probe, Site, spread

__all__ = ["gated_delta_net", "linear_attention"]

_COUNT = 4
"""Positions."""

_WIDTH, _VALUE_WIDTH = 40, 24
"""Of keys and of values; keys are more than one block of eight bits."""

_FEATURES = 12
"""Of keys and queries, that are not zero."""

_RULES = {
    "linear": (False, False),
    "gated": (True, False),
    "delta": (False, True),
    "gated_delta": (True, True),
}
"""For each update rule, whether the state decays, and whether only what it lacks is written."""

_EPSILON = 1e-6
"""Added to the square of a length by which queries and keys are divided."""


_STEP_ROUNDINGS = _FEATURES + 12
"""Of a term at a position: decay, correction, and the sum over what is not zero of a key."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Of a recurrence over T positions with Q query heads, K key heads, and N states; all in float64.

    Attributes:
        q: [T, Q, D].
        k: [T, K, D].
        v: [T, N, E].
        past: [N, D, E].
        gate: what the state is multiplied by, [T, N, 1 or D]; None for a rule without.
        rate: how much of what the state lacks is written, [T, N or 1]; None for a rule without.
    """

    q: Array
    k: Array
    v: Array
    past: Array
    gate: Array | None
    rate: Array | None


def _rows(rng: np.random.Generator, *heads: int) -> list[Array]:
    """Queries and keys [T, count, D] for some counts of heads: those that meet have the same features.

    They are shorter than 1 and longer than 1/2, so that what is corrected does not grow.
    """
    groups = math.gcd(*heads)
    order = rng.permuted(np.tile(np.arange(_WIDTH), (groups, 1)), axis=1)
    chosen = order < _FEATURES
    made = []
    for count in heads:
        values = spread(rng, (_COUNT, count, _WIDTH), np.dtype(np.float64))
        values *= chosen.repeat(count // groups, axis=0)
        made.append(values * 2.0 ** -np.ceil(np.log2(np.linalg.norm(values, axis=-1, keepdims=True))))
    return made


def _outputs(inputs: _Inputs, scale: float) -> tuple[Array, Array]:
    """What the positions read, [T, H, E] for H the larger of Q and N, and the magnitudes of its terms."""
    states = inputs.v.shape[1]
    most = max(states, inputs.q.shape[1])
    q = inputs.q.repeat(most // inputs.q.shape[1], axis=1)
    k = inputs.k.repeat(states // inputs.k.shape[1], axis=1)
    value, size = inputs.past, np.abs(inputs.past)
    read, reach = [], []
    for t in range(_COUNT):
        new, extent = inputs.v[t], np.abs(inputs.v[t])
        if inputs.gate is not None:
            gate = inputs.gate[t, :, :, None]
            value, size = gate * value, gate * size
        if inputs.rate is not None:
            rate = inputs.rate[t, :, None]
            new = rate * (new - np.einsum("nd,nde->ne", k[t], value))
            extent = rate * (extent + np.einsum("nd,nde->ne", np.abs(k[t]), size))
        value = value + k[t, :, :, None] * new[:, None]
        size = size + np.abs(k[t, :, :, None]) * extent[:, None]
        held, bound = (x.repeat(most // states, axis=0) for x in (value, size))
        read.append(scale * np.einsum("hd,hde->he", q[t], held))
        reach.append(abs(scale) * np.einsum("hd,hde->he", np.abs(q[t]), bound))
    return np.stack(read), np.stack(reach)


def linear_attention(site: Site) -> KnownSums | None:
    """LinearAttention, with decays and betas by head; and with decays by feature, and betas for all heads."""
    node = site.node
    if node.integer("state_window", 0) or any(x is not None for x in site.constants):
        return None
    queries, states = node.integer("q_num_heads"), node.integer("kv_num_heads")
    rule = node.text("update_rule", "gated_delta")
    decays, corrects = _RULES[rule]
    scale = node.number("scale", 0.0) or _WIDTH**-0.5

    def probe(rng: np.random.Generator, *, by_key: bool) -> Probe:
        dtype = node.precision.dtype
        q, k = (x.astype(dtype) for x in _rows(rng, queries, states))
        v = spread(rng, (_COUNT, states, _VALUE_WIDTH), dtype)
        past = spread(rng, (states, _WIDTH, _VALUE_WIDTH), dtype)
        past *= node.has_input(3)
        decay = rng.uniform(-1.5, -0.1, (_COUNT, states, _WIDTH if by_key else 1)).astype(dtype)
        beta = rng.uniform(0.2, 0.9, (_COUNT, 1 if by_key else states)).astype(dtype)
        arguments = site.arguments()
        for index, array in enumerate((q, k, v, past, decay, beta)):
            if node.has_input(index):
                arguments[index] = array[None] if index == 3 else array.reshape(1, _COUNT, -1)
        inputs = _Inputs(
            q=q.astype(np.float64),
            k=k.astype(np.float64),
            v=v.astype(np.float64),
            past=past.astype(np.float64),
            gate=np.exp(decay.astype(np.float64)) if decays else None,
            rate=beta.astype(np.float64) if corrects else None,
        )
        return _read(inputs, scale, arguments, _COUNT * _STEP_ROUNDINGS)

    def probes(rng: np.random.Generator) -> Iterator[Probe]:
        yield probe(rng, by_key=False)
        yield probe(rng, by_key=True)

    return KnownSums(f"LinearAttention, rule {rule}", 0, _FEATURES, probes)


def _read(inputs: _Inputs, scale: float, arguments: list[Any], roundings: int) -> Probe:
    expected, magnitude = _outputs(inputs, scale)
    return Probe(arguments, expected, magnitude, lambda y: y.reshape(expected.shape), roundings=roundings)


def gated_delta_net(site: Site) -> KnownSums | None:
    """GatedDeltaNet, of one sequence."""
    node = site.node
    told = (7, 8)
    if any(x is not None for index, x in enumerate(site.constants) if index not in told):
        return None
    if any(node.has_input(index) for index in range(9, len(site.constants))):
        return None
    rule = node.text("update_rule", "gated_delta")
    decays, corrects = _RULES[rule]
    qwen = node.text("gate_activation", "none") == "qwen"
    squashed = node.text("beta_activation", "none") == "sigmoid"
    gates = [site.constants[index] if node.has_input(index) else None for index in told]
    states = next((x.size for x in gates if x is not None), 4)
    heads = math.gcd(2, states)
    normed = bool(node.integer("qk_l2_norm", 0))
    scale = node.number("scale", 0.0) or _WIDTH**-0.5
    dtype = node.precision.dtype

    def probe(rng: np.random.Generator, *, by_key: bool) -> Probe:
        q, k = (x.astype(dtype) for x in _rows(rng, heads, heads))
        v = spread(rng, (_COUNT, states, _VALUE_WIDTH), dtype)
        past = spread(rng, (states, _WIDTH, _VALUE_WIDTH), dtype) * dtype.type(node.has_input(6))
        roundings = _STEP_ROUNDINGS
        decay = rng.uniform(-1.5, -0.1, (_COUNT, states, _WIDTH if by_key else 1))
        a_log, dt_bias = (rng.uniform(-1, 1, states).astype(dtype) if x is None else x for x in gates)
        if qwen:
            pace, shift = (x.astype(np.float64).reshape(-1, 1) for x in (a_log, dt_bias))
            # What softplus makes about this of.
            soft = -decay / np.exp(pace)
            decay = (soft + np.log(-np.expm1(-soft)) - shift).astype(dtype)
            inner = decay.astype(np.float64) + shift
            gate = -np.exp(pace) * np.logaddexp(0, inner)
            # What the exponent is off by, the gate is, relative to itself.
            roundings += math.ceil(float(np.max(np.abs(gate) * (np.abs(inner) + 16))))
        else:
            decay = decay.astype(dtype)
            gate = decay.astype(np.float64)
        beta = rng.uniform(0.2, 0.9, (_COUNT, states))
        if squashed:
            beta = np.log(beta / (1 - beta))
            roundings += 8
        beta = beta.astype(dtype)
        rate = beta.astype(np.float64)
        if squashed:
            rate = 1 / (1 + np.exp(-rate))
        met = [x.astype(np.float64) for x in (q, k)]
        if normed:
            met = [x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + _EPSILON) for x in met]
            roundings += 3 * (_FEATURES + 6)
        inputs = _Inputs(
            q=met[0],
            k=met[1],
            v=v.astype(np.float64),
            past=past.astype(np.float64),
            gate=np.exp(gate) if decays else None,
            rate=rate if corrects else None,
        )
        rows = [q, k, v]
        if not node.has_input(1):
            rows = [np.concatenate([x.reshape(_COUNT, -1) for x in rows], axis=1)]
        everything = dict(enumerate(rows)) | {
            3: np.array([0, _COUNT], np.int32),
            4: decay if by_key else decay[..., 0],
            5: beta,
            6: past.swapaxes(-1, -2)[None],
            7: a_log,
            8: dt_bias,
        }
        arguments = site.arguments()
        for index, value in everything.items():
            if site.is_fed(index):
                arguments[index] = value
        return _read(inputs, scale, arguments, _COUNT * roundings)

    def probes(rng: np.random.Generator) -> Iterator[Probe]:
        yield probe(rng, by_key=False)
        if not qwen:
            yield probe(rng, by_key=True)

    return KnownSums(f"GatedDeltaNet, rule {rule}", 0, _FEATURES, probes)
