"""How engines are found and named."""

from __future__ import annotations

import sys
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import click
import pytest

from harness.engines import registry
from harness.engines.base import Availability, EngineOption, OptionValue, Session
from harness.engines.options import Choice, Count
from harness.engines.registry import default_candidate, installed_engines, parse_engine, reference_of
from harness.errors import EngineUnavailableError, InputError

ROOT = Path(__file__).parents[2]


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
        monkeypatch.setattr(registry, "BUILT_IN", {})

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


class _MuteError(Exception):
    """An error that cannot say what is wrong."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def _raising(error: BaseException) -> Any:
    def throw(*_: object) -> NoReturn:
        raise error

    return throw


ERRORS = [
    SystemExit(),
    SystemExit("goodbye"),
    GeneratorExit(),
    BaseException("the worst"),
    RuntimeError("two\nlines"),
    _MuteError(),
    ValueError("x" * 100_000),
]
errors = pytest.mark.parametrize("error", ERRORS, ids=lambda error: repr(error)[:20])


def _told(error: BaseException) -> str:
    """How a reason names an error."""
    return type(error).__name__


def _refused(name: str = "bad") -> Availability:
    """What the listing says of an engine that must not be usable, while the others go on."""
    engines = {engine.name: engine for engine in installed_engines()}
    assert engines["good"].availability().usable
    state = engines[name].availability()
    assert not state.usable
    assert state.reason
    assert state.next_action
    assert "\n" not in state.reason
    assert len(state.reason) < 600
    # What the command reads of every engine is there.
    assert isinstance(engines[name].description, str)
    assert isinstance(engines[name].options, Mapping)
    assert parse_engine(name).engine.availability() == state
    return state


@errors
def test_whatever_an_import_raises_its_engine_alone_is_not_usable(
    monkeypatch: pytest.MonkeyPatch, install, error: BaseException
) -> None:
    """An import may end the process, or raise what cannot be printed: the others are there all the same."""
    install(good=FakeEngine("good"))
    (good,) = registry.metadata.entry_points(group=registry.ENTRY_POINT_GROUP)
    module = types.ModuleType("badly_behaved")
    module.__getattr__ = _raising(error)  # type: ignore[method-assign] (a module may have one)
    monkeypatch.setitem(sys.modules, "badly_behaved", module)
    bad = EntryPoint("bad", "badly_behaved:ENGINE", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: [bad, good])

    assert _told(error) in str(_refused().reason)


@errors
@pytest.mark.parametrize("part", ["name", "description", "options"])
def test_properties_that_raise_make_an_engine_unusable(install, part: str, error: BaseException) -> None:
    """What an engine says of itself is asked for once, and may raise."""
    bad = type("Bad", (FakeEngine,), {part: property(_raising(error), lambda self, value: None)})
    install(good=FakeEngine("good"), bad=bad("bad"))

    assert _told(error) in str(_refused().reason)


@errors
def test_an_engine_that_cannot_say_whether_it_is_usable_is_not(install, error: BaseException) -> None:
    """The reason is the error."""
    bad = type("Bad", (FakeEngine,), {"availability": _raising(error)})("bad")
    install(good=FakeEngine("good"), bad=bad)

    assert _told(error) in str(_refused().reason)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "None"),
        (True, "True"),
        ({"usable": True}, "usable"),
        (Availability(usable=1), "no Availability"),  # type: ignore[arg-type]
        (Availability(usable=True, version=3), "version is 3"),  # type: ignore[arg-type]
        (Availability(usable=True, placement=["CPU"]), "placement is"),  # type: ignore[arg-type]
        (Availability(usable=False), "does not say why"),
        (Availability(usable=False, reason="no luck."), "no luck"),
    ],
)
def test_an_answer_that_is_none_means_not_usable(install, answer: object, reason: str) -> None:
    """Of a wrong type, or with a part of a wrong type; and no reason is a reason."""
    bad = type("Bad", (FakeEngine,), {"availability": lambda self: answer})("bad")
    install(good=FakeEngine("good"), bad=bad)

    state = {engine.name: engine for engine in installed_engines()}["bad"].availability()

    assert not state.usable
    assert reason in str(state.reason)
    assert _with_the_others()


def _with_the_others() -> bool:
    return {engine.name: engine for engine in installed_engines()}["good"].availability().usable


@dataclass(frozen=True)
class BadOption:
    """No option of the protocol's."""

    help: object = "what it is"
    default: object = 0
    expected: object = "a thing"
    read: object = None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"description": None}, "description is None"),
        ({"description": b"bytes"}, "description is"),
        ({"options": None}, "options are None"),
        ({"options": ["threads"]}, "options are"),
        ({"options": {"a": BadOption(read=str, help=None)}}, "option 'a'"),
        ({"options": {"a": BadOption(read=str, default=0.5)}}, "option 'a'"),
        ({"options": {"a": BadOption(read=str, expected=3)}}, "option 'a'"),
        ({"options": {"a": BadOption()}}, "option 'a'"),
        ({"options": {"a": object()}}, "AttributeError"),
        ({"options": {3: BadOption(read=str)}}, "option 3"),
        ({"name": "other"}, "called bad, and the engine 'other'"),
        ({"name": "oracle"}, "called bad, and the engine 'oracle'"),
        ({"name": None}, "called bad, and the engine None"),
    ],
)
def test_what_an_engine_says_of_itself_must_be_of_the_protocol(
    install, changes: dict[str, Any], reason: str
) -> None:
    """A name that is not that of its entry point could not be found by a process of its own."""
    install(good=FakeEngine("good"), bad=replace(FakeEngine("bad"), **changes))

    assert reason in str(_refused().reason)


