"""Control flow: subgraphs run as planned bodies. Captured outer values come behind the node's own inputs.

Source: ONNX operator specification, If, Loop and Scan.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.oracle.kernels.registry import kernel
from harness.oracle.kernels.tensor import number_of
from harness.oracle.node import Compute, Node, Tensor


@kernel("If", (1, 11, 13, 16, 19, 21, 23, 24, 25), pure=False)
def _if(node: Node) -> Compute:
    """The outputs of `then_branch` where the condition holds, else those of `else_branch`."""
    branches = {name: node.body(name) for name in ("then_branch", "else_branch")}
    # Captured values come in the order of the attributes in the file.
    order = [name for name in node.attributes if name in branches]
    start, spans = 0, {}
    for name in order:
        spans[name] = slice(start, start := start + branches[name].capture_count)

    def run(condition: Tensor, *captured: Any) -> tuple[Any, ...]:
        name = "then_branch" if number_of(condition) else "else_branch"
        return tuple(branches[name](*captured[spans[name]]))

    return run


@kernel("Loop", (1, 11, 13, 16, 19, 21, 23, 24, 25), pure=False)
def _loop(node: Node) -> Compute:
    """Runs `body` (iteration, condition, states) -> (condition, states, scan items) while both allow.

    Inputs: the most iterations (optional), the first condition (optional), the first states. Outputs: the
    last states, then for each scan item the items of all iterations stacked along a new first axis.
    """
    body = node.body("body")
    states_count = len(body.inputs) - body.capture_count - 2
    blanks = body.blanks[1 + states_count :]

    def run(limit: Any, condition: Any, *rest: Any) -> tuple[Any, ...]:
        states, captured = list(rest[:states_count]), rest[states_count:]
        count = None if limit is None else int(number_of(limit))
        going = condition is None or bool(number_of(condition))
        items: list[list[Any]] = [[] for _ in blanks]
        iteration = 0
        while going and (count is None or iteration < count):
            go_on, *results = body(np.array(iteration, np.int64), np.array(True), *states, *captured)
            states = results[:states_count]
            for collected, item in zip(items, results[states_count:], strict=True):
                collected.append(item)
            going = bool(number_of(go_on))
            iteration += 1
        stacks = [_stacked(item, blank) for item, blank in zip(items, blanks, strict=True)]
        return (*states, *stacks)

    return run


@kernel("Scan", (9, 11, 16, 19, 21, 23, 24, 25), pure=False)
def _scan(node: Node) -> Compute:
    """Runs `body` (states, one slice of each scan input) -> (states, one slice of each scan output).

    Scan inputs are read along `scan_input_axes`, backwards where `scan_input_directions` is 1; outputs
    are stacked along `scan_output_axes`, from the end where `scan_output_directions` is 1.
    """
    body = node.body("body")
    scanned = node.integer("num_scan_inputs")
    states_count = len(body.inputs) - body.capture_count - scanned
    blanks = body.blanks[states_count:]
    axes = node.integers("scan_input_axes") or [0] * scanned
    backwards = node.integers("scan_input_directions") or [0] * scanned
    out_axes = node.integers("scan_output_axes") or [0] * len(blanks)
    out_backwards = node.integers("scan_output_directions") or [0] * len(blanks)

    def run(*values: Any) -> tuple[Any, ...]:
        states = list(values[:states_count])
        captured = values[states_count + scanned :]
        inputs = [
            _first(np.flip(x, axis) if back else x, axis)
            for x, axis, back in zip(
                values[states_count : states_count + scanned], axes, backwards, strict=True
            )
        ]
        items: list[list[Any]] = [[] for _ in blanks]
        for step in range(len(inputs[0])):
            # The ellipsis keeps a slice of a vector an array, of no axes, rather than a scalar.
            results = body(*states, *[x[step, ...] for x in inputs], *captured)
            states = results[:states_count]
            for collected, item in zip(items, results[states_count:], strict=True):
                collected.append(item)
        stacks = [
            _stacked(item[::-1] if back else item, blank, axis)
            for item, blank, axis, back in zip(items, blanks, out_axes, out_backwards, strict=True)
        ]
        return (*states, *stacks)

    return run


def _first(x: Tensor, axis: int) -> Tensor:
    """The axis to scan in front."""
    return x if axis == 0 else np.moveaxis(x, axis, 0)


def _stacked(items: list[Tensor], blank: Tensor | None, axis: int = 0) -> Tensor:
    """What the iterations gave, along a new axis; without any, what the body declares it would give."""
    if len(items) == 1 and axis == 0:
        return np.asarray(items[0])[None]
    if items:
        return np.stack(items, axis=axis)
    if blank is None:
        raise ValueError("no iteration ran, and the body does not declare the shape of its outputs")
    return np.stack([blank], axis=axis).take([], axis=axis)
