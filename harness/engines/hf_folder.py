"""The folder of a transformers model: what must be in it, found out without loading transformers or torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.json_keys import unique_keys

__all__ = ["check_model_folder"]

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MOST_NAMES = 3


def check_model_folder(folder: Path) -> None:
    """Check that `folder` has a decoder's config and every file of its weights, as safetensors.

    Weights in other formats are not read: a pickle may run code of its own.

    Raises:
        InputError: it is no such folder; the config is missing, cannot be read, or is that of a model with an
            encoder; or there are no weights, or one of their files is missing.
    """
    if not folder.is_dir():
        what = "no such folder" if not folder.exists() else "a file"
        raise InputError(
            f"{folder}: {what}; a source model is a folder with config.json and safetensors.",
            next_action="Name the folder that the package was exported from.",
        )
    config = _mapping(folder / "config.json", why="it says what the model is")
    if not isinstance(config.get("model_type"), str):
        raise InputError(
            f"{folder / 'config.json'} names no model_type, so it is no model of transformers.",
            next_action="Name the folder that the package was exported from.",
        )
    if config.get("is_encoder_decoder"):
        raise InputError(
            f"{folder}: {config['model_type']} has an encoder, and only decoders are compared with a source.",
            next_action="Leave --source out.",
        )
    _check_weights(folder)


def _check_weights(folder: Path) -> None:
    if (folder / _WEIGHTS).is_file():
        return
    if not (folder / _INDEX).exists():
        raise InputError(
            f"{folder} has neither {_WEIGHTS} nor {_INDEX}: without weights a model would compute with "
            "random ones.",
            next_action="Save the model with safetensors, as `save_pretrained` does, or download them all.",
        )
    index = _mapping(folder / _INDEX, why="it names the files of the weights")
    weights = index.get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise InputError(
            f"{folder / _INDEX} has no weight_map, which names the file of each weight.",
            next_action="Copy or download the file again.",
        )
    missing = sorted({str(name) for name in weights.values() if not (folder / str(name)).is_file()})
    if missing:
        more = f" and {len(missing) - _MOST_NAMES} more" if len(missing) > _MOST_NAMES else ""
        raise InputError(
            f"{folder}: {', '.join(missing[:_MOST_NAMES])}{more} of the weights of {_INDEX} "
            f"{'is' if len(missing) == 1 else 'are'} missing.",
            next_action="Copy or download every file of the model.",
        )


def _mapping(path: Path, *, why: str) -> Mapping[str, Any]:
    if not path.is_file():
        raise InputError(
            f"{path.parent} has no {path.name}; {why}.",
            next_action="Name a folder that `save_pretrained` wrote, or copy the file.",
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: not readable as JSON: {error}.", next_action="Copy or download the file again."
        ) from error
    if not isinstance(value, dict):
        raise InputError(
            f"{path}: holds no mapping at the top level.", next_action="Copy or download the file again."
        )
    return value
