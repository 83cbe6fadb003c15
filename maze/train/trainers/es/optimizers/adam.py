"""Adam."""

from __future__ import annotations

import numpy as np

from maze.core.annotations import override
from maze.train.trainers.es.optimizers.base_optimizer import Optimizer


class Adam(Optimizer):
    """Adam (Kingma & Ba 2015).

    :param step_size: Learning rate.
    :param beta1: Decay of the moving average of the gradients.
    :param beta2: Decay of the moving average of their squares.
    :param epsilon: Added to the root of the mean square.
    """

    moments = ("m", "v")
    m: np.ndarray
    v: np.ndarray

    def __init__(self, step_size: float, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-08) -> None:
        super().__init__()
        self.step_size = step_size
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon

    @override(Optimizer)
    def _compute_step(self, gradient: np.ndarray) -> np.ndarray:
        self.m += (1.0 - self.beta1) * (gradient - self.m)
        self.v += (1.0 - self.beta2) * (gradient * gradient - self.v)
        # the bias corrections of both moments in one factor (section 2 of the paper)
        rate = self.step_size * np.sqrt(1.0 - self.beta2**self.t) / (1.0 - self.beta1**self.t)
        return np.asarray(-rate * self.m / (np.sqrt(self.v) + self.epsilon))
