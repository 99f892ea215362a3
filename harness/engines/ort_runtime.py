"""Getting at ONNX Runtime: is it there, alone, and does CUDA really work; and what its errors mean."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from importlib import metadata
from typing import Any

from harness.engines.base import Availability
from harness.errors import EngineFailedError, EngineUnavailableError, InputError, ParityError

__all__ = [
    "CUDA_PROVIDER",
    "captured_stderr",
    "cpu_availability",
    "cuda_availability",
    "installed_distributions",
    "load_runtime",
    "require",
    "run_error",
    "session_error",
]

CUDA_PROVIDER = "CUDAExecutionProvider"

_DISTRIBUTIONS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-azure",
    "onnxruntime-cann",
    "onnxruntime-coreml",
    "onnxruntime-directml",
    "onnxruntime-gpu-extended",
    "onnxruntime-lite",
    "onnxruntime-migraphx",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
    "onnxruntime-rocm",
    "onnxruntime-silicon",
    "onnxruntime-training",
    "onnxruntime-training-cpu",
    "onnxruntime-trt-rtx",
    "onnxruntime-webgpu",
    "onnxruntime-windowsml",
    "ort-nightly",
    "ort-nightly-directml",
    "ort-nightly-gpu",
)
"""Distributions that own the folder `onnxruntime`, or did: pip installs several without a word, and the last
one wins file by file."""

_OWNED = "onnxruntime/__init__.py"

_UNSUPPORTED = re.compile(
    r"NOT_IMPLEMENTED"
    r"|is not a registered function/op"
    r"|No Op registered for"
    r"|Could not find an implementation for"
    r"|[Uu]nsupported model IR version"
    r"|is under development and support for this is limited"
    r"|MLDataType for: .* is not currently registered"
    r"|Invalid tensor data type"
)
"""What ONNX Runtime says of an operator, operator set or type that it lacks (1.24 to 1.32)."""


def installed_distributions() -> dict[str, str]:
    """The distributions that own the files of the module `onnxruntime`, with their versions.

    A provider in a library of its own, such as newer releases of `onnxruntime-qnn`, is none of them.
    """
    found = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            distribution = metadata.distribution(name)
            record = distribution.read_text("RECORD")
            # Whoever keeps no record may own them.
            if record is None or any(line.startswith(_OWNED) for line in record.splitlines()):
                found[name] = distribution.version
    return found


def load_runtime() -> Any:
    """The module `onnxruntime`.

    Raises:
        EngineUnavailableError: it is missing, broken, or several distributions share its folder.
    """
    require("ONNX Runtime", cpu_availability())
    return _imported()


def _imported() -> Any:
    """The module `onnxruntime`, wherever it is imported.

    From 1.29 on it reports sessions to its makers and leaves a file in the temporary folder as soon as it is
    imported, unless a variable says no by then; whoever has set that variable keeps it.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    return onnxruntime


def require(name: str, found: Availability) -> None:
    """Raise EngineUnavailableError with the reason unless `found` is usable."""
    if not found.usable:
        raise EngineUnavailableError(
            f"{name} is not usable here: {found.reason}",
            next_action=found.next_action or "See `onnx-parity engines`.",
        )


def cpu_availability() -> Availability:
    """Whether ONNX Runtime itself can be used."""
    found = installed_distributions()
    if not found:
        return Availability(
            usable=False,
            reason="the package onnxruntime is not installed.",
            next_action="Run `pip install onnxruntime`.",
        )
    if len(found) > 1:
        names = " and ".join(f"{name} {version}" for name, version in found.items())
        keep = "onnxruntime-gpu" if "onnxruntime-gpu" in found else next(iter(found))
        return Availability(
            usable=False,
            reason=f"{names} are installed together and overwrite each other's files.",
            next_action=f"Run `pip uninstall -y {' '.join(found)}`, then `pip install {keep}`.",
        )
    (name, version), *_ = found.items()
    try:
        onnxruntime = _imported()
    except Exception as error:  # a broken native library raises whatever it likes
        return Availability(
            usable=False,
            version=version,
            reason=f"{name} {version} cannot be imported: {_first_line(str(error))}",
            next_action=f"Run `pip install --force-reinstall {name}`.",
        )
    if not hasattr(onnxruntime, "InferenceSession"):
        # What remains of the folder after one of two distributions was uninstalled.
        return Availability(
            usable=False,
            version=version,
            reason=f"the files of {name} {version} are gone, probably with another distribution of it.",
            next_action=f"Run `pip install --force-reinstall {name}`.",
        )
    return Availability(usable=True, version=onnxruntime.__version__)


