"""How many threads the BLAS behind numpy may use while the oracle runs."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["blas_threads"]


def blas_threads(count: int) -> AbstractContextManager[object]:
    """Hold numpy's BLAS to `count` threads for a while; 0 leaves it as it is.

    One is best for decoding: products of a matrix and few rows wait for memory, while a BLAS that spins
    until its second thread is scheduled makes them up to 15 times slower on a machine with other work.
    """
    if count == 0:
        return contextlib.nullcontext()
    limit: AbstractContextManager[object] = _controller().limit(limits=count, user_api="blas")
    return limit


@functools.cache
def _controller() -> Any:
    """Finding the libraries takes milliseconds, so it is done once; numpy must be imported by then."""
    import numpy  # noqa: F401, ICN001 (imported for its BLAS)
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped] # it has no type hints

    return ThreadpoolController()
