"""The tokens that a decoder begins with, whatever it is asked, as its package declares them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.errors import InputError, shown
from harness.package import Package

__all__ = ["forced_prefix"]


def forced_prefix(package: Package) -> tuple[int, ...]:
    """Token IDs that an encoder's decoder is fed first; empty where the package declares none.

    The first is `decoder_start_token_id`, else `bos_token_id`; then follow `forced_decoder_ids`, pairs of
    position and ID, up to the first position that is left open, or else `forced_bos_token_id`. Each is
    looked up in `generation_config.json`, then under `model` of `genai_config.json`, then in `config.json`.

    Raises:
        InputError: a file cannot be read, or a value is no token ID.
    """
    places = list(_places(package))
    start = _declared(places, "decoder_start_token_id") or _declared(places, "bos_token_id")
    if start is None:
        return ()
    prefix = [_token_id(*start)]
    forced = _declared(places, "forced_decoder_ids")
    if forced is not None:
        by_position = dict(_pairs(*forced))
        while len(prefix) in by_position:
            prefix.append(by_position[len(prefix)])
    elif (first := _declared(places, "forced_bos_token_id")) is not None:
        prefix.append(_token_id(*first))
    return tuple(prefix)


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


def _pairs(place: str, value: object) -> Iterator[tuple[int, int]]:
    """Position and ID; an ID of null leaves its position open."""
    for pair in value if isinstance(value, list) else (value,):
        if not isinstance(pair, list) or len(pair) != 2:
            raise InputError(
                f"{place} is {shown(value)}; a list of pairs of position and token ID is due.",
                next_action="Correct the file.",
            )
        position, token = pair
        if token is not None:
            yield _token_id(place, position), _token_id(place, token)
