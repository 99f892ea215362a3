"""What follows from the tokens of a call: IDs, masks, positions, lengths and zeros, in every form of port."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.decode.axes import UnfeedableError
from harness.decode.calls import (
    Call,
    CallInput,
    control_input,
    mask_input,
    positions_input,
    token_input,
    total_input,
    write_index_input,
    zero_input,
)
from harness.ports import Dimension, Port

FIRST = Call((7, 8, 9), 0)
LATER = Call((5,), 3)
SHORT = Call((1, 2), 4)


def fed(call_input: CallInput, call: Call) -> tuple[str, Any]:
    """Dtype and values at a call."""
    array = call_input.array(call)
    return array.dtype.name, array.tolist()


def port(name: str, shape: tuple[Dimension, ...] | None, dtype: str | None = "int64") -> Port:
    """A port."""
    return Port(name, dtype, shape)


@pytest.mark.parametrize(
    ("shape", "ids", "at_once"),
    [
        (("batch", "new"), [[7, 8, 9]], None),
        ((1, "new"), [[7, 8, 9]], None),
        (None, [[7, 8, 9]], None),
        (("batch", 1), [[7, 8, 9]], 1),
        (("batch",), [7, 8, 9], 1),
        ((1,), [7, 8, 9], 1),
    ],
)
def test_token_ids_have_the_form_of_their_port(
    shape: tuple[Dimension, ...] | None, ids: Any, at_once: int | None
) -> None:
    """With a batch axis of one where the port has one; a port of one token, or without batch, takes one."""
    call_input, tokens_a_call = token_input(port("input_ids", shape, "int32"))

    assert fed(call_input, FIRST) == ("int32", ids)
    assert tokens_a_call == at_once


@pytest.mark.parametrize(
    ("shape", "capacity", "first", "later"),
    [
        (("batch", "total"), None, [[1, 1, 1]], [[1, 1, 1, 1]]),
        (("total",), None, [1, 1, 1], [1, 1, 1, 1]),
        ((1, "total"), 9, [[1, 1, 1]], [[1, 1, 1, 1]]),
        (("batch", 6), 6, [[1, 1, 1, 0, 0, 0]], [[1, 1, 1, 1, 0, 0]]),
    ],
)
def test_a_mask_is_over_all_tokens_or_over_the_rows_of_a_static_cache(
    shape: tuple[Dimension, ...], capacity: int | None, first: Any, later: Any
) -> None:
    """Ones for what was fed; a cache of fixed size has them where rows were written."""
    mask = mask_input(port("attention_mask", shape), capacity=capacity)

    assert fed(mask, FIRST) == ("int64", first)
    assert fed(mask, LATER) == ("int64", later)


def test_a_mask_of_flags_is_true() -> None:
    """A bool port takes bool."""
    assert fed(mask_input(port("attention_mask", ("b", "t"), "bool"), capacity=None), LATER) == (
        "bool",
        [[True] * 4],
    )


@pytest.mark.parametrize(
    ("shape", "later"),
    [
        (("batch", "new"), [[4, 5]]),
        (("new",), [4, 5]),
        ((3, "batch", "new"), [[[4, 5]]] * 3),
        ((4, 1, "new"), [[[4, 5]]] * 4),
        (("batch", 3, "new"), [[[4, 5]] * 3]),
        ((3, None, None), [[[4, 5]]] * 3),
    ],
)
def test_positions_count_on_in_every_plane(shape: tuple[Dimension, ...], later: Any) -> None:
    """Of three axes the concrete one counts planes, which are equal for text."""
    assert fed(positions_input(port("position_ids", shape, "int32")), SHORT) == ("int32", later)


@pytest.mark.parametrize(
    ("name", "first", "short"),
    [
        ("past_sequence_length", 0, 4),
        ("past_key_values_length", 0, 4),
        ("past_seq_len", 0, 4),
        ("cache_lengths", 0, 4),
        ("total_sequence_length", 3, 6),
        ("total_seq_len", 3, 6),
        ("seqlens_k", 2, 5),
        ("num_logits_to_keep", 0, 0),
        ("logits_to_keep", 0, 0),
        ("beam_idx", 0, 0),
    ],
)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_length_means_what_its_name_says(name: str, first: int, short: int, rank: int) -> None:
    """In every rank, with a batch of one."""
    shape: tuple[Dimension, ...] = ((), ("batch",), ("batch", 1))[rank]
    length = control_input(port(name, shape, "int32"))

    for call, expected in ((FIRST, first), (SHORT, short)):
        array = length.array(call)
        assert array.shape == (1,) * rank
        assert array.dtype == np.int32
        assert array.item() == expected


def test_the_graph_says_more_than_the_name() -> None:
    """A length that an operator reads as the index of the last token is that, whatever it is called."""
    assert fed(control_input(port("past_seq_len", (1,)), last_token=True), SHORT) == ("int64", [5])


def test_cache_positions_are_those_of_the_tokens() -> None:
    """Each token has its own."""
    assert fed(control_input(port("cache_position", ("new",))), SHORT) == ("int64", [4, 5])


def test_the_branch_with_a_past_is_taken_once_there_is_one() -> None:
    """The first call has none."""
    branch = control_input(port("use_cache_branch", (1,), "bool"))

    assert fed(branch, FIRST) == ("bool", [False])
    assert fed(branch, LATER) == ("bool", [True])


@pytest.mark.parametrize("name", ["kv_length", "current_sequence_length", "use_cache", "sequence_lengths"])
def test_a_control_port_that_could_mean_two_things_is_refused(name: str) -> None:
    """Past or total, one token or all: nothing is guessed."""
    with pytest.raises(UnfeedableError, match="no value to give it"):
        control_input(port(name, (1,)))


def test_the_control_ports_of_a_static_cache() -> None:
    """Where the call's first token goes, or each of them; and how many rows count afterwards."""
    one = write_index_input(port("write_indices", ("batch",)), sequence="new")
    each = write_index_input(port("write_indices", ("batch", "new")), sequence="new")
    flat = write_index_input(port("write_indices", ("new",)), sequence="new")
    valid = total_input(port("nonpad_kv_seqlen", ("batch",)))

    assert [fed(index, SHORT)[1] for index in (one, each, flat)] == [[4], [[4, 5]], [4, 5]]
    assert fed(valid, SHORT) == ("int64", [6])


