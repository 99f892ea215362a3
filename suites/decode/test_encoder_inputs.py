"""What encoders are given: shapes that the graph or its configuration settles, the same numbers each time."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from harness.decode.assembling import GivenInput, GivenKind
from harness.decode.encoder_inputs import SEEDED_LENGTH, given_values, source_feeds
from harness.errors import InputError
from harness.ports import Dimension, Port

WHISPER = {"num_mel_bins": 80, "max_source_positions": 1500}


def given(name: str, *shape: Dimension, dtype: str = "float32", kind: GivenKind = "features") -> GivenInput:
    """An input of an encoder called `e`."""
    return GivenInput(Port(f"e.{name}", dtype, shape), name, kind, f"{name} of e")


@pytest.mark.parametrize(
    ("shape", "config", "made_up"),
    [
        ((1, 80, 3000), {}, (1, 80, 3000)),
        (("batch", "frames", 8), {}, (1, SEEDED_LENGTH, 8)),
        ((None, None, 8), {}, (1, SEEDED_LENGTH, 8)),
        (("s0", 4, 1500, 16), {}, (1, 4, 1500, 16)),
        # Optimum's spelling of what a Whisper encoder takes: two extents that only the configuration knows.
        (("batch_size", "feature_size", "encoder_sequence_length"), WHISPER, (1, 80, 3000)),
        (("batch_size", 80, "frames"), WHISPER, (1, 80, 3000)),
        # What it gives has no mel bins, so that its length is no number of frames.
        (("batch_size", "encoder_sequence_length", 64), WHISPER, (1, SEEDED_LENGTH, 64)),
        (("batch", "num_channels", 32, 32), {"num_channels": 3}, (1, 3, 32, 32)),
        # Values that can be no extent say nothing.
        (("batch", 80, "frames"), {"num_mel_bins": 80, "max_source_positions": True}, (1, 80, SEEDED_LENGTH)),
        (("batch", 80, "frames"), {"num_mel_bins": 80, "max_source_positions": 0}, (1, 80, SEEDED_LENGTH)),
    ],
)
def test_shapes_that_are_made_up(
    shape: tuple[Dimension, ...], config: dict[str, Any], made_up: tuple[int, ...]
) -> None:
    """What the graph says, what the configuration says, a batch of one, and one open length."""
    values = given_values([given("x", *shape)], file=None, seed=0, config=config)

    assert values.feeds["e.x"].shape == made_up
    assert values.origin == f"made up from seed 0: x {list(made_up)}"


@drawn(st.permutations(["places", 80, 6]), st.integers(0, 2))
def test_what_an_encoder_would_give_is_no_spectrum(axes: list[Dimension], left_out: int) -> None:
    """Cross KV or hidden states with an axis as long as there are mel bins: their length is open as ever."""
    shape = ("batch", *(axis for index, axis in enumerate(axes) if index != left_out or axis == "places"))
    due = tuple({"batch": 1, "places": SEEDED_LENGTH}.get(str(axis), axis) for axis in shape)

    values = given_values([given("x", *shape, kind="states")], file=None, seed=0, config=WHISPER)

    assert values.feeds["e.x"].shape == due


@pytest.mark.parametrize("shape", [("batch", "channels", "height", "width"), ("batch", "feature_size", "n")])
def test_what_cannot_be_made_up_is_asked_for(shape: tuple[Dimension, ...]) -> None:
    """Two open lengths could be anything: the axes are named, and the option that gives the numbers."""
    with pytest.raises(InputError, match=rf"axes {shape[1]}, .* of \[batch, .*--inputs"):
        given_values([given("x", *shape)], file=None, seed=0)


@drawn(st.integers(0, 2**40), st.integers(0, 2**40))
def test_numbers_follow_from_seed_and_name_alone(seed: int, other: int) -> None:
    """The same for one seed, whatever else is given; others for another seed, and for another input."""
    x, y = given("x", "batch", "n", 4), given("y", "batch", "n", 4)

    alone = given_values([x], file=None, seed=seed).feeds
    both = given_values([y, x], file=None, seed=seed).feeds
    again = given_values([x], file=None, seed=other).feeds

    assert np.array_equal(alone["e.x"], both["e.x"])
    assert not np.array_equal(both["e.x"], both["e.y"])
    assert np.array_equal(alone["e.x"], again["e.x"]) == (seed % 2**32 == other % 2**32)


def test_numbers_are_the_same_on_every_machine() -> None:
    """The first of them, as numpy's frozen generator gave them when this was written."""
    (value,) = given_values([given("x", 1, 3)], file=None, seed=0).feeds.values()

    assert value.dtype == np.float32
    assert np.allclose(value, [[0.05924706, 1.7499763, -0.6978251]], atol=1e-6)


