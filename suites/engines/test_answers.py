"""What engines answer is looked at before anything is made of it: logits, and what sessions say they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.decoders import TinyDecoder
from fixtures.planted import planted
from harness.decode.loop import greedy_decode, one_pass_decode
from harness.engines.answers import largest, largest_of_rows
from harness.engines.base import Availability, EngineOption, OptionValue, Session, SessionInfo, TopLogits
from harness.engines.reduce import top_logits_of
from harness.engines.registry import EngineSpec, parse_engine
from harness.errors import EngineFailedError
from harness.ports import PortInventory

DECODER = TinyDecoder(layers="a", seed=3)
VOCABULARY = 16
NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Handle:
    """Logits that nobody looks at."""

    shape: Any = (1, 4, VOCABULARY)
    dtype: str = "float32"


class Answering:
    """A session that gives what it was made with, whatever it is asked."""

    info = SessionInfo("answering", "1")

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def top_logits(self, *_: object, **__: object) -> Any:
        """The answer."""
        return self._answer

    top_logits_of_rows = top_logits


def asked(
    answer: object, *, k: int = 3, positions: Sequence[int] = (-1,), handle: Handle = Handle()
) -> list[TopLogits]:
    """What comes of an answer; the same by both ways to ask."""
    session: Any = Answering(answer)
    places = [(0, position) for position in positions]
    found = None
    try:
        found = largest_of_rows(session, handle, k=k, places=places, engine="answering")
    finally:
        alone = largest(session, handle, k=k, positions=positions)
    assert str(alone) == str(found)
    return alone


RIGHT = TopLogits((7, 2, 9), (3.0, 1.0, 1.0))


def row(**changes: Any) -> Any:
    """A right answer at one position but for these."""
    return replace(RIGHT, **changes)


WRONG: Mapping[str, tuple[Any, str]] = {
    "nothing": (None, "gave NoneType for the largest logits at 1 positions"),
    "a text": ("abc", "gave str"),
    "no rows": ([], "gave 0 entries"),
    "two rows": ([RIGHT, RIGHT], "gave 2 entries"),
    "a row of nothing": ([None], "NoneType instead of TopLogits"),
    "a plain tuple": ([((7, 2, 9), (3.0, 1.0, 1.0), False)], "tuple instead of TopLogits"),
    "no IDs": ([row(token_ids=None)], "must be tuples"),
    "IDs as a text": ([row(token_ids="729")], "must be tuples"),
    "no values": ([row(values=None)], "must be tuples"),
    "one number for values": ([row(values=3.0)], "must be tuples"),
    "empty": ([TopLogits((), ())], "0 token IDs and 0 values, where 3 of each are due"),
    "one alone": ([TopLogits((7,), (3.0,))], "1 token IDs and 1 values"),
    "one too many": ([TopLogits((7, 2, 9, 11), (3.0, 1.0, 1.0, 0.0))], "4 token IDs and 4 values"),
    "fewer values": ([row(values=(3.0, 1.0))], "3 token IDs and 2 values"),
    "fewer IDs": ([row(token_ids=(7, 2))], "2 token IDs and 3 values"),
    "an ID beyond the vocabulary": (
        [row(token_ids=(VOCABULARY, 2, 9))],
        "token ID 16, which must be a whole",
    ),
    "an ID of many digits": ([row(token_ids=(10**30, 2, 9))], "token ID 1000000"),
    "an ID of more digits than print": ([row(token_ids=(10**5000, 2, 9))], "token ID a number of thousands"),
    "a negative ID": ([row(token_ids=(7, 2, -1))], "token ID -1"),
    "a float as ID": ([row(token_ids=(7.0, 2, 9))], "token ID 7.0"),
    "half an ID": ([row(token_ids=(7, 2.5, 9))], "token ID 2.5"),
    "a truth value as ID": ([row(token_ids=(True, 2, 9))], "token ID True"),
    "numpy's truth value as ID": ([row(token_ids=(np.True_, 2, 9))], "token ID True"),
    "a text as ID": ([row(token_ids=("7", 2, 9))], "token ID '7'"),
    "nothing as ID": ([row(token_ids=(None, 2, 9))], "token ID None"),
    "an ID twice": ([row(token_ids=(7, 2, 2))], "a token ID stands twice among 7, 2, 2"),
    "nothing as value": ([row(values=(None,) * 3)], "the logit of token 7 is None"),
    "a text as value": ([row(values=(3.0, "1.0", 1.0))], "the logit of token 2 is '1.0'"),
    "a truth value as value": ([row(values=(True, False, False))], "the logit of token 7 is True"),
    "a complex value": ([row(values=(3j, 1.0, 1.0))], "the logit of token 7 is 3j"),
    "a nested value": ([row(values=((3.0,), 1.0, 1.0))], "the logit of token 7 is (3.0,)"),
    "smallest first": ([row(values=(1.0, 2.0, 3.0))], "token 2 with 2 stands behind token 7 with 1"),
    "equal ones by falling ID": ([row(token_ids=(7, 9, 2))], "token 2 with 1 stands behind token 9 with 1"),
    "zeros by falling ID": ([row(token_ids=(9, 7, 2), values=(0.0, -0.0, -1.0))], "token 7 with -0 stands"),
    "NaN before a number": ([row(values=(NAN, 1.0, 0.0))], "token 2 with 1 stands behind token 7 with nan"),
    "minus infinity before a number": ([row(values=(-INF, 1.0, 0.0))], "stands behind token 7 with -inf"),
    "a flag in words": ([row(has_nan="no")], "has_nan is 'no'"),
    "no flag": ([row(has_nan=None)], "has_nan is None"),
    "a number as flag": ([row(has_nan=1)], "has_nan is 1"),
}
"""Answers for the three largest logits at one position, and what is said of each."""


@pytest.mark.parametrize("name", WRONG)
def test_an_answer_of_a_wrong_form_is_a_crash(name: str) -> None:
    """The message names the engine, and what is wrong with the answer."""
    answer, said = WRONG[name]

    with pytest.raises(EngineFailedError) as caught:
        asked(answer)

    assert caught.value.kind == "crashed"
    assert caught.value.message.startswith("answering gave ")
    assert said in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("name", [name for name, (answer, _) in WRONG.items() if isinstance(answer, list)])
def test_every_row_of_an_answer_is_looked_at(name: str, place: int) -> None:
    """A wrong row is found wherever it stands, and named by its place."""
    answer, said = WRONG[name]
    if len(answer) != 1:
        return
    rows = [RIGHT] * 3
    rows[place] = answer[0]

    with pytest.raises(EngineFailedError, match=f"at position {place} of 3") as caught:
        asked(rows, positions=(0, 1, 2))

    assert said in caught.value.message


@pytest.mark.parametrize("shape", [None, "abc", (), ("a",), (1, 4, 0), (1, 4, -1), (1, 4, 16.0), 7])
def test_logits_without_a_vocabulary_are_a_crash(shape: Any) -> None:
    """What the largest are compared with is the engine's own, too."""
    with pytest.raises(EngineFailedError, match="answering gave logits of shape"):
        asked([RIGHT], handle=Handle(shape))


