"""Small programs on the device where a session keeps its tensors: reduce logits there, fetch the rest.

They are ONNX graphs run by the same provider, so they work for every provider that ONNX Runtime has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.engines.base import TopLogits
from harness.engines.ort_runtime import run_error
from harness.engines.reduce import check_logits_shape, top_logits_of
from harness.engines.tensor_types import numpy_dtype, port_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import NodeProto, TensorProto, ValueInfoProto

__all__ = ["DevicePrograms", "host_view"]

_OPSET = 21
_IR_VERSION = 10


@dataclass(frozen=True, slots=True)
class _Program:
    """One open session; its only device input is `x`, its other input (`positions`) is on the host."""

    engine: str
    session: Any
    binding: Any

    def run(self, value: Any, hosts: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> list[Any]:
        """Values of `outputs` as OrtValues on the host."""
        try:
            self.binding.bind_ortvalue_input("x", value)
            for name, array in hosts.items():
                self.binding.bind_cpu_input(name, array)
            for name in outputs:
                self.binding.bind_output(name, "cpu")
            self.session.run_with_iobinding(self.binding)
            found: list[Any] = self.binding.get_outputs()
        except Exception as error:  # ONNX Runtime raises RuntimeError and ten classes of its own
            raise run_error(self.engine, error) from error
        finally:
            # Values of the device must not live on in the binding.
            self.binding.clear_binding_inputs()
            self.binding.clear_binding_outputs()
        return found

    def copy(self, value: Any, target: Any) -> None:
        """Write `y` for the input `value` into the memory of `target`."""
        try:
            self.binding.bind_ortvalue_input("x", value)
            self.binding.bind_ortvalue_output("y", target)
            self.session.run_with_iobinding(self.binding)
        except Exception as error:  # ONNX Runtime raises RuntimeError and ten classes of its own
            raise run_error(self.engine, error) from error
        finally:
            self.binding.clear_binding_inputs()
            self.binding.clear_binding_outputs()


class DevicePrograms:
    """Programs for the tensors of one provider, each built when it is first needed.

    Args:
        runtime: the module `onnxruntime`.
        providers: as `InferenceSession` takes them: the provider of the session they serve.
        engine: name of the engine, for messages.
    """

    def __init__(self, runtime: Any, providers: Sequence[Any], *, engine: str) -> None:
        self._runtime = runtime
        self._engine = engine
        self._providers = list(providers)
        self._programs: dict[tuple[object, ...], _Program] = {}

    def top_logits(self, value: Any, *, k: int, positions: Sequence[int] | None) -> list[TopLogits]:
        """As `Session.top_logits`, for an OrtValue on the device.

        The device sorts out the `k + 1` largest, and says whether a NaN is among all. That settles the
        answer unless two of them are equal or there is a NaN: no provider promises the order of equal
        values. Then the one row comes to the host and is reduced there, exactly.
        """
        import numpy as np

        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        shape = tuple(value.shape())
        check_logits_shape(shape)
        count, vocabulary = (shape[1] if len(shape) == 3 else 1), shape[-1]
        wanted = range(count) if positions is None else positions
        outside = [p for p in wanted if not -count <= p < count]
        if outside:
            raise IndexError(f"position {outside[0]} is outside the {count} positions of the logits")
        rows = np.array([p % count for p in wanted], dtype=np.int64)
        if not rows.size:
            return []
        k = min(k, vocabulary)
        program = self._reduction(value.element_type(), len(shape), vocabulary, min(k + 1, vocabulary))
        values, ids, nan = (
            host_view(v) for v in program.run(value, {"positions": rows}, ("values", "ids", "has_nan"))
        )
        result = []
        for index in range(rows.size):
            if nan[index] or np.any(values[index][1:] == values[index][:-1]):
                (fetched,) = program.run(value, {"positions": rows[index : index + 1]}, ("rows",))
                result += top_logits_of(host_view(fetched), k)
                continue
            result.append(
                TopLogits(
                    token_ids=tuple(int(i) for i in ids[index][:k]),
                    values=tuple(float(v) for v in values[index][:k]),
                )
            )
        return result

    def fetch(self, value: Any) -> NDArray[Any]:
        """A copy on the host of an OrtValue on the device."""
        (fetched,) = self._identity(value).run(value, {}, ("y",))
        return host_view(fetched).copy()

    def copy(self, value: Any, target: Any) -> None:
        """Write an OrtValue, of the device or the host, into another of its type and shape on the device."""
        if value.tensor_size_in_bytes():
            self._identity(value).copy(value, target)

    def _identity(self, value: Any) -> _Program:
        """The program that gives what it takes, for tensors of this type and rank."""
        from onnx import helper

        element_type, rank = value.element_type(), len(value.shape())
        key = ("identity", element_type, rank)
        if key not in self._programs:
            shape = [None] * rank
            self._programs[key] = self._open(
                [helper.make_node("Identity", ["x"], ["y"])],
                [helper.make_tensor_value_info("x", element_type, shape)],
                [helper.make_tensor_value_info("y", element_type, shape)],
                (),
            )
        return self._programs[key]

    def _reduction(self, element_type: int, rank: int, vocabulary: int, k: int) -> _Program:
        """The program of `top_logits` for logits of this type, rank and width.

        It takes `x` [1, T, V] or [1, V] and `positions` [n], and gives `values` and `ids` [n, k], largest
        first, `has_nan` [n] (1.0 where the row has one) and `rows` [n, V], widened to float.
        """
        key = ("top", element_type, rank, vocabulary, k)
        if key in self._programs:
            return self._programs[key]
        import numpy as np
        from onnx import TensorProto, helper, numpy_helper

        # float64 is sorted as it is; what is narrower than float32 widens exactly, and ONNX Runtime has
        # no TopK for it on every provider.
        wide = TensorProto.DOUBLE if element_type == TensorProto.DOUBLE else TensorProto.FLOAT
        position_axis = rank - 2
        nodes = [
            helper.make_node("Gather", ["x", "positions"], ["picked"], axis=position_axis),
            helper.make_node("Reshape", ["picked", "flat"], ["narrow"]),
            helper.make_node("Cast", ["narrow"], ["rows"], to=wide),
            helper.make_node("TopK", ["rows", "k"], ["values", "ids"], axis=-1, largest=1, sorted=1),
            helper.make_node("IsNaN", ["rows"], ["is_nan"]),
            helper.make_node("Cast", ["is_nan"], ["nan_as_float"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMax", ["nan_as_float", "last"], ["has_nan"], keepdims=0),
        ]
        constants = [
            numpy_helper.from_array(np.array(value, dtype=np.int64), name)
            for name, value in (("flat", [-1, vocabulary]), ("k", [k]), ("last", [-1]))
        ]
        inputs = [
            helper.make_tensor_value_info("x", element_type, [1] + [None] * (rank - 2) + [vocabulary]),
            helper.make_tensor_value_info("positions", TensorProto.INT64, [None]),
        ]
        outputs = [
            helper.make_tensor_value_info("values", wide, None),
            helper.make_tensor_value_info("ids", TensorProto.INT64, None),
            helper.make_tensor_value_info("has_nan", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("rows", wide, None),
        ]
        program = self._programs[key] = self._open(nodes, inputs, outputs, constants)
        return program

    def _open(
        self,
        nodes: Sequence[NodeProto],
        inputs: Sequence[ValueInfoProto],
        outputs: Sequence[ValueInfoProto],
        constants: Sequence[TensorProto],
    ) -> _Program:
        from onnx import helper

        graph = helper.make_graph(nodes, "device_program", inputs, outputs, initializer=constants)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION
        )
        options = self._runtime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        session = self._runtime.InferenceSession(
            model.SerializeToString(), options, providers=self._providers, enable_fallback=0
        )
        return _Program(self._engine, session, session.io_binding())


def host_view(value: Any) -> NDArray[Any]:
    """A read-only numpy view of an OrtValue on the host, without a copy; it keeps `value` alive.

    Through the address, since `OrtValue.numpy()` has no bfloat16 and no 8-bit floats.
    """
    import ctypes

    import numpy as np

    dtype = numpy_dtype(port_dtype(value.element_type()))
    shape = tuple(value.shape())
    size = value.tensor_size_in_bytes()
    if size == 0:
        return np.zeros(shape, dtype=dtype)
    memory = (ctypes.c_char * size).from_address(value.data_ptr())
    memory.owner = value  # the view holds `memory`, and so its owner
    array: NDArray[Any] = np.frombuffer(memory, dtype=dtype).reshape(shape)
    array.flags.writeable = False
    return array
