"""Rollouts of the groups of environments that finish first."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maze.core.agent.policy import Policy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_columns import RolloutColumns
from maze.core.utils.worker_pool import Task
from maze.train.parallelization.distributed_actors.env_groups import (
    EnvGroups,
    Generators,
    GroupedVectorEnv,
    RolloutPlan,
    asynchronous_states,
    seed_beside,
    seed_of_start,
)
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv

logger = logging.getLogger(__name__)


class FirstFragments(GroupedVectorEnv):
    """Environments in worker processes or actors of Ray; each steps one group with a copy of the policy.

    :param wait_for: Share of the groups in a rollout. Below 1, the first fragments are taken; late groups continue and
        deliver to a later rollout, and actors that join get their own groups.
    :param max_age: Maximum age of a fragment in rollouts; older fragments are dropped. Infinite: none is dropped, and
        each group begins its next fragment as soon as one is taken, for learning from a replay buffer.
    :param is_shared: Whether the actors belong to other environments, too, so that :meth:`close` does not end them.
    :raises ConfigError: The groups differ in size, although a rollout does not wait for all of them.
    """

    def __init__(
        self,
        actors: EnvGroups,
        env_factory: Callable[[], Any],
        groups: Sequence[slice],
        logging_prefix: str | None,
        wait_for: float = 1.0,
        max_age: float = 1,
        is_shared: bool = False,
    ) -> None:
        self._pool, self._is_shared = actors.pool, is_shared
        self._n_wanted, self.max_age = math.ceil(wait_for * len(groups) - 1e-9), max_age
        is_first, n_envs = self._n_wanted < len(groups), groups[-1].stop
        if is_first and n_envs % len(groups):
            raise ConfigError(
                f"runner.placement.wait_for: below 1, all groups need the same number of environments; found {n_envs} "
                f"environments in {len(groups)} groups. Set runner.concurrency (SAC, DQN: algorithm.num_actors) to a "
                "multiple of the number of groups."
            )
        # Fragments in progress, with the number of their rollout.
        self._under_way: dict[Task, int] = {}
        self._n_rollouts = self._n_starts = 0
        self._ages: list[int] = []
        self.may_join = is_first and len(groups) == self._pool.n_first
        super().__init__(actors, env_factory, groups, logging_prefix)

    @override(GroupedVectorEnv)
    def _collect(self, policy: Policy, plan: RolloutPlan) -> list[RolloutColumns]:
        if self.n_rollout_envs < self.n_envs:
            return [rollout for _, rollout in self.collect_first(policy, plan, self._n_wanted, self._n_wanted)]
        n_restarts = self._pool.n_restarts
        self._n_rollouts += 1
        rollouts = super()._collect(policy, plan)
        if self._pool.n_restarts > n_restarts:
            logger.warning("An actor was lost: from this rollout on, results differ from those of a run without loss.")
        return rollouts

    def collect_first(
        self, policy: Policy, plan: RolloutPlan, n_awaited: int, n_most: int
    ) -> list[tuple[int, RolloutColumns]]:
        """Return the fragments that finish first, including late fragments of earlier rollouts.

        :param policy: The policy; a group uses its weights until it begins its next fragment.
        :param plan: Parameters of the fragments; with `begins`, those in progress are discarded.
        :param n_awaited: Number of fragments to wait for.
        :param n_most: Maximum number of fragments; further ones that are complete belong to the next rollout.
        :return: Index of the group and fragment, in the order of arrival; those of a group in their order.
        """
        assert isinstance(policy, TorchPolicy), "only a TorchPolicy has the logits that late fragments need"
        self._n_rollouts += 1
        if plan.begins:
            self._under_way.clear()
        state, copies = policy.rng_state(), self._actors.hand_over(policy)
        self._pool.join_new()
        n_groups = self._pool.n_actors if self.may_join else len(self.groups)
        policy.seed(seed_beside(state, n_groups))
        all_at_once = self.max_age == math.inf

        def begin(index: int, plan: RolloutPlan) -> None:
            generators = Generators(seed=seed_beside(state, index, len(self._ages)))
            self._under_way[self._actors.submit(index, "collect", *copies, generators, plan)] = self._n_rollouts

        for index in set(range(n_groups)) - {task.actor for task in self._under_way}:
            begin(index, plan)
        taken: list[tuple[int, RolloutColumns]] = []
        while (n_missing := n_awaited - len(taken)) > 0:
            # a late group starts its next fragment at once, so wait for a single fragment while there are late ones
            is_late = all_at_once or min(self._under_way.values()) < self._n_rollouts
            finished = self._pool.finished(list(self._under_way), 1 if is_late else n_missing)
            for task in finished[: n_most - len(taken)]:
                self._ages.append(self._n_rollouts - self._under_way.pop(task))
                rollout = self._actors.take(task.actor, task.result, self.epoch_stats)
                if self._ages[-1] <= self.max_age:
                    taken.append((task.actor, rollout))
                if self._ages[-1] or all_at_once:
                    begin(task.actor, plan._replace(begins=False))
        return taken

    @property
    @override(StructuredVectorEnv)
    def n_rollout_envs(self) -> int:
        return int(self.groups[self._n_wanted - 1].stop)

    @override(StructuredVectorEnv)
    def report_work(self) -> None:
        if self._n_rollouts:  # not for evaluations
            events = self._pool.report_work(self.epoch_stats)
            for age in self._ages:
                events.fragment_age(value=age)
                events.fragments_dropped(value=int(age > self.max_age))
            self._ages.clear()

    @override(GroupedVectorEnv)
    def state_dict(self, with_running: bool = True) -> dict[str, Any]:
        if self.n_rollout_envs == self.n_envs and not self._under_way:
            return super().state_dict(with_running)
        states = asynchronous_states(self._actors.learned, self.n_envs)
        return {"n_starts": self._n_starts + 1, "environments": states}

    @override(GroupedVectorEnv)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        # with the seeds of the first start, its first episodes would come again
        if n_starts := state_dict.get("n_starts", int(self.n_rollout_envs < self.n_envs)):
            self._n_starts = n_starts
            self.seed([seed_of_start(seed, n_starts) for seed in self._seeds])
        return super().load_state_dict(state_dict)

    @override(GroupedVectorEnv)
    def close(self) -> None:
        if not self._is_shared:
            super().close()
