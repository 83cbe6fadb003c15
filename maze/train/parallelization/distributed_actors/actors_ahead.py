"""Actors that collect while the learner learns, wherever they are."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
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
from maze.train.parallelization.vector_env.replay_log import states_for

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy


class ActorsAhead(DistributedActors):
    """Collects rollouts while the learner learns. How far actors may be ahead is what
    :class:`~maze.train.parallelization.distributed_actors.actors_ahead.RolloutTickets` says.

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


class RolloutTickets:
    """Bounds how old a rollout can be when the learner uses it.

    A rollout is collected on a ticket. Its age is the number of updates since the ticket was issued, which the number
    of updates that its policy has missed cannot exceed. All tickets together are the rollouts in progress, one for
    each actor, and those that may wait (the queue). When the learner takes a rollout, its actor gets a new ticket.

    Finished rollouts are taken as they come, unless that would leave too little room for older ones: then the learner
    waits for those.

    :param n_actors: Number of actors.
    :param batch_size: Number of rollouts in a batch.
    :param queue_size: Number of finished rollouts that may wait.
    """

    def __init__(self, n_actors: int, batch_size: int, queue_size: int) -> None:
        self.n_actors = n_actors
        self.batch_size = batch_size
        self._queue_size = queue_size
        self.max_age = math.ceil((queue_size + n_actors) / batch_size)
        """No rollout is older than this when it is taken."""
        self.version = 0
        """Number of updates so far."""
        shares, rest = divmod(queue_size, n_actors)
        self._issued = [deque([0] * (1 + shares + (actor < rest))) for actor in range(n_actors)]
        self._n_taken = 0

    def add_actor(self) -> None:
        """One more actor collects from now on: a rollout is in progress, as many may wait as before."""
        self.n_actors += 1
        self.max_age = math.ceil((self._queue_size + self.n_actors) / self.batch_size)
        self._issued.append(deque([self.version]))

    def n_issued(self, actor: int) -> int:
        """Number of rollouts that an actor has to collect, or has collected and are waiting."""
        return len(self._issued[actor])

    def next_of(self, waiting: Iterable[int]) -> int | None:
        """The actor whose oldest finished rollout to take next; `None`: wait for others.

        :param waiting: Actors with finished rollouts, those first that finished first.
        """
        candidates = list(waiting)
        if not candidates:
            return None
        latest = self._latest_version()
        # of equally old ones the first that finished
        best = min(candidates, key=lambda actor: self._issued[actor][0])
        return best if self._issued[best][0] <= latest else None

    def take(self, actor: int) -> int:
        """Takes the oldest rollout of an actor into the current batch, and issues it a new ticket.

        :return: The version at which the old ticket was issued.
        """
        version = self._issued[actor].popleft()
        self._issued[actor].append(self.version)
        self._n_taken += 1
        return version

    def batch_done(self) -> None:
        """The current batch is complete."""
        self._n_taken = 0

    def updated(self) -> None:
        """The learner has made an update: later tickets are younger."""
        self.version += 1

    def _latest_version(self) -> int:
        """Issue version of the youngest rollout that can be taken without one of the older ones getting too old."""
        by_version = Counter(version for issued in self._issued for version in issued)
        n_older = 0
        for version in sorted(by_version):
            n_older += by_version[version]
            updates_left = version + self.max_age - self.version
            room = self.batch_size - self._n_taken + updates_left * self.batch_size
            if n_older >= room:
                return version
        return self.version
