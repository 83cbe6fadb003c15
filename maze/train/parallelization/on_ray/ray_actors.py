"""Actors of Ray that collect while the learner learns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.annotations import override
from maze.train.parallelization.distributed_actors.actors_ahead import ActorsAhead
from maze.train.parallelization.distributed_actors.distributed_actors import DistributedActors, seed_of_start
from maze.train.parallelization.distributed_actors.env_groups import RolloutPlan
from maze.train.parallelization.on_ray.cluster_events import report_actors
from maze.train.parallelization.on_ray.crew import Crew, Task
from maze.train.parallelization.on_ray.ray_envs import Fragment, Generators, PolicyCopies, RemoteGroup, decoded
from maze.train.parallelization.vector_env.env_batch import check_same_spaces

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy


class RayDistributedActors(ActorsAhead):
    """Collects rollouts in actors of Ray while the learner learns.

    A rollout is one call, made with the newest policy at the time its ticket is issued: nothing else is sent, and a
    call that is lost is made again. What an actor draws depends on its seed and the number of the call.

    :param crew: The actors, at least as many as `n_actors`.
    :param name: A name for these environments among all that the actors host.
    :param n_workers: Number of worker processes in each actor; 0: environments are stepped in the actor itself.
    :param timeout: Seconds that a call of a worker process may take; `None`: any time.
    :param arguments: Those of :class:`ActorsAhead`.
    """

    def __init__(
        self, crew: Crew, name: str, n_workers: int, timeout: float | None, *arguments: Any, envs_per_actor: int = 1
    ) -> None:
        super().__init__(*arguments, envs_per_actor=envs_per_actor)
        self._crew, self._name = crew, name
        self._n_workers, self._timeout = n_workers, timeout
        self._copies = PolicyCopies(crew)
        self._tasks: dict[Task, int] = {}
        """Rollouts under way, with the versions of their policies."""
        self._is_running = False
        self._plan = RolloutPlan(self.n_rollout_steps, with_logits=True, keeps_terminal=False, begins=False)

    @override(DistributedActors)
    def start(self) -> None:
        if self._is_running:
            return
        self._open()
        self._n_issued = [0] * self.n_actors
        self._crew.place(self._name, [partial(self._maker, actor) for actor in range(self.n_actors)])
        all_spaces = self._crew.call(self._name, "spaces", [()] * self.n_actors)
        self._spaces = all_spaces[0]
        for actor, spaces in enumerate(all_spaces):
            check_same_spaces(self._spaces, spaces, actor * self.envs_per_actor)
        self._publish(self.policy)
        self._is_running = True
        for actor in range(self.n_actors):
            for _ in range(self._tickets.n_issued(actor)):
                self._issue(actor)

    @override(DistributedActors)
    def stop(self) -> None:
        """What is under way ends by itself; nobody asks for it."""
        self._tasks.clear()
        self._is_running = False

    @override(DistributedActors)
    def broadcast_updated_policy(self, state_dict: dict[str, Any]) -> None:
        if self._is_running:  # those who start later take the policy itself
            self._tickets.updated()
            self._publish(self.policy)

    @override(DistributedActors)
    def write_epoch_stats(self) -> None:
        report_actors(self._crew, self.epoch_stats)
        super().write_epoch_stats()

    def _publish(self, policy: TorchPolicy) -> None:
        self._weights = self._copies.arguments(policy)

    @override(ActorsAhead)
    def _issue(self, actor: int) -> None:
        numbers = [seed_of_start(self._agent_seeds[actor], self._n_starts - 1), self._n_issued[actor]]
        self._n_issued[actor] += 1
        drawn = Generators(seed=int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))
        task = self._crew.submit(actor, self._name, "collect", *self._weights, drawn, self._plan)
        self._tasks[task] = self._tickets.version

    @override(ActorsAhead)
    def _receive(self, wait: bool) -> None:
        for task in self._crew.finished(list(self._tasks), wait=wait):
            fragment: Fragment = task.result
            for episode in decoded(fragment.episodes):
                self.epoch_stats.receive(episode)
            if fragment.wrappers:
                self._learned[task.actor] = fragment.wrappers
            assert fragment.packet is not None
            self._arrived.append((task.actor, fragment.packet, self._tasks.pop(task)))

    def _maker(self, actor: int, n_starts: int) -> Callable[[], RemoteGroup]:
        n_envs = self.envs_per_actor
        seeds = self._env_seeds[actor * n_envs : (actor + 1) * n_envs]
        seeds = [seed_of_start(seed_of_start(seed, self._n_starts - 1), n_starts) for seed in seeds]
        return partial(
            RemoteGroup,
            self.env_factory,
            n_envs,
            actor,
            min(self._n_workers, n_envs),
            self._timeout,
            seeds,
            self._learned.get(actor, []),
        )
