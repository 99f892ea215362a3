"""What `genai_config.json` must say besides the ports, so that onnxruntime-genai loads the package with it.

Sizes come from the ports, IDs and the context length from the model's own configuration. Source: `config.h`
of onnxruntime-genai, and what its version 0.18 refuses to load without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.decode.prompts import vocabulary_size
from harness.package import Package
from harness.ports import PortInventory
from harness.topology.spec import Role, Topology

__all__ = ["NEEDED", "loading_facts"]

NEEDED = ("vocab_size", "context_length")
"""Fields of `model` without which it loads nothing."""
_ANY_DECODER = "decoder"
"""Its name for decoders of no architecture in particular: it then goes by the ports that the file names."""
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
"""What models of transformers call the longest sequence that they know, in their `config.json`."""
_HEADS = ("num_attention_heads", "n_head", "num_heads")


def loading_facts(package: Package, inventory: PortInventory, topology: Topology) -> dict[str, Any]:
    """Sections `model` and `search`, as far as they are known; `model.decoder` without its ports.

    Args:
        package: whose `config.json` and `generation_config.json` are asked.
        inventory: its ports.
        topology: what they are for.

    Raises:
        InputError: one of these files cannot be read.
    """
    config = package.config("config.json")
    text = {**config, **_mapping(config.get("text_config"))}
    model: dict[str, Any] = {"type": _ANY_DECODER, "decoder": _decoder(text, inventory, topology)}
    vocabulary = vocabulary_size(inventory, topology) or _number(text, ("vocab_size",))
    context = _number(text, _CONTEXT)
    stops = list(package.eos_token_ids())
    known = {
        "vocab_size": vocabulary,
        "context_length": context,
        "bos_token_id": _number(text, ("bos_token_id",)),
        "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
        "pad_token_id": _number(text, ("pad_token_id",)),
    }
    model.update((key, value) for key, value in known.items() if value is not None)
    # Greedy, as a check is, and with caches that grow: not every graph writes into a buffer that it shares.
    search: dict[str, Any] = {"do_sample": False, "past_present_share_buffer": False}
    if context is not None:
        search["max_length"] = context
    return {"model": model, "search": search}


def _decoder(config: Mapping[str, Any], inventory: PortInventory, topology: Topology) -> dict[str, int]:
    """Sizes of the caches: heads and width of the first one whose axes are numbers."""
    shapes = {port.name: port.shape for port in inventory.inputs}
    keys = [port for port in topology.roles if port.role is Role.KV_KEY and port.direction == "input"]
    layers = [port.layer for port in topology.roles if port.layer is not None]
    facts = {"num_attention_heads": _number(config, _HEADS)}
    if layers:
        facts["num_hidden_layers"] = _number(config, ("num_hidden_layers", "n_layer")) or max(layers) + 1
    for port in keys:
        shape = shapes[port.name]
        if shape is not None and len(shape) == 4 and isinstance(shape[1], int) and isinstance(shape[3], int):
            facts["num_key_value_heads"], facts["head_size"] = shape[1], shape[3]
            break
    return {key: value for key, value in facts.items() if value is not None}


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of `names` that is a whole number, not below zero."""
    values = (config.get(name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0), None)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
