"""Running a planned graph: values in numbered slots, each freed at its last use.

A `Body` is a planned graph: the main one or a subgraph. Which of its steps run depends on the outputs
that are wanted, so steps are pruned, and last uses found, once for each set of wanted outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from harness.errors import EngineFailedError, ParityError
from harness.oracle.matrix import Projection, together
from harness.oracle.node import Compute, Node
from harness.oracle.precision import Array

__all__ = ["ABSENT", "DISCARD", "Body", "Program", "Step"]

ABSENT = 0
"""The slot of every absent input; holds None."""

DISCARD = 1
"""The slot of every output without a name."""


@dataclass(frozen=True, slots=True)
class Step:
    """One node, bound to the slots of its inputs and outputs.

    Attributes:
        compute: the kernel with its attributes resolved.
        inputs: slots in the order that `compute` takes; captured values of subgraphs at the end.
        outputs: slots in the order that `compute` returns.
        label: for messages: operator and node.
        node: what its kernel was told.
        bodies: the subgraphs that `compute` runs.
    """

    compute: Compute
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    label: str
    node: Node
    bodies: tuple[Body, ...] = ()


_NO_LOOKS: Mapping[int, Callable[[Any], None]] = MappingProxyType({})

_Instruction: TypeAlias = tuple[Compute, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Program:
    """The steps that a set of outputs needs, in order.

    Attributes:
        instructions: for each step its kernel, input slots, output slots, and slots dead after it.
        labels: for each step its label.
        bodies: for each step its subgraphs.
        results: the slots of the wanted outputs.
        needed: the slots that must be given, or are constant.
    """

    instructions: tuple[_Instruction, ...]
    labels: tuple[str, ...]
    bodies: tuple[tuple[Body, ...], ...]
    results: tuple[int, ...]
    needed: frozenset[int]


class Body:
    """A planned graph.

    Attributes:
        inputs: slots of the graph's inputs, in order; captured outer values follow them.
        outputs: slots of the graph's outputs, in order.
        steps: all steps, in an order in which they can run.
        capture_count: how many of `inputs` are captured from outside.
        blanks: for each output an array of its declared dtype with extent 0 where the shape has a symbol;
            None where the graph declares no shape.
        whole: the program of all outputs.
        watch: while set, called with the arguments of each run as a subgraph, before it.
    """

    def __init__(
        self,
        *,
        inputs: Sequence[int],
        outputs: Sequence[int],
        steps: Sequence[Step],
        constants: dict[int, Any],
        slot_count: int,
        capture_count: int = 0,
        blanks: Sequence[Array | None] = (),
    ) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.steps = tuple(steps)
        self.capture_count = capture_count
        self.blanks = tuple(blanks)
        self._constants = constants
        self._template: list[Any] = [constants.get(slot) for slot in range(slot_count)]
        self.whole = self.program(self.outputs)
        self.watch: Callable[[Body, Sequence[Any]], None] | None = None

    def constant(self, slot: int) -> Any:
        """The value of a slot that is known before anything runs; None for all others."""
        return self._constants.get(slot)

    def program(
        self,
        results: Iterable[int],
        *,
        gathered: bool = False,
        looks: Mapping[int, Callable[[Any], None]] = _NO_LOOKS,
    ) -> Program:
        """The program that computes the slots `results` and nothing that they do not need.

        If `gathered`, projections of the same value are one instruction: workers then share them all at once.
        The slots of `looks` are computed too: each value is handed to its function as soon as there is one,
        and lives no longer for it.
        """
        results = tuple(results)
        live = {*results, *looks}
        chosen: list[Step] = []
        for step in reversed(self.steps):
            if not live.isdisjoint(step.outputs):
                chosen.append(step)
                live.difference_update(step.outputs)
                live.update(step.inputs)
        chosen.reverse()
        steps = _gathered(chosen) if gathered else chosen
        return Program(
            instructions=tuple(
                (_looking(step, looks), step.inputs, step.outputs, dead)
                for step, dead in zip(steps, self._dead_after(steps, results), strict=True)
            ),
            labels=tuple(step.label for step in steps),
            bodies=tuple(step.bodies for step in steps),
            results=results,
            needed=frozenset(live - {ABSENT}),
        )

    def _dead_after(self, steps: Sequence[Step], results: Iterable[int]) -> list[tuple[int, ...]]:
        """The slots that nobody reads after each of the steps."""
        live = set(results)
        dead: list[tuple[int, ...]] = []
        for step in reversed(steps):
            used = set(step.inputs) | set(step.outputs)
            dead.append(tuple(sorted(used - live - self._constants.keys() - {ABSENT})))
            live.difference_update(step.outputs)
            live.update(step.inputs)
        dead.reverse()
        return dead

    def __call__(self, *arguments: Any) -> list[Any]:
        """Run as a subgraph: inputs, then captured values; gives all outputs in order."""
        if self.watch is not None:
            self.watch(self, arguments)
        return self.run(self.whole, arguments)

    def run(self, program: Program, arguments: Sequence[Any]) -> list[Any]:
        """Run `program` on values for `inputs` (None for those it does not need).

        Raises:
            EngineFailedError: a kernel failed; the message names its node.
        """
        slots = self._template.copy()
        for slot, value in zip(self.inputs, arguments, strict=True):
            slots[slot] = value
        index = 0
        try:
            for index, (compute, inputs, outputs, dead) in enumerate(program.instructions):  # noqa: B007
                result = compute(*[slots[i] for i in inputs])
                if type(result) is tuple:
                    # Outputs behind the last named one are dropped here.
                    for slot, value in zip(outputs, result, strict=False):
                        slots[slot] = value
                else:
                    slots[outputs[0]] = result
                for slot in dead:
                    slots[slot] = None
        except ParityError:
            raise
        # Kernels fail in as many ways as graphs can be wrong: shapes that do not fit, indices out of range.
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise EngineFailedError(
                f"The oracle failed at {program.labels[index]}: {reason}.",
                next_action="Check the graph with `onnx.checker` and the shapes of what is fed.",
                kind="crashed",
            ) from error
        return [slots[i] for i in program.results]


def _looking(step: Step, looks: Mapping[int, Callable[[Any], None]]) -> Compute:
    """The kernel of a step, which shows those of its outputs that are to be looked at."""
    shown = [(place, looks[slot]) for place, slot in enumerate(step.outputs) if slot in looks]
    if not shown:
        return step.compute

    def run(*inputs: Any) -> Any:
        result = step.compute(*inputs)
        given = result if isinstance(result, tuple) else (result,)
        for place, look in shown:
            look(given[place])
        return result

    return run


def _gathered(steps: Sequence[Step]) -> list[Step]:
    """The steps with plain projections of one value made one, in the place of the first of them."""
    groups: dict[int, list[tuple[Step, Projection]]] = {}
    for step in steps:
        if isinstance(step.compute, Projection) and step.compute.is_plain(step.inputs, ABSENT):
            groups.setdefault(step.inputs[0], []).append((step, step.compute))
    gathered: list[Step] = []
    done: set[int] = set()
    for step in steps:
        group = groups.get(step.inputs[0], []) if step.inputs else []
        if len(group) < 2 or all(step is not member for member, _ in group):
            gathered.append(step)
        elif step.inputs[0] not in done:
            done.add(step.inputs[0])
            compute = together([projection for _, projection in group])
            outputs = tuple(member.outputs[0] for member, _ in group)
            gathered.append(replace(step, compute=compute, inputs=step.inputs[:1], outputs=outputs))
    return gathered
