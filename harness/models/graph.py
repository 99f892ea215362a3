"""A small builder of ONNX graphs: readable names, shared constants, one external data file.

Values are plain strings, the names of the graph. Programming errors (a name used twice) raise
`ValueError`: models are built by our own code, never from a user's input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import numpy as np
    import onnx
    from numpy.typing import NDArray

    from harness.ports import Dimension

__all__ = ["IR_VERSION", "OPSET", "GraphBuilder"]

OPSET = 24
"""Operator set of every graph we write: the newest that all supported engines load (onnxruntime 1.31
stops at 26, older ones earlier), with `RMSNormalization` in it."""

IR_VERSION = 10
"""File format: old enough for onnxruntime 1.24, new enough for every type that our graphs use."""

_EXTERNAL_ALIGNMENT = 64
"""Tensors in the external file start at multiples of this many bytes: a cache line, so that a memory
map can be computed on in place."""


class GraphBuilder:
    """Collects nodes, initialisers and ports in order, and writes them as one model.

    A builder is also the body of a `Scan`: build it apart, then hand it over as an attribute with
    `scan`. ONNX forbids a body to reuse a name of the graph around it: `prefix` keeps them apart.
    """

    def __init__(self, name: str, *, prefix: str = "") -> None:
        self._name = name
        self._scopes: list[str] = [prefix] if prefix else []
        self._prefix = prefix
        self._taken: set[str] = set()
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._values: list[onnx.ValueInfoProto] = []
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, NDArray[Any]] = {}
        self._domains: set[str] = {""}

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Put `name` before every node and initialiser added inside, as in `layers.3/attention/...`."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    def input(self, name: str, dtype: str, shape: Sequence[Dimension]) -> str:
        """Declare a graph input; `name` is taken as it is. dtype in numpy's spelling. Returns `name`."""
        self._inputs.append(_value_info(self._claim(name), dtype, shape))
        return name

    def output(self, name: str, dtype: str, shape: Sequence[Dimension]) -> None:
        """Declare the value `name`, which some node gives (see `output=` of `add`), a graph output."""
        self._outputs.append(_value_info(name, dtype, shape))

    def declare(self, value: str, dtype: str, shape: Sequence[Dimension]) -> str:
        """State dtype and shape of an inner value where shape inference loses a symbol. Returns `value`.

        It does after a concatenation, a convolution and a reshape with -1. A runtime plans memory by
        comparing shapes: with thousands of values that all look different, one took 14 s to load a
        graph that it loads in 2 s when told.
        """
        self._values.append(_value_info(value, dtype, shape))
        return value

    def initializer(self, name: str, array: NDArray[Any]) -> str:
        """Add a weight under the current scope. Returns its full name. The array is not copied."""
        full = self._claim(self.scoped(name))
        self._initializers[full] = array
        return full

    def ints(self, *values: int) -> str:
        """A shared 1-D int64 constant: shapes, axes, bounds."""
        import numpy as np

        return self._shared("ints." + "_".join(map(str, values)), np.array(values, dtype=np.int64))

    def scalar(self, value: float, dtype: str = "float32") -> str:
        """A shared constant of rank 0."""
        import numpy as np

        return self._shared(f"{dtype}.{value}", np.array(value, dtype=dtype))

    def add(
        self,
        op_type: str,
        *inputs: str,
        name: str,
        output: str | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add a node with one output and return the value it gives.

        The node is called `name` under the current scope, and so is its value unless `output` names
        it (taken as it is: this is how graph outputs get their port names). An empty string in
        `inputs` leaves out an optional input.
        """
        scoped = self.scoped(name)
        value = self._claim(scoped if output is None else output)
        self._append(op_type, inputs, (value,), scoped, domain, attributes)
        return value

    def add_many(
        self,
        op_type: str,
        *inputs: str,
        name: str,
        outputs: Sequence[str],
        domain: str = "",
        **attributes: Any,
    ) -> tuple[str, ...]:
        """Add a node with several outputs; value `i` is called `outputs[i]` under the node's name."""
        scoped = self.scoped(name)
        values = tuple(self._claim(f"{scoped}/{output}") for output in outputs)
        self._append(op_type, inputs, values, scoped, domain, attributes)
        return values

    def add_fused(
        self,
        op_type: str,
        *inputs: str,
        name: str,
        outputs: Sequence[str],
        domain: str = "com.microsoft",
        **attributes: Any,
    ) -> tuple[str, ...]:
        """As `add_many`, but `outputs` are taken as they are: some are graph outputs."""
        values = tuple(self._claim(output) for output in outputs)
        self._append(op_type, inputs, values, self.scoped(name), domain, attributes)
        return values

    def scan(
        self,
        body: GraphBuilder,
        *,
        states: Sequence[str],
        sequences: Sequence[str],
        name: str,
        outputs: Sequence[str],
    ) -> tuple[str, ...]:
        """Run `body` once for each step along axis 0 of `sequences`, carrying `states` along.

        The body's inputs are the states and one step of each sequence, its outputs the next states
        and one step of each result. `outputs` names (as they are) the last states and the stacked
        results. The body must stand for itself: some engines refuse values captured from outside.
        """
        scoped = self.scoped(name)
        values = tuple(self._claim(output) for output in outputs)
        attributes = {"body": body.graph(), "num_scan_inputs": len(sequences)}
        self._append("Scan", (*states, *sequences), values, scoped, "", attributes)
        return values

    def scoped(self, name: str) -> str:
        """The full name that `name` gets under the current scope."""
        return "/".join((*self._scopes, name))

    def graph(self) -> onnx.GraphProto:
        """The graph with every initialiser inside it."""
        tensors = [_tensor(name, array) for name, array in self._initializers.items()]
        return self._graph(tensors)

    def save(
        self,
        path: Path,
        *,
        external: bool = True,
        external_from: int = 1024,
        metadata: dict[str, str] | None = None,
        shared: bool = False,
    ) -> Path:
        """Write the model to `path`, and its large tensors to one file `<path>.data` beside it.

        Tensors of at least `external_from` bytes go to that file, in order, unless `external` is
        false; small ones (shapes, scales) stay in the graph, where shape inference sees them. The
        same graph gives the same bytes on every machine. `onnx.checker` has passed when this returns.

        Args:
            path: the model file to write.
            external: whether to write large tensors beside the graph.
            external_from: smallest size, in bytes, of a tensor in the external file.
            metadata: `metadata_props` of the model, such as where its weights come from.
            shared: whether tensors that are views of the same bytes lie in the external file once.
        """
        import onnx
        from onnx import helper

        if external:
            data = path.with_name(path.name + ".data")
            places: dict[tuple[int, int], int] | None = {} if shared else None
            with data.open("wb") as stream:
                tensors = [
                    _external_tensor(name, array, data.name, stream, places)
                    if array.nbytes >= external_from
                    else _tensor(name, array)
                    for name, array in self._initializers.items()
                ]
        else:
            tensors = [_tensor(name, array) for name, array in self._initializers.items()]
        graph = self._graph(tensors)
        opsets = [helper.make_opsetid(domain, 1 if domain else OPSET) for domain in sorted(self._domains)]
        model = helper.make_model(
            graph, producer_name="onnx-parity", opset_imports=opsets, ir_version=IR_VERSION
        )
        if metadata:
            helper.set_model_props(model, metadata)
        path.write_bytes(model.SerializeToString(deterministic=True))
        onnx.checker.check_model(str(path), full_check=True)
        return path

    def _graph(self, tensors: Sequence[onnx.TensorProto]) -> onnx.GraphProto:
        from onnx import helper

        return helper.make_graph(
            self._nodes, self._name, self._inputs, self._outputs, initializer=tensors, value_info=self._values
        )

    def _append(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        name: str,
        domain: str,
        attributes: dict[str, Any],
    ) -> None:
        from onnx import helper

        self._domains.add(domain)
        self._nodes.append(helper.make_node(op_type, inputs, outputs, name=name, domain=domain, **attributes))

    def _claim(self, name: str) -> str:
        if name in self._taken:
            raise ValueError(
                f"The name {name!r} is already taken in graph {self._name!r}; names must be unique."
            )
        self._taken.add(name)
        return name

    def _shared(self, name: str, array: NDArray[Any]) -> str:
        full = f"{self._prefix}/{name}" if self._prefix else name
        if full not in self._taken:
            self._initializers[self._claim(full)] = array
        return full


def _value_info(name: str, dtype: str, shape: Sequence[Dimension]) -> onnx.ValueInfoProto:
    from onnx import helper

    return helper.make_tensor_value_info(name, _element_type(dtype), list(shape))


def _element_type(dtype: str | np.dtype[Any]) -> int:
    import numpy as np
    from onnx import helper

    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _little_endian(array: NDArray[Any]) -> NDArray[Any]:
    """C-contiguous and little-endian, the layout of `raw_data`; rank 0 stays rank 0."""
    import numpy as np

    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def _described(name: str, array: NDArray[Any]) -> onnx.TensorProto:
    import onnx

    tensor = onnx.TensorProto(name=name, data_type=_element_type(array.dtype))
    tensor.dims.extend(array.shape)
    return tensor


def _tensor(name: str, array: NDArray[Any]) -> onnx.TensorProto:
    tensor = _described(name, array)
    tensor.raw_data = _little_endian(array).tobytes()
    return tensor


def _external_tensor(
    name: str,
    array: NDArray[Any],
    location: str,
    stream: BinaryIO,
    places: dict[tuple[int, int], int] | None,
) -> onnx.TensorProto:
    """The tensor, its values written to `stream`; `places` are the offsets of bytes written before."""
    import onnx

    key = (array.ctypes.data, array.nbytes)
    offset = None if places is None else places.get(key)
    if offset is None:
        stream.write(b"\0" * (-stream.tell() % _EXTERNAL_ALIGNMENT))
        offset = stream.tell()
        _little_endian(array).tofile(stream)
        if places is not None:
            places[key] = offset
    tensor = _described(name, array)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for entry, value in (("location", location), ("offset", offset), ("length", array.nbytes)):
        tensor.external_data.add(key=entry, value=str(value))
    return tensor
