"""A check finds exactly what was planted, and keeps what was decoded before."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.decoders import TinyDecoder
from fixtures.planted import PlantedEngine, planted
from harness.engines.base import TopLogits
from harness.engines.oracle import OracleSession
from harness.engines.registry import EngineSpec, parse_engine
from harness.errors import EngineFailedError, InvalidRunError
from harness.events import CheckFinished, Event, PromptJudged, PromptStarted
from harness.parity.check import CheckPlan, Prompt, run_check

DECODER = TinyDecoder(layers="ar", seed=3)
PROMPTS = (Prompt((1, 2, 3), text="one two three"), Prompt((4,)), Prompt((5, 6)))
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid of one attention and one recurrent layer."""
    return DECODER.save(tmp_path_factory.mktemp("tiny") / "model.onnx")


def check(
    model: Path,
    candidate: EngineSpec,
    *,
    oracle: EngineSpec | None = None,
    prompts: Sequence[Prompt] = PROMPTS,
    **changes: Any,
) -> tuple[CheckFinished, list[PromptJudged]]:
    """Run a check and collect its judgements; the stream must be well formed whatever happens."""
    events: list[Event] = []
    plan = CheckPlan(
        package="tiny",
        model=model,
        model_name=str(model),
        model_sha256="0" * 64,
        topology=DECODER.topology,
        topology_outcome="derived",
        candidate=candidate,
        oracle=oracle or parse_engine("oracle"),
        prompts=prompts,
        max_new_tokens=NEW_TOKENS,
        **changes,
    )
    end = run_check(plan, events.append)
    assert events[-1] is end
    assert sum(isinstance(e, CheckFinished) for e in events) == 1
    started = [e.index for e in events if isinstance(e, PromptStarted)]
    judged = [e for e in events if isinstance(e, PromptJudged)]
    assert [e.index for e in judged] == started[: len(judged)]
    return end, judged


def choose(token: int, *, at: Collection[int]) -> Any:
    """A fault: at the runs `at` the engine prefers `token`, by a hair.

    A prompt that differs from the oracle is decoded twice, so a fault that is always there has two runs.
    """

    def fault(run: int, top: list[TopLogits]) -> list[TopLogits]:
        if run not in at:
            return top
        best = top[0]
        ids = (token, *(i for i in best.token_ids if i != token))[: len(best.token_ids)]
        return [TopLogits(ids, (best.values[0] + 0.25, *best.values[: len(ids) - 1]))]

    return fault


def test_an_engine_that_is_right_is_identical(model: Path) -> None:
    """Both sides give the tokens of the float64 reference that knows no cache."""
    end, judged = check(model, parse_engine("ort-cpu"))
    assert (end.verdict, end.exit_code) == ("identical", 0)
    for prompt, result in zip(PROMPTS, judged, strict=True):
        expected = DECODER.greedy(prompt.token_ids, NEW_TOKENS)
        assert result.candidate_ids == result.oracle_ids == result.oracle_forced_ids == expected
        margins = [
            sorted(DECODER.logits(prompt.token_ids + expected[:i])[-1])[-2:] for i in range(NEW_TOKENS)
        ]
        assert result.min_margin == pytest.approx(min(b - a for a, b in margins), abs=1e-4)


@pytest.mark.parametrize("step", [0, 3, NEW_TOKENS - 1])
def test_a_wrong_token_is_found_where_it_was_planted(model: Path, step: int) -> None:
    """The divergence has the planted index and tokens.

    The oracle goes its own way up to there, and is forced along the candidate's tokens after it.
    """
    prompt = PROMPTS[0]
    right = DECODER.greedy(prompt.token_ids, NEW_TOKENS)
    wrong = (right[step] + 1) % DECODER.vocab
    end, (judged,) = check(
        model, planted(logits=choose(wrong, at=(step, NEW_TOKENS + step))), prompts=[prompt]
    )
    assert (end.verdict, end.exit_code) == ("divergent", 1)
    found = judged.first_divergence
    assert found is not None
    assert (found.index, found.candidate_token, found.oracle_token) == (step, wrong, right[step])
    assert found.cause is None
    assert found.oracle_top[0][0] == right[step]
    assert found.candidate_top[0][0] == wrong
    row = DECODER.logits(prompt.token_ids + right[:step])[-1]
    first, second = sorted(row)[:-3:-1]
    assert found.oracle_margin == pytest.approx(first - second, abs=1e-4)
    assert judged.oracle_ids == right[: step + 1]
    along = (*right[:step], wrong, *judged.candidate_ids[step + 1 :])
    assert judged.candidate_ids == along
    assert judged.oracle_forced_ids == tuple(
        int(DECODER.logits(prompt.token_ids + along[:i])[-1].argmax()) for i in range(NEW_TOKENS)
    )


