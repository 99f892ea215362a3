"""The ports of a decoder that are no caches: tokens, mask, positions, logits and their like.

A port is placed by its name first: an exact name, or the words in it. What names leave open is settled by
dtype and shape where only one reading is possible, and refused otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.ports import Dimension, Port
from harness.topology.findings import Finding, listed, matching, quoted
from harness.topology.spec import Role

__all__ = [
    "NamedPort",
    "PAGED_NAMES",
    "is_integer",
    "place_inputs_by_name",
    "place_logits",
    "place_token_by_shape",
    "words",
]

_WORD = re.compile(r"[A-Za-z\x80-\U0010ffff]+")  # of any script: a word that nobody knows is one as well
_FLOATS = frozenset({"float16", "float32", "float64", "bfloat16"})
_INTEGERS = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})
_KINDS: Mapping[str, frozenset[str]] = {
    "integer": _INTEGERS,
    "float": _FLOATS,
    "flag": _INTEGERS | {"bool"},
    "mask": _INTEGERS | _FLOATS | {"bool"},
    "any": _INTEGERS | _FLOATS | {"bool"},
}
_HIDDEN_WORDS = frozenset({"embedding", "embeddings", "embeds", "encoder", "features", "hidden", "pooled"})
_PART_WORDS = frozenset({"block", "dec", "decoder", "layer", "predictor", "proj", "projection"})
_SCORE_WORDS = frozenset({"logits", "logprobs", "prob", "probabilities", "probs", "score", "scores"})
_OTHER_SCORES = frozenset(
    {
        "aux",
        "auxiliary",
        "class",
        "ctc",
        "gate",
        "gating",
        "mtp",
        "reward",
        "router",
        "stop",
        "value",
        "values",
    }
)
_BYTES = 256  # a vocabulary of bytes, and of most toys
_WIDEST_HIDDEN = 16_384  # of Llama 3.1 405B; most vocabularies are wider
_NO_TOKEN_WORDS = frozenset(
    {
        "batch",
        "beam",
        "beams",
        "bos",
        "cache",
        "count",
        "counts",
        "duration",
        "durations",
        "eos",
        "index",
        "indices",
        "label",
        "labels",
        "language",
        "length",
        "lengths",
        "mask",
        "num",
        "number",
        "offset",
        "offsets",
        "pad",
        "padding",
        "penalty",
        "pos",
        "position",
        "positions",
        "random",
        "rng",
        "seed",
        "seeds",
        "segment",
        "segments",
        "size",
        "sizes",
        "slot",
        "slots",
        "speaker",
        "step",
        "steps",
        "task",
        "temperature",
        "timestep",
        "timesteps",
        "tone",
        "tones",
        "top",
        "type",
        "types",
    }
)
PAGED_NAMES = frozenset(
    {
        "attention_metadata",
        "block_table",
        "block_tables",
        "cu_seqlens",
        "cumulative_sequence_length",
        "cumulative_sequence_lengths",
        "past_sequence_lengths",
        "slot_mapping",
    }
)
"""Inputs that only a paged cache, shared by many sequences, has (onnxruntime-genai, vLLM)."""


@dataclass(frozen=True, slots=True)
class NamedPort:
    """A port that is placed by its name: its role, and the evidence."""

    port: Port
    role: Role
    because: str


@dataclass(frozen=True, slots=True)
class _NameRule:
    """Names that say what an input is.

    Attributes:
        role: what it is.
        kind: what dtypes it may have, a key of `_KINDS`.
        ranks: what ranks it may have.
        names: names that say it outright.
        words: word sets one of which a name must contain to say it, ...
        beside: ... together with no words but these.
        single: a decoder has one such port; two of them contradict each other.
        because: the evidence.
    """

    role: Role
    kind: str
    ranks: range
    names: frozenset[str]
    words: tuple[frozenset[str], ...] = ()
    beside: frozenset[str] = frozenset()
    single: bool = True
    because: str = "its name says so, and its dtype agrees"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RULES = (
    _NameRule(
        Role.TOKEN,
        "integer",
        range(1, 3),
        _names("input_ids decoder_input_ids token_ids tokens input_tokens"),
        words=(_names("input ids"), _names("token"), _names("tokens")),
        beside=_names("decoder in prev previous next new port current"),
    ),
    _NameRule(
        Role.EMBEDS,
        "float",
        range(2, 4),
        _names("inputs_embeds input_embeds inputs_embeddings input_embeddings"),
        words=(_names("embeds"), _names("embedding"), _names("embeddings")),
        beside=_names("input inputs token tokens decoder noise in port"),
    ),
    _NameRule(
        Role.ATTENTION_MASK,
        "mask",
        range(1, 5),
        _names("attention_mask decoder_attention_mask attn_mask mask"),
        words=(_names("attention mask"), _names("attn mask")),
        beside=_names("decoder self input in port"),
    ),
    _NameRule(
        Role.POSITION_IDS,
        "integer",
        range(1, 4),
        _names("position_ids positions pos_ids position input_pos"),
        words=(_names("position"), _names("positions"), _names("pos")),
        beside=_names("ids id input decoder in port"),
    ),
    _NameRule(
        Role.ENCODER_HIDDEN_STATES,
        "float",
        range(2, 4),
        _names("encoder_hidden_states encoder_outputs encoder_output cross_attention_states"),
    ),
    _NameRule(
        Role.ENCODER_ATTENTION_MASK,
        "mask",
        range(1, 5),
        _names("encoder_attention_mask encoder_mask encoder_padding_mask cross_attention_mask"),
    ),
    _NameRule(
        Role.CONTROL,
        "flag",
        range(3),
        _names(
            "use_cache_branch use_cache past_key_values_length past_sequence_length past_seq_len past_length "
            "past_len cache_length cache_lengths kv_length total_sequence_length total_seq_len "
            "total_sequence_len current_sequence_length seqlens_k cache_position cache_positions "
            "num_logits_to_keep logits_to_keep beam_idx"
        ),
        single=False,
        because="a control port by name",
    ),
    _NameRule(
        Role.OPTIONAL,
        "any",
        range(5),
        _names("token_type_ids deepstack_embeds"),
        single=False,
        because="by name an input whose default is zeros",
    ),
    _NameRule(
        Role.AUXILIARY,
        "any",
        range(5),
        _names("per_layer_inputs"),
        single=False,
        because="by name the product of a second embedding graph",
    ),
    _NameRule(
        Role.CONTROL,
        "flag",
        range(3),
        PAGED_NAMES,
        single=False,
        because="by name the bookkeeping of a paged cache",
    ),
)


def words(name: str) -> frozenset[str]:
    """The words of a port name, ASCII ones in lower case; digits, signs and separators part them."""
    return frozenset(word.lower() if word.isascii() else word for word in _WORD.findall(name))


def is_integer(port: Port) -> bool:
    """True where the port's dtype is known to be an integer type."""
    return port.dtype in _INTEGERS


