from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from harness.engines.reduce import top_logits_of
from harness.errors import InputError

# Few distinct values, so that ties are the rule; infinities and NaN among them.
LOGITS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, float("inf"), float("-inf"), float("nan")])


@given(
    row=hnp.arrays(np.float32, st.integers(1, 600), elements=LOGITS),
    k=st.integers(1, 8),
)
def test_equals_a_naive_sort_with_ties_infinities_and_nan(row: np.ndarray, k: int) -> None:
    """Whatever the row holds, IDs and order are those of a full sort by the stated rule."""
    key = np.where(np.isnan(row), np.float32(0), row)
    (top,) = top_logits_of(row[None], k)
    expected = sorted(range(row.size), key=lambda i: (bool(np.isnan(row[i])), -float(key[i]), i))[:k]
    assert list(top.token_ids) == expected
    np.testing.assert_array_equal(np.float32(top.values), row[expected])
    assert top.has_nan == bool(np.isnan(row).any())


@pytest.mark.parametrize("vocab", [49152, 248320])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_equals_a_full_sort_on_whole_vocabularies(vocab: int, dtype: type) -> None:
    """Half-width logits of a large vocabulary tie at the top; a full sort by value and ID decides."""
    logits = np.random.default_rng(vocab).standard_normal((1, 2, vocab)).astype(dtype)
    for row, top in zip(logits[0], top_logits_of(logits, 5), strict=True):
        by_value_then_id = np.lexsort((np.arange(vocab), -row.astype(np.float64)))
        assert list(top.token_ids) == by_value_then_id[:5].tolist()
        assert top.values == tuple(float(row[i]) for i in top.token_ids)


def test_positions_select_and_count_from_the_end() -> None:
    """Positions are taken in the order asked for, negative ones from the end; rank 2 has one position."""
    logits = np.eye(4, 7, dtype=np.float32)[None]
    assert [t.argmax for t in top_logits_of(logits, 1)] == [0, 1, 2, 3]
    assert [t.argmax for t in top_logits_of(logits, 1, [-1, 0])] == [3, 0]
    assert [t.argmax for t in top_logits_of(logits[:, 2], 1, [-1])] == [2]
    with pytest.raises(IndexError):
        top_logits_of(logits, 1, [4])


def test_margin_is_that_of_the_two_largest_and_a_short_vocabulary_gives_what_it_has() -> None:
    """`k` beyond the vocabulary returns the whole vocabulary, and the margin follows from the values."""
    (top,) = top_logits_of(np.array([[1.0, 3.0, 2.5]]), 9)
    assert top.token_ids == (1, 2, 0)
    assert top.margin == 0.5
    assert top_logits_of(np.array([[1.0]]), 2)[0].margin == float("inf")


@pytest.mark.parametrize("shape", [(5,), (2, 5), (1, 2, 3, 4), (1, 3, 0)])
def test_what_is_not_logits_is_refused_with_its_shape(shape: tuple[int, ...]) -> None:
    """A wrong rank, a batch or an empty vocabulary is one clear error that shows the shape."""
    with pytest.raises(InputError, match=r"Logits have shape \[") as caught:
        top_logits_of(np.zeros(shape, np.float32), 1)
    # The shape is the fault, and the output perhaps named already: naming it is not the first advice.
    assert caught.value.next_action.startswith("Export the graph with logits of such a shape")


def test_k_below_one_is_a_defect_of_the_caller() -> None:
    """Nothing to return is never asked for on purpose."""
    with pytest.raises(ValueError, match="k must be at least 1"):
        top_logits_of(np.zeros((1, 3), np.float32), 0)
