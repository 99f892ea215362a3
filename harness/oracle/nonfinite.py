"""Where numbers that are not finite come from.

Inside a graph infinities and NaN are values like others: masks are made of them. What matters is how they
got into an output. So the values of a run are looked at one by one, and from an output that is not finite
the way leads back through inputs that are not finite either, to the node that made them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.oracle.executor import ABSENT, Body, Program
from harness.oracle.precision import is_float

__all__ = ["all_finite", "first_non_finite"]

_FILLS = ("ConstantOfShape", "Constant")
"""Operators that give an infinity because they are told to: masks start with it."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a value holds beside finite numbers."""

    nan: bool = False
    infinite: bool = False


_FINITE = _Seen()


def all_finite(value: Any) -> bool:
    """Whether a tensor holds neither infinities nor NaN; None and what is no float holds none.

    A sum is not finite if a term is not, and takes no memory. Only where it is not, which may be its own
    overflow, is each number looked at.
    """
    if value is None or not is_float(np.asarray(value).dtype):
        return True
    array = np.asarray(value)
    if array.dtype.kind != "f":
        array = array.astype(np.float32)  # narrow floats of ml_dtypes
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())


def _look(value: Any) -> _Seen:
    """What an array holds; None and what is no float is finite."""
    if value is None or not is_float(np.asarray(value).dtype):
        return _FINITE
    array = np.asarray(value)
    if array.dtype.kind != "f":
        array = array.astype(np.float32)  # narrow floats of ml_dtypes
    if all_finite(array):
        return _FINITE
    return _Seen(nan=bool(np.isnan(array).any()), infinite=bool(np.isinf(array).any()))


def first_non_finite(
    body: Body, program: Program, arguments: Sequence[Any], inputs: Sequence[str]
) -> str | None:
    """The label of the first node that made results of `program` infinite or NaN; None if all are finite.

    That is, of the nodes with finite inputs from which infinities or NaN lead to the result without a gap,
    the first to run; a node that made NaN of infinities which only fill a mask counts as such. In a
    subgraph it is looked for in the first of its runs that gives anything of the kind. For a fed value the
    label is `input NAME`. The graph runs once, and once more for each level of subgraphs.

    Args:
        body: of the graph.
        program: what to run.
        arguments: values for the inputs of `body`.
        inputs: names of the inputs of `body`.
    """
    source = _source(body, program, arguments)
    if source is None:
        return None
    if source < 0:
        return f"input {dict(zip(body.inputs, inputs, strict=False))[-1 - source]}"
    return _label(body, program, arguments, source)


def _label(body: Body, program: Program, arguments: Sequence[Any], source: int) -> str:
    """The label of a step, or of the node of its subgraphs that is to blame."""
    found: list[str] = []

    def watch(inner: Body, given: Sequence[Any]) -> None:
        within = None if found else _source(inner, inner.whole, given)
        if within is not None and within >= 0:
            found.append(_label(inner, inner.whole, given, within))

    for inner in program.bodies[source]:
        inner.watch = watch
    try:
        if program.bodies[source]:
            body.run(program, arguments)
    finally:
        for inner in program.bodies[source]:
            inner.watch = None
    return found[0] if found else program.labels[source]


def _source(body: Body, program: Program, arguments: Sequence[Any]) -> int | None:
    """The step that is to blame, by position; -1 - slot for an input; None where results are finite."""
    seen = {slot: _look(value) for slot, value in zip(body.inputs, arguments, strict=True)}

    def watched(compute: Callable[..., Any], outputs: tuple[int, ...]) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            result = compute(*values)
            given = result if isinstance(result, tuple) else (result,)
            for slot, value in zip(outputs, given, strict=False):
                seen[slot] = _look(value)
            return result

        return run

    instructions = tuple(
        (watched(compute, outputs), given, outputs, dead)
        for compute, given, outputs, dead in program.instructions
    )
    body.run(replace(program, instructions=instructions), arguments)
    trail = _Trail(body, program, seen)
    for kind in ("nan", "infinite"):
        ends = [slot for slot in program.results if getattr(trail.look(slot), kind)]
        if ends:
            return trail.source(ends)
    return None


class _Trail:
    """The way back from values that are not finite."""

    def __init__(self, body: Body, program: Program, seen: dict[int, _Seen]) -> None:
        self._body = body
        self._program = program
        self._seen = seen
        self._producer = {
            slot: position
            for position, (_, _, outputs, _) in enumerate(program.instructions)
            for slot in outputs
        }

    def look(self, slot: int) -> _Seen:
        """What the value of a slot held."""
        if slot not in self._seen:
            self._seen[slot] = _look(self._body.constant(slot))
        return self._seen[slot]

    def source(self, ends: Iterable[int]) -> int:
        """Where NaN (or else infinities) in the slots `ends` come from: a position, or -1 - slot."""
        ends = list(ends)
        made = min(self._sources(ends, "nan")) if any(self.look(slot).nan for slot in ends) else None
        if made is not None and made < 0:
            return made
        if made is not None:
            ends = [slot for slot in self._inputs(made) if self.look(slot).infinite]
        # What made NaN of infinities is not to blame for those that a node before it made.
        sources = self._sources(ends, "infinite")
        overflows = [place for place in sources if self._overflowed(place)]
        if overflows:
            return min(overflows)
        return min(sources) if made is None else made

    def _sources(self, ends: Sequence[int], kind: str) -> list[int]:
        """Where values of a kind begin that lead to `ends`: steps whose inputs have none, or -1 - slot."""
        found: list[int] = []
        todo, done = list(ends), set(ends)
        while todo:
            slot = todo.pop()
            position = self._producer.get(slot)
            if position is None:
                found.append(-1 - slot)
                continue
            before = [given for given in self._inputs(position) if getattr(self.look(given), kind)]
            variable = [given for given in before if self._body.constant(given) is None]
            if not variable:
                found.append(position)
            fresh = set(variable) - done
            todo.extend(fresh)
            done |= fresh
        return found

    def _overflowed(self, place: int) -> bool:
        """Whether a step made infinities of finite inputs, and not because it was told to."""
        if place < 0 or self._program.labels[place].partition(" ")[0] in _FILLS:
            return False
        return all(self.look(slot) == _FINITE for slot in self._inputs(place))

    def _inputs(self, position: int) -> list[int]:
        return [slot for slot in self._program.instructions[position][1] if slot != ABSENT]
