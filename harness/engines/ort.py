"""ONNX Runtime on the CPU and on CUDA."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.engines.base import Availability, Engine, EngineOption, OptionValue, SessionInfo
from harness.engines.options import Choice, Count, Text, complete
from harness.engines.ort_captured import CapturedRuns
from harness.engines.ort_cuda import (
    CUDA_OPTIONS,
    capture_refusal,
    provider_options,
    provider_settings,
    without_capture,
)
from harness.engines.ort_device import DevicePrograms
from harness.engines.ort_placement import CPU_PROVIDER, placed_on, placement_of, require_on_device
from harness.engines.ort_plugin import plugin_devices
from harness.engines.ort_runtime import (
    CUDA_PROVIDER,
    captured_stderr,
    cpu_availability,
    cuda_availability,
    load_runtime,
    require,
    session_error,
)
from harness.engines.ort_session import OrtSession
from harness.errors import EngineFailedError, InvalidRunError

__all__ = ["CPU_ENGINE", "CUDA_ENGINE", "OrtCpuEngine", "OrtCudaEngine"]

_OPTIMISATION_LEVELS = {
    "all": "ORT_ENABLE_ALL",
    "extended": "ORT_ENABLE_EXTENDED",
    "basic": "ORT_ENABLE_BASIC",
    "disable": "ORT_DISABLE_ALL",
}

_FATAL = 4
"""Log severity: what ONNX Runtime says about an error comes with the exception already."""

_COMMON_OPTIONS: dict[str, EngineOption] = {
    "threads": Count("threads within an operator; 0 leaves the number to ONNX Runtime", default=0),
    "opt": Choice("graph optimisation", tuple(_OPTIMISATION_LEVELS)),
    "deterministic": Choice("1 asks for deterministic kernels where there are any", ("0", "1")),
}


@dataclass(frozen=True, slots=True)
class OrtCpuEngine:
    """ONNX Runtime's CPU provider."""

    name: str = "ort-cpu"
    description: str = "ONNX Runtime on the CPU"
    options: Mapping[str, EngineOption] = field(
        default_factory=lambda: MappingProxyType(
            _COMMON_OPTIONS
            | {
                "provider": Text("execution provider of a library, instead of the built-in one"),
                "library": Text("path of the library that has it"),
            }
        )
    )

    def availability(self) -> Availability:
        """Whether exactly one working distribution of ONNX Runtime is installed."""
        return placed_on(CPU_PROVIDER, cpu_availability())

    def open(self, model: Path, options: Mapping[str, OptionValue]) -> OrtSession:
        """Load `model`; see `harness.engines.base.Engine.open`.

        Raises:
            InvalidRunError: real work runs elsewhere than on the provider of a library that was asked for.
        """
        values = complete(self.name, self.options, options)
        settings = _session_settings(values)
        provider, library = str(values["provider"]), str(values["library"])
        runtime = load_runtime()
        session_options, chosen = _session_options(runtime, settings), {"providers": [CPU_PROVIDER]}
        if provider or library:
            devices = plugin_devices(runtime, engine=self.name, library=library, provider=provider)
            session_options.add_provider_for_devices(devices, {})
            version = str(devices[0].ep_metadata.get("version", ""))
            settings |= {"provider": provider, "provider_version": version}
            chosen = {}
        try:
            session = runtime.InferenceSession(str(model), session_options, **chosen)
        except Exception as error:  # ONNX Runtime raises RuntimeError and ten classes of its own
            raise session_error(self.name, str(model), error) from error
        placement = placement_of(session)
        if provider:
            require_on_device(provider, placement)
        info = SessionInfo(
            engine=self.name,
            version=runtime.__version__,
            settings=settings,
            placement=placement,
            mode="eager",
        )
        return OrtSession(runtime, session, info=info)


