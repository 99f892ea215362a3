"""Which graphs a package has: by its sidecars, and by the names of its files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.errors import InputError, NotDrivableError
from harness.package import Component, Components, open_package


def package(folder: Path, files: list[str], **sidecars: Any) -> Components:
    """The components of a folder with these (empty) graphs and these sidecars, keyed by their stem."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    names = {"genai": "genai_config.json", "metadata": "inference_metadata.yaml"}
    for key, content in sidecars.items():
        (folder / names[key]).write_text(json.dumps(content), encoding="utf-8")
    return open_package(folder).components


def named(folder: Path, components: Components) -> tuple[dict[str, str], dict[str, str]]:
    """Decoder and others, as name to path in the package."""
    decoder, others = (
        {part.name: part.graph.relative_to(folder).as_posix() for part in parts}
        for parts in (components.decoder, components.others)
    )
    return decoder, others


@pytest.mark.parametrize(
    ("files", "decoder", "others"),
    [
        (["anything.onnx"], {"anything": "anything.onnx"}, {}),
        (["model.onnx", "more.onnx"], {"model": "model.onnx"}, {}),
        (["model.onnx", "model_fp16.onnx", "model_quantized.onnx"], {"model": "model.onnx"}, {}),
        (["model.onnx", "onnx/model_fp16.onnx", "onnx/embed_tokens.onnx"], {"model": "model.onnx"}, {}),
        (["model.onnx", "onnx/decoder/model.onnx"], {"model": "model.onnx"}, {}),
        (["anything.onnx", "onnx/model.onnx"], {"onnx/model": "onnx/model.onnx"}, {}),
        (["decoder.onnx", "vision/model.onnx"], {"decoder": "decoder.onnx"}, {}),
        (
            ["decoder_model_merged.onnx", "decoder_model_merged_q4.onnx", "encoder_model.onnx"],
            {"decoder_model_merged": "decoder_model_merged.onnx"},
            {"encoder_model": "encoder_model.onnx"},
        ),
        (["decoder_with_past_model.onnx"], {"decoder_with_past_model": "decoder_with_past_model.onnx"}, {}),
        (
            [
                "encoder_model.onnx",
                "decoder_model_merged.onnx",
                "decoder_model.onnx",
                "decoder_with_past_model.onnx",
            ],
            {"decoder_model_merged": "decoder_model_merged.onnx"},
            {"encoder_model": "encoder_model.onnx"},
        ),
        (
            ["encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"],
            {
                "decoder_model": "decoder_model.onnx",
                "decoder_with_past_model": "decoder_with_past_model.onnx",
            },
            {"encoder_model": "encoder_model.onnx"},
        ),
        (
            ["onnx/embed_tokens.onnx", "onnx/decoder_model_merged.onnx", "onnx/vision_encoder.onnx"],
            {"decoder_model_merged": "onnx/decoder_model_merged.onnx"},
            {"embed_tokens": "onnx/embed_tokens.onnx", "vision_encoder": "onnx/vision_encoder.onnx"},
        ),
        (
            ["vision/model.onnx", "embedding/model.onnx", "model/model.onnx"],
            {"model": "model/model.onnx"},
            {"embedding": "embedding/model.onnx", "vision": "vision/model.onnx"},
        ),
    ],
)
def test_names_of_files_and_folders(
    tmp_path: Path, files: list[str], decoder: dict[str, str], others: dict[str, str]
) -> None:
    """The names that exporters give: a graph alone, the merged one before the pair, a folder a component."""
    assert named(tmp_path, package(tmp_path, files)) == (decoder, others)


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["model.onnx", "decoder.onnx"], "2 decoders, decoder, model, among"),
        (["model.onnx", "decoder_model_merged.onnx"], "2 decoders, decoder_model_merged, model, among"),
        (["model.onnx", "decoder/model.onnx"], "2 decoders, model, decoder/model, among"),
        (["onnx/model.onnx", "onnx/decoder/model.onnx"], "2 decoders, model, decoder/model, among"),
        (["decoder.onnx", "language_model.onnx"], "2 decoders, decoder, language_model, among"),
        (
            ["model.onnx", "onnx/model.onnx"],
            "2 decoders, model, onnx/model, among model.onnx, onnx/model.onnx",
        ),
        (["decoder.onnx", "onnx/model.onnx"], "2 decoders, decoder, onnx/model, among"),
        (
            ["decoder_model_merged.onnx", "onnx/decoder_model_merged.onnx"],
            "2 decoders, decoder_model_merged, onnx/decoder_model_merged, among",
        ),
        (
            ["model.onnx", "onnx/decoder_model.onnx", "onnx/decoder_with_past_model.onnx"],
            "3 decoders, model, onnx/decoder_model, onnx/decoder_with_past_model, among",
        ),
        (["model.onnx", "onnx/model_q4.onnx", "onnx/decoder/model.onnx"], "model, onnx/decoder/model, among"),
        (
            ["model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"],
            "3 decoders, decoder_model, decoder_with_past_model, model, among",
        ),
    ],
)
def test_of_several_decoders_none_is_chosen_unless_a_sidecar_says_which(
    tmp_path: Path, files: list[str], names: str
) -> None:
    """All that could be meant are named; a declaration settles it."""
    with pytest.raises(InputError, match=re.escape(names)):
        package(tmp_path, files)

    config = {"model": {"decoder": {"filename": files[0]}}}
    assert named(tmp_path, package(tmp_path, files, genai=config))[0] == {"decoder": files[0]}


