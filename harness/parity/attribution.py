"""At whose door a difference lies: source, oracle on the graph, and runtime on the graph, compared in turn.

Where source and oracle differ, the graph is not what the source computes: that names the exporter. Where
oracle and candidate differ, the graph is not what the runtime computes: that names the runtime. Nothing here
knows where the source's trace came from: it may be computed now along the candidate's tokens, or recorded
another day as the source's own greedy decode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from harness.decode.trace import Trace
from harness.engines.base import TopLogits
from harness.events import SourceDivergence
from harness.parity.compare import TokenComparison, behind
from harness.parity.verdict import Verdict

__all__ = [
    "Attribution",
    "SourceComparison",
    "attribute",
    "compare_with_source",
    "overall_attribution",
]


class Attribution(StrEnum):
    """Who made the tokens differ; members stand in order of precedence over several prompts.

    An export that is wrong comes before the runtime that runs it: until it is right, nothing can be.
    """

    EXPORTER = "exporter"
    RUNTIME = "runtime"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class SourceComparison:
    """What the comparison of source and oracle found on one prompt.

    Attributes:
        verdict: `identical`; `divergent` where they differ by more than rounding may; `inconclusive` where
            they differ, and nowhere by more than that.
        source_ids: the source's choice at each position that has the same tokens before it on both sides: all
            of them for a trace along the candidate's tokens, those up to the first other token for one of its
            own.
        first_divergence: where they differ first by more than rounding may, else where they differ first;
            None where they do not.
        seconds: wall-clock time of all that the source ran.
    """

    verdict: Verdict
    source_ids: tuple[int, ...]
    first_divergence: SourceDivergence | None
    seconds: float = 0.0


def compare_with_source(oracle: Trace, source: Trace, *, bands: Sequence[float] = ()) -> SourceComparison:
    """Compare the source's choices with the oracle's, after the same tokens.

    Were both the same function, the lead that the oracle gives its choice over the source's, and the one
    that the source gives its own over the oracle's, would be the same number with opposite signs: their
    sum is what rounding on either side must explain.

    Args:
        oracle: along the candidate's tokens, as `harness.parity.reference.Reference.verify` gives it.
        source: from the same prompt, along the same tokens or its own greedy decode. A trace of tokens alone
            has one logit a step.
        bands: for each position, which sum of both leads rounding may explain; none where not measured: then
            every difference counts.

    Raises:
        ValueError: the traces are not of one prompt, or there is no position to compare.
    """
    if oracle.prompt_ids != source.prompt_ids:
        raise ValueError("the source's trace continues another prompt")
    if not oracle.steps or not source.steps:
        raise ValueError("there is no position to compare")
    chosen = tuple(step.argmax for step in source.steps[: _comparable(oracle.token_ids, source.token_ids)])
    differing = [i for i, token in enumerate(chosen) if token != oracle.steps[i].argmax]
    gaps = {
        i: behind(chosen[i], oracle.steps[i]) + behind(oracle.steps[i].argmax, source.steps[i])
        for i in differing
    }
    decided = [i for i in differing if gaps[i] > (bands[i] if bands else 0.0)]
    parted = next(iter(decided or differing), None)
    verdict = Verdict.DIVERGENT if decided else Verdict.INCONCLUSIVE if differing else Verdict.IDENTICAL
    if parted is None:
        return SourceComparison(verdict, chosen, None, source.seconds)
    band = bands[parted] if bands else None
    found = _describe(parted, oracle.steps[parted], source.steps[parted], gap=gaps[parted], band=band)
    return SourceComparison(verdict, chosen, found, source.seconds)


def attribute(candidate: TokenComparison, source: SourceComparison) -> Attribution | None:
    """Who made one prompt's tokens differ; None where nobody did, or none of it is decided.

    The first position at which not all three agree decides. It is the runtime's where the source is with the
    oracle, the exporter's where the runtime is. It is unknown where source and runtime choose the same token
    against the oracle, and where the source is too close to say. Where all three differ it is the exporter's:
    until the graph is right, nothing that runs it can be.

    Args:
        candidate: the comparison of candidate and oracle.
        source: the comparison of source and oracle, along the same tokens.
    """
    differs = candidate.verdict in (Verdict.DIVERGENT, Verdict.NONDETERMINISTIC)
    theirs = candidate.first_divergence if differs else None
    ours = source.first_divergence if source.verdict is Verdict.DIVERGENT else None
    if theirs is None:
        return None if ours is None else Attribution.EXPORTER
    if ours is not None and ours.index < theirs.index:
        return Attribution.EXPORTER
    if ours is not None and ours.index == theirs.index:
        same = ours.source_token == theirs.candidate_token
        return Attribution.UNKNOWN if same else Attribution.EXPORTER
    confirmed = source.source_ids[theirs.index : theirs.index + 1] == (theirs.oracle_token,)
    return Attribution.RUNTIME if confirmed else Attribution.UNKNOWN


def overall_attribution(found: Iterable[str | None]) -> Attribution | None:
    """That of several prompts: the first in order of precedence; None where no prompt has any."""
    blamed = set(found)
    return next((each for each in Attribution if each in blamed), None)


def _comparable(followed: Sequence[int], own: Sequence[int]) -> int:
    """How many positions have the same tokens before them: one more than the tokens that begin alike."""
    alike = next((i for i, (a, b) in enumerate(zip(followed, own, strict=False)) if a != b), None)
    return min(len(followed), len(own)) if alike is None else alike + 1


def _describe(
    index: int, oracle: TopLogits, source: TopLogits, *, gap: float, band: float | None
) -> SourceDivergence:
    lead = behind(source.argmax, oracle)
    at_least = "" if source.argmax in oracle.token_ids else "at least "
    explained = "" if band is None else f", where rounding may explain {band:.2g}"
    return SourceDivergence(
        index=index,
        source_token=source.argmax,
        oracle_token=oracle.argmax,
        gap=gap,
        noise_band=band,
        source_top=tuple(zip(source.token_ids, source.values, strict=True)),
        oracle_top=tuple(zip(oracle.token_ids, oracle.values, strict=True)),
        evidence=f"the source's token is {at_least}{lead:.4g} behind on the graph; both leads together are "
        f"{gap:.4g}{explained}",
    )
