"""What engines answer, looked at once: nothing of a wrong form goes on into a verdict or a report.

Every engine's answers pass here, those of this project and those of plugins, in whatever process they run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.engines.base import BatchingSession, OptionValue, Session, SessionInfo, TensorHandle, TopLogits
from harness.errors import EngineFailedError, shown
from harness.ports import PortInventory

__all__ = ["checked", "largest", "largest_of_rows", "may_follow"]

_MODES = ("eager", "captured", None)
_NEXT = "Report it to the engine."


def checked(session: Session, *, engine: str) -> Session:
    """A session that has just been opened, if what it says of itself can be taken; closed where it cannot.

    Args:
        session: what an engine gave.
        engine: name of the engine, which the session must give as its own.

    Raises:
        EngineFailedError: naming what is wrong.
    """
    try:
        fault = _fault_of_session(session, engine)
    except Exception as error:  # properties of an engine's own session may raise whatever they like
        fault = f"it raised {type(error).__name__} when asked"
    if fault is None:
        return session
    with contextlib.suppress(Exception):
        session.close()
    raise _failure(engine, f"opened a session that does not say what it is: {fault}")


def largest(session: Session, logits: TensorHandle, *, k: int, positions: Sequence[int]) -> list[TopLogits]:
    """What `Session.top_logits` gives, if it is what it must be. A NaN among the values sets `has_nan`.

    Raises:
        EngineFailedError: as the session does, and where its answer is of a wrong form, naming what is wrong.
        InputError, IndexError: as the session does.
    """
    given = session.top_logits(logits, k=k, positions=positions)
    return _checked_tops(given, logits.shape, engine=session.info.engine, k=k, count=len(positions))


def largest_of_rows(
    session: BatchingSession, logits: TensorHandle, *, k: int, places: Sequence[tuple[int, int]], engine: str
) -> list[TopLogits]:
    """What `BatchingSession.top_logits_of_rows` gives, looked at as `largest` does; raises as that does."""
    given = session.top_logits_of_rows(logits, k=k, places=places)
    return _checked_tops(given, logits.shape, engine=engine, k=k, count=len(places))


def _checked_tops(given: object, shape: Sequence[int], *, engine: str, k: int, count: int) -> list[TopLogits]:
    if not isinstance(given, list | tuple) or len(given) != count:
        held = f"{len(given)} entries" if isinstance(given, list | tuple) else type(given).__name__
        raise _failure(engine, f"gave {held} for the largest logits at {count} positions: one each is due")
    vocabulary = shape[-1] if isinstance(shape, list | tuple) and shape else None
    if type(vocabulary) is not int or vocabulary < 1:
        raise _failure(engine, f"gave logits of shape {shown(shape)}, whose last extent is no vocabulary")
    tops = []
    for index, top in enumerate(given):
        found = _sound(top, min(k, vocabulary), vocabulary)
        if isinstance(found, str):
            where = "" if count == 1 else f" at position {index} of {count}"
            raise _failure(engine, f"gave what are not the largest logits{where}: {found}")
        tops.append(found)
    return tops


def _sound(top: Any, count: int, vocabulary: int) -> TopLogits | str:
    """The largest logits at one position in Python's own types; or what is wrong with them."""
    if not isinstance(top, TopLogits):
        return f"{type(top).__name__} instead of TopLogits"
    ids, values, has_nan = _numbers(top.token_ids), _numbers(top.values), _own(top.has_nan)
    if ids is None or values is None:
        return f"token IDs {shown(top.token_ids)} and values {shown(top.values)}, which must be tuples"
    if not len(ids) == len(values) == count:
        return (
            f"{len(ids)} token IDs and {len(values)} values, where {count} of each are due "
            f"(the vocabulary has {vocabulary})"
        )
    if type(has_nan) is not bool:
        return f"has_nan is {shown(has_nan)}, and neither True nor False"
    for token in ids:
        if type(token) is not int or not 0 <= token < vocabulary:
            return f"token ID {shown(token)}, which must be a whole number from 0 to {vocabulary - 1}"
    if len(set(ids)) != count:
        return f"a token ID stands twice among {', '.join(map(str, ids))}"
    for place, value in enumerate(values):
        if type(value) is not float:
            return f"the logit of token {ids[place]} is {shown(value)}, which must be a float"
        if place and not may_follow(value, ids[place], values[place - 1], ids[place - 1]):
            return (
                f"token {ids[place]} with {value:g} stands behind token {ids[place - 1]} with "
                f"{values[place - 1]:g}; the largest comes first, of equal ones the lowest ID, and NaN last"
            )
    return TopLogits(ids, values, has_nan or any(map(math.isnan, values)))


def _numbers(given: Any) -> tuple[Any, ...] | None:
    """A sequence with what is numpy's in it as Python's own; None for what is no sequence."""
    given = _own(given)
    return tuple(map(_own, given)) if isinstance(given, list | tuple) else None


def _own(value: Any) -> Any:
    """A number or an array of numpy as Python's own, and a subclass of float as float; else the value."""
    if isinstance(value, float):
        return float(value)
    return value.tolist() if hasattr(value, "tolist") else value


def may_follow(value: float, token: int, before: float, token_before: int) -> bool:
    """Whether an entry of the largest logits may follow another: equal ones by ID, NaN last in any order."""
    if math.isnan(value):
        return True
    return before > value or (before == value and token_before < token)


def _fault_of_session(session: Session, engine: str) -> str | None:
    """What is wrong with what a session says of itself; None where nothing is."""
    inventory: Any = session.inventory
    info: Any = session.info
    if not isinstance(inventory, PortInventory):
        return f"its inventory is {shown(inventory)}"
    if not isinstance(info, SessionInfo):
        return f"its info is {shown(info)}"
    return _fault_of_info(info, engine)


def _fault_of_info(info: Any, engine: str) -> str | None:
    if info.engine != engine:
        return f"it gives {shown(info.engine)} as the name of its engine"
    if not isinstance(info.version, str):
        return f"its version is {shown(info.version)}, which must be text"
    if not isinstance(info.settings, Mapping):
        return f"its settings are {shown(info.settings)}, which must be a mapping"
    for name, value in info.settings.items():
        if not isinstance(name, str) or not isinstance(value, OptionValue):
            return (
                f"its setting {shown(name)} is {shown(value)}: a truth value, a whole number or text is due"
            )
    if info.mode not in _MODES:
        return f"its mode is {shown(info.mode)}, which must be eager, captured or None"
    return None if info.placement is None else _fault_of_placement(info.placement)


def _fault_of_placement(placement: object) -> str | None:
    """What is wrong with what a session says of where its nodes run; None where nothing is.

    It may say nothing (no providers), and more than that (other entries, which are plain data).
    """
    if not isinstance(placement, Mapping):
        return f"its placement is {shown(placement)}, which must be a mapping"
    providers = placement.get("providers", {})
    if not isinstance(providers, Mapping):
        return f"the providers of its placement are {shown(providers)}, which must be a mapping"
    for provider, operators in providers.items():
        if not isinstance(provider, str) or not isinstance(operators, Mapping):
            return f"its placement on {shown(provider)} is {shown(operators)}, which must be a mapping"
        for operator, count in operators.items():
            if not isinstance(operator, str) or type(count) is not int or count < 1:
                return (
                    f"its placement has {shown(count)} nodes of {shown(operator)} on {provider}, "
                    "which must be a whole number from 1"
                )
    return None


def _failure(engine: str, what: str) -> EngineFailedError:
    return EngineFailedError(f"{engine} {what}.", kind="crashed", next_action=_NEXT)
