"""What happens during a check, as plain frozen data: emitted by `harness.parity`, consumed by reports.

One stream feeds every writer. A stream is: `CheckStarted`, `SessionOpened` for each engine, then for each
prompt `PromptStarted`, any number of `TokenDecoded`, `PromptJudged`, and last `CheckFinished`. A prompt is
judged again, and the later judgement holds, where one behind it shows that one pass does not stand for steps.
Where the check cannot begin, or an engine fails, `CheckFinished` follows at once and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

__all__ = [
    "CandidateProcess",
    "CheckFinished",
    "CheckStarted",
    "EngineRole",
    "Event",
    "EventSink",
    "FailureFacts",
    "FirstDivergence",
    "PromptJudged",
    "PromptStarted",
    "SessionOpened",
    "SourceDivergence",
    "SourceJudged",
    "TokenDecoded",
]

EngineRole: TypeAlias = Literal["candidate", "oracle", "source"]
CandidateProcess: TypeAlias = Literal["isolated", "in-process"]
"""Whether the engine under test has processes of its own."""


@dataclass(frozen=True, slots=True)
class CheckStarted:
    """All inputs are valid and decoding is about to begin.

    Attributes:
        package: what the user named: a path or a built-in name.
        model_path: the graph file, or the name of a built-in package.
        model_sha256: over the graph file and its external files in path order.
        topology_outcome: `derived` or `declared`.
        kv_inputs: number of KV input ports.
        state_pairs: number of recurrent state pairs.
        candidate: the candidate engine's name.
        oracle: the oracle engine's name.
        oracle_mode: `one-pass`, or `stepwise`: one run for each token.
        prompts: number of prompts.
        compared: what is compared, such as `tokens`.
        seed: the seed of everything random in this check.
        candidate_process: `isolated` in a process of its own, or `in-process`.
        source: name of the engine that runs the source model; None where there is none.
        source_path: the folder of the source model.
        warnings: sentences that a user should know of a result that stands.
    """

    package: str
    model_path: str
    model_sha256: str
    topology_outcome: str
    kv_inputs: int
    state_pairs: int
    candidate: str
    oracle: str
    oracle_mode: str
    prompts: int
    compared: tuple[str, ...] = ("tokens",)
    seed: int = 0
    candidate_process: CandidateProcess = "in-process"
    source: str | None = None
    source_path: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """An engine has loaded the graph.

    Attributes:
        role: which side it is on.
        engine: its name.
        version: version of the runtime behind it.
        settings: every setting that can change results.
        placement: which provider runs which nodes, None for engines that have none.
        mode: `eager` or `captured`, None where the engine knows no such thing.
        seconds: how long loading took.
        proof: what shows in which precision an oracle computes; None for engines that have none.
    """

    role: EngineRole
    engine: str
    version: str
    settings: Mapping[str, bool | int | str]
    placement: Mapping[str, Any] | None
    mode: str | None
    seconds: float
    proof: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class PromptStarted:
    """Decoding of one prompt begins. `text` is None for a prompt given as token IDs."""

    index: int
    text: str | None
    prompt_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class TokenDecoded:
    """Progress: one engine has produced its `step`-th token (from 0) of prompt `index`."""

    index: int
    role: EngineRole
    step: int
    token_id: int


@dataclass(frozen=True, slots=True)
class FailureFacts:
    """How an engine failed: `kind` is `crashed`, `timeout` or `unsupported`; the rest where known."""

    kind: str
    message: str
    step: int | None = None
    signal: str | None = None
    exit_code: int | None = None
    limit: str | None = None
    stderr_tail: str | None = None


@dataclass(frozen=True, slots=True)
class FirstDivergence:
    """Where candidate and oracle part first.

    Attributes:
        index: position among the generated tokens, from 0.
        candidate_token: the candidate's choice.
        oracle_token: the oracle's choice after the same tokens.
        oracle_margin: the oracle's largest logit minus its second largest.
        noise_band: below which margin a difference is a near tie; None until it is measured.
        oracle_top: the oracle's largest logits as (token ID, logit), largest first.
        candidate_top: the same of the candidate.
        cause: what made them part; None until it is adjudicated.
        evidence: one line of fact.
    """

    index: int
    candidate_token: int
    oracle_token: int
    oracle_margin: float
    oracle_top: tuple[tuple[int, float], ...]
    candidate_top: tuple[tuple[int, float], ...]
    evidence: str
    noise_band: float | None = None
    cause: str | None = None


@dataclass(frozen=True, slots=True)
class SourceDivergence:
    """Where source model and oracle part first, after the same tokens.

    Attributes:
        index: position among the generated tokens, from 0.
        source_token: the source's choice.
        oracle_token: the oracle's choice.
        gap: the oracle's lead for its token over the source's, plus the source's for its own.
        noise_band: which gap rounding may explain; None where it was not measured.
        source_top: the source's largest logits as (token ID, logit), largest first.
        oracle_top: the same of the oracle.
        evidence: one line of fact.
    """

    index: int
    source_token: int
    oracle_token: int
    gap: float
    noise_band: float | None
    source_top: tuple[tuple[int, float], ...]
    oracle_top: tuple[tuple[int, float], ...]
    evidence: str


@dataclass(frozen=True, slots=True)
class SourceJudged:
    """What the source model says of one prompt.

    Attributes:
        verdict: of source against oracle: `identical`, `divergent` or `inconclusive`.
        source_forced_ids: its choice at every position along the candidate's tokens.
        first_divergence: where source and oracle part first; None where they do not.
        attribution: `exporter`, `runtime` or `unknown`; None where no difference is decided.
        seconds: wall-clock time of its pass or passes.
    """

    verdict: str
    source_forced_ids: tuple[int, ...]
    first_divergence: SourceDivergence | None
    attribution: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class PromptJudged:
    """One prompt has its verdict.

    Attributes:
        index: which prompt.
        verdict: one of the vocabulary's verdicts: the worse of candidate against oracle and, where there is a
            source, source against oracle.
        candidate_ids: the candidate's tokens, also those from before a failure.
        oracle_ids: the oracle's own greedy tokens, up to and including its choice at the first divergence.
        oracle_forced_ids: the oracle's argmax at every position along the candidate's tokens.
        min_margin: the smallest margin of the oracle along `oracle_ids`; None without tokens.
        undecided: positions that even the finest precision could not separate.
        first_divergence: None where nothing diverges.
        failure: how the candidate failed, None where it did not.
        oracle_mode: how the oracle ran on this prompt; None where it did not.
        candidate_seconds: wall-clock time of the candidate's decode.
        oracle_seconds: wall-clock time of the oracle's verification.
        source: what the source model says; None where there is none, or nothing was decoded.
    """

    index: int
    verdict: str
    candidate_ids: tuple[int, ...]
    oracle_ids: tuple[int, ...]
    oracle_forced_ids: tuple[int, ...]
    min_margin: float | None
    candidate_seconds: float
    oracle_seconds: float
    first_divergence: FirstDivergence | None = None
    undecided: tuple[int, ...] = ()
    failure: FailureFacts | None = None
    oracle_mode: str | None = None
    source: SourceJudged | None = None


@dataclass(frozen=True, slots=True)
class CheckFinished:
    """The end of the stream.

    Attributes:
        verdict: the worst verdict of all prompts; None where the check could not do its work.
        exit_code: exit status of the command.
        error: `{"message", "next"}` where the check could not do its work.
        refusal: `{"code", "also", "message", "ports"}` where the topology was refused; a report has it alone.
        interrupted: True when the user stopped it.
        attribution: `exporter`, `runtime` or `unknown`; None without a source, and where nothing differs.
    """

    verdict: str | None
    exit_code: int
    error: Mapping[str, str] | None = None
    refusal: Mapping[str, Any] | None = field(default=None)
    interrupted: bool = False
    attribution: str | None = None


Event: TypeAlias = CheckStarted | SessionOpened | PromptStarted | TokenDecoded | PromptJudged | CheckFinished
EventSink: TypeAlias = Callable[[Event], None]
