"""Reading engine options: what an option may be, said in one place and in one tone."""

from __future__ import annotations

from collections.abc import Mapping

from harness.engines.base import OptionValue
from harness.errors import InputError

__all__ = ["choice_option", "count_option"]


def count_option(engine: str, options: Mapping[str, OptionValue], name: str, default: int) -> int:
    """A whole number of at least zero.

    Raises:
        InputError: the option is anything else.
    """
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(
            f"{engine}: option {name}={value} must be a whole number, at least 0.",
            next_action=f"Write, for example, {engine}:{name}=1.",
        )
    return value


def choice_option(
    engine: str, options: Mapping[str, OptionValue], name: str, choices: tuple[str, ...]
) -> str:
    """One of `choices`, the first of which is the default.

    Raises:
        InputError: the option is anything else.
    """
    value = str(options.get(name, choices[0]))
    if value not in choices:
        raise InputError(
            f"{engine}: option {name}={value} must be one of {', '.join(choices)}.",
            next_action=f"Write, for example, {engine}:{name}={choices[-1]}.",
        )
    return value
