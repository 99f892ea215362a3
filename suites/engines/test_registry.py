"""How engines are found and named."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from harness.engines import registry
from harness.engines.base import Availability, EngineOption, OptionValue, Session
from harness.engines.options import Choice, Count
from harness.engines.registry import default_candidate, installed_engines, parse_engine
from harness.errors import EngineUnavailableError, InputError


@dataclass(frozen=True)
class FakeEngine:
    """An engine that runs nothing."""

    name: str
    usable: bool = True
    description: str = "for tests"
    options: Mapping[str, EngineOption] = field(
        default_factory=lambda: {"threads": Count("how many", 0), "mode": Choice("which", ("slow", "fast"))}
    )

    def availability(self) -> Availability:
        """As it was made."""
        return Availability(self.usable, reason=None if self.usable else f"no {self.name} here.")

    def open(self, model: Path, options: Mapping[str, OptionValue]) -> Session:
        """Never called."""
        raise AssertionError


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> object:
    """Make the given objects, by entry-point name, the only installed engines."""

    def installed(**objects: object) -> None:
        module = types.ModuleType("fake_engines")
        vars(module).update(objects)
        monkeypatch.setitem(sys.modules, "fake_engines", module)
        entries = [
            EntryPoint(name.replace("_", "-"), f"fake_engines:{name}", registry.ENTRY_POINT_GROUP)
            for name in objects
        ]
        monkeypatch.setattr(registry.metadata, "entry_points", lambda group: entries)

    return installed


def test_the_engines_of_this_project_are_registered() -> None:
    """Each engine is found under its own name, in order of name."""
    names = [engine.name for engine in installed_engines()]

    assert set(names) >= {"oracle", "ort-cpu", "ort-cuda", "nxrt"}
    assert names == sorted(names)


def test_a_plain_name_has_no_options() -> None:
    """`ort-cpu` is the engine with its defaults."""
    spec = parse_engine("ort-cpu")

    assert (spec.name, dict(spec.options)) == ("ort-cpu", {})


def test_options_are_read_as_the_engine_declares_them(install) -> None:
    """A count becomes a number, a choice stays a word; what is not given is left to the engine."""
    install(one=FakeEngine("one"))

    assert dict(parse_engine("one:threads=3,mode=fast").options) == {"threads": 3, "mode": "fast"}
    assert dict(parse_engine("one:mode=slow").options) == {"mode": "slow"}


@pytest.mark.parametrize("value", ["-1", "1.5", "many", "true", "\u0663", "1025", "9" * 40])
def test_a_value_that_an_option_cannot_take_is_bad_input(install, value: str) -> None:
    """Said when the engine is named, before any package is read: the option, the rule, an example."""
    install(one=FakeEngine("one"))

    with pytest.raises(InputError, match=f"threads={value} must be a whole number.*one:threads=0"):
        parse_engine(f"one:threads={value}")
    with pytest.raises(InputError, match="must be one of slow, fast"):
        parse_engine(f"one:mode={value}")


@pytest.mark.parametrize(("typed", "meant"), [("ort_cpu", "ort-cpu"), ("nrxt", "nxrt"), ("oracel", "oracle")])
def test_an_unknown_engine_names_the_nearest(typed: str, meant: str) -> None:
    """A slip of the finger is answered with the name that was meant."""
    with pytest.raises(InputError, match=f"{typed}.*Did you mean {meant}\\?"):
        parse_engine(typed)


def test_an_engine_like_no_other_lists_them_all(install) -> None:
    """Where nothing is near, the message lists what there is."""
    install(one=FakeEngine("one"), two=FakeEngine("two"))

    with pytest.raises(InputError, match="Installed engines: one, two") as caught:
        parse_engine("zzzzzzzz")
    assert "Did you mean" not in str(caught.value)


def test_an_unknown_option_lists_the_options(install) -> None:
    """The message has every option with its help."""
    install(one=FakeEngine("one"))

    with pytest.raises(InputError, match=r"no option 'thread'.*threads \(how many\); mode \(which\)"):
        parse_engine("one:thread=1")


@pytest.mark.parametrize("text", ["one:", "one:threads", "one:threads=", "one:=1", "one:threads=1,"])
def test_a_malformed_option_is_refused(install, text: str) -> None:
    """An option is never half read."""
    install(one=FakeEngine("one"))

    with pytest.raises(InputError, match="option=value"):
        parse_engine(text)


def test_an_option_given_twice_is_refused(install) -> None:
    """Two values for one option: neither wins silently."""
    install(one=FakeEngine("one"))

    with pytest.raises(InputError, match="twice"):
        parse_engine("one:threads=1,threads=2")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (EntryPoint("bad", "no_such_module:ENGINE", registry.ENTRY_POINT_GROUP), "ModuleNotFoundError"),
        (EntryPoint("bad", "harness.errors:NO_SUCH_THING", registry.ENTRY_POINT_GROUP), "AttributeError"),
        (EntryPoint("bad", "harness.errors:InputError", registry.ENTRY_POINT_GROUP), "is no engine"),
    ],
)
def test_an_entry_point_that_does_not_load_is_listed_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, broken: EntryPoint, reason: str
) -> None:
    """One broken plugin takes down neither the listing nor the others."""
    good = EntryPoint("ort-cpu", "harness.engines.ort:CPU_ENGINE", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: [broken, good])

    bad, other = installed_engines()

    assert (bad.name, other.name) == ("bad", "ort-cpu")
    state = bad.availability()
    assert not state.usable
    assert reason in str(state.reason)
    assert state.next_action
    with pytest.raises(EngineUnavailableError, match="bad"):
        bad.open(Path("model.onnx"), {})


def test_two_engines_of_one_name_are_not_guessed_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same entry point seen twice is one engine; two different ones are none."""
    ours = EntryPoint("ort-cpu", "harness.engines.ort:CPU_ENGINE", registry.ENTRY_POINT_GROUP)
    theirs = EntryPoint("ort-cpu", "elsewhere:ENGINE", registry.ENTRY_POINT_GROUP)

    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: [ours, ours])
    (engine,) = installed_engines()
    assert engine.availability().usable

    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: [ours, theirs])
    (engine,) = installed_engines()
    assert not engine.availability().usable
    assert "elsewhere:ENGINE" in str(engine.availability().reason)


@pytest.mark.parametrize(
    ("usable", "chosen"),
    [
        ({"ort_cuda", "ort_cpu", "nxrt"}, "ort-cuda"),
        ({"ort_cpu", "nxrt", "aaa"}, "ort-cpu"),
        ({"nxrt"}, "nxrt"),
    ],
)
def test_the_default_candidate_is_the_first_usable(install, usable: set[str], chosen: str) -> None:
    """`ort-cuda`, then `ort-cpu`, then `nxrt`; other engines are never taken unasked."""
    names = ("aaa", "nxrt", "ort_cpu", "ort_cuda")
    install(**{name: FakeEngine(name.replace("_", "-"), name in usable) for name in names})

    assert default_candidate().name == chosen


def test_no_usable_candidate_gives_every_reason(install) -> None:
    """The message says of each candidate why not, also of one that is not installed."""
    install(ort_cpu=FakeEngine("ort-cpu", usable=False), other=FakeEngine("other"))

    with pytest.raises(EngineUnavailableError) as caught:
        default_candidate()
    message = caught.value.message
    assert "ort-cuda: not installed" in message
    assert "ort-cpu: no ort-cpu here." in message
    assert caught.value.exit_code == 5
