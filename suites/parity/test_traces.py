"""A trace gives what a check gives, for every kind of finding; one that was changed is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from fixtures.decoders import TinyDecoder
from fixtures.effort import examples
from fixtures.scripted import Act, Fault, scripted
from harness.engines.base import SessionInfo
from harness.engines.registry import EngineSpec, parse_engine
from harness.engines.tensor_types import dtype_of_array
from harness.errors import InputError
from harness.events import Event, TokenDecoded
from harness.parity.candidate import Prompt
from harness.parity.check import TOP_K, CheckPlan, run_check
from harness.parity.recorded import (
    RecordedModel,
    RecordedTensor,
    Recording,
    tensor_sha256,
    topology_sha256,
)
from harness.parity.recording import RecordPlan, record
from harness.parity.replay import Replay, require_complete, require_same_model
from harness.parity.trace_reading import read_trace
from harness.parity.trace_writing import write_trace
from harness.ports import read_ports
from harness.report.document import ParityDocument

SCHEMAS = Path(__file__).parents[2] / "reports/schemas"
SCHEMA, PARITY = (
    json.loads((SCHEMAS / f"{name}-1.schema.json").read_text(encoding="utf-8"))
    for name in ("trace", "parity")
)
DECODER = TinyDecoder(layers="ar", seed=3)
PROMPTS = (Prompt((1, 2, 3), text="one two three"), Prompt((4,)), Prompt((5, 6)), Prompt((4,)))
"""Two of them are alike: each has decodes of its own."""
NEW_TOKENS = 5
VOCABULARY = 11
ACTS: tuple[Act, ...] = ("second choice", "other logits", "nan", "crash", "timeout")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid of one attention and one recurrent layer."""
    return DECODER.save(tmp_path_factory.mktemp("tiny") / "model.onnx")


@pytest.fixture(scope="module")
def recorded(model: Path) -> Recording:
    """What an engine that is right gave, with its states."""
    return recording_of(model, scripted(), states=True)


def recording_of(
    model: Path, engine: EngineSpec, prompts: Sequence[Prompt] = PROMPTS, **changes: Any
) -> Recording:
    """Record an engine."""
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS} | changes
    return record(
        RecordPlan(
            model=model,
            facts=RecordedModel(
                name="tiny",
                sha256="0" * 64,
                topology_sha256=topology_sha256(DECODER.topology),
                topology_outcome="derived",
                ignore_declared=False,
            ),
            topology=DECODER.topology,
            engine=engine,
            oracle=parse_engine("oracle"),
            options={},
            process="in-process",
            prompts=prompts,
            notes={},
            **settings,
        )
    )


def plan_of(
    model: Path, candidate: EngineSpec | Replay, prompts: Sequence[Prompt], **changes: Any
) -> CheckPlan:
    """A check by the oracle."""
    settings: dict[str, Any] = {"oracle": parse_engine("oracle")} | changes
    return CheckPlan(
        package="tiny",
        model=model,
        model_name="tiny",
        model_sha256="0" * 64,
        topology=DECODER.topology,
        topology_outcome="derived",
        candidate=candidate,
        prompts=prompts,
        max_new_tokens=NEW_TOKENS,
        **settings,
    )


def report(
    model: Path,
    candidate: EngineSpec | Replay,
    prompts: Sequence[Prompt],
    *,
    oracle: str = "oracle",
    stop_ids: tuple[int, ...] = (),
) -> dict[str, Any]:
    """The report of a check, without what depends on the clock; and what it told of the candidate."""
    document = ParityDocument()
    heard: list[Event] = []

    def emit(event: Event) -> None:
        heard.append(event)
        document(event)

    run_check(plan_of(model, candidate, prompts, oracle=parse_engine(oracle), stop_ids=stop_ids), emit)
    found = document.mapping()
    for prompt in found["prompts"]:
        del prompt["timing"]
    if found["oracle"] is not None and found["oracle"]["proof"] is not None:
        del found["oracle"]["proof"]["seconds"]
    told = [event for event in heard if isinstance(event, TokenDecoded) and event.role == "candidate"]
    return found | {"told": [(event.index, event.step, event.token_id) for event in told]}


