"""The graphs of a package that declares none, by the names that exporters give to files and folders.

The names are those of Optimum (`encoder_model.onnx`, `decoder_model_merged.onnx`, and the pair
`decoder_model.onnx` and `decoder_with_past_model.onnx`), of packages for Transformers.js (the same, with
`embed_tokens.onnx`, in a folder `onnx`), and of exporters that give each component a folder with a
`model.onnx` in it.
"""

from __future__ import annotations

from pathlib import Path

from harness.errors import InputError
from harness.package.components import Component, Components, undrivable

__all__ = ["components_by_name"]

_MERGED = "decoder_model_merged"
_FIRST_PASS = "decoder_model"
_WITH_PAST = "decoder_with_past_model"
_WEB = "onnx"
"""The folder that packages for Transformers.js keep their graphs in."""
_EXPORTED = (_MERGED, _FIRST_PASS, _WITH_PAST)
_DECODERS = frozenset({"decoder", "model", "text_decoder", "language_model", "text_model"})
_OTHERS = frozenset(
    {
        "audio_encoder",
        "embed_tokens",
        "embedding",
        "embeddings",
        "encoder",
        "encoder_model",
        "speech",
        "speech_encoder",
        "token_embedding",
        "vision",
        "vision_encoder",
        "vision_model",
    }
)
_TRANSDUCERS = frozenset({"decoder_joint", "joint", "joiner", "joint_network"})
_DIFFUSION = frozenset({"unet", "vae_decoder", "vae_encoder"})


def components_by_name(folder: Path) -> Components:
    """The graphs of a package, by their names.

    A graph that is alone is the decoder, whatever it is called. Among several the names say which one it
    is, of those in the folder `onnx` as well; a merged decoder may lie beside the pair that it was merged
    from.

    Raises:
        InputError: there is no graph, the names do not say which one is the decoder, or half of a pair is
            missing.
        NotDrivableError: the names are those of a transducer, or of a diffusion pipeline.
    """
    graphs = _graphs(folder)
    if not graphs:
        raise InputError(
            f"{folder}: no graph in this directory; a package holds a *.onnx file.",
            next_action="Name the directory that holds model.onnx.",
        )
    _refuse_other_kinds(folder, graphs)
    if len(graphs) == 1:
        return Components((_component(graphs, next(iter(graphs))),))
    others = tuple(_component(graphs, name) for name in graphs if name in _OTHERS)
    exported = [name for name in _EXPORTED if name in graphs]
    decoders = [name for name in graphs if _is_decoder(name)]
    if exported and not decoders:
        return _exported(folder, graphs, exported, others)
    decoders = exported + decoders
    if len(decoders) == 1:
        return Components((_component(graphs, decoders[0]),), others)
    files = ", ".join(str(path.relative_to(folder)) for path in graphs.values())
    if decoders:
        raise InputError(
            f"{folder}: {len(decoders)} decoders, {', '.join(decoders)}, among {files}.",
            next_action="Name the .onnx file of the one that is meant instead of the directory, or move the "
            "others away.",
        )
    if _OTHERS.issuperset(graphs):
        raise InputError(
            f"{folder}: the decoder is missing, to which {files} belong.",
            next_action="Put it beside them: decoder_model_merged.onnx, decoder.onnx or decoder/model.onnx.",
        )
    raise InputError(
        f"{folder}: {len(graphs)} graphs and none is model.onnx: {files}.",
        next_action="Name the decoder's .onnx file instead of the directory.",
    )


def _exported(
    folder: Path, graphs: dict[str, Path], exported: list[str], others: tuple[Component, ...]
) -> Components:
    """A decoder of Optimum: merged, or a pair for the first call and all others."""
    if _MERGED in exported:
        return Components((_component(graphs, _MERGED),), others)
    if _FIRST_PASS not in exported:
        raise InputError(
            f"{folder}: {_FIRST_PASS}.onnx is missing, the partner of {_WITH_PAST}.onnx that runs at the "
            "first call.",
            next_action=f"Copy it into the package, or name {_WITH_PAST}.onnx itself to drive it alone.",
        )
    if _WITH_PAST not in exported:
        partner = graphs[_FIRST_PASS].with_name(f"{_WITH_PAST}.onnx")
        return Components((_component(graphs, _FIRST_PASS),), others, partner=partner)
    pair = (
        Component(_FIRST_PASS, graphs[_FIRST_PASS], on_steps=False),
        Component(_WITH_PAST, graphs[_WITH_PAST], on_prompt=False),
    )
    return Components(pair, others)


def _graphs(folder: Path) -> dict[str, Path]:
    """Graphs by name: those of the folder, else of its subfolder `onnx`, else one in each subfolder.

    Beside files stand the decoders that lie in subfolders of their own, as `decoder/model`, and those in
    `onnx`, as `onnx/model`.
    """
    inner = {f"{_WEB}/{name}": path for name, path in _beside(folder / _WEB).items()}
    if found := _beside(folder):
        return found | {name: path for name, path in inner.items() if _is_decoder(name)}
    return {name.removeprefix(f"{_WEB}/"): path for name, path in inner.items()} or _in_subfolders(folder)


def _beside(place: Path) -> dict[str, Path]:
    """The graphs that lie in a folder, and the decoders in its subfolders; empty where none lies in it."""
    found = {path.stem: path for path in sorted(place.glob("*.onnx")) if path.is_file()}
    deeper = {
        f"{name}/{path.stem}": path for name, path in _in_subfolders(place).items() if _is_decoder(name)
    }
    return found | deeper if found else {}


def _in_subfolders(folder: Path) -> dict[str, Path]:
    return {path.parent.name: path for path in sorted(folder.glob("*/model.onnx")) if path.is_file()}


def _is_decoder(name: str) -> bool:
    """Whether a graph of this name, or one in a folder of this name, is a whole decoder.

    In `onnx`, a graph of Optimum is one as well: beside a decoder of the package itself, half a pair could be
    meant, too.
    """
    bare = name.removeprefix(f"{_WEB}/")
    return bare.partition("/")[0] in _DECODERS or (bare != name and bare in _EXPORTED)


def _component(graphs: dict[str, Path], name: str) -> Component:
    return Component(name, graphs[name])


def _refuse_other_kinds(folder: Path, graphs: dict[str, Path]) -> None:
    for name in graphs:
        if {name, name.replace("-", "_").removesuffix("_model")} & _TRANSDUCERS:
            raise undrivable(
                folder,
                f"a transducer ({graphs[name].relative_to(folder)}): it emits by frames of its input, and "
                "not token after token",
                instead="Check a decoder that takes tokens and gives the logits of the next one.",
            )
        if name in _DIFFUSION:
            raise undrivable(
                folder,
                f"a diffusion pipeline ({graphs[name].relative_to(folder)}), and not a decode token after "
                "token",
                instead="Name the .onnx file of a decoder to check it alone.",
            )
