"""Functions of one element at a time: arithmetic, elementary functions, activations.

`y = f(x)` keeps the shape of x; `z = f(a, b)` and the variadic ones broadcast as numpy does. Formulas
are those of the ONNX operator specification, in the versions given. Integers wrap around on overflow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from harness.oracle.kernels.registry import Kernel, always, kernel, register
from harness.oracle.kernels.tensor import number_of
from harness.oracle.node import Compute, Node, Tensor

__all__ = ["erf", "gelu", "gelu_tanh", "sigmoid", "silu", "softplus"]


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)); exp may overflow to infinity, which gives the right limit."""
    y = np.exp(-x)
    y += 1
    return np.reciprocal(y)


def silu(x: Tensor) -> Tensor:
    """`x sigmoid(x)`."""
    y = np.exp(-x)
    y += 1
    return np.divide(x, y)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), without overflow for large x."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


_ERF_STEPS = 32
_ERF_END = 6
_ERF_TERMS = 9


@functools.cache
def _erf_table() -> Tensor:
    """Taylor coefficients of erf about the points k / 32, k = 0 .. 192: shape [9, 193] float64.

    With h(x) = 2 / sqrt(pi) * exp(-x^2), erf' = h and h' = -2 x h, so that the derivatives are h times
    polynomials p_n with p_1 = 1 and p_(n+1) = p_n' - 2 x p_n.
    """
    points = np.arange(_ERF_STEPS * _ERF_END + 1) / _ERF_STEPS
    table = np.empty((_ERF_TERMS, points.size))
    table[0] = [math.erf(point) for point in points]
    height = 2 / math.sqrt(math.pi) * np.exp(-points * points)
    polynomial = np.polynomial.Polynomial([1.0])
    for order in range(1, _ERF_TERMS):
        table[order] = height * polynomial(points) / math.factorial(order)
        polynomial = polynomial.deriv() - np.polynomial.Polynomial([0.0, 2.0]) * polynomial
    return table


def erf(x: Tensor) -> Tensor:
    """The error function, within 1e-15 of it whatever the precision; 1 beyond 6, where it differs by 2e-17.

    A Taylor series about the nearest of a grid of points 1/32 apart: at a distance of at most 1/64 the
    first omitted term, of order 9, is below 1e-16.
    """
    size = np.abs(x).astype(np.float64)
    # NaN must not become an index; it comes back through the remainder.
    nearest = np.rint(np.where(size < _ERF_END, size, _ERF_END) * _ERF_STEPS).astype(np.intp)
    rest = np.minimum(size, _ERF_END) - nearest / _ERF_STEPS
    table = _erf_table()
    value = table[-1][nearest]
    for coefficients in table[-2::-1]:
        value = value * rest + coefficients[nearest]
    return np.copysign(value, x).astype(np.asarray(x).dtype, copy=False)


def gelu(x: Tensor) -> Tensor:
    """`x / 2 (1 + erf(x / sqrt(2)))`."""
    return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))


