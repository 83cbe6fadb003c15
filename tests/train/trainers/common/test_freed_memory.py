"""Memory of large minibatches: used again within the context, given back after it."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import pytest
import torch

from maze.train.utils.run_process import freed_memory_kept

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")


def pages_handed_out(n_times: int) -> int:
    """While so many tensors of 64 MiB come and go, two at a time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(n_times):
        first = torch.zeros(2**24)
        second = first + 1.0
        del first, second
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident_mebibytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def test_freed_memory_is_reused():
    with freed_memory_kept():
        pages_handed_out(5)  # until there is room for all that is there at the same time
        assert pages_handed_out(10) < 2 * 2**26 / resource.getpagesize()


def test_memory_is_returned_to_the_system_at_the_end_even_after_an_error():
    pages_handed_out(1)
    ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))  # what earlier tests have left free would be used again
    before = resident_mebibytes()

    def fails_with_memory_freed() -> None:
        with freed_memory_kept():
            pages_handed_out(2)
            assert resident_mebibytes() > before + 100
            raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        fails_with_memory_freed()
    assert resident_mebibytes() < before + 20
