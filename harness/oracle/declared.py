"""Keeping values in their declared types: which type each output of a node has, and the rounding to it.

Sources: type constraints of the operator schemas in the installed onnx; for ONNX Runtime's operators the
schemas that it registers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx

from harness.oracle.kernels.registry import CONTRIB
from harness.oracle.node import Compute, Node
from harness.oracle.precision import Precision, file_dtype, is_float
from harness.oracle.rounding import int8_activations, narrowed

__all__ = ["keeping_types"]


@dataclass(frozen=True, slots=True)
class SameAs:
    """The type of input `index`."""

    index: int


Rule: TypeAlias = "SameAs | np.dtype[Any] | None"
"""How an output's type is known: that of an input, this one, or not from the node."""

_ATTRIBUTE = {
    "Cast": "to",
    "DequantizeLinear": "output_dtype",
    "EyeLike": "dtype",
    "QuantizeLinear": "output_dtype",
}
"""Operators of which an attribute may say the output's type."""

_FALLBACK = {"DequantizeLinear": 1, "QuantizeLinear": 2}
"""Where that attribute is not set, the input whose type it is."""

_FLOAT = np.dtype(np.float32)

_CONTRIB: dict[str, tuple[Rule, ...]] = {
    "EmbedLayerNormalization": (SameAs(2), None, SameAs(2)),
    "GatedDeltaNet": (SameAs(0), _FLOAT),
    "GatherBlockQuantized": (SameAs(2),),
    "GroupQueryAttention": (SameAs(0), SameAs(3), SameAs(4), SameAs(0)),
    "LinearAttention": (SameAs(0), SameAs(3)),
    "SimplifiedLayerNormalization": (SameAs(1), _FLOAT),
    "SkipLayerNormalization": (SameAs(0), _FLOAT, _FLOAT, SameAs(0)),
    "SkipSimplifiedLayerNormalization": (SameAs(0), _FLOAT, _FLOAT, SameAs(0)),
}
"""Outputs that are not of the first input's type. Where the input named is absent, they are."""


def output_rules(node: Node) -> tuple[Rule, ...]:
    """A rule for each output of a node."""
    domain, op_type = node.domain, node.op_type
    present, count = node.present, len(node.wanted)
    if domain == CONTRIB or op_type in _CONTRIB:
        return tuple(_given(rule, present) for rule in _contrib(op_type, count))
    if op_type in _ATTRIBUTE:
        named = node.element_type(_ATTRIBUTE[op_type])
        if named is not None:
            return (named,)
        fallback = _FALLBACK.get(op_type, 0)
        return (SameAs(fallback) if fallback < len(present) and present[fallback] else None,)
    if op_type == "ConstantOfShape":
        value = node.tensor("value")
        return (_FLOAT if value is None else value.dtype,)
    schema = onnx.defs.get_schema(op_type, node.version, domain)
    return tuple(_from_schema(schema, index, present) for index in range(count))


def _contrib(op_type: str, count: int) -> list[Rule]:
    rules = list(_CONTRIB.get(op_type, ()))[:count]
    return rules + [SameAs(0)] * (count - len(rules))


def _given(rule: Rule, present: Sequence[bool]) -> Rule:
    if isinstance(rule, SameAs) and not (rule.index < len(present) and present[rule.index]):
        return SameAs(0)
    return rule


def _from_schema(schema: onnx.defs.OpSchema, index: int, present: Sequence[bool]) -> Rule:
    outputs, inputs = schema.outputs, schema.inputs
    formal = outputs[min(index, len(outputs) - 1)].type_str
    for position, is_given in enumerate(present):
        if is_given and inputs[min(position, len(inputs) - 1)].type_str == formal:
            return SameAs(position)
    name = formal.removeprefix("tensor(").removesuffix(")")
    if name == formal:
        return None
    return file_dtype(onnx.TensorProto.DataType.Value(name.upper()))


def keeping_types(compute: Compute, node: Node, raw: Collection[int] = ()) -> Compute:
    """`compute` between values of their declared types: it gets them widened, its outputs are rounded.

    Constants at the positions `raw` stay as the file has them. A Cast rounds as its attributes say. Where
    MatMulNBits declares int8 activations to be accurate enough (`accuracy_level` 4, and integer zero points
    in the order of the blocks), its first input is rounded to them, as ONNX Runtime does.
    """
    rules, types, precision = output_rules(node), node.types, node.precision
    given = {index for index in raw if index in node.constants}
    block = node.integer("block_size", 0) if _takes_int8(node) else 0
    saturate, mode = bool(node.integer("saturate", 1)), node.text("round_mode", "up")

    def run(*inputs: Any) -> Any:
        wide = [x if index in given else _widened(x, precision) for index, x in enumerate(inputs)]
        if block:
            wide[0] = int8_activations(wide[0], block)
        result = compute(*wide)
        if not isinstance(result, tuple):
            return kept(result, rules[0], inputs)
        # Kernels may give more outputs than the node names.
        named = zip(result, [*rules, *[None] * len(result)], strict=False)
        return tuple(kept(x, rule, inputs) for x, rule in named)

    def kept(x: Any, rule: Rule, inputs: Sequence[Any]) -> Any:
        dtype: Any = rule
        if isinstance(rule, SameAs):
            # A constant has been widened already, and no longer tells its type.
            dtype = (types[rule.index] if rule.index in node.constants else None) or inputs[rule.index].dtype
        if x is None or dtype is None or not (is_float(dtype) and is_float(x.dtype)) or x.dtype == dtype:
            return x  # caches of integers stay what they are, whatever float the rule names
        return narrowed(x, dtype, saturate=saturate, mode=mode)

    return run


def _widened(x: Any, precision: Precision) -> Any:
    return x if x is None or not is_float(x.dtype) else precision.widen(np.asarray(x))


def _takes_int8(node: Node) -> bool:
    if node.op_type != "MatMulNBits" or node.integer("accuracy_level", 0) != 4 or node.has_input(4):
        return False
    zeros = node.declared(3) if node.has_input(3) else None
    return zeros is None or zeros == np.uint8
