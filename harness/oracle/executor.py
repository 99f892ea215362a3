"""Running a planned graph: values in numbered slots, each freed at its last use.

A `Body` is a planned graph: the main one or a subgraph. Which of its steps run depends on the outputs
that are wanted, so steps are pruned, and last uses found, once for each set of wanted outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from harness.errors import EngineFailedError, ParityError
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

    def program(self, results: Iterable[int]) -> Program:
        """The program that computes the slots `results` and nothing that they do not need."""
        results = tuple(results)
        live = set(results)
        chosen: list[tuple[Step, tuple[int, ...]]] = []
        for step in reversed(self.steps):
            if live.isdisjoint(step.outputs):
                continue
            dead = (set(step.inputs) | set(step.outputs)) - live - self._constants.keys() - {ABSENT}
            chosen.append((step, tuple(sorted(dead))))
            live.difference_update(step.outputs)
            live.update(step.inputs)
        chosen.reverse()
        return Program(
            instructions=tuple((step.compute, step.inputs, step.outputs, dead) for step, dead in chosen),
            labels=tuple(step.label for step, _ in chosen),
            bodies=tuple(step.bodies for step, _ in chosen),
            results=results,
            needed=frozenset(live - {ABSENT}),
        )

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
