"""Values of attributes to which no specification gives a meaning are refused by name, not computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import EngineFailedError
from harness.oracle import OracleModel

SaveNode = Callable[..., Path]


def group_query(**attributes: Any) -> tuple[str, str, str, dict[str, Any]]:
    """A GroupQueryAttention of two heads."""
    return (
        "com.microsoft",
        "GroupQueryAttention",
        "xxxccnn",
        {"num_heads": 2, "kv_num_heads": 2, **attributes},
    )


MEANINGLESS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "local_window_size 0, which is neither -1 nor at least 1": group_query(local_window_size=0),
    "local_window_size -2, which is neither -1 nor at least 1": group_query(local_window_size=-2),
    "causal 0 and local_window_size 2, which must then be -1": group_query(causal=0, local_window_size=2),
    "causal -1, which is neither 0 nor 1": group_query(causal=-1),
    "do_rotary 2, which is neither 0 nor 1": group_query(do_rotary=2),
    "rotary_interleaved 3, which is neither 0 nor 1": group_query(do_rotary=1, rotary_interleaved=3),
    "sliding_window_cache 2, which is neither 0 nor 1": group_query(
        sliding_window_cache=2, local_window_size=4
    ),
    "qk_output 3, which is none of 0, 1 and 2": group_query(qk_output=3),
    "interleaved 2, which is neither 0 nor 1": ("", "RotaryEmbedding", "xxx", {"interleaved": 2}),
    "interleaved -1, which is neither 0 nor 1": (
        "com.microsoft", "RotaryEmbedding", "xnxx", {"interleaved": -1},
    ),
    "mrope_layout 2, which is neither 0 nor 1": (
        "com.microsoft", "MRotaryEmbedding", "xnxx", {"mrope_section": [1, 1, 0], "mrope_layout": 2},
    ),
    "unidirectional 2, which is neither 0 nor 1": (
        "com.microsoft", "MultiHeadAttention", "xxx", {"num_heads": 2, "unidirectional": 2},
    ),
    "is_causal 2, which is neither 0 nor 1": ("", "Attention", "xxx", {"is_causal": 2}),
    "left_window_size -2, which is less than -1": ("", "Attention", "xxx", {"left_window_size": -2}),
    "right_window_size -7, which is less than -1": ("", "Attention", "xxx", {"right_window_size": -7}),
}  # fmt: skip
"""Domain, operator, inputs (x floats, c caches, n integers) and attributes, by what the message says.

Sources: the operators' descriptions in the installed onnx and onnxruntime, which give flags a meaning for
0 and 1, and windows of GroupQueryAttention one for -1 and from 1 on.
"""


@pytest.mark.parametrize("what", MEANINGLESS)
def test_values_that_no_specification_allows_are_not_computed(
    what: str, save_one_node: SaveNode, tmp_path: Path
) -> None:
    """Whatever a runtime makes of them is no reference: unsupported, by name and value."""
    domain, op_type, kinds, attributes = MEANINGLESS[what]
    made = {
        "x": np.ones((1, 1, 4), np.float32),
        "c": np.ones((1, 2, 1, 2), np.float32),
        "n": np.array([0], np.int32),
    }
    inputs = [made[kind] for kind in kinds]
    opset = 25 if "_window_size" in what and op_type == "Attention" else 24
    path = save_one_node(tmp_path / "m.onnx", op_type, inputs, domain=domain, opset=opset, **attributes)
    with pytest.raises(
        EngineFailedError, match=f"operator {op_type} .* with {what} at node the_node"
    ) as caught:
        OracleModel.load(path)
    assert caught.value.kind == "unsupported"
