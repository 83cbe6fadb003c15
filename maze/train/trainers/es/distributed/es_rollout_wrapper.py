"""Wrapper that plays episodes of perturbed policies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from maze.core.agent.policy import acting_in
from maze.core.annotations import override
from maze.core.log_stats.log_stats import LogStats
from maze.core.wrappers.wrapper import Wrapper
from maze.train.parallelization.vector_env.vector_env_utils import with_stats
from maze.train.trainers.es.distributed.es_distributed_rollouts import ESRolloutResult
from maze.train.trainers.es.distributed.es_dummy_distributed_rollouts import published_stats
from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable
from maze.train.trainers.es.es_utils import get_flat_parameters, set_flat_parameters


class ESAbortException(Exception):  # noqa: N818  (users catch it by this name)
    """End an episode whose outcome is not needed any more."""


class ESRolloutWorkerWrapper(Wrapper[Any]):
    """Play episodes of an unperturbed policy or of a mirrored pair of perturbed policies.

    :param env: The environment; an environment without statistics is wrapped.
    :param shared_noise: The noise table.
    :param agent_instance_seed: Seed of the perturbations.
    """

    keeps_observations_and_actions = True

    def __init__(self, env: Any, shared_noise: SharedNoiseTable, agent_instance_seed: int) -> None:
        super().__init__(with_stats(env))
        self.shared_noise = shared_noise
        self.rng = np.random.RandomState(agent_instance_seed)
        self.max_steps: int | None = None
        """Episodes are truncated after this number of environment steps; `None`: never."""
        self._is_aborted = False

    def set_abort(self) -> None:
        """Make the next step and all following steps raise :class:`ESAbortException`."""
        self._is_aborted = True

    def clear_abort(self) -> None:
        """Allow steps again."""
        self._is_aborted = False

    @override(Wrapper)
    def step(self, action: Any) -> Any:
        if self._is_aborted:
            raise ESAbortException
        return self._env_step(action)

    def rollout(self, policy: Any) -> None:
        """Play one episode with deterministic actions, of at most `max_steps` environment steps.

        Its statistics become the last episode statistics of the environment.

        :param policy: The policy.
        :raises ESAbortException: :meth:`set_abort` was called.
        """
        self._play(policy)

    def generate_evaluation(self, policy: Any) -> ESRolloutResult:
        """Play an episode of the unperturbed policy, as :meth:`rollout` does.

        :param policy: The policy.
        :raises ESAbortException: :meth:`set_abort` was called.
        """
        result = ESRolloutResult(is_eval=True)
        result.add_episode(*self._play(policy))
        return result

    def generate_training(self, policy: Any, noise_stddev: float) -> ESRolloutResult:
        """Play two episodes: with a perturbation added to the parameters, and with it subtracted.

        :param policy: The policy; its parameters are restored afterwards, also after an error.
        :param noise_stddev: Standard deviation of the perturbation.
        :raises ESAbortException: :meth:`set_abort` was called.
        """
        result = ESRolloutResult(is_eval=False)
        parameters = get_flat_parameters(policy)
        index = self.shared_noise.sample_index(self.rng)
        noise = torch.from_numpy(noise_stddev * self.shared_noise.get(index, len(parameters)))
        result.noise_indices.append(index)
        try:
            for sign in (1, -1):
                set_flat_parameters(policy, parameters + sign * noise)
                result.add_episode(*self._play(policy))
        finally:
            set_flat_parameters(policy, parameters)
        return result

    def _play(self, policy: Any) -> tuple[LogStats, float, int]:
        """Play an episode; return its statistics, its return and its number of environment steps."""
        act = acting_in(self, policy, deterministic=True)
        observation, done = self.reset(), False
        episode_return, n_steps = 0.0, 0
        while not done and n_steps != self.max_steps:
            observation, reward, done, _ = self.step(act(observation, self.actor_id()))
            episode_return += float(reward)
            n_steps += bool(done or self.context.is_step_complete)
        return published_stats(self), episode_return, n_steps
