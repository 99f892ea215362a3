"""How each kind of cache is carried, seen from the shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.decode.axes import UnfeedableError, batch_axis, extra_rows
from harness.decode.buffers import FixedScales, StaticBuffers, buffer_of
from harness.decode.caches import (
    CacheShapeError,
    GrowingKv,
    GrowingPair,
    ReplacedPair,
    ReplacedStates,
    growing_pair,
)
from harness.ports import Dimension, Port


@dataclass(frozen=True)
class Tensor:
    """A handle that is nothing but its shape."""

    shape: tuple[int, ...]
    dtype: str = "float32"


class Shapes:
    """A session that makes such handles."""

    def zeros(self, shape: Sequence[int], dtype: str) -> Tensor:
        """Zeros."""
        return Tensor(tuple(shape), dtype)

    def place(self, array: np.ndarray) -> np.ndarray:
        """The array itself."""
        return array


SESSION: Any = Shapes()


def advanced(pair: GrowingPair, rows: int, *, before: int, past: int, tokens: int) -> None:
    """Give back `rows` rows where `before` were fed."""

    def tensor(count: int) -> Tensor:
        return Tensor((*pair.shape[: pair.axis], count, *pair.shape[pair.axis + 1 :]))

    strategy = GrowingKv((pair,))
    outputs: Any = {pair.present: tensor(rows)}
    fed: Any = {pair.past: tensor(before)}
    feeds = strategy.advance(outputs, fed=fed, past=past, tokens=tokens)
    assert feeds == {pair.past: outputs[pair.present]}


PAIR = GrowingPair("past", "present", "float32", (1, 2, 0, 8), 2)
WINDOWED = GrowingPair("past", "present", "float32", (1, 2, 0, 8), 2, windowed=True)


@given(window=st.integers(1, 9), calls=st.lists(st.integers(1, 7), min_size=1, max_size=12))
def test_a_window_fills_up_and_stays_full(window: int, calls: list[int]) -> None:
    """Whatever the calls, the last rows of all come back: as many as there are, or as the window has."""
    seen = rows = 0
    for new in calls:
        kept = min(rows + new, window)
        advanced(WINDOWED, kept, before=rows, past=seen, tokens=seen + new)
        seen, rows = seen + new, kept


@given(window=st.integers(2, 9), calls=st.lists(st.integers(1, 7), min_size=4, max_size=12), data=st.data())
def test_a_window_of_another_length_is_an_error(window: int, calls: list[int], data: st.DataObject) -> None:
    """Once rows were dropped the length is settled: one row more or less is named."""
    seen = rows = 0
    for new in calls:
        kept = min(rows + new, window)
        if rows < seen:
            wrong = kept + data.draw(st.sampled_from([-1, 1]))
            with pytest.raises(CacheShapeError, match=rf"shape \[1, 2, {wrong}, 8\] .* \[1, 2, {kept}, 8\]"):
                advanced(WINDOWED, wrong, before=rows, past=seen, tokens=seen + new)
        seen, rows = seen + new, kept


@pytest.mark.parametrize("rows", [0, 4, 6, 8])
def test_a_cache_without_a_window_has_a_row_for_each_token(rows: int) -> None:
    """A row that is lost, or one too many, is named."""
    advanced(PAIR, 7, before=5, past=5, tokens=7)
    with pytest.raises(CacheShapeError):
        advanced(PAIR, rows, before=5, past=5, tokens=7)


@pytest.mark.parametrize("rows", [0, 4, 8])
def test_a_window_never_shrinks_and_never_holds_more_than_was_fed(rows: int) -> None:
    """Before it is full, the rows that went in come back, and at most those of the call with them."""
    advanced(WINDOWED, 5, before=5, past=5, tokens=7)
    with pytest.raises(CacheShapeError):
        advanced(WINDOWED, rows, before=5, past=5, tokens=7)


@pytest.mark.parametrize(
    ("past", "present", "windowed"),
    [
        ("past_sliding_length", "total_sliding_length", True),
        ("past_window", "total", True),
        ("past", "SlidingWindow", True),
        ("past_sequence_length", "total_sequence_length", False),
    ],
)
def test_a_window_is_one_by_its_symbols(past: str, present: str, windowed: bool) -> None:
    """As exporters spell the length of a cache that drops rows."""
    pair = growing_pair(
        Port("k", "float32", ("batch", 2, past, 8)),
        Port("p", "float32", ("batch", 2, present, 8)),
        batch="batch",
    )

    assert pair.windowed == windowed


@pytest.mark.parametrize(
    ("past", "present", "shape", "axis"),
    [
        ((2, "batch", 4, "past", 8), (2, "batch", 4, "total", 8), (2, 1, 4, 0, 8), 3),
        ((6, 2, "batch", 4, "past", 8), (6, 2, "batch", 4, "total", 8), (6, 2, 1, 4, 0, 8), 4),
        (("past", 8), ("total", 8), (0, 8), 0),
        (("past", 2, 8), ("past + new", 2, 8), (0, 2, 8), 0),
        ((2, "past", 8), (2, "total", 8), (2, 0, 8), 1),
        (("batch", 2, 8, "past"), ("batch", 2, 8, "total"), (1, 2, 8, 0), 3),
    ],
)
def test_fused_stacked_unbatched_and_transposed_caches_grow(
    past: tuple[Dimension, ...], present: tuple[Dimension, ...], shape: tuple[int, ...], axis: int
) -> None:
    """The axis that grows is the one that is spelled otherwise afterwards, wherever it stands."""
    pair = growing_pair(Port("k", "float32", past), Port("p", "float32", present), batch="batch")

    assert (pair.shape, pair.axis) == (shape, axis)


@pytest.mark.parametrize("heads", ["batch_size * num_heads", "num_heads*batch_size"])
def test_heads_that_are_counted_with_the_batch_are_not_the_batch(heads: str) -> None:
    """How many there are is not known: one would be a guess, and a wrong one."""
    with pytest.raises(UnfeedableError, match=r"axis 0 .* no known extent"):
        growing_pair(
            Port("k", "float32", (heads, "past", 8)),
            Port("p", "float32", (heads, "total", 8)),
            batch="batch_size",
        )


@pytest.mark.parametrize(
    ("shape", "batch", "axis"),
    [
        (("b", 4), "b", 0),
        ((4, "b"), "b", 1),
        (("n", 4), "b", 0),
        ((None, 4), "b", 0),
        ((4, "batch_size", 8), None, 1),
        ((4, "batch_size * 2"), None, None),
        (("batch * heads", 8), "batch", None),
        ((4, 8), "b", None),
        ((), "b", None),
    ],
)
def test_the_axis_of_the_batch(shape: tuple[Dimension, ...], batch: str | None, axis: int | None) -> None:
    """By the token port's symbol, in first place, or by name; one that counts more than the batch is none."""
    assert batch_axis(shape, batch) == axis


