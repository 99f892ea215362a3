"""The BLAS behind numpy while the oracle runs."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["one_blas_thread"]


def one_blas_thread() -> AbstractContextManager[object]:
    """Hold numpy's BLAS to one thread for a while.

    Products of a matrix and few rows wait for memory, while a BLAS that spins until its second thread is
    scheduled makes them up to 15 times slower on a machine with other work; large products are shared by
    our own workers.
    """
    limit: AbstractContextManager[object] = _controller().limit(limits=1, user_api="blas")
    return limit


@functools.cache
def _controller() -> Any:
    """Finding the libraries takes milliseconds, so it is done once; numpy must be imported by then."""
    import numpy  # noqa: F401, ICN001 (imported for its BLAS)
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped] # it has no type hints

    return ThreadpoolController()
