"""Actors of Ray that collect while the learner learns."""

from __future__ import annotations

from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.train.parallelization.distributed_actors.actor_work import Work
from maze.train.parallelization.distributed_actors.actors_ahead import ActorsAhead
from maze.train.parallelization.distributed_actors.distributed_actors import DistributedActors
from maze.train.parallelization.distributed_actors.env_groups import Generators, RolloutPlan
from maze.train.parallelization.on_ray.crew import Task
from maze.train.parallelization.on_ray.ray_envs import RemoteGroups


class RayDistributedActors(ActorsAhead):
    """Collects rollouts in actors of Ray while the learner learns; those that join meanwhile take part.

    A rollout is one call, made with the newest policy at the time its ticket is issued: nothing else is sent, and a
    call that is lost is made again. What an actor draws depends on its seed and the number of the call.

    :param groups: The environments; there are at least as many actors as `n_actors`.
    :param arguments: Those of :class:`ActorsAhead`.
    """

    def __init__(self, groups: RemoteGroups, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._groups = groups
        self._learned = groups.learned
        self._tasks: dict[Task, int] = {}
        """Rollouts under way, with the versions of their policies."""
        self._is_running = False
        self._may_join = groups.crew.n_first == self.n_actors
        self._plan = RolloutPlan(self.n_rollout_steps, with_logits=True, keeps_terminal=False, begins=False)

    @override(DistributedActors)
    def start(self) -> None:
        if self._is_running:
            return
        self._open()
        self._n_issued: list[int] = []
        sizes = [self.envs_per_actor] * self.n_actors
        self._spaces = self._groups.open(self.env_factory, sizes, lambda: self._seeds_now()[0], self._may_join)
        self._weights = self._groups.hand_over(self.policy)
        self._is_running = True
        self._begin_new()

    @override(DistributedActors)
    def stop(self) -> None:
        """What is under way ends by itself; nobody asks for it."""
        self._tasks.clear()
        self._is_running = False

    @override(DistributedActors)
    def broadcast_updated_policy(self, state_dict: dict[str, Any]) -> None:
        if self._is_running:  # those who start later take the policy itself
            self._tickets.updated()
            self._weights = self._groups.hand_over(self.policy)

    @override(ActorsAhead)
    def _work_done(self) -> Work:
        return self._groups.crew.take_work()

    @override(ActorsAhead)
    def _issue(self, actor: int) -> None:
        numbers = [self._seeds_now()[1][actor % self.n_actors], *([actor] if actor >= self.n_actors else [])]
        drawn = np.random.SeedSequence([*numbers, self._n_issued[actor]]).generate_state(1, np.uint64)
        self._n_issued[actor] += 1
        asked = (*self._weights, Generators(seed=int(drawn[0])), self._plan)
        self._tasks[self._groups.submit(actor, "collect", *asked)] = self._tickets.version

    @override(ActorsAhead)
    def _receive(self, wait: bool) -> None:
        self._groups.crew.join_new()
        self._begin_new()
        for task in self._groups.crew.finished(list(self._tasks), wait=wait):
            packet = self._groups.take(task.actor, task.result, self.epoch_stats)
            assert packet is not None, "it was asked for a rollout"
            self._arrived.append((task.actor, packet, self._tasks.pop(task)))

    def _begin_new(self) -> None:
        """Gives actors that are new their tickets."""
        n_actors = self._groups.crew.n_actors if self._may_join else self.n_actors
        for actor in range(len(self._n_issued), n_actors):
            self._n_issued.append(0)
            if actor >= self._tickets.n_actors:
                self._tickets.add_actor()
            for _ in range(self._tickets.n_issued(actor)):
                self._issue(actor)
