"""A few symmetric workers that share the tiles of a large product, each with BLAS on one thread.

That is faster than one product on many BLAS threads where tiles must first be unpacked or widened: each
worker multiplies what it has just made, while it lies in its processor's cache. The work is claimed tile by
tile, so that a worker that the machine keeps waiting holds nobody up.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from queue import SimpleQueue

__all__ = ["Claims", "own_memory", "processors", "share", "worker_count", "workers"]

_COUNT: ContextVar[int] = ContextVar("worker_count", default=1)


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def workers(count: int) -> Iterator[None]:
    """Let products inside the block be shared by `count` workers, the caller being one of them."""
    token = _COUNT.set(count)
    try:
        yield
    finally:
        _COUNT.reset(token)


def worker_count() -> int:
    """How many workers `share` uses here; 1 outside `workers`, and inside a worker."""
    return _COUNT.get()


_OWN = threading.local()


def own_memory(size: int) -> memoryview:
    """At least `size` bytes that this worker alone uses, the same at each call as long as they suffice.

    For tiles: what is freed and taken again for each product is given to the process page by page anew. Its
    content is that of the last use.
    """
    memory: memoryview | None = getattr(_OWN, "memory", None)
    if memory is None or len(memory) < size:
        memory = _OWN.memory = memoryview(bytearray(size))
    return memory


class Claims:
    """The numbers 0 to `jobs - 1`, each handed out once, to whichever worker asks next.

    Whether a number is handed out is decided in the same breath as which one: a worker that has a number
    keeps it, even if the others find nothing left, and stop, before it goes on.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._next = 0
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        """Until nothing is left."""
        while True:
            with self._lock:
                job = self._next
                if job >= self._jobs:
                    return
                self._next += 1
            yield job

    def stop(self) -> None:
        """Hand out nothing more."""
        with self._lock:
            self._jobs = self._next


def share(jobs: int, work: Callable[[Claims], None]) -> None:
    """Call `work` once in each worker with claims on `jobs` jobs, and return when all are done.

    `work` does the jobs that it claims, with what it allocates for itself. Its first error is raised here
    when all workers have stopped; settings of the caller's context, such as `np.errstate`, hold in workers.
    """
    claims = Claims(jobs)
    helpers = min(worker_count(), jobs) - 1
    if helpers < 1:
        work(claims)
        return
    inbox, done = _inbox(), SimpleQueue[BaseException | None]()
    for _ in range(helpers):
        inbox.put(_Call(copy_context(), work, claims, done))
    try:
        work(claims)
    finally:
        claims.stop()
        errors = [done.get() for _ in range(helpers)]
    for error in errors:
        if error is not None:
            raise error


@dataclass(frozen=True, slots=True)
class _Call:
    """What a helper is to do: `work` on `claims` in `context`, and to say in `done` how it ended."""

    context: Context
    work: Callable[[Claims], None]
    claims: Claims
    done: SimpleQueue[BaseException | None]

    def run(self) -> None:
        """Whatever happens, the caller hears of it."""
        error: BaseException | None = None
        try:
            self.context.run(self._alone)
        except BaseException as raised:
            error = raised
        self.done.put(error)

    def _alone(self) -> None:
        """Nothing inside is shared again, which could wait for itself."""
        _COUNT.set(1)
        try:
            self.work(self.claims)
        finally:
            self.claims.stop()


@functools.cache
def _inbox() -> SimpleQueue[_Call]:
    """Where helpers look for calls: threads that wait for as long as the process lives.

    An executor of the standard library takes ten times as long to hand a call over, which is as much as
    half of a product of a small model takes.
    """
    inbox = SimpleQueue[_Call]()

    def serve() -> None:
        while True:
            inbox.get().run()

    for number in range(max(1, processors() - 1)):
        threading.Thread(target=serve, name=f"oracle-{number}", daemon=True).start()
    return inbox


if hasattr(os, "register_at_fork"):
    # Threads do not survive a fork: the child makes its own.
    os.register_at_fork(after_in_child=_inbox.cache_clear)
