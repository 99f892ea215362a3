"""The oracle's side: one pass says what stepping says, and close calls are decided or said to be open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from fixtures.decoders import TinyDecoder
from fixtures.effort import examples
from fixtures.planted import PlantedEngine
from harness.decode.batch import one_pass_batch
from harness.decode.loop import forced_decode, greedy_decode, one_pass_decode
from harness.decode.trace import Trace
from harness.engines.base import SessionInfo, TopLogits
from harness.engines.oracle import OracleSession
from harness.engines.registry import EngineSpec, parse_engine
from harness.errors import InputError, InvalidRunError
from harness.events import CheckFinished, Event, PromptJudged
from harness.parity.check import CheckPlan, Prompt, run_check
from harness.parity.compare import compare_tokens
from harness.parity.reference import OracleMode, Reference
from harness.parity.spread import spread_between
from harness.parity.verdict import Verdict
from harness.report.document import ParityDocument
from harness.topology.spec import Topology

DECODER = TinyDecoder(layers="rar", seed=5)
TOKENS = st.integers(0, DECODER.vocab - 1)
PAST, PRESENT = "past_key_values.0.recurrent_state", "present.0.recurrent_state"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid decoder."""
    return DECODER.save(tmp_path_factory.mktemp("reference") / "model.onnx")


@pytest.fixture(scope="module")
def references(model: Path) -> dict[str, Reference]:
    """One reference in each mode, used for many prompts as a check does."""
    modes: tuple[OracleMode, ...] = ("one-pass", "stepwise")
    return {mode: reference(model, DECODER.topology, mode) for mode in modes}


def reference(
    model: Path, topology: Topology, mode: OracleMode = "one-pass", spec: str = "oracle"
) -> Reference:
    """A reference as a check makes it."""
    return Reference(parse_engine(spec), model, topology, mode=mode, top_k=5)


@settings(
    deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(prompt=st.lists(TOKENS, min_size=1, max_size=12), follow=st.lists(TOKENS, min_size=1, max_size=12))
def test_one_pass_and_steps_give_the_same_verdict(
    references: dict[str, Reference], prompt: list[int], follow: list[int]
) -> None:
    """Whatever the candidate did, right or wrong, where and how often: verdict, IDs and position agree."""
    top = TopLogits((0, 1), (1.0, 0.0))
    info = SessionInfo("candidate", "0")
    candidate = Trace(tuple(prompt), tuple(follow), (top,) * len(follow), 0.0, info)
    found = {}
    for mode, side in references.items():
        verified = side.verify(prompt, follow)
        assert verified.mode == mode
        found[mode] = compare_tokens(
            candidate, verified.trace, bands=verified.bands, undecided=verified.undecided
        )
    one, steps = found["one-pass"], found["stepwise"]
    assert one.verdict == steps.verdict
    assert one.oracle_forced_ids == steps.oracle_forced_ids
    assert one.oracle_ids == steps.oracle_ids
    assert (one.first_divergence is None) == (steps.first_divergence is None)


@pytest.mark.parametrize("prompt", [(1, 2, 3), (4,)])
def test_both_are_the_float64_reference_that_knows_no_cache(
    references: dict[str, Reference], prompt: tuple[int, ...]
) -> None:
    """At every position, also along tokens that nobody would choose."""
    follow = (3, 9, 0, 2)
    expected = [int(DECODER.logits(prompt + follow[:i])[-1].argmax()) for i in range(len(follow))]
    for side in references.values():
        assert [step.argmax for step in side.verify(prompt, follow).trace.steps] == expected


def test_the_band_is_small_and_covers_what_was_measured(references: dict[str, Reference]) -> None:
    """On a decoder in fp32 the band is far below any real margin, and is not zero."""
    bands = references["one-pass"].verify((1, 2, 3), (3, 9)).bands
    assert 0 < max(bands) < 1e-3


def test_a_graph_that_gives_the_last_logits_alone_is_stepped(tmp_path: Path) -> None:
    """The mode in the report is what happened, not what was asked for."""
    decoder = TinyDecoder(layers="ar", last_only=True, seed=3)
    side = reference(decoder.save(tmp_path / "model.onnx"), decoder.topology)
    verified = side.verify((1, 2), decoder.greedy((1, 2), 4))
    assert verified.mode == side.mode == "stepwise"
    assert [step.argmax for step in verified.trace.steps] == list(decoder.greedy((1, 2), 4))


def tie_decoder(folder: Path, gap: float) -> tuple[Path, Topology]:
    """A decoder of 4 tokens that always has token 2 first and token 3 behind it by `gap`, in float64.

    Logits are one state's running sum of ones (so that there is a cache) times zero, plus a constant row
    that only the precision of the addition can tell apart: 1, 1, 1 + gap, 1.
    """
    row = np.array([0.0, 0.0, 1.0, 1.0], np.float32)
    bias = np.array([0.0, 0.0, gap, 0.0], np.float32)
    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["x"]),
        helper.make_node("Add", ["x", "row"], ["coarse"]),
        helper.make_node("Add", ["coarse", "bias"], ["logits"]),
        helper.make_node("ReduceSum", ["x", "axes"], ["total"], keepdims=0),
        helper.make_node(
            "Add", ["past_key_values.0.recurrent_state", "total"], ["present.0.recurrent_state"]
        ),
    ]
    weights = {
        "embedding": np.zeros((4, 4), np.float32),
        "row": row,
        "bias": bias,
        "axes": np.array([1], np.int64),
    }
    return state_decoder(folder, nodes, weights, width=4)


