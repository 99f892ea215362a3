"""Outputs that are computed only as far as somebody reads them.

The logits of a long pass, [positions, vocab], are larger than all else that a pass keeps, and what reads them
wants a few numbers a position. Where an output is a product with a constant weight, perhaps with elementwise
steps behind it (a cast, a soft cap), the pass stops before that product, and any part of it can be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.errors import EngineFailedError, ParityError
from harness.oracle.executor import ABSENT, Body, Step
from harness.oracle.matrix import Deferred, Projection
from harness.oracle.node import Compute, Tensor

if TYPE_CHECKING:
    import numpy as np

__all__ = ["DeferredOutput", "Tail", "tail_of"]

_ELEMENTWISE = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Neg", "Sub", "Tanh"})
"""Operators of which any part of the output needs just that part of the input; those found behind heads."""


@dataclass(frozen=True, slots=True)
class Tail:
    """How an output is computed from the values that its product takes.

    Attributes:
        inputs: slots of the product's inputs.
        head: the product.
        steps: the elementwise steps behind it, in order.
        labels: of the product and the steps, for messages.
    """

    inputs: tuple[int, ...]
    head: Projection
    steps: tuple[Compute, ...]
    labels: tuple[str, ...]


def tail_of(body: Body, slot: int) -> Tail | None:
    """The tail that ends in `slot`; None where that is not a product, or not one that can be cut."""
    producers = {output: step for step in body.steps for output in step.outputs}
    steps: list[Compute] = []
    labels: list[str] = []
    while (step := producers.get(slot)) is not None:
        labels.insert(0, step.label)
        if isinstance(step.compute, Projection):
            return Tail(step.inputs, step.compute, tuple(steps), tuple(labels))
        before = _elementwise(step, body)
        if before is None:
            return None
        slot, compute = before
        steps.insert(0, compute)
    return None


def _elementwise(step: Step, body: Body) -> tuple[int, Compute] | None:
    """The slot that an elementwise step reads and what it computes of it, its constants being numbers."""
    if step.label.partition(" ")[0] not in _ELEMENTWISE:
        return None
    numbers = {slot: body.constant(slot) for slot in step.inputs if slot != ABSENT}
    variable = [slot for slot, value in numbers.items() if value is None]
    if len(variable) != 1 or any(value.size != 1 for value in numbers.values() if value is not None):
        return None
    (slot,) = variable

    def compute(x: Tensor) -> Any:
        return step.compute(*[x if given == slot else numbers.get(given) for given in step.inputs])

    return slot, compute


@dataclass(frozen=True, slots=True)
class DeferredOutput:
    """An output of which nothing is computed yet.

    Attributes:
        product: what the tail starts with, its inputs known.
        tail: how to compute it.
        setting: the context that the model computes in.
    """

    product: Deferred
    tail: Tail
    setting: Callable[[], AbstractContextManager[object]]

    @classmethod
    def of(
        cls, tail: Tail, inputs: Sequence[Any], setting: Callable[[], AbstractContextManager[object]]
    ) -> DeferredOutput:
        """The output of `tail` for values of its inputs.

        Raises:
            EngineFailedError: they do not fit.
        """
        with setting(), _naming(tail.labels[0]):
            return cls(tail.head.later(*inputs), tail, setting)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole output."""
        return self.product.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the whole output."""
        return self.product.dtype

    def columns(self, start: int, stop: int, positions: Sequence[int] | None = None) -> Tensor:
        """Entries `start` to `stop` of the last axis, [positions, stop - start].

        `positions` count along all leading axes taken as one; None means all of them.

        Raises:
            EngineFailedError: a kernel failed.
        """
        with self.setting():
            with _naming(self.tail.labels[0]):
                y = self.product.columns(start, stop, positions)
            return self._finished(y)

    def whole(self) -> Tensor:
        """All of it, in its own shape.

        Raises:
            EngineFailedError: a kernel failed.
        """
        with self.setting():
            with _naming(self.tail.labels[0]):
                y = self.product.whole()
            return self._finished(y)

    def _finished(self, y: Tensor) -> Tensor:
        for step, label in zip(self.tail.steps, self.tail.labels[1:], strict=True):
            with _naming(label):
                y = step(y)
        return y


@contextmanager
def _naming(label: str) -> Iterator[None]:
    """Turn what a kernel raises into an error that names its node, as `Body.run` does."""
    try:
        yield
    except ParityError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise EngineFailedError(
            f"The oracle failed at {label}: {reason}.",
            next_action="Check the graph with `onnx.checker` and the shapes of what is fed.",
            kind="crashed",
        ) from error
