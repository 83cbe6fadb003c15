"""Evaluation of a policy by rolling it out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from maze.core.agent.policy import Policy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.context import check_episode_count
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStatsLevel
from maze.core.rollout.batched_acting import EpisodesInterrupted
from maze.core.utils.config_utils import count_instances, flag, whole_number
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.train.parallelization.distributed_actors.env_groups import seed_beside
from maze.train.parallelization.vector_env.sequential_vector_env import in_sequence
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
from maze.train.trainers.common.evaluators.evaluator import Evaluator
from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase, SelectionCriterion, tell
from maze.train.utils.train_utils import statistics_from_plain, statistics_to_plain

logger = logging.getLogger(__name__)


class RolloutEvaluator(Evaluator):
    """Roll a policy out for a number of episodes and report their mean reward, or another statistic or KPI.

    Each environment plays a fixed share of the episodes. Counting the first ones to finish, whichever environment they
    come from, would favour short episodes. Actions are drawn from generators of the evaluator's own, so that training
    draws the same numbers whatever is evaluated.

    With an instance set, every evaluation plays its instances once and in order.

    :param eval_env: Vector environment, or one environment with statistics (`LogStatsWrapper`).
    :param n_episodes: Number of episodes.
    :param model_selection: Receives the mean reward (or the objective); `None`: none does.
    :param deterministic: Return deterministic (greedy) actions instead of sampling.
    :param objective: Statistic or KPI that the best model is chosen by, such as `kpi/waste`; `None`: the mean
        reward. See :class:`~maze.train.trainers.common.model_selection.model_selection_base.SelectionCriterion`.
    :param maximize: Whether more of it is better.
    :param constraints: Conditions on the best model, such as `invalid_cut <= 0`.
    :param keep: Model that the selection keeps: the `best`, or the `latest`, where epochs towards the end differ by
        less than their evaluations do by chance.
    :raises ValueError: There is no episode to play.
    :raises ConfigError: `keep` is something else.
    """

    def __init__(
        self,
        eval_env: StructuredVectorEnv | LogStatsWrapper,
        n_episodes: int,
        model_selection: ModelSelectionBase | None,
        deterministic: bool = False,
        *,
        objective: str | None = None,
        maximize: bool = True,
        constraints: Sequence[str] = (),
        keep: str = "best",
    ) -> None:
        if keep not in ("best", "latest"):
            raise ConfigError(f"rollout_evaluator.keep: expected `best` or `latest`, found {keep!r}.")
        self._n_instances = count_instances(eval_env)
        if self._n_instances:
            check_episode_count(n_episodes, self._n_instances, "rollout_evaluator.n_episodes")
        if isinstance(eval_env, LogStatsWrapper):
            single = eval_env
            eval_env = in_sequence(lambda: single, 1)
            eval_env.epoch_stats = single.get_stats(LogStatsLevel.EPOCH)  # those of the environment itself
        self.eval_env: StructuredVectorEnv = eval_env
        self.n_episodes = whole_number("n_episodes", n_episodes, at_least=1)
        self.model_selection = model_selection
        self._keeps_latest = keep == "latest"
        self.deterministic: bool = flag("deterministic", deterministic)
        self.criterion = SelectionCriterion(objective, maximize, constraints)
        # State of the generators for drawing actions; None: nothing was evaluated yet.
        self._rng_state: dict[str, Any] | None = None

    @override(Evaluator)
    def evaluate(self, policy: Policy) -> None:
        before = self.state_dict()
        try:
            with self._evaluating(policy):
                self._play(policy)
        except EpisodesInterrupted:  # the same episodes are played again when the run is resumed
            self.load_state_dict(before)
            raise
        self.eval_env.write_epoch_stats()
        reward: Any = self.eval_env.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPOCH, name="mean")
        if not np.isfinite(reward):
            logger.warning("The mean reward of the evaluation is %s.", float(reward))
        if self.model_selection is not None:
            self.model_selection.keeps_latest = self._keeps_latest
            tell(self.model_selection, self.criterion, self.eval_env.get_stats(LogStatsLevel.EPOCH).last_stats)

    def _play(self, policy: Policy) -> None:
        self.eval_env.clear_epoch_stats()
        n_envs = self.eval_env.n_envs
        if not self._n_instances:
            self.eval_env.play_episodes(policy, self.episodes_per_env(n_envs), self.deterministic)
            return
        for first in range(0, self.n_episodes, n_envs):
            numbers = np.arange(first, first + n_envs)
            self.eval_env.seed(numbers.tolist())  # the numbers of the instances
            self.eval_env.play_episodes(policy, (numbers < self.n_episodes).astype(np.int64), self.deterministic)

    @override(Evaluator)
    def state_dict(self) -> dict[str, Any]:
        statistics = statistics_to_plain(self.eval_env.get_stats(LogStatsLevel.EPOCH))
        generators = {} if self._rng_state is None else {"policy_generators": self._rng_state}
        return {"statistics": statistics, **self.eval_env.state_dict(with_running=False), **generators}

    @override(Evaluator)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> list[str]:
        statistics_from_plain(self.eval_env.get_stats(LogStatsLevel.EPOCH), state_dict.get("statistics", ()))
        self._rng_state = state_dict.get("policy_generators")
        if "environments" not in state_dict:
            return ["evaluation episodes may not be those that would have followed: their seeds are not known"]
        problems = self.eval_env.load_state_dict(state_dict)
        return [f"evaluation environment {index} starts anew: {problem}" for index, problem in problems.items()]

    def episodes_per_env(self, n_envs: int) -> np.ndarray:
        """Return how many episodes each environment contributes, as evenly as possible.

        :param n_envs: Number of environments.
        :return: Integers `[n_envs]`, with the sum `n_episodes`; the first environments may have one more.
        """
        return np.bincount(np.arange(self.n_episodes) % n_envs, minlength=n_envs)

    @contextmanager
    def _evaluating(self, policy: Policy) -> Iterator[None]:
        """Return a context in which a policy that is being trained draws from the evaluator's generators, and dropout
        and the like are off.
        """
        if not isinstance(policy, TorchPolicy):
            yield
            return
        of_training = policy.rng_state()
        trained = [network for network in policy.networks.values() if network.training]
        policy.eval()
        try:
            if self._rng_state is None:
                policy.seed(seed_beside(of_training))
            else:
                policy.set_rng_state(self._rng_state)
            yield
            self._rng_state = policy.rng_state()
        finally:
            policy.set_rng_state(of_training)
            for network in trained:
                network.train()
