"""Memory that is freed and allocated again for every minibatch."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as <malloc.h> numbers them
_DEFAULTS = {_MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**26}
"""Thresholds of glibc after large blocks were freed."""
_KEPT = {_MMAP_THRESHOLD: 2**28, _TRIM_THRESHOLD: 2**30}
"""Bytes: blocks up to a quarter of a GiB are used again, and up to one GiB is kept for them."""


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Context in which the process does not give large freed memory back, and gives it back in the end.

    Large minibatches free and allocate the same dozens of megabytes again and again. The operating system, which gets
    them back each time otherwise, hands out empty pages one by one: with images, or many candidates, that took as long
    as the networks. Where the C library is not glibc, nothing is changed.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")):
        yield
        return
    try:
        _set(libc, _KEPT)
        yield
    finally:
        _set(libc, _DEFAULTS)
        libc.malloc_trim(ctypes.c_size_t(0))


def _set(libc: ctypes.CDLL, options: dict[int, int]) -> None:
    for option, value in options.items():
        libc.mallopt(ctypes.c_int(option), ctypes.c_int(value))
