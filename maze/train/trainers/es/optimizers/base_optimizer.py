"""What turns gradients into steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maze.core.errors import CheckpointError
from maze.train.trainers.es.es_utils import get_flat_parameters, n_trained_parameters, set_flat_parameters

if TYPE_CHECKING:
    from maze.core.agent.torch_model import TorchModel


class Optimizer(ABC):
    """Steps down gradients that were not computed by torch. :meth:`setup` comes before the first :meth:`update`."""

    def __init__(self) -> None:
        self.dim = 0
        """Number of parameters."""
        self.t = 0
        """Number of updates."""
        self.policy: TorchModel | None = None

    def setup(self, policy: TorchModel) -> None:
        """Prepares for optimizing a policy, from the first step on."""
        self.policy = policy
        self.dim = n_trained_parameters(policy)
        self.t = 0

    def update(self, global_gradient: np.ndarray) -> float:
        """Changes the policy's parameters.

        :param global_gradient: Gradient of what is to be minimised, `[dim]`.
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
        """What is added to the parameters.

        :param gradient: float32 `[dim]`.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly, in tensors and numbers."""
        return {"t": self.t, **{name: torch.from_numpy(value.copy()) for name, value in self._moments().items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a state that :meth:`state_dict` returned.

        :raises CheckpointError: An entry has another shape.
        """
        moments = self._moments()
        for name, value in moments.items():
            found = tuple(state_dict[name].shape) if name in state_dict else "nothing"
            if found != value.shape:
                raise CheckpointError(
                    f"The optimizer's `{name}` does not fit: expected the shape {value.shape}, found {found}. Use the "
                    "optimizer and model that the training was saved with."
                )
        self.t = int(state_dict["t"])
        for name, value in moments.items():
            value[:] = state_dict[name].numpy()

    def _moments(self) -> dict[str, np.ndarray]:
        """The arrays `[dim]` that the optimizer keeps."""
        return {}
