"""Known sums of a softmax over scores: for the last query of a prompt, and for one behind a cache.

Each is asked twice. With queries and keys of zero only a mean of values is left, which comes with the
smallest bound. With queries and keys of full precision each key has a value in a column of its own, which
shows the weight of that key whatever the others weigh.

How far rounding reaches: a score is a sum of products, off by at most g times A, the sum of their magnitudes
(`harness.oracle.proof`). A weight, exp(s - top) / total, is off by what its own score and the largest one are
off, relative to itself, and by the roundings of the difference, of exp, of the sum and of the division. A is
kept to a few units, so that this is far less than half precision or bfloat16 lose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.oracle.precision import Array
from harness.oracle.sums.probe import BINADES, KnownSums, Probe, spread

__all__ = ["KEYS", "WIDTH", "Fed", "Rotation", "Softmax"]

KEYS = 24
"""Keys of an attention; no power of two, so that a weight of 1/24 is rounded."""

WIDTH = 48
"""Of a head, where the node leaves it open: more than the keys, and more than one block of eight bits."""

_FEATURES = 16
"""Of a head, in which queries and keys are not zero."""

_REACH = 4.0
"""What the magnitudes of a score's terms may come to."""

_BALLAST = 2.0 ** (BINADES + 3)
"""Where heads are normalised, the length of a query and of a key lies in features that the other has not."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Heads of rows [H, T, D] in float64.

    Attributes:
        value: what they are.
        size: for each element the sum of the magnitudes of what it is a sum of.
    """

    value: Array
    size: Array

    @classmethod
    def of(cls, value: Array) -> _Rows:
        """Rows that are given, or rounded once."""
        exact = value.astype(np.float64)
        return cls(exact, np.abs(exact))

    def behind(self, first: Array) -> _Rows:
        """These rows with those of `first` in place of as many."""
        count, given = first.shape[1], _Rows.of(first)
        return _Rows(
            np.concatenate((given.value, self.value[:, count:]), axis=1),
            np.concatenate((given.size, self.size[:, count:]), axis=1),
        )

    def shared(self, last: int, by: int) -> _Rows:
        """The `last` rows, each head `by` times in a row."""
        return _Rows(*(x[:, x.shape[1] - last :].repeat(by, axis=0) for x in (self.value, self.size)))


@dataclass(frozen=True, slots=True)
class Rotation:
    """Pairs of features turned by an angle for each position.

    Attributes:
        cos: [positions, pairs].
        sin: as cos.
        first: the first feature of each pair.
        second: the second one.
    """

    cos: Array
    sin: Array
    first: Array
    second: Array

    @classmethod
    def of(cls, cos: Array, sin: Array, *, interleaved: bool) -> Rotation:
        """Of neighbours, or of the first half with the second."""
        pair = np.arange(cos.shape[-1])
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + len(pair))
        return cls(cos.astype(np.float64), sin.astype(np.float64), first, second)

    def turned(self, rows: _Rows, positions: Array) -> _Rows:
        """Rows that stand at `positions` [T]."""
        value, size = rows.value.copy(), rows.size.copy()
        cos, sin = self.cos[positions], self.sin[positions]
        a, b = rows.value[..., self.first], rows.value[..., self.second]
        value[..., self.first], value[..., self.second] = a * cos - b * sin, a * sin + b * cos
        cos, sin = np.abs(cos), np.abs(sin)
        a, b = rows.size[..., self.first], rows.size[..., self.second]
        size[..., self.first], size[..., self.second] = a * cos + b * sin, a * sin + b * cos
        return _Rows(value, size)


@dataclass(frozen=True, slots=True)
class Fed:
    """What a kernel is fed with.

    Attributes:
        q: queries [H, S, D].
        k: new keys [N, L, D].
        v: new values [N, L, D].
        past_k: keys of the cache [N, P, D].
        past_v: values of the cache.
        bias: what is added to scores, [S, P + L].
    """

    q: Array
    k: Array
    v: Array
    past_k: Array
    past_v: Array
    bias: Array


