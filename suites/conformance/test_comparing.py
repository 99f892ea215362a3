"""What differs between two decodes is found to the bit, and the first of it by name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.parity.relations.comparing import LOGITS, compare, largest_difference
from harness.parity.relations.observation import Moment, Observation

if TYPE_CHECKING:
    from numpy.typing import NDArray

STEPS, VOCABULARY = 4, 6
STATES = {"present.0.key": (1, 2, 3, 2), "present.0.conv_state": (1, 5)}
PORTS = (LOGITS, *STATES)


def observed() -> dict[int, Moment]:
    """Numbers that are all different, so that any mix-up shows."""
    moments = {}
    for step in range(STEPS):
        states = {
            name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * step
            for name, shape in STATES.items()
        }
        moments[step] = Moment(step, np.linspace(step, step + 1, VOCABULARY, dtype=np.float32), states)
    return moments


def changed(seen: Observation, step: int, port: str, flat: int, value: float) -> dict[int, Moment]:
    """A copy with one other number."""
    moment = seen[step]
    tensors = {LOGITS: moment.logits, **moment.states}
    array = tensors[port].copy()
    array.flat[flat % array.size] = value
    tensors[port] = array
    logits = tensors.pop(LOGITS)
    return {**seen, step: replace(moment, logits=logits, states=tensors)}


places = st.tuples(st.integers(0, STEPS - 1), st.sampled_from(PORTS), st.integers(0, 11))


def test_a_decode_does_not_differ_from_itself() -> None:
    """And it counts what it compared."""
    found = compare(observed(), observed())
    assert found.first is None
    assert found.largest == {}
    assert (found.tokens, found.states) == (STEPS, STEPS * len(STATES))


@given(places, st.floats(-1e6, 1e6, width=32))
def test_one_other_number_is_found_where_it_is(place: tuple[int, str, int], value: float) -> None:
    """Step, tensor, index, both values and the size of the difference are those of the change."""
    step, port, flat = place
    seen = observed()
    other = changed(seen, step, port, flat, value)
    original = {LOGITS: seen[step].logits, **seen[step].states}[port]
    index = np.unravel_index(flat % original.size, original.shape)
    found = compare(seen, other).first
    if original[index].tobytes() == np.float32(value).tobytes():
        assert found is None
        return
    assert found is not None
    assert (found.step, found.port, found.index) == (step, port, tuple(map(int, index)))
    assert (found.differing, found.elements) == (1, original.size)
    assert (found.expected, found.found) == (float(original[index]), float(np.float32(value)))
    assert found.size == abs(float(original[index]) - float(np.float32(value)))


@given(places, places)
def test_the_first_difference_is_the_earliest_step_and_the_logits_before_states(
    one: tuple[int, str, int], other: tuple[int, str, int]
) -> None:
    """The order in which a decode computes them."""
    seen = observed()
    both = changed(changed(seen, *one, -5.0), *other, -5.0)
    found = compare(seen, both).first
    assert found is not None
    first = min(one, other, key=lambda place: (place[0], PORTS.index(place[1])))
    assert (found.step, found.port) == first[:2]


def test_the_largest_difference_of_each_tensor_is_over_all_steps() -> None:
    """A small difference first does not hide a large one later."""
    seen = observed()
    both = changed(changed(seen, 0, LOGITS, 0, 0.5), 3, LOGITS, 0, 10.0)
    assert compare(seen, both).largest == {LOGITS: 7.0}
    assert compare(seen, changed(changed(seen, 0, LOGITS, 0, 7.0), 3, LOGITS, 0, 3.5)).largest == {
        LOGITS: 7.0
    }


def test_other_choices_are_told_from_other_logits() -> None:
    """The first step at which the choices part, also where no logit differs."""
    seen = observed()
    other = {**seen, 2: replace(seen[2], token=9), 3: replace(seen[3], token=9)}
    assert compare(seen, other).tokens_part_at == 2
    assert compare(seen, changed(seen, 1, LOGITS, 0, 5.0)).tokens_part_at is None


@pytest.mark.parametrize(
    ("one", "other", "size"),
    [
        (np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32), np.inf),
        (np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float16), np.inf),
        (np.float32([1, np.nan]), np.float32([1, 2]), np.inf),
        (np.float32([1, np.inf]), np.float32([1, 2]), np.inf),
        (np.float32([0.0]), np.float32([-0.0]), 0.0),
        (np.int8([127]), np.int8([-128]), 255.0),
    ],
    ids=["shape", "dtype", "NaN", "infinity", "sign of zero", "whole numbers"],
)
def test_what_is_no_plain_difference_is_one_all_the_same(
    one: NDArray[Any], other: NDArray[Any], size: float
) -> None:
    """Shapes, types, NaN against a number, and bits that mean the same number."""
    seen, found = ({0: Moment(0, np.float32([1]), {"state": array})} for array in (one, other))
    first = compare(seen, found).first
    assert first is not None
    assert first.size == size
    assert (first.note is None) == (one.shape == other.shape and one.dtype == other.dtype)


def test_equal_nan_and_infinity_do_not_differ() -> None:
    """What both sides have to the bit is no difference of theirs."""
    array = np.float32([np.nan, np.inf, -np.inf, 1])
    assert compare({0: Moment(0, array)}, {0: Moment(0, array.copy())}).first is None
    assert largest_difference(array, array.copy()) == 0.0


def test_an_observation_without_a_common_step_is_a_defect() -> None:
    """What compares nothing must not pass for what found nothing."""
    seen = observed()
    with pytest.raises(ValueError, match="nothing was compared"):
        compare({0: seen[0]}, {1: seen[1]})
    with pytest.raises(ValueError, match="states are not the same"):
        compare(seen, {**seen, 1: replace(seen[1], states={"other": np.zeros(1)})})
