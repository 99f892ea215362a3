"""What an encoder is given, or what a decoder is given in its place: from a file, made up, or a source text.

Numbers that are made up are drawn from a seed and the name of their input, so that every engine, every run
and every machine is given the same; the report says that they are made up.
"""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.decode.assembling import GivenInput
from harness.engines.tensor_types import numpy_dtype
from harness.errors import InputError
from harness.ports import Dimension

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SEEDED_LENGTH", "GivenValues", "given_values", "read_inputs", "source_feeds"]

SEEDED_LENGTH = 16
"""How long a made-up sequence is where the graph leaves its length open."""

_MOST_NAMES = 2
"""How many arrays the report lists by name and shape; they follow from the seed, or stand in the file."""

_CHANNELS = {"feature_size": "num_mel_bins", "num_mel_bins": "num_mel_bins", "num_channels": "num_channels"}
"""Symbols that exporters give to axes of features, and where `config.json` has their extent."""


@dataclass(frozen=True, slots=True)
class GivenValues:
    """Values of what must be given from outside.

    Attributes:
        feeds: arrays by port of the whole.
        origin: for the report: where they came from, and their shapes.
    """

    feeds: Mapping[str, NDArray[Any]]
    origin: str


def given_values(
    given: Sequence[GivenInput],
    *,
    file: Path | None,
    seed: int,
    config: Mapping[str, Any] | None = None,
) -> GivenValues:
    """The values of `given`: all of them from `file`, or else made up.

    A mask that the file leaves out, or where there is no file, is all ones: nothing is masked.

    Args:
        given: inputs; those that a source text gives are not among them.
        file: `.npz` with an array for each, by the name in its own graph or in the whole; or None.
        seed: of what is made up.
        config: `config.json` of the package, which knows some extents that graphs leave open.

    Raises:
        InputError: the file cannot be read, lacks one or has another, or one has the wrong dtype or shape,
            is empty, does not go with another, or holds what is no number or no token ID; or there is no
            file and an extent of what would be made up is not known.
    """
    arrays: dict[str, NDArray[Any]] = {}
    loaded = {} if file is None else read_inputs(file)
    lengths = _Lengths(file)
    for each in given:
        found = loaded.pop(each.port.name, None)
        found = loaded.pop(each.name, None) if found is None else found
        if found is not None:
            arrays[each.port.name] = _fitting(each, found, lengths, file)
        elif each.kind == "mask":
            continue
        elif file is not None:
            raise InputError(
                f"--inputs: {file} has no array for {each.name}, {_written(each.port.shape)}.",
                next_action=f"Save one for each of {', '.join(other.name for other in given)}.",
            )
        else:
            shape = _made_up_shape(each, lengths, config or {})
            arrays[each.port.name] = _made_up(each, shape, seed)
    if loaded:
        stray, names = next(iter(loaded)), [each.name for each in given]
        near = difflib.get_close_matches(stray, names, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Inputs are {', '.join(names) or 'none'}."
        raise InputError(f"--inputs: {file} has an array {stray}, which is no input here.", next_action=hint)
    _refuse_other_lengths(given, arrays, file)
    for each in given:
        if each.port.name not in arrays:
            arrays[each.port.name] = _ones(each, lengths)
    where = f"made up from seed {seed}" if file is None else file.name
    return GivenValues(arrays, f"{where}: {_listed(given, arrays)}")


def source_feeds(given: Sequence[GivenInput], source_ids: Sequence[int]) -> dict[str, NDArray[Any]]:
    """What a text encoder is given for a source text: its token IDs, and a mask of ones over them."""
    import numpy as np

    feeds: dict[str, NDArray[Any]] = {}
    for each in given:
        dtype = numpy_dtype(each.port.dtype or "int64")
        if each.kind == "tokens":
            feeds[each.port.name] = np.array([source_ids], dtype=dtype)
        elif each.kind == "mask":
            feeds[each.port.name] = np.ones((1, len(source_ids)), dtype=dtype)
    return feeds


def read_inputs(file: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an `.npz` file, by name.

    Raises:
        InputError: it cannot be read, or holds what is no array; objects would be code to run.
    """
    import numpy as np

    try:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it is an .npy file, of one array without a name")
        with archive:
            arrays = {name: archive[name] for name in archive.files}
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):
                raise ValueError(f"what it has under {name!r:.60} is no array")
        return arrays
    except Exception as error:  # zipfile and numpy raise a dozen kinds on damaged files
        detail = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(
            f"--inputs: {file} cannot be read: {' '.join(str(detail).split())}.",
            next_action="Write it with numpy.savez(FILE, NAME=array, ...).",
        ) from error


def _listed(given: Sequence[GivenInput], arrays: Mapping[str, NDArray[Any]]) -> str:
    shapes = [f"{each.name} {list(arrays[each.port.name].shape)}" for each in given]
    more = f" and {len(shapes) - _MOST_NAMES} more" if len(shapes) > _MOST_NAMES else ""
    return ", ".join(shapes[:_MOST_NAMES]) + more


@dataclass(slots=True)
class _Lengths:
    """What open axes are, by their symbols, and the array that said so first.

    Attributes:
        file: where arrays come from; None where they are made up.
        known: extents by symbol, in the order in which they became known.
        owners: for each symbol the array that has this extent, for messages.
    """

    file: Path | None
    known: dict[str, int] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)

    def settle(self, symbol: str, extent: int, array: str) -> None:
        """Note that the axis `symbol` of `array` has this extent.

        Raises:
            InputError: in an array before it, the same symbol has another one.
        """
        self.owners.setdefault(symbol, array)
        if self.known.setdefault(symbol, extent) != extent:
            raise InputError(
                f"--inputs: {self.file} has {array} beside {self.owners[symbol]}, and {symbol}, an axis of "
                f"both in the graph, is {extent} in one and {self.known[symbol]} in the other.",
                next_action="Save arrays that belong together.",
            )


def _fitting(each: GivenInput, array: NDArray[Any], lengths: _Lengths, file: Path | None) -> NDArray[Any]:
    """The array, which must have the dtype and shape of its input, and hold what can be fed."""
    port = each.port
    shown = f"{each.name} as {array.dtype} {list(array.shape)}"
    wrong = InputError(
        f"--inputs: {file} has {shown}, and the graph takes {port.dtype} {_written(port.shape)}.",
        next_action="Save it in the dtype and shape that the graph takes, for a batch of one.",
    )
    if port.dtype is not None and array.dtype != numpy_dtype(port.dtype):
        raise wrong
    due: Sequence[Dimension] = array.ndim * (None,) if port.shape is None else port.shape
    if array.ndim != len(due):
        raise wrong
    symbols = []
    for axis, (extent, due_extent) in enumerate(zip(array.shape, due, strict=True)):
        is_batch = port.shape is not None and _batch(due_extent, axis) is not None
        known = due_extent if isinstance(due_extent, int) else 1 if is_batch else None
        if known is not None and known != extent:
            raise wrong
        if extent == 0 and known is None:
            raise InputError(
                f"--inputs: {file} has {shown}: its axis {axis} is empty, so that there is nothing to read.",
                next_action="Save at least one token, frame or place along it.",
            )
        if isinstance(due_extent, str) and known is None:
            symbols.append((due_extent, extent))
    for symbol, extent in symbols:
        lengths.settle(symbol, extent, shown)
    _refuse_no_numbers(each, array, file)
    return array


def _refuse_no_numbers(each: GivenInput, array: NDArray[Any], file: Path | None) -> None:
    """NaN and infinities would come out of every product; a mask that is added hides by minus infinity."""
    import numpy as np

    if array.dtype.kind in "biuO" or not array.size:
        return
    bad = ~np.isfinite(array)
    if each.kind == "mask":
        bad &= ~np.isneginf(array)
    if bad.any():
        place = np.unravel_index(int(bad.argmax()), array.shape)
        raise InputError(
            f"--inputs: {file} has {array[place]} in {each.name}{list(map(int, place))}, the first of "
            f"{int(bad.sum())} that are no finite numbers.",
            next_action="Save finite numbers: nothing that is computed of others could be compared.",
        )


def _refuse_other_lengths(
    given: Sequence[GivenInput], arrays: Mapping[str, NDArray[Any]], file: Path | None
) -> None:
    """A mask has a place for each token, whatever the graph calls their axes."""
    for tokens in (each for each in given if each.kind == "tokens"):
        for mask in (each for each in given if each.kind == "mask"):
            one, other = arrays.get(tokens.port.name), arrays.get(mask.port.name)
            if one is not None and other is not None and one.shape[-1:] != other.shape[-1:]:
                raise InputError(
                    f"--inputs: {file} has {mask.name} as {other.dtype} {list(other.shape)} beside "
                    f"{tokens.name} as {one.dtype} {list(one.shape)}: a mask has a place for each token.",
                    next_action="Save arrays that belong together.",
                )


def _made_up_shape(each: GivenInput, lengths: _Lengths, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Extents for what is made up: what the graph says, what `config.json` says, or one open length."""
    shape = each.port.shape
    extents: list[int] = []
    lengths_made_up: list[str] = []
    for axis, extent in enumerate(shape or ()):
        symbol = str(extent)
        known = extent if isinstance(extent, int) else _batch(extent, axis) or lengths.known.get(symbol)
        if known is None and each.kind == "features":
            known = _configured(symbol, shape or (), config)
        if known is None:
            lengths_made_up.append(symbol)
            known = SEEDED_LENGTH
        if isinstance(extent, str):
            lengths.known.setdefault(extent, known)
        extents.append(known)
    if shape is None or each.port.dtype is None or len(lengths_made_up) > 1:
        what = "its shape" if shape is None else f"axes {', '.join(lengths_made_up)} of {_written(shape)}"
        raise InputError(
            f"{each.because} cannot be made up: the graph does not say {what}.",
            next_action="Give it with --inputs FILE.npz.",
        )
    return tuple(extents)


def _configured(symbol: str, shape: Sequence[Dimension], config: Mapping[str, Any]) -> int | None:
    """What `config.json` says about an axis of that name; beside an axis of mel bins, about the frames.

    It is asked of features alone: in cross KV, an axis as long as there are mel bins is a head.
    """
    value = _extent_in(config, _CHANNELS.get(symbol, ""))
    bins, places = _extent_in(config, "num_mel_bins"), _extent_in(config, "max_source_positions")
    is_spectrum = any(_CHANNELS.get(str(extent)) == "num_mel_bins" or extent == bins for extent in shape)
    if value is None and is_spectrum and places is not None and bins is not None:
        value = 2 * places  # the convolutions that such encoders begin with halve the frames
    return value


def _extent_in(config: Mapping[str, Any], key: str) -> int | None:
    """The value of a key that can be an extent."""
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _made_up(each: GivenInput, shape: tuple[int, ...], seed: int) -> NDArray[Any]:
    import numpy as np

    random = np.random.RandomState((seed + zlib.crc32(each.port.name.encode())) % (1 << 32))
    dtype = numpy_dtype(each.port.dtype or "float32")
    if np.issubdtype(dtype, np.integer) or dtype == np.bool_:
        return random.randint(0, 2, shape).astype(dtype)
    return random.standard_normal(shape).astype(dtype)


def _ones(each: GivenInput, lengths: _Lengths) -> NDArray[Any]:
    """A mask that hides nothing, as long as what it is the mask of."""
    import numpy as np

    shape = tuple(
        extent
        if isinstance(extent, int)
        else _batch(extent, axis)
        or lengths.known.get(str(extent))
        or next(reversed([*lengths.known.values()]), SEEDED_LENGTH)
        for axis, extent in enumerate(each.port.shape or (None, None))
    )
    return np.ones(shape, dtype=numpy_dtype(each.port.dtype or "int64"))


def _batch(extent: Dimension, axis: int) -> int | None:
    """One for an open first axis: what encoders take and give has its batch there."""
    return 1 if axis == 0 and not isinstance(extent, int) else None


def _written(shape: Sequence[Dimension] | None) -> str:
    if shape is None:
        return "of any shape"
    return "[" + ", ".join("?" if extent is None else str(extent) for extent in shape) + "]"