def place_inputs_by_name(inputs: Iterable[Port], *, filled: Collection[Role]) -> list[NamedPort]:
    """Place inputs whose names say what they are. `filled` are roles that are already taken.

    A role that only one port can have goes to the exact name before a name with the right words; two
    equally good names leave it open.
    """
    ports = [(port, words(port.name)) for port in inputs]
    placed: list[NamedPort] = []
    for rule in _RULES:
        if rule.single and rule.role in filled:
            continue
        chosen = [port for port, _ in ports if port.name in rule.names and _fits(port, rule)]
        if not chosen and rule.words:
            chosen = [port for port, said in ports if _says(said, rule) and _fits(port, rule)]
        if rule.single and len(chosen) != 1:
            continue
        placed += [NamedPort(port, rule.role, rule.because) for port in chosen]
    return placed


def _fits(port: Port, rule: _NameRule) -> bool:
    if port.dtype is not None and port.dtype not in _KINDS[rule.kind]:
        return False
    return port.shape is None or len(port.shape) in rule.ranks


def _says(said: frozenset[str], rule: _NameRule) -> bool:
    return any(needed <= said <= needed | rule.beside for needed in rule.words)


def place_token_by_shape(inputs: Sequence[Port]) -> NamedPort | Finding | None:
    """Among inputs that nobody could place by name, the one that must be the tokens.

    That is the only integer input of rank 2, batch by sequence, whose name does not say that it is
    something else. Several are ambiguous; none is None.
    """
    fitting = [
        port
        for port in inputs
        if is_integer(port)
        and port.shape is not None
        and len(port.shape) == 2
        and not words(port.name) & _NO_TOKEN_WORDS
        and not _says_length(port.name)
    ]
    if not fitting:
        return None
    if len(fitting) == 1:
        return NamedPort(fitting[0], Role.TOKEN, "the only integer input of rank 2 that is nothing else")
    names = tuple(port.name for port in fitting)
    return Finding(
        "E_AMBIGUOUS_TOKEN_INPUT",
        f"Declare model.io.token_input: {matching(names)}.",
        names,
    )


def _says_length(name: str) -> bool:
    """True if a name speaks of lengths, which are often run together with what they are of: `seqlens`."""
    return any(word.endswith(("len", "lens")) for word in words(name))