@given(
    rows=st.lists(
        st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0, NAN, INF, -INF]), min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    ),
    k=st.integers(1, 8),
)
def test_right_answers_pass_as_they_are(rows: list[list[float]], k: int) -> None:
    """Ties, NaN and infinities where they belong, and fewer than `k` of a smaller vocabulary."""
    array = np.array([rows], np.float32)
    answer = top_logits_of(array, k)

    found = asked(answer, k=k, positions=range(len(rows)), handle=Handle(array.shape))

    assert str(found) == str(answer)  # equality in which NaN equals NaN


def test_numbers_of_numpy_become_plain_ones() -> None:
    """They mean the same; a report could not hold them."""
    answer = row(
        token_ids=tuple(np.int64(token) for token in RIGHT.token_ids),
        values=np.array(RIGHT.values, np.float32),
        has_nan=np.False_,
    )

    (found,) = asked([answer])

    assert found == RIGHT
    assert {type(number) for number in (*found.token_ids, *found.values, found.has_nan)} == {int, float, bool}


@pytest.mark.parametrize("values", [(NAN, NAN, NAN), (3.0, NAN, NAN), (INF, 1.0, NAN)])
def test_nan_among_the_values_is_nan(values: tuple[float, ...]) -> None:
    """Whatever the flag says."""
    (found,) = asked([row(values=values)])

    assert found.has_nan
    assert not asked([RIGHT])[0].has_nan
    assert asked([row(has_nan=True)])[0].has_nan


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny decoder."""
    return DECODER.save(tmp_path_factory.mktemp("tiny") / "model.onnx")


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("name", ["nothing", "no rows", "empty", "a negative ID", "nothing as value"])
def test_a_decode_ends_with_a_wrong_answer(model: Path, name: str, step: int) -> None:
    """It is a failure at that step, and what came before is kept."""
    answer, said = WRONG[name]
    session = planted(logits=lambda run, top: top if run != step else answer).open(model)
    try:
        trace = greedy_decode(session, DECODER.topology, (1, 2), max_new_tokens=4, top_k=3)
        passed = one_pass_decode(session, DECODER.topology, (1, 2), (3, 4))
    finally:
        session.close()

    assert trace.failure is not None
    assert (trace.failure.kind, trace.failure.step, len(trace.token_ids)) == ("crashed", step, step)
    assert trace.failure.message.startswith("planted gave ")
    assert said in trace.failure.message
    assert passed is not None
    assert passed.failure is None


@dataclass(frozen=True)
class Posing:
    """A real engine whose sessions say of themselves what they are told to; a process of its own finds it."""

    says: Mapping[str, Any] = field(default_factory=dict)
    name: str = "posing"
    description: str = "a real engine"
    options: Mapping[str, EngineOption] = field(default_factory=lambda: MappingProxyType({}))
    closed: list[str] = field(default_factory=list)

    def availability(self) -> Availability:
        """Always usable."""
        return Availability(usable=True)

    def open(self, model: Path, options: Mapping[str, OptionValue]) -> Session:
        """A session of the real engine, behind what it says."""
        return cast("Session", _Poser(parse_engine("ort-cpu:threads=1").open(model), self))


class _Poser:
    def __init__(self, inner: Session, engine: Posing) -> None:
        self._inner = inner
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def inventory(self) -> Any:
        return self._engine.says.get("inventory", self._inner.inventory)

    @property
    def info(self) -> Any:
        if "info" in self._engine.says:
            told = self._engine.says["info"]
            return told() if isinstance(told, Callable) else told
        info = replace(self._inner.info, engine="posing")
        return replace(
            info, **{name: told for name, told in self._engine.says.items() if name != "inventory"}
        )

    def close(self) -> None:
        self._engine.closed.append("closed")
        self._inner.close()


def _fail() -> None:
    raise RuntimeError("no idea")


def placed(**providers: Any) -> dict[str, Any]:
    """A placement."""
    return {"placement": {"providers": providers}}


CPU = "CPUExecutionProvider"
MISINFORMED: Mapping[str, tuple[dict[str, Any], str]] = {
    "no inventory": ({"inventory": None}, "its inventory is None"),
    "no info": ({"info": None}, "its info is None"),
    "info that raises": ({"info": _fail}, "it raised RuntimeError when asked"),
    "another name": ({"engine": "oracle"}, "it gives 'oracle' as the name of its engine"),
    "no name": ({"engine": None}, "it gives None"),
    "no version": ({"version": None}, "its version is None"),
    "no settings": ({"settings": None}, "its settings are None"),
    "a list of settings": ({"settings": ["threads"]}, "its settings are ['threads']"),
    "a nested setting": ({"settings": {"a": {"b": [1]}}}, "its setting 'a' is {'b': [1]}"),
    "NaN as setting": ({"settings": {"a": NAN}}, "its setting 'a' is nan"),
    "a setting of numpy": ({"settings": {"a": np.int64(3)}}, "its setting 'a' is"),
    "a setting without a name": ({"settings": {None: 3}}, "its setting None is 3"),
    "an odd mode": ({"mode": "fancy"}, "its mode is 'fancy'"),
    "an unhashable mode": ({"mode": ["eager"]}, "its mode is ['eager']"),
    "placement as text": ({"placement": "CPU"}, "its placement is 'CPU'"),
    "providers as list": (
        {"placement": {"providers": ["CPU"]}},
        "the providers of its placement are ['CPU']",
    ),
    "a provider without operators": (placed(**{CPU: None}), f"its placement on '{CPU}' is None"),
    "a provider with a number": (placed(**{CPU: 5}), f"its placement on '{CPU}' is 5"),
    "nodes in words": (placed(**{CPU: {"MatMul": "many"}}), "'many' nodes of 'MatMul'"),
    "fewer nodes than none": (placed(**{CPU: {"MatMul": -5}}), "-5 nodes of 'MatMul'"),
    "no nodes": (placed(**{CPU: {"MatMul": 0}}), "0 nodes of 'MatMul'"),
    "half a node": (placed(**{CPU: {"MatMul": 0.5}}), "0.5 nodes"),
    "a truth value of nodes": (placed(**{CPU: {"MatMul": True}}), "True nodes"),
    "an operator without a name": (placed(**{CPU: {7: 1}}), "1 nodes of 7"),
}


@pytest.mark.parametrize("name", MISINFORMED)
def test_a_session_that_does_not_say_what_it_is_is_a_crash(model: Path, name: str) -> None:
    """Found when it opens, and said once; it is closed again."""
    says, said = MISINFORMED[name]
    engine = Posing(says)

    with pytest.raises(EngineFailedError) as caught:
        EngineSpec(engine, {}).open(model)

    assert caught.value.kind == "crashed"
    assert caught.value.message.startswith("posing opened a session that does not say what it is: ")
    assert said in caught.value.message
    assert engine.closed == ["closed"]


@pytest.mark.parametrize(
    "says",
    [
        {},
        {"placement": None},
        {"placement": {}},
        {"placement": {"providers": {}}},
        {"placement": {"providers": {CPU: {}}, "note": "more"}},
        placed(**{CPU: {"MatMul": 5, "com.microsoft.MatMulNBits": 1}}),
        {"mode": "captured"},
        {"mode": None},
        {"settings": {"a": True, "b": -3, "c": ""}},
        {"inventory": PortInventory((), ())},
    ],
    ids=str,
)
def test_a_session_that_says_what_it_is_opens(model: Path, says: dict[str, Any]) -> None:
    """Whatever it leaves out that it may."""
    engine = Posing(says)

    session = EngineSpec(engine, {}).open(model)
    session.close()

    assert engine.closed == ["closed"]


def test_what_is_no_session_is_a_crash(model: Path) -> None:
    """An engine that opens nothing has failed."""

    class Opening(Posing):
        """Opens what is no session."""

        def open(self, model: Path, options: Mapping[str, OptionValue]) -> Session:
            """Nothing."""
            return cast("Session", None)

    with pytest.raises(EngineFailedError, match="posing opened a session that does not say what it is"):
        EngineSpec(Opening(), {}).open(model)
