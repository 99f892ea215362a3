"""A session in another process, behind the session protocol.

Handles are numbers of tensors that stay in the worker. `place` and `zeros` take no round trip: they travel
with the next call, as does what was dropped meanwhile. A reduction that followed the last run is done along
with the next one, and names of ports cross once, so that a step of decoding is one short question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from harness.engines.base import SessionInfo, TensorHandle, TopLogits
from harness.engines.isolated.answers import Opened, check_copy, ran_in, tops_in
from harness.engines.isolated.arena import Arena, aligned
from harness.engines.isolated.process import Worker
from harness.engines.isolated.protocol import Document
from harness.engines.reduce import check_logits_shape
from harness.engines.tensor_types import dtype_of_array, numpy_dtype
from harness.ports import PortInventory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["IsolatedHandle", "IsolatedSession"]


_Answer = TypeVar("_Answer")

_Reduction: TypeAlias = tuple[int, tuple[int, ...] | None]
"""How many of the largest logits, and at which positions."""


class IsolatedHandle:
    """The number of a tensor in a worker, which keeps it as long as this handle lives."""

    __slots__ = ("_dropped", "_dtype", "_shape", "number", "tops")

    def __init__(self, number: int, dtype: str, shape: tuple[int, ...], dropped: list[int]) -> None:
        self.number = number
        self.tops: tuple[_Reduction, list[TopLogits]] | None = None
        """A reduction that was done already, and what it gave."""
        self._dtype = dtype
        self._shape = shape
        self._dropped = dropped

    def __del__(self) -> None:
        self._dropped.append(self.number)

    @property
    def shape(self) -> tuple[int, ...]:
        """Concrete extents."""
        return self._shape

    @property
    def dtype(self) -> str:
        """Element type in the vocabulary of `harness.ports.Port.dtype`."""
        return self._dtype


class IsolatedSession:
    """A `harness.engines.base.Session` whose graph is loaded in a worker process."""

    def __init__(self, worker: Worker, opened: Opened) -> None:
        """Take over a worker that has answered `open`."""
        self._worker: Worker | None = worker
        self._info = opened.info
        self._inventory = opened.inventory
        self._count = 0
        self._dropped: list[int] = []
        self._new: list[tuple[int, str, tuple[int, ...], int | None]] = []
        self._used = 0
        self._signatures: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = {}
        self._last: dict[int, str] = {}
        self._expected: tuple[str, _Reduction] | None = None

    @property
    def inventory(self) -> PortInventory:
        """The ports as the engine reports them."""
        return self._inventory

    @property
    def info(self) -> SessionInfo:
        """What runs and how."""
        return self._info

    def place(self, array: NDArray[Any]) -> IsolatedHandle:
        """Copy a host array into shared memory, from where the worker takes it at the next call."""
        offset, used = self._used, self._used + aligned(array.nbytes)
        arena = self._arena(used, "placing a tensor")
        arena.write(offset, array)
        self._used = used
        return self._fresh(dtype_of_array(array.dtype), array.shape, offset)

    def zeros(self, shape: Sequence[int], dtype: str) -> IsolatedHandle:
        """Zeros that the engine makes at the next call."""
        self._live()
        return self._fresh(dtype, tuple(shape), None)

    def run(self, feeds: Mapping[str, TensorHandle], outputs: Sequence[str]) -> dict[str, TensorHandle]:
        """Run the graph once; see `harness.engines.base.Session.run`."""
        first, self._count = self._count, self._count + len(outputs)
        numbers = [cast("IsolatedHandle", handle).number for handle in feeds.values()]
        names = tuple(feeds), tuple(outputs)
        signature = self._signatures.get(names)
        question: Document = {"ask": "run", "feeds": numbers, "first": first, "signature": signature}
        if names not in self._signatures:
            question["names"] = names
            self._signatures[names] = question["signature"] = len(self._signatures)
        if self._expected is not None and self._expected[0] in names[1]:
            question["expected"] = self._expected
        ran = self._ask("running", question, lambda document: ran_in(document, outputs))
        self._last = dict(enumerate(outputs, first))
        made: dict[str, IsolatedHandle] = {}
        for number, (name, (dtype, shape)) in enumerate(zip(outputs, ran.kinds, strict=True), first):
            made[name] = IsolatedHandle(number, dtype, shape, self._dropped)
        if "expected" in question and ran.tops is not None:
            output, reduction = question["expected"]
            made[output].tops = reduction, ran.tops
        return dict(made)

    def top_logits(
        self, logits: TensorHandle, *, k: int, positions: Sequence[int] | None = None
    ) -> list[TopLogits]:
        """The largest logits, reduced in the worker; see `harness.engines.base.Session.top_logits`."""
        self._live()
        handle = cast("IsolatedHandle", logits)
        reduction = k, None if positions is None else tuple(int(position) for position in positions)
        if handle.tops is not None and handle.tops[0] == reduction:
            return list(handle.tops[1])
        _check_reduction(handle.shape, k, positions)
        if handle.number in self._last:
            self._expected = self._last[handle.number], reduction
        question = {"ask": "top", "handle": handle.number, "reduction": reduction}
        return self._ask("reducing logits", question, tops_in)

    def copy_out(self, handle: TensorHandle) -> NDArray[np.generic]:
        """Copy a tensor to the host, through shared memory."""
        from math import prod

        doing = "copying a tensor"
        number, dtype = cast("IsolatedHandle", handle).number, numpy_dtype(handle.dtype)
        arena = self._arena(max(self._used, prod(handle.shape) * dtype.itemsize), doing)
        kind = handle.dtype, handle.shape
        self._ask(doing, {"ask": "copy", "handle": number}, lambda document: check_copy(document, kind))
        array = arena.read(0, handle.shape, dtype)
        arena.trim()
        return array

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _fresh(self, dtype: str, shape: tuple[int, ...], offset: int | None) -> IsolatedHandle:
        number, self._count = self._count, self._count + 1
        self._new.append((number, dtype, shape, offset))
        return IsolatedHandle(number, dtype, shape, self._dropped)

    def _arena(self, size: int, doing: str) -> Arena:
        """Shared memory with room for `size` bytes."""
        worker = self._live()
        try:
            worker.arena.grow(size)
        except (OSError, OverflowError, ValueError) as error:  # as much as an engine may claim to hold
            worker.no_room(doing, error)
        return worker.arena

    def _ask(self, doing: str, question: Document, read: Callable[[Document], _Answer]) -> _Answer:
        """Ask the worker, with all that has gathered since the last call."""
        worker = self._live()
        # Handles of tensors that the worker never heard of may be among the dropped ones.
        dropped = self._dropped.copy()
        del self._dropped[: len(dropped)]
        question |= {"arena": worker.arena.size, "new": self._new, "drop": dropped}
        self._new, self._used = [], 0
        return worker.ask(doing, question, read)

    def _live(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the session is closed")
        return self._worker


def _check_reduction(shape: tuple[int, ...], k: int, positions: Sequence[int] | None) -> None:
    """Tell a caller's mistake from an engine's failure; rules as in `harness.engines.reduce`."""
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    check_logits_shape(shape)
    count = shape[1] if len(shape) == 3 else 1
    for position in positions or ():
        if not -count <= position < count:
            raise IndexError(f"position {position} of {count}")