def place_logits(
    outputs: Sequence[Port], *, widths: Collection[Dimension], heads: Collection[Dimension] = ()
) -> NamedPort | Finding:
    """Find the logits among the outputs that are no caches.

    The output named `logits`; or the only one with that word in its name, where no other could be over the
    vocabulary instead; or the only float output of rank 2 or 3, where its name or width leaves no other
    reading. Greedy choice over anything else gives IDs that look valid, so whatever is in doubt is refused.

    Args:
        outputs: those that no other rule explains.
        widths: extents of states, and the last ones of embeddings and encoder outputs. An output with one of
            these is a hidden state.
        heads: widths of the KV heads, of one and of all together. A hidden state is as wide as the query
            heads, of which there are as many, or some for each.
    """
    fitting = [port for port in outputs if _may_be_logits(port)]
    exact = [port for port in fitting if port.name == "logits"]
    if exact:
        return NamedPort(exact[0], Role.LOGITS, "named logits")
    named = [port for port in fitting if "logits" in words(port.name)]
    if len(named) == 1:
        return _only_named(named[0], fitting, widths)
    shaped = [port for port in fitting if port.shape is not None and port.dtype is not None]
    if len(shaped) == 1:
        doubt = _hidden(shaped[0], widths) or _no_vocabulary(shaped[0]) or _like_hidden(shaped[0], heads)
        if doubt is not None:
            return _no_logits(f"output {quoted(shaped[0].name)} {doubt}", shaped)
        misfits = [port for port in outputs if "logits" in words(port.name) and not _may_be_logits(port)]
        if misfits:
            return _no_logits(_all_meant([*fitting, *misfits]), [*fitting, *misfits])
        if len(fitting) == 1:
            because = "the only float output of rank 2 or 3 that is no cache"
            return NamedPort(shaped[0], Role.LOGITS, because)
    if fitting:
        return _no_logits(_all_meant(fitting), fitting)
    return _no_logits("no float output of rank 2 or 3 is left", ())


def _may_be_logits(port: Port) -> bool:
    """True if neither dtype nor rank speaks against it."""
    is_float = port.dtype is None or port.dtype in _FLOATS
    return is_float and (port.shape is None or len(port.shape) in (2, 3))


def _only_named(named: Port, fitting: Sequence[Port], widths: Collection[Dimension]) -> NamedPort | Finding:
    """The only output with logits in its name, unless these are of another kind or others may be meant."""
    rivals = [port for port in fitting if port is not named and _rivals(port, named, widths)]
    if rivals:
        return _no_logits(_all_meant([named, *rivals]), [named, *rivals])
    doubt = _no_vocabulary(named)
    if doubt is not None:
        return _no_logits(f"output {quoted(named.name)} {doubt}", [named])
    return NamedPort(named, Role.LOGITS, "the only output with logits in its name")


def _no_logits(what: str, ports: Sequence[Port]) -> Finding:
    names = tuple(port.name for port in ports)
    return Finding("E_NO_LOGITS_OUTPUT", f"No logits: {what}. Declare model.io.logits_output.", names)


def _all_meant(ports: Sequence[Port]) -> str:
    return f"outputs {listed(port.name for port in ports)} could all be meant"


def _rivals(port: Port, named: Port, widths: Collection[Dimension]) -> bool:
    """True if `port` could be over the vocabulary rather than `named`: nothing shows that it is narrower."""
    if _hidden(port, widths) or _no_vocabulary(port):
        return False
    width, other = _width(port), _width(named)
    return not (isinstance(width, int) and isinstance(other, int) and width < other)


def _hidden(port: Port, widths: Collection[Dimension]) -> str | None:
    """That a port is a hidden state, None where neither name nor width says so."""
    width = _width(port)
    if words(port.name) & _HIDDEN_WORDS or (isinstance(width, int) and width in widths):
        return "is a hidden state, by name or by a width that a state has as well"
    return None


def _no_vocabulary(port: Port) -> str | None:
    """Why the scores in a port are not over a vocabulary, None where they may be."""
    width = _width(port)
    if words(port.name) & _OTHER_SCORES:
        return "is by name another sort of scores than those over the vocabulary"
    if isinstance(width, int) and width <= 1:
        return f"has a last axis of {width}, which is no vocabulary"
    if (
        port.shape is not None
        and len(port.shape) == 2
        and not (isinstance(width, int) or _says_vocabulary(width))
    ):
        return "has one number for each token, and no axis that is known to be a vocabulary"
    return None


def _like_hidden(port: Port, heads: Collection[Dimension]) -> str | None:
    """Why a port may hold activations rather than scores, None where it does not look like them."""
    said, width = words(port.name), _width(port)
    if said & _SCORE_WORDS or _says_vocabulary(width):
        return None
    if not isinstance(width, int):
        return "has a width that is not known, and nothing says that it is over a vocabulary"
    if width > _WIDEST_HIDDEN:
        return None
    if said & _PART_WORDS:
        return "is by name what a part of the network gives, and no wider than hidden states are"
    together = any(isinstance(head, int) and head > 1 and width % head == 0 for head in heads)
    if width in heads or (together and width != _BYTES):
        return "is as wide as a whole number of attention heads, as hidden states are"
    return None


def _says_vocabulary(extent: Dimension) -> bool:
    return isinstance(extent, str) and "vocab" in extent.lower()


def _width(port: Port) -> Dimension:
    return port.shape[-1] if port.shape else None
