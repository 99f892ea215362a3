"""Every error that a user can cause, under one root class.

An error names the port, file or value, states the rule that it breaks, and says what to do next.
`exit_code` is the exit status of the command (the table stands in README.md); anything raised that is not
a `ParityError` is a defect of this project.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

__all__ = [
    "EngineFailedError",
    "EngineUnavailableError",
    "FailureDetails",
    "InputError",
    "InvalidRunError",
    "NotDrivableError",
    "ParityError",
    "shown",
]


def shown(value: object, *, most: int = 60) -> str:
    """The first `most` characters of `repr(value)`, for a message.

    No more of the value is looked at than that takes, though a few lines of YAML can stand for a mapping
    that fills the memory when it is written out, or for one that contains itself.
    """
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) >= most:
            break
    return text[:most]


def _pieces(value: object) -> Iterator[str]:
    if type(value) is list or (type(value) is dict and value):
        opened, closed = "[]" if isinstance(value, list) else "{}"
        yield opened
        for index, entry in enumerate(value):
            yield ", " if index else ""
            yield from _pieces(entry)
            if isinstance(value, Mapping):
                yield ": "
                yield from _pieces(value[entry])
        yield closed
        return
    try:
        yield repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        yield "a number of thousands of digits"


class ParityError(Exception):
    """Root of all errors that this project raises on purpose.

    Attributes:
        message: what is wrong: the port, file or value by name, and the rule it breaks.
        next_action: what the user can do about it, as an imperative sentence.
        exit_code: exit status of the command when this error ends it.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, *, next_action: str) -> None:
        super().__init__(message)
        self.message = message
        self.next_action = next_action

    def __str__(self) -> str:
        return f"{self.message} {self.next_action}"


class InputError(ParityError):
    """A file, value or option that cannot be used: unreadable, unknown, out of range."""


class NotDrivableError(ParityError):
    """The topology is known, but the decode loop cannot feed what the graph asks for.

    Attributes:
        code: refusal code, always `E_NOT_DRIVABLE`.
        ports: the ports that cannot be fed.
    """

    exit_code: ClassVar[int] = 3
    code: ClassVar[str] = "E_NOT_DRIVABLE"

    def __init__(self, message: str, *, next_action: str, ports: tuple[str, ...]) -> None:
        super().__init__(message, next_action=next_action)
        self.ports = ports

    @property
    def refusal(self) -> Mapping[str, Any]:
        """It as the field `refusal` of a document has it, next action included."""
        return {"code": self.code, "also": [], "message": str(self), "ports": list(self.ports)}


@dataclass(frozen=True, slots=True)
class FailureDetails:
    """What is known of an engine's failure beside its message; only a process of its own leaves any.

    Attributes:
        signal: name of the signal that ended the process, such as `SIGSEGV`; None where none did.
        exit_code: with which the process ended by itself; None where it did not.
        limit: the limit that it broke and its value; None where it broke none.
        stderr_tail: the end of what it wrote to standard output and error; None where it wrote nothing.
    """

    signal: str | None = None
    exit_code: int | None = None
    limit: str | None = None
    stderr_tail: str | None = None


class EngineFailedError(ParityError):
    """An engine was asked to do what it should be able to do, and did not: this is a verdict.

    Attributes:
        kind: `crashed`, `timeout`, or `unsupported` (an operator or type that it lacks).
        step: index of the decode step at which it failed (0 is the prefill); None before decoding.
        details: how its process ended, as far as it is known.
        ports: the caches that came back in a shape in which they cannot be fed again: a failure of the
            engine, or of the graph; empty where it failed otherwise.
    """

    exit_code: ClassVar[int] = 4

    def __init__(
        self,
        message: str,
        *,
        next_action: str,
        kind: Literal["crashed", "timeout", "unsupported"],
        step: int | None = None,
        details: FailureDetails = FailureDetails(),
        ports: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, next_action=next_action)
        self.kind = kind
        self.step = step
        self.details = details
        self.ports = ports


class EngineUnavailableError(ParityError):
    """An engine that is known but not usable on this machine (a package or device is missing)."""

    exit_code: ClassVar[int] = 5


class InvalidRunError(ParityError):
    """A run that proves nothing: the engine did not run as requested, or the oracle failed its proof."""

    exit_code: ClassVar[int] = 6
