"""The built-in package `demo-ops`: the demo with the fused operators that recent exporters write.

The same weights and the same mathematics as `harness.models.demo`, but the causal convolution and the
recurrence are `CausalConvWithState` and `LinearAttention` of com.microsoft instead of `Conv` and `Scan`. What
is decoded is the same, so that the two convict an engine whose fused operators differ from its plain ones.
"""

from __future__ import annotations

from pathlib import Path

from harness.models.builtin import BuiltinPackage
from harness.models.demo import DEMO_PROMPTS, write_demo

__all__ = ["DEMO_OPS_SHA256", "demo_ops_package", "write_demo_ops"]

DEMO_OPS_SHA256 = "3458427e01ba480f1f1f3c75cb2ab544d01dbac8ea7bcd31d50e263b36f861b4"
"""Of the graph with its data, as `onnx-parity check` reports it: the same on every machine. Part of the
package's place in the cache, so that a change of this module never meets an older release's files."""


def demo_ops_package() -> BuiltinPackage:
    """The `demo-ops` package; written into the cache on `materialise`."""
    return BuiltinPackage(
        name="demo-ops",
        description="The demo with fused recurrent operators, as recent exporters write them.",
        prompts=DEMO_PROMPTS,
        max_new_tokens=32,
        content_version=DEMO_OPS_SHA256[:12],
        write=write_demo_ops,
    )


def write_demo_ops(folder: Path) -> Path:
    """Write `model.onnx` and its external data into the existing `folder`; returns the model file."""
    return write_demo(folder, fused=True)
