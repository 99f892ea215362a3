"""The precision in which the oracle computes: which numpy type holds a declared ONNX type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray

from harness.errors import InputError

__all__ = ["Array", "Precision", "PrecisionName", "RoundingName", "file_dtype", "is_float", "type_name"]

Array: TypeAlias = NDArray[Any]
PrecisionName: TypeAlias = Literal["float32", "float64"]
RoundingName: TypeAlias = Literal["none", "model"]

_SPELLING = {"float": "float32", "double": "float64"}


def type_name(elem_type: int) -> str:
    """The name of an ONNX element type in numpy's spelling: `float32`, `bfloat16`, `float8e4m3fn`."""
    name: str = onnx.TensorProto.DataType.Name(elem_type).lower()
    return _SPELLING.get(name, name)


def file_dtype(elem_type: int, of: str = "a value") -> np.dtype[Any]:
    """The numpy dtype of an ONNX element type; those that numpy lacks come from `ml_dtypes`.

    Raises:
        InputError: ONNX has no such type; the message says what it is the type `of`.
    """
    try:
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(elem_type))
    except KeyError:
        raise InputError(
            f"The element type {elem_type}, given for {of}, is none that ONNX has.",
            next_action="Export the graph again, or run `onnx.checker` on it.",
        ) from None


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether values of `dtype` are floats, the narrow ones of `ml_dtypes` included."""
    # The narrow floats of ml_dtypes are of kind V or f, its integers have "int" in their names.
    return dtype.kind == "f" or (dtype.kind == "V" and "float" in dtype.name)


@dataclass(frozen=True, slots=True)
class Precision:
    """Every float narrower than `dtype` is held and computed in `dtype`; integers stay exact.

    A graph's float64 tensors stay float64: the oracle's precision is a floor. Since each declared type
    has just one holding type, the operands of an operator agree whatever casts stand between them, and
    a cast to a narrower float changes nothing. With `rounding`, values pass from node to node in their
    declared types instead, and only nodes compute in `dtype`.

    Attributes:
        name: `float32` or `float64`.
        rounding: whether values are rounded to their declared types (`harness.oracle.declared`).
    """

    name: PrecisionName
    rounding: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype of the same name."""
        return np.dtype(self.name)

    def holding(self, elem_type: int) -> np.dtype[Any]:
        """The dtype that holds tensors of a declared ONNX type."""
        return self.held(file_dtype(elem_type))

    def held(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype that holds values of `dtype`."""
        if is_float(dtype) and dtype != np.float64:
            return self.dtype
        return dtype

    def carried(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype in which values declared as `dtype` pass from node to node."""
        return dtype if self.rounding else self.held(dtype)

    def widen(self, array: Array) -> Array:
        """`array` in its holding dtype: itself where it is held as it stands, else an exact copy."""
        return array.astype(self.held(array.dtype), copy=False)
