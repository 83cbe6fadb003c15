"""Actors that collect while the learner learns, wherever they are."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from maze.core.annotations import override
from maze.core.utils.update_profile import COLLECTING, timed
from maze.train.parallelization.distributed_actors.actor_work import Work
from maze.train.parallelization.distributed_actors.distributed_actors import (
    CollectedBatch,
    DistributedActors,
    checked_actor_seeds,
    queue_size_of,
    seed_of_start,
)
from maze.train.parallelization.distributed_actors.rollout_packet import ActorSpaces, RolloutPacket
from maze.train.parallelization.distributed_actors.rollout_tickets import RolloutTickets
from maze.train.parallelization.vector_env.replay_log import states_for

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy


class ActorsAhead(DistributedActors):
    """Collects rollouts while the learner learns. How far actors may be ahead is what
    :class:`~maze.train.parallelization.distributed_actors.rollout_tickets.RolloutTickets` says.

    :param env_factory: Makes one environment, where the actor is.
    :param policy: The policy.
    :param n_rollout_steps: Number of environment steps of a rollout.
    :param n_actors: Number of actors.
    :param batch_size: Number of rollouts in a batch.
    :param queue_out_of_sync_factor: Times `batch_size`, the number of finished rollouts that may wait.
    :param actor_env_seeds: A seed for each environment.
    :param actor_agent_seeds: A seed for the policy of each actor.
    :param envs_per_actor: Number of environments that each actor steps together.
    """

    def __init__(
        self,
        env_factory: Callable[[], Any],
        policy: TorchPolicy,
        n_rollout_steps: int,
        n_actors: int,
        batch_size: int,
        queue_out_of_sync_factor: float,
        actor_env_seeds: list[int],
        actor_agent_seeds: list[int],
        *,
        envs_per_actor: int = 1,
    ) -> None:
        super().__init__(env_factory, policy, n_rollout_steps, n_actors, batch_size, envs_per_actor=envs_per_actor)
        self._queue_size = queue_size_of(queue_out_of_sync_factor, batch_size)
        self._env_seeds = checked_actor_seeds(actor_env_seeds, n_actors * envs_per_actor, "actor_env_seeds")
        self._agent_seeds = checked_actor_seeds(actor_agent_seeds, n_actors, "actor_agent_seeds")
        self._n_starts = 0
        self._learned: dict[int, list[Any]] = {}
        """What the wrappers of an actor's environments have learned."""
        self._spaces: ActorSpaces

    @abstractmethod
    def _issue(self, actor: int) -> None:
        """Has an actor collect one more rollout."""

    @abstractmethod
    def _receive(self, wait: bool) -> None:
        """Appends all rollouts that are finished to `_arrived`.

        :param wait: Whether to wait for one if there is none.
        """

    @abstractmethod
    def _work_done(self) -> Work:
        """What the actors have done since the last call."""

    @override(DistributedActors)
    def write_epoch_stats(self) -> None:
        self._work_done().report(self.epoch_stats)
        super().write_epoch_stats()

    def _restore_wrappers(self) -> None:
        """Gives wrappers what they had learned, where actors are running."""

    def _open(self) -> None:
        """Begins to count."""
        self._tickets = RolloutTickets(self.n_actors, self.batch_size, self._queue_size)
        self._arrived: list[tuple[int, RolloutPacket, int]] = []
        """Actors, what they have collected, and the version of the policy that acted."""
        self._n_starts += 1

    def _seeds_now(self) -> tuple[list[Any], list[Any]]:
        """Seeds of environments and of policies: other ones after each start."""
        n_starts = self._n_starts - 1
        of_envs, of_agents = (
            [seed_of_start(s, n_starts) for s in seeds] for seeds in (self._env_seeds, self._agent_seeds)
        )
        return of_envs, of_agents

    @override(DistributedActors)
    @timed(COLLECTING)
    def collect_batch(self) -> CollectedBatch:
        self.start()
        start = time.perf_counter()
        self._receive(wait=False)
        n_before = len(self._arrived)
        taken: list[RolloutPacket] = []
        lags: list[int] = []
        while len(taken) < self.batch_size:
            actor = self._tickets.next_of(actor for actor, _, _ in self._arrived)
            if actor is None:
                self._receive(wait=True)
                continue
            position = next(i for i, (other, _, _) in enumerate(self._arrived) if other == actor)
            _, packet, version = self._arrived.pop(position)
            self._tickets.take(actor)
            self._issue(actor)
            taken.append(packet)
            lags.append(self._tickets.version - version)
        self._tickets.batch_done()
        seconds = time.perf_counter() - start
        return CollectedBatch(self._joined(taken, self._spaces), n_before, len(self._arrived), seconds, lags)

    @override(DistributedActors)
    def state_dict(self) -> dict[str, Any]:
        problem = "they were in processes of their own, which were ahead of the training"
        known = [states for actor in sorted(self._learned) for states in self._learned[actor]] or [[]]
        n_envs = self.n_actors * self.envs_per_actor
        states = [{"problem": problem, "wrappers": known[index % len(known)]} for index in range(n_envs)]
        return {"n_starts": self._n_starts, "environments": states}

    @override(DistributedActors)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        """Nothing is repeated: actors that are started again get seeds that they did not have before."""
        self._n_starts = max(self._n_starts, state_dict.get("n_starts", 0))
        n = self.envs_per_actor
        learned = [state["wrappers"] for state in states_for(state_dict, self.n_actors * n)]
        self._learned.clear()
        if any(learned):
            self._learned.update({actor: learned[actor * n : (actor + 1) * n] for actor in range(self.n_actors)})
        self._restore_wrappers()
        reason = "actors in processes of their own are ahead of the training, and what they do depends on its speed"
        return dict.fromkeys(range(len(learned)), reason)
