"""Vector environment in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.annotations import override
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.train.parallelization.vector_env.env_batch import EnvBatch
from maze.train.parallelization.vector_env.structured_vector_env import BatchVectorEnv, StructuredVectorEnv

if TYPE_CHECKING:
    from maze.core.env.maze_env import MazeEnv


class SequentialVectorEnv(BatchVectorEnv):
    """Steps its environments one after another in this process: the fastest choice for cheap environments.

    :param env_factories: Each makes one environment. Environments without statistics are wrapped.
    :param logging_prefix: Prefix of the epoch statistics (`train`, `eval`); None: they are not logged.
    :raises ValueError: There is no environment.
    """

    def __init__(self, env_factories: Sequence[Callable[[], MazeEnv[Any]]], logging_prefix: str | None = None) -> None:
        if not env_factories:
            raise ValueError("A vector environment needs at least one environment factory.")
        self._batch = batch = EnvBatch()
        batch.build(env_factories)
        super().__init__(
            n_envs=len(env_factories),
            action_spaces_dict=batch.action_spaces_dict,
            observation_spaces_dict=batch.observation_spaces_dict,
            agent_counts_dict=batch.agent_counts_dict,
            logging_prefix=logging_prefix,
        )
        self.is_flat = batch.is_flat
        self.n_instances = batch.n_instances
        self.envs = batch.envs
        batch.attach(self.rewards, self.terminated, self.truncated, self.step_complete)

    @override(StructuredVectorEnv)
    def step(  # type: ignore[override]
        self, actions: Any, out: Mapping[StepKeyType, Mapping[str, np.ndarray]] | None = None
    ) -> tuple[Any, np.ndarray, np.ndarray, list[dict[Any, Any]]]:
        batch = self._batch
        batch.keep_terminal_observations = self.keep_terminal_observations
        observations: Any = out if out is not None else self._new_arrays()
        infos = batch.step(actions, observations)
        self.actor_rewards = batch.actor_rewards
        self.final_observations = batch.final_observations
        if batch.finished_episodes or self.finished_episodes:
            self._count_episodes(batch.finished_episodes)
        if out is None:
            return self._returned(observations, infos)
        return out, self.rewards, self.terminated | self.truncated, infos

    @override(StructuredVectorEnv)
    def reset(self, out: Mapping[StepKeyType, Mapping[str, np.ndarray]] | None = None) -> Any:
        observations: Any = out if out is not None else self._new_arrays()
        self._batch.reset(observations)
        self.actor_rewards = None
        self.final_observations = self._batch.final_observations
        self._count_episodes(self._batch.finished_episodes)
        return out if out is not None else self._fresh(observations)

    @override(StructuredVectorEnv)
    def close(self) -> None:
        self._batch.close()

    @override(StructuredVectorEnv)
    def actor_ids(self) -> list[ActorID]:
        return list(self._batch.actor_ids) or self._of_each("actor_id")

    @override(BatchVectorEnv)
    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(self._batch, method)(*arguments)]

    @override(BatchVectorEnv)
    def _call_each(self, method: str, by_env: list[Any]) -> list[Any]:
        return self._call(method, by_env)


def vectorized(generator: Any) -> Any:
    """Return a rollout generator of a vector environment; a single environment is wrapped in one.

    :param generator: A `RolloutGenerator`, or actors with the same interface.
    """
    if generator.is_vectorized:
        return generator
    return RolloutGenerator(SequentialVectorEnv([lambda: generator.env], logging_prefix="train"))
