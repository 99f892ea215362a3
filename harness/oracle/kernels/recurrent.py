"""Recurrences that carry a state of fixed size: linear attention and the causal convolution before it.

Shapes: B batch, T positions, H query heads, N key/value heads, D and E the widths of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from harness.oracle.kernels.elementwise import sigmoid, silu, softplus
from harness.oracle.kernels.registry import CONTRIB, kernel
from harness.oracle.node import Compute, Node, Tensor, UnsupportedFeatureError
from harness.oracle.workers import Claims, share

__all__ = ["RULES", "recur"]

RULES = {
    "linear": (False, False),
    "gated": (True, False),
    "delta": (False, True),
    "gated_delta": (True, True),
}
"""For each update rule, whether the state decays, and whether only what it lacks is written."""


@kernel("LinearAttention", 27)
@kernel("LinearAttention", domain=CONTRIB)
def _linear_attention(node: Node) -> Compute:
    """For each head and position: S = exp(g) S; S += k^T (beta (v - k S)); o = scale q S.

    g is 0 for the rules `linear` and `delta`; for `linear` and `gated` the bracket is just v. query
    [B, T, H*D], key [B, T, N*D], value [B, T, N*E], past_state [B, N, D, E] (zeros when absent), decay g
    [B, T, N] or [B, T, N*D], beta [B, T, N] or [B, T, 1]. Query head h reads state h div (H/N). The
    contrib operator also takes fewer query and key heads than N, each then used N/H times in a row.
    Scale 0 stands for 1/sqrt(D). Outputs: [B, T, max(H, N)*E] and the last state; with `state_window`
    W the states are [W, B, N, D, E]: those after each of the last W positions, zeros where there are
    fewer. Sources: ONNX LinearAttention 27, com.microsoft version 1.
    """
    query_heads, heads = node.integer("q_num_heads"), node.integer("kv_num_heads")
    rule, given_scale = node.text("update_rule", "gated_delta"), node.number("scale", 0.0)
    window = node.integer("state_window", 0)
    if rule not in RULES:
        raise UnsupportedFeatureError(f"update_rule {rule}")
    decays, corrects = RULES[rule]

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        past: Tensor | None = None,
        decay: Tensor | None = None,
        beta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        batch, count, _ = query.shape
        width = query.shape[-1] // query_heads
        q = _heads_first(query, width, heads) * (given_scale or 1 / math.sqrt(width))
        k = _heads_first(key, width, heads)
        v = value.reshape(batch, count, heads, 1, -1).transpose(1, 0, 2, 3, 4)
        state = np.zeros((batch, heads, width, v.shape[-1]), v.dtype) if past is None else past
        if past is not None and window:
            state = past[-1]
        gate = rate = None
        if decays:
            gate = np.exp(_required(decay, rule, "decay")).reshape(batch, count, heads, -1, 1)
            gate = gate.transpose(1, 0, 2, 3, 4)
        if corrects:
            rate = _required(beta, rule, "beta").reshape(batch, count, -1, 1, 1).transpose(1, 0, 2, 3, 4)
        outputs, state, kept = recur(q, k, v, state=state, gate=gate, rate=rate, keep=window)
        # [T, B, N, G, E] to [B, T, N*G*E]
        y = outputs.swapaxes(0, 1).reshape(batch, count, -1)
        if window:
            blank = np.zeros_like(state)
            state = np.stack([blank] * (window - len(kept)) + kept)
        return y, state

    return run


_STATE_BYTES = 1 << 18
"""States of so many bytes are taken through all positions together: they stay in the processor's cache."""


