"""Runs that are captured once as a CUDA graph, and replayed from then on.

A replay reads and writes the memory that was bound when it was captured, whatever is bound now. So each
signature (names, shapes and types of what is fed, names of what is asked for) that comes again gets buffers
of its own: what is fed is copied in, and results are copied out, so that handles stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from harness.engines.ort_device import DevicePrograms

__all__ = ["CapturedRuns"]

_Signature: TypeAlias = tuple[tuple[tuple[str, int, tuple[int, ...]], ...], tuple[str, ...]]

_GRAPH_ID = "gpu_graph_id"
_NO_GRAPH = -1
"""The graph ID with which ONNX Runtime neither captures nor replays."""


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Memory of one captured graph, bound once."""

    binding: Any
    inputs: Mapping[str, Any]
    outputs: Sequence[Any]
    options: Any


class CapturedRuns:
    """Runs a session that was opened with graph capture.

    The first run of a signature is eager, and shows the shapes of its results; the second is captured. A
    cache that grows gives each step another signature, so nothing of it is ever captured.
    """

    def __init__(
        self, runtime: Any, session: Any, programs: DevicePrograms, *, device: str, device_id: int
    ) -> None:
        """Arguments as of `harness.engines.ort_session.OrtSession`."""
        self._runtime = runtime
        self._session = session
        self._programs = programs
        self._device = device
        self._device_id = device_id
        self._eager = session.io_binding()
        self._not_captured = self._options(_NO_GRAPH)
        self._seen: dict[_Signature, list[tuple[int, tuple[int, ...]]]] = {}
        self._captured: dict[_Signature, _Buffers] = {}

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str]) -> list[Any]:
        """OrtValues of `outputs`, none of which a later run writes to; raises whatever ONNX Runtime does."""
        signature = (
            tuple((name, value.element_type(), tuple(value.shape())) for name, value in feeds.items()),
            tuple(outputs),
        )
        if signature not in self._seen:
            found = self._run_eagerly(feeds, outputs)
            self._seen[signature] = [(value.element_type(), tuple(value.shape())) for value in found]
            return found
        if signature not in self._captured:
            self._captured[signature] = self._buffers(signature)
        buffers = self._captured[signature]
        for name, value in feeds.items():
            self._programs.copy(value, buffers.inputs[name])
        self._session.run_with_iobinding(buffers.binding, buffers.options)
        results = []
        for value in buffers.outputs:
            kept = self._allocated(value.element_type(), value.shape())
            self._programs.copy(value, kept)
            results.append(kept)
        return results

    def _run_eagerly(self, feeds: Mapping[str, Any], outputs: Sequence[str]) -> list[Any]:
        self._eager.clear_binding_inputs()
        self._eager.clear_binding_outputs()
        for name, value in feeds.items():
            self._eager.bind_ortvalue_input(name, value)
        for name in outputs:
            self._eager.bind_output(name, self._device, self._device_id)
        self._session.run_with_iobinding(self._eager, self._not_captured)
        found: list[Any] = self._eager.get_outputs()
        return found

    def _buffers(self, signature: _Signature) -> _Buffers:
        fed, asked = signature
        inputs = {name: self._allocated(kind, shape) for name, kind, shape in fed}
        outputs = [self._allocated(kind, shape) for kind, shape in self._seen[signature]]
        binding = self._session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in zip(asked, outputs, strict=True):
            binding.bind_ortvalue_output(name, value)
        return _Buffers(binding, inputs, outputs, self._options(len(self._captured)))

    def _allocated(self, element_type: int, shape: Sequence[int]) -> Any:
        return self._runtime.OrtValue.ortvalue_from_shape_and_type(
            tuple(shape), element_type, self._device, self._device_id
        )

    def _options(self, graph: int) -> Any:
        options = self._runtime.RunOptions()
        options.log_severity_level = 4
        options.add_run_config_entry(_GRAPH_ID, str(graph))
        return options
