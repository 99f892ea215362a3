"""What a runtime says of its failure, as a part of our own messages."""

from __future__ import annotations

__all__ = ["first_line"]


def first_line(error: BaseException) -> str:
    """The first line of its message that says anything; the name of its class where none does."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
