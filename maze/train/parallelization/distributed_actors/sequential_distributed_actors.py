"""Actors that collect one after another in the training process."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from maze.core.annotations import override
from maze.core.utils.update_profile import COLLECTING, timed
from maze.core.utils.worker_pool import env_slices
from maze.train.parallelization.distributed_actors.distributed_actors import (
    CollectedBatch,
    DistributedActors,
    checked_actor_seeds,
    seed_of_start,
)
from maze.train.parallelization.distributed_actors.env_groups import EnvGroup, RolloutPacket
from maze.train.parallelization.distributed_actors.shared_policy import copied_to_cpu
from maze.train.parallelization.vector_env.replay_log import states_for
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.structured_vector_env import joint_state, load_joint_state

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy


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
        self._slices = list(env_slices(n_actors * envs_per_actor, n_actors))
        self._acting_policy = policy
        self._groups: list[EnvGroup] = []
        self._n_starts = 0
        self._next_actor = 0
        self._stopped_state: dict[str, Any] = {"environments": []}

    @override(DistributedActors)
    def start(self) -> None:
        if self._groups:
            return
        self._acting_policy = self.policy if self.policy.device == "cpu" else copied_to_cpu(self.policy)
        states = states_for(self._stopped_state, len(self._seeds))
        for actor, rows in enumerate(self._slices):
            env = SequentialVectorEnv([self.env_factory] * self.envs_per_actor)
            seeds = [seed_of_start(seed, self._n_starts) for seed in self._seeds[rows]]
            learned = [state["wrappers"] for state in states[rows]]  # wrappers continue from their statistics
            self._groups.append(EnvGroup(env, f"Actor {actor}", seeds, learned))
        self._n_starts += 1
        self._next_actor = 0

    @override(DistributedActors)
    def stop(self) -> None:
        self._stopped_state = self.state_dict()
        for group in self._groups:
            group.close()
        self._groups.clear()

    @override(DistributedActors)
    def broadcast_updated_policy(self, state_dict: dict[str, Any]) -> None:
        if self._acting_policy is not self.policy:
            self._acting_policy.load_state_dict(state_dict)

    @override(DistributedActors)
    @timed(COLLECTING)
    def collect_batch(self) -> CollectedBatch:
        self.start()
        self._acting_policy.eval()
        start = time.perf_counter()
        packets: list[RolloutPacket] = []
        for _ in range(self.batch_size):
            group = self._groups[self._next_actor]
            packet = group.collect(self._acting_policy, self._plan)
            # the next rollout of the actor overwrites this one
            packets.append(copy.deepcopy(packet) if self.batch_size > self.n_actors else packet)
            for episode in group.take_episodes():
                self.epoch_stats.receive(episode)
            self._next_actor = (self._next_actor + 1) % self.n_actors
        seconds = time.perf_counter() - start
        joined = self._joined(packets, self._groups[0].spaces())
        return CollectedBatch(joined, 0, 0, seconds, [0] * self.batch_size)

    @override(DistributedActors)
    def state_dict(self) -> dict[str, Any]:
        if not self._groups:
            return self._stopped_state
        counts = {"n_starts": self._n_starts, "next_actor": self._next_actor}
        return {**counts, **joint_state(group.env.state_dict() for group in self._groups)}

    @override(DistributedActors)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        self._n_starts = state_dict.get("n_starts", 0)
        self.start()
        problems = load_joint_state(
            self._slices,
            state_dict,
            lambda states: [
                group.env.load_state_dict(state) for group, state in zip(self._groups, states, strict=True)
            ],
        )
        if "next_actor" in state_dict and len(state_dict["environments"]) == len(self._seeds):
            self._n_starts, self._next_actor = state_dict["n_starts"], state_dict["next_actor"]
        for group in self._groups:
            group.generator.reset()
        return problems
