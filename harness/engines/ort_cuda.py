"""What ONNX Runtime's CUDA provider is asked for, and what it says that it runs with.

Everything that can change a result is asked for by name, so that no default of a release decides it, and
read back from the session, since asking for an option proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from harness.engines.base import EngineOption, OptionValue
from harness.engines.options import Choice, Count
from harness.engines.ort_runtime import CUDA_PROVIDER
from harness.errors import InvalidRunError

__all__ = ["CUDA_OPTIONS", "capture_refusal", "provider_options", "provider_settings", "without_capture"]

_ATTENTION = {"default": 0, "flash": 1, "efficient": 2, "cudnn": 8, "math": 16}
"""Values of the provider's `sdpa_kernel` (bits of `AttentionBackend` in ONNX Runtime's attention_common.h).

0 leaves the choice to the provider and to `_ATTENTION_VARIABLES`; any other value allows that kernel alone,
beside the unfused one, which is always there, and the variables count for nothing.
"""

_ATTENTION_VARIABLES = (
    "ORT_DISABLE_DECODER_ATTENTION",
    "ORT_DISABLE_FLASH_ATTENTION",
    "ORT_DISABLE_FLASH_DECODE",
    "ORT_DISABLE_FUSED_ATTENTION",
    "ORT_DISABLE_FUSED_CROSS_ATTENTION",
    "ORT_DISABLE_MEMORY_EFFICIENT_ATTENTION",
    "ORT_DISABLE_TRT_FLASH_ATTENTION",
    "ORT_ENABLE_CUDNN_FLASH_ATTENTION",
    "ORT_ENABLE_FUSED_CAUSAL_ATTENTION",
    "ORT_ENABLE_XQA",
)
"""Environment variables that choose attention kernels where no provider option does (1.24 to 1.32)."""

CUDA_OPTIONS: Mapping[str, EngineOption] = MappingProxyType(
    {
        "device": Count("index of the CUDA device", default=0),
        "tf32": Choice("1 rounds fp32 products to TF32 (about 1e-3 relative)", ("0", "1")),
        "attention": Choice("the one fused attention kernel to allow", tuple(_ATTENTION)),
        "graph": Choice("captured replays a CUDA graph where shapes come again", ("eager", "captured")),
    }
)


def provider_options(values: Mapping[str, OptionValue]) -> dict[str, str]:
    """Options of the provider for the options of the engine, all given, as ONNX Runtime takes them."""
    return {
        "device_id": str(values["device"]),
        "use_tf32": str(values["tf32"]),
        "sdpa_kernel": str(_ATTENTION[str(values["attention"])]),
        "enable_cuda_graph": "1" if values["graph"] == "captured" else "0",
        # The default measures the kernels and takes the fastest, which may be another one in each session.
        "cudnn_conv_algo_search": "HEURISTIC",
        "prefer_nhwc": "0",
        "tunable_op_enable": "0",
    }


def without_capture(asked: Mapping[str, str]) -> dict[str, str]:
    """The same options of the provider for a session that runs eager."""
    return {**asked, "enable_cuda_graph": "0"}


def capture_refusal(message: str) -> str | None:
    """Why ONNX Runtime does not capture a graph, from its error; None where that says something else."""
    found = re.search(
        r"cannot use the graph capture feature as requested by the user\s+(?:as )?(.+)", message
    )
    return None if found is None else found[1].strip()


def provider_settings(
    asked: Mapping[str, str], told: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, OptionValue]:
    """What to report of a session on CUDA.

    Args:
        asked: what it was asked for, as `provider_options` gives it.
        told: what it says that it runs with; a release may lack an option.
        environment: of the process that opened it. Variables that choose kernels are reported where set.

    Raises:
        InvalidRunError: it says that it runs with another value than it was asked for.
    """
    for name, value in asked.items():
        if name in told and _plain(told[name]) != value:
            raise InvalidRunError(
                f"{CUDA_PROVIDER} was asked for {name}={value}, and runs with {name}={told[name]}.",
                next_action="Report it to ONNX Runtime, or install another release of it.",
            )
    settings: dict[str, OptionValue] = {name: told[name] for name in asked if name in told}
    settings |= {name: environment[name] for name in _ATTENTION_VARIABLES if name in environment}
    return settings


def _plain(value: str) -> str:
    """A truth value as a digit, however a release writes it; anything else as it is."""
    return {"true": "1", "false": "0"}.get(value.lower(), value)
