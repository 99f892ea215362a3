"""A session whose runs go through a function first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from harness.engines.base import Session, SessionInfo, TensorHandle, TopLogits
from harness.ports import PortInventory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Feeds", "Intercepted", "Names", "Runner"]

Feeds: TypeAlias = Mapping[str, TensorHandle]
Names: TypeAlias = Sequence[str]
Runner: TypeAlias = Callable[[Session, Feeds, Names], dict[str, TensorHandle]]
"""What happens instead of `Session.run`, given the session that can do it."""


class Intercepted:
    """A `harness.engines.base.Session` with another way to run; all else is the inner session's."""

    def __init__(self, inner: Session, run: Runner) -> None:
        """`inner` stays its owner's to close."""
        self._inner = inner
        self._run = run

    @property
    def inventory(self) -> PortInventory:
        """That of the inner session."""
        return self._inner.inventory

    @property
    def info(self) -> SessionInfo:
        """That of the inner session."""
        return self._inner.info

    def place(self, array: NDArray[Any]) -> TensorHandle:
        """As the inner session does."""
        return self._inner.place(array)

    def zeros(self, shape: Sequence[int], dtype: str) -> TensorHandle:
        """As the inner session does."""
        return self._inner.zeros(shape, dtype)

    def run(self, feeds: Feeds, outputs: Names) -> dict[str, TensorHandle]:
        """Run the graph, in the other way."""
        return self._run(self._inner, feeds, outputs)

    def top_logits(
        self, logits: TensorHandle, *, k: int, positions: Sequence[int] | None = None
    ) -> list[TopLogits]:
        """As the inner session does."""
        return self._inner.top_logits(logits, k=k, positions=positions)

    def copy_out(self, handle: TensorHandle) -> NDArray[np.generic]:
        """As the inner session does."""
        return self._inner.copy_out(handle)

    def close(self) -> None:
        """As the inner session does."""
        self._inner.close()
