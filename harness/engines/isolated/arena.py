"""Memory that both processes see, through which tensors pass.

It has no name: a file that was never in a folder, whose descriptor the worker inherits. Whatever ends either
process, nothing of it remains. One side writes, the other copies out before it answers, so one arena serves
both directions, and only the parent, who asks, makes it larger.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Arena", "aligned"]

_SMALLEST = 1 << 16
_ALIGNMENT = 64
_KEPT = 1 << 26
"""Bytes that may stay resident between calls; what lies beyond is given back."""


def aligned(size: int) -> int:
    """The offset at which the next tensor may begin behind one of `size` bytes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Arena:
    """Shared memory behind a descriptor, which it owns.

    Attributes:
        descriptor: of the file behind it.
        size: in bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        """Map the first `size` bytes of a file that has them."""
        self.descriptor = descriptor
        self.size = size
        self._map = mmap.mmap(descriptor, size)

    @classmethod
    def create(cls) -> Arena:
        """A small one; it grows as tensors need it."""
        descriptor = _anonymous_file()
        os.ftruncate(descriptor, _SMALLEST)
        return cls(descriptor, _SMALLEST)

    def grow(self, size: int) -> None:
        """Make room for `size` bytes; what was written stays."""
        if size > self.size:
            larger = max(size, 2 * self.size)
            os.ftruncate(self.descriptor, larger)
            self.see(larger)

    def see(self, size: int) -> None:
        """Map `size` bytes, where the other side has made it so large."""
        if size > self.size:
            self._map.close()
            self._map, self.size = mmap.mmap(self.descriptor, size), size

    def write(self, offset: int, array: NDArray[Any]) -> None:
        """Copy an array of any strides in, in C order."""
        self._view(offset, array.shape, array.dtype)[...] = array

    def read(self, offset: int, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Copy an array out."""
        return self._view(offset, shape, dtype).copy()

    def trim(self) -> None:
        """Give the memory of large tensors back; what was written there is lost."""
        if self.size > _KEPT and hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):  # not every file system can
                self._map.madvise(mmap.MADV_REMOVE, _KEPT, self.size - _KEPT)

    def close(self) -> None:
        """Give all of it back. May be called twice."""
        self._map.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _view(self, offset: int, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        import numpy as np

        return np.ndarray(tuple(shape), dtype, buffer=self._map, offset=offset)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # some sandboxes do not have it
            return os.memfd_create("onnx-parity")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
