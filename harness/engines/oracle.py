"""The oracle behind the session protocol: our own executor in numpy, on the host."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

from harness.engines.base import (
    Availability,
    Engine,
    EngineOption,
    OptionValue,
    SessionInfo,
    TensorHandle,
    TopLogits,
)
from harness.engines.options import Choice, Count, complete
from harness.engines.reduce import top_logits_of
from harness.engines.tensor_types import dtype_of_array, numpy_dtype
from harness.errors import EngineFailedError, InputError
from harness.ports import Port, PortInventory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from harness.oracle import OracleModel, TensorSpec

__all__ = ["ENGINE", "OracleEngine", "OracleHandle", "OracleSession"]

_PRECISIONS = ("float32", "float64")


class OracleHandle:
    """A numpy array. Narrow floats come out of a run in the oracle's precision, and say so."""

    __slots__ = ("array",)

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """Concrete extents."""
        return self.array.shape

    @property
    def dtype(self) -> str:
        """Element type in the vocabulary of `harness.ports.Port.dtype`."""
        return dtype_of_array(self.array.dtype)


class OracleSession:
    """A `harness.engines.base.Session` around a `harness.oracle.OracleModel`. Nothing is copied."""

    def __init__(self, model: OracleModel, *, info: SessionInfo) -> None:
        self._model: OracleModel | None = model
        self._info = info
        self._inventory = PortInventory(
            inputs=tuple(_port(spec) for spec in model.inputs),
            outputs=tuple(_port(spec) for spec in model.outputs),
        )

    @property
    def inventory(self) -> PortInventory:
        """The ports that the graph declares, in its own dtypes; initialisers are no inputs."""
        return self._inventory

    @property
    def info(self) -> SessionInfo:
        """What runs and how."""
        return self._info

    def place(self, array: NDArray[Any]) -> OracleHandle:
        """Wrap a host array."""
        return OracleHandle(array)

    def zeros(self, shape: Sequence[int], dtype: str) -> OracleHandle:
        """Zeros on the host."""
        import numpy as np

        return OracleHandle(np.zeros(tuple(shape), dtype=numpy_dtype(dtype)))

    def run(self, feeds: Mapping[str, TensorHandle], outputs: Sequence[str]) -> dict[str, TensorHandle]:
        """Run the graph once; see `harness.engines.base.Session.run`."""
        arrays = {name: cast("OracleHandle", handle).array for name, handle in feeds.items()}
        try:
            results = self._live().run(arrays, outputs)
        except InputError as error:
            # Feeds come from the decode loop, not from the user: on an engine, wrong ones fail the run.
            raise EngineFailedError(error.message, next_action=error.next_action, kind="crashed") from error
        return {name: OracleHandle(array) for name, array in results.items()}

    def top_logits(
        self, logits: TensorHandle, *, k: int, positions: Sequence[int] | None = None
    ) -> list[TopLogits]:
        """The largest logits."""
        self._live()
        return top_logits_of(cast("OracleHandle", logits).array, k, positions)

    def copy_out(self, handle: TensorHandle) -> NDArray[np.generic]:
        """A copy of a tensor."""
        self._live()
        copy: NDArray[np.generic] = cast("OracleHandle", handle).array.copy()
        return copy

    def close(self) -> None:
        """Free the model."""
        self._model = None

    def _live(self) -> OracleModel:
        if self._model is None:
            raise RuntimeError("the session is closed")
        return self._model


@dataclass(frozen=True, slots=True)
class OracleEngine:
    """Our own executor; always there, as it needs numpy and onnx alone."""

    name: str = "oracle"
    description: str = "our own executor in numpy, in fp32 or better"
    options: Mapping[str, EngineOption] = field(
        default_factory=lambda: MappingProxyType(
            {
                "precision": Choice("what floats are computed in", _PRECISIONS),
                "threads": Count("threads of numpy's BLAS; 0 leaves the number to it", default=1),
            }
        )
    )

    def availability(self) -> Availability:
        """Always usable."""
        return Availability(usable=True, version=_version())

    def open(self, model: Path, options: Mapping[str, OptionValue]) -> OracleSession:
        """Load `model`; see `harness.engines.base.Engine.open`."""
        values = complete(self.name, self.options, options)
        precision = cast("Literal['float32', 'float64']", values["precision"])
        threads = int(values["threads"])
        import numpy as np

        from harness.oracle import OracleModel

        info = SessionInfo(
            engine=self.name,
            version=_version(),
            settings={
                "precision": precision,
                "threads": threads,
                "numpy": np.__version__,
                "blas": _blas(),
                # Chooses OpenBLAS's kernels, and with them the order of its sums.
                "OPENBLAS_CORETYPE": os.environ.get("OPENBLAS_CORETYPE", ""),
            },
            mode="eager",
        )
        return OracleSession(OracleModel.load(model, precision=precision, threads=threads), info=info)


def _version() -> str:
    return metadata.version("onnx-parity")


def _blas() -> str:
    """Name and version of the BLAS that numpy was built with."""
    import numpy as np

    config: Any = np.show_config(mode="dicts")
    blas = config.get("Build Dependencies", {}).get("blas", {})
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


def _port(spec: TensorSpec) -> Port:
    return Port(name=spec.name, dtype=spec.dtype, shape=spec.shape)


ENGINE: Engine = OracleEngine()
