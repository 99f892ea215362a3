"""Element types between ports, ONNX and numpy: one spelling for each, translated in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.onnx_file import ELEMENT_TYPES

if TYPE_CHECKING:
    import numpy as np

__all__ = ["dtype_of_array", "is_native", "numpy_dtype", "onnx_element_type", "port_dtype"]

_ML_DTYPES_NAMES = {
    "float8e4m3fn": "float8_e4m3fn",
    "float8e4m3fnuz": "float8_e4m3fnuz",
    "float8e5m2": "float8_e5m2",
    "float8e5m2fnuz": "float8_e5m2fnuz",
    "float4e2m1": "float4_e2m1fn",
    "float8e8m0": "float8_e8m0fnu",
}
"""Port spelling to the spelling of the `ml_dtypes` package, where they differ."""

_NUMBERS = {name: number for number, name in enumerate(ELEMENT_TYPES) if name is not None}
_PORT_NAMES = {theirs: ours for ours, theirs in _ML_DTYPES_NAMES.items()}


def onnx_element_type(dtype: str) -> int:
    """The `TensorProto.DataType` of a port dtype. Raises KeyError for a dtype that ONNX has not."""
    return _NUMBERS[dtype]


def port_dtype(element_type: int) -> str:
    """The port spelling of a `TensorProto.DataType`. Raises KeyError for a number without a type."""
    name = ELEMENT_TYPES[element_type] if 0 <= element_type < len(ELEMENT_TYPES) else None
    if name is None:
        raise KeyError(element_type)
    return name


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype of a port dtype; bfloat16 and the small floats come from `ml_dtypes`."""
    import ml_dtypes  # noqa: F401 (importing it registers its types with numpy)
    import numpy as np

    return np.dtype(_ML_DTYPES_NAMES.get(dtype, dtype))


def dtype_of_array(dtype: np.dtype[Any]) -> str:
    """The port spelling of a numpy dtype."""
    return _PORT_NAMES.get(dtype.name, dtype.name)


def is_native(dtype: np.dtype[Any]) -> bool:
    """Whether numpy itself has the type, so that other libraries know it.

    `kind` does not tell: `ml_dtypes` says `f` for one of its 8-bit floats and `V` for the others.
    """
    return dtype.isbuiltin == 1