def test_a_class_is_no_engine(install) -> None:
    """It has all the attributes, and no instance to ask them of."""
    install(good=FakeEngine("good"), bad=FakeEngine)

    # A dataclass keeps no class attribute for fields without a default.
    assert "no engine" in str(_refused().reason)

    class Whole(FakeEngine):
        """Has them all."""

        name = "bad"  # type: ignore[misc]
        options = MappingProxyType({})  # type: ignore[misc]

    install(good=FakeEngine("good"), bad=Whole)

    assert "is a class" in str(_refused().reason)


def test_an_interruption_while_engines_load_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C is the user's."""
    module = types.ModuleType("badly_behaved")
    module.__getattr__ = _raising(KeyboardInterrupt())  # type: ignore[method-assign] (a module may have one)
    monkeypatch.setitem(sys.modules, "badly_behaved", module)
    bad = EntryPoint("bad", "badly_behaved:ENGINE", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: [bad])

    with pytest.raises(KeyboardInterrupt):
        installed_engines()


NOISE = """
import os
print("printed")
os.write(1, b"written")
os.system("echo from a child")
"""


def test_what_plugins_print_does_not_reach_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither while they are imported nor when asked, by Python or past it: the documents stand there."""
    (tmp_path / "noisy_plugin.py").write_text(
        f"{NOISE}\nfrom suites.engines.test_registry import NOISE, FakeEngine\n"
        "class Noisy(FakeEngine):\n"
        "    def availability(self):\n"
        "        exec(NOISE)\n"
        "        return super().availability()\n"
        "ENGINE = Noisy('noisy')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    noisy = EntryPoint("noisy", "noisy_plugin:ENGINE", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: [noisy])

    click.echo("ours, before")
    (engine,) = installed_engines()
    click.echo("ours, between")
    assert engine.availability().usable
    click.echo("ours, after")

    out, err = capfd.readouterr()
    assert out.splitlines() == ["ours, before", "ours, between", "ours, after"]
    for word in ("printed", "written", "from a child"):
        assert err.count(word) == 2


def test_two_engines_of_one_name_are_not_guessed_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same entry point seen twice is one engine; two different ones are none."""
    one = EntryPoint("fast", "fixtures.misbehaving:ENGINE", registry.ENTRY_POINT_GROUP)
    other = EntryPoint("fast", "elsewhere:ENGINE", registry.ENTRY_POINT_GROUP)
    same = EntryPoint("misbehaving", "fixtures.misbehaving:ENGINE", registry.ENTRY_POINT_GROUP)

    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: [same, same])
    (engine,) = installed_engines()
    assert engine.availability().usable

    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: [one, other])
    (engine,) = installed_engines()
    assert not engine.availability().usable
    assert "elsewhere:ENGINE" in str(engine.availability().reason)


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN))
@pytest.mark.parametrize("ours_is_there", [True, False])
def test_nobody_takes_the_name_of_an_engine_of_this_project(
    monkeypatch: pytest.MonkeyPatch, name: str, ours_is_there: bool
) -> None:
    """It is refused with where it leads; ours stays what its name stands for, also in a worker."""
    ours = EntryPoint(name, registry.BUILT_IN[name], registry.ENTRY_POINT_GROUP)
    theirs = EntryPoint(name, "fixtures.misbehaving:ENGINE", registry.ENTRY_POINT_GROUP)
    entries = [theirs, ours] if ours_is_there else [theirs]
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: entries)

    engines = {engine.name: engine for engine in installed_engines()}

    refused = engines.pop(f"{name} (fixtures.misbehaving:ENGINE)").availability()
    assert not refused.usable
    assert f"registers the name {name}" in str(refused.reason)
    assert list(engines) == [name] * ours_is_there
    assert reference_of(name) == (registry.BUILT_IN[name] if ours_is_there else None)
    if ours_is_there:
        assert type(engines[name].inner).__module__.startswith("harness.engines.")  # type: ignore[attr-defined]
    else:
        with pytest.raises(InputError, match=f"no engine named '{name}'"):
            parse_engine(name)


def test_the_names_that_are_taken_are_those_that_are_registered() -> None:
    """A new engine of this project is guarded, too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

    assert project["entry-points"][registry.ENTRY_POINT_GROUP] == registry.BUILT_IN


@pytest.mark.parametrize(
    "read", [_raising(RuntimeError("no")), lambda _: 0.5, lambda _: [1]], ids=["raises", "number", "list"]
)
def test_an_option_that_fails_is_its_engines_fault(install, read: Any) -> None:
    """Not the user's: the engine is not usable with it."""
    option = type("Option", (), {"help": "-", "expected": "-", "default": 0, "read": staticmethod(read)})()
    install(one=replace(FakeEngine("one"), options={"a": option}))

    assert dict(parse_engine("one").options) == {}
    with pytest.raises(EngineUnavailableError, match="one is not usable with a=1"):
        parse_engine("one:a=1")


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