def test_one_divergent_prompt_does_not_stop_the_others(model: Path) -> None:
    """Every prompt is judged; the report has the worst verdict.

    The second decode of a prompt follows the first ones of those that are verified with it.
    """
    right = DECODER.greedy(PROMPTS[1].token_ids, NEW_TOKENS)
    fault = choose((right[2] + 1) % DECODER.vocab, at=(NEW_TOKENS + 2, 3 * NEW_TOKENS + 2))
    end, judged = check(model, planted(logits=fault))
    assert [j.verdict for j in judged] == ["identical", "divergent", "identical"]
    assert end.verdict == "divergent"


@pytest.mark.parametrize("step", [0, 3, NEW_TOKENS - 1])
def test_a_candidate_that_differs_from_itself_is_nondeterministic(model: Path, step: int) -> None:
    """A fault in the first decode alone: the second one chooses otherwise, and the evidence says where."""
    prompt = PROMPTS[0]
    right = DECODER.greedy(prompt.token_ids, NEW_TOKENS)
    wrong = (right[step] + 1) % DECODER.vocab
    end, (judged,) = check(model, planted(logits=choose(wrong, at=[step])), prompts=[prompt])
    assert (end.verdict, end.exit_code) == ("nondeterministic", 1)
    assert judged.first_divergence is not None
    assert judged.first_divergence.index == step
    said = f"decoded again, it chose {right[step]} at generated token {step}, and {wrong} before"
    assert said in judged.first_divergence.evidence
    assert judged.candidate_ids[: step + 1] == (*right[:step], wrong)


def test_other_logits_for_the_same_tokens_are_said_and_change_no_verdict(model: Path) -> None:
    """What differs from the oracle in the same way twice is divergent, however its logits tremble."""
    prompt = PROMPTS[0]
    wrong = (DECODER.greedy(prompt.token_ids, NEW_TOKENS)[2] + 1) % DECODER.vocab
    same = choose(wrong, at=(2, NEW_TOKENS + 2))

    def tremble(run: int, top: list[TopLogits]) -> list[TopLogits]:
        lifted = [TopLogits(t.token_ids, (t.values[0] + run * 1e-6, *t.values[1:])) for t in top]
        return same(run, lifted)

    end, (judged,) = check(model, planted(logits=tremble), prompts=[prompt])
    assert end.verdict == "divergent"
    assert judged.first_divergence is not None
    assert judged.first_divergence.evidence.endswith("the same tokens by other logits")

    end, (judged,) = check(model, planted(logits=same), prompts=[prompt])
    assert end.verdict == "divergent"
    assert judged.first_divergence is not None
    assert "decoded again" not in judged.first_divergence.evidence


def test_a_crash_in_the_second_decode_is_a_crash(model: Path) -> None:
    """It keeps the tokens of the first decode; the next prompt gets a fresh session."""
    right = DECODER.greedy(PROMPTS[0].token_ids, NEW_TOKENS)

    def crash(run: int) -> None:
        if run == NEW_TOKENS + 1:
            raise EngineFailedError("boom", next_action="-", kind="crashed")

    fault = choose((right[0] + 1) % DECODER.vocab, at=[0])
    engine = PlantedEngine(run=crash, logits=fault)
    end, judged = check(model, EngineSpec(engine, {}), prompts=PROMPTS[:1])
    assert (end.verdict, end.exit_code) == ("crashed", 4)
    assert len(judged[0].candidate_ids) == NEW_TOKENS
    assert judged[0].failure is not None
    assert judged[0].failure.step == 1
    assert engine.opened == ["open", "close"]


def test_a_candidate_that_agrees_is_decoded_once(model: Path) -> None:
    """Only a difference costs a second decode."""
    runs: list[int] = []
    end, _ = check(model, planted(run=runs.append))
    assert end.verdict == "identical"
    assert len(runs) == NEW_TOKENS * len(PROMPTS)


