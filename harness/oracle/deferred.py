"""Outputs that are computed only as far as somebody reads them.

The logits of a long pass, [positions, vocab], are larger than all else that a pass keeps, and what reads them
wants a few numbers a position. Where an output is a product with a constant weight, perhaps with a cast, a
soft cap or a reshape behind it, the pass stops before that product, and any part of it can be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.errors import EngineFailedError, ParityError
from harness.oracle.executor import ABSENT, Body, Step
from harness.oracle.matrix import Deferred, Projection
from harness.oracle.node import Compute, Tensor

__all__ = ["DeferredOutput", "Tail", "TailStep", "tail_of"]

_ELEMENTWISE = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Neg", "Sub", "Tanh"})
"""Operators of which any part of the output needs just that part of the input; those found behind heads."""


@dataclass(frozen=True, slots=True)
class TailStep:
    """A step behind the product.

    Attributes:
        compute: of the product's output, and for a reshape the new shape.
        label: for messages.
        shape: slot of the new shape; None for elementwise steps.
        rank: the least rank of an elementwise step's output: that of a constant [1, 1, 1] is three.
    """

    compute: Compute
    label: str
    shape: int | None = None
    rank: int = 0

    def whole(self, x: Tensor, shape: Tensor | None = None) -> Tensor:
        """The step's output for all of what it reads, and for a reshape the new shape."""
        if self.shape is not None:
            return self.compute(x, shape)
        y = self.compute(x)
        return y.reshape((1,) * (self.rank - y.ndim) + y.shape)


@dataclass(frozen=True, slots=True)
class Tail:
    """How an output is computed from values before its product.

    Attributes:
        head: the product.
        label: of the product, for messages.
        inputs: slots of its inputs.
        steps: the steps behind it, in order.
    """

    head: Projection
    label: str
    inputs: tuple[int, ...]
    steps: tuple[TailStep, ...]

    @property
    def needs(self) -> tuple[int, ...]:
        """The slots whose values `DeferredOutput` wants: those of `inputs`, then shapes in order."""
        return (*self.inputs, *(step.shape for step in self.steps if step.shape is not None))


def tail_of(body: Body, slot: int) -> Tail | None:
    """The tail that ends in `slot`; None where that is not a product, or not one that can be cut."""
    producers = {output: step for step in body.steps for output in step.outputs}
    steps: list[TailStep] = []
    while (step := producers.get(slot)) is not None:
        if isinstance(step.compute, Projection):
            return Tail(step.compute, step.label, step.inputs, tuple(reversed(steps)))
        before = _reshape(step) or _elementwise(step, body)
        if before is None:
            return None
        slot, found = before
        steps.append(found)
    return None


def _reshape(step: Step) -> tuple[int, TailStep] | None:
    """The slot that a reshape reads, and the reshape; where it leaves the last axis is seen when it runs."""
    if _op_type(step) != "Reshape":
        return None
    source, shape = step.inputs[:2]
    return source, TailStep(step.compute, step.label, shape)


def _elementwise(step: Step, body: Body) -> tuple[int, TailStep] | None:
    """The slot that an elementwise step reads and what it computes of it, its constants being numbers."""
    if _op_type(step) not in _ELEMENTWISE:
        return None
    numbers = {slot: body.constant(slot) for slot in step.inputs if slot != ABSENT}
    variable = [slot for slot, value in numbers.items() if value is None]
    if len(variable) != 1 or any(value.size != 1 for value in numbers.values() if value is not None):
        return None
    (slot,) = variable
    # Without axes, so that no part of the output gets axes of theirs.
    given = [None if value is None else value.reshape(()) for value in map(numbers.get, step.inputs)]
    rank = max((value.ndim for value in numbers.values() if value is not None), default=0)

    def compute(x: Tensor) -> Any:
        return step.compute(
            *[x if source == slot else value for source, value in zip(step.inputs, given, strict=True)]
        )

    return slot, TailStep(compute, step.label, rank=rank)


def _op_type(step: Step) -> str:
    return step.label.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class DeferredOutput:
    """An output of which nothing is computed yet.

    Attributes:
        product: what the tail starts with, its inputs known.
        tail: how to compute it.
        shapes: of the tail's reshapes, in order.
        setting: the context that the model computes in.
        shape: of the whole output.
        dtype: of the whole output.
    """

    product: Deferred
    tail: Tail
    shapes: tuple[Tensor, ...]
    setting: Callable[[], AbstractContextManager[object]]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(
        cls, tail: Tail, values: Sequence[Any], setting: Callable[[], AbstractContextManager[object]]
    ) -> DeferredOutput | Tensor:
        """The output of `tail` for the values that it needs; the whole where its last axis is reshaped.

        Raises:
            EngineFailedError: the values do not fit.
        """
        count = len(tail.inputs)
        shapes = tuple(values[count:])
        waiting = list(shapes)
        with setting():
            with _naming(tail.label):
                product = tail.head.later(*values[:count])
            # An array of one number in all places has any shape without taking memory.
            blank = np.broadcast_to(np.zeros((), product.dtype), product.shape)
            for step in tail.steps:
                with _naming(step.label):
                    if step.shape is not None:
                        blank = step.whole(blank, waiting.pop(0))
                    else:
                        one = step.whole(np.zeros((1,) * blank.ndim, blank.dtype))
                        blank = np.broadcast_to(one, (1,) * (one.ndim - blank.ndim) + blank.shape)
        output = cls(product, tail, shapes, setting, blank.shape, blank.dtype)
        return output if blank.shape[-1:] == product.shape[-1:] else output.whole()

    def columns(self, start: int, stop: int, positions: Sequence[int] | None = None) -> Tensor:
        """Entries `start` to `stop` of the last axis, [positions, stop - start].

        `positions` count along all leading axes taken as one; None means all of them.

        Raises:
            EngineFailedError: a kernel failed.
        """
        with self.setting():
            with _naming(self.tail.label):
                y = self.product.columns(start, stop, positions)
            for step in self.tail.steps:
                if step.shape is None:
                    with _naming(step.label):
                        y = step.compute(y)
            return y

    def whole(self) -> Tensor:
        """All of it, in its own shape.

        Raises:
            EngineFailedError: a kernel failed.
        """
        shapes = list(self.shapes)
        with self.setting():
            with _naming(self.tail.label):
                y = self.product.whole()
            for step in self.tail.steps:
                with _naming(step.label):
                    y = step.whole(y) if step.shape is None else step.whole(y, shapes.pop(0))
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
