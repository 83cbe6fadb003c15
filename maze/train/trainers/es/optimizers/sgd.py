"""Gradient descent with momentum."""

from __future__ import annotations

import numpy as np

from maze.core.annotations import override
from maze.train.trainers.es.optimizers.base_optimizer import Optimizer


class SGD(Optimizer):
    """Gradient descent along an exponential moving average of the gradients.

    :param step_size: Learning rate.
    :param momentum: Decay of the average; 0: plain gradient descent.
    """

    moments = ("v",)
    v: np.ndarray

    def __init__(self, step_size: float, momentum: float = 0.9) -> None:
        super().__init__()
        self.step_size = step_size
        self.momentum = momentum

    @override(Optimizer)
    def _compute_step(self, gradient: np.ndarray) -> np.ndarray:
        self.v += (1.0 - self.momentum) * (gradient - self.v)
        return np.asarray(-self.step_size * self.v)
