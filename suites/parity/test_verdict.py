from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.parity.verdict import EXIT_PRECEDENCE, Verdict, exit_code_of, first_exit_code, worst_verdict


@given(st.lists(st.sampled_from(Verdict), min_size=1))
def test_one_bad_prompt_spoils_the_report(verdicts: list[Verdict]) -> None:
    """`identical` needs every prompt to be identical, and the order of prompts means nothing."""
    worst = worst_verdict(verdicts)
    assert worst in verdicts
    assert (worst is Verdict.IDENTICAL) == (set(verdicts) == {Verdict.IDENTICAL})
    assert worst_verdict(reversed(verdicts)) is worst
    assert worst_verdict([*verdicts, worst]) is worst


def test_nothing_judged_is_no_verdict() -> None:
    """A check that judged no prompt cannot pass."""
    with pytest.raises(ValueError, match="nothing was judged"):
        worst_verdict([])


def test_only_identical_exits_with_zero() -> None:
    """Exit 0 means identical, and nothing else is rounded up to it; the table is the design's."""
    assert {v: exit_code_of(v) for v in Verdict} == {
        Verdict.INVALID_RUN: 6,
        Verdict.CRASHED: 4,
        Verdict.TIMEOUT: 4,
        Verdict.UNSUPPORTED: 4,
        Verdict.NONDETERMINISTIC: 1,
        Verdict.DIVERGENT: 1,
        Verdict.STATE_DIVERGENT: 1,
        Verdict.NEAR_TIE: 1,
        Verdict.INCONCLUSIVE: 1,
        Verdict.IDENTICAL: 0,
    }


def test_the_worst_verdict_and_the_first_exit_code_agree() -> None:
    """Of any two verdicts, the exit status of the worse one is the one that decides."""
    for a, b in itertools.product(Verdict, repeat=2):
        assert exit_code_of(worst_verdict([a, b])) == first_exit_code([exit_code_of(a), exit_code_of(b)])


@given(st.lists(st.sampled_from(EXIT_PRECEDENCE), min_size=1))
def test_the_first_exit_code_in_the_order_of_precedence_decides(codes: list[int]) -> None:
    """No code that stands before it occurred."""
    decided = first_exit_code(codes)
    assert not set(codes) & set(EXIT_PRECEDENCE[: EXIT_PRECEDENCE.index(decided)])
