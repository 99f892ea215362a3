"""Who is blamed: over all ways in which three witnesses can agree and differ."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.decode.trace import Trace
from harness.engines.base import SessionInfo, TopLogits
from harness.parity.attribution import (
    Attribution,
    SourceComparison,
    attribute,
    compare_with_source,
    overall_attribution,
)
from harness.parity.compare import compare_tokens
from harness.parity.verdict import Verdict

PROMPT = (7,)
LEAD = 1.0
"""By how much each side prefers its choice to every other token."""


def top(token: int, lead: float = LEAD, tokens: int = 4) -> TopLogits:
    """Logits over `tokens` tokens, of which `token` is ahead of all others, which are equal."""
    others = [other for other in range(tokens) if other != token]
    return TopLogits((token, *others), (lead, *(0.0 for _ in others)))


def trace(tokens: Sequence[int], steps: Sequence[TopLogits]) -> Trace:
    """A trace that followed `tokens` and saw `steps`."""
    return Trace(PROMPT, tuple(tokens), tuple(steps), 0.0, SessionInfo("any", "0"))


def greedy(tokens: Sequence[int], lead: float = LEAD) -> Trace:
    """A trace of someone who chose `tokens`."""
    return trace(tokens, [top(token, lead) for token in tokens])


def along(followed: Sequence[int], chosen: Sequence[int], lead: float = LEAD) -> Trace:
    """A trace of someone who would have chosen `chosen` along the tokens `followed`."""
    return trace(followed, [top(token, lead) for token in chosen])


def judge(
    candidate: Sequence[int], oracle: Sequence[int], source: Trace, **bands: Sequence[float]
) -> tuple[Attribution | None, SourceComparison]:
    """Both comparisons and what comes of them."""
    reference = along(candidate, oracle)
    found = compare_with_source(reference, source, **bands)
    return attribute(compare_tokens(greedy(candidate), reference), found), found


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@given(
    st.integers(1, 6).flatmap(lambda n: st.tuples(*[st.lists(st.integers(0, 3), min_size=n, max_size=n)] * 3))
)
def test_the_first_position_at_which_not_all_agree_decides(
    sides: tuple[list[int], list[int], list[int]],
) -> None:
    """Over every way in which candidate, oracle and source can choose: the rule, written out by position."""
    candidate, oracle, source = sides
    blamed, found = judge(candidate, oracle, along(candidate, source))
    expected = None
    for c, o, s in zip(candidate, oracle, source, strict=True):
        if c == o == s:
            continue
        if o == s:
            expected = Attribution.RUNTIME
        elif c == s:
            expected = Attribution.UNKNOWN
        else:
            expected = Attribution.EXPORTER
        break
    assert blamed is expected
    assert found.source_ids == tuple(source)
    assert found.verdict is (Verdict.IDENTICAL if source == oracle else Verdict.DIVERGENT)


@given(TOKENS, TOKENS)
def test_a_greedy_decode_of_the_source_serves_up_to_where_it_goes_its_own_way(
    candidate: list[int], source: list[int]
) -> None:
    """A recorded decode has other tokens before it from there on, so that what follows says nothing.

    The oracle is with the candidate: whoever differs first is the exporter's victim.
    """
    blamed, found = judge(candidate, candidate, greedy(source))
    parted = next((i for i, (c, s) in enumerate(zip(candidate, source, strict=False)) if c != s), None)
    if parted is None:
        length = min(len(candidate), len(source))
        assert (blamed, found.verdict) == (None, Verdict.IDENTICAL)
        assert found.source_ids == tuple(source[:length])
    else:
        assert (blamed, found.verdict) == (Attribution.EXPORTER, Verdict.DIVERGENT)
        assert found.first_divergence is not None
        assert found.first_divergence.index == parted
        assert found.source_ids == tuple(source[: parted + 1])


def test_a_greedy_decode_that_ended_before_cannot_confirm_the_oracle() -> None:
    """The runtime parts from the oracle where the source has no token any more."""
    blamed, found = judge([1, 2, 3], [1, 2, 0], greedy([1, 2]))
    assert (blamed, found.verdict) == (Attribution.UNKNOWN, Verdict.IDENTICAL)


def test_tokens_without_logits_are_enough() -> None:
    """A record that kept the IDs alone has one logit a step: the oracle's lead is then all there is."""
    record = trace([1, 3], [TopLogits((1,), (0.0,)), TopLogits((3,), (0.0,))])
    blamed, found = judge([1, 2], [1, 2], record, bands=[0.0, LEAD / 2])
    assert blamed is Attribution.EXPORTER
    assert found.first_divergence is not None
    assert found.first_divergence.gap == LEAD


@given(st.floats(0.0, 3.0), st.floats(0.0, 2.0), st.floats(0.0, 2.0))
def test_a_gap_that_rounding_may_explain_blames_nobody(band: float, ours: float, theirs: float) -> None:
    """What counts is the sum of both leads: either may be a tie that the other one decides."""
    reference, source = along([1], [1], ours), along([1], [2], theirs)
    found = compare_with_source(reference, source, bands=[band])
    assert found.verdict is (Verdict.DIVERGENT if ours + theirs > band else Verdict.INCONCLUSIVE)
    blamed = attribute(compare_tokens(greedy([1]), reference), found)
    assert blamed is (Attribution.EXPORTER if ours + theirs > band else None)
    assert found.first_divergence is not None
    assert (found.first_divergence.gap, found.first_divergence.noise_band) == (ours + theirs, band)


def test_the_first_decided_difference_is_told_and_not_a_close_one_before_it() -> None:
    """A near tie at position 0 hides nothing behind it."""
    found = compare_with_source(along([1, 1], [1, 1]), along([1, 1], [2, 2]), bands=[5.0, 0.5])
    assert found.verdict is Verdict.DIVERGENT
    assert found.first_divergence is not None
    assert found.first_divergence.index == 1


def test_a_source_too_close_to_say_confirms_nobody() -> None:
    """The runtime differs from the oracle, and the source from both within its rounding: unknown."""
    blamed, found = judge([1], [2], along([1], [3], 0.1), bands=[2.0])
    assert (blamed, found.verdict) == (Attribution.UNKNOWN, Verdict.INCONCLUSIVE)


def test_a_token_that_the_other_side_did_not_keep_is_behind_by_so_much_at_least() -> None:
    """Of five kept logits the last bounds all others."""
    oracle = trace([1], [TopLogits((1, 2), (3.0, 2.5))])
    source = trace([1], [TopLogits((9, 8), (4.0, 3.0))])
    found = compare_with_source(oracle, source).first_divergence
    assert found is not None
    assert found.gap == 0.5 + 1.0
    assert "at least 0.5 behind" in found.evidence


def test_the_exporter_comes_first_over_several_prompts() -> None:
    """Until the graph is right, nothing that runs it can be; unknown is the last resort."""
    exporter, runtime, unknown = Attribution
    assert overall_attribution([None, runtime, exporter, unknown]) is exporter
    assert overall_attribution([unknown, None, runtime]) is runtime
    assert overall_attribution([None, unknown]) is unknown
    assert overall_attribution([None, None]) is None


def test_traces_that_do_not_belong_together_are_a_mistake() -> None:
    """Another prompt, or nothing to compare."""
    other = Trace((8,), (1,), (top(1),), 0.0, SessionInfo("any", "0"))
    with pytest.raises(ValueError, match="another prompt"):
        compare_with_source(along([1], [1]), other)
    with pytest.raises(ValueError, match="no position"):
        compare_with_source(along([1], [1]), trace([], []))
