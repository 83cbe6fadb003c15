"""Actors that collect one after another in the training process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from maze.core.annotations import override
from maze.core.log_stats.log_stats import LogStatsLevel
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.update_profile import COLLECTING, timed
from maze.core.wrappers.reward_wrappers import load_statistics_states
from maze.train.parallelization.distributed_actors.distributed_actors import (
    CollectedBatch,
    DistributedActors,
    checked_actor_seeds,
    seed_of_start,
)
from maze.train.parallelization.distributed_actors.env_groups import RolloutPacket, collected
from maze.train.parallelization.distributed_actors.shared_policy import copied_to_cpu
from maze.train.parallelization.vector_env.env_batch import ActorSpaces
from maze.train.parallelization.vector_env.replay_log import states_for
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.structured_vector_env import joint_state, load_joint_state

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.core.rollout.rollout_columns import RolloutColumns


class SequentialDistributedActors(DistributedActors):
    """Collects rollouts one after another, always with the newest policy.

    :param env_factory: Makes one environment.
    :param policy: The policy. On the CPU it is used without a copy, so its random generators belong to the run.
    :param n_rollout_steps: Number of environment steps of a rollout.
    :param n_actors: Number of actors.
    :param batch_size: Number of rollouts in a batch.
    :param actor_env_seeds: A seed for each environment.
    :param envs_per_actor: Number of environments that each actor steps together.
    """

    def __init__(
        self,
        env_factory: Callable[[], Any],
        policy: TorchPolicy,
        n_rollout_steps: int,
        n_actors: int,
        batch_size: int,
        actor_env_seeds: list[int],
        *,
        envs_per_actor: int = 1,
    ) -> None:
        super().__init__(env_factory, policy, n_rollout_steps, n_actors, batch_size, envs_per_actor=envs_per_actor)
        self._seeds = checked_actor_seeds(actor_env_seeds, n_actors * envs_per_actor, "actor_env_seeds")
        self._acting_policy: TorchPolicy | None = None
        self._generators: list[RolloutGenerator] = []
        self._columns: list[RolloutColumns] = []
        self._n_starts = 0
        self._next_actor = 0
        self._stopped_state: dict[str, Any] = {"environments": []}

    @override(DistributedActors)
    def start(self) -> None:
        if self._generators:
            return
        self._acting_policy = self.policy
        if self.policy.device != "cpu":
            self._acting_policy = copied_to_cpu(self.policy)
        for actor in range(self.n_actors):
            env = SequentialVectorEnv([self.env_factory] * self.envs_per_actor)
            for single_env in env.envs:
                single_env.get_stats(LogStatsLevel.EPISODE).register_consumer(self.epoch_stats)
            seeds = self._seeds[actor * self.envs_per_actor : (actor + 1) * self.envs_per_actor]
            env.seed([seed_of_start(seed, self._n_starts) for seed in seeds])
            self._generators.append(RolloutGenerator(env, record_logits=True))
        self._n_starts += 1
        self._next_actor = 0
        envs = [env for generator in self._generators for env in generator.env.envs]
        for env, state in zip(envs, states_for(self._stopped_state, len(envs)), strict=True):
            if state["wrappers"]:  # wrappers continue from their learned statistics
                load_statistics_states(env, state["wrappers"])

    @override(DistributedActors)
    def stop(self) -> None:
        self._stopped_state = self.state_dict()
        for generator in self._generators:
            generator.env.close()
        self._generators.clear()

    @override(DistributedActors)
    def broadcast_updated_policy(self, state_dict: dict[str, Any]) -> None:
        if self._acting_policy is not None and self._acting_policy is not self.policy:
            self._acting_policy.load_state_dict(state_dict)

    @override(DistributedActors)
    @timed(COLLECTING)
    def collect_batch(self) -> CollectedBatch:
        self.start()
        policy = self._acting_policy
        assert policy is not None
        policy.eval()
        start = time.perf_counter()
        packets = []
        for position in range(self.batch_size):
            generator = self._generators[self._next_actor]
            if position == len(self._columns):
                self._columns.append(generator.allocate(self.n_rollout_steps, policy))
            columns = collected(generator, policy, self._columns[position], f"Actor {self._next_actor}")
            generator.env.clear_epoch_stats()  # `self.epoch_stats` has the statistics of all actors
            packets.append(RolloutPacket.of(columns))
            self._next_actor = (self._next_actor + 1) % self.n_actors
        seconds = time.perf_counter() - start
        joined = self._joined(packets, ActorSpaces.of(self._generators[0].env))
        return CollectedBatch(joined, 0, 0, seconds, [0] * self.batch_size)

    @override(DistributedActors)
    def state_dict(self) -> dict[str, Any]:
        if not self._generators:
            return self._stopped_state
        counts = {"n_starts": self._n_starts, "next_actor": self._next_actor}
        return {**counts, **joint_state(generator.env for generator in self._generators)}

    @override(DistributedActors)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        self._n_starts = state_dict.get("n_starts", 0)
        self.start()
        problems = load_joint_state([generator.env for generator in self._generators], state_dict)
        if "next_actor" in state_dict and len(state_dict["environments"]) == self.n_actors * self.envs_per_actor:
            self._n_starts, self._next_actor = state_dict["n_starts"], state_dict["next_actor"]
        for generator in self._generators:
            generator.reset()
        return problems
