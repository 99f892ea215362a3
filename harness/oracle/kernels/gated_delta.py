"""GatedDeltaNet: linear attention over token-major tensors, with its own gates.

Shapes: T tokens of all sequences one behind the other (or [B, S] for T), Q query and key heads, N value heads
(a multiple of Q), D and E the widths of keys and values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from harness.oracle.kernels.elementwise import sigmoid, softplus
from harness.oracle.kernels.recurrent import RULES, recur
from harness.oracle.kernels.registry import CONTRIB, kernel
from harness.oracle.node import Compute, Node, Tensor, UnsupportedFeatureError

_L2_EPSILON = 1e-6
"""Added to the sum of squares of a head vector; the specification gives no number, Qwen3-Next this one."""


@kernel("GatedDeltaNet", domain=CONTRIB)
def _gated_delta_net(node: Node) -> Compute:
    """For each value head and token: S = exp(g) S; S += k (beta (v - S^T k))^T; o = scale S^T q.

    query and key [T, Q, D], value [T, N, E], or query packed [T, 2 Q D + N E] and no others; decay g [T, N]
    or [T, N, D], beta [T, N]; initial_state [B, N, E, D] (zeros when absent). `cu_seqlens` [B + 1] bounds the
    sequences; without it T is B sequences of equal length. Value head h reads query head h div (N/Q).
    `gate_activation` qwen takes g = -exp(a_log) softplus(decay + dt_bias), `beta_activation` a sigmoid of
    beta, `qk_l2_norm` divides each q and k by its length. Outputs: [T, N, E] and the last states
    [B, N, E, D]. Rules and scale as in LinearAttention. Source: com.microsoft version 1.
    """
    rule, given_scale = node.text("update_rule", "gated_delta"), node.number("scale", 0.0)
    if rule not in RULES:
        raise UnsupportedFeatureError(f"update_rule {rule}")
    if node.integer("state_update_capacity", 0):
        raise UnsupportedFeatureError("compact state updates (state_update_capacity)")
    decays, corrects = RULES[rule]
    unit = bool(node.integer("qk_l2_norm", 0))
    gate_of, rate_of = _gates(node)

    def run(
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        bounds: Tensor | None = None,
        decay: Tensor | None = None,
        beta: Tensor | None = None,
        initial: Tensor | None = None,
        a_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        *_capture: Any,
    ) -> tuple[Tensor, Tensor]:
        if key is None or value is None:
            query, key, value = _unpacked(query, initial)
        lead = query.shape[:-2]
        q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (query, key, value))
        heads, share = v.shape[1], v.shape[1] // q.shape[1]
        width = q.shape[-1]
        if unit:
            q, k = (x / np.sqrt(np.vecdot(x, x)[..., None] + _L2_EPSILON) for x in (q, k))
        q = q * (given_scale or 1 / math.sqrt(width))
        gate = rate = None
        if decays:
            gate = np.exp(gate_of(decay, a_log, dt_bias)).reshape(len(q), heads, -1, 1)
        if corrects:
            rate = rate_of(beta).reshape(len(q), heads, 1, 1)
        batch = lead[0] if len(lead) == 2 else 1 if initial is None else len(initial)
        spans = _spans(bounds, batch, len(q))
        y = np.empty_like(v)
        states = np.empty((len(spans), heads, v.shape[-1], width), dtype=v.dtype)
        for entry, span in enumerate(spans):
            start = np.zeros(states.shape[1:], v.dtype) if initial is None else initial[entry]
            query_rows, key_rows = (np.repeat(x[span], share, axis=1)[:, None, :, None] for x in (q, k))
            outputs, state, _ = recur(
                query_rows,
                key_rows,
                v[span][:, None, :, None],
                state=start.swapaxes(-1, -2)[None],
                gate=None if gate is None else gate[span][:, None],
                rate=None if rate is None else rate[span][:, None],
            )
            y[span] = outputs[:, 0, :, 0]
            states[entry] = state[0].swapaxes(-1, -2)
        return y.reshape(*lead, heads, -1), states

    return run


def _gates(node: Node) -> tuple[Callable[..., Tensor], Callable[[Any], Tensor]]:
    """How g and beta come from their inputs."""
    gating, rating = node.text("gate_activation", "none"), node.text("beta_activation", "none")
    if gating not in ("none", "qwen"):
        raise UnsupportedFeatureError(f"gate_activation {gating}")
    if rating not in ("none", "sigmoid"):
        raise UnsupportedFeatureError(f"beta_activation {rating}")

    def gate(decay: Tensor | None, a_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
        if decay is None:
            raise ValueError("decay is missing")
        if gating == "none":
            return decay
        if a_log is None or dt_bias is None:
            raise ValueError("gate_activation qwen needs a_log and dt_bias")
        return -np.exp(a_log) * softplus(decay + dt_bias)

    def rate(beta: Tensor | None) -> Tensor:
        if beta is None:
            raise ValueError("beta is missing")
        return beta if rating == "none" else sigmoid(beta)

    return gate, rate


def _unpacked(packed: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of [T, 2 Q D + N E]; the state says N, E and D."""
    if initial is None:
        raise ValueError("a packed query needs initial_state, which says the heads")
    _, heads, value_width, width = initial.shape
    columns = (packed.shape[-1] - heads * value_width) // 2
    parts = np.split(packed, [columns, 2 * columns], axis=-1)
    widths = (width, width, value_width)
    query, key, value = (x.reshape(*x.shape[:-1], -1, size) for x, size in zip(parts, widths, strict=True))
    return query, key, value


def _spans(bounds: Tensor | None, batch: int, tokens: int) -> list[slice]:
    """The tokens of each sequence."""
    if bounds is not None:
        ends = bounds.tolist()
        return [slice(start, end) for start, end in itertools.pairwise(ends)]
    length = tokens // batch
    return [slice(entry * length, (entry + 1) * length) for entry in range(batch)]
