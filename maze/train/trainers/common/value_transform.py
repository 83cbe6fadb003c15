"""Transformations of values that spread over orders of magnitude, and their categorical representation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from maze.core.annotations import override

ValueType = TypeVar("ValueType", float, np.ndarray, torch.Tensor)


class ValueTransform(ABC):
    """An invertible transformation of values."""

    @abstractmethod
    def transform_value(self, x: ValueType) -> ValueType:
        """Transform values, element by element.

        :param x: A number, array or tensor; the result is of the same type and shape.
        """

    @abstractmethod
    def transform_value_inv(self, x: ValueType) -> ValueType:
        """Invert :meth:`transform_value`, element by element.

        :param x: Transformed values; the result is of the same type and shape.
        """


class ReduceScaleValueTransform(ValueTransform):
    """Compress large values like a square root: `sign(x) * (sqrt(|x| + 1) - 1) + epsilon * x`.

    Pohlen et al. 2018, "Observe and Look Further", proposition A.2.

    :param epsilon: Weight of the linear part, which keeps the inverse Lipschitz continuous; 0 is allowed.
    :raises ValueError: `epsilon` is negative.
    """

    def __init__(self, epsilon: float) -> None:
        if epsilon < 0:
            raise ValueError(f"`epsilon` must not be negative, found {epsilon}.")
        self.epsilon = epsilon

    @override(ValueTransform)
    def transform_value(self, x: ValueType) -> ValueType:
        # sqrt(|x| + 1) - 1, without the cancellation for small x
        result: ValueType = x / ((abs(x) + 1.0) ** 0.5 + 1.0) + self.epsilon * x
        return result

    @override(ValueTransform)
    def transform_value_inv(self, x: ValueType) -> ValueType:
        # u = sqrt(|x| + 1) - 1 solves epsilon u^2 + (1 + 2 epsilon) u = |value|; in the form that cancels nothing
        linear = 1.0 + 2.0 * self.epsilon
        u = 2.0 * x / (linear + (linear**2 + 4.0 * self.epsilon * abs(x)) ** 0.5)
        result: ValueType = u * (abs(u) + 2.0)
        return result


def support_to_scalar(logits: Tensor, support_range: tuple[int, int]) -> Tensor:
    """Return the expected value of categorical distributions over the integers of a range.

    :param logits: `[..., high - low + 1]`.
    :param support_range: The smallest and the largest integer, `(low, high)`.
    :return: `[...]`.
    :raises ValueError: There is not one logit for each value of the support.
    """
    low, high = support_range
    support = torch.arange(low, high + 1, dtype=logits.dtype, device=logits.device)
    if logits.shape[-1] != len(support):
        raise ValueError(f"A support from {low} to {high} needs {len(support)} logits, found {logits.shape[-1]}.")
    return (torch.softmax(logits, dim=-1) * support).sum(dim=-1)


def scalar_to_support(scalar: Tensor, support_range: tuple[int, int]) -> Tensor:
    """Distribute each scalar's probability over its two neighbouring integers, so that the expectation is the scalar.

    :param scalar: `[...]`; values outside the range are clipped to it.
    :param support_range: The smallest and the largest integer, `(low, high)`.
    :return: `[..., high - low + 1]`.
    """
    low, high = support_range
    position = scalar.clamp(low, high) - low
    lower = position.floor()
    upper_probability = position - lower
    lower_index = lower.long()
    upper_index = (lower_index + 1).clamp(max=high - low)  # at the upper end its probability is zero
    support = torch.zeros(*scalar.shape, high - low + 1, dtype=upper_probability.dtype, device=scalar.device)
    support.scatter_add_(-1, lower_index.unsqueeze(-1), (1.0 - upper_probability).unsqueeze(-1))
    support.scatter_add_(-1, upper_index.unsqueeze(-1), upper_probability.unsqueeze(-1))
    return support