@pytest.mark.parametrize(
    ("extent", "rows"),
    [
        ("sequence_len + 2", 2),
        ("2 + sequence_len", 2),
        ("sequence_len+0", 0),
        ("sequence_len", None),
        ("past + 2", None),
        ("sequence_len + past", None),
        ("sequence_len - 2", None),
        (3, None),
        (None, None),
    ],
)
def test_rows_beyond_the_tokens_of_a_call(extent: Dimension, rows: int | None) -> None:
    """Read from a sum of the token port's symbol and a number, nothing else."""
    assert extra_rows(extent, "sequence_len") == rows


@pytest.mark.parametrize(
    ("source", "axis", "shape", "rows"),
    [
        (("batch", 24, 32), None, (1, 24, 32), 1),
        (("batch", 2, 24, 16), None, (1, 2, 24, 16), 2),
        (("batch", 24, 2, 16), 1, (1, 24, 2, 16), 1),
        (("batch", 24, 2, 16), -3, (1, 24, 2, 16), 1),
        ((24, 32), None, (24, 32), 0),
        (("batch", "capacity", 32), None, (1, 0, 32), 1),
    ],
)
def test_the_rows_of_a_buffer(
    source: tuple[Dimension, ...], axis: int | None, shape: tuple[int, ...], rows: int
) -> None:
    """Next to last, unless the operator that writes says otherwise."""
    buffer = buffer_of(
        Port("cache", "float16", source), Port("updated", "float16", None), batch="batch", axis=axis
    )

    assert (buffer.shape, buffer.axis) == (shape, rows)
    assert buffer.capacity == (24 if 24 in source else None)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (("batch",), "no axis for rows"),
        (("batch", 24, "width"), "axis 2 .* no known extent"),
        (None, "does not say"),
    ],
)
def test_a_buffer_of_unknown_form_is_refused(source: tuple[Dimension, ...] | None, why: str) -> None:
    """Only its rows may be open."""
    with pytest.raises(UnfeedableError, match=why):
        buffer_of(Port("c", "float32", source), Port("u", "float32", None), batch="batch")