def test_masks_hide_nothing_and_are_as_long_as_what_they_are_of(tmp_path: Path) -> None:
    """Whether made up or in a file; one that the file gives is taken."""
    x, mask = given("x", "batch", "n", 4), given("mask", "batch", "m", dtype="int64", kind="mask")
    np.savez(tmp_path / "x.npz", x=np.zeros((1, 7, 4), np.float32))
    np.savez(tmp_path / "both.npz", x=np.zeros((1, 2, 4), np.float32), mask=np.array([[1, 0]]))

    made_up = given_values([x, mask], file=None, seed=0).feeds["e.mask"]
    beside = given_values([mask, x], file=tmp_path / "x.npz", seed=0).feeds["e.mask"]
    own = given_values([x, mask], file=tmp_path / "both.npz", seed=0).feeds["e.mask"]

    assert made_up.tolist() == [[1] * SEEDED_LENGTH]
    assert beside.tolist() == [[1] * 7]
    assert own.tolist() == [[1, 0]]
    assert made_up.dtype == np.int64


def test_arrays_of_one_length_must_agree(tmp_path: Path) -> None:
    """Axes that the graph spells alike have one extent; both arrays are named, with their shapes."""
    np.savez(tmp_path / "f.npz", x=np.zeros((1, 7, 4), np.float32), y=np.zeros((1, 6, 4), np.float32))

    with pytest.raises(
        InputError, match=r"has y as float32 \[1, 6, 4\] beside x as float32 \[1, 7, 4\], and n, .* 6 .* 7"
    ):
        given_values(
            [given("x", "batch", "n", 4), given("y", "batch", "n", 4)], file=tmp_path / "f.npz", seed=0
        )


@drawn(st.integers(1, 9), st.integers(1, 9), st.sampled_from(["n", "m", None]), st.booleans(), st.booleans())
def test_a_mask_has_a_place_for_each_token(
    tokens: int, places: int, symbol: Dimension, mask_first: bool, as_flags: bool
) -> None:
    """Whatever the graph calls its axis, in whatever order inputs stand; both shapes are in the message."""
    dtype = "bool" if as_flags else "int64"
    inputs = [
        given("ids", "batch", "n", dtype="int64", kind="tokens"),
        given("mask", "batch", symbol, dtype=dtype, kind="mask"),
    ]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "f.npz"
        np.savez(file, ids=np.zeros((1, tokens), np.int64), mask=np.ones((1, places), dtype))
        if tokens == places:
            given_values(inputs[::-1] if mask_first else inputs, file=file, seed=0)
            return
        with pytest.raises(InputError, match="beside") as caught:
            given_values(inputs[::-1] if mask_first else inputs, file=file, seed=0)

    assert f"mask as {dtype} [1, {places}]" in caught.value.message
    assert f"ids as int64 [1, {tokens}]" in caught.value.message


@pytest.mark.parametrize("kind", ["tokens", "mask", "features", "states"])
@pytest.mark.parametrize("axis", [1, 2])
def test_nothing_to_read_is_bad_input(axis: int, kind: GivenKind, tmp_path: Path) -> None:
    """No tokens, frames or places: an open axis of extent zero is named. One that the graph has is due."""
    shape = [1, 3, 3]
    shape[axis] = 0
    np.savez(tmp_path / "f.npz", x=np.zeros(shape, np.int64))

    with pytest.raises(InputError, match=rf"x as int64 .*: its axis {axis} is empty"):
        given_values(
            [given("x", "batch", "n", None, dtype="int64", kind=kind)], file=tmp_path / "f.npz", seed=0
        )
    due = given_values([given("x", *shape, dtype="int64", kind=kind)], file=tmp_path / "f.npz", seed=0)
    assert due.feeds["e.x"].shape == tuple(shape)


