"""Two traces to one verdict on their tokens.

The candidate's trace is its own greedy decode. The oracle's trace is a forced decode along the candidate's
tokens: at each position it holds the oracle's logits after exactly those tokens. As long as its argmax
equals the candidate's token, that *is* the oracle's own greedy decode, by induction over positions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from harness.decode.trace import Trace
from harness.engines.base import TopLogits
from harness.events import FirstDivergence
from harness.parity.verdict import Verdict

__all__ = ["TokenComparison", "behind", "compare_tokens", "compare_with_itself"]


@dataclass(frozen=True, slots=True)
class TokenComparison:
    """What the comparison of one prompt found; fields as in `harness.events.PromptJudged`."""

    verdict: Verdict
    oracle_ids: tuple[int, ...]
    oracle_forced_ids: tuple[int, ...]
    min_margin: float | None
    first_divergence: FirstDivergence | None


def compare_tokens(
    candidate: Trace, oracle: Trace, *, bands: Sequence[float] = (), undecided: Collection[int] = ()
) -> TokenComparison:
    """Compare the candidate's tokens with the oracle's argmax after the same tokens.

    A position whose candidate logits hold a NaN, or whose largest is infinite, is a divergence whatever the
    token: nothing is decided there, as in an oracle (`harness.parity.finite`). Any difference is `divergent`,
    however small the oracle's margin, unless the oracle itself cannot decide between the two tokens:
    differing there, and nowhere else, is `inconclusive`.

    Args:
        candidate: a greedy decode.
        oracle: a forced decode along `candidate.token_ids`, from the same prompt.
        bands: below which margin the oracle decides nothing, for each position; none where not measured.
        undecided: positions at which the oracle's margin lies within its band.

    Raises:
        ValueError: the traces do not belong together, or hold no position to compare.
    """
    chosen = candidate.token_ids
    if oracle.prompt_ids != candidate.prompt_ids or len(oracle.steps) != len(chosen):
        raise ValueError("the oracle's trace does not follow the candidate's tokens")
    if not chosen:
        raise ValueError("the candidate produced no token: there is nothing to compare")
    forced = tuple(step.argmax for step in oracle.steps)
    undefined = {i for i, step in enumerate(candidate.steps) if not _decides(step)}
    differing = [i for i, token in enumerate(chosen) if token != forced[i] or i in undefined]
    decided = [
        i
        for i in differing
        if i not in undecided
        or i in undefined
        or behind(chosen[i], oracle.steps[i]) > (bands[i] if bands else 0.0)
    ]
    parted = next(iter(decided or differing), None)
    own = forced if parted is None else (*chosen[:parted], forced[parted])
    verdict = Verdict.DIVERGENT if decided else Verdict.INCONCLUSIVE if differing else Verdict.IDENTICAL
    return TokenComparison(
        verdict=verdict,
        oracle_ids=own,
        oracle_forced_ids=forced,
        min_margin=min(step.margin for step in oracle.steps[: len(own)]),
        first_divergence=(
            None
            if parted is None
            else _describe(parted, candidate, oracle, band=bands[parted] if bands else None)
        ),
    )


def compare_with_itself(found: TokenComparison, first: Trace, again: Trace) -> TokenComparison:
    """What is to be said of a candidate that differs from the oracle, and has decoded the prompt once more.

    One that chose other tokens is `nondeterministic`: there is no answer of it to compare. One whose logits
    alone were others stays as it was found, and the evidence says so. Where the second decode broke off, what
    there is of it counts.

    Args:
        found: the comparison of `first` with the oracle, with a divergence.
        first: the decode that was compared.
        again: the same prompt on the same engine, from empty KV and zero states.
    """
    divergence = found.first_divergence
    if divergence is None:
        raise ValueError("a candidate that does not differ from the oracle needs no second decode")
    pairs = list(zip(first.token_ids, again.token_ids, strict=False))
    parted = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if parted is not None:
        one, other = pairs[parted]
        said = f"decoded again, it chose {other} at generated token {parted}, and {one} before"
        verdict = Verdict.NONDETERMINISTIC
    elif all(map(_alike, first.steps, again.steps)):
        return found
    else:
        said = "decoded again, it chose the same tokens by other logits"
        verdict = found.verdict
    evidence = f"{divergence.evidence}; {said}"
    return replace(found, verdict=verdict, first_divergence=replace(divergence, evidence=evidence))


def _decides(top: TopLogits) -> bool:
    """Whether the largest logit is one."""
    return not top.has_nan and isfinite(top.values[0])


def _alike(one: TopLogits, other: TopLogits) -> bool:
    """Equality in which NaN equals NaN."""
    values = zip(one.values, other.values, strict=True)
    return (one.token_ids, one.has_nan) == (other.token_ids, other.has_nan) and all(
        a == b or (a != a and b != b) for a, b in values
    )


def behind(token: int, top: TopLogits) -> float:
    """How far `token` is behind the largest logit: at least, where it is not among the largest.

    Zero where only that one is known.
    """
    if token not in top.token_ids:
        return top.values[0] - top.values[-1]
    return top.values[0] - top.values[top.token_ids.index(token)]


def _describe(index: int, candidate: Trace, oracle: Trace, *, band: float | None) -> FirstDivergence:
    theirs, ours = candidate.steps[index], oracle.steps[index]
    token = candidate.token_ids[index]
    return FirstDivergence(
        index=index,
        candidate_token=token,
        oracle_token=ours.argmax,
        oracle_margin=ours.margin,
        oracle_top=tuple(zip(ours.token_ids, ours.values, strict=True)),
        candidate_top=tuple(zip(theirs.token_ids, theirs.values, strict=True)),
        evidence=_evidence(token, theirs, ours),
        noise_band=band,
    )


def _evidence(token: int, theirs: TopLogits, ours: TopLogits) -> str:
    if theirs.has_nan:
        return "the candidate's logits hold NaN at this position"
    if not _decides(theirs):
        return "the candidate's logits are not finite at this position"
    if token in ours.token_ids:
        rank = ours.token_ids.index(token)
        behind = f"{ours.values[0] - ours.values[rank]:.4g} behind the oracle's choice, at rank {rank + 1}"
    else:
        behind = f"not among the oracle's {len(ours.token_ids)} largest logits"
    return f"the candidate's token is {behind}; the candidate's own margin is {theirs.margin:.4g}"
