"""A check with a source: whoever departs from the other two is named, with its evidence, or nobody is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest

from fixtures.decoders import TinyDecoder
from fixtures.planted import planted
from fixtures.sources import source_plan
from harness.engines.base import TopLogits
from harness.engines.registry import EngineSpec, parse_engine
from harness.errors import EngineFailedError
from harness.events import CheckFinished, Event, PromptJudged, SourceJudged, TokenDecoded
from harness.parity.check import CheckPlan, Prompt, run_check
from harness.parity.source import SourcePlan
from harness.report.document import ParityDocument

if TYPE_CHECKING:
    from numpy.typing import NDArray

DECODER = TinyDecoder(layers="ar", seed=3)
PROMPTS = (Prompt((1, 2, 3)), Prompt((4,)))
NEW_TOKENS = 6
FORM = jsonschema.Draft202012Validator(
    json.loads(
        (Path(__file__).parents[2] / "reports/schemas/parity-1.schema.json").read_text(encoding="utf-8")
    )
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a faithful exporter makes of the source."""
    return DECODER.save(tmp_path_factory.mktemp("tiny") / "model.onnx")


def check(
    model: Path,
    source: SourcePlan,
    *,
    candidate: EngineSpec | None = None,
    oracle: str = "oracle",
    prompts: tuple[Prompt, ...] = PROMPTS,
) -> tuple[CheckFinished, list[PromptJudged], dict[str, Any]]:
    """Run a check; its document must fit the schema at every stage."""
    document = ParityDocument()
    judged: list[PromptJudged] = []

    def emit(event: Event) -> None:
        document(event)
        if not isinstance(event, TokenDecoded):
            FORM.validate(json.loads(json.dumps(document.mapping(), allow_nan=False)))
        if isinstance(event, PromptJudged):
            judged.append(event)

    plan = CheckPlan(
        package="tiny",
        model=model,
        model_name=str(model),
        model_sha256="0" * 64,
        topology=DECODER.topology,
        topology_outcome="derived",
        candidate=candidate or parse_engine("ort-cpu"),
        oracle=parse_engine(oracle),
        prompts=prompts,
        max_new_tokens=NEW_TOKENS,
        source=source,
    )
    return run_check(plan, emit), judged, document.mapping()


def witnessed(judged: PromptJudged) -> SourceJudged:
    """What the source said of a prompt."""
    assert judged.source is not None
    return judged.source


def wrong_token(steps: int = NEW_TOKENS, at: int = 2) -> EngineSpec:
    """A runtime that gives the second largest logit the first place at one step of each decode."""

    def fault(run: int, top: list[TopLogits]) -> list[TopLogits]:
        if run % steps != at:
            return top
        first, second, *others = top[0].token_ids
        return [replace(top[0], token_ids=(second, first, *others))]

    return planted(logits=fault)


def prefer(token: int, by: float, position: int) -> Any:
    """At one position `token` leads by `by`; elsewhere nothing changes."""

    def change(logits: NDArray[np.float64]) -> NDArray[np.float64]:
        logits = logits.copy()
        if position < len(logits):
            logits[position, token] = logits[position].max() + by
        return logits

    return change


def test_three_that_agree_are_identical_and_the_source_runs_once_a_prompt(model: Path) -> None:
    """One pass in one precision is all that a sound export costs; every side has the reference's tokens."""
    plan, engine = source_plan(DECODER)
    end, judged, document = check(model, plan)
    assert (end.verdict, end.exit_code, end.attribution) == ("identical", 0, None)
    assert engine.passes == ["float32", "float32", "closed"]
    for prompt, result in zip(PROMPTS, judged, strict=True):
        expected = DECODER.greedy(prompt.token_ids, NEW_TOKENS)
        assert result.candidate_ids == result.oracle_ids == expected
        assert witnessed(result).source_forced_ids == expected
        assert witnessed(result).verdict == "identical"
    source = document["source"]
    assert (source["engine"], source["path"]) == ("reference", "tiny-source")
    assert source["precision"] == "float32"
    assert [each["source_sha256"] for each in source["prompts"]] == [
        each["oracle_sha256"] for each in document["prompts"]
    ]


def test_a_graph_that_is_not_the_source_is_the_exporters(tmp_path: Path) -> None:
    """Oracle and runtime agree on a graph with other weights: a verdict of identical would be a lie."""
    other = replace(DECODER, seed=4).save(tmp_path / "model.onnx")
    plan, engine = source_plan(DECODER)
    end, judged, document = check(other, plan)
    assert (end.verdict, end.exit_code, end.attribution) == ("divergent", 1, "exporter")
    assert "float64" in engine.passes
    found = witnessed(judged[0])
    assert judged[0].first_divergence is None
    assert found.first_divergence is not None
    index = found.first_divergence.index
    fed = (*PROMPTS[0].token_ids, *judged[0].candidate_ids[:index])
    assert found.first_divergence.source_token == int(DECODER.logits(fed)[-1].argmax())
    assert found.first_divergence.oracle_token == judged[0].candidate_ids[index]
    assert document["attribution"] == "exporter"
    assert document["prompts"][0]["first_divergence"] is None