def test_a_pair_without_its_first_call_is_refused(tmp_path: Path) -> None:
    """The graph for later calls would be fed made-up caches; named itself, it is what was asked for."""
    files = ["encoder_model.onnx", "decoder_with_past_model.onnx"]

    with pytest.raises(InputError, match=r"decoder_model\.onnx is missing, .* decoder_with_past_model\.onnx"):
        package(tmp_path, files)

    (alone,) = open_package(tmp_path / "decoder_with_past_model.onnx").components.decoder
    assert (alone.name, alone.on_prompt) == ("decoder_with_past_model", True)


@pytest.mark.parametrize(
    ("names", "beside"),
    [(("a", "a"), "vision"), (("a", "b", "a"), "vision"), (("embedding", "b"), "embedding")],
)
def test_two_parts_of_one_name_are_refused(tmp_path: Path, names: tuple[str, ...], beside: str) -> None:
    """Parts of a pipeline, or a part and another graph: by its name is known what a part gives."""
    stages = [{name: {"filename": "a.onnx"}} for name in names]
    config = {"model": {"decoder": {"pipeline": stages}, beside: {"filename": "a.onnx"}}}

    with pytest.raises(InputError, match=f"two graphs of the name '{names[0]}'"):
        package(tmp_path, ["a.onnx"], genai=config)


def twice_in_parts(file: str) -> dict[str, Any]:
    """Two parts of a decoder."""
    stages = [{"a": {"filename": "a.onnx"}}, {"b": {"filename": "b.onnx"}}, {"c": {"filename": file}}]
    return {"genai": {"model": {"decoder": {"pipeline": stages}}}}


def twice_beside_the_decoder(file: str) -> dict[str, Any]:
    """A decoder, and an encoder that is said to be the same."""
    return {"genai": {"model": {"decoder": {"filename": "a.onnx"}, "encoder": {"filename": file}}}}


def twice_in_sessions(file: str) -> dict[str, Any]:
    """Two sessions."""
    sessions = {"decoder": {"file": "a.onnx"}, "embedding": {"file": file}}
    return {"genai": {"version": 2, "pipeline": {"sessions": sessions}}}


def twice_in_models(file: str) -> dict[str, Any]:
    """Two models of the older metadata."""
    models = {"a": {"filename": "a.onnx", "type": "decoder"}, "b": {"filename": file, "type": "encoder"}}
    return {"metadata": {"pipeline": {"models": models}}}


def twice_in_a_workflow(file: str) -> dict[str, Any]:
    """Two components of the newer metadata."""
    roles = {"t": "token_ids", "l": "logits"}
    components = {
        "a": {"implementation": {"artifact": "a.onnx"}, "ports": {"roles": roles}},
        "b": {"implementation": {"artifact": file}},
    }
    return {"metadata": {"pipeline": {"workflow": {"components": components, "steps": []}}}}


TWICE = [twice_in_parts, twice_beside_the_decoder, twice_in_sessions, twice_in_models, twice_in_a_workflow]


@pytest.mark.parametrize("listed", TWICE)
@pytest.mark.parametrize("spelt", ["a.onnx", "./a.onnx", "sub/../a.onnx", "link.onnx"])
def test_a_graph_that_is_listed_twice_is_refused(
    tmp_path: Path, listed: Callable[[str], dict[str, Any]], spelt: str
) -> None:
    """In whatever sidecar, and however it is spelt; another graph in its place is none of that."""
    files = ["a.onnx", "b.onnx", "d.onnx", "sub/x.txt"]
    if spelt == "link.onnx":
        (tmp_path / spelt).symlink_to("a.onnx")

    with pytest.raises(InputError, match=r"(json|yaml) lists \S+ twice, as '\w+' and as '\w+', both at"):
        package(tmp_path, files, **listed(spelt))

    assert package(tmp_path, files, **listed("d.onnx"))