def through_a_file(recording: Recording, folder: Path) -> Recording:
    """What a reader finds of it."""
    path = folder / "x.trace"
    write_trace(path, recording)
    return read_trace(path)


def replayed(recording: Recording, model: Path) -> tuple[Replay, tuple[Prompt, ...]]:
    """The candidate of a check from a recording, and the prompts of that check."""
    require_complete(recording, top_k=TOP_K)
    return Replay(recording, read_ports(model)), tuple(each.prompt for each in recording.prompts)


faults = st.builds(
    Fault,
    prompt=st.sampled_from([prompt.token_ids for prompt in PROMPTS]),
    act=st.sampled_from(ACTS),
    step=st.integers(0, NEW_TOKENS - 1),
    decodes=st.sampled_from([frozenset({0}), frozenset({1}), frozenset({0, 1}), frozenset({0, 1, 2, 3})]),
)


@settings(
    max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(planted=st.lists(faults, max_size=3), stops=st.sampled_from([(), (2,), (7, 9)]))
def test_a_trace_has_the_verdict_and_the_report_of_a_check(
    model: Path, tmp_path: Path, planted: list[Fault], stops: tuple[int, ...]
) -> None:
    """Whatever was planted, in whichever decode: the whole report is that of `check`, but for the clock."""
    prompts = PROMPTS[:3]
    expected = report(model, scripted(*planted), prompts, stop_ids=stops)
    recording = through_a_file(recording_of(model, scripted(*planted), prompts, stop_ids=stops), tmp_path)
    candidate, again = replayed(recording, model)
    assert report(model, candidate, again, stop_ids=stops) == expected
    assert expected["verdict"] is not None


@pytest.mark.parametrize(
    ("planted", "verdict"),
    [
        ([], "identical"),
        ([Fault((4,), "second choice", 2)], "divergent"),
        ([Fault((4,), "second choice", 2, frozenset({0}))], "nondeterministic"),
        ([Fault((4,), "nan", 1)], "divergent"),
        ([Fault((4,), "crash", 3)], "crashed"),
        ([Fault((4,), "timeout", 0)], "timeout"),
        ([Fault((4,), "second choice", 1), Fault((4,), "crash", 2, frozenset({1}))], "crashed"),
        ([Fault((4,), "other logits", 1)], "identical"),
    ],
    ids=lambda value: None if isinstance(value, str) else "+".join(f"{f.act}@{f.step}" for f in value),
)
def test_each_kind_of_finding_is_found_in_a_trace(
    model: Path, tmp_path: Path, planted: list[Fault], verdict: str
) -> None:
    """So that the property above is about findings: each of them comes out of a file."""
    recording = through_a_file(recording_of(model, scripted(*planted), PROMPTS[1:3]), tmp_path)
    candidate, prompts = replayed(recording, model)
    assert report(model, candidate, prompts)["verdict"] == verdict


@pytest.mark.parametrize("openings", [0, 1])
def test_an_engine_that_does_not_open_is_recorded_as_such(model: Path, tmp_path: Path, openings: int) -> None:
    """At all, or not again after a crash: the same verdicts, the same facts about its end."""
    crash = Fault((4,), "crash", 1)
    expected = report(model, scripted(crash, openings=openings), PROMPTS[1:3])
    recording = through_a_file(
        recording_of(model, scripted(crash, openings=openings), PROMPTS[1:3]), tmp_path
    )
    candidate, prompts = replayed(recording, model)
    found = report(model, candidate, prompts)
    assert found == expected
    assert (found["verdict"], len(found["prompts"])) == ("crashed", 2)


def test_prompts_that_are_alike_have_decodes_of_their_own(model: Path, tmp_path: Path) -> None:
    """The second of two like prompts was decoded otherwise, and that is what is found of it."""
    wrong = Fault((4,), "second choice", 1, frozenset({1, 3}))
    recording = through_a_file(recording_of(model, scripted(wrong)), tmp_path)
    candidate, prompts = replayed(recording, model)
    verdicts = [each["verdict"] for each in report(model, candidate, prompts)["prompts"]]
    assert verdicts == ["identical", "identical", "identical", "divergent"]


def test_everything_recorded_comes_back(model: Path, tmp_path: Path, recorded: Recording) -> None:
    """A reader has what the writer had, and the document has the form of its schema."""
    path = tmp_path / "x.trace"
    write_trace(path, recorded)
    assert read_trace(path) == recorded
    document = json.loads(opened(path)[0]["document"])
    jsonschema.validate(document, SCHEMA)
    assert document["settings_sha256"] == recorded.settings_sha256


def test_states_are_those_of_the_last_call(model: Path, tmp_path: Path, recorded: Recording) -> None:
    """Whole on request; otherwise their hashes alone, which are those of the whole ones."""
    without = recording_of(model, scripted())
    sizes = {}
    for name, recording in (("with", recorded), ("without", without)):
        write_trace(tmp_path / name, recording)
        sizes[name] = (tmp_path / name).stat().st_size
    _, tensors = opened(tmp_path / "with")
    for index, each in enumerate(recorded.prompts):
        fed = len(each.prompt.token_ids) + NEW_TOKENS - 1
        first, again = each.decodes
        key = tensors[f"prompt.{index}.decode.0.output.present.0.key"]
        assert key.shape[2] == fed
        assert set(first.outputs) == {"logits", *DECODER.topology.kv_outputs, "present.1.recurrent_state"}
        for port, output in first.outputs.items():
            assert output.sha256 == tensor_sha256(tensors[f"prompt.{index}.decode.0.output.{port}"])
            assert (output.kept, again.outputs[port].kept) == (True, False)
            assert again.outputs[port].sha256 == output.sha256
            assert without.prompts[index].decodes[0].outputs[port].sha256 == output.sha256
    assert sizes["without"] < sizes["with"]


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16, np.int8, np.bool_]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_states_of_every_element_type_can_be_kept(
    tmp_path: Path, recorded: Recording, dtype: Any, shape: tuple[int, ...]
) -> None:
    """Also those that numpy and the file format have no type for, with no axes, and with no elements."""
    array = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape).astype(dtype)
    output = RecordedTensor(dtype_of_array(array.dtype), shape, tensor_sha256(array), kept=True, array=array)
    prompt = recorded.prompts[0]
    decode = replace(prompt.decodes[0], outputs={"present": output})
    changed = replace(recorded, prompts=(replace(prompt, decodes=(decode, prompt.decodes[1])),))
    write_trace(tmp_path / "x", changed)
    assert read_trace(tmp_path / "x").prompts[0].decodes[0].outputs["present"].sha256 == output.sha256