@pytest.mark.parametrize(
    ("shape", "zeros"),
    [
        (("batch", "new"), [[0, 0]]),
        ((1, "batch", "new"), [[[0, 0]]]),
        (("batch", 3), [[0, 0, 0]]),
        (("other",), [0]),
        ((), 0),
    ],
)
def test_an_optional_input_is_zero_in_its_own_shape(shape: tuple[Dimension, ...], zeros: Any) -> None:
    """Its axes are numbers, the batch, or the tokens of the call."""
    assert fed(zero_input(port("token_type_ids", shape), batch="batch", sequence="new"), SHORT) == (
        "int64",
        zeros,
    )


@pytest.mark.parametrize(
    ("make", "given", "why"),
    [
        (token_input, port("p", ("batch", 4)), "exactly 4 tokens"),
        (token_input, port("p", (2, "new")), "batch of 2"),
        (token_input, port("p", ("b", "new", 1)), "rank 3"),
        (token_input, port("p", ("b", "new"), "float32"), "dtype float32, and only int32 and int64"),
        (token_input, port("p", ("b", "new"), "bool"), "dtype bool"),
        (positions_input, port("p", ("planes", "b", "new")), "which axis counts planes"),
        (positions_input, port("p", (3, 2, "new")), "which axis counts planes"),
        (positions_input, port("p", (2, "new")), "batch of 2"),
        (positions_input, port("p", ()), "rank 0"),
        (total_input, port("p", (3,)), "batch of 3"),
        (total_input, port("p", ("b",), None), "dtype None"),
    ],
)
def test_a_port_in_another_form_is_refused(make: Any, given: Port, why: str) -> None:
    """The reason is a clause that follows the port's name."""
    with pytest.raises(UnfeedableError, match=why):
        make(given)


def test_a_mask_of_a_length_that_nothing_has_is_refused() -> None:
    """A fixed length must be that of the cache."""
    with pytest.raises(UnfeedableError, match="fixed length 9"):
        mask_input(port("attention_mask", ("batch", 9)), capacity=8)


@pytest.mark.parametrize(("shape", "dtype"), [(None, "int64"), (("b",), None), (("b", "x"), "int64")])
def test_an_optional_input_of_unknown_form_is_refused(
    shape: tuple[Dimension, ...] | None, dtype: str | None
) -> None:
    """There are no zeros without a shape."""
    with pytest.raises(UnfeedableError, match="is an optional input"):
        zero_input(port("p", shape, dtype), batch="batch", sequence="new")
