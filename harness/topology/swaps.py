"""Pairing of names that differ in one word only, and what the other words say about the cache."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from harness.topology.conventions import Convention, WordSwap
from harness.topology.spec import Role

__all__ = ["SwapTable", "cache_role", "says_activation", "says_attention", "tokens", "without"]

# A word of any script, a number, or signs. Space and `_./:` part them and say nothing, nor does a hyphen
# between two of them; a hyphen that stands elsewhere is a sign.
_LETTER = r"A-Za-z\x80-\U0010ffff"
_PLAIN = rf"0-9{_LETTER}"
_TOKEN = re.compile(
    rf"[{_LETTER}]+|[0-9]+|(?:[^{_PLAIN} _./:\-]|(?<![{_PLAIN}])-|-(?![{_PLAIN}]))+",
)
_KEY = frozenset({"key", "keys", "k", "kcache"})
_VALUE = frozenset({"value", "values", "v", "vcache"})
_BOTH = frozenset({"kv", "kvcache"})
_SCALE = frozenset({"scale", "scales"})
_CROSS = frozenset({"cross", "encoder", "enc"})
_STATE = frozenset(
    {
        "cell",
        "conv",
        "delta",
        "gru",
        "hidden",
        "lstm",
        "mamba",
        "recurrent",
        "rnn",
        "shift",
        "ssm",
        "state",
        "states",
        "wkv",
    }
)
_SIDE = frozenset({"past", "present"})
_ACTIVATION = frozenset({"embedding", "embeddings", "embeds", "features", "hidden", "states"})

_Tokens = tuple[str, ...]


def tokens(name: str) -> _Tokens:
    """Words, numbers and signs of a name, in order; its ASCII letters in lower case."""
    return tuple(map(_lower, _spelt(name)))


def _spelt(name: str) -> _Tokens:
    """Words, numbers and signs of a name as they stand: names are different also by their case."""
    return tuple(_TOKEN.findall(name))


def _lower(word: str) -> str:
    """An ASCII word in lower case; other scripts have letters whose lower case is ASCII, and stay."""
    return word.lower() if word.isascii() else word


def says_attention(name: str, stem: str) -> bool:
    """True if `stem`, the part of a port name that a convention leaves open, speaks of keys or values.

    A word for a state anywhere in `name` takes that back: a convolution state may belong to the keys.
    """
    return bool(set(tokens(stem)) & (_KEY | _VALUE | _BOTH)) and not set(tokens(name)) & _STATE


def says_activation(name: str) -> bool:
    """True if a name speaks of activations, which a graph may hand on without keeping a state."""
    said = set(tokens(name))
    return bool(said & _ACTIVATION) and not said & (_STATE - _ACTIVATION)


def cache_role(words: Sequence[str]) -> Role:
    """What a cache is whose name has these words: keys, values or both of an attention, or a state."""
    open_words = [word for word in words if word not in _SIDE]
    if open_words[:2] == ["key", "values"] and len(open_words) > 2:
        open_words = open_words[2:]  # `past_key_values`, the name of the whole, says nothing of the part
    said = set(open_words)
    key, value = bool(said & _KEY), bool(said & _VALUE)
    if said & _STATE or not (key or value or said & _BOTH):
        return Role.STATE
    if said & _SCALE:
        return Role.KV_SCALE
    if said & _CROSS:
        return Role.CROSS_KV_VALUE if value and not key else Role.CROSS_KV_KEY
    if key == value:
        return Role.KV_FUSED
    return Role.KV_KEY if key else Role.KV_VALUE


class SwapTable:
    """Outputs by what is left of their names without the present word of each swap."""

    def __init__(self, swaps: Iterable[tuple[WordSwap, Convention]], outputs: Iterable[str]) -> None:
        self._swaps = tuple(swaps)
        present_words = {swap.present for swap, _ in self._swaps}
        self._by_rest: dict[tuple[str, _Tokens], list[str]] = {}
        self._found: dict[_Tokens, Mapping[str, tuple[WordSwap, Convention, _Tokens]]] = {}
        for name in outputs:
            said = _spelt(name)
            for word in present_words:
                rest = without(said, word)
                if rest:
                    self._by_rest.setdefault((word, rest), []).append(name)

    def candidates(self, name: str) -> Mapping[str, tuple[WordSwap, Convention, _Tokens]]:
        """Outputs that `name` could be the past of, each with the swap and the words in common.

        Names that separators alone tell apart have the very same candidates: one object, made once.
        """
        said = _spelt(name)
        found = self._found.get(said)
        if found is None:
            found = self._found[said] = self._look_up(said)
        return found

    def _look_up(self, said: _Tokens) -> Mapping[str, tuple[WordSwap, Convention, _Tokens]]:
        found: dict[str, tuple[WordSwap, Convention, _Tokens]] = {}
        for swap, convention in self._swaps:
            rest = without(said, swap.past)
            presents = self._by_rest.get((swap.present, rest))
            if presents:
                lower = tuple(map(_lower, rest))
                for present in presents:
                    found.setdefault(present, (swap, convention, lower))
        return found


def without(said: _Tokens, word: str) -> _Tokens:
    """`said` without `word`, whose case does not count.

    Unchanged for the empty word, and empty where `word` does not occur just once.
    """
    if not word:
        return said
    lower = [_lower(one) for one in said]
    if lower.count(word) != 1:
        return ()
    at = lower.index(word)
    return said[:at] + said[at + 1 :]