def recur(
    q: Tensor, k: Tensor, v: Tensor, *, state: Tensor, gate: Any, rate: Any, keep: int = 0
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Read and write the state [B, N, D, E] position by position; see `_linear_attention`.

    q [T, B, N, G, D], k [T, B, N, 1, D], v [T, B, N, 1, E]; gate [T, B, N, 1 or D, 1] is what the state is
    multiplied by, rate [T, B, N or 1, 1, 1] is beta, None where the rule has none. Gives the outputs
    [T, B, N, G, E], the last state, and the states after each of the last `keep` positions.
    """
    count, _, heads = k.shape[:3]
    outputs = np.empty((count, *q.shape[1:-1], v.shape[-1]), dtype=v.dtype)
    last = np.array(state)
    kept = [np.empty_like(last) for _ in range(min(keep, count))]
    group = max(1, _STATE_BYTES // (last[:, :1].nbytes or 1))

    def work(claims: Claims) -> None:
        for job in claims:
            some = slice(job * group, (job + 1) * group)
            own, update = last[:, some], np.empty_like(last[:, some])
            for step in range(count):
                if gate is not None:
                    own *= gate[step][:, some]
                row, new = k[step][:, some], v[step][:, some]
                if rate is not None:
                    each = rate[step] if rate.shape[2] == 1 else rate[step][:, some]
                    new = each * (new - row @ own)
                np.multiply(row.swapaxes(-1, -2), new, out=update)
                own += update
                np.matmul(q[step][:, some], own, out=outputs[step][:, some])
                if count - step <= keep:
                    kept[step - count][:, some] = own

    share(-(-heads // group), work)
    return outputs, last, kept


def _heads_first(x: Tensor, width: int, heads: int) -> Tensor:
    """[B, T, any*D] to [T, B, N, G, D]: G rows a head; heads fewer than N are repeated."""
    batch, count, merged = x.shape
    own = merged // width
    split = x.reshape(batch, count, own, width)
    if own < heads:
        split = np.repeat(split, heads // own, axis=2)
    return split.reshape(batch, count, heads, -1, width).transpose(1, 0, 2, 3, 4)


def _required(value: Tensor | None, rule: str, name: str) -> Tensor:
    if value is None:
        raise ValueError(f"update_rule {rule} needs the input {name}")
    return value


@kernel("LinearAttentionGate", domain=CONTRIB)
def _linear_attention_gate(node: Node) -> Compute:
    """The decay, decay_scale softplus(a + dt_bias), and beta = sigmoid(b) where b is given.

    a and b [B, T, N], dt_bias and decay_scale [N]. Source: com.microsoft version 1.
    """

    def run(a: Tensor, dt_bias: Tensor, decay_scale: Tensor, b: Tensor | None = None) -> tuple[Any, Any]:
        return decay_scale * softplus(a + dt_bias), None if b is None else sigmoid(b)

    return run


@kernel("CausalConvWithState", 27)
@kernel("CausalConvWithState", domain=CONTRIB)
def _causal_conv(node: Node) -> Compute:
    """y[b, c, t] = act(bias[c] + sum over j of w[c, 0, j] x[b, c, t - (K - 1 - j) d]), x before 0 the state.

    input [B, C, T] (or [B, T, C..] with `channels_last`), weight [C, 1, K], bias [C], past_state
    [B, C, (K - 1) d] with the oldest position first (zeros when absent), d the `dilation`. Outputs: y as the
    input, and the last (K - 1) d positions of state and input; with `state_window` W, [W, B, C, ..]: those
    up to each of the last W positions, zeros where there are fewer. Sources: ONNX CausalConvWithState 27,
    com.microsoft version 1 (of which one spatial axis).
    """
    if node.integer("ndim", 1) != 1:
        raise UnsupportedFeatureError("more than one spatial axis (ndim)")
    activation = node.text("activation", "none")
    if activation not in ("none", "silu", "swish"):
        raise UnsupportedFeatureError(f"activation {activation}")
    gap, window = node.integer("dilation", 1), node.integer("state_window", 0)
    finish: Callable[[Tensor], Tensor] | None = None if activation == "none" else silu
    last = bool(node.integer("channels_last", 0))

    def run(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, past: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        shape = x.shape
        if last:
            x = x.reshape(*shape[:2], -1).swapaxes(1, 2)
        batch, channels, count = x.shape
        taps = weight.shape[-1]
        reach = (taps - 1) * gap
        if past is None:
            state = np.zeros((batch, channels, reach), dtype=x.dtype)
        else:
            state = past[-1] if window else past
            if last:
                state = state.reshape(batch, reach, -1).swapaxes(1, 2)
        padded = np.concatenate((state, x), axis=2)
        y: Any = 0 if bias is None else bias[:, None]
        for tap in range(taps):
            y = y + padded[:, :, tap * gap : tap * gap + count] * weight[:, :, tap]
        if finish is not None:
            y = finish(y)
        ends = range(reach + count - max(window, 1) + 1, reach + count + 1)
        states = [
            padded[:, :, end - reach : end] if end > reach or not window else np.zeros_like(state)
            for end in ends
        ]
        if last:
            y = y.swapaxes(1, 2).reshape(shape)
            states = [item.swapaxes(1, 2).reshape(batch, reach, *shape[2:]) for item in states]
        return y, np.stack(states) if window else states[0]

    return run