@dataclass(frozen=True, slots=True)
class OrtCudaEngine:
    """ONNX Runtime's CUDA provider; never its CPU provider instead."""

    name: str = "ort-cuda"
    description: str = "ONNX Runtime on an NVIDIA GPU"
    options: Mapping[str, EngineOption] = field(
        default_factory=lambda: MappingProxyType(_COMMON_OPTIONS | dict(CUDA_OPTIONS))
    )

    def availability(self) -> Availability:
        """Whether a session really opens on CUDA device 0."""
        return placed_on(CUDA_PROVIDER, cuda_availability())

    def open(self, model: Path, options: Mapping[str, OptionValue]) -> OrtSession:
        """Load `model` on CUDA; see `harness.engines.base.Engine.open`.

        Raises:
            InvalidRunError: the session runs on the CPU, or part of the real work does.
        """
        values = complete(self.name, self.options, options)
        settings = _session_settings(values)
        device, asked = int(values["device"]), provider_options(values)
        require(self.name, cuda_availability(device))
        runtime, refusal = load_runtime(), None
        try:
            session = self._session(runtime, model, settings, asked)
        except EngineFailedError as error:
            refusal = capture_refusal(error.message)
            if refusal is None:
                raise
            asked, settings = without_capture(asked), settings | {"graph_capture": f"refused: {refusal}"}
            session = self._session(runtime, model, settings, asked)
        reported = provider_settings(asked, session.get_provider_options()[CUDA_PROVIDER], os.environ)
        placement = placement_of(session)
        require_on_device(CUDA_PROVIDER, placement)
        is_captured = asked["enable_cuda_graph"] == "1"
        info = SessionInfo(
            engine=self.name,
            version=runtime.__version__,
            settings=settings | reported,
            placement=placement,
            mode="captured" if is_captured else "eager",
        )
        # The programs run outside of the graph, on memory that changes from run to run.
        programs = DevicePrograms(runtime, [(CUDA_PROVIDER, without_capture(asked))], engine=self.name)
        captured = (
            CapturedRuns(runtime, session, programs, device="cuda", device_id=device) if is_captured else None
        )
        return OrtSession(
            runtime,
            session,
            info=info,
            device="cuda",
            device_id=device,
            programs=programs,
            captured=captured,
        )

    def _session(
        self, runtime: Any, model: Path, settings: Mapping[str, OptionValue], asked: Mapping[str, str]
    ) -> Any:
        """An open session of ONNX Runtime whose first provider is that of CUDA."""
        with captured_stderr() as lines:
            try:
                session = runtime.InferenceSession(
                    str(model),
                    _session_options(runtime, settings),
                    providers=[(CUDA_PROVIDER, dict(asked)), CPU_PROVIDER],
                    enable_fallback=0,
                )
            except Exception as error:  # ONNX Runtime raises RuntimeError and ten classes of its own
                raise session_error(self.name, str(model), error) from error
        if session.get_providers()[0] != CUDA_PROVIDER:
            raise InvalidRunError(
                f"{self.name} asked for {CUDA_PROVIDER}, and the session runs on "
                f"{', '.join(session.get_providers())}: {' '.join(lines[:1]) or 'no reason given'}",
                next_action="See `onnx-parity engines` for what is usable here.",
            )
        return session


def _session_settings(options: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """The settings that both providers share, pinned or requested."""
    return {
        "threads": options["threads"],
        "opt": options["opt"],
        "inter_op_threads": 1,
        "deterministic_compute": options["deterministic"] == "1",
    }


def _session_options(runtime: Any, settings: Mapping[str, OptionValue]) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = settings["threads"]
    options.inter_op_num_threads = settings["inter_op_threads"]
    options.use_deterministic_compute = settings["deterministic_compute"]
    options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    level = _OPTIMISATION_LEVELS[str(settings["opt"])]
    options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, level)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return options


CPU_ENGINE: Engine = OrtCpuEngine()
CUDA_ENGINE: Engine = OrtCudaEngine()