def test_buffers_are_as_long_as_the_shortest() -> None:
    """The first that is full ends the decode; one without a length gets what is asked for."""
    buffers = [
        buffer_of(Port(f"c{rows}", "float32", ("batch", rows, 8)), Port("u", "float32", None), batch="batch")
        for rows in (32, 16, "capacity")
    ]

    strategy = StaticBuffers(tuple(buffers))
    started = strategy.start(SESSION, room=5)

    assert strategy.smallest == buffers[1]
    assert [handle.shape[1] for handle in started.values()] == [32, 16, 5]
    assert StaticBuffers(()).smallest is None
    assert StaticBuffers(tuple(buffers[2:])).smallest is None


@pytest.mark.parametrize(("rows", "kept"), [("sliding", 5), (8, 8)])
def test_a_buffer_that_rolls_is_never_full(rows: int | str, kept: int) -> None:
    """It has as many rows as the graph says, or as a query sees, whatever will be fed."""
    buffer = buffer_of(
        Port("c", "float32", ("batch", 2, rows, 8)),
        Port("u", "float32", ("batch", 2, rows, 8)),
        batch="batch",
        axis=2,
        window=5,
    )

    strategy = StaticBuffers((buffer,))

    assert buffer.capacity is None
    assert strategy.smallest is None
    assert strategy.start(SESSION, room=100) == {"c": Tensor((1, 2, kept, 8))}


def test_a_buffer_that_changes_its_shape_is_an_error() -> None:
    """It is written in place: what comes back is as long as what went in."""
    buffer = buffer_of(Port("c", "float32", ("batch", 4, 8)), Port("u", "float32", None), batch="batch")
    fed: Any = {"c": Tensor((1, 4, 8))}
    strategy = StaticBuffers((buffer,))

    same: Any = {"u": Tensor((1, 4, 8))}
    assert strategy.advance(same, fed=fed, past=0, tokens=2) == {"c": same["u"]}
    longer: Any = {"u": Tensor((1, 6, 8))}
    with pytest.raises(CacheShapeError, match=r"u has shape \[1, 6, 8\] after 2 tokens"):
        strategy.advance(longer, fed=fed, past=0, tokens=2)


def test_scales_that_do_not_grow_start_with_one() -> None:
    """Zero would divide by zero, and nothing is stored yet that one could scale wrongly."""
    strategy = FixedScales((ReplacedPair("scale", "next", "float16", (1, 2)),))

    (start,) = strategy.start(SESSION, room=3).values()

    first: Any = start
    assert first.dtype == np.float16
    assert first.tolist() == [[1, 1]]
    given: Any = {"next": Tensor((1, 2))}
    assert strategy.advance(given, fed={}, past=0, tokens=1) == {"scale": given["next"]}
    wrong: Any = {"next": Tensor((2, 2))}
    with pytest.raises(CacheShapeError):
        strategy.advance(wrong, fed={}, past=0, tokens=1)


@pytest.mark.parametrize(("dtype", "exact"), [("float32", True), ("float16", True), ("int8", False)])
def test_what_is_rounded_between_two_calls_is_not_seen_in_one(dtype: str, exact: bool) -> None:
    """Rows in int8 are other rows than those that a single call computes and reads at once."""
    pair = ReplacedPair("s", "t", dtype, (1, 4))
    buffer = buffer_of(Port("c", dtype, (1, 4, 8)), Port("u", dtype, None), batch=None)

    assert GrowingKv((GrowingPair("p", "q", dtype, (1, 0, 4), 1),)).one_pass == exact
    assert ReplacedStates((pair,)).one_pass == exact
    assert StaticBuffers((buffer,)).one_pass == exact
    assert not FixedScales((pair,)).one_pass
    assert not GrowingKv((WINDOWED,)).one_pass
