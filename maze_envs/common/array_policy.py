"""Rules that choose for one environment as for many."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID, StepKeyType


class ArrayPolicy(Policy):
    """A rule that is a formula of observations in arrays: what is written once acts in batches and alone."""

    @abstractmethod
    def choose(self, observation: Mapping[str, np.ndarray], step_key: StepKeyType) -> dict[str, np.ndarray]:
        """Choose actions.

        :param observation: Arrays `[n, ...]` by observation key.
        :param step_key: The sub-step.
        :return: Arrays `[n, ...]` by action key.
        """

    @override(Policy)
    def compute_action(
        self,
        observation: Any,
        maze_state: Any,
        env: Any,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> dict[str, Any]:
        batch = {key: np.asarray(value)[np.newaxis] for key, value in observation.items()}
        actions = self.choose(batch, 0 if actor_id is None else actor_id.step_key)
        return {key: value[0] for key, value in actions.items()}

    def compute_actions(
        self,
        observation: Mapping[str, np.ndarray],
        actor_id: ActorID | None = None,
        deterministic: bool = False,
        out: Mapping[str, np.ndarray] | None = None,
        logits_out: Any = None,
    ) -> dict[str, np.ndarray]:
        """Choose for many environments.

        :param observation: Arrays `[n, ...]` by observation key.
        :param actor_id: Who acts.
        :param deterministic: Makes no difference.
        :param out: Arrays `[n, ...]` by action key that the actions are written into.
        :param logits_out: Rules have none.
        """
        actions = self.choose(observation, 0 if actor_id is None else actor_id.step_key)
        for key, array in (out or {}).items():
            array[...] = actions[key]
        return actions