def test_one_graph_may_be_listed_for_the_prompt_and_again_for_what_follows(tmp_path: Path) -> None:
    """No call runs it twice: each listing may have settings of its own."""
    stages = {
        "first": {"filename": "a.onnx", "run_on_token_gen": False},
        "later": {"filename": "a.onnx", "run_on_prompt": False},
    }
    config = {"model": {"decoder": {"pipeline": [stages]}}}

    parts = package(tmp_path, ["a.onnx"], genai=config).decoder

    assert [(part.graph.name, part.on_prompt, part.on_steps) for part in parts] == [
        ("a.onnx", True, False),
        ("a.onnx", False, True),
    ]


OF_ANOTHER_FORM: dict[str, tuple[dict[str, Any], str]] = {
    "a pipeline that is a string": (
        {"decoder": {"pipeline": "a.onnx"}},
        "model.decoder.pipeline is 'a.onnx'",
    ),
    "a pipeline that is a mapping": (
        {"decoder": {"pipeline": {"a": {"filename": "a.onnx"}}}},
        "model.decoder.pipeline is {'a': {",
    ),
    "a list of files": (
        {"decoder": {"pipeline": ["a.onnx", "b.onnx"]}},
        "model.decoder.pipeline[0] is 'a.onnx'",
    ),
    "a flat list of parts": (
        {"decoder": {"pipeline": [{"filename": "a.onnx"}, {"filename": "b.onnx"}]}},
        "model.decoder.pipeline[0].filename is 'a.onnx'",
    ),
    "parts that are files": (
        {"decoder": {"pipeline": [{"a": {"filename": "a.onnx"}}, {"b": "b.onnx"}]}},
        "model.decoder.pipeline[1].b is 'b.onnx'",
    ),
    "a call that is a word": (
        {"decoder": {"pipeline": [{"a": {"filename": "a.onnx", "run_on_prompt": "false"}}]}},
        "model.decoder.pipeline.a.run_on_prompt is 'false'; true or false is due",
    ),
    "names that are none": (
        {"decoder": {"pipeline": [{"a": {"filename": "a.onnx", "output_names_forwarder": ["x"]}}]}},
        "output_names_forwarder is ['x']; a mapping is due",
    ),
    "a decoder that is a file": ({"decoder": "a.onnx"}, "model.decoder is 'a.onnx'; a mapping is due"),
    "an encoder that is a file": (
        {"decoder": {"filename": "a.onnx"}, "encoder": "b.onnx"},
        "model.encoder is 'b.onnx'; a mapping is due",
    ),
}


@pytest.mark.parametrize("name", OF_ANOTHER_FORM)
def test_a_section_of_another_form_is_refused_and_not_passed_over(tmp_path: Path, name: str) -> None:
    """What it means to say would be dropped, and another graph decoded than the one that is meant."""
    model, says = OF_ANOTHER_FORM[name]

    with pytest.raises(InputError) as caught:
        package(tmp_path, ["a.onnx", "b.onnx", "model.onnx"], genai={"model": model})
    assert f"{tmp_path / 'genai_config.json'}: {says}" in caught.value.message


@pytest.mark.parametrize("sessions", ["a.onnx", ["a.onnx"], {"decoder": "a.onnx"}])
def test_sessions_of_another_form_are_refused(tmp_path: Path, sessions: Any) -> None:
    """The same of version 2."""
    config = {"version": 2, "pipeline": {"sessions": sessions}}
    with pytest.raises(InputError, match=r"genai_config\.json: pipeline\.sessions.* a mapping is due"):
        package(tmp_path, ["a.onnx", "model.onnx"], genai=config)


def test_a_pair_takes_turns(tmp_path: Path) -> None:
    """The graph without past runs at the first call alone, the other one at all others."""
    first, later = package(tmp_path, ["decoder_model.onnx", "decoder_with_past_model.onnx"]).decoder

    assert (first.name, first.on_prompt, first.on_steps) == ("decoder_model", True, False)
    assert (later.name, later.on_prompt, later.on_steps) == ("decoder_with_past_model", False, True)


def test_parts_of_a_pipeline_run_when_and_under_the_names_they_say(tmp_path: Path) -> None:
    """`run_on_prompt`, `run_on_token_gen`, `output_names_forwarder`, in any grouping of the list."""
    stages = [
        {"a": {"filename": "a.onnx", "run_on_token_gen": False, "output_names_forwarder": {"x": "y"}}},
        {"b": {"filename": "b.onnx", "run_on_prompt": False}, "c": {"filename": "c.onnx"}},
    ]
    config = {"model": {"decoder": {"pipeline": stages}}}

    parts = package(tmp_path, ["a.onnx", "b.onnx", "c.onnx"], genai=config).decoder

    assert [(part.name, part.on_prompt, part.on_steps) for part in parts] == [
        ("a", True, False),
        ("b", False, True),
        ("c", True, True),
    ]
    assert parts[0].names_of("x") == ("x", "y")