def test_logits_with_nan_are_divergent_even_where_the_token_agrees(model: Path) -> None:
    """No order is defined among NaN: the first such step is where the candidate parts."""

    def poison(run: int, top: list[TopLogits]) -> list[TopLogits]:
        return [TopLogits(t.token_ids, t.values, has_nan=True) if run >= 2 else t for t in top]

    end, (judged,) = check(model, planted(logits=poison), prompts=PROMPTS[:1])
    assert end.verdict == "divergent"
    assert judged.first_divergence is not None
    assert judged.first_divergence.index == 2
    assert "NaN" in judged.first_divergence.evidence


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((math.inf,) * 5, "not finite"),
        ((math.inf, 3.0, 2.0, 1.0, 0.0), "not finite"),
        ((-math.inf,) * 5, "not finite"),
        ((math.nan,) * 5, "NaN"),
        ((9.0, 8.0, 7.0, math.nan, math.nan), "NaN"),
    ],
    ids=str,
)
def test_largest_logits_that_are_no_numbers_are_divergent_even_where_the_token_agrees(
    model: Path, values: tuple[float, ...], said: str
) -> None:
    """As in an oracle, nothing is decided by infinity or NaN, flag or none; a masked token may have it."""

    def poison(run: int, top: list[TopLogits]) -> list[TopLogits]:
        return [_ordered(replace(t, values=values)) if run % NEW_TOKENS >= 2 else t for t in top]

    def mask(run: int, top: list[TopLogits]) -> list[TopLogits]:
        return [_ordered(replace(t, values=(*t.values[:2], *(-math.inf,) * 3))) for t in top]

    end, (judged,) = check(model, planted(logits=poison), prompts=PROMPTS[:1])
    assert end.verdict == "divergent"
    assert judged.first_divergence is not None
    assert judged.first_divergence.index == 2
    if values[0] != values[1]:
        assert judged.first_divergence.candidate_token == judged.first_divergence.oracle_token
    assert said in judged.first_divergence.evidence

    end, _ = check(model, planted(logits=mask))
    assert end.verdict == "identical"


