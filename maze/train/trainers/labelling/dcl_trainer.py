"""Deep controlled learning: approximate policy iteration with simulated labels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from maze.core.agent.policy import Policy, build_policy
from maze.core.agent.random_policy import RandomPolicy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.env.faults import in_simulation
from maze.core.env.space_values import split_rows
from maze.core.errors import ConfigError
from maze.planning.branches import Actions, Branches, Group
from maze.planning.planner import ActionValues, BranchSimulator, Candidates, Planner
from maze.planning.rollout_policy import acting, candidate_actions, value_function
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.trainer import EpochTrainer
from maze.train.trainers.labelling.labelling_configs import DCLConfig
from maze.train.trainers.labelling.labelling_trainer import Copies, LabellingTrainer
from maze.train.utils.train_utils import Part

# Share of a generation's time in which decisions are labelled; the rest is for the passes over them.
_SHARE_OF_LABELS = 0.75
# Decisions of the first walk, at the end of which the length of episodes is known.
_LONGEST_WALK = 1000


class DCL(LabellingTrainer):
    """Deep controlled learning (Temizöz, Imdahl, Dijkman, Lamghari-Idrissi and van Jaarsveld 2025).

    An epoch is a generation. Its first updates reach decisions of episodes of the current policy, each at a random
    time, and label them by :class:`~maze.planning.planner.Planner` (common random numbers, sequential halving) with the
    candidate of the largest mean return in all scenarios. The others are passes over these labels with a learning rate
    that decays to zero; the weight of a label is the difference of its value from the mean value of the other
    candidates. Decisions are sub-steps.

    :param algorithm_config: Hyperparameters.
    :param policy: The policy that is trained.
    :param copies: Copies of the environment.
    :param seed: Seed.
    :param common: See :class:`~maze.train.trainers.labelling.labelling_trainer.LabellingTrainer`.
    :raises ConfigError: The policy of the first generation carries hidden states.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = DCLConfig
    config: DCLConfig

    def __init__(self, algorithm_config: Any, policy: TorchPolicy, copies: Copies, seed: int, **common: Any) -> None:
        super().__init__(algorithm_config, policy, copies, seed, **common)
        config, base = self.config, self.config.base
        if base is not None:
            base = build_policy(base, where="algorithm.base", action_spaces_dict=copies.action_spaces)
            if base.is_recurrent:
                raise ConfigError("algorithm.base: expected a policy without hidden states, which copies do not have.")
        self._base: Policy | None = base
        self._value = value_function(config.value, "algorithm.value")
        self._explorer = RandomPolicy(copies.action_spaces)
        is_single = base is not None and base.needs_env()
        self._walk, self._limit = copies.branches(is_single)
        self._planned, _ = copies.branches(is_single, config.gamma)
        self._progress = _Progress()
        self._started: float | None = None  # when the generation began in this process

    @override(EpochTrainer)
    def train(self, n_epochs: int | None = None, **kwargs: Any) -> None:
        super().train(self.config.n_epochs or self.config.generations if n_epochs is None else n_epochs, **kwargs)

    @override(EpochTrainer)
    def n_updates_per_epoch(self) -> int:
        return self._n_labelling + self.config.n_passes

    @property
    def _n_labelling(self) -> int:
        """Number of updates of a generation that make labels."""
        return math.ceil(self.config.states / self.config.states_per_update)

    @override(EpochTrainer)
    def _update(self) -> None:
        if self.update == 0 or self._started is None:
            self._started = time.monotonic()
        n_passed = self.update - self._n_labelling
        if n_passed < 0:
            if self._label_time_left():
                self._label()
            return
        of_time = (self._time_spent() - _SHARE_OF_LABELS) / (1.0 - _SHARE_OF_LABELS)
        if (progress := max(n_passed / self.config.n_passes, of_time)) < 1.0:
            self.optimizer.lr = self.config.lr * (1.0 - progress)
            self._imitate()
        if self.update + 1 == self.n_updates_per_epoch():
            self.labelled.clear()

    def _time_spent(self) -> float:
        """Return the share of the generation's time that is spent."""
        assert self._started is not None
        seconds = self.config.generation_seconds
        return 0.0 if seconds is None else (time.monotonic() - self._started) / seconds

    @override(LabellingTrainer)
    def _label_first(self) -> None:
        act = acting(self._base) if self._base is not None else None
        self._explorer.seed(self._seed())
        groups, _ = self._decisions(act)
        for group in groups:
            n = len(group.rows)
            observations = {key: np.array(array) for key, array in group.stacked().items()}
            self.labelled.add(group.actor_id, observations, [{}] * n, np.ones(n))

    # -- decisions -------------------------------------------------------------------------------------

    @in_simulation("an episode of algorithm=dcl, which reaches decisions to label")
    def _decisions(self, act: Callable[[Group], Actions] | None) -> tuple[list[Group], int]:
        """Play episodes up to a random time.

        :param act: The policy; `None`: a random one.
        :return: The decisions there, and the environment steps that are completed.
        """
        seeds = [self._seed() for _ in range(self.config.states_per_update)]
        while True:
            longest = self._progress.longest
            length = int(self.rng.integers(longest + longest // 4 + 1))  # others may be longer
            self._walk.begin(seeds)
            for n_done in range(length):
                groups = self._walk.observe(self._limit)
                if not groups:
                    self._progress.longest = n_done  # all episodes have ended: they are shorter
                    break
                self._walk.step([(group, self._explored(group, act)) for group in groups])
            else:
                if groups := self._walk.observe(self._limit):
                    self._progress.longest = max(longest, length)
                    return groups, int(self._walk.steps.max())
                self._progress.longest = length

    def _explored(self, group: Group, act: Callable[[Group], Actions] | None) -> Actions:
        """Return the actions of the policy, some of them replaced by random ones."""
        n_rows = len(group.rows)
        is_random = self.rng.random(n_rows) < (1.0 if act is None else self.config.exploration)
        chosen: list[Mapping[str, Any]] = [{}] * n_rows if act is None else _each(act(group))
        for index in np.flatnonzero(is_random).tolist():
            chosen[index] = self._explorer.compute_action(group.single(index), actor_id=group.actor_id)
        return chosen

    # -- labels ----------------------------------------------------------------------------------------

    def _label(self) -> None:
        policy = self.policy if self._base is None or self.epoch > 0 else self._base
        self.policy.eval()
        for each in (policy, self._explorer):
            each.seed(self._seed())
        act, config, done_before = acting(policy), self.config, self._planned.n_decisions
        groups, n_steps = self._decisions(act)
        simulate = BranchSimulator(self._planned, act, config.horizon, self._value)
        simulate.limit = self._limit and self._limit - n_steps
        planner = Planner(simulate, config.scenarios, config.confidence, chance=self.copies.chance, is_for_each=True)
        for group in groups:
            self._label_group(group, policy, act, planner)
        self.stats.add_value("simulated_decisions", self._planned.n_decisions - done_before)

    def _label_group(self, group: Group, policy: Policy, act: Callable[[Group], Actions], planner: Planner) -> None:
        indices = np.flatnonzero(~self._walk.done[group.rows])
        base = _each(act(group))
        candidates = [self._candidates(group, index, base[index], policy) for index in indices.tolist()]
        found = _planned(self._walk, group.rows[indices], candidates, planner, self._seed(), self._label_time_left)
        compared = [index for index, each in enumerate(found) if len(each.actions) > 1]
        if not compared:
            return
        labelled = [found[index] for index in compared]
        rows = indices[compared]
        best = [each.best for each in labelled]
        weights = np.array([label_weight(each.differences, each.best) for each in labelled])
        observations = {key: array[rows] for key, array in group.stacked().items()}
        labels = [each.actions[index] for each, index in zip(labelled, best, strict=True)]
        self.labelled.add(group.actor_id, observations, labels, weights)
        self.stats.add_value("gain", float(np.mean([each.gain for each in labelled])))
        self.stats.add_value("changed_labels", float(np.mean(np.array(best) > 0)))

    def _label_time_left(self) -> bool:
        return self._time_spent() < _SHARE_OF_LABELS

    def _candidates(self, group: Group, index: int, base_action: Mapping[str, Any], policy: Policy) -> Candidates:
        observation, actor = group.single(index), group.actor_id
        env = None if group.envs is None else group.envs[index]
        state = group.maze_state(index) if policy.needs_state() else None
        return candidate_actions(
            dict(base_action), self.copies.action_spaces[actor.step_key], observation, self.config.candidates, self.rng,
            lambda: policy.compute_action(observation, state, env, actor, deterministic=False),
        )  # fmt: skip

    @override(LabellingTrainer)
    def _parts(self) -> dict[str, Part]:
        return {**super()._parts(), "progress": self._progress}


class _Progress:
    """Length of episodes, if known."""

    def __init__(self) -> None:
        self.longest = _LONGEST_WALK

    def state_dict(self) -> dict[str, int]:
        return {"longest": self.longest}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self.longest = state_dict["longest"]


def label_weight(differences: np.ndarray, best: int) -> float:
    """Return the weight of a label: its value minus the mean value of the other candidates, and not below 0.

    :param differences: Values of the candidates, up to a common constant, `[n_candidates]`; at least two.
    :param best: Index of the label.
    """
    return max(0.0, float(differences[best] - np.delete(differences, best).mean()))


def _planned(
    walk: Branches,
    rows: np.ndarray,
    candidates: Sequence[Candidates],
    planner: Planner,
    seed: int,
    is_time_left: Callable[[], bool],
) -> list[ActionValues]:
    """Compare candidates of some of the branches: in arrays all at once, of single environments one after the other.

    Where time is over, the last single environments are left out.
    """
    source = walk.states()
    if isinstance(source, list):
        pairs = zip(rows.tolist(), candidates, strict=True)
        return [planner.plan([source[row]], [actions], seed + row)[0] for row, actions in pairs if is_time_left()]
    of_rows: list[Candidates] = [({},)] * len(walk.done)  # a single candidate is not simulated
    for row, actions in zip(rows.tolist(), candidates, strict=True):
        of_rows[row] = actions
    found = planner.plan(source, of_rows, seed)
    return [found[row] for row in rows.tolist()]


def _each(actions: Actions) -> list[Mapping[str, Any]]:
    """Return actions of a group, one by one."""
    return list(split_rows(actions) if isinstance(actions, Mapping) else actions)