def cuda_availability(device: int = 0) -> Availability:
    """Whether ONNX Runtime really computes on CUDA device `device`.

    Being compiled in is not enough: without a device, or without its libraries, ONNX Runtime opens a
    session asked for CUDA alone on the CPU. So the driver is asked for devices first, which is cheap
    and silent, and only then a session of one node is opened, once a process.
    """
    found = cpu_availability()
    if not found.usable:
        return found
    if CUDA_PROVIDER not in _imported().get_available_providers():
        return Availability(
            usable=False,
            version=found.version,
            reason="the installed ONNX Runtime is built without CUDA.",
            next_action="Run `pip uninstall -y onnxruntime`, then `pip install 'onnx-parity[cuda]'`.",
        )
    problem = _driver_problem(device)
    if problem is not None:
        return Availability(
            usable=False,
            version=found.version,
            reason=problem,
            next_action="Use a machine with an NVIDIA GPU and its driver, or another engine.",
        )
    problem = _session_problem(device)
    if problem is not None:
        return Availability(
            usable=False,
            version=found.version,
            reason=f"a CUDA session does not open: {problem}",
            next_action="Run `pip install 'onnx-parity[cuda]'` for the CUDA libraries.",
        )
    return found


def _driver_problem(device: int) -> str | None:
    """Why the NVIDIA driver has no device `device`; None when it has (CUDA driver API, cuInit and on)."""
    import ctypes

    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return f"there is no NVIDIA driver ({name} is missing)."
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return "the NVIDIA driver finds no device."
    if device >= count.value:
        return f"CUDA device {device} does not exist; the driver has {count.value}."
    return None


@lru_cache(maxsize=8)
def _session_problem(device: int) -> str | None:
    """Why a session of one node does not run on CUDA device `device`; None when it does."""
    import onnx
    from onnx import helper

    runtime = load_runtime()
    ports = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "probe", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with captured_stderr() as lines:
        try:
            runtime.preload_dlls()
            session = runtime.InferenceSession(
                model.SerializeToString(),
                providers=[(CUDA_PROVIDER, {"device_id": str(device)})],
                enable_fallback=0,
            )
            first = session.get_providers()[0]
        except Exception as error:  # whatever it raises is the reason
            return _first_line(str(error))
    return None if first == CUDA_PROVIDER else _reason_in(lines)


def _reason_in(lines: list[str]) -> str:
    """The line of a failed start that names the missing library, else the first one."""
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in lines]
    for line in plain:
        if found := re.search(r"with error: (.+)", line):
            return found.group(1)
    return next((line for line in plain if line), "ONNX Runtime gave no reason.")


@contextlib.contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """Collect what native code writes to file descriptor 2 and Python code to stdout meanwhile.

    ONNX Runtime reports a provider that does not load nowhere else. The list is filled when the block
    ends. The descriptors belong to the process, so keep the block short.
    """
    lines: list[str] = []
    printed = io.StringIO()
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:  # a process without stderr has nothing to litter
        with contextlib.redirect_stdout(printed):
            yield lines
        lines += printed.getvalue().splitlines()
        return
    with tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 2)
        try:
            with contextlib.redirect_stdout(printed):
                yield lines
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            sink.seek(0)
            lines += sink.read().decode(errors="replace").splitlines()
            lines += printed.getvalue().splitlines()


def session_error(engine: str, model: str, error: Exception) -> ParityError:
    """What it means that ONNX Runtime could not open `model`: bad input, or a failure of the engine."""
    text = _first_line(str(error))
    if type(error).__name__ in ("InvalidProtobuf", "NoSuchFile"):
        return InputError(
            f"{model} cannot be read as an ONNX model: {text}",
            next_action="Check the path, and copy or export the file again.",
        )
    return _failure(engine, f"could not load {model}", text)


def run_error(engine: str, error: Exception) -> EngineFailedError:
    """The failure that an exception during a run means."""
    return _failure(engine, "failed while running", _first_line(str(error)))


def _failure(engine: str, what: str, text: str) -> EngineFailedError:
    if _UNSUPPORTED.search(text):
        return EngineFailedError(
            f"{engine} {what}: {text}",
            kind="unsupported",
            next_action="Use an engine that has this operator and type, or export the model without them.",
        )
    return EngineFailedError(
        f"{engine} {what}: {text}",
        kind="crashed",
        next_action="Try it with `opt=disable`; if it still fails, report it to the engine with the model.",
    )


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")
