"""Slice against the text of its specification, for all bounds and steps that can matter."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

EXTENTS = (0, 1, 2, 5)
FAR = np.iinfo(np.int64)
BOUNDS = [FAR.min, *range(-8, 9), FAR.max]
STEPS = [FAR.min, -7, -3, -2, -1, 1, 2, 3, 7, FAR.max]


def specified(start: int, end: int, step: int, extent: int) -> list[int]:
    """The indices that ONNX Slice 13 takes along an axis, in the words of its specification.

    Negative bounds have the extent added. For a positive step start and end are clamped to [0, extent]; for a
    negative one start is clamped to [0, extent - 1] and end to [-1, extent - 1].
    """
    start, end = (bound + extent if bound < 0 else bound for bound in (start, end))
    low, high = (0, extent) if step > 0 else (-1, extent - 1)
    position, end = min(max(start, 0), high), min(max(end, low), high)
    taken = []
    while position < end if step > 0 else position > end:
        taken.append(position)
        position += step
    return taken


@pytest.mark.parametrize("constant", [True, False], ids=["constants", "inputs"])
@pytest.mark.parametrize("extent", EXTENTS)
def test_every_start_end_and_step(extent: int, constant: bool, bound: Callable[..., Any]) -> None:
    """A backward slice that starts before the first element has that element, as bounds are clamped."""
    x = np.arange(2 * extent).reshape(2, extent)
    for start, end, step in itertools.product(BOUNDS, BOUNDS, STEPS):
        given = [np.array([value]) for value in (start, end, -1, step)]
        compute = bound("Slice", 13, inputs=5, constants=dict(enumerate(given, 1)) if constant else {})
        np.testing.assert_array_equal(compute(x, *given), x[:, specified(start, end, step, extent)])


def test_several_axes_at_once_are_what_each_is_by_itself(bound: Callable[..., Any]) -> None:
    """Backward along one axis and forward along another, in any order of the axes."""
    x = np.arange(60).reshape(3, 4, 5)
    cuts = {0: (-100, -200, -1), 1: (-3, 9, 2), 2: (9, -100, -2)}
    want = x[np.ix_(*(specified(*cuts[axis], extent) for axis, extent in enumerate(x.shape)))]
    for axes in itertools.permutations(cuts):
        starts, ends, steps = (np.array(column) for column in zip(*(cuts[a] for a in axes), strict=True))
        compute = bound("Slice", 13, inputs=5)
        np.testing.assert_array_equal(compute(x, starts, ends, np.array(axes), steps), want)
