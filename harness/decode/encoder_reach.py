"""What an encoder can read: token IDs that its embedding has, and as many places as its tables have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.decode.assembling import GivenInput
from harness.decode.computed import Hollow
from harness.decode.tables import Added, Looked, Table, Tables
from harness.errors import InputError
from harness.package.components import mapping_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["check_encoder", "fitted"]

_MOST_FRAMES = 64
"""How many frames at most become one place, where a length is looked for that fits."""


def check_encoder(
    tables: Tables, given: Sequence[GivenInput], fed: Mapping[str, NDArray[Any]], config: Mapping[str, Any]
) -> None:
    """See that a graph that encodes has a row for all that it is fed.

    Args:
        tables: of the graph.
        given: its inputs.
        fed: their values, by the names in the graph.
        config: `config.json` of the package, which is asked where the graph does not show it.

    Raises:
        InputError: it has not: the array and its first element, or its length, are named with the table.
    """
    readings = tables.read(fed)
    names = [each.name for each in given if each.kind == "tokens" and each.name in fed]
    for name in names:
        looked = [each for each in readings if isinstance(each, Looked) and each.port == name]
        rows, where = _vocabulary(looked, config)
        _check_elements(tables, name, fed[name], 0, rows, f"outside the vocabulary of the encoder: {where}")
    for reading in readings:
        if reading.fits:
            continue
        if isinstance(reading, Added):
            raise _misfit(tables, reading, fed, next(_lengths_that_fit(tables, given, fed), None))
        if reading.port in fed:
            name, table, rows = str(reading.port), _written(reading.table), reading.rows
            _check_elements(tables, name, fed[name], -rows, rows, f"no row of {table}")
        raise _too_long(tables, reading, fed, names)
    _check_frames(tables, readings, fed, config)


def fitted(
    tables: Tables, given: Sequence[GivenInput], fed: Mapping[str, NDArray[Any]]
) -> tuple[GivenInput, ...]:
    """The inputs with the length that a made-up array must have, where the one that was made up does not fit.

    Args:
        tables: of the graph that encodes.
        given: inputs, its own among them.
        fed: what was made up for it, by the names in the graph.
    """
    if all(reading.fits for reading in tables.read(fed)):
        return tuple(given)
    found = next(_lengths_that_fit(tables, given, fed), None)
    if found is None:
        return tuple(given)
    changed, axis, extent = found
    shape = tuple(changed.port.shape or ())
    port = replace(changed.port, shape=(*shape[:axis], extent, *shape[axis + 1 :]))
    return tuple(replace(each, port=port) if each is changed else each for each in given)


def _vocabulary(looked: Sequence[Looked], config: Mapping[str, Any]) -> tuple[int | None, str]:
    """How many token IDs an encoder has, and what says so.

    That is the number of rows of the embedding that they are looked up in. Where the graph does not show
    one, `config.json` says it: of the encoder itself, of source and target apart (FSMT), or of both.
    """
    if looked:
        smallest = min(looked, key=lambda each: each.rows)
        return smallest.rows, f"{_written(smallest.table)} has {smallest.rows} rows"
    for place, section, key in (
        ("encoder.", mapping_at(config, "encoder"), "vocab_size"),
        ("", config, "src_vocab_size"),
        ("", config, "vocab_size"),
    ):
        size = section.get(key)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size, f"{place}{key} of config.json is {size}"
    return None, "no token ID is below zero"


def _check_elements(
    tables: Tables, name: str, array: NDArray[Any], least: int, end: int | None, why: str
) -> None:
    """See that what is looked up is from `least` up to, and without, `end`."""
    import numpy as np

    bad = array < least
    if end is not None:
        bad |= array >= end
    if bad.any():
        place = np.unravel_index(int(bad.argmax()), array.shape)
        raise InputError(
            f"{tables.path.name} is given {name}{list(map(int, place))} = {array[place]}, which is {why}.",
            next_action="Use IDs of the tokenizer that the model was exported with.",
        )


def _too_long(
    tables: Tables, reading: Looked, fed: Mapping[str, NDArray[Any]], names: Sequence[str]
) -> InputError:
    """A source that goes on behind the last position; how many tokens do not, where that can be told."""
    length = max((fed[name].shape[-1] for name in names), default=0)
    most = length - (reading.missing - reading.rows + 1)
    cut = {name: array[..., :most] if array.shape[-1:] == (length,) else array for name, array in fed.items()}
    is_told = 0 < most < length and all(each.fits for each in tables.read(cut))
    return InputError(
        f"{tables.path.name} is given {_listed(fed)}, and {_written(reading.table)} has no row "
        f"{reading.missing} for the last position.",
        next_action=f"Give a source of at most {most} tokens." if is_told else "Give a shorter source.",
    )


def _lengths_that_fit(
    tables: Tables, given: Sequence[GivenInput], fed: Mapping[str, NDArray[Any]]
) -> Iterator[tuple[GivenInput, int, int]]:
    """Inputs with an open axis, and how long that must be for all places to have a row."""
    for each in given:
        for axis, extent in enumerate(each.port.shape or ()):
            if axis and not isinstance(extent, int) and each.name in fed and each.kind == "features":
                length = _length_that_fits(tables, fed, each.name, axis)
                if length is not None:
                    yield each, axis, length


def _length_that_fits(tables: Tables, fed: Mapping[str, NDArray[Any]], name: str, axis: int) -> int | None:
    """The longest array with which all tables go: a longer one becomes as many places or more."""

    def added(length: int) -> dict[str, Added]:
        shape = list(fed[name].shape)
        shape[axis] = length
        found = tables.read({**fed, name: Hollow(fed[name].dtype, tuple(shape))})
        return {each.table.name: each for each in found if isinstance(each, Added)}

    wrong = next((each for each in added(fed[name].shape[axis]).values() if not each.fits), None)
    if wrong is None:
        return None
    fits, long = 0, _MOST_FRAMES * wrong.rows
    while long - fits > 1:
        middle = (fits + long) // 2
        there = added(middle).get(wrong.table.name)
        if there is None or there.places <= wrong.rows:
            fits = middle
        else:
            long = middle
    there = added(fits).get(wrong.table.name)
    return fits if there is not None and all(each.fits for each in added(fits).values()) else None


def _misfit(
    tables: Tables, reading: Added, fed: Mapping[str, NDArray[Any]], due: tuple[GivenInput, int, int] | None
) -> InputError:
    """Features of another length than a table of positions."""
    takes = ""
    if due is not None:
        shape = list(fed[due[0].name].shape)
        shape[due[1]] = due[2]
        takes = f" It takes {due[0].name} {shape}."
    return InputError(
        f"{tables.path.name} is given {_listed(fed)}, which becomes {reading.places} places, and "
        f"{_written(reading.table)} has {reading.rows}.{takes}",
        next_action="Give as many frames as the model was exported for, filled up or cut.",
    )


def _check_frames(
    tables: Tables,
    readings: Sequence[Looked | Added],
    fed: Mapping[str, NDArray[Any]],
    config: Mapping[str, Any],
) -> None:
    """Where the graph does not show that places and rows go together: Whisper takes spectra of one length.

    Two frames become one of `max_source_positions` (transformers, `WhisperEncoder.forward`). A single place
    would go with all rows, and mean nothing.
    """
    bins, places = config.get("num_mel_bins"), config.get("max_source_positions")
    if config.get("model_type") != "whisper" or type(bins) is not int or type(places) is not int:
        return
    if any(isinstance(each, Added) and each.rows == each.places == places for each in readings):
        return
    for name, array in fed.items():
        if array.ndim == 3 and bins in array.shape[1:]:
            frames = array.shape[2 if array.shape[1] == bins else 1]
            if (frames + 1) // 2 != places:
                raise InputError(
                    f"{tables.path.name} is given {name} {list(array.shape)}, of {frames} frames, and takes "
                    f"{2 * places}: two become one of the max_source_positions of config.json, {places}.",
                    next_action="Give as many frames, filled up or cut.",
                )


def _listed(fed: Mapping[str, NDArray[Any]]) -> str:
    return ", ".join(f"{name} {list(array.shape)}" for name, array in fed.items())


def _written(table: Table) -> str:
    return f"{table.name} {list(table.shape)}"
