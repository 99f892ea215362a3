"""The source model as a witness: its weights, and the tokens that it gives itself.

Runs where torch and transformers are: in an exporter's environment.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from suites.exporters.sources import PROMPTS, Source

__all__ = ["NEW_TOKENS", "auto_class", "write_source"]

NEW_TOKENS = 32
_TOP = 5
_SEED = 0
_PERTURBATION = 0.1
"""Added to every weight that is not a matrix: norms that are all ones, and biases that are all zeros, would
hide that an exporter forgot them."""


def write_source(source: Source, to: Path) -> None:
    """Write the checkpoint of `source`, a tokenizer, and `witness.json`: what the model itself says.

    Greedy, float32, eager attention, the whole sequence anew for every token: no cache of the source model
    has a part in it. Nothing is written again where `witness.json` stands already.
    """
    if (to / "witness.json").is_file():
        return
    to.mkdir(parents=True, exist_ok=True)
    # Models of this size are slower on several threads, and differ from run to run.
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(_SEED)
    config = transformers.AutoConfig.for_model(source.model_type, **source.config)
    model = auto_class(source.kind).from_config(config, attn_implementation="eager").float().eval()
    _perturb(model)
    model.save_pretrained(to, safe_serialization=True)
    _tokenizer(config.get_text_config().vocab_size).save_pretrained(to)
    inputs = _encoder_inputs(source, config)
    with torch.no_grad():
        if inputs is not None:
            heard = model.get_encoder()(torch.from_numpy(inputs["input_features"])).last_hidden_state
            np.savez(to / "inputs.npz", **inputs, encoder_hidden_states=heard.numpy())
        traces = [_trace(model, config, source, prompt, inputs) for prompt in PROMPTS]
        cache = _cache_facts(model, config, source, inputs)
    document = {
        "model_type": source.model_type,
        "kind": source.kind,
        "engine": f"transformers {transformers.__version__}, torch {torch.__version__}, eager, float32",
        "prompts": traces,
        "cache": cache,
    }
    (to / "witness.json").write_text(json.dumps(document), encoding="utf-8")


def auto_class(kind: str) -> Any:
    """The class of transformers that makes a source model of a kind, or reads it back."""
    return {
        "decoder": transformers.AutoModelForCausalLM,
        "multimodal": transformers.AutoModelForImageTextToText,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
        "speech": transformers.AutoModelForSpeechSeq2Seq,
    }[kind]


def _perturb(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2 and parameter.is_floating_point():
                parameter += _PERTURBATION * torch.randn(parameter.shape, generator=generator)


def _tokenizer(vocabulary: int) -> transformers.PreTrainedTokenizerFast:
    """A word for each ID, as exporters copy the tokenizer that they find."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="w0", bos_token="w1", eos_token="w2"
    )


def _encoder_inputs(source: Source, config: Any) -> Mapping[str, np.ndarray[Any, Any]] | None:
    """What a speech encoder hears: standard normal, `[1, mel bins, twice its source positions]`."""
    if source.kind != "speech":
        return None
    shape = (1, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": np.random.default_rng(_SEED).standard_normal(shape, dtype=np.float32)}


def _trace(
    model: Any,
    config: Any,
    source: Source,
    prompt: tuple[int, ...],
    inputs: Mapping[str, np.ndarray[Any, Any]] | None,
) -> dict[str, Any]:
    """What the model continues `prompt` with, and the prompt as a check is given it."""
    if source.kind in {"decoder", "multimodal"}:
        return {"prompt_ids": prompt, **_greedy(model, list(prompt), "input_ids", {})}
    start = [config.decoder_start_token_id]
    if inputs is None:
        asked = {"input_ids": torch.tensor([prompt])}
        return {"prompt_ids": prompt, **_greedy(model, start, "decoder_input_ids", asked)}
    # A speech model is told what comes first: the prompt, after its start token.
    begun = [*start, *prompt]
    heard = {name: torch.from_numpy(value) for name, value in inputs.items()}
    return {"prompt_ids": begun, **_greedy(model, begun, "decoder_input_ids", heard)}


def _greedy(model: Any, begun: list[int], port: str, other: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The tokens after `begun`, and the largest logits at each."""
    tokens: list[int] = []
    top: list[list[list[float]]] = []
    for _ in range(NEW_TOKENS):
        outputs = model(**other, **{port: torch.tensor([[*begun, *tokens]])}, use_cache=False)
        logits = outputs.logits[0, -1].float()
        # A stable sort: equal logits go to the lowest ID, as everywhere.
        order = torch.sort(logits, descending=True, stable=True).indices[:_TOP].tolist()
        tokens.append(order[0])
        top.append([[i, float(logits[i])] for i in order])
    return {"token_ids": tokens, "top": top}


def _cache_facts(
    model: Any, config: Any, source: Source, inputs: Mapping[str, np.ndarray[Any, Any]] | None
) -> dict[str, list[int]] | None:
    """Which layers keep keys and values, and which keep states, as the model's own cache has them.

    None where the model keeps its cache in a form of its own.
    """
    if source.kind in {"seq2seq", "speech"}:
        return None
    try:
        outputs = model(input_ids=torch.tensor([PROMPTS[0]]), use_cache=True)
        cache = getattr(outputs, "past_key_values", None) or outputs.cache_params
        if type(cache) is not transformers.DynamicCache:
            raise TypeError(f"a {type(cache).__name__}")
        layers = list(cache.layers)
    except (AttributeError, TypeError, ValueError) as error:
        logging.getLogger(__name__).info("%s keeps a cache of its own: %s", source.name, error)
        return None
    has = [{name for name, value in vars(layer).items() if _holds(value)} for layer in layers]
    return {
        "kv": [index for index, names in enumerate(has) if "keys" in names],
        "states": [index for index, names in enumerate(has) if names & {"conv_states", "recurrent_states"}],
    }


def _holds(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds, value.values()))
    return isinstance(value, torch.Tensor) and value.numel() > 0
