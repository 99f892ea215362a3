"""What can be fed and what not, decided from ports alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from harness.decode.caches import GrowingKv, ReplacedStates
from harness.decode.feeds import plan_feeds
from harness.errors import NotDrivableError
from harness.ports import Dimension, Port, PortInventory
from harness.topology.spec import PortRole, Role, StatePair, Topology

IDS = Port("input_ids", "int64", ("batch", "new"))
MASK = Port("attention_mask", "int64", ("batch", "total"))
POSITIONS = Port("position_ids", "int64", ("batch", "new"))
LOGITS = Port("logits", "float32", ("batch", "new", 100))
KEY = Port("past.key", "float32", ("batch", 2, "past", 8))
PRESENT_KEY = Port("present.key", "float32", ("batch", 2, "total", 8))
STATE = Port("past.state", "float32", ("batch", 4, 4))
PRESENT_STATE = Port("present.state", "float32", (None, None, None))
HYBRID = Topology(
    token_input="input_ids",
    attention_mask_input="attention_mask",
    position_ids_input="position_ids",
    logits_output="logits",
    kv_inputs=("past.key",),
    kv_outputs=("present.key",),
    state_pairs=(StatePair("past.state", "present.state"),),
)
PORTS = (IDS, MASK, POSITIONS, KEY, STATE, LOGITS, PRESENT_KEY, PRESENT_STATE)


def inventory(*changed: Port, without: tuple[str, ...] = ()) -> PortInventory:
    """The ports of `HYBRID`, with some replaced, added or left out."""
    ports = {port.name: port for port in (*PORTS, *changed) if port.name not in without}
    outputs = ("logits", "present.key", "present.state")
    return PortInventory(
        tuple(port for name, port in ports.items() if name not in outputs),
        tuple(ports[name] for name in outputs if name in ports),
    )


def refusal(topology: Topology, ports: PortInventory) -> NotDrivableError:
    """The refusal of these ports; there must be one."""
    with pytest.raises(NotDrivableError) as caught:
        plan_feeds(topology, ports)
    assert caught.value.exit_code == 3
    assert caught.value.code == "E_NOT_DRIVABLE"
    return caught.value


def kv_of(
    past: tuple[Dimension, ...], present: tuple[Dimension, ...] | None, batch: str | None = "batch"
) -> Any:
    """How a KV pair of these shapes is threaded."""
    ports = inventory(
        Port("input_ids", "int64", (batch, "new")),
        Port("past.key", "float16", past),
        Port("present.key", "float16", present),
    )
    (kv, _) = plan_feeds(HYBRID, ports).caches
    (pair,) = kv.pairs
    return pair


def test_a_hybrid_is_threaded_as_its_topology_says() -> None:
    """KV starts with length zero along its growing axis, states with their past shape, batch 1."""
    kv, states = plan_feeds(HYBRID, inventory()).caches

    assert isinstance(kv, GrowingKv)
    assert isinstance(states, ReplacedStates)
    (pair,), (state,) = kv.pairs, states.pairs
    assert (pair.past, pair.present, pair.dtype, pair.shape, pair.axis) == (
        "past.key",
        "present.key",
        "float32",
        (1, 2, 0, 8),
        2,
    )
    assert (state.input, state.output, state.dtype, state.shape) == (
        "past.state",
        "present.state",
        "float32",
        (1, 4, 4),
    )


def test_a_call_asks_for_the_logits_and_every_cache() -> None:
    """Nothing else is computed."""
    ports = inventory()
    more = PortInventory(ports.inputs, (*ports.outputs, Port("hidden_states", "float32", None)))

    assert plan_feeds(HYBRID, more).outputs == ("logits", "present.key", "present.state")


@pytest.mark.parametrize(
    ("past", "present", "shape", "axis"),
    [
        # The usual layouts: exporters spell the grown length in many ways.
        (("batch", 2, "past", 8), ("batch", 2, "past + new", 8), (1, 2, 0, 8), 2),
        (("batch", "past", 2, 8), ("batch", "total", 2, 8), (1, 0, 2, 8), 1),
        ((1, 2, "past", 8), (1, 2, "total", 8), (1, 2, 0, 8), 2),
        # The present side says nothing.
        (("batch", 2, "past", 8), (None, None, None, None), (1, 2, 0, 8), 2),
        (("batch", 2, "past", 8), None, (1, 2, 0, 8), 2),
        ((None, 2, None, 8), (None, 2, None, 8), (1, 2, 0, 8), 2),
        # Both sides carry one symbol: still the only axis that can grow.
        (("batch", 2, "length", 8), ("batch", 2, "length", 8), (1, 2, 0, 8), 2),
        # nxrt renames symbols, and infers extents on the present side that the file leaves open.
        (("batch", 2, "sym_3", "sym_4"), ("batch", 2, "sym_2147483648", 8), (1, 2, 0, 8), 2),
        # The sequence first, the batch second.
        (("past", "batch", 2, 8), ("total", "batch", 2, 8), (0, 1, 2, 8), 0),
        # Another symbol for the batch on this port.
        (("b", 2, "past", 8), ("b2", 2, "total", 8), (1, 2, 0, 8), 2),
    ],
)
def test_the_growing_axis_is_found_by_symbols(
    past: tuple[Dimension, ...],
    present: tuple[Dimension, ...] | None,
    shape: tuple[int, ...],
    axis: int,
) -> None:
    """It is symbolic on both sides and not the batch; every other extent is known from one side."""
    pair = kv_of(past, present)

    assert (pair.shape, pair.axis) == (shape, axis)


@pytest.mark.parametrize(
    ("past", "present", "why"),
    [
        (("batch", 2, 32, 8), ("batch", 2, 32, 8), "no symbolic axis that could grow"),
        ((1, 2, 32, 8), (1, 2, 32, 8), "no symbolic axis"),
        (("batch", "heads", "past", 8), ("batch", "heads", "past", 8), "several axes"),
        (("batch", "heads", "past", 8), ("batch", "h", "total", 8), "several axes"),
        (("batch", 2, "past", "width"), ("batch", 2, "total", "width"), "axis 3 .* no known extent"),
        (("batch", 2, "past", 8), ("batch", 2, "total"), "rank is 4"),
        (None, ("batch", 2, "total", 8), "rank"),
    ],
)
def test_kv_that_the_symbols_do_not_settle_is_refused(
    past: tuple[Dimension, ...] | None, present: tuple[Dimension, ...] | None, why: str
) -> None:
    """Fixed buffers, several candidates and unknown widths are never guessed at."""
    ports = inventory(Port("past.key", "float32", past), Port("present.key", "float32", present))

    error = refusal(HYBRID, ports)

    assert error.ports == ("past.key",)
    with pytest.raises(NotDrivableError, match=why):
        plan_feeds(HYBRID, ports)


@pytest.mark.parametrize(
    ("past", "shape"),
    [
        (("batch", 96, 3), (1, 96, 3)),
        ((None, 96, 3), (1, 96, 3)),
        ((1, 96, 3), (1, 96, 3)),
        ((12, "batch", 3), (12, 1, 3)),
        ((12, "batch_size", 3), (12, 1, 3)),
        ((), ()),
    ],
)
def test_a_state_needs_its_past_extents_only(past: tuple[Dimension, ...], shape: tuple[int, ...]) -> None:
    """The present side may be symbolic throughout; the batch of the zero state is 1."""
    (_, states) = plan_feeds(HYBRID, inventory(Port("past.state", "bfloat16", past))).caches

    assert states.pairs[0].shape == shape
    assert states.pairs[0].dtype == "bfloat16"


@pytest.mark.parametrize("past", [("batch", "heads", 4), ("batch", None, 4), (12, "other", 4), None])
def test_a_state_of_unknown_extent_is_refused(past: tuple[Dimension, ...] | None) -> None:
    """There is no zero state without a shape."""
    error = refusal(HYBRID, inventory(Port("past.state", "float32", past)))

    assert error.ports == ("past.state",)


@pytest.mark.parametrize(
    ("port", "why"),
    [
        (Port("position_ids", "int64", ("planes", "batch", "new")), "which axis counts planes is not known"),
        (Port("position_ids", "int64", (3, 2, "new")), "which axis counts planes is not known"),
        (Port("position_ids", "int64", (3, 1, 1, "new")), "rank 4"),
        (Port("attention_mask", "int64", ("batch", 9)), "fixed length 9"),
        (Port("attention_mask", "int64", (2, "total")), "batch of 2"),
        (Port("attention_mask", "int64", ("batch", 1, "new", "total")), "rank 4"),
        (Port("attention_mask", "float32", ("batch", "total")), "dtype float32"),
        (Port("position_ids", None, ("batch", "new")), "dtype None"),
        (Port("input_ids", "int64", ("batch", "new", 1)), "rank 3"),
        (Port("input_ids", "int64", (1, 4)), "exactly 4 tokens"),
        (Port("input_ids", "int64", (4, "new")), "batch of 4"),
        (Port("past.key", "int4", ("batch", 2, "past", 8)), "int4 packs"),
        (Port("past.key", None, ("batch", 2, "past", 8)), "does not say its dtype"),
    ],
)
def test_ports_in_a_form_that_cannot_be_fed_are_refused(port: Port, why: str) -> None:
    """The message names the port and what about it."""
    error = refusal(HYBRID, inventory(port))

    assert error.ports == (port.name,)
    assert f"{port.name} " in error.message
    assert why in error.message


@pytest.mark.parametrize(
    ("role", "why"),
    [
        (Role.EMBEDS, "embeddings"),
        (Role.CROSS_KV_KEY, "cross-attention"),
        (Role.ENCODER_HIDDEN_STATES, "encoder"),
        (Role.ENCODER_ATTENTION_MASK, "encoder"),
        (Role.CONTROL, "control input"),
        (Role.OPTIONAL, "optional input, and axis 1 of its [batch, n] is open"),
        (Role.KV_KEY, "fixed size"),
        (Role.AUXILIARY, "nobody has a value for"),
    ],
)
def test_an_input_with_another_role_is_refused_by_its_role(role: Role, why: str) -> None:
    """Every input needs a value: one that nobody has is named, never left out."""
    topology = replace(HYBRID, roles=(PortRole("extra", "input", role, because="test"),))

    error = refusal(topology, inventory(Port("extra", "float32", ("batch", "n"))))

    assert error.ports == ("extra",)
    assert why in error.message


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ({"inputs_embeds_input": "extra"}, "embeddings"),
        ({"cross_kv_inputs": ("extra",)}, "cross-attention"),
        ({"encoder_hidden_states_input": "extra"}, "encoder"),
        ({"optional_inputs": ("extra",)}, "optional input"),
        ({}, "nobody has a value for"),
    ],
)
def test_a_declared_topology_without_roles_is_refused_as_well(field: dict[str, Any], why: str) -> None:
    """The `io` fields say as much as the roles do."""
    error = refusal(replace(HYBRID, **field), inventory(Port("extra", "float32", None)))

    assert error.ports == ("extra",)
    assert why in error.message


@pytest.mark.parametrize("pair", [{"init": "ones"}, {"update": "add"}])
def test_a_state_with_another_life_is_refused(pair: dict[str, str]) -> None:
    """Zeros at the start and replaced whole is all that is known."""
    topology = replace(HYBRID, state_pairs=(StatePair("past.state", "present.state", **pair),))

    assert refusal(topology, inventory()).ports == ("past.state",)


@pytest.mark.parametrize(
    "missing",
    ["input_ids", "attention_mask", "past.key", "present.key", "past.state", "present.state", "logits"],
)
def test_a_port_that_only_the_topology_knows_is_refused(missing: str) -> None:
    """A topology of another graph is noticed, port by port."""
    error = refusal(HYBRID, inventory(without=(missing,)))

    assert missing in error.ports


def test_embeddings_alone_are_refused() -> None:
    """A decoder without a token input cannot be fed token IDs."""
    topology = replace(HYBRID, token_input=None, inputs_embeds_input="inputs_embeds")
    ports = inventory(Port("inputs_embeds", "float32", ("batch", "new", 16)), without=("input_ids",))

    assert refusal(topology, ports).ports == ("inputs_embeds",)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    """One message lists every port that cannot be fed."""
    ports = inventory(
        Port("position_ids", "int64", ("planes", "batch", "new")),
        Port("past.key", "float32", ("batch", 2, 32, 8)),
        Port("use_cache_branch", "bool", (1,)),
    )

    error = refusal(HYBRID, ports)

    assert set(error.ports) == {"position_ids", "past.key", "use_cache_branch"}
    assert all(f"{port} " in error.message for port in error.ports)


def test_many_ports_with_one_reason_make_a_short_message() -> None:
    """A reason is said once; the error still holds every port."""
    extra = tuple(Port(f"extra.{i}", "float32", None) for i in range(50))

    error = refusal(HYBRID, inventory(*extra))

    assert error.ports == tuple(port.name for port in extra)
    assert "extra.0, extra.1, extra.2, extra.3 and 46 more (each) is an input" in error.message


dimension = st.integers(0, 9) | st.sampled_from(["batch", "past", "new", "x", "y"]) | st.none()
shape = st.none() | st.lists(dimension, max_size=5).map(tuple)
dtypes = st.sampled_from(["float32", "int64", "int32", "bool", "int4", None])


@settings(deadline=None)
@given(data=st.data())
def test_any_ports_are_planned_or_refused(data: st.DataObject) -> None:
    """No layout raises anything but the refusal, and a plan has only concrete shapes to start from."""
    ports = tuple(Port(port.name, data.draw(dtypes), data.draw(shape)) for port in PORTS)

    plan, refused = None, ()
    try:
        plan = plan_feeds(HYBRID, inventory(*ports))
    except NotDrivableError as error:
        refused = error.ports

    assert (plan is None) == bool(refused)
    for cache in plan.caches if plan is not None else ():
        for pair in cache.pairs:
            assert all(isinstance(extent, int) for extent in pair.shape)


ROLE_NAMES = {
    Role.TOKEN: "input_ids",
    Role.ATTENTION_MASK: "attention_mask",
    Role.POSITION_IDS: "position_ids",
    Role.KV_KEY: "past.key",
    Role.KV_FUSED: "past.fused",
    Role.KV_SCALE: "past.key_scale",
    Role.STATE: "past.state",
    Role.OPTIONAL: "token_type_ids",
}


def usual_form(name: str) -> tuple[list[str], list[tuple[Dimension, ...]]]:
    """Dtypes and shapes that such a port has somewhere."""
    rows = "past" if name.startswith("past") else "total"
    if "state" in name:
        return ["float16", "float32"], [("batch", 4, 4), (4, "batch", 4), (4, 4)]
    if "cache." in name:
        return ["float32"], [("batch", 9, 4), ("batch", 2, 9, 4), ("batch", "capacity", 4)]
    if "scale" in name:
        return ["float32"], [("batch", 2, rows, 1), ("batch", 2, 1), (1,)]
    if "fused" in name:
        return ["float16", "int8"], [(2, "batch", 4, rows, 8), (3, 2, "batch", 4, rows, 8)]
    if "key" in name:
        return ["float16", "uint8"], [("batch", 2, rows, 8), (2, rows, 8), (rows, 8)]
    if name in ("position_ids", "cache_position"):
        return ["int32", "int64"], [("batch", "new"), (3, "batch", "new"), ("new",)]
    if name in ("input_ids", "token_type_ids"):
        return ["int32", "int64"], [("batch", "new"), ("batch", 1)]
    if name == "attention_mask":
        return ["int64", "bool"], [("batch", "total"), ("total",)]
    return ["int32", "int64"], [(), (1,), ("batch",), ("batch", 1)]


CONTROLS = ("past_seq_len", "total_sequence_length", "seqlens_k", "cache_position", "use_cache_branch")


@settings(deadline=None)
@given(data=st.data())
def test_any_topology_is_planned_or_refused_and_a_plan_can_be_carried_out(data: st.DataObject) -> None:
    """Ports of every role in any form: refused by name, or fed at two calls with arrays of concrete shape."""
    odd = data.draw(st.sampled_from(["input_ids", "past.key", "past.state", "write", "key_cache.0", None]))

    chosen: dict[str, int] = {}

    def drawn(name: str) -> Port:
        if name == odd:
            return Port(name, data.draw(dtypes), data.draw(shape))
        types, shapes = usual_form(name)
        both = name.replace("present", "past").removeprefix("updated_")
        if both not in chosen:
            chosen[both] = data.draw(st.integers(0, len(shapes) - 1))
        return Port(name, data.draw(st.sampled_from(types)), shapes[chosen[both]])

    kv = [name for name in ("past.key", "past.fused", "past.key_scale") if data.draw(st.booleans())]
    controls = data.draw(st.lists(st.sampled_from(CONTROLS), unique=True, max_size=3))
    buffers = ["key_cache.0", "value_cache.0"] if data.draw(st.booleans()) else []
    inputs = [drawn(name) for name in ("input_ids", "attention_mask", "position_ids", "token_type_ids")]
    inputs += [drawn(name) for name in (*kv, *controls, *buffers, "past.state", "write", "valid")]
    outputs = [LOGITS, *(drawn(name.replace("past", "present")) for name in (*kv, "past.state"))]
    outputs += [drawn(f"updated_{name}") for name in buffers]
    roles = [PortRole(name, "input", role, because="test") for role, name in ROLE_NAMES.items()]
    roles += [PortRole(name, "input", Role.CONTROL, because="test") for name in (*controls, "write", "valid")]
    topology = replace(
        HYBRID,
        kv_inputs=tuple(kv),
        kv_outputs=tuple(name.replace("past", "present") for name in kv),
        optional_inputs=("token_type_ids",),
        static_cache={
            "write_indices_input": "write",
            "kv_sequence_length_input": "valid",
            "key_cache_inputs": buffers[:1],
            "key_cache_outputs": [f"updated_{name}" for name in buffers[:1]],
            "value_cache_inputs": buffers[1:],
            "value_cache_outputs": [f"updated_{name}" for name in buffers[1:]],
        },
        roles=tuple(roles),
    )
    ports = PortInventory(tuple(inputs), tuple(outputs))

    plan, refused = None, ()
    try:
        plan = plan_feeds(topology, ports)
    except NotDrivableError as error:
        refused = error.ports
    event("planned" if plan is not None else " ".join(sorted(refused)))
    assert (plan is None) == bool(refused)
    if plan is None:
        return

    fed = [call.name for call in plan.calls] + [name for cache in plan.caches for name in cache.inputs]
    assert sorted(fed) == sorted(port.name for port in inputs)
    session: Any = Host()
    first = plan.start(session, room=5) | plan.inputs(session, (1,), past=0)
    later = plan.inputs(session, (2,), past=1)
    assert set(first) == set(fed)
    declared = {port.name: port for port in inputs}
    for name, array in (*first.items(), *later.items()):
        known = declared[name].shape
        assert known is None or len(array.shape) == len(known)
        for extent, wanted in zip(array.shape, known or array.shape, strict=True):
            assert extent == wanted or not isinstance(wanted, int)


class Host:
    """A session that keeps host arrays."""

    def place(self, array: Any) -> Any:
        """The array itself."""
        return array

    def zeros(self, shape: Any, dtype: str) -> Any:
        """Zeros of any type."""
        return np.zeros(shape)
