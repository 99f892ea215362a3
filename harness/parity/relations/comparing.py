"""Two observations to what differs: where first, and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.parity.relations.observation import Observation

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LOGITS", "Comparison", "Difference", "compare", "largest_difference"]

LOGITS = "logits"
"""What logits are called beside the names of states, whatever their port is called."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where one tensor of two decodes differs.

    Attributes:
        step: at which step; 0 has seen the prompt.
        port: the state's output, or `logits`.
        differing: how many of its elements.
        elements: how many it has.
        index: of the first that differs; None where the shapes do.
        expected: that element; None where the shapes differ.
        found: the same element of the other.
        size: the largest difference of two elements; infinity where one alone is finite, or shapes differ.
        note: what else is to be said; None where the numbers say it all.
    """

    step: int
    port: str
    differing: int
    elements: int
    index: tuple[int, ...] | None
    expected: float | None
    found: float | None
    size: float
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that differs.

    Attributes:
        first: in order of steps, and within one the logits before the states; None where all bits agree.
        largest: the largest difference of each tensor that differs, over all steps, by port.
        tokens_part_at: the first step at which the choices differ; None where they never do.
        tokens: how many choices were compared.
        states: how many states were compared, over all steps.
    """

    first: Difference | None
    largest: Mapping[str, float] = field(default_factory=dict)
    tokens_part_at: int | None = None
    tokens: int = 0
    states: int = 0


def compare(expected: Observation, found: Observation) -> Comparison:
    """Compare tokens, logits and states at every step that both observations have.

    Raises:
        ValueError: they have none in common, or not the same states: then nothing would be compared.
    """
    steps = sorted(expected.keys() & found.keys())
    if not steps:
        raise ValueError("no step in common: nothing was compared")
    differences: list[Difference] = []
    part, states = None, 0
    for step in steps:
        one, other = expected[step], found[step]
        if one.token != other.token and part is None:
            part = step
        if one.states and other.states and one.states.keys() != other.states.keys():
            raise ValueError(f"step {step}: the states are not the same")
        shared = [name for name in one.states if name in other.states]
        states += len(shared)
        pairs = [(LOGITS, one.logits, other.logits)]
        pairs += [(name, one.states[name], other.states[name]) for name in shared]
        differences += _different(step, pairs)
    largest: dict[str, float] = {}
    for difference in differences:
        largest[difference.port] = max(largest.get(difference.port, 0.0), difference.size)
    return Comparison(
        first=differences[0] if differences else None,
        largest=largest,
        tokens_part_at=part,
        tokens=len(steps),
        states=states,
    )


def largest_difference(one: NDArray[Any], other: NDArray[Any]) -> float:
    """The largest difference of two elements; infinity where only one of them is finite, 0 for none."""
    import numpy as np

    if not one.size:
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = one.astype(np.float64), other.astype(np.float64)
        gaps = np.where(_same(a, b), 0.0, np.abs(a - b))
    return float(np.where(np.isnan(gaps), np.inf, gaps).max())


def _different(step: int, pairs: Iterable[tuple[str, NDArray[Any], NDArray[Any]]]) -> Iterable[Difference]:
    import numpy as np

    for name, one, other in pairs:
        if one.shape != other.shape or one.dtype != other.dtype:
            note = f"{one.dtype} {list(one.shape)} against {other.dtype} {list(other.shape)}"
            yield Difference(step, name, one.size, one.size, None, None, None, float("inf"), note)
        elif one.tobytes() != other.tobytes():
            apart = _bits(one) != _bits(other)
            index = tuple(int(i) for i in np.unravel_index(int(apart.argmax()), apart.shape))
            yield Difference(
                step,
                name,
                int(apart.sum()),
                one.size,
                index,
                float(one[index]),
                float(other[index]),
                largest_difference(one, other),
            )


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    return np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.dtype.itemsize}")


def _same(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    same: NDArray[Any] = (a == b) | (np.isnan(a) & np.isnan(b))
    return same
