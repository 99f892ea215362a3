"""Rotary position embeddings (Su et al., RoFormer, 2021)."""

from __future__ import annotations

import numpy as np

from harness.oracle.kernels.registry import CONTRIB, kernel
from harness.oracle.node import Compute, Node, Tensor, UnsupportedFeatureError

__all__ = ["rotate"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Turn pairs of elements of the last axis by the angles whose cosine and sine are given.

    x [.., D]; cos and sin [.., R/2] broadcast to x's leading axes, R <= D even. The first R elements are
    turned, the rest stay. Pairs are (i, i + R/2), or (2i, 2i + 1) when `interleaved`:
    (a, b) becomes (a cos - b sin, a sin + b cos).
    """
    half = cos.shape[-1]
    output = np.empty(x.shape, dtype=x.dtype)
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        out_a, out_b = output[..., 0 : 2 * half : 2], output[..., 1 : 2 * half : 2]
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
        out_a, out_b = output[..., :half], output[..., half : 2 * half]
    np.subtract(a * cos, b * sin, out=out_a)
    np.add(a * sin, b * cos, out=out_b)
    if 2 * half < x.shape[-1]:
        output[..., 2 * half :] = x[..., 2 * half :]
    return output


@kernel("RotaryEmbedding", 23)
def _rotary_embedding(node: Node) -> Compute:
    """`rotate` at positions looked up in tables, or with tables given for each position.

    x [B, H, S, D], or [B, S, H*D] with `num_heads`; with position_ids [B, S] the tables are
    [positions, R/2], else [B, S, R/2]. Source: ONNX RotaryEmbedding 23.
    """
    heads = node.integer("num_heads", 0)
    width = node.integer("rotary_embedding_dim", 0)
    interleaved = node.flag("interleaved")

    def run(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is not None:
            cos, sin = cos[positions], sin[positions]
        return _by_head(x, cos, sin, heads=heads, width=width, interleaved=interleaved)

    return run


@kernel("RotaryEmbedding", domain=CONTRIB)
def _contrib_rotary_embedding(node: Node) -> Compute:
    """`rotate` at positions looked up in tables [positions, R/2].

    x [B, S, H*D] or [B, H, S, D]; position_ids [B, S], or [1]: the position of the first token. Without
    `num_heads` a rank-3 x has heads of twice the tables' width. Source: com.microsoft version 1.
    """
    heads = node.integer("num_heads", 0)
    width = node.integer("rotary_embedding_dim", 0)
    interleaved = node.flag("interleaved")
    if node.flag("is_packed_batching"):
        raise UnsupportedFeatureError("packed batching")
    if node.number("scale", 1.0) != 1:
        raise UnsupportedFeatureError("a scale, which no runtime defines")

    def run(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        count = x.shape[-2]
        if positions.ndim == 1:
            positions = (positions.reshape(1, 1) + np.arange(count)).repeat(len(x), axis=0)
        given = heads or x.shape[-1] // (2 * cos.shape[-1])
        return _by_head(x, cos[positions], sin[positions], heads=given, width=width, interleaved=interleaved)

    return run


@kernel("MRotaryEmbedding", domain=CONTRIB)
def _m_rotary_embedding(node: Node) -> Compute:
    """`rotate` where each column of the tables has its own stream of positions: time, height or width.

    x [B, S, H*D] or [B, H, S, D]; position_ids [3, B, S]; tables [positions, R/2]; `mrope_section` (t, h, w)
    with t + h + w = R/2. Layout 0: columns 0 .. t - 1 follow time, the next h height, the last w width.
    Layout 1: all follow time, but of the first 3 h columns each third from 1 on follows height, and of the
    first 3 w each third from 2 on width. Sources: com.microsoft version 1; Qwen2-VL and Qwen3-VL.
    """
    heads, width = node.integer("num_heads", 0), node.integer("rotary_embedding_dim", 0)
    interleaved = node.flag("interleaved")
    sections = node.integers("mrope_section") or []
    if len(sections) != 3:
        raise UnsupportedFeatureError(f"mrope_section {sections}, which is not three numbers")
    if node.flag("is_packed_batching"):
        raise UnsupportedFeatureError("packed batching")
    if node.number("scale", 1.0) != 1:
        raise UnsupportedFeatureError("a scale, which no runtime defines")
    stream = np.repeat(np.arange(3), sections)
    if node.flag("mrope_layout"):
        stream = np.zeros(sum(sections), dtype=np.intp)
        for axis in (1, 2):
            stream[axis : 3 * sections[axis] : 3] = axis

    def run(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        where = np.moveaxis(positions[stream], 0, -1)  # [B, S, R/2]
        column = np.arange(len(stream))
        cos, sin = cos[where, column], sin[where, column]
        given = heads or x.shape[-1] // (2 * cos.shape[-1])
        return _by_head(x, cos, sin, heads=given, width=width, interleaved=interleaved)

    return run


def _by_head(x: Tensor, cos: Tensor, sin: Tensor, *, heads: int, width: int, interleaved: bool) -> Tensor:
    """`rotate` on [B, H, S, D] or [B, S, H*D] with tables [B, S, R/2], the same for all heads."""
    if width and width // 2 != cos.shape[-1]:
        raise ValueError(
            f"tables are {cos.shape[-1]} wide where rotary_embedding_dim {width} asks {width // 2}"
        )
    if x.ndim == 4:
        return rotate(x, cos[:, None], sin[:, None], interleaved=interleaved)
    split = x.reshape(*x.shape[:2], heads, x.shape[2] // heads)
    return rotate(split, cos[:, :, None], sin[:, :, None], interleaved=interleaved).reshape(x.shape)
