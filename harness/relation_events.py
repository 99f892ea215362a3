"""What happens while relations are tried, as plain frozen data: emitted by `parity`, consumed by `report`.

A stream is: `RelationsStarted`, `ReferenceDecoded`, then for each relation `RelationStarted` and
`RelationJudged`, with `BandsMeasured` between the two of the first that needs a band, and last
`RelationsFinished`. Where nothing can be tried, `RelationsFinished` follows at once and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from harness.events import FailureFacts

__all__ = [
    "BandsMeasured",
    "FirstDifference",
    "ReferenceDecoded",
    "RelationEvent",
    "RelationJudged",
    "RelationSink",
    "RelationStarted",
    "RelationsFinished",
    "RelationsStarted",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelationsStarted:
    """All inputs are valid and the engine has opened.

    Attributes:
        package: what the user named: a path or a built-in name.
        model_path: the graph file, or the name of a built-in package.
        model_sha256: over the graph file and its external files in path order.
        topology_outcome: `derived` or `declared`.
        kv_inputs: number of KV input ports.
        state_pairs: number of recurrent state pairs.
        engine: the engine's name.
        process: `isolated` in processes of its own, or `in-process`.
        text: of the prompt; None for one given as token IDs.
        prompt_ids: what is continued.
        max_new_tokens: tokens to decode.
        relations: names of those to try, in order.
        seed: of everything made up.
        warnings: sentences that a user should know of a result that stands.
    """

    package: str
    model_path: str
    model_sha256: str
    topology_outcome: str
    kv_inputs: int
    state_pairs: int
    engine: str
    process: str
    text: str | None
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    relations: tuple[str, ...]
    seed: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReferenceDecoded:
    """The decode that all relations stand against: `token_ids` are what every other follows.

    Where the engine failed on the way, they are those from before.
    """

    version: str
    settings: Mapping[str, bool | int | str]
    placement: Mapping[str, Any] | None
    mode: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RelationStarted:
    """A relation is about to be tried."""

    name: str


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """What differed first, as `harness.parity.relations.comparing.Difference` has it."""

    step: int
    port: str
    differing: int
    elements: int
    index: tuple[int, ...] | None
    expected: float | None
    found: float | None
    size: float
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelationJudged:
    """A relation has its outcome.

    Attributes:
        name: which.
        statement: what must be equal to what.
        outcome: one of `bitwise`, `within-band`, `near-tie`, `not-judged`, `broken`, `crashed`, `timeout`,
            `unsupported`, `not-applicable`.
        reason: one line; None where the numbers say it all.
        case: which of several cases decides; None where there is one, or where all agree.
        must: `bitwise` or `band`: what the deciding case must be; None where nothing was compared.
        cases: how many cases were compared.
        tokens: how many choices of the deciding case were compared.
        states: how many states.
        tokens_part_at: the first step at which the choices differ; None where they never do.
        first: what differed first; None where no bit does.
        port: the tensor that decides: furthest out of its band; None where no bit differs.
        size: its largest difference.
        band: how large that may be; None where there is no band.
        seconds: wall-clock time, the oracle's included.
        failure: how the engine failed; None where it did not.
    """

    name: str
    statement: str
    outcome: str
    reason: str | None = None
    case: str | None = None
    must: str | None = None
    cases: int = 0
    tokens: int = 0
    states: int = 0
    tokens_part_at: int | None = None
    first: FirstDifference | None = None
    port: str | None = None
    size: float | None = None
    band: float | None = None
    seconds: float = 0.0
    failure: FailureFacts | None = None


@dataclass(frozen=True, slots=True)
class BandsMeasured:
    """The oracle was asked how far correct computations may be apart.

    Attributes:
        oracle: its name.
        factor: a band is so many spreads.
        spreads: largest difference between its roundings and float64, by tensor; empty where it cannot tell.
        reason: why it cannot tell; None where it can.
    """

    oracle: str
    factor: float
    spreads: Mapping[str, float]
    reason: str | None


@dataclass(frozen=True, slots=True)
class RelationsFinished:
    """The end of the stream.

    Attributes:
        verdict: `conformant`, or the worst outcome of a relation (`not-applicable` where none applies), or
            `invalid-run`; None where the work could not be done.
        exit_code: exit status of the command.
        error: `{"message", "next"}` where the work could not be done, or nothing could be compared.
        refusal: `{"code", "also", "message", "ports"}` where the topology was refused; a report has it alone.
        interrupted: True when the user stopped it.
        failure: how the engine failed before any relation was tried.
    """

    verdict: str | None
    exit_code: int
    error: Mapping[str, str] | None = None
    refusal: Mapping[str, Any] | None = None
    interrupted: bool = False
    failure: FailureFacts | None = None


RelationEvent: TypeAlias = (
    RelationsStarted | ReferenceDecoded | RelationStarted | RelationJudged | BandsMeasured | RelationsFinished
)
RelationSink: TypeAlias = Callable[[RelationEvent], None]
