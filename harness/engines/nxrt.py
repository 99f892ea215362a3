"""The native runtime `nxrt` on the CPU: an engine that shares no code with ONNX Runtime."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from harness.engines.base import (
    Availability,
    Engine,
    EngineOption,
    OptionValue,
    SessionInfo,
    TensorHandle,
)
from harness.engines.host import HostSession
from harness.engines.options import complete
from harness.engines.tensor_types import dtype_of_array, is_native
from harness.engines.wording import first_line
from harness.errors import EngineFailedError, EngineUnavailableError, InputError, ParityError
from harness.ports import inventory_from_session

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ENGINE", "NxrtEngine", "NxrtHandle", "NxrtSession"]


class NxrtHandle:
    """A host array that was placed, or an `nxrt.NxrtValue`: feeding the latter back copies nothing."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def shape(self) -> tuple[int, ...]:
        """Concrete extents."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> str:
        """Element type in the vocabulary of `harness.ports.Port.dtype`."""
        return dtype_of_array(self.value.dtype)


class NxrtSession(HostSession[Any]):
    """A `harness.engines.base.Session` around an `nxrt.InferenceSession`.

    nxrt renames symbolic axes in its ports, equal names staying equal.
    """

    def __init__(self, session: Any, *, info: SessionInfo) -> None:
        super().__init__(session, info=info, inventory=inventory_from_session(session))

    def place(self, array: NDArray[Any]) -> NxrtHandle:
        """Wrap a host array; nxrt copies it when it is fed."""
        return NxrtHandle(array)

    def run(self, feeds: Mapping[str, TensorHandle], outputs: Sequence[str]) -> dict[str, TensorHandle]:
        """Run the graph once; see `harness.engines.base.Session.run`."""
        session = self._live()
        arrays = {name: cast("NxrtHandle", handle).value for name, handle in feeds.items()}
        with _failures(f"{self._info.engine} failed while running"):
            values = session.run_with_values(list(outputs), arrays)
        return {name: NxrtHandle(value) for name, value in zip(outputs, values, strict=True)}

    def _view(self, handle: TensorHandle) -> NDArray[Any]:
        """Over the memory of an NxrtValue; a copy where numpy's DLPack lacks the type."""
        import numpy as np

        value = cast("NxrtHandle", handle).value
        if isinstance(value, np.ndarray):
            return value
        if not is_native(value.dtype):
            copy: NDArray[Any] = value.numpy()
            return copy
        return np.from_dlpack(value)


@dataclass(frozen=True, slots=True)
class NxrtEngine:
    """The CPU provider of `nxrt`."""

    name: str = "nxrt"
    description: str = "nxrt, a native Rust runtime, on the CPU"
    options: Mapping[str, EngineOption] = field(default_factory=lambda: MappingProxyType({}))

    def availability(self) -> Availability:
        """Whether the package is installed and loads."""
        try:
            version = metadata.version("nxrt")
        except metadata.PackageNotFoundError:
            return Availability(
                usable=False,
                reason="the package nxrt is not installed.",
                next_action="Run `pip install --pre 'onnx-parity[nxrt]'`.",
            )
        try:
            import nxrt  # noqa: F401 (whether it can be imported is the question)
        except Exception as error:  # a broken native library raises whatever it likes
            return Availability(
                usable=False,
                version=version,
                reason=f"nxrt {version} cannot be imported: {first_line(error)}",
                next_action="Run `pip install --pre --force-reinstall nxrt`.",
            )
        return Availability(usable=True, version=version)

    def open(self, model: Path, options: Mapping[str, OptionValue]) -> NxrtSession:
        """Load `model`; see `harness.engines.base.Engine.open`."""
        complete(self.name, self.options, options)
        found = self.availability()
        if not found.usable:
            raise EngineUnavailableError(
                f"{self.name} is not usable here: {found.reason}",
                next_action=found.next_action or "See `onnx-parity engines`.",
            )
        import nxrt

        with _failures(f"{self.name} could not load {model}"):
            session = nxrt.InferenceSession(str(model))
        info = SessionInfo(engine=self.name, version=found.version or "unknown", mode="eager")
        return NxrtSession(session, info=info)


@contextlib.contextmanager
def _failures(what: str) -> Iterator[None]:
    """Turn what nxrt raises into this project's errors."""
    try:
        yield
    except Exception as error:  # it raises ValueError, RuntimeError and OSError alike
        raise _meaning(what, error) from error
    except BaseException as error:
        # A panic of Rust code is none of Exception's children, and its class cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise _meaning(what, error) from error


def _meaning(what: str, error: BaseException) -> ParityError:
    text = first_line(error)
    if isinstance(error, FileNotFoundError) or "failed to parse ONNX protobuf" in text:
        return InputError(f"{what}: {text}", next_action="Check the path, and copy or export the file again.")
    if "unsupported" in text or "not supported" in text or "not implemented" in text:
        return EngineFailedError(
            f"{what}: {text}",
            kind="unsupported",
            next_action="Use an engine that has this operator and type, or export the model without them.",
        )
    return EngineFailedError(
        f"{what}: {text}",
        kind="crashed",
        next_action="Report it to the engine with the model, or use another engine.",
    )


ENGINE: Engine = NxrtEngine()
