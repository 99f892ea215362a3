"""What speaks against a topology: findings, and the refusal that they add up to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.topology.spec import REFUSAL_CODES, Refusal

__all__ = ["Finding", "escaped", "listed", "matching", "quoted", "refusal_from"]

_PRECEDENCE = {code: rank for rank, code in enumerate(REFUSAL_CODES)}


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason to refuse.

    Attributes:
        code: one of `REFUSAL_CODES`.
        message: the port, the rule that it breaks, and the key to declare.
        ports: the ports concerned.
    """

    code: str
    message: str
    ports: tuple[str, ...] = ()


def escaped(name: str) -> str:
    """A port name on one line, whatever is in it."""
    return name if name.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def quoted(name: str) -> str:
    """A port name for the middle of a sentence."""
    return f"`{escaped(name)}`"


def matching(names: Sequence[str]) -> str:
    """How many ports match, and which: `3 ports match: input_ids, attention_mask, position_ids`."""
    count = "1 port matches" if len(names) == 1 else f"{len(names)} ports match"
    return f"{count}: {', '.join(escaped(name) for name in names) or 'none'}"


def listed(names: Iterable[str], *, most: int = 4) -> str:
    """Port names for a message: the first `most` of them, and how many more there are."""
    every = tuple(names)
    shown = ", ".join(quoted(name) for name in every[:most])
    return shown if len(every) <= most else f"{shown} and {len(every) - most} more"


def refusal_from(findings: Iterable[Finding]) -> Refusal:
    """Add findings (at least one) up to a refusal: the first code in order of precedence leads.

    Every finding's ports are named, those of the leading code first; each further code stands in `also`.
    """
    ranked = sorted(findings, key=lambda finding: _PRECEDENCE[finding.code])
    first = ranked[0]
    codes = dict.fromkeys(finding.code for finding in ranked)
    return Refusal(
        code=first.code,
        message=first.message,
        ports=tuple(dict.fromkeys(port for finding in ranked for port in finding.ports)),
        also=tuple(code for code in codes if code != first.code),
    )
