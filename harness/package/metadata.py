"""The graphs that an `inference_metadata.yaml` names, in either form of its `pipeline`.

The older form has `models`, the `dataflow` between them, and a `strategy`; the newer one a `workflow` of
`components` with `steps` that invoke them. Keys are those of the published schema (onnx-genai).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from harness.errors import InputError
from harness.package.components import (
    Component,
    Components,
    mapping_at,
    named_graph,
    refuse_doubled,
    undrivable,
)

__all__ = ["metadata_components"]

_FILE = "inference_metadata.yaml"
_GRAPH = ".onnx"
_TOKENWISE = frozenset({"autoregressive", "composite", "single_pass"})
_SEQUENCE_ROLES = frozenset({"token_ids", "inputs_embeds"})
_CHECK_ALONE = "Name the .onnx file of a decoder to check it alone."


def metadata_components(folder: Path, metadata: Mapping[str, Any]) -> Components | None:
    """The graphs that the metadata names; None where it names no decoder that is a file here.

    Raises:
        InputError: the decoder is missing, a name is no name of a file in the package, one graph is listed
            twice, or there are several decoders.
        NotDrivableError: the pipeline is no decode token after token, such as diffusion.
    """
    pipeline = mapping_at(metadata, "pipeline")
    models = mapping_at(pipeline, "models")
    if models:
        return _of_models(folder, pipeline, models)
    workflow = mapping_at(pipeline, "workflow")
    return _of_workflow(folder, workflow) if mapping_at(workflow, "components") else None


def _of_models(folder: Path, pipeline: Mapping[str, Any], models: Mapping[str, Any]) -> Components | None:
    strategies = list(_strategies(pipeline.get("strategy")))
    kinds = [str(strategy["kind"]) for strategy in strategies if "kind" in strategy]
    other = next((kind for kind in kinds if kind not in _TOKENWISE), None)
    if other is not None:
        raise undrivable(
            folder,
            f"a pipeline of the kind {other}, and not a decode token after token",
            instead=_CHECK_ALONE,
        )
    decoders = list(dict.fromkeys(str(s["decoder"]) for s in strategies if isinstance(s.get("decoder"), str)))
    if not decoders:
        decoders = [name for name in models if mapping_at(models, name).get("type") == "decoder"]
    if not decoders:
        return None
    files = {str(name): mapping_at(models, name).get("filename") for name in models}
    decoder = _single(folder, decoders, files, "pipeline.models")
    links: dict[str, list[tuple[str, str]]] = {}
    flow = pipeline.get("dataflow")
    for edge in flow if isinstance(flow, list) else ():
        source, target = (str(mapping_at({"edge": edge}, "edge").get(end, "")) for end in ("from", "to"))
        (component, _, output), (_, _, taken) = source.partition("."), target.partition(".")
        links.setdefault(component, []).append((output, taken))
    return _components(folder, files, decoder, links, place="pipeline.models.{}.filename")


def _of_workflow(folder: Path, workflow: Mapping[str, Any]) -> Components | None:
    components = mapping_at(workflow, "components")
    _refuse_other_workflows(folder, components)
    files = {str(n): mapping_at(components, n, "implementation").get("artifact") for n in components}
    decoders = [str(name) for name in components if _is_decoder(mapping_at(components, name))]
    if not decoders:
        return None
    decoder = _single(folder, decoders, files, "pipeline.workflow.components")
    produced: dict[str, tuple[str, str]] = {}
    links: dict[str, list[tuple[str, str]]] = {}
    calls = list(_invocations(workflow.get("steps")))
    for call in calls:
        for output, value in mapping_at(call, "outputs").items():
            produced.setdefault(str(value), (str(call.get("component")), str(output)))
    for call in calls:
        for taken, value in mapping_at(call, "inputs").items():
            if str(value) in produced:
                component, output = produced[str(value)]
                links.setdefault(component, []).append((output, str(taken)))
    place = "pipeline.workflow.components.{}.implementation.artifact"
    return _components(folder, files, decoder, links, place=place)


def _components(
    folder: Path,
    files: Mapping[str, object],
    decoder: str,
    links: Mapping[str, list[tuple[str, str]]],
    *,
    place: str,
) -> Components | None:
    def component(name: str, *, must_exist: bool) -> Component:
        key = f"{_FILE}: {place.format(name)}"
        graph = _found(folder, files[name])
        if graph is None:
            graph = named_graph(folder, files[name], place=key, must_exist=must_exist)
        return Component(name, graph, tuple(dict.fromkeys(links.get(name, ()))))

    if files.get(decoder) is None:
        return None
    found = Components(
        (component(decoder, must_exist=True),),
        tuple(
            component(name, must_exist=False)
            for name, file in files.items()
            if name != decoder and isinstance(file, str) and file.endswith(_GRAPH)
        ),
    )
    refuse_doubled(folder, _FILE, found)
    return found


def _single(folder: Path, decoders: list[str], files: Mapping[str, object], place: str) -> str:
    """The one decoder that is meant: the only one, or the only one whose graph is here."""
    here = [name for name in decoders if _found(folder, files.get(name)) is not None]
    if len(decoders) > 1 and len(here) != 1:
        raise InputError(
            f"{folder}: {place} of {_FILE} has {len(decoders)} decoders, {', '.join(decoders)}, and it is "
            "not clear which one to check.",
            next_action="Name the .onnx file of the one that is meant.",
        )
    return (here or decoders)[0]


def _found(folder: Path, named: object) -> Path | None:
    """A graph that is there: where it is said to be, or moved to the top of the package since."""
    if not isinstance(named, str):
        return None
    for name in (named, PurePosixPath(named).name):
        try:
            if (folder / name).is_file():
                return named_graph(folder, name, place=_FILE)
        except ValueError:  # a NUL character
            return None
    return None


def _strategies(strategy: object) -> Iterator[Mapping[str, Any]]:
    """A strategy, and those of its stages."""
    if not isinstance(strategy, Mapping):
        return
    yield strategy
    stages = strategy.get("stages")
    for stage in stages if isinstance(stages, list) else ():
        yield from _strategies(mapping_at({"stage": stage}, "stage").get("strategy"))


def _invocations(steps: object) -> Iterator[Mapping[str, Any]]:
    """Every step that invokes a component, however deep in loops and branches."""
    if isinstance(steps, list):
        for step in steps:
            yield from _invocations(step)
    elif isinstance(steps, Mapping):
        if steps.get("kind") == "invoke":
            yield steps
        for value in steps.values():
            yield from _invocations(value)


def _is_decoder(component: Mapping[str, Any]) -> bool:
    roles = {role for role in mapping_at(component, "ports", "roles").values() if isinstance(role, str)}
    return "logits" in roles and bool(roles & _SEQUENCE_ROLES)


def _refuse_other_workflows(folder: Path, components: Mapping[str, Any]) -> None:
    for name in components:
        contract = str(mapping_at(components, name, "contract").get("id", ""))
        for word, what in (("speculative", "speculative decoding"), ("diffusion", "diffusion")):
            if word in contract:
                raise undrivable(folder, f"a workflow of {what} ({name}: {contract})", instead=_CHECK_ALONE)