@settings(deadline=None)
@drawn(
    st.sampled_from(["float16", "float32", "float64"]),
    st.sampled_from([np.nan, np.inf, -np.inf]),
    st.lists(st.integers(0, 23), min_size=1, unique=True),
    st.sampled_from(["features", "states", "mask"]),
)
def test_what_is_no_number_is_named_with_its_place(
    dtype: str, bad: float, places: list[int], kind: GivenKind
) -> None:
    """The first one; a mask that is added to scores hides by minus infinity, and by nothing else."""
    array = np.zeros((1, 6, 4), dtype)
    array.reshape(-1)[places] = bad
    inputs = [given("x", "batch", "n", 4, dtype=dtype, kind=kind)]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "f.npz"
        np.savez(file, x=array)
        if kind == "mask" and bad == -np.inf:
            assert np.array_equal(given_values(inputs, file=file, seed=0).feeds["e.x"], array)
            return
        with pytest.raises(InputError) as caught:
            given_values(inputs, file=file, seed=0)

    row, column = divmod(min(places), 4)
    assert f"has {bad} in x[0, {row}, {column}], the first of {len(places)}" in caught.value.message


def test_arrays_may_have_the_names_of_the_whole(tmp_path: Path) -> None:
    """Where two graphs have an input of one name, the component before it tells them apart."""
    np.savez(tmp_path / "f.npz", **{"e.x": np.ones((1, 2), np.float32)})

    assert given_values([given("x", 1, 2)], file=tmp_path / "f.npz", seed=0).feeds["e.x"].tolist() == [[1, 1]]


def as_npy(file: Path) -> None:
    """One array, as `numpy.save` writes it."""
    with file.open("wb") as stream:
        np.save(stream, np.zeros((1, 7, 4), np.float32))


def as_objects(file: Path) -> None:
    """An array of objects."""
    with file.open("wb") as stream:
        np.savez(stream, x=np.array([{}, None]))


def as_bytes(file: Path) -> None:
    """An archive with a file that is no array under the very name."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x", b"0" * 112)


def cut_short(file: Path) -> None:
    """Half of an archive."""
    np.savez(file, x=np.zeros((1, 7, 4), np.float32))
    file.write_bytes(file.read_bytes()[:200])


NO_ARCHIVE: dict[str, tuple[Callable[[Path], object], str]] = {
    "one array": (as_npy, "it is an .npy file, of one array without a name"),
    "objects": (as_objects, "pickle"),
    "a pickle": (lambda file: file.write_bytes(pickle.dumps([1])), "pickle"),
    "a file of an archive": (as_bytes, "what it has under 'x' is no array"),
    "half of an archive": (cut_short, ""),
    "a text": (lambda file: file.write_text("x"), ""),
    "nothing": (lambda file: file.write_bytes(b""), "No data left in file"),
    "a folder": (lambda file: file.mkdir(), "Is a directory"),
    "no file": (lambda file: None, "No such file"),
}


@pytest.mark.parametrize("what", NO_ARCHIVE)
def test_a_file_that_is_no_archive_of_arrays_is_refused(tmp_path: Path, what: str) -> None:
    """Whatever it is in truth: what is wrong with it in one line, and how to write one."""
    write, says = NO_ARCHIVE[what]
    write(tmp_path / "f.npz")

    with pytest.raises(
        InputError, match=r"^--inputs: \S+f\.npz cannot be read: [^\n]+\. Write it with"
    ) as caught:
        given_values([given("x", 1, 7, 4)], file=tmp_path / "f.npz", seed=0)
    assert says in caught.value.message
    assert "context manager" not in caught.value.message


def test_a_source_text_fills_tokens_and_mask() -> None:
    """In the dtypes of the graph; features beside it are not touched."""
    inputs = [
        given("ids", "batch", "n", dtype="int32", kind="tokens"),
        given("mask", "batch", "n", dtype="int64", kind="mask"),
        given("style", 1, 4),
    ]

    feeds = source_feeds(inputs, (4, 5, 6))

    assert {name: (array.dtype.name, array.tolist()) for name, array in feeds.items()} == {
        "e.ids": ("int32", [[4, 5, 6]]),
        "e.mask": ("int64", [[1, 1, 1]]),
    }