@dataclass(frozen=True, slots=True)
class Softmax:
    """softmax(softcap(q k^T scale) + bias) v, where something may become of q and k before they meet.

    Attributes:
        operator: whose attention it is.
        dtype: what the kernel computes in.
        heads: H.
        kv_heads: N.
        width: D.
        scale: see above.
        feed: the arguments of the kernel.
        pick: takes the heads of the last query from its first output.
        forms: for each call how many queries there are, and how many keys come from the cache.
        cap: of scores; 0 for none.
        window: how many keys the last query sees; 0 for all.
        biased: whether there is a bias.
        sink: for each head a score without a key, [H].
        norms: weights [D] by which queries and keys are scaled behind division by their root mean square.
        epsilon: of those.
        rotation: what turns queries and new keys.
        shifts: what is added to queries, new keys and new values, [H or N, 1, D] each.
    """

    operator: str
    dtype: np.dtype[Any]
    heads: int
    kv_heads: int
    width: int
    scale: float
    feed: Callable[[Fed], list[Any]]
    pick: Callable[[Array], Array]
    forms: tuple[tuple[int, int], ...]
    cap: float = 0.0
    window: int = 0
    biased: bool = False
    sink: Array | None = None
    norms: tuple[Array | None, Array | None] = (None, None)
    epsilon: float = 0.0
    rotation: Rotation | None = None
    shifts: tuple[Array, Array, Array] | None = None

    @property
    def _seen(self) -> int:
        """How many keys the last query sees."""
        return min(KEYS, self.window) if self.window > 0 else KEYS

    @property
    def _normed(self) -> bool:
        return any(norm is not None for norm in self.norms)

    def sums(self) -> KnownSums:
        """Nodes whose kernel has more to do are of another kind."""
        more = {
            "rotation": self.rotation is not None,
            "norms": self._normed,
            "softcap": self.cap != 0,
            "a window": self.window > 0,
            "a bias": self.biased,
            "a sink": self.sink is not None,
        }
        words = "".join(f", {word}" for word, there in more.items() if there)
        return KnownSums(f"{self.operator}, scores and values{words}", 0, self._seen, self._probes)

    def _probes(self, rng: np.random.Generator) -> Iterator[Probe]:
        for queries, past in self.forms:
            for scored in (False, True):
                yield self._probe(rng, queries, past, scored=scored)

    def _probe(self, rng: np.random.Generator, queries: int, past: int, *, scored: bool) -> Probe:
        q, k = np.zeros((self.heads, queries, self.width)), np.zeros((self.kv_heads, KEYS, self.width))
        v = spread(rng, k.shape, self.dtype).astype(np.float64)
        if scored:
            q, k = self._queries_and_keys(rng, q, k)
            column = np.arange(self.width) % KEYS
            v = np.where(np.arange(KEYS)[:, None] == column, v, 0)
        q, k, v = (self._raw(x, part) for part, x in enumerate((q, k, v)))
        query = self._placed(q[:, -1:], 0, np.array([KEYS - 1]))
        keys, values = self._placed(k, 1, np.arange(KEYS)), self._shifted(v, 2)
        # What lies in a cache is placed already, and as exact as the cache.
        past_k, past_v = (x.value[:, :past].astype(self.dtype) for x in (keys, values))
        bias = (rng.uniform(-1, 1, (queries, KEYS)) * (self.biased and scored)).astype(self.dtype)
        fed = Fed(q, k[:, past:], v[:, past:], past_k, past_v, bias)
        share = self.heads // self.kv_heads
        return self._expected(
            fed,
            query,
            keys.behind(past_k).shared(self._seen, share),
            values.behind(past_v).shared(self._seen, share),
            bias[-1, KEYS - self._seen :].astype(np.float64),
        )

    def _queries_and_keys(self, rng: np.random.Generator, q: Array, k: Array) -> tuple[Array, Array]:
        """Shaped as `q` and `k`, each head of keys with features of its own, and scores of a few units."""
        order = rng.permuted(np.tile(np.arange(self.width), (self.kv_heads, 1)), axis=1)
        chosen = (order < _FEATURES)[:, None]
        exact = np.dtype(np.float64)
        q = spread(rng, q.shape, exact) * chosen.repeat(self.heads // self.kv_heads, axis=0)
        k = spread(rng, k.shape, exact) * chosen
        own, others = self._ballast()
        if self._normed:
            for x in (q, k):
                x[..., own] = x[..., others] = 0

        def scaled(factor: float) -> tuple[Array, Array]:
            some_q, some_k = factor * q, factor * k
            if self._normed:
                some_q[..., own[0]] = some_k[..., others[0]] = _BALLAST
            return some_q, some_k

        some_q, some_k = scaled(1.0)
        query = self._normed_and_turned(_Rows.of(some_q[:, -1:]), 0, np.array([KEYS - 1]))
        keys = self._normed_and_turned(_Rows.of(some_k), 1, np.arange(KEYS))
        most = float(self._reach(query, keys.shared(KEYS, self.heads // self.kv_heads)).max())
        if not (most > 0 and math.isfinite(most)):
            return some_q, some_k
        factor = 2.0 ** math.floor(math.log2(_REACH / most) / 2)
        return scaled(min(factor, 1.0) if self._normed else factor)

    def _ballast(self) -> tuple[Array, Array]:
        """The features in which the length of a query lies, and those of a key, wherever they are turned."""
        if self.rotation is None or len(self.rotation.first) < 2:
            return np.array([self.width - 2]), np.array([self.width - 1])
        pairs = np.stack((self.rotation.first, self.rotation.second), axis=1)
        return pairs[0], pairs[1]

    def _raw(self, x: Array, part: int) -> Array:
        """What must be fed to come out as about `x` behind the shift."""
        return (x if self.shifts is None else x - self.shifts[part].astype(np.float64)).astype(self.dtype)

    def _shifted(self, x: Array, part: int) -> _Rows:
        exact = x.astype(np.float64)
        return _Rows.of(exact if self.shifts is None else exact + self.shifts[part].astype(np.float64))

    def _placed(self, x: Array, part: int, positions: Array) -> _Rows:
        """Queries (part 0) or keys (part 1) at `positions` as they meet."""
        return self._normed_and_turned(self._shifted(x, part), part, positions)

    def _normed_and_turned(self, rows: _Rows, part: int, positions: Array) -> _Rows:
        norm = self.norms[part]
        if norm is not None:
            root = np.sqrt(np.mean(rows.value**2, axis=-1, keepdims=True) + self.epsilon)
            rows = _Rows.of(rows.value / root * norm.astype(np.float64))
        return rows if self.rotation is None else self.rotation.turned(rows, positions)

    def _reach(self, query: _Rows, keys: _Rows) -> Array:
        """For each score [H, T] the magnitudes of its terms."""
        reach: Array = abs(self.scale) * np.einsum("hd,htd->ht", query.size[:, 0], keys.size)
        return reach

    def _expected(self, fed: Fed, query: _Rows, keys: _Rows, values: _Rows, bias: Array) -> Probe:
        """For the last query [H, 1, D], the keys and values [H, T, D] that it sees, and the bias [T]."""
        scores = self.scale * np.einsum("hd,htd->ht", query.value[:, 0], keys.value)
        if self.cap:
            scores = self.cap * np.tanh(scores / self.cap)
        scores = scores + bias
        reach = self._reach(query, keys) + np.abs(bias)
        top, most = scores.max(axis=1, keepdims=True), reach.max(axis=1, keepdims=True)
        # A score without a key is one more term of the sum by which weights are divided.
        sink = np.full((self.heads, 1), -np.inf)
        if self.sink is not None:
            sink = self.sink.astype(np.float64).reshape(-1, 1)
            top, most = np.maximum(top, sink), np.maximum(most, np.abs(sink))
        weights = np.exp(scores - top)
        weights /= weights.sum(axis=1, keepdims=True) + np.exp(sink - top)
        terms = int(np.count_nonzero(query.size * keys.size, axis=-1).max())
        # Those of score, exp and division; of a sum of squares, and of the sum of weights and sink.
        roundings = terms + 20 + (_FEATURES + 9) * self._normed + self._seen * (self.sink is not None)
        return Probe(
            self.feed(fed),
            np.einsum("ht,hte->he", weights, values.value),
            np.einsum("ht,hte->he", weights * (reach + most + 1), values.size),
            lambda y: self.pick(y).reshape(self.heads, self.width),
            roundings=roundings,
        )