def test_an_output_is_known_under_the_names_that_others_give_it() -> None:
    """Its own first; a template renames every layer, and nothing that only looks like one."""
    component = Component(
        "e", Path("e.onnx"), (("present_key_cross_%d", "past_key_cross_%d"), ("h", "states"))
    )

    assert component.names_of("present_key_cross_12") == ("present_key_cross_12", "past_key_cross_12")
    assert component.names_of("h") == ("h", "states")
    for other in ("present_key_cross_", "present_key_cross_1x", "xpresent_key_cross_1", "hh"):
        assert component.names_of(other) == (other,)


def test_what_the_decoder_calls_the_outputs_of_others(tmp_path: Path) -> None:
    """Names of genai_config.json on both sides; where the decoder gives none, the usual one."""
    config = {
        "model": {
            "decoder": {
                "filename": "d.onnx",
                "inputs": {"cross_past_key_names": "pkc_%d", "inputs_embeds": "e"},
            },
            "encoder": {
                "filename": "enc.onnx",
                "outputs": {"hidden_states": "h", "cross_present_key_names": "ckc_%d"},
            },
            "embedding": {"filename": "emb.onnx", "outputs": {"embeddings": "rows"}},
        }
    }

    others = {part.name: part for part in package(tmp_path, ["d.onnx"], genai=config).others}

    assert others["encoder"].names_of("h") == ("h", "encoder_hidden_states")
    assert others["encoder"].names_of("ckc_0") == ("ckc_0", "pkc_0")
    assert others["embedding"].names_of("rows") == ("rows", "e")


def test_what_is_not_needed_need_not_be_there(tmp_path: Path) -> None:
    """Others may be missing until a decoder needs them; a graph outside the package is refused at once."""
    config: dict[str, Any] = {"model": {"decoder": {"filename": "d.onnx"}, "vision": {"filename": "v.onnx"}}}
    assert [part.name for part in package(tmp_path, ["d.onnx"], genai=config).others] == ["vision"]

    config["model"]["vision"]["filename"] = "../v.onnx"
    with pytest.raises(InputError, match=r"model\.vision\.filename is '\.\./v\.onnx', which lies outside"):
        package(tmp_path, [], genai=config)


def test_a_strategy_says_which_of_two_decoders_is_meant(tmp_path: Path) -> None:
    """Metadata may describe more graphs of type decoder than the pipeline decodes with."""
    models = {name: {"filename": f"{name}.onnx", "type": "decoder"} for name in ("talker", "thinker")}
    pipeline = {"models": models, "strategy": {"kind": "autoregressive", "decoder": "thinker"}}

    found = package(tmp_path, ["talker.onnx", "thinker.onnx"], metadata={"pipeline": pipeline})

    assert named(tmp_path, found) == ({"thinker": "thinker.onnx"}, {"talker": "talker.onnx"})


def test_a_workflow_names_what_steps_hand_on(tmp_path: Path) -> None:
    """However deep the invocations stand; only what one component gives another has two names."""
    steps = [
        {
            "kind": "loop",
            "steps": [
                {
                    "kind": "invoke",
                    "component": "encoder",
                    "inputs": {"x": "request"},
                    "outputs": {"y": "value"},
                },
                {
                    "kind": "branch",
                    "then": {"kind": "invoke", "component": "decoder", "inputs": {"z": "value"}},
                },
            ],
        }
    ]
    components = {
        "encoder": {"implementation": {"artifact": "enc.onnx"}},
        "sampler": {"implementation": {"artifact": "sampler.json"}},
        "decoder": {
            "implementation": {"artifact": "dec.onnx"},
            "ports": {"roles": {"t": "token_ids", "l": "logits"}},
        },
    }
    metadata = {"pipeline": {"workflow": {"components": components, "steps": steps}}}

    found = package(tmp_path, ["enc.onnx", "dec.onnx"], metadata=metadata)

    assert named(tmp_path, found) == ({"decoder": "dec.onnx"}, {"encoder": "enc.onnx"})
    assert found.others[0].names_of("y") == ("y", "z")


@pytest.mark.parametrize("word", ["speculative", "diffusion"])
def test_workflows_of_other_kinds_are_refused_by_name(tmp_path: Path, word: str) -> None:
    """By the contract of the component that gives the kind away."""
    components = {"policy": {"contract": {"id": f"onnx-genai.{word}-step"}}}

    with pytest.raises(NotDrivableError, match=rf"a workflow of {word} ?(decoding)? \(policy: "):
        package(tmp_path, ["model.onnx"], metadata={"pipeline": {"workflow": {"components": components}}})
