"""Base of optimizers for gradients that torch has not computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from maze.core.agent.torch_model import TorchModel
from maze.core.errors import CheckpointError
from maze.train.trainers.es.es_utils import get_flat_parameters, n_trained_parameters, set_flat_parameters


class Optimizer(ABC):
    """Gradient descent with gradients from outside torch. :meth:`setup` has to be called before :meth:`update`."""

    moments: ClassVar[tuple[str, ...]] = ()
    """Attributes with moving averages, float32 `[dim]`: zero after :meth:`setup`, and part of the state."""

    def __init__(self) -> None:
        self.dim = 0
        """Number of parameters."""
        self.t = 0
        """Number of updates."""
        self.policy: TorchModel | None = None

    def setup(self, policy: TorchModel) -> None:
        """Set the policy and reset the state of the optimizer.

        :param policy: The policy, whose parameters :meth:`update` changes in place, except frozen ones.
        """
        self.policy = policy
        self.dim = n_trained_parameters(policy)
        self.t = 0
        for name in self.moments:
            setattr(self, name, np.zeros(self.dim, np.float32))

    def update(self, global_gradient: np.ndarray) -> float:
        """Update the parameters of the policy.

        :param global_gradient: Gradient of the loss, `[dim]`.
        :return: Norm of the step, relative to the norm of the parameters.
        """
        assert self.policy is not None, "setup comes first"
        self.t += 1
        step = self._compute_step(np.asarray(global_gradient, np.float32)).astype(np.float32)
        parameters = get_flat_parameters(self.policy).numpy()
        norm = float(np.linalg.norm(parameters))
        set_flat_parameters(self.policy, torch.from_numpy(parameters + step))
        return float(np.linalg.norm(step)) / norm if norm > 0.0 else 0.0

    @abstractmethod
    def _compute_step(self, gradient: np.ndarray) -> np.ndarray:
        """Return the step that is added to the parameters.

        :param gradient: float32 `[dim]`.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state, as tensors and numbers."""
        return {"t": self.t, **{name: torch.from_numpy(getattr(self, name).copy()) for name in self.moments}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`.

        :param state_dict: The state, which is copied. :meth:`setup` has to be called before.
        :raises CheckpointError: It is the state of another optimizer or model.
        """
        expected = dict.fromkeys(self.moments, (self.dim,))
        found = {name: tuple(value.shape) for name, value in state_dict.items() if name != "t"}
        if found != expected:
            raise CheckpointError(
                f"State of the optimizer: expected the shapes {expected}, found {found}. Use the optimizer and model "
                "of the saved run."
            )
        self.t = int(state_dict["t"])
        for name in self.moments:
            setattr(self, name, state_dict[name].numpy().copy())
