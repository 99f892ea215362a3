"""What sessions have in common whose tensors lie in host memory, where numpy can look at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from harness.engines.base import SessionInfo, TensorHandle, TopLogits
from harness.engines.reduce import top_logits_of
from harness.engines.tensor_types import numpy_dtype
from harness.ports import PortInventory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["HostSession"]

_Model = TypeVar("_Model")


class HostSession(Generic[_Model]):
    """A model until it is closed, and its ports; how it runs, and what its tensors are, is its engine's own.

    Our own engines add `place`, `run` and `_view` to make a `harness.engines.base.Session` of it. An engine
    of somebody else keeps that protocol and needs no base.
    """

    def __init__(self, model: _Model, *, info: SessionInfo, inventory: PortInventory) -> None:
        self._model: _Model | None = model
        self._info = info
        self._inventory = inventory

    @property
    def inventory(self) -> PortInventory:
        """The ports as the engine itself reports them."""
        return self._inventory

    @property
    def info(self) -> SessionInfo:
        """What runs and how."""
        return self._info

    def place(self, array: NDArray[Any]) -> TensorHandle:
        """Hand over a host array; see `harness.engines.base.Session.place`."""
        raise NotImplementedError

    def zeros(self, shape: Sequence[int], dtype: str) -> TensorHandle:
        """Zeros on the host."""
        import numpy as np

        return self.place(np.zeros(tuple(shape), dtype=numpy_dtype(dtype)))

    def top_logits(
        self, logits: TensorHandle, *, k: int, positions: Sequence[int] | None = None
    ) -> list[TopLogits]:
        """The largest logits, over a view of the engine's memory."""
        self._live()
        return top_logits_of(self._view(logits), k, positions)

    def copy_out(self, handle: TensorHandle) -> NDArray[np.generic]:
        """A copy of a tensor."""
        self._live()
        copy: NDArray[np.generic] = self._view(handle).copy()
        return copy

    def close(self) -> None:
        """Free the model. May be called twice."""
        self._model = None

    def _view(self, handle: TensorHandle) -> NDArray[Any]:
        """The tensor as numpy sees it, without a copy where there is a way."""
        raise NotImplementedError

    def _live(self) -> _Model:
        """The model.

        Raises:
            RuntimeError: the session is closed.
        """
        if self._model is None:
            raise RuntimeError("the session is closed")
        return self._model
