"""The form of naming conventions: how past ports (graph inputs) go with present ports (graph outputs).

`%d` in a pattern stands for the layer index, in ASCII digits; `*` in a stem pattern stands for any text
that is not empty. Conventions are matched over inputs and outputs together: a past port counts only with
its present port. The conventions themselves are data, in `harness.topology.exporters`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from harness.topology.spec import Role

__all__ = ["Convention", "Discipline", "IndexedPatterns", "PortPair", "StemPair", "WordSwap"]

INDEX = "%d"
STEM = "*"


class Discipline(StrEnum):
    """What the shapes of a pair must show beyond agreeing with each other.

    `ANY`: nothing; the name is enough. `GROWING`: one axis that grows, since the name alone could also
    mean a state. `SCATTER`: a buffer of fixed size that is written in place, at an index that is fed.
    """

    ANY = "any"
    GROWING = "growing"
    SCATTER = "scatter"


@dataclass(frozen=True, slots=True)
class PortPair:
    """Names of one kind of cache port: `past` goes in, `present` comes out.

    Attributes:
        past: pattern of the input's name, with at most one `%d`.
        present: pattern of the output's name, with `%d` where `past` has it.
        role: what both ports are.
        discipline: what the shapes must show.
    """

    past: str
    present: str
    role: Role
    discipline: Discipline = Discipline.ANY


@dataclass(frozen=True, slots=True)
class StemPair:
    """Names of states that share a stem: what `*` stands for must be the same text in both.

    Whatever a `PortPair` has already claimed is not looked at.
    """

    past: str
    present: str


@dataclass(frozen=True, slots=True)
class WordSwap:
    """Names that are alike but for one word: `past` in the input's name, `present` in the output's.

    An empty word means that the name has no such word. Separators do not count; every other character does,
    of any script and in its case. What the cache is, its other words say; since such names say little, keys
    and values must also show that they grow.
    """

    past: str
    present: str


@dataclass(frozen=True, slots=True)
class Convention:
    """One exporter family's naming.

    Attributes:
        name: short name, as it stands in the evidence.
        source: where the naming comes from.
        pairs: caches by their full pattern.
        stems: recurrent states, by the rule that everything else under a common prefix is state.
        swaps: caches of either sort, by names that differ in one word.
    """

    name: str
    source: str
    pairs: tuple[PortPair, ...] = ()
    stems: tuple[StemPair, ...] = ()
    swaps: tuple[WordSwap, ...] = ()


@dataclass(frozen=True, slots=True)
class IndexedPatterns:
    """The four indexed patterns of a decoder, and those of its cross attention where it has one.

    Each holds one `%d`. `past_key` pairs with `present_key`, `past_value` with `present_value`. A cross
    pattern is None where the graph has no such port.
    """

    past_key: str = "past_key_values.%d.key"
    past_value: str = "past_key_values.%d.value"
    present_key: str = "present.%d.key"
    present_value: str = "present.%d.value"
    cross_past_key: str | None = None
    cross_past_value: str | None = None
    cross_present_key: str | None = None
    cross_present_value: str | None = None

    def convention(self, *, name: str, source: str) -> Convention:
        """The convention that these patterns spell out.

        States are what else follows the common prefix of the past patterns (up to the index) with a
        present port under the common prefix of the present patterns. Without a common prefix, or with
        none on the other side, nothing tells states from other ports, and there is no such rule.
        """
        pairs = [
            PortPair(self.past_key, self.present_key, Role.KV_KEY),
            PortPair(self.past_value, self.present_value, Role.KV_VALUE),
        ]
        for past, present, role in (
            (self.cross_past_key, self.cross_present_key, Role.CROSS_KV_KEY),
            (self.cross_past_value, self.cross_present_value, Role.CROSS_KV_VALUE),
        ):
            if past is not None:
                pairs.append(PortPair(past, present or _present_of(past, self), role))
        past_prefix = _common_prefix(self.past_key, self.past_value)
        present_prefix = _common_prefix(self.present_key, self.present_value)
        stems = (
            (StemPair(past_prefix + STEM, present_prefix + STEM),) if past_prefix and present_prefix else ()
        )
        return Convention(name=name, source=source, pairs=tuple(pairs), stems=stems)


def _common_prefix(first: str, second: str) -> str:
    """What both patterns begin with, cut off before the layer index."""
    pairs = zip(first.partition(INDEX)[0], second.partition(INDEX)[0], strict=False)
    return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _present_of(past: str, patterns: IndexedPatterns) -> str:
    """The present pattern of a cross pattern whose configuration names only the past."""
    prefix = _common_prefix(patterns.past_key, patterns.past_value)
    stem = past.removeprefix(prefix)
    return _common_prefix(patterns.present_key, patterns.present_value) + stem
