"""What becomes of a cache inside the graph: the outputs that a past port reaches as a cache.

Everything in a layer reaches everything in the layers after it, so reaching an output means nothing by
itself. Followed are only the steps that keep a cache what it is: appending, writing, slicing, moving axes,
casting, scaling or adding to it in place, carrying it through a Scan or Loop, choosing a branch, calling a
function that does these, and the cache slots of attention and recurrence operators. Reading a cache (a
product with it, a reduction of it) is no such step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from harness import wire
from harness.errors import InputError
from harness.onnx_file import Budget, ModelFile, open_model
from harness.onnx_graph import FunctionBody, GraphBody, Node, functions_of, main_graphs, nodes_of, subgraph
from harness.topology.spec import Role

__all__ = ["CacheFlow", "Reached", "read_cache_flow"]

_Slot = tuple[int, int, Role | None, bool]
"""Input position, output position, what the operator says that it is, and whether it is kept whole."""
_Slots = tuple[_Slot, ...]

_KEY_VALUE = (Role.KV_KEY, Role.KV_VALUE)
_TWO_STATES = (Role.STATE, Role.STATE)


def _slots(inputs: tuple[int, ...], outputs: tuple[int, ...], roles: tuple[Role | None, ...]) -> _Slots:
    return tuple((*slot, True) for slot in zip(inputs, outputs, roles, strict=True))


CACHE_SLOTS: Mapping[tuple[str, str], _Slots] = {
    ("", "Attention"): _slots((4, 5), (1, 2), _KEY_VALUE),
    ("", "TensorScatter"): _slots((0,), (0,), (None,)),
    ("", "LinearAttention"): _slots((3,), (1,), (Role.STATE,)),
    ("", "CausalConvWithState"): _slots((3,), (1,), (Role.STATE,)),
    ("", "RNN"): _slots((5,), (1,), (Role.STATE,)),
    ("", "GRU"): _slots((5,), (1,), (Role.STATE,)),
    ("", "LSTM"): _slots((5, 6), (1, 2), _TWO_STATES),
    ("com.microsoft", "GroupQueryAttention"): _slots((3, 4), (1, 2), _KEY_VALUE),
    ("com.microsoft", "SparseAttention"): _slots((3, 4), (1, 2), _KEY_VALUE),
    ("com.microsoft", "MultiHeadAttention"): _slots((6, 7), (1, 2), _KEY_VALUE),
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): _slots((5, 6), (1, 2), _KEY_VALUE),
    ("com.microsoft", "Attention"): _slots((4,), (1,), (Role.KV_FUSED,)),
    ("com.microsoft", "DecoderMaskedSelfAttention"): _slots((4,), (1,), (Role.KV_FUSED,)),
    ("com.microsoft", "LinearAttention"): _slots((3,), (1,), (Role.STATE,)),
    ("com.microsoft", "CausalConvWithState"): _slots((3,), (1,), (Role.STATE,)),
    ("com.microsoft", "DynamicQuantizeLSTM"): _slots((5, 6), (1, 2), _TWO_STATES),
}
"""Input and output position of each cache that an operator updates (ONNX and onnxruntime schemas)."""

_FIRST_TO_FIRST = frozenset(
    {
        "Cast",
        "CastLike",
        "DequantizeLinear",
        "Expand",
        "Flatten",
        "Gather",
        "GatherElements",
        "GatherND",
        "Identity",
        "Pad",
        "QuantizeLinear",
        "Reshape",
        "ScatterElements",
        "ScatterND",
        "Slice",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    }
)
_ARITHMETIC = frozenset({"Add", "Div", "Max", "Min", "Mul", "Sub", "Sum"})
_DEEPEST = 50  # protobuf reads about 30 nested graphs


@dataclass(frozen=True, slots=True)
class Reached:
    """An output that a cache reaches.

    Attributes:
        output: its name.
        role: what the operator on the way says that the cache is; None where none does.
        through: the operator that updates it.
        whole: True if no arithmetic is on the way. Recurrences need arithmetic, but through it a state
            also enters what is computed from it, so such a way confirms and does not contradict.
    """

    output: str
    role: Role | None
    through: str
    whole: bool = True


class CacheFlow:
    """The cache-keeping steps of one graph, and what its inputs reach through them."""

    def __init__(self, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        # Most values are kept once: a list for each would take as much memory as all the rest.
        self._first: dict[int, _Step] = {}
        self._further: dict[int, list[_Step]] = {}
        self._numbers = count()
        self._wanted = tuple(outputs)
        self._outputs: dict[int, str] = {}
        self._patience = 0
        self.scope: dict[str, int] = {}
        self.unproduced: frozenset[str] = frozenset()
        """Outputs that are given by no node, and are neither inputs nor weights; known once it is closed."""
        self._inputs = {name: self.define(self.scope, name) for name in inputs}

    def define(self, scope: dict[str, int], name: str) -> int:
        """A new value of that name in `scope`."""
        scope[name] = value = next(self._numbers)
        return value

    def step(
        self, source: int | None, target: int | None, role: Role | None, through: str, *, whole: bool = True
    ) -> None:
        """Note that the value `source` is kept in `target`; `whole` as in `Reached`."""
        if source is not None and target is not None:
            step = (target, role, through, whole)
            if self._first.setdefault(source, step) is not step:
                self._further.setdefault(source, []).append(step)
            self._patience += 1

    def close(self, weights: Callable[[frozenset[str]], Collection[str]] = frozenset) -> None:
        """All steps are noted: now the graph's outputs are those values that bear their names.

        `weights` tells those of some names that are weights; it is asked only where an output needs one.
        """
        lacking = frozenset(self._wanted).difference(self.scope)
        self.unproduced = lacking.difference(weights(lacking)) if lacking else lacking
        self._outputs.update((self.scope[name], name) for name in self._wanted if name in self.scope)
        # Caches do not meet, so all walks together take about as many steps as there are. Where they
        # take far more, nothing is said any more, rather than at a cost that grows with the square.
        self._patience = 20 * self._patience + 100_000

    def reached(self, name: str) -> tuple[Reached, ...]:
        """The outputs that the input `name` reaches as a cache; always in the same order."""
        start = self._inputs.get(name)
        if start is None:
            return ()
        found: dict[str, Reached] = {}
        seen: set[int] = set()
        whole: list[_Step] = [(start, None, "", True)]
        through_arithmetic: list[_Step] = []
        # Ways without arithmetic are walked to their ends first, so that each value is met on the best way.
        while whole or through_arithmetic:
            if self._patience <= 0:
                return ()
            value, role, through, intact = (whole or through_arithmetic).pop()
            if value in seen:
                continue
            seen.add(value)
            output = self._outputs.get(value)
            if output is not None and value != start:
                found.setdefault(output, Reached(output, role, through, intact))
            first = self._first.get(value)
            steps = () if first is None else (first, *self._further.get(value, ()))
            for target, its_role, operator, step_is_whole in steps:
                self._patience -= 1
                if target not in seen:
                    tells = its_role is not None or not through
                    still = intact and step_is_whole
                    step = (target, its_role or role, operator if tells else through, still)
                    (whole if still else through_arithmetic).append(step)
        return tuple(found.values())


_Step = tuple[int, Role | None, str, bool]
"""Where a value is kept, what the operator says that it is, the operator, and whether as a whole."""


def read_cache_flow(path: Path | str) -> CacheFlow:
    """Parse the nodes of an `.onnx` file and note where its inputs go as caches.

    Raises:
        InputError: the file cannot be read, or is no ONNX model.
    """
    with open_model(path) as model:
        try:
            return _Reader(model).read()
        except wire.WireError as error:
            raise InputError(
                f"{path} is not a complete ONNX model: {error}.",
                next_action="Export or download the file again; compare its size with the original's.",
            ) from error


class _Reader:
    """Walks the graphs of one file."""

    def __init__(self, model: ModelFile) -> None:
        self._data = model.data
        self._budget = model.budget
        self._weights_among = model.weights_among
        self._functions = functions_of(model.data)
        self._summaries: dict[tuple[str, str], _Slots] = {}
        self._depth = 0

    def read(self) -> CacheFlow:
        bodies = [subgraph(self._data, place) for place in main_graphs(self._data)]
        flow = CacheFlow(
            (name for body in bodies for name in body.inputs),
            (name for body in bodies for name in body.outputs),
        )
        for body in bodies:
            self._walk(flow, body, [flow.scope])
        flow.close(self._weights_among)
        return flow

    def _walk(self, flow: CacheFlow, body: GraphBody | FunctionBody, scopes: list[dict[str, int]]) -> None:
        """Note the steps of a body whose values live in the last of `scopes`."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise wire.WireError(f"graphs and functions nested more than {_DEEPEST} deep")
        for node in nodes_of(self._data, body):
            inputs = [_lookup(scopes, name) for name in node.inputs]
            outputs: list[int | None] = []
            for name in node.outputs:
                self._budget.spend(2 * Budget.OBJECT + len(name))
                outputs.append(flow.define(scopes[-1], name) if name else None)
            for source, target, role, whole in self._steps(node):
                if source < len(inputs) and target < len(outputs) and inputs[source] is not None:
                    self._budget.spend(2 * Budget.OBJECT)
                    flow.step(inputs[source], outputs[target], role, node.operator, whole=whole)
            if node.graphs and not node.domain and ("", node.operator) not in self._functions:
                self._walk_subgraphs(flow, node, inputs, outputs, scopes)
        self._depth -= 1

    def _steps(self, node: Node) -> Iterable[_Slot]:
        """Input and output positions between which the node keeps a cache.

        A function of the model takes the place of an operator of that name (ONNX IR, model local functions).
        """
        operator = (node.domain, node.operator)
        if operator in self._functions:
            return self._summary(operator)
        if operator in CACHE_SLOTS:
            return CACHE_SLOTS[operator]
        if node.domain:
            return ()
        if node.operator in _FIRST_TO_FIRST:
            return ((0, 0, None, True),)
        if node.operator == "Concat" or node.operator in _ARITHMETIC:
            whole = node.operator == "Concat"
            return ((position, 0, None, whole) for position in range(len(node.inputs)))
        if node.operator == "Where":
            return ((1, 0, None, True), (2, 0, None, True))
        if node.operator == "Split":
            return ((0, position, None, True) for position in range(len(node.outputs)))
        if node.operator == "Scan":
            return ((position, position, Role.STATE, True) for position in range(_carried_by_scan(node)))
        if node.operator == "Loop":
            return ((position + 2, position, None, True) for position in range(len(node.inputs) - 2))
        return ()

    def _summary(self, operator: tuple[str, str]) -> _Slots:
        """Which inputs of a function are kept in which of its outputs; none for one that calls itself."""
        known = self._summaries.get(operator)
        if known is not None:
            return known
        self._summaries[operator] = ()
        body = self._functions[operator]
        flow = CacheFlow(body.inputs, body.outputs)
        self._walk(flow, body, [flow.scope])
        flow.close()
        positions = {name: position for position, name in enumerate(body.outputs)}
        # Exporters add a body to an operator that not every runtime has. Where that body keeps a cache in
        # the operator's own slots, it is what the operator says; a body need not say it.
        named = {slot[:2]: slot[2] for slot in CACHE_SLOTS.get(operator, ())}
        self._summaries[operator] = tuple(
            (
                position,
                positions[reached.output],
                reached.role or named.get((position, positions[reached.output])),
                reached.whole,
            )
            for position, name in enumerate(body.inputs)
            for reached in flow.reached(name)
        )
        return self._summaries[operator]

    def _walk_subgraphs(
        self,
        flow: CacheFlow,
        node: Node,
        inputs: list[int | None],
        outputs: list[int | None],
        scopes: list[dict[str, int]],
    ) -> None:
        """Walk the bodies of a control-flow node, and join their ports with those of the node."""
        leaving = 1 if node.operator == "Loop" else 0
        for place in node.graphs.values():
            body = subgraph(self._data, place)
            scope: dict[str, int] = {}
            for position, inner in enumerate(body.inputs):
                value = flow.define(scope, inner)
                if position < len(inputs):
                    flow.step(inputs[position], value, None, node.operator)
            self._walk(flow, body, [*scopes, scope])
            for inner, outer in zip(body.outputs[leaving:], outputs, strict=False):
                flow.step(_lookup([*scopes, scope], inner), outer, None, node.operator)


def _lookup(scopes: list[dict[str, int]], name: str) -> int | None:
    """The value that a name means, inner scopes before outer ones; None for weights and left-out inputs."""
    for scope in reversed(scopes):
        if name in scope:
            return scope[name]
    return None


def _carried_by_scan(node: Node) -> int:
    return max(0, min(len(node.inputs) - node.integers.get("num_scan_inputs", 0), len(node.outputs)))