def state_decoder(
    folder: Path, nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], *, width: int
) -> tuple[Path, Topology]:
    """A decoder of 4 tokens with one state [batch, width], saved, and its topology."""
    state = ["batch", width]
    graph = helper.make_graph(
        nodes,
        "decoder",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "new"]),
            helper.make_tensor_value_info(PAST, TensorProto.FLOAT, state),
        ],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "new", 4]),
            helper.make_tensor_value_info(PRESENT, TensorProto.FLOAT, state),
        ],
        initializer=[numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    topology = Topology(
        token_input="input_ids",
        logits_output="logits",
        state_pairs=TinyDecoder(layers="r").topology.state_pairs,
    )
    return path, topology


@pytest.mark.parametrize("mode", ["one-pass", "stepwise"])
def test_what_float32_cannot_separate_float64_decides(mode: OracleMode, tmp_path: Path) -> None:
    """1 + 1e-9 is 1 in float32: an exact tie there, which token 2 (the lowest) has; float64 confirms it.

    With the gap on the other side, -1e-9, float32 still says token 2 and float64 says token 3.
    """
    for gap, expected in ((1e-9, 2), (-1e-9, 3)):
        model, topology = tie_decoder(tmp_path, gap)
        verified = reference(model, topology, mode).verify((0,), (2, 2))
        assert [step.argmax for step in verified.trace.steps] == [expected, expected]
        assert verified.undecided == ()


def test_an_exact_tie_goes_to_the_lowest_id_and_is_decided(tmp_path: Path) -> None:
    """A margin of zero in float64 is no doubt: every engine must take the lowest ID."""
    model, topology = tie_decoder(tmp_path, 0.0)
    verified = reference(model, topology).verify((0,), (3, 2))
    assert [step.argmax for step in verified.trace.steps] == [2, 2]
    assert verified.undecided == ()


def counting_decoder(
    folder: Path, nodes: list[onnx.NodeProto], *, offset: float = 0.0
) -> tuple[Path, Topology]:
    """A decoder of 4 tokens; `nodes` make `third` and `fourth`, the logits [batch, new] of tokens 2 and 3.

    They have `ids`, `ones`, `count` (of tokens so far, from a state) and `length` (tokens of this call) to
    make them of, and the constants `large`, `ten`, `half` (1.5) and `five`. `offset` is added to all logits.
    """
    constants = {"large": 1e8, "ten": 10.0, "half": 1.5, "five": 5.0, "nought": 0.0, "offset": offset}
    weights = {name: np.array(value, np.float32) for name, value in constants.items()}
    weights |= {"one_axis": np.array([1], np.int64), "axis": np.array(1, np.int64)}
    weights |= {"rows": np.array([0], np.int64)}
    weights |= {"last": np.array([2], np.int64), "unit": np.array([1.0], np.float32)}
    begin = [
        helper.make_node("Cast", ["input_ids"], ["ids"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["ids", "nought"], ["zeros"]),
        helper.make_node("Add", ["zeros", "unit"], ["ones"]),
        helper.make_node("CumSum", ["ones", "axis"], ["counted"]),
        helper.make_node("Add", ["counted", PAST], ["count"]),
        helper.make_node("ReduceSum", ["ones", "one_axis"], ["length"]),
        helper.make_node("Add", [PAST, "length"], [PRESENT]),
    ]
    logits = [("zeros", "a"), ("zeros", "b"), ("third", "c"), ("fourth", "d")]
    end = [helper.make_node("Unsqueeze", [row, "last"], [name]) for row, name in logits]
    end.append(helper.make_node("Concat", [name for _, name in logits], ["all"], axis=2))
    end.append(helper.make_node("Add", ["all", "offset"], ["logits"]))
    return state_decoder(folder, [*begin, *nodes, *end], weights, width=1)


@pytest.mark.parametrize("spec", ["oracle", "oracle:precision=float64"])
@pytest.mark.parametrize("prompt", [(1, 2), (1, 2, 3, 1, 2, 3, 1, 2, 3, 1)])
def test_a_graph_that_looks_at_the_length_of_its_call_is_stepped(
    prompt: tuple[int, ...], spec: str, tmp_path: Path
) -> None:
    """Token 2 leads where a call has more than 5 tokens: after the prompt alone, never in a step.

    One pass over prompt and tokens would say otherwise, with a margin that no rounding explains.
    """
    nodes = [
        helper.make_node("Sub", ["length", "five"], ["over"]),
        helper.make_node("Mul", ["ones", "over"], ["third"]),
        helper.make_node("Identity", ["zeros"], ["fourth"]),
    ]
    model, topology = counting_decoder(tmp_path, nodes)
    side = reference(model, topology, spec=spec)
    first = 2 if len(prompt) > 5 else 0
    verified = side.verify(prompt, (first, *[0] * 8))
    assert [step.argmax for step in verified.trace.steps] == [first, *[0] * 8]
    assert verified.mode == side.mode == "stepwise"
    assert verified.undecided == ()


def ahead_nodes(*, late: bool) -> list[onnx.NodeProto]:
    """`ahead` is one where tokens of the call are behind a position, if `late` past ten tokens alone."""
    return [
        helper.make_node("Constant", [], ["one"], value_float=1.0),
        helper.make_node("Sub", [PRESENT, "count"], ["behind"]),
        helper.make_node("Clip", ["behind", "", "one"], ["some"]),
        helper.make_node("Greater", ["count", "ten" if late else "nought"], ["counts"]),
        helper.make_node("Cast", ["counts"], ["where"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["some", "where"], ["ahead"]),
    ]


def late_decoder(folder: Path) -> tuple[Path, Topology]:
    """Token 3 by 1, and past ten tokens token 2 by 0.5 wherever tokens are behind in the same call."""
    nodes = [
        *ahead_nodes(late=True),
        helper.make_node("Mul", ["ahead", "half"], ["third"]),
        helper.make_node("Identity", ["ones"], ["fourth"]),
    ]
    return counting_decoder(folder, nodes)


def peeking_decoder(folder: Path) -> tuple[Path, Topology]:
    """Token 3 by 1, and past ten tokens token 2 by 0.5 where that is the next one of the same call.

    So one pass confirms the token 2, and no step does.
    """
    nodes = [
        *ahead_nodes(late=True),
        helper.make_node("Constant", [], ["from"], value_ints=[1]),
        helper.make_node("Constant", [], ["to"], value_ints=[1 << 40]),
        helper.make_node("Slice", ["ids", "from", "to", "one_axis"], ["later"]),
        helper.make_node("Slice", ["zeros", "rows", "from", "one_axis"], ["none"]),
        helper.make_node("Concat", ["later", "none"], ["next"], axis=1),
        helper.make_node("Constant", [], ["two"], value_float=2.0),
        helper.make_node("Equal", ["next", "two"], ["wanted"]),
        helper.make_node("Cast", ["wanted"], ["peeked"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["peeked", "ahead"], ["seen"]),
        helper.make_node("Mul", ["seen", "half"], ["third"]),
        helper.make_node("Identity", ["ones"], ["fourth"]),
    ]
    return counting_decoder(folder, nodes)


STARTS: list[tuple[int, ...]] = [(1, first, second) for first in range(4) for second in range(4)]


@pytest.mark.parametrize("spec", ["oracle", "oracle:precision=float64"])
def test_no_candidate_is_blamed_for_what_only_a_longer_call_says(spec: str, tmp_path: Path) -> None:
    """The probe, of 6 tokens, and the prompt alone are as in steps; one pass over all says token 2 past ten.

    Whatever position is drawn, the right candidate stays right: it is looked at where it would be blamed.
    """
    model, topology = late_decoder(tmp_path)
    for prompt in STARTS:
        side = reference(model, topology, spec=spec)
        verified = side.verify(prompt, (3,) * 12)
        assert [step.argmax for step in verified.trace.steps] == [3] * 12
        assert verified.mode == side.mode == "stepwise"


def test_no_source_is_blamed_for_what_only_a_longer_call_says(tmp_path: Path) -> None:
    """A candidate that is wrong as one pass is, and a rival that is right: that one would be blamed."""
    model, topology = late_decoder(tmp_path)
    follow = (3,) * 7 + (2,) * 4 + (3,)
    for prompt in STARTS:
        verified = reference(model, topology).verify(prompt, follow, rivals=(3,) * 12)
        assert [step.argmax for step in verified.trace.steps] == [3] * 12


def test_what_the_oracle_cannot_decide_is_looked_at_too(tmp_path: Path) -> None:
    """A candidate behind by 0.5, within a band of 0.6, would be inconclusive: it is right in steps."""
    model, topology = late_decoder(tmp_path)
    for prompt in STARTS:
        side = reference(model, topology)
        side.verify(prompt, (3,) * 4)
        side._bands |= {("one-pass", "float32"): 0.6, ("one-pass", "float64"): 0.6}
        verified = side.verify(prompt, (3,) * 12)
        assert [step.argmax for step in verified.trace.steps] == [3] * 12
        assert verified.mode == "stepwise"


def test_the_first_difference_that_decides_is_looked_at_behind_one_that_does_not(tmp_path: Path) -> None:
    """A candidate is behind by 0.05 at its first token, within a band of 0.1: that is inconclusive.

    Past ten tokens one pass says token 2 by 0.5, and would make it divergent; it is right there in steps.
    """
    nodes = [
        *ahead_nodes(late=True),
        helper.make_node("Constant", [], ["four"], value_float=4.0),
        helper.make_node("Constant", [], ["close"], value_float=1.05),
        helper.make_node("Less", ["count", "four"], ["begins"]),
        helper.make_node("Cast", ["begins"], ["begun"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["begun", "close"], ["early"]),
        helper.make_node("Mul", ["ahead", "half"], ["later_on"]),
        helper.make_node("Add", ["early", "later_on"], ["third"]),
        helper.make_node("Identity", ["ones"], ["fourth"]),
    ]
    model, topology = counting_decoder(tmp_path, nodes)
    top = TopLogits((3, 2), (1.0, 0.0))
    for prompt in STARTS:
        side = reference(model, topology)
        side.verify(prompt, (3,) * 4)
        side._bands |= {("one-pass", "float32"): 0.1, ("one-pass", "float64"): 0.1}
        verified = side.verify(prompt, (3,) * 12)
        assert verified.mode == "stepwise"
        side._bands |= {("stepwise", "float32"): 0.1, ("stepwise", "float64"): 0.1}
        verified = side.verify(prompt, (3,) * 12)
        candidate = Trace(prompt, (3,) * 12, (top,) * 12, 0.0, SessionInfo("candidate", "0"))
        found = compare_tokens(candidate, verified.trace, bands=verified.bands, undecided=verified.undecided)
        assert found.verdict is Verdict.INCONCLUSIVE
        assert found.oracle_forced_ids == (2, *[3] * 11)


def test_a_graph_that_confirms_what_it_sees_is_noticed_at_a_drawn_position(tmp_path: Path) -> None:
    """Of 28 positions that can be drawn, 21 have token 2 next: most wrong candidates are found out.

    What is drawn depends on the tokens alone.
    """
    model, topology = peeking_decoder(tmp_path)
    found = []
    for first in range(4):
        for second in range(4):
            follow = (first, second, *[3] * 6, *[2] * 22)
            modes = {reference(model, topology).verify((1, 2, 3), follow).mode for _ in range(2)}
            assert len(modes) == 1
            found.append(modes == {"stepwise"})
    assert sum(found) >= 8


@pytest.mark.parametrize("spec", ["oracle", "oracle:precision=float64"])
@pytest.mark.parametrize("offset", [0.0, -300.0, 2e4])
def test_a_constant_on_all_logits_hides_nothing(offset: float, spec: str, tmp_path: Path) -> None:
    """Every position but the last of a call says token 2 by 0.5, and token 3 by 1 in steps, at any offset."""
    nodes = [
        *ahead_nodes(late=False),
        helper.make_node("Mul", ["ahead", "half"], ["third"]),
        helper.make_node("Identity", ["ones"], ["fourth"]),
    ]
    model, topology = counting_decoder(tmp_path, nodes, offset=offset)
    verified = reference(model, topology, spec=spec).verify((1, 2, 3), (3,) * 6)
    assert [step.argmax for step in verified.trace.steps] == [3] * 6
    assert verified.mode == "stepwise"


def test_rounding_is_no_reason_to_step(model: Path, tmp_path: Path) -> None:
    """The same large number in all weights of a row adds one to all logits, and float32 rounds in its sum.

    By more than a thousandth of what the logits differ by; and the decoder is as causal as it was.
    """
    graph = onnx.load(model)
    last = next(node for node in graph.graph.node if "logits" in node.output)
    (weight,) = [each for each in graph.graph.initializer if each.name == last.input[1]]
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) + np.float32(3e3), weight.name))
    path = tmp_path / "model.onnx"
    onnx.save(graph, path)
    side = reference(path, DECODER.topology)
    for prompt in STARTS:
        assert side.verify(prompt, (3, 9, 0, 2, 3, 9, 0, 2)).mode == "one-pass"


def slightly_seeing_decoder(folder: Path, *, gap: float, late: bool) -> tuple[Path, Topology]:
    """Token 2 at 1500 and 3 behind by `gap`; what is behind in the call lifts 3 by 0.01: little."""
    nodes = [
        *ahead_nodes(late=late),
        helper.make_node("Constant", [], ["thousand"], value_float=1500.0),
        helper.make_node("Constant", [], ["less"], value_float=1500.0 - gap),
        helper.make_node("Constant", [], ["little"], value_float=0.01),
        helper.make_node("Mul", ["ones", "thousand"], ["third"]),
        helper.make_node("Mul", ["ahead", "little"], ["lift"]),
        helper.make_node("Add", ["lift", "less"], ["fourth"]),
    ]
    return counting_decoder(folder, nodes)


@pytest.mark.parametrize("spec", ["oracle", "oracle:precision=float64"])
def test_steps_are_not_measured_by_one_pass(spec: str, tmp_path: Path) -> None:
    """What one pass makes otherwise is no rounding of steps: these decide 0.05 in float32 already."""
    model, topology = slightly_seeing_decoder(tmp_path, gap=0.05, late=False)
    verified = reference(model, topology, "stepwise", spec).verify((1, 2, 3), (2,) * 6)
    assert verified.mode == "stepwise"
    assert verified.undecided == ()
    assert verified.rounding < 0.005


def test_a_difference_that_explains_the_blame_is_enough(tmp_path: Path) -> None:
    """What is behind past ten tokens makes token 3 lead by 0.005: little beside 1500, and all there is."""
    model, topology = slightly_seeing_decoder(tmp_path, gap=0.005, late=True)
    for prompt in STARTS:
        verified = reference(model, topology).verify(prompt, (2,) * 12)
        assert [step.argmax for step in verified.trace.steps] == [2] * 12


@pytest.mark.parametrize("spec", ["oracle", "oracle:precision=float64"])
def test_no_candidate_is_blamed_for_what_fills_up_its_row(spec: str, tmp_path: Path) -> None:
    """The last position of the shorter row is alone past ten tokens: in a batch others are behind it."""
    model, topology = late_decoder(tmp_path)
    short, longer = ((1, 2, 3), (3,) * 9), ((1, 2, 3), (3,) * 12)
    side = reference(model, topology, spec=spec)
    side.verify((1, 2, 3), (3, 2))
    side.prepare([short, longer])
    assert [step.argmax for step in side.verify(*short).trace.steps] == [3] * 9


LENGTH = 30


def checked(
    model: Path, topology: Topology, prompts: Sequence[tuple[int, ...]], engine: PlantedEngine
) -> tuple[CheckFinished, list[PromptJudged], dict[str, Any]]:
    """A check of `LENGTH` tokens a prompt: its end, its judgements as they came, and the report."""
    judged: list[PromptJudged] = []
    document = ParityDocument()

    def take(event: Event) -> None:
        document(event)
        if isinstance(event, PromptJudged):
            judged.append(event)

    plan = CheckPlan(
        package="tiny",
        model=model,
        model_name="tiny",
        model_sha256="0" * 64,
        topology=topology,
        topology_outcome="derived",
        candidate=EngineSpec(engine, {}),
        oracle=parse_engine("oracle"),
        prompts=[Prompt(prompt) for prompt in prompts],
        max_new_tokens=LENGTH,
    )
    return run_check(plan, take), judged, document.mapping()


def _chosen(token: int, top: TopLogits) -> TopLogits:
    """The largest logits of an engine that chooses another token, with a clear margin."""
    ids = (token, *(other for other in top.token_ids if other != token))[: len(top.token_ids)]
    return TopLogits(ids, (top.values[0] + 1.0, *top.values[: len(ids) - 1]))


def test_no_report_mixes_one_pass_with_steps(tmp_path: Path) -> None:
    """A candidate is wrong from token 14 to the last but one, and one pass confirms it where nothing notices.

    Behind a prompt whose drawn position shows that the graph must be stepped, those before are judged again,
    on the tokens and the second decode that there are.
    """
    model, topology = peeking_decoder(tmp_path)
    runs: list[int] = []

    def wrong(run: int, top: list[TopLogits]) -> list[TopLogits]:
        return [_chosen(2, top[0])] if 14 <= run % LENGTH < LENGTH - 1 else top

    engine = PlantedEngine(logits=wrong, run=runs.append)
    verdicts = {prompt: checked(model, topology, [prompt], engine)[0].verdict for prompt in STARTS}
    missed = [prompt for prompt, verdict in verdicts.items() if verdict == "identical"][:2]
    found = next(prompt for prompt, verdict in verdicts.items() if verdict == "divergent")
    assert len(missed) == 2
    runs.clear()
    end, judged, report = checked(model, topology, [*missed, found], engine)
    assert [each.index for each in judged if each.oracle_mode == "one-pass"] == [0, 1]
    assert [each.index for each in judged if each.oracle_mode == "stepwise"] == [0, 1, 2]
    assert end.verdict == report["verdict"] == "divergent"
    assert [prompt["verdict"] for prompt in report["prompts"]] == ["divergent"] * 3
    assert [prompt["first_divergence"]["index"] for prompt in report["prompts"]] == [14] * 3
    assert report["oracle"]["mode"] == "stepwise"
    assert len(runs) == 2 * 3 * LENGTH


def test_judging_again_needs_no_third_decode(tmp_path: Path) -> None:
    """What was divergent in one pass, too, has been decoded twice: a recording holds no more than that."""
    model, topology = peeking_decoder(tmp_path)
    runs: list[int] = []

    def wrong(run: int, top: list[TopLogits]) -> list[TopLogits]:
        step = run % LENGTH
        return [_chosen(1 if step == 0 else 2, top[0])] if step in {0, *range(8, LENGTH)} else top

    engine = PlantedEngine(logits=wrong, run=runs.append)
    modes = {prompt: checked(model, topology, [prompt], engine)[2]["oracle"]["mode"] for prompt in STARTS}
    missed = next(prompt for prompt, mode in modes.items() if mode == "one-pass")
    found = next(prompt for prompt, mode in modes.items() if mode == "stepwise")
    runs.clear()
    end, judged, _ = checked(model, topology, [missed, found], engine)
    assert [(each.index, each.oracle_mode) for each in judged] == [
        (0, "one-pass"),
        (0, "stepwise"),
        (1, "stepwise"),
    ]
    assert end.verdict == "divergent"
    assert len(runs) == 2 * 2 * LENGTH


ROWS = st.lists(
    st.tuples(st.lists(TOKENS, min_size=1, max_size=9), st.lists(TOKENS, min_size=1, max_size=9)),
    min_size=2,
    max_size=5,
)


@settings(deadline=None, max_examples=examples(30))
@given(rows=ROWS)
def test_a_row_of_a_batch_gives_what_it_gives_alone(
    references: dict[str, Reference], rows: list[tuple[list[int], list[int]]]
) -> None:
    """Rows of all lengths, of a decoder with attention and states: apart by no more than the band allows."""
    side = references["one-pass"]
    band = side.verify((1, 2, 3), (3, 9)).rounding
    batch = one_pass_batch(side._session, DECODER.topology, rows)
    assert batch is not None
    for (prompt, follow), row in zip(rows, batch, strict=True):
        alone = one_pass_decode(side._session, DECODER.topology, prompt, follow)
        assert alone is not None
        assert (row.prompt_ids, row.token_ids) == (alone.prompt_ids, alone.token_ids)
        assert 2 * spread_between(row, alone) <= band


def prepared(
    model: Path, topology: Topology, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> tuple[Reference, bool]:
    """A reference that has prepared `rows`, and whether these came to be a batch."""
    side = reference(model, topology)
    assert not side.gathers(rows)
    side.verify((1, 2, 3), (3, 2))
    side.prepare(rows)
    return side, side.gathers(rows[:1])


def test_what_was_prepared_is_not_run_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifying rows of a batch asks the graph for nothing more, where margins decide."""
    prompts: list[tuple[int, ...]] = [(1, 2), (4, 5, 6, 7), (9,)]
    rows = [(prompt, DECODER.greedy(prompt, 5)) for prompt in prompts]
    side, batched = prepared(model, DECODER.topology, rows)
    assert batched
    monkeypatch.setattr(OracleSession, "run", None)
    for prompt, follow in rows:
        verified = side.verify(prompt, follow)
        assert verified.trace.token_ids == follow
        assert [step.argmax for step in verified.trace.steps] == list(follow)


def test_a_graph_whose_rows_see_each_other_is_not_batched(tmp_path: Path) -> None:
    """Token 2 has the distance from the mean over the batch: nothing alone, more among other rows."""
    nodes = [
        helper.make_node("ReduceMean", ["ids", "rows"], ["mean"], keepdims=1),
        helper.make_node("Sub", ["ids", "mean"], ["third"]),
        helper.make_node("Identity", ["ones"], ["fourth"]),
    ]
    model, topology = counting_decoder(tmp_path, nodes)
    rows = [((1, 2), (3, 3, 3)), ((0, 1, 0), (3, 3, 3, 3))]
    side, batched = prepared(model, topology, rows)
    assert not batched
    for prompt, follow in rows:
        verified = side.verify(prompt, follow)
        assert [step.argmax for step in verified.trace.steps] == [3] * len(follow)
        assert verified.mode == "one-pass"


def test_a_graph_of_one_row_is_not_batched(tmp_path: Path) -> None:
    """An extent of 1 where the others have a symbol is no batch axis."""
    model, topology = counting_decoder(
        tmp_path,
        [
            helper.make_node("Identity", ["ones"], ["third"]),
            helper.make_node("Identity", ["zeros"], ["fourth"]),
        ],
    )
    rows = [((1, 2), (2, 2, 2)), ((0, 1, 0), (2, 2))]
    assert prepared(model, topology, rows)[1]
    graph = onnx.load(model)
    for port in (*graph.graph.input, *graph.graph.output):
        port.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(graph, model)
    assert not prepared(model, topology, rows)[1]


def test_a_batch_keeps_to_its_positions(references: dict[str, Reference]) -> None:
    """However many prompts there are: those that would make it larger wait for the next one."""
    side = references["one-pass"]
    side.verify((1, 2, 3), (3, 9))
    assert side.gathers([((1,) * 60, (2,) * 4)] * 3)
    assert not side.gathers([((1,) * 60, (2,) * 4)] * 4)
    assert not side.gathers([((1,), (2,))] * 2 + [((1,) * 80, (2,) * 6)])


def overflowing_decoder(folder: Path) -> tuple[Path, Topology]:
    """Logits that are constant, and a state (1e9)^n for a call of n tokens: infinite in float32 from 5 on."""
    nodes = [
        helper.make_node("Identity", ["ones"], ["third"]),
        helper.make_node("Identity", ["zeros"], ["fourth"]),
    ]
    model, topology = counting_decoder(folder, nodes)
    graph = onnx.load(model)
    (state,) = [node for node in graph.graph.node if PRESENT in node.output]
    state.input[:] = ["huge", "length"]
    state.op_type = "Pow"
    state.name = "grow"
    graph.graph.initializer.append(numpy_helper.from_array(np.array([[1e9]], np.float32), "huge"))
    onnx.save(graph, model)
    return model, topology


@pytest.mark.parametrize("mode", ["one-pass", "stepwise"])
def test_the_node_that_made_a_state_infinite_is_named(mode: OracleMode, tmp_path: Path) -> None:
    """Nobody reads a state behind one pass, and all logits are finite: it is looked at all the same."""
    model, topology = overflowing_decoder(tmp_path)
    side = reference(model, topology, mode)
    short = side.verify((1, 2), (2,)).trace
    assert [step.argmax for step in short.steps] == [2]
    with pytest.raises(InvalidRunError, match=rf"oracle's {PRESENT} is not finite .*is Pow grow\."):
        side.verify((1, 2, 3, 1, 2), (2,))


def test_no_candidate_is_blamed_before_float64_agrees(tmp_path: Path) -> None:
    """Past ten tokens, float32 loses the 1.5 that token 3 has, as (1e8 + 1.5) - 1e8 is 0 there, not before.

    So the band, measured on the first tokens, is narrow, and every later position has a wide margin for
    token 2 in float32. In float64 it is token 3 throughout; a candidate that says so is right, and one that
    follows float32 is wrong.
    """
    nodes = [
        helper.make_node("Identity", ["ones"], ["third"]),
        helper.make_node("Sub", ["count", "ten"], ["beyond"]),
        helper.make_node("Relu", ["beyond"], ["late"]),
        helper.make_node("Mul", ["late", "large"], ["big"]),
        helper.make_node("Add", ["big", "half"], ["sum"]),
        helper.make_node("Sub", ["sum", "big"], ["fourth"]),
    ]
    model, topology = counting_decoder(tmp_path, nodes)
    for mode in ("one-pass", "stepwise"):
        side = reference(model, topology, mode)  # type: ignore[arg-type]
        verified = side.verify((1, 2), (3,) * 20)
        assert [step.argmax for step in verified.trace.steps] == [3] * 20
        assert verified.mode == mode
        wrong = side.verify((1, 2), (3,) * 12 + (2,) * 2)
        assert [step.argmax for step in wrong.trace.steps][12] == 3


def comparison(token: int, values: tuple[float, ...], *, band: float, undecided: bool) -> Verdict:
    """The verdict on one position where the oracle has these logits for tokens 0, 1, 2, ..."""
    info = SessionInfo("x", "0")
    oracle = TopLogits(tuple(range(len(values))), values)
    candidate = Trace((0,), (token,), (TopLogits((token,), (1.0,)),), 0.0, info)
    traced = replace(candidate, steps=(oracle,))
    return compare_tokens(candidate, traced, bands=(band,), undecided=(0,) if undecided else ()).verdict


def test_differing_only_where_the_oracle_is_undecided_is_inconclusive() -> None:
    """The tied token is inconclusive, the oracle's own identical, and a third token is wrong all the same."""
    values = (1.0, 1.0 - 1e-14, 0.5)
    assert comparison(0, values, band=1e-12, undecided=True) is Verdict.IDENTICAL
    assert comparison(1, values, band=1e-12, undecided=True) is Verdict.INCONCLUSIVE
    assert comparison(2, values, band=1e-12, undecided=True) is Verdict.DIVERGENT
    assert comparison(7, values, band=1e-12, undecided=True) is Verdict.DIVERGENT
    # A token that is not among those kept is as far behind as the least of them, at least.
    assert comparison(7, values, band=0.4, undecided=True) is Verdict.DIVERGENT
    assert comparison(7, values, band=0.6, undecided=True) is Verdict.INCONCLUSIVE
    assert comparison(1, values, band=0.0, undecided=False) is Verdict.DIVERGENT


def test_a_decided_difference_outweighs_an_undecided_one_before_it() -> None:
    """The report points at the position that proves the divergence."""
    info = SessionInfo("x", "0")
    close, clear = TopLogits((0, 1), (1.0, 1.0 - 1e-14)), TopLogits((5, 6), (3.0, 1.0))
    candidate = Trace((0,), (1, 6), (TopLogits((1,), (1.0,)), TopLogits((6,), (1.0,))), 0.0, info)
    found = compare_tokens(
        candidate, replace(candidate, steps=(close, clear)), bands=(1e-12, 1e-12), undecided=(0,)
    )
    assert found.verdict is Verdict.DIVERGENT
    assert found.first_divergence is not None
    assert found.first_divergence.index == 1
    assert found.first_divergence.noise_band == 1e-12
    assert found.oracle_ids == (1, 5)


def test_an_oracle_without_a_second_precision_is_stepped(model: Path) -> None:
    """ONNX Runtime as an oracle measures no band; asking it for one pass is refused by name."""
    spec = parse_engine("ort-cpu")
    assert Reference.check_mode(spec, None) == "stepwise"
    with pytest.raises(InputError, match="ort-cpu has no option precision"):
        Reference.check_mode(spec, "one-pass")
    verified = reference(model, DECODER.topology, "stepwise", "ort-cpu").verify((1,), (2, 3))
    assert verified.bands == (0.0, 0.0)


def test_one_pass_asks_for_the_logits_alone(model: Path) -> None:
    """The trace of a single call has the tokens, positions and values of the stepped one."""
    session = parse_engine("oracle:precision=float64").open(model)
    own = greedy_decode(session, DECODER.topology, (1, 2, 3), max_new_tokens=6)
    whole = one_pass_decode(session, DECODER.topology, (1, 2, 3), own.token_ids)
    steps = forced_decode(session, DECODER.topology, (1, 2, 3), own.token_ids)
    assert whole is not None
    assert [s.token_ids for s in whole.steps] == [s.token_ids for s in steps.steps]
    assert spread_between(whole, steps) < 1e-12
