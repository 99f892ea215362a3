"""Unpacking codes in vector code, with numba (the extra `fast`).

Plain loops over packed codes are not vectorised by numba, so sixteen bytes at a time are unpacked by
instructions given to LLVM directly. Each element is converted, shifted by its zero point and scaled by
single IEEE operations, as numpy does it: the results are the same, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

__all__ = ["unpacker"]

_LANES = 16


@functools.cache
def unpacker(bits: int) -> Callable[[Any, Any, Any, Any], None]:
    """`unpack(packed, zeros, scales, out)` for codes of `bits` bits: planes of weights.

    packed [rows, blocks, bytes] uint8, zeros and scales [rows, blocks] float32 or float64, out [rows, 8/bits,
    blocks * bytes] of their dtype; all contiguous. Plane p holds, byte by byte, the codes at bits p * bits.
    Compiled at the first call, in about a second.
    """
    planes, mask = 8 // bits, 2**bits - 1
    lanes = _lanes(bits)

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator] # numba has no type hints
    def unpack(packed: Any, zeros: Any, scales: Any, out: Any) -> None:
        rows, blocks, size = packed.shape
        flat, target = packed.reshape(-1), out.reshape(-1)
        zero_of, scale_of = zeros.reshape(-1), scales.reshape(-1)
        vectors = size - size % _LANES
        stride = blocks * size
        for row in range(rows):
            source, place = row * stride, row * planes * stride
            for block in range(row * blocks, row * blocks + blocks):
                zero, scale = zero_of[block], scale_of[block]
                if size == _LANES:  # four bits in blocks of 32, nearly always: without an inner loop
                    lanes(flat, source, target, place, stride, zero, scale)
                else:
                    for i in range(0, vectors, _LANES):
                        lanes(flat, source + i, target, place + i, stride, zero, scale)
                    for i in range(vectors, size):
                        for plane in range(planes):
                            code = (flat[source + i] >> (plane * bits)) & mask
                            target[place + i + plane * stride] = (target.dtype.type(code) - zero) * scale
                source += size
                place += size

    function: Callable[[Any, Any, Any, Any], None] = unpack
    return function


def _lanes(bits: int) -> Any:
    """`out[to + p stride + i] = (((packed[at + i] >> p bits) & mask) - zero) * scale`, sixteen i, all p."""

    @intrinsic  # type: ignore[untyped-decorator] # numba has no type hints
    def lanes(
        typing: Any, packed: Any, at: Any, out: Any, to: Any, stride: Any, zero: Any, scale: Any
    ) -> Any:
        signature = types.void(packed, at, out, to, stride, zero, scale)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            packed, at, out, to, stride, zero, scale = arguments
            source = cgutils.create_struct_proxy(signature.args[0])(context, builder, packed)
            target = cgutils.create_struct_proxy(signature.args[2])(context, builder, out)
            whole, numbers = ir.VectorType(ir.IntType(32), _LANES), ir.VectorType(zero.type, _LANES)
            aligned = 4 if isinstance(zero.type, ir.FloatType) else 8

            def splat(value: Any) -> Any:
                one = ir.Constant(ir.VectorType(value.type, _LANES), ir.Undefined)
                one = builder.insert_element(one, value, ir.Constant(ir.IntType(32), 0))
                return builder.shuffle_vector(one, one, ir.Constant(whole, [0] * _LANES))

            start = builder.bitcast(
                builder.gep(source.data, [at]), ir.VectorType(ir.IntType(8), _LANES).as_pointer()
            )
            # Widened first, as no instruction of x86 shifts bytes.
            codes = builder.zext(builder.load(start, align=1), whole)
            zeros, scales = splat(zero), splat(scale)
            for plane in range(8 // bits):
                code = builder.lshr(codes, ir.Constant(whole, [plane * bits] * _LANES)) if plane else codes
                code = builder.and_(code, ir.Constant(whole, [2**bits - 1] * _LANES))
                # No code reaches the sign bit, and processors convert signed numbers.
                value = builder.fmul(builder.fsub(builder.sitofp(code, numbers), zeros), scales)
                place = builder.bitcast(builder.gep(target.data, [to]), numbers.as_pointer())
                builder.store(value, place, align=aligned)
                to = builder.add(to, stride)
            return context.get_dummy_value()

        return signature, generate

    return lanes
