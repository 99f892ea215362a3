"""Rounding to declared types: floats narrower than the oracle's precision, and int8 activations.

Sources: ONNX operator specification (Cast, section on 8-bit floats and E8M0); ONNX Runtime's MatMulNBits.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from harness.oracle.precision import Array

__all__ = ["int8_activations", "narrowed"]

_SATURATING = ("float8", "float6", "float4")
_SCALE = np.dtype(ml_dtypes.float8_e8m0fnu)
"""Powers of two from 2^-127 to 2^127; no sign and no zero."""


def narrowed(x: Any, dtype: np.dtype[Any], *, saturate: bool = True, mode: str = "up") -> Array:
    """Floats rounded to `dtype`, the nearest, ties to even.

    Beyond the range of an 8-bit (or narrower) float: its largest value if `saturate`, else infinity, or NaN
    where it has no infinity. `mode` (`up`, `down`, `nearest`) is how E8M0 rounds between powers of two.
    """
    if dtype == _SCALE:
        return _power_of_two(np.asarray(x), saturate=saturate, mode=mode)
    array = np.asarray(x)
    if not dtype.name.startswith(_SATURATING):
        return array.astype(dtype)
    if saturate:
        top = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call] # it has no type hints
        array = np.clip(array, -top, top)
    return array.astype(dtype)


def _power_of_two(x: Array, *, saturate: bool, mode: str) -> Array:
    """Powers of two; NaN for what is no number, or is out of range and not to saturate.

    In mode `nearest` three halves of a power go up, as ties to even would of any exponent but the lowest.
    """
    mantissa, exponent = np.frexp(np.abs(x).astype(np.float64))
    power = exponent - 1  # x = m 2^e with m in [1/2, 1), so 2^(e - 1) <= x
    if mode == "nearest":
        power = power + (mantissa >= 0.75)
    elif mode == "up":
        power = power + (mantissa > 0.5)
    power = np.where(x == 0, -128, np.where(np.isinf(x), 128, power))
    bad = np.isnan(x)
    if not saturate:
        bad |= (power > 127) | (power < -127)
    return np.where(bad, np.nan, np.ldexp(1.0, np.clip(power, -127, 127))).astype(_SCALE)


def int8_activations(x: Array, block: int) -> Array:
    """What a kernel with int8 activations makes of x [.., K]: multiples of a scale for each `block` of K.

    The scale is the largest magnitude of the block / 127; a value becomes the nearest multiple, ties to
    even. The last block may be short. Source: ONNX Runtime, MatMulNBits with `accuracy_level` 4.
    """
    depth = x.shape[-1]
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -depth % block)])
    blocks = padded.reshape(*x.shape[:-1], -1, block)
    scale = np.max(np.abs(blocks), axis=-1, keepdims=True) / x.dtype.type(127)
    inverse = np.where(scale == 0, x.dtype.type(0), 1 / np.where(scale == 0, x.dtype.type(1), scale))
    multiples: Array = np.rint(blocks * inverse) * scale
    return multiples.reshape(padded.shape)[..., :depth]