def test_what_encoders_are_fed_is_in_the_trace_once(tmp_path: Path, recorded: Recording) -> None:
    """So that it can be verified where the inputs are not; alike for all prompts, it stands there once."""
    features = np.arange(600, dtype=np.float32).reshape(1, 20, 30)
    other = features[:, ::2, ::-1]
    prompts = tuple(
        replace(each, prompt=replace(each.prompt, extra={"features": features if i else other}))
        for i, each in enumerate(recorded.prompts)
    )
    write_trace(tmp_path / "x", replace(recorded, prompts=prompts))
    found = [each.prompt.extra["features"] for each in read_trace(tmp_path / "x").prompts]
    for i, array in enumerate(found):
        np.testing.assert_array_equal(array, features if i else other)
    _, tensors = opened(tmp_path / "x")
    assert sum(name.startswith("input.") for name in tensors) == 2


def opened(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Metadata and tensors, by the library alone."""
    with safe_open(path, framework="np") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)


def rewrite(
    path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], *, tensors_too: bool = True
) -> None:
    """Change a trace as someone does who knows its form: every hash is written anew."""
    metadata, tensors = opened(path)
    document = json.loads(metadata["document"])
    change(document, tensors)
    for name, facts in document["tensors"].items() if tensors_too else ():
        if name in tensors:
            facts |= {"sha256": tensor_sha256(tensors[name]), "shape": list(tensors[name].shape)}
    text = json.dumps(document)
    digest = hashlib.sha256(text.encode()).hexdigest()
    save_file(tensors, path, metadata | {"document": text, "document_sha256": digest})


TOKENS = "prompt.1.decode.0.token_ids"


def other_token(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """A token that its own logits did not choose."""
    tensors[TOKENS] = tensors[TOKENS] + np.array([0, 1, 0, 0, 0])


def one_token_less(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """A decode that ends before it was to, with all that belongs to its last token taken away."""
    count = tensors["prompt.1.decode.0.top_counts"][-1]
    for name in ("token_ids", "top_counts", "has_nan"):
        tensors[f"prompt.1.decode.0.{name}"] = tensors[f"prompt.1.decode.0.{name}"][:-1]
    for name in ("top_ids", "top_logits"):
        tensors[f"prompt.1.decode.0.{name}"] = tensors[f"prompt.1.decode.0.{name}"][:-count]


def fewer_tokens(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Logits of more tokens than there are."""
    tensors[TOKENS] = tensors[TOKENS][:-1]


def no_logits(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The tokens alone."""
    del tensors["prompt.1.decode.0.top_logits"], document["tensors"]["prompt.1.decode.0.top_logits"]


def fewer_logits(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Logits of some tokens."""
    tensors["prompt.1.decode.0.top_logits"] = tensors["prompt.1.decode.0.top_logits"][:-1]


def one_decode(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """No second decode of a prompt."""
    del document["prompts"][1]["decodes"][1]


def no_decode(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """A prompt without any."""
    document["prompts"][1]["decodes"] = []


def no_prompts(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """None at all: a check that judged nothing must not pass."""
    document["prompts"] = []


def fewer_kept(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Another number of logits than was asked for."""
    document["top_k"] = 2


def more_tokens_asked(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Settings that are not those of their hash."""
    document["max_new_tokens"] += 1


def odd_option(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """An option whose value is none."""
    document["engine"]["options"] = {"a": [1]}


def no_model(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Nothing about the model."""
    del document["model"]["sha256"]


def text_for_a_number(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """A value of another kind."""
    document["prompts"][0]["prompt_ids"] = ["1"]


def missing_tensor(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """One that the document names."""
    del tensors[TOKENS]


def another_tensor(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """One that the document does not name."""
    tensors["more"] = np.zeros(3)


def tokens_of_floats(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Another element type, said by the document too."""
    tensors[TOKENS] = tensors[TOKENS].astype(np.float64)
    document["tensors"][TOKENS]["dtype"] = "float64"


STEP = "prompt.1.decode.0"


def top(
    ids: Callable[[Any], Any] = lambda ids: ids, logits: Callable[[Any], Any] = lambda logits: logits
) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Other largest logits at the first step of a decode, of which the token is chosen anew."""

    def change(document: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name, made in (("ids", ids), ("logits", logits)):
            whole = tensors[f"{STEP}.top_{name}"].copy()
            whole[:TOP_K] = made(whole[:TOP_K])
            tensors[f"{STEP}.top_{name}"] = whole
        tokens = tensors[TOKENS].copy()
        tokens[0] = tensors[f"{STEP}.top_ids"][0]
        tensors[TOKENS] = tokens

    return change


def odd_flag(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Neither yes nor no."""
    tensors[f"{STEP}.has_nan"] = tensors[f"{STEP}.has_nan"] + np.uint8(2)


STATE = "present.0.key"


def other_state(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """A cache that is not the one whose hash stands beside the tokens."""
    tensors[f"{STEP}.output.{STATE}"] = tensors[f"{STEP}.output.{STATE}"] + 1


def said_of_the_state(**facts: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """A cache of which something else is said than it is."""

    def change(document: dict[str, Any], tensors: dict[str, Any]) -> None:
        document["prompts"][1]["decodes"][0]["outputs"][STATE] |= facts

    return change


def said_of_the_session(**facts: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """A session that is not the one of the engine, or says what none says."""

    def change(document: dict[str, Any], tensors: dict[str, Any]) -> None:
        document["engine"]["session"] |= facts

    return change


def another_dtype(document: dict[str, Any], tensors: dict[str, Any]) -> None:
    """An element type that is none."""
    document["tensors"][TOKENS]["dtype"] = "float65"


EDITS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], None], str]] = {
    "another token": (other_token, "contradicts itself: prompt.1.decode.0 has at step 1 token"),
    "one token less": (one_token_less, "has 4 tokens of prompt 2 where a decode has 5"),
    "fewer tokens": (fewer_tokens, "prompt.1.decode.0 has not the logits of each of its tokens"),
    "no logits": (no_logits, "lacks the tensor 'prompt.1.decode.0.top_logits'"),
    "fewer logits": (fewer_logits, "prompt.1.decode.0 has not the logits of each of its tokens"),
    "one decode": (one_decode, "has one decode of prompt 2"),
    "no decode": (no_decode, "has no decode of prompt 2"),
    "no prompts": (no_prompts, "has no prompt"),
    "fewer logits kept": (fewer_kept, "was changed: its settings"),
    "more tokens asked": (more_tokens_asked, "was changed: its settings"),
    "an option that is none": (odd_option, "holds [1] as engine.options.a"),
    "no model": (no_model, "lacks model.sha256, which a check needs"),
    "a text for a number": (text_for_a_number, "holds '1' as prompts[0].prompt_ids[0]"),
    "a missing tensor": (missing_tensor, f"lacks the tensor '{TOKENS}', which its document names"),
    "another tensor": (another_tensor, "it has a tensor 'more' that nobody wrote"),
    "tokens of floats": (tokens_of_floats, "in a form other than a list of int64"),
    "an element type that is none": (another_dtype, "holds 'float65'"),
    "logits in the other order": (top(logits=lambda x: x[::-1]), "the largest logit comes first"),
    "logits and IDs in the other order": (
        top(ids=lambda x: x[::-1], logits=lambda x: x[::-1]),
        "the largest logit comes first",
    ),
    "one logit out of order": (top(logits=lambda x: x[[0, 1, 3, 2, 4]]), "the largest logit comes first"),
    "equal logits by falling ID": (
        top(ids=lambda x: np.sort(x)[::-1], logits=np.zeros_like),
        "of equal ones the lowest ID",
    ),
    "a NaN that nobody flags": (
        top(logits=lambda x: [*x[:4], np.nan]),
        f"{STEP} has at step 0 a logit that is NaN",
    ),
    "NaN in front": (top(logits=lambda x: [np.nan, *x[1:]]), f"{STEP} has at step 0 a logit that is NaN"),
    "the same ID twice": (
        top(ids=lambda x: x[[0, 1, 2, 3, 0]]),
        f"{STEP} has at step 0 a token ID twice among",
    ),
    "an ID below zero": (top(ids=lambda x: [*x[:4], -1]), f"{STEP} has at step 0 token ID -1"),
    "an ID beyond the vocabulary": (top(ids=lambda x: [*x[:4], 11]), "has token ID 11 at step 0 of prompt 2"),
    "an ID far beyond it": (top(ids=lambda x: [1 << 62, *x[1:]]), f"has token ID {1 << 62} at step 0"),
    "a flag that is none": (odd_flag, f"{STEP} has at step 0 2 as has_nan"),
    "another state": (
        other_state,
        f"the tensor '{STEP}.output.{STATE}' has not the sha256 that is said of it",
    ),
    "a state of another shape": (said_of_the_state(shape=[1]), f"'{STEP}.output.{STATE}' has not the shape"),
    "a state of another type": (
        said_of_the_state(dtype="float16"),
        f"'{STEP}.output.{STATE}' has not the dtype",
    ),
    "a state that is another port's": (
        said_of_the_state(tensor=f"{STEP}.output.logits"),
        f"lacks the tensor '{STEP}.output.{STATE}'",
    ),
    "a session of another engine": (
        said_of_the_session(engine="oracle"),
        "its session says that it is 'oracle'",
    ),
    "a mode that is none": (said_of_the_session(mode="fancy"), "holds 'fancy' as engine.session.mode"),
    "providers that are none": (
        said_of_the_session(placement={"providers": 5}),
        "engine.session.placement.providers",
    ),
    "nodes that are no number": (
        said_of_the_session(placement={"providers": {"X": {"MatMul": "all"}}}),
        "holds 'all' as engine.session.placement.providers.X.MatMul",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_trace_that_was_edited_is_refused_by_name(tmp_path: Path, recorded: Recording, name: str) -> None:
    """Also by someone who wrote every hash anew: what is missing or contradicts itself is named."""
    change, named = EDITS[name]
    path = tmp_path / "x.trace"
    write_trace(path, recorded)
    rewrite(path, lambda document, tensors: None)
    require_complete(read_trace(path), top_k=TOP_K, vocabulary=VOCABULARY)
    rewrite(path, change)
    with pytest.raises(InputError) as caught:
        require_complete(read_trace(path), top_k=TOP_K, vocabulary=VOCABULARY)
    assert named in caught.value.message


@pytest.mark.parametrize(
    ("asked", "vocabulary", "due"),
    [(TOP_K + 1, VOCABULARY, TOP_K + 1), (1 << 60, VOCABULARY, VOCABULARY), (TOP_K - 1, None, TOP_K - 1)],
)
def test_each_step_has_the_logits_that_are_due(
    recorded: Recording, asked: int, vocabulary: int | None, due: int
) -> None:
    """As many as were asked for, or as the vocabulary has: anything else is another reduction."""
    require_complete(recorded, top_k=TOP_K, vocabulary=vocabulary)
    with pytest.raises(InputError, match=f"has {TOP_K} logits at step 0 of prompt 1, where {due} are due"):
        require_complete(replace(recorded, top_k=asked), top_k=min(asked, TOP_K), vocabulary=vocabulary)


CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


@pytest.mark.parametrize(
    ("engine", "options", "providers", "named"),
    [
        ("ort-cuda", {}, {CPU: {"MatMul": 3}}, "nodes ran elsewhere: 3 MatMul on CPUExecutionProvider"),
        ("ort-cuda", {}, {CUDA: {"MatMul": 2}, CPU: {"MatMul": 1}}, "nodes ran elsewhere: 1 MatMul"),
        ("ort-cuda", {}, {CUDA: {}}, "no node ran there"),
        ("ort-cuda", {}, {}, "no node ran there"),
        ("ort-cuda", {}, None, "no node ran there"),
        ("ort-cpu", {"provider": "Other"}, {CPU: {"MatMul": 3}}, "Other was asked for"),
        ("ort-cuda", {}, {CUDA: {"MatMul": 2}, CPU: {"Shape": 1}}, ""),
        ("ort-cpu", {"provider": "Other"}, {"Other": {"MatMul": 3}}, ""),
        ("ort-cpu", {"provider": ""}, {CPU: {"MatMul": 3}}, ""),
    ],
)
def test_where_nodes_ran_is_judged_as_a_check_does(
    model: Path,
    tmp_path: Path,
    recorded: Recording,
    engine: str,
    options: dict[str, str],
    providers: dict[str, dict[str, int]] | None,
    named: str,
) -> None:
    """A trace of an engine on a device whose nodes were on the CPU is an invalid run, whatever its tokens."""
    path = tmp_path / "x.trace"
    placement = None if providers is None else {"providers": providers}
    info = replace(recorded.engine.info or SessionInfo("", ""), engine=engine, placement=placement)
    write_trace(
        path, replace(recorded, engine=replace(recorded.engine, name=engine, options=options, info=info))
    )
    candidate, prompts = replayed(read_trace(path), model)
    found = report(model, candidate, prompts)
    if named:
        assert (found["verdict"], found["exit_code"]) == ("invalid-run", 6)
        assert named in found["error"]["message"]
    else:
        assert (found["verdict"], found["exit_code"]) == ("identical", 0)


@pytest.mark.parametrize("seconds", [0.0, 5e-324, 1e-300, 1e308])
def test_a_decode_of_any_time_has_a_report(
    model: Path, tmp_path: Path, recorded: Recording, seconds: float
) -> None:
    """A rate that no number holds is none, as JSON has no infinity."""
    path = tmp_path / "x.trace"
    write_trace(path, recorded)

    def put(document: dict[str, Any], tensors: dict[str, Any]) -> None:
        for prompt in document["prompts"]:
            for decode in prompt["decodes"]:
                decode["seconds"] = seconds

    rewrite(path, put)
    candidate, prompts = replayed(read_trace(path), model)
    document = ParityDocument()
    run_check(plan_of(model, candidate, prompts), document)
    found = document.mapping()
    jsonschema.validate(json.loads(json.dumps(found, allow_nan=False)), PARITY)
    rates = [prompt["timing"]["candidate_tokens_per_s"] for prompt in found["prompts"]]
    assert all(rate is None or 0 < rate < float("inf") for rate in rates)
    assert len(rates) == len(PROMPTS)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where each value of a document stands, those of values within values too."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, each in inner for place in places(each, (*at, key)))]


ODD = (None, True, -1, 3, 10**30, 0.5, float("inf"), float("nan"), "", "x", [], [[1]], {}, {"x": {}})


@settings(
    max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_value_in_the_place_of_another_is_refused_or_judged(
    model: Path, tmp_path: Path, recorded: Recording, data: st.DataObject
) -> None:
    """Never an error that is not ours, whoever wrote the document: what can be read gives a valid report."""
    path = tmp_path / "x.trace"
    write_trace(path, recorded)
    place = data.draw(st.sampled_from(places(json.loads(opened(path)[0]["document"]))[1:]))
    odd = data.draw(st.sampled_from(ODD))

    def put(document: dict[str, Any], tensors: dict[str, Any]) -> None:
        within = document
        for key in place[:-1]:
            within = within[key]
        within[place[-1]] = odd

    rewrite(path, put, tensors_too=False)
    try:
        candidate, prompts = replayed(read_trace(path), model)
    except InputError:
        return
    json.dumps(report(model, candidate, prompts), allow_nan=False)


def test_fewer_logits_than_a_report_shows_are_refused(recorded: Recording) -> None:
    """A version that keeps fewer, or needs more."""
    with pytest.raises(InputError, match="keeps 5 logits a step, and a check needs 6"):
        require_complete(recorded, top_k=6)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sha256": "1" * 64}, "of another model than tiny"),
        ({"topology_sha256": "1" * 64}, "another topology"),
    ],
)
def test_a_trace_of_another_model_is_refused_by_name(
    recorded: Recording, changes: dict[str, str], named: str
) -> None:
    """Of other weights, or of the same ones read in another way."""
    same = {"sha256": "0" * 64, "topology_sha256": topology_sha256(DECODER.topology)}
    require_same_model(recorded, **same, package="tiny")
    with pytest.raises(InputError) as caught:
        require_same_model(recorded, **(same | changes), package="tiny")
    assert named in caught.value.message
    assert "0" * 12 in caught.value.message or same["topology_sha256"][:12] in caught.value.message


def test_the_hash_of_a_topology_is_over_all_that_steers_a_decode() -> None:
    """Another role, pair, cache or fact changes it; another reason for the same does not."""
    from harness.topology.spec import GraphFacts, PortRole, Role

    topology = DECODER.topology
    role = PortRole("x", "input", Role.OPTIONAL, "because")
    known = {
        topology_sha256(each)
        for each in (
            topology,
            replace(topology, kv_inputs=topology.kv_inputs[::-1]),
            replace(topology, static_cache={"write_index": "i"}),
            replace(topology, facts=GraphFacts(windows={"a": 4})),
            replace(topology, facts=GraphFacts(last_token_indices=frozenset({"a"}))),
            replace(topology, state_pairs=()),
            replace(topology, roles=(role,)),
        )
    }
    assert len(known) == 7
    assert topology_sha256(replace(topology, roles=(replace(role, because="else"),))) in known


@settings(
    max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_one_flipped_bit_anywhere_is_found(tmp_path: Path, recorded: Recording, data: st.DataObject) -> None:
    """In the length, the header, the document or a tensor: one of our errors, and never another outcome."""
    path = tmp_path / "x.trace"
    if not path.exists():
        write_trace(tmp_path / "whole.trace", recorded)
    whole = (tmp_path / "whole.trace").read_bytes()
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    spoilt = bytearray(whole)
    spoilt[bit // 8] ^= 1 << bit % 8
    path.write_bytes(spoilt)
    with pytest.raises(InputError, match=r"x\.trace: the trace "):
        read_trace(path)


@settings(
    max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_truncated_trace_is_found(tmp_path: Path, recorded: Recording, data: st.DataObject) -> None:
    """However much is missing at its end, and also where something follows it."""
    whole_path = tmp_path / "whole.trace"
    if not whole_path.exists():
        write_trace(whole_path, recorded)
    whole = whole_path.read_bytes()
    path = tmp_path / "x.trace"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(InputError, match="is damaged, or no trace"):
        read_trace(path)
    path.write_bytes(whole + data.draw(st.binary(min_size=1, max_size=9)))
    with pytest.raises(InputError, match="is damaged, or no trace"):
        read_trace(path)


def version(text: str) -> Callable[[Path], None]:
    """A trace whose format is another one."""

    def write(path: Path) -> None:
        metadata, tensors = opened(path)
        save_file(tensors, path, metadata | {"format": text})

    return write


def claim(length: int) -> Callable[[Path], None]:
    """A file that says that its header has so many bytes."""

    def write(path: Path) -> None:
        path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])

    return write


def content(found: bytes) -> Callable[[Path], None]:
    """A file of these bytes."""

    def write(path: Path) -> None:
        path.write_bytes(found)

    return write


def nested(path: Path) -> None:
    """A document of lists in lists, deeper than any reader goes."""
    text = "[" * 100_000
    digest = hashlib.sha256(text.encode()).hexdigest()
    save_file({}, path, {"format": "onnx-parity/trace/1", "document": text, "document_sha256": digest})


def no_trace(path: Path) -> None:
    """A safetensors file of somebody else."""
    save_file({"weight": np.zeros(3)}, path)


def device(path: Path) -> None:
    """A device that never ends."""
    path.unlink()
    path.symlink_to("/dev/zero")


def fifo(path: Path) -> None:
    """A pipe that nobody writes to."""
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    """A folder."""
    path.unlink()
    path.mkdir()


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "of a newer version": (version("onnx-parity/trace/2"), "has format 2, of a newer onnx-parity"),
    "of a far newer version": (version("onnx-parity/trace/" + "9" * 999), "of a newer onnx-parity"),
    "of no version": (version("onnx-parity/trace/0"), "has format 0, of another onnx-parity"),
    "of a version that is none": (version("onnx-parity/trace/one"), "another kind of safetensors file"),
    "of another kind": (version("onnx-parity/golden/1"), "another kind of safetensors file"),
    "of somebody else": (no_trace, "another kind of safetensors file"),
    "empty": (content(b""), "is damaged, or no trace"),
    "prose": (content(b"this is no trace" * 99), "is damaged, or no trace"),
    "a header of 2**63 bytes": (claim(2**63), "is damaged, or no trace"),
    "a header of 2**64 - 1 bytes": (claim(2**64 - 1), "is damaged, or no trace"),
    "a header of 99 MB": (claim(99_000_000), "is damaged, or no trace"),
    "a header of no bytes": (claim(0), "is damaged, or no trace"),
    "a header longer than the file": (claim(1_000_000), "is damaged, or no trace"),
    "lists in lists": (nested, "has a document that is no JSON"),
    "missing": (Path.unlink, "does not exist"),
    "a folder": (folder, "is no regular file"),
    "a device": (device, "is no regular file"),
    "a pipe": (fifo, "is no regular file"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path, recorded: Recording, name: str) -> None:
    """One sentence that names the file and says what it is."""
    write, named = FILES[name]
    if name in ("a device", "a pipe") and not hasattr(os, "mkfifo"):
        pytest.skip("needs a system with devices and pipes in its file system")
    path = tmp_path / "x.trace"
    write_trace(path, recorded)
    write(path)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert str(path) in caught.value.message
    assert named in caught.value.message


def test_a_trace_is_replaced_whole_or_not_at_all(
    tmp_path: Path, recorded: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while it is written, or a full disk: the old one stays, and no draft."""
    import safetensors.numpy

    path = tmp_path / "x.trace"
    write_trace(path, recorded)
    before = path.read_bytes()

    def interrupted(tensors: Any, file: Path, metadata: Any) -> None:
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.numpy, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_trace(path, recorded)

    def full(tensors: Any, file: Path, metadata: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(InputError, match="cannot be written: No space left on device"):
        write_trace(path, recorded)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["x.trace"]
