"""Answers of a worker: what is right is read to the last bit, and whatever else comes is malformed."""

from __future__ import annotations

import copy
import json
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.engines.base import SessionInfo, TopLogits
from harness.engines.isolated.answers import check_copy, error_in, opened_in, ran_in, tops_in
from harness.engines.isolated.protocol import (
    Arriving,
    Document,
    MalformedError,
    error_document,
    framed,
    info_document,
    ports_document,
    receive,
    shortened,
    top_document,
)
from harness.errors import (
    EngineFailedError,
    EngineUnavailableError,
    InputError,
    InvalidRunError,
    NotDrivableError,
    ParityError,
)
from harness.ports import Port, PortInventory

INFO = SessionInfo(
    "e", "1", {"threads": 2, "tf32": False, "opt": "all"}, {"providers": {"cpu": {"Add": 1}}}, "eager"
)
PORTS = PortInventory((Port("x", "float32", (1, "n", None)), Port("y")), (Port("z", "int64", ()),))
TOPS = [TopLogits((3, 1), (0.1, -math.inf)), TopLogits((0,), (1e-45,), has_nan=True)]
CRASH = EngineFailedError("it fell", kind="crashed", next_action="Go.")

_RIGHT: dict[str, tuple[Callable[[Document], Any], Document]] = {
    "open": (opened_in, {"info": info_document(INFO), "ports": ports_document(PORTS)}),
    "run": (
        lambda document: ran_in(document, ("a", "b")),
        {
            "outputs": [0, 0],
            "kinds": [["float32", [1, 2]]],
            "tops": [top_document(top) for top in TOPS],
        },
    ),
    "top": (tops_in, {"tops": [top_document(top) for top in TOPS]}),
    "copy": (lambda document: check_copy(document, ("int64", (0, 2))), {"dtype": "int64", "shape": [0, 2]}),
    "failure": (error_in, {"error": error_document(CRASH)}),
    "error": (error_in, {"error": error_document(InputError("no", next_action="Go."))}),
}
"""What reads each answer, and one that is right."""

READERS = {name: (reader, json.loads(json.dumps(right))) for name, (reader, right) in _RIGHT.items()}

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def crossed(document: Document) -> Document:
    """A document as the other process has it."""
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        ours.sendall(framed(document))
        found = receive(theirs)
    assert found is not None
    return found


def test_what_is_right_is_read_to_the_last_bit() -> None:
    """What runs, ports, kinds, logits and copies."""
    read = {name: reader(crossed(document)) for name, (reader, document) in READERS.items()}
    assert (read["open"].info, read["open"].inventory) == (INFO, PORTS)
    assert read["run"].kinds == (("float32", (1, 2)),) * 2
    assert read["run"].tops == read["top"] == TOPS
    assert read["copy"] is None


@pytest.mark.parametrize(
    "error",
    [
        CRASH,
        EngineFailedError("a", kind="unsupported", next_action="b"),
        EngineFailedError("a", kind="timeout", next_action="b"),
        EngineUnavailableError("a", next_action="b"),
        InputError("a", next_action="b"),
        InvalidRunError("a", next_action="b"),
    ],
)
def test_an_error_of_ours_is_read_as_it_was(error: ParityError) -> None:
    """Class, kind, message and what to do."""
    found = error_in(crossed({"error": error_document(error)}))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert getattr(found, "kind", None) == getattr(error, "kind", None)


def test_an_error_that_is_no_engines_is_an_error_of_input() -> None:
    """It says what is wrong all the same."""
    error = NotDrivableError("a", next_action="b", ports=("c",))
    assert isinstance(error_in({"error": error_document(error)}), InputError)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a document with each of its keys."""
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, item in entries:
        yield value, key
        yield from places(item)


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_a_wrong_value_anywhere_is_named_or_means_something_else(name: str, data: st.DataObject) -> None:
    """Nothing but `MalformedError` comes of it, in one short line, and what is read has its types."""
    reader, right = READERS[name]
    document = copy.deepcopy(right)
    container, key = data.draw(st.sampled_from(list(places(document))))
    if data.draw(st.booleans()):
        container[key] = data.draw(ANYTHING)
    else:
        del container[key]
    try:
        read = reader(document)
    except MalformedError as error:
        said = str(error)
    else:
        _check_types(name, read)
        return
    assert 0 < len(said) < 500


def _check_types(name: str, read: Any) -> None:
    if name == "run":
        assert all(type(extent) is int and extent >= 0 for _, shape in read.kinds for extent in shape)
    if name == "open":
        json.dumps(read.info.placement, allow_nan=False)


@pytest.mark.parametrize("name", READERS)
def test_a_field_that_is_lacking_is_named(name: str) -> None:
    """Each of an answer, and each of its parts."""
    reader, right = READERS[name]
    lacking = 0
    for index in range(len(list(places(right)))):
        document = copy.deepcopy(right)
        container, key = list(places(document))[index]
        if isinstance(container, dict) and key not in (
            *INFO.settings,
            "tops",
            "error",
            "providers",
            "cpu",
            "Add",
        ):
            del container[key]
            lacking += 1
            with pytest.raises(MalformedError, match=f"lacks `{'kind' if key == 'class' else key}`"):
                reader(document)
    assert lacking or name == "top"


@given(pieces=st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_a_document_arrives_however_it_is_cut(pieces: list[int]) -> None:
    """It is there with its last byte, and not before."""
    document = {"a": [1.5, "\N{SNOWMAN}"], "b": {"c": None}}
    data = framed(document)
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        theirs.setblocking(False)
        arriving = Arriving()
        while data:
            size = pieces.pop() if pieces else len(data)
            ours.sendall(data[:size])
            data = data[size:]
            found = arriving.read(theirs)
            assert found == (None if data else document)
            assert data or found is not None
            if data:
                assert arriving.read(theirs) is None  # nothing more is there yet


@given(litter=st.binary(min_size=8, max_size=64))
@example(litter=(1).to_bytes(8, "little") + b"[")
@example(litter=(3).to_bytes(8, "little") + b"\xff{}")
@example(litter=(5001).to_bytes(8, "little") + b"1" * 5001)
def test_litter_is_no_document(litter: bytes) -> None:
    """Whatever stands in the channel is malformed, or not yet whole."""
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        ours.sendall(litter)
        ours.close()
        with suppress(MalformedError):
            assert receive(theirs) in (None, {})


@given(length=st.integers(0, 10_000))
@example(length=4096)
@example(length=4097)
def test_a_text_is_short_and_says_what_it_lacks(length: int) -> None:
    """No longer than 4096 characters, cut once whoever cuts it again."""
    text = shortened("x" * length)
    assert len(text) <= 4096
    assert shortened(text) == text
    if length > 4096:
        kept = text.index(".")
        assert text == f"{'x' * kept}... ({length - kept} more characters)"
    else:
        assert text == "x" * length
