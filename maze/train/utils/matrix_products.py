"""Which library multiplies matrices while networks learn.

torch multiplies on processors with MKL, which makes use of half of what those of AMD can do. oneDNN, which torch brings
as well, takes half of the time there for large products, and more for small ones
(`benchmarks/perception.py --products`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from maze.perception.activations import mkl_is_slow

_ONEDNN: Any = torch.backends.mkldnn
WORTH_IT = 2**22
"""Multiplications in a product of matrices from which oneDNN is the faster one."""


class MatrixProducts:
    """Multiplies the matrices of some networks with the faster of two libraries.

    :param parameters: Of the networks, on their device.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        matrices = [each for each in parameters if each.dim() == 2 and each.device.type == "cpu"]
        self._largest = max((matrix.numel() for matrix in matrices), default=0)

    def for_batch(self, n_rows: int) -> AbstractContextManager[None]:
        """Context of the losses and gradients of a batch; what is computed in 32 bits stays so.

        :param n_rows: Rows that the networks are given at a time.
        :return: Changes a setting of the whole process, and sets it back.
        """
        if n_rows * self._largest < WORTH_IT or not onednn_is_faster():
            return nullcontext()
        return multiplied_by_onednn()


@contextmanager
def multiplied_by_onednn() -> Iterator[None]:
    """Context in which torch hands products of matrices to oneDNN.

    Allowing it 16 bits is what makes torch do so. Most processors have no such units for matrices, and oneDNN uses 32.
    """
    settings = _ONEDNN.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


@cache
def onednn_is_faster() -> bool:
    """Return whether MKL is slow on this processor, and oneDNN as precise as MKL."""
    if not (mkl_is_slow() and _ONEDNN.is_available() and hasattr(_ONEDNN, "matmul")):
        return False
    values = 1.0 + torch.arange(256 * 256, dtype=torch.float64).view(256, 256) / 2**20  # needs more than 16 bits
    with multiplied_by_onednn():
        product = values.float() @ values.float()
    return torch.allclose(product.double(), values @ values, rtol=1e-5, atol=0.0)