@pytest.mark.parametrize("at", range(NEW_TOKENS))
def test_a_runtime_that_departs_from_both_is_named_wherever_it_does(model: Path, at: int) -> None:
    """The source confirms the oracle's token at the very position."""
    plan, _ = source_plan(DECODER)
    end, judged, _ = check(model, plan, candidate=wrong_token(at=at), prompts=PROMPTS[:1])
    assert (end.verdict, end.attribution) == ("divergent", "runtime")
    assert witnessed(judged[0]).verdict == "identical"
    assert judged[0].first_divergence is not None
    assert judged[0].first_divergence.index == at


def test_logits_without_order_are_the_runtimes(model: Path) -> None:
    """NaN at a step of the candidate: source and oracle have a token there."""

    def fault(run: int, top: list[TopLogits]) -> list[TopLogits]:
        return [replace(each, has_nan=run % NEW_TOKENS == 1) for each in top]

    plan, _ = source_plan(DECODER)
    end, _, _ = check(model, plan, candidate=planted(logits=fault))
    assert (end.verdict, end.attribution) == ("divergent", "runtime")


def test_a_runtime_that_differs_from_itself_is_the_runtimes(model: Path) -> None:
    """Wrong once, right the second time."""
    once = iter([True])

    def fault(run: int, top: list[TopLogits]) -> list[TopLogits]:
        if run != 2 or not next(once, False):
            return top
        first, second, *others = top[0].token_ids
        return [replace(top[0], token_ids=(second, first, *others))]

    plan, _ = source_plan(DECODER)
    end, _, _ = check(model, plan, candidate=planted(logits=fault), prompts=PROMPTS[:1])
    assert (end.verdict, end.attribution) == ("nondeterministic", "runtime")


def test_both_faults_stand_in_the_report_and_the_first_one_is_named(tmp_path: Path) -> None:
    """The runtime errs at the first token; the graph is another one as well, which shows later."""
    other = replace(DECODER, seed=4).save(tmp_path / "model.onnx")
    choice = int(DECODER.logits((1, 2, 3))[-1].argmax())
    plan, _ = source_plan(replace(DECODER, seed=4), logits=lambda _, logits: prefer(choice, 1.0, 4)(logits))
    end, judged, _ = check(other, plan, candidate=wrong_token(at=0), prompts=PROMPTS[:1])
    assert (end.verdict, end.attribution) == ("divergent", "runtime")
    assert judged[0].first_divergence is not None
    found = witnessed(judged[0]).first_divergence
    assert found is not None
    assert (judged[0].first_divergence.index, found.index) == (0, 2)