def gelu_tanh(x: Tensor) -> Tensor:
    """`x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return np.maximum(x, 0)


def _softsign(x: Tensor) -> Tensor:
    """`x / (1 + |x|)`."""
    return x / (1 + np.abs(x))


def _mish(x: Tensor) -> Tensor:
    """`x tanh(softplus(x))`."""
    return x * np.tanh(softplus(x))


def _hard_swish(x: Tensor) -> Tensor:
    """`x min(max(x / 6 + 1/2, 0), 1)`."""
    return x * np.clip(x / 6 + 0.5, 0, 1)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """`a / b`; of integers the quotient rounded towards zero, as in C."""
    if a.dtype.kind not in "iu":
        return np.divide(a, b)
    quotient = np.floor_divide(a, b)
    # The floor is one below the truncated quotient where signs differ and something remains.
    return quotient + ((quotient * b != a) & ((a < 0) != (b < 0))).astype(a.dtype)


def _power(a: Tensor, b: Tensor) -> Tensor:
    """`a ** b` in the type of a; integers through float64 where an exponent is negative or fractional."""
    dtype = a.dtype
    if dtype.kind in "iu" and (b.dtype.kind == "f" or np.any(b < 0)):
        return np.power(a.astype(np.float64), b).astype(dtype)
    return np.power(a, b).astype(dtype, copy=False)


_PLAIN: dict[str, tuple[Compute, tuple[int, ...]]] = {
    "Abs": (np.abs, (6, 13)),
    "Acos": (np.arccos, (7, 22)),
    "Acosh": (np.arccosh, (9, 22)),
    "Add": (np.add, (7, 13, 14)),
    "Asin": (np.arcsin, (7, 22)),
    "Asinh": (np.arcsinh, (9, 22)),
    "Atan": (np.arctan, (7, 22)),
    "Atanh": (np.arctanh, (9, 22)),
    "Ceil": (np.ceil, (6, 13)),
    "Cos": (np.cos, (7, 22)),
    "Cosh": (np.cosh, (9, 22)),
    "Div": (_divide, (7, 13, 14)),
    "Erf": (erf, (9, 13)),
    "Exp": (np.exp, (6, 13)),
    "Floor": (np.floor, (6, 13)),
    "HardSwish": (_hard_swish, (14, 22)),
    "Log": (np.log, (6, 13)),
    "Mish": (_mish, (18, 22)),
    "Mul": (np.multiply, (7, 13, 14)),
    "Neg": (np.negative, (6, 13)),
    "Pow": (_power, (7, 12, 13, 15)),
    "Reciprocal": (np.reciprocal, (6, 13)),
    "Relu": (_relu, (6, 13, 14)),
    "Round": (np.rint, (11, 22)),  # half to even
    "Sigmoid": (sigmoid, (6, 13)),
    "Sign": (np.sign, (9, 13)),
    "Sin": (np.sin, (7, 22)),
    "Sinh": (np.sinh, (9, 22)),
    "Softplus": (softplus, (1, 22)),
    "Softsign": (_softsign, (1, 22)),
    "Sqrt": (np.sqrt, (6, 13)),
    "Sub": (np.subtract, (7, 13, 14)),
    "Tan": (np.tan, (7, 22)),
    "Tanh": (np.tanh, (6, 13)),
}
"""Operators without attributes: the function itself, and the versions it claims."""

for _name, (_function, _since) in _PLAIN.items():
    register(_name, _since, Kernel(always(_function)))


def _left_to_right(operation: Callable[[Any, Any], Any]) -> Callable[[Node], Compute]:
    """A variadic operator: `operation` over all inputs, from the left."""

    def bind(node: Node) -> Compute:
        return lambda *values: functools.reduce(operation, values)

    return bind


register("Max", (8, 12, 13), Kernel(_left_to_right(np.maximum)))
register("Min", (8, 12, 13), Kernel(_left_to_right(np.minimum)))
register("Sum", (8, 13), Kernel(_left_to_right(np.add)))


@kernel("Mean", (8, 13))
def _mean(node: Node) -> Compute:
    """(x_1 + ... + x_n) / n, broadcast."""
    return lambda *values: functools.reduce(np.add, values) / len(values)


@kernel("Mod", (10, 13, 28))
def _mod(node: Node) -> Compute:
    """A remainder: with `fmod` that of truncated division (sign of a), else of floored (sign of b)."""
    return np.fmod if node.integer("fmod", 0) else np.mod


@kernel("Clip", (11, 12, 13))
def _clip(node: Node) -> Compute:
    """min(max(x, low), high), where low and high are scalars and may be absent."""

    def run(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
        if low is not None:
            x = np.maximum(x, number_of(low))
        return x if high is None else np.minimum(x, number_of(high))

    return run


@kernel("Clip", 6)
def _clip_6(node: Node) -> Compute:
    """min(max(x, low), high) with attributes `min` and `max`; absent ones do not bound."""
    low, high = node.number("min", -math.inf), node.number("max", math.inf)
    return lambda x: np.minimum(np.maximum(x, low), high)


@kernel("Gelu", 20)
def _gelu(node: Node) -> Compute:
    """The input times the normal distribution function of it, exactly or by its tanh approximation."""
    return gelu_tanh if node.text("approximate", "none") == "tanh" else gelu


@kernel("Swish", 24)
def _swish(node: Node) -> Compute:
    """`x sigmoid(alpha x)`."""
    alpha = node.number("alpha", 1.0)
    return silu if alpha == 1 else lambda x: x * sigmoid(alpha * x)


@kernel("SwiGLU", 28)
def _swiglu(node: Node) -> Compute:
    """`a sigmoid(alpha a) b`."""
    alpha = node.number("alpha", 1.0)
    return lambda a, b: a * sigmoid(alpha * a) * b


@kernel("LeakyRelu", (6, 16))
def _leaky_relu(node: Node) -> Compute:
    """`x` where x >= 0, else `alpha x`."""
    alpha = node.number("alpha", 0.01)
    return lambda x: np.where(x < 0, alpha * x, x)


@kernel("PRelu", (7, 9, 16))
def _prelu(node: Node) -> Compute:
    """`x` where x >= 0, else `slope x`; the slope broadcasts to x."""
    return lambda x, slope: np.where(x < 0, slope * x, x)


@kernel("ThresholdedRelu", (10, 22))
def _thresholded_relu(node: Node) -> Compute:
    """`x` where x > alpha, else 0."""
    alpha = node.number("alpha", 1.0)
    return lambda x: np.where(x > alpha, x, x.dtype.type(0))


@kernel("Elu", (6, 22))
def _elu(node: Node) -> Compute:
    """`x` where x >= 0, else `alpha (exp(x) - 1)`."""
    alpha = node.number("alpha", 1.0)
    return lambda x: np.where(x < 0, alpha * np.expm1(x), x)


@kernel("Celu", (12, 28))
def _celu(node: Node) -> Compute:
    """max(x, 0) + min(0, alpha (exp(x / alpha) - 1))."""
    alpha = node.number("alpha", 1.0)
    return lambda x: np.maximum(x, 0) + np.minimum(alpha * np.expm1(x / alpha), 0)


@kernel("Selu", (6, 22))
def _selu(node: Node) -> Compute:
    """`gamma x` where x > 0, else `gamma alpha (exp(x) - 1)`."""
    alpha = node.number("alpha", 1.67326319217681884765625)
    gamma = node.number("gamma", 1.05070102214813232421875)
    return lambda x: gamma * np.where(x > 0, x, alpha * np.expm1(x))


@kernel("HardSigmoid", (6, 22))
def _hard_sigmoid(node: Node) -> Compute:
    """min(max(alpha x + beta, 0), 1)."""
    alpha, beta = node.number("alpha", 0.2), node.number("beta", 0.5)
    return lambda x: np.clip(alpha * x + beta, 0, 1)
