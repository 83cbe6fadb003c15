"""Actors that collect one after another in the training process."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maze.core.annotations import override
from maze.core.rollout.rollout_columns import RolloutColumns
from maze.core.utils.update_profile import COLLECTING, timed
from maze.core.utils.worker_pool import LocalPool, env_slices
from maze.train.parallelization.distributed_actors import env_groups
from maze.train.parallelization.distributed_actors.distributed_actors import CollectedBatch, DistributedActors
from maze.train.parallelization.vector_env.sequential_vector_env import in_sequence
from maze.train.parallelization.vector_env.structured_vector_env import checked_seeds, states_for
from maze.train.parallelization.vector_env.vector_env_utils import ActorSpaces


@dataclass(eq=False)
class SequentialDistributedActors(DistributedActors):
    """Collect rollouts one after another, always with the newest policy.

    :param env_factory: Makes one environment.
    :param policy: The policy. On the CPU it is used without a copy, so its random generators belong to the run.
    :param n_rollout_steps: Number of environment steps of a rollout.
    :param n_actors: Number of actors.
    :param batch_size: Number of rollouts in a batch.
    :param actor_env_seeds: A seed for each environment.
    :param envs_per_actor: Number of environments that each actor steps together.
    """

    actor_env_seeds: list[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_seeds(self.actor_env_seeds, self.n_actors * self.envs_per_actor)
        self._acting_policy = self.policy
        self._env: env_groups.GroupedVectorEnv | None = None
        self._n_starts = 0
        self._next_actor = 0
        self._stopped_state: dict[str, Any] = {"environments": []}

    @override(DistributedActors)
    def start(self) -> None:
        self._started()

    def _started(self) -> env_groups.GroupedVectorEnv:
        if self._env is None:
            self._acting_policy = self.policy if self.policy.device == "cpu" else env_groups.copied_to_cpu(self.policy)
            self._groups = env_groups.EnvGroups(LocalPool(self.n_actors), "rollouts", in_sequence, "Actor")
            seeds = [env_groups.seed_of_start(seed, self._n_starts) for seed in self.actor_env_seeds]
            groups = env_slices(len(seeds), self.n_actors)
            self._env = env_groups.GroupedVectorEnv(self._groups, self.env_factory, groups, None)
            self._env.seed(seeds)
            states = states_for(self._stopped_state, len(seeds))  # wrappers continue from their statistics
            self._env.load_state_dict({"environments": [{"problem": "", "wrappers": s["wrappers"]} for s in states]})
            self._n_starts += 1
            self._next_actor, self._begins_anew = 0, True
        return self._env

    @override(DistributedActors)
    def stop(self) -> None:
        self._stopped_state = self.state_dict()
        env, self._env = self._env, None
        if env is not None:
            env.close()

    @override(DistributedActors)
    def broadcast_updated_policy(self, state_dict: dict[str, Any]) -> None:
        if self._acting_policy is not self.policy:
            self._acting_policy.load_state_dict(state_dict)

    @override(DistributedActors)
    @timed(COLLECTING)
    def collect_batch(self) -> CollectedBatch:
        env = self._started()
        self._acting_policy.eval()
        start = time.perf_counter()
        rollouts: list[RolloutColumns] = []
        acting = self._groups.hand_over(self._acting_policy)
        for _ in range(self.batch_size):
            task = self._groups.submit(self._next_actor, "collect", *acting, env_groups.Generators(), self._plan)
            self._groups.pool.finished([task])
            rollout = self._groups.take(self._next_actor, task.result, self.epoch_stats)
            # the next rollout of the actor overwrites this one
            rollouts.append(copy.deepcopy(rollout) if self.batch_size > self.n_actors else rollout)
            self._next_actor = (self._next_actor + 1) % self.n_actors
        seconds = time.perf_counter() - start
        return CollectedBatch(self._joined(rollouts, ActorSpaces.of(env)), 0, 0, seconds, [0] * self.batch_size)

    @override(DistributedActors)
    def state_dict(self) -> dict[str, Any]:
        if self._env is None:
            return self._stopped_state
        return {"n_starts": self._n_starts, "next_actor": self._next_actor, **self._env.state_dict()}

    @override(DistributedActors)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        self._n_starts = state_dict.get("n_starts", 0)
        env = self._started()
        problems = env.load_state_dict(state_dict)
        self._begins_anew = bool(problems)
        if "next_actor" in state_dict and len(state_dict["environments"]) == len(self.actor_env_seeds):
            self._n_starts, self._next_actor = state_dict["n_starts"], state_dict["next_actor"]
        self._groups.call("begin_next", [()] * self.n_actors)
        return problems