def _ordered(top: TopLogits) -> TopLogits:
    """The same largest logits, equal ones in order of ID."""
    if any(map(math.isnan, top.values)):
        return top
    pairs = sorted(zip(top.token_ids, top.values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    ids, values = zip(*pairs, strict=True)
    return TopLogits(ids, values)


def test_a_crash_is_a_verdict_and_keeps_the_tokens_from_before(model: Path) -> None:
    """Tokens before the crash are verified; the next prompt gets a fresh session and is judged too."""

    def crash(run: int) -> None:
        if run == 3:
            raise EngineFailedError("segmentation fault", next_action="-", kind="crashed")

    engine = PlantedEngine(run=crash)
    end, judged = check(model, EngineSpec(engine, {}))
    assert (end.verdict, end.exit_code) == ("crashed", 4)
    for prompt, result in zip(PROMPTS, judged, strict=True):
        assert result.verdict == "crashed"
        assert result.failure is not None
        assert (result.failure.step, result.failure.message) == (3, "segmentation fault")
        assert result.candidate_ids == result.oracle_ids == DECODER.greedy(prompt.token_ids, 3)
    assert engine.opened == ["open", "close"] * len(PROMPTS)


def test_an_engine_that_cannot_load_the_graph_is_a_verdict_for_every_prompt(model: Path) -> None:
    """What fails before the first token fails every prompt, with the engine's own words."""

    def refuse() -> None:
        raise EngineFailedError("no kernel for Scan", next_action="-", kind="unsupported")

    end, judged = check(model, planted(opening=refuse))
    assert (end.verdict, end.exit_code) == ("unsupported", 4)
    assert [j.verdict for j in judged] == ["unsupported"] * len(PROMPTS)
    assert all(j.candidate_ids == () and j.failure is not None for j in judged)


def test_a_candidate_that_runs_elsewhere_makes_the_run_invalid(model: Path) -> None:
    """An engine that did not run as asked proves nothing: exit 6, with the reason."""

    def elsewhere() -> None:
        raise InvalidRunError("CUDA was asked, MatMul ran on the CPU.", next_action="-")

    end, judged = check(model, planted(opening=elsewhere))
    assert (end.verdict, end.exit_code) == ("invalid-run", 6)
    assert end.error is not None
    assert "MatMul" in end.error["message"]
    assert judged == []


def test_an_oracle_that_gives_nan_makes_the_run_invalid(model: Path) -> None:
    """A reference without an order among its logits proves nothing."""

    def poison(run: int, top: list[TopLogits]) -> list[TopLogits]:
        return [TopLogits(t.token_ids, t.values, has_nan=True) for t in top]

    end, _ = check(model, parse_engine("ort-cpu"), oracle=planted(logits=poison))
    assert (end.verdict, end.exit_code) == ("invalid-run", 6)


def test_an_oracle_that_fails_makes_the_run_invalid(model: Path) -> None:
    """At opening (it lacks an operator) or on the way: nothing is verified, no candidate is blamed."""

    def crash(run: int) -> None:
        raise EngineFailedError("boom", next_action="-", kind="crashed")

    end, _ = check(model, parse_engine("ort-cpu"), oracle=planted(run=crash))
    assert (end.verdict, end.exit_code) == ("invalid-run", 6)
    end, judged = check(model, parse_engine("ort-cpu"), oracle=planted(opening=lambda: crash(0)))
    assert (end.verdict, end.exit_code) == ("invalid-run", 6)
    assert judged == []


def test_a_crash_in_a_prompt_leaves_those_that_are_verified_with_it(model: Path) -> None:
    """Prompts behind the first share a batch; the last of them crashes before its first token."""

    def crash(run: int) -> None:
        if run == 2 * NEW_TOKENS:
            raise EngineFailedError("boom", next_action="-", kind="crashed")

    end, judged = check(model, planted(run=crash))
    assert (end.verdict, end.exit_code) == ("crashed", 4)
    assert [j.verdict for j in judged] == ["identical", "identical", "crashed"]


def test_prompts_behind_the_first_are_rows_of_one_pass(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass over all, with the probe, one over the prompts alone, and one up to drawn positions."""
    rows: list[int] = []
    run = OracleSession.run

    def counted(self: OracleSession, feeds: Any, outputs: Sequence[str]) -> Any:
        rows.append(feeds["input_ids"].shape[0])
        return run(self, feeds, outputs)

    monkeypatch.setattr(OracleSession, "run", counted)
    prompts = [*PROMPTS, Prompt((7, 8, 9)), Prompt((2,))]
    end, judged = check(model, parse_engine("ort-cpu"), prompts=prompts)
    assert end.verdict == "identical"
    assert [j.index for j in judged] == [0, 1, 2, 3, 4]
    assert [count for count in rows if count > 1] == [5, 4, 4]
    assert set(rows[rows.index(5) :]) == {4, 5}


def test_a_cache_that_only_the_candidate_spoils_is_a_crash(model: Path) -> None:
    """The oracle gets it back in its shape after the same tokens, so it is not the graph that is refused."""

    def spoil(run: int) -> None:
        if run == 2:
            raise EngineFailedError("short", next_action="-", kind="crashed", ports=("present",))

    end, (judged,) = check(model, planted(run=spoil), prompts=PROMPTS[:1])
    assert (end.verdict, end.exit_code) == ("crashed", 4)
    assert judged.candidate_ids == DECODER.greedy(PROMPTS[0].token_ids, 2)


@pytest.mark.parametrize("run", [0, NEW_TOKENS, 2 * NEW_TOKENS + 1])
def test_an_interrupted_check_keeps_what_was_judged(model: Path, run: int) -> None:
    """Ctrl-C during a run of the candidate: no verdict, exit 130, all earlier prompts judged, all closed."""

    def interrupt(index: int) -> None:
        if index == run:
            raise KeyboardInterrupt

    engine = PlantedEngine(run=interrupt)
    end, judged = check(model, EngineSpec(engine, {}))
    assert (end.verdict, end.exit_code, end.interrupted) == (None, 130, True)
    assert len(judged) == run // NEW_TOKENS
    assert end.error is not None
    said = "the report holds what was judged before" if judged else "before any prompt was judged"
    assert said in end.error["message"]
    assert engine.opened == ["open", "close"]


def test_decoding_stops_at_the_end_of_sequence_when_asked(model: Path) -> None:
    """The stop token is the last one of both sides."""
    right = DECODER.greedy(PROMPTS[0].token_ids, NEW_TOKENS)
    stop = right[2]
    expected = right[: right.index(stop) + 1]
    end, (judged,) = check(model, parse_engine("ort-cpu"), prompts=PROMPTS[:1], stop_ids=(stop,))
    assert end.verdict == "identical"
    assert judged.candidate_ids == judged.oracle_ids == expected


def test_each_prompt_starts_from_zero_states(model: Path) -> None:
    """The second generation of a prompt equals the first, whatever ran in between (recurrent state reset)."""
    end, judged = check(model, parse_engine("ort-cpu"), prompts=[PROMPTS[0], PROMPTS[1], PROMPTS[0]])
    assert end.verdict == "identical"
    assert judged[0].candidate_ids == judged[2].candidate_ids
