"""Control flow: subgraphs run as planned bodies. Captured outer values come behind the node's own inputs.

Source: ONNX operator specification, If, Loop and Scan.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.oracle.kernels.registry import kernel
from harness.oracle.node import Compute, Node, Tensor

_SINCE = (11, 13, 16, 19, 21, 23, 24, 25)


@kernel("If", (1, *_SINCE), pure=False)
def _if(node: Node) -> Compute:
    """The outputs of `then_branch` where the condition holds, else those of `else_branch`."""
    branches = {name: node.body(name) for name in ("then_branch", "else_branch")}
    # Captured values come in the order of the attributes in the file.
    order = [name for name in node.attributes if name in branches]
    start, spans = 0, {}
    for name in order:
        spans[name] = slice(start, start := start + branches[name].capture_count)

    def run(condition: Tensor, *captured: Any) -> tuple[Any, ...]:
        name = "then_branch" if np.all(condition) else "else_branch"
        return tuple(branches[name](*captured[spans[name]]))

    return run


@kernel("Loop", (1, *_SINCE), pure=False)
def _loop(node: Node) -> Compute:
    """Runs `body` (iteration, condition, states) -> (condition, states, scan items) while both allow.

    Inputs: the most iterations (optional), the first condition (optional), the first states. Outputs: the
    last states, then for each scan item the items of all iterations stacked along a new first axis.
    """
    body = node.body("body")
    states_count = len(body.inputs) - body.capture_count - 2
    items_count = len(body.outputs) - 1 - states_count

    def run(limit: Any, condition: Any, *rest: Any) -> tuple[Any, ...]:
        states, captured = list(rest[:states_count]), rest[states_count:]
        count = None if limit is None else int(np.asarray(limit).reshape(()))
        going = condition is None or bool(np.all(condition))
        items: list[list[Any]] = [[] for _ in range(items_count)]
        iteration = 0
        while going and (count is None or iteration < count):
            go_on, *results = body(np.array(iteration, np.int64), np.array(True), *states, *captured)
            states = results[:states_count]
            for collected, item in zip(items, results[states_count:], strict=True):
                collected.append(item)
            going = bool(np.all(go_on))
            iteration += 1
        stacks = [np.stack(collected) if collected else np.zeros((0,)) for collected in items]
        return (*states, *stacks)

    return run


@kernel("Scan", (9, *_SINCE[:1], *_SINCE[2:]), pure=False)
def _scan(node: Node) -> Compute:
    """Runs `body` (states, one slice of each scan input) -> (states, one slice of each scan output).

    Scan inputs are read along `scan_input_axes`, backwards where `scan_input_directions` is 1; outputs
    are stacked along `scan_output_axes`, from the end where `scan_output_directions` is 1.
    """
    body = node.body("body")
    scanned = node.integer("num_scan_inputs")
    states_count = len(body.inputs) - body.capture_count - scanned
    items_count = len(body.outputs) - states_count
    axes = node.integers("scan_input_axes") or [0] * scanned
    backwards = node.integers("scan_input_directions") or [0] * scanned
    out_axes = node.integers("scan_output_axes") or [0] * items_count
    out_backwards = node.integers("scan_output_directions") or [0] * items_count

    def run(*values: Any) -> tuple[Any, ...]:
        states = list(values[:states_count])
        captured = values[states_count + scanned :]
        inputs = [
            np.moveaxis(np.flip(x, axis) if back else x, axis, 0)
            for x, axis, back in zip(
                values[states_count : states_count + scanned], axes, backwards, strict=True
            )
        ]
        items: list[list[Any]] = [[] for _ in range(items_count)]
        for step in range(len(inputs[0])):
            # The ellipsis keeps a slice of a vector an array, of no axes, rather than a scalar.
            results = body(*states, *[x[step, ...] for x in inputs], *captured)
            states = results[:states_count]
            for collected, item in zip(items, results[states_count:], strict=True):
                collected.append(item)
        stacks = [
            np.stack(collected[::-1] if back else collected, axis=axis) if collected else np.zeros((0,))
            for collected, axis, back in zip(items, out_axes, out_backwards, strict=True)
        ]
        return (*states, *stacks)

    return run
