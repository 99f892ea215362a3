"""The tokens that a decoder begins with, whatever it is asked, as its package declares them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import InputError, shown
from harness.package import Package

__all__ = ["Prefix", "forced_prefix"]


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a decoder is fed first.

    Attributes:
        token_ids: from the start token on; empty where the package declares none.
        not_forced: pairs of position and ID that the package forces behind a position that it leaves open:
            what is decoded there is not fed in their place.
    """

    token_ids: tuple[int, ...] = ()
    not_forced: tuple[tuple[int, int], ...] = ()

    @property
    def open_end(self) -> str:
        """What is not forced, for people."""
        return ", ".join(f"{token} at position {position}" for position, token in self.not_forced)


def forced_prefix(package: Package) -> Prefix:
    """The tokens that an encoder's decoder is fed first.

    The first is `decoder_start_token_id`, else `bos_token_id`; then follow `forced_decoder_ids`, pairs of
    position and ID, up to the first position whose ID is null, or else `forced_bos_token_id`. Each is
    looked up in `generation_config.json`, then under `model` of `genai_config.json`, then in `config.json`.

    A null stands for a token that is decoded, such as the language that Whisper detects. A position that is
    left out stands for nothing: transformers refuses it (`WhisperGenerationMixin._retrieve_init_tokens`).

    Raises:
        InputError: a file cannot be read, a value is no token ID, or `forced_decoder_ids` leaves out a
            position before its last one, or has one twice.
    """
    places = list(_places(package))
    start = _declared(places, "decoder_start_token_id") or _declared(places, "bos_token_id")
    if start is None:
        return Prefix()
    prefix = [_token_id(*start)]
    forced = _declared(places, "forced_decoder_ids")
    not_forced: list[tuple[int, int]] = []
    if forced is not None:
        is_open = False
        for position, token in _by_position(*forced):
            is_open = is_open or token is None
            if token is not None and is_open:
                not_forced.append((position, token))
            elif token is not None:
                prefix.append(token)
    elif (first := _declared(places, "forced_bos_token_id")) is not None:
        prefix.append(_token_id(*first))
    return Prefix(tuple(prefix), tuple(not_forced))


def _places(package: Package) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in ("generation_config.json", "genai_config.json", "config.json"):
        config = package.config(name)
        section = config.get("model") if name == "genai_config.json" else config
        if isinstance(section, Mapping):
            yield str(package.folder / name), section


def _declared(places: list[tuple[str, Mapping[str, Any]]], key: str) -> tuple[str, Any] | None:
    """The first value of `key` that is not null, with its place."""
    return next(
        ((f"{place}: {key}", section[key]) for place, section in places if section.get(key) is not None), None
    )


def _token_id(place: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InputError(f"{place} is {shown(value)}; a token ID is due.", next_action="Correct the file.")
    return value


def _by_position(place: str, value: object) -> list[tuple[int, int | None]]:
    """Position and ID, in order: 1, 2, 3, ...; an ID of null leaves its position open."""
    pairs = sorted(_pairs(place, value), key=lambda pair: pair[0])
    for due, (position, _) in enumerate(pairs, 1):
        if position != due:
            what = "leaves out position" if position > due else "has twice position"
            what = "begins with position" if position == 0 else what
            raise InputError(
                f"{place} is {shown(value)}: it {what} {min(position, due)}. Positions count from 1, behind "
                "the start token, and each up to the last one is due once.",
                next_action="Add the pair that is missing, with null for a token that is decoded.",
            )
    return pairs


def _pairs(place: str, value: object) -> Iterator[tuple[int, int | None]]:
    for pair in value if isinstance(value, list) else (value,):
        if not isinstance(pair, list) or len(pair) != 2:
            raise InputError(
                f"{place} is {shown(value)}; a list of pairs of position and token ID is due.",
                next_action="Correct the file.",
            )
        position, token = pair
        yield _token_id(place, position), None if token is None else _token_id(place, token)
