"""The oracle behind the session protocol: our own executor in numpy, on the host."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from harness.engines.host import HostSession
from harness.engines.options import Choice, Count, complete
from harness.engines.reduce import merged, top_logits_of
from harness.engines.tensor_types import dtype_of_array
from harness.errors import EngineFailedError, InputError
from harness.ports import Port, PortInventory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.oracle import DeferredOutput, OracleModel, TensorSpec

__all__ = ["ENGINE", "OracleEngine", "OracleHandle", "OracleSession"]

_PRECISIONS = ("float32", "float64")
_ROUNDINGS = ("none", "model")


_CHUNK = 1 << 21
"""Logits that are computed and reduced together, where those of a whole pass would not fit in memory."""

_MAY_BE_EQUAL = 1 << 9
"""Units in the last place within which two logits may be equal: more than the order of a sum makes of it."""


class OracleHandle:
    """A numpy array, or one that is not computed yet.

    Narrow floats come out of a run in the oracle's precision, and say so.
    """

    __slots__ = ("_value",)

    def __init__(self, value: NDArray[Any] | DeferredOutput) -> None:
        self._value = value

    @property
    def array(self) -> NDArray[Any]:
        """All of it, computed now if it was not."""
        if self.deferred is not None:
            self._value = self.deferred.whole()
        return cast("NDArray[Any]", self._value)

    @property
    def deferred(self) -> DeferredOutput | None:
        """What is not computed yet; None when it is."""
        return None if hasattr(self._value, "__array__") else self._value

    @property
    def shape(self) -> tuple[int, ...]:
        """Concrete extents."""
        return self._value.shape

    @property
    def dtype(self) -> str:
        """Element type in the vocabulary of `harness.ports.Port.dtype`."""
        return dtype_of_array(self._value.dtype)


def _settled(deferred: DeferredOutput, row: int, top: TopLogits, k: int) -> TopLogits:
    """The `k` largest of `top`, those that may be equal computed again, one entry at a time.

    BLAS sums the entries of one product in orders of its own: at the edge of a tile, or for one token only,
    two columns of the weight that are equal to the bit give logits that differ in the last ones. An entry
    alone is always summed alike, and what is equal then has the lowest ID.
    """
    import numpy as np

    first = top.values[0]
    # Of the coarser type: a cast behind the product may go either way.
    types = [dtype for dtype in (deferred.product.dtype, deferred.dtype) if dtype.kind == "f"]
    within = _MAY_BE_EQUAL * max(float(np.finfo(dtype).eps) for dtype in types) * abs(first)
    near = [token for token, value in zip(top.token_ids, top.values, strict=True) if first - value <= within]
    if top.values[len(near) - 1] < first:
        if len(near) == len(top.token_ids) < deferred.shape[-1]:
            whole = deferred.columns(0, deferred.shape[-1], [row])[0]
            near = np.flatnonzero(whole >= first - within).tolist()
        alone = {token: float(deferred.columns(token, token + 1, [row])[0, 0]) for token in near}
        pairs = [*alone.items(), *zip(top.token_ids[len(near) :], top.values[len(near) :], strict=True)]
        pairs.sort(key=lambda pair: (-pair[1], pair[0]))
        top = replace(
            top, token_ids=tuple(token for token, _ in pairs), values=tuple(value for _, value in pairs)
        )
    return replace(top, token_ids=top.token_ids[:k], values=top.values[:k])


class OracleSession(HostSession["OracleModel"]):
    """A `harness.engines.base.Session` around a `harness.oracle.OracleModel`. Nothing is copied.

    Its ports are those that the graph declares, in its own dtypes; initialisers are no inputs. Outputs that
    end in a product with a weight, as logits do, are computed when something reads them, and `top_logits`
    reads them piece by piece: no array of [positions, vocab] comes to be.
    """

    def __init__(self, model: OracleModel, *, info: SessionInfo) -> None:
        ports = PortInventory(
            inputs=tuple(_port(spec) for spec in model.inputs),
            outputs=tuple(_port(spec) for spec in model.outputs),
        )
        super().__init__(model, info=info, inventory=ports)

    def place(self, array: NDArray[Any]) -> OracleHandle:
        """Wrap a host array."""
        return OracleHandle(array)

    def run(self, feeds: Mapping[str, TensorHandle], outputs: Sequence[str]) -> dict[str, TensorHandle]:
        """Run the graph once; see `harness.engines.base.Session.run`."""
        arrays = {name: cast("OracleHandle", handle).array for name, handle in feeds.items()}
        try:
            results = self._live().begin(arrays, outputs)
        except InputError as error:
            # Feeds come from the decode loop, not from the user: on an engine, wrong ones fail the run.
            raise EngineFailedError(error.message, next_action=error.next_action, kind="crashed") from error
        return {name: OracleHandle(value) for name, value in results.items()}

    def top_logits(
        self, logits: TensorHandle, *, k: int, positions: Sequence[int] | None = None
    ) -> list[TopLogits]:
        """The largest logits; see `harness.engines.base.Session.top_logits`.

        Raises:
            EngineFailedError: they were not computed yet, and computing them failed.
        """
        handle = cast("OracleHandle", logits)
        if handle.deferred is None or len(handle.shape) not in (2, 3) or handle.shape[0] != 1:
            return super().top_logits(logits, k=k, positions=positions)
        count = handle.shape[1] if len(handle.shape) == 3 else 1
        rows = list(range(count))
        return self._top_at(handle, k, rows if positions is None else [rows[place] for place in positions])

    def top_logits_of_rows(
        self, logits: TensorHandle, *, k: int, places: Sequence[tuple[int, int]]
    ) -> list[TopLogits]:
        """See `harness.engines.base.BatchingSession`.

        Raises:
            EngineFailedError: as `top_logits`.
        """
        handle = cast("OracleHandle", logits)
        count = handle.shape[1]
        return self._top_at(handle, k, [row * count + position for row, position in places])

    def _top_at(self, handle: OracleHandle, k: int, rows: Sequence[int]) -> list[TopLogits]:
        """The largest logits at `rows`, which count along all leading axes taken as one."""
        self._live()
        deferred, vocab = handle.deferred, handle.shape[-1]
        if not rows:
            return []
        if deferred is None:
            return top_logits_of(handle.array.reshape(1, -1, vocab), k, rows)
        # At least two, so that a tie is seen.
        count = max(k, 2)
        step = max(_CHUNK // len(rows), count)
        tops: list[TopLogits] = []
        for start in range(0, vocab, step):
            part = deferred.columns(start, min(start + step, vocab), rows)
            found = top_logits_of(part[None], count)
            tops = [merged(a, b, start, count) for a, b in zip(tops, found, strict=True)] if start else found
        return [_settled(deferred, row, top, k) for row, top in zip(rows, tops, strict=True)]

    def stacked(self, parts: Sequence[TensorHandle], axis: int) -> OracleHandle:
        """See `harness.engines.base.BatchingSession`; equal parts share their memory."""
        import numpy as np

        arrays = [cast("OracleHandle", part).array for part in parts]
        if all(array is arrays[0] for array in arrays):
            shape = list(arrays[0].shape)
            shape[axis] = len(arrays)
            return OracleHandle(np.broadcast_to(arrays[0], shape))
        return OracleHandle(np.concatenate(arrays, axis=axis))

    def watch(self, outputs: Sequence[str]) -> None:
        """See `harness.engines.base.WatchingSession`."""
        self._live().watch(outputs)

    def not_finite(self) -> tuple[str, ...]:
        """See `harness.engines.base.WatchingSession`."""
        return self._live().not_finite()

    def first_non_finite(self, feeds: Mapping[str, TensorHandle], outputs: Sequence[str]) -> str | None:
        """See `harness.engines.base.DiagnosingSession`."""
        arrays = {name: cast("OracleHandle", handle).array for name, handle in feeds.items()}
        return self._live().first_non_finite(arrays, outputs)

    def proof(self) -> Mapping[str, Any]:
        """See `harness.engines.base.ProvingSession`; with what bounds: `harness.oracle.proof`."""
        return self._live().prove().mapping()

    def _view(self, handle: TensorHandle) -> NDArray[Any]:
        return cast("OracleHandle", handle).array


@dataclass(frozen=True, slots=True)
class OracleEngine:
    """Our own executor; always there, as it needs numpy and onnx alone."""

    name: str = "oracle"
    description: str = "our own executor in numpy, in fp32 or better"
    options: Mapping[str, EngineOption] = field(
        default_factory=lambda: MappingProxyType(
            {
                "precision": Choice("what floats are computed in", _PRECISIONS),
                "rounding": Choice(
                    "none: narrowing casts are dropped; model: values keep their declared types", _ROUNDINGS
                ),
                "threads": Count("workers that share large products; 0: one a processor", default=0),
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
        rounding = cast("Literal['none', 'model']", values["rounding"])
        threads = int(values["threads"])
        import numpy as np

        from harness.oracle import OracleModel

        info = SessionInfo(
            engine=self.name,
            version=_version(),
            settings={
                "precision": precision,
                "rounding": rounding,
                "threads": threads,
                "numpy": np.__version__,
                "blas": _blas(),
                # Chooses OpenBLAS's kernels, and with them the order of its sums.
                "OPENBLAS_CORETYPE": os.environ.get("OPENBLAS_CORETYPE", ""),
            },
            mode="eager",
        )
        loaded = OracleModel.load(model, precision=precision, threads=threads, rounding=rounding)
        return OracleSession(loaded, info=info)


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