def test_a_choice_that_one_precision_of_the_source_shares_with_the_oracle_is_no_difference(
    model: Path,
) -> None:
    """What float32 chooses otherwise by its rounding, float64 sets right; elsewhere it is the reverse."""
    first, second = ((token + 1) % DECODER.vocab for token in DECODER.greedy((1, 2, 3), 2))

    def change(taken: str, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        return prefer(first, 1e-4, 2)(logits) if taken == "float32" else prefer(second, 1e-4, 3)(logits)

    plan, engine = source_plan(DECODER, logits=change)
    end, _, _ = check(model, plan, prompts=PROMPTS[:1])
    assert (end.verdict, end.attribution) == ("identical", None)
    assert engine.passes == ["float32", "float64", "closed", "closed"]


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_lead_within_the_rounding_of_the_source_is_inconclusive(model: Path, precision: str) -> None:
    """Both precisions choose otherwise, but are further apart than the lead is: nobody is blamed.

    All of the source's logits differ by `gap`, the lead of the oracle, between float32 and float64; a band is
    eight times that: four times what was measured, for each of two logits.
    """
    token = (DECODER.greedy((1, 2, 3), 1)[0] + 1) % DECODER.vocab
    row = DECODER.logits((1, 2, 3))[-1]
    gap = row.max() - row[token]

    def change(taken: str, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        return prefer(token, 0.1, 2)(logits) + (gap if taken == "float64" else 0.0)

    plan, _ = source_plan(DECODER, logits=change, precision=precision)
    end, judged, _ = check(model, plan, prompts=PROMPTS[:1])
    assert (end.verdict, end.exit_code, end.attribution) == ("inconclusive", 1, None)
    assert judged[0].first_divergence is None
    found = witnessed(judged[0]).first_divergence
    assert found is not None
    assert found.noise_band is not None
    assert found.gap == pytest.approx(gap + 0.1, rel=1e-3)
    assert found.noise_band == pytest.approx(8 * gap, rel=1e-2)


def test_a_source_with_one_precision_is_taken_to_round_as_the_oracle_does(model: Path) -> None:
    """It runs once, and the band is no guess: that of the oracle, twice."""
    token = (DECODER.greedy((1, 2, 3), 1)[0] + 1) % DECODER.vocab
    plan, engine = source_plan(DECODER, logits=lambda _, logits: prefer(token, 1.0, 2)(logits), options={})
    end, (judged,), _ = check(model, plan, prompts=PROMPTS[:1])
    assert (end.verdict, end.attribution) == ("divergent", "exporter")
    assert engine.passes == ["float32", "closed"]
    found = witnessed(judged).first_divergence
    assert found is not None
    assert found.noise_band is not None
    assert 0 < found.noise_band < 1e-3


@pytest.mark.parametrize("when", ["opening", "running"])
def test_a_source_that_does_not_run_in_its_other_precision_is_taken_so_too(model: Path, when: str) -> None:
    """Some models have operators for float32 alone: no reason to prove nothing."""
    token = (DECODER.greedy((1, 2, 3), 1)[0] + 1) % DECODER.vocab

    def fail(precision: str) -> None:
        if precision == "float64":
            raise EngineFailedError("no room", kind="crashed", next_action="Buy some.")

    def change(taken: str, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        if when == "running":
            fail(taken)
        return prefer(token, 1.0, 2)(logits)

    opening = fail if when == "opening" else lambda precision: None
    plan, engine = source_plan(DECODER, logits=change, opening=opening)
    end, judged, _ = check(model, plan)
    assert (end.verdict, end.attribution) == ("divergent", "exporter")
    found = [witnessed(each).first_divergence for each in judged]
    assert found[0] is not None
    assert found[0].noise_band is not None
    assert 0 < found[0].noise_band < 1e-3
    assert engine.passes.count("float64") == (1 if when == "running" else 0)


def test_the_oracle_is_as_sure_against_the_source_as_against_a_candidate(model: Path) -> None:
    """Where the source differs, the oracle decides in float64."""
    token = (DECODER.greedy((1, 2, 3), 1)[0] + 1) % DECODER.vocab
    plan, _ = source_plan(DECODER, logits=lambda _, logits: prefer(token, 1.0, 2)(logits))
    _, (judged,), _ = check(model, plan, prompts=PROMPTS[:1])
    found = witnessed(judged).first_divergence
    assert found is not None
    # That of the reference, to more digits than float32 has; the graph's own constants are float32.
    assert found.oracle_top[0][1] == pytest.approx(DECODER.logits((1, 2, 3))[-1].max(), rel=1e-9)
    assert float(np.float32(found.oracle_top[0][1])) != found.oracle_top[0][1]


def test_a_source_that_fails_makes_the_run_invalid_and_no_finding(model: Path) -> None:
    """A witness that cannot speak proves nothing, whatever candidate and oracle did."""

    def fail(precision: str, logits: Any) -> Any:
        raise EngineFailedError("reference fell over", kind="crashed", next_action="Help it up.")

    end, judged, _ = check(model, source_plan(DECODER, logits=fail)[0])
    assert (end.verdict, end.exit_code, judged) == ("invalid-run", 6, [])
    assert end.error is not None
    assert end.error["message"] == "Prompt 1: The source model failed: reference fell over"


def test_a_source_without_finite_logits_makes_the_run_invalid(model: Path) -> None:
    """NaN has no order."""
    plan, _ = source_plan(DECODER, logits=lambda _, logits: logits * np.nan)
    end, _, _ = check(model, plan)
    assert (end.verdict, end.exit_code) == ("invalid-run", 6)
    assert end.error is not None
    assert "not finite at generated position 0" in end.error["message"]


@pytest.mark.parametrize(("kind", "code"), [("unsupported", 2), ("crashed", 6)])
def test_a_source_that_cannot_be_loaded_ends_the_check_before_it_begins(
    model: Path, kind: Any, code: int
) -> None:
    """A model that its engine does not know is bad input; an engine that falls over is none of the user's."""

    def fail(precision: str) -> None:
        raise EngineFailedError("no such model", kind=kind, next_action="Look.")

    end, _, document = check(model, source_plan(DECODER, opening=fail)[0])
    assert (end.exit_code, document["model"]) == (code, None)


def test_a_source_of_another_vocabulary_is_refused(model: Path) -> None:
    """Its tokens are not those of the package."""
    plan, engine = source_plan(replace(DECODER, vocab=12), vocabulary=DECODER.vocab)
    end, _, document = check(model, plan)
    assert (end.exit_code, document["source"]) == (2, None)
    assert end.error is not None
    assert end.error["message"].startswith("tiny-source knows 12 tokens, and the package has logits for 11")
    assert engine.passes == ["closed"]


def test_a_candidate_that_failed_at_once_leaves_the_source_nothing_to_say(model: Path) -> None:
    """Its place in the report is null, so that the others keep theirs."""

    def crash(run: int) -> None:
        if run == NEW_TOKENS:
            raise EngineFailedError("boom", kind="crashed", next_action="Report it.")

    end, _, document = check(model, source_plan(DECODER)[0], candidate=planted(run=crash))
    assert (end.verdict, end.attribution) == ("crashed", None)
    assert [each and each["verdict"] for each in document["source"]["prompts"]] == ["identical", None]
