"""A session on ONNX Runtime: tensors stay where the provider has them, through I/O binding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from harness.engines.base import SessionInfo, TensorHandle, TopLogits
from harness.engines.ort_captured import CapturedRuns
from harness.engines.ort_device import DevicePrograms, host_view
from harness.engines.ort_runtime import run_error
from harness.engines.reduce import top_logits_of
from harness.engines.tensor_types import (
    dtype_of_array,
    is_native,
    numpy_dtype,
    onnx_element_type,
    port_dtype,
)
from harness.errors import EngineFailedError
from harness.ports import PortInventory, inventory_from_session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["OrtHandle", "OrtSession"]


class OrtHandle:
    """An `onnxruntime.OrtValue`, on the host or on a device."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def shape(self) -> tuple[int, ...]:
        """Concrete extents."""
        return tuple(self.value.shape())

    @property
    def dtype(self) -> str:
        """Element type in the vocabulary of `harness.ports.Port.dtype`."""
        return port_dtype(self.value.element_type())


class OrtSession:
    """A `harness.engines.base.Session` around an `onnxruntime.InferenceSession`.

    One binding object serves every run. Outputs are bound by device, without a buffer: ONNX Runtime
    then gives each run fresh memory, so that handles of earlier runs stay as they are.

    Args:
        runtime: the module `onnxruntime`.
        session: the open session.
        info: what runs and how.
        device: where outputs and states live, `cpu` or `cuda`.
        device_id: index of the device.
        programs: what reduces and fetches tensors on the device; None for the host.
        captured: what runs the graph where it was opened with graph capture.
    """

    def __init__(
        self,
        runtime: Any,
        session: Any,
        *,
        info: SessionInfo,
        device: str = "cpu",
        device_id: int = 0,
        programs: DevicePrograms | None = None,
        captured: CapturedRuns | None = None,
    ) -> None:
        self._runtime = runtime
        self._session = session
        self._binding = session.io_binding()
        self._info = info
        self._device = device
        self._device_id = device_id
        self._programs = programs
        self._captured = captured
        self._inventory = inventory_from_session(session)

    @property
    def inventory(self) -> PortInventory:
        """The ports as ONNX Runtime reports them."""
        return self._inventory

    @property
    def info(self) -> SessionInfo:
        """What runs and how."""
        return self._info

    def place(self, array: NDArray[Any]) -> OrtHandle:
        """Wrap a host array without a copy; ONNX Runtime moves it to the device when it is bound."""
        import numpy as np

        # ONNX Runtime reads the memory as if it were contiguous, whatever the strides say.
        dense = np.asarray(array, order="C")
        element_type = onnx_element_type(dtype_of_array(dense.dtype))
        if not is_native(dense.dtype):
            dense = dense.view(f"u{dense.dtype.itemsize}")  # it takes the bits and the ONNX type
        value = self._runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(dense, element_type)
        return OrtHandle(value)

    def zeros(self, shape: Sequence[int], dtype: str) -> OrtHandle:
        """Zeros on the device, or on the host where there is nothing to put on a device."""
        import numpy as np

        zeros = np.zeros(tuple(shape), dtype=numpy_dtype(dtype))
        if self._device == "cpu" or zeros.size == 0 or not is_native(zeros.dtype):
            return self.place(zeros)
        try:
            value = self._runtime.OrtValue.ortvalue_from_numpy(zeros, self._device, self._device_id)
        except Exception as error:  # out of memory, say: ONNX Runtime raises ten classes of its own
            raise run_error(self._info.engine, error) from error
        return OrtHandle(value)

    def run(self, feeds: Mapping[str, TensorHandle], outputs: Sequence[str]) -> dict[str, TensorHandle]:
        """Run the graph once; see `harness.engines.base.Session.run`."""
        binding = self._live()
        given = {name: cast("OrtHandle", handle).value for name, handle in feeds.items()}
        try:
            if self._captured is not None:
                values = self._captured.run(given, outputs)
            else:
                # Without this an input that is missing now would keep its value of the last run.
                binding.clear_binding_inputs()
                binding.clear_binding_outputs()
                for name, value in given.items():
                    binding.bind_ortvalue_input(name, value)
                for name in outputs:
                    binding.bind_output(name, self._device, self._device_id)
                self._session.run_with_iobinding(binding)
                values = binding.get_outputs()
        except EngineFailedError:
            raise
        except Exception as error:  # ONNX Runtime raises RuntimeError and ten classes of its own
            raise run_error(self._info.engine, error) from error
        return {name: OrtHandle(value) for name, value in zip(outputs, values, strict=True)}

    def top_logits(
        self, logits: TensorHandle, *, k: int, positions: Sequence[int] | None = None
    ) -> list[TopLogits]:
        """The largest logits; on the host over a view, on a device by a program there."""
        self._live()
        value = cast("OrtHandle", logits).value
        if self._programs is None:
            return top_logits_of(host_view(value), k, positions)
        return self._programs.top_logits(value, k=k, positions=positions)

    def copy_out(self, handle: TensorHandle) -> NDArray[np.generic]:
        """Copy a tensor to the host."""
        self._live()
        value = cast("OrtHandle", handle).value
        if value.device_name() == "cpu" or self._programs is None:
            return host_view(value).copy()
        return self._programs.fetch(value)

    def close(self) -> None:
        """Free the session, its binding and its device programs."""
        self._binding = None
        self._session = None
        self._programs = None
        self._captured = None

    def _live(self) -> Any:
        if self._binding is None:
            raise RuntimeError("the session is closed")
        return self._binding
