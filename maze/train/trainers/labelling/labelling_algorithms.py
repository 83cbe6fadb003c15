"""Algorithms that label decisions by simulation: deep controlled learning and self-labelling."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from scipy.special import log_softmax

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
from maze.train.trainers.common.learning import require_end_of_schedule, scheduled_lr
from maze.train.trainers.common.trainer import EpochTrainer
from maze.train.trainers.labelling.labelling_configs import DCLConfig, SelfLabellingConfig
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


# -- self-labelling --------------------------------------------------------------------------------------------------

_MOST_ACTIONS = 4096
# Beams are made smaller when at most so many of their instances are left to solve.
_SHARE_OF_ROWS = 0.75
# Only the log-probabilities of masked actions are so small.
_IMPOSSIBLE = -1e30


class Children(NamedTuple):
    """Possible continuations of branches, sorted by branch.

    :param rows: The branch of each child, `[n_children]`.
    :param actions: Its action: index in the product of the heads; -1: the episode has ended, and there is none.
    :param log_probs: Log-probability of the action.
    """

    rows: np.ndarray
    actions: np.ndarray
    log_probs: np.ndarray


class SelfLabelling(LabellingTrainer):
    """Self-labelling (Corsini, Porrello, Calderara and Dell'Amico 2024), for deterministic environments.

    An update samples several solutions of each of some instances and imitates the best one, weighted by its advantage
    over the mean of all. Solutions are sampled without replacement, by stochastic beam search (Kool, van Hoof and
    Welling 2019), from the policy itself: samples of a flatter distribution would flatten it more with each update.
    Only the best episodes are played again with their observations, and learned from.

    :param algorithm_config: Hyperparameters.
    :param policy: The policy that is trained.
    :param copies: Copies of the environment.
    :param seed: Seed.
    :param common: See :class:`~maze.train.trainers.labelling.labelling_trainer.LabellingTrainer`.
    :raises ConfigError: The environment is stochastic, or actions are not discrete.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = SelfLabellingConfig
    config: SelfLabellingConfig

    def __init__(self, algorithm_config: Any, policy: TorchPolicy, copies: Copies, seed: int, **common: Any) -> None:
        super().__init__(algorithm_config, policy, copies, seed, **common)
        if copies.chance:
            raise ConfigError(
                "algorithm=self_labelling: expected a deterministic environment, but two copies of the environment "
                "with new futures differ, so the best of several episodes is due to chance. Use algorithm=dcl."
            )
        require_end_of_schedule(self.config.lr_schedule, self.config.n_epochs)
        for step_key, space in copies.action_spaces.items():
            sizes = [float(part.n) if isinstance(part, spaces.Discrete) else np.inf for part in space.values()]
            if math.prod(sizes) > _MOST_ACTIONS:
                raise ConfigError(
                    f"algorithm=self_labelling: sub-step {step_key!r}: expected Discrete actions with at most "
                    f"{_MOST_ACTIONS:,} combinations, found {space}. Use algorithm=dcl or algorithm=ppo."
                )
        self._played, self._limit = copies.branches()
        self._beams = copies.branches()[0], copies.branches()[0]

    @override(EpochTrainer)
    def _update(self) -> None:
        self.optimizer.lr = scheduled_lr(self.config.lr_schedule, self.config.lr, self.share_done)
        self._label()
        for _ in range(self.config.n_passes):
            self._imitate()
        self.labelled.clear()

    @override(LabellingTrainer)
    def _label_first(self) -> None:
        self._label()

    def _label(self) -> None:
        """Sample solutions, and take the best of each instance for a label."""
        config, (first, second) = self.config, self._beams
        self.policy.eval()
        seeds = [self._seed() for _ in range(config.instances)]
        done_before = first.n_decisions + second.n_decisions
        self._played.begin(seeds)
        sampled, returns, is_solution = self._sample()
        returns = np.where(is_solution, returns, -np.inf)
        best = returns.argmax(axis=1)
        instances = np.arange(config.instances)
        best_returns = returns[instances, best]
        # the mean of differences: that of equally good solutions is exactly 0
        behind = np.where(is_solution, best_returns[:, np.newaxis] - returns, 0.0)
        played, weights = self._played, behind.sum(axis=1) / is_solution.sum(axis=1)
        played.begin(seeds)
        for actions in sampled[:, instances, best]:
            decisions = []
            for group in played.observe(self._limit):
                decoded = self._decoded(group, actions[group.rows])
                decisions.append((group, decoded))
                indices = np.flatnonzero(~played.done[group.rows])
                labels = [{head: choice[index] for head, choice in decoded.items()} for index in indices]
                observations = {key: array[indices] for key, array in group.stacked().items()}
                self.labelled.add(group.actor_id, observations, labels, weights[group.rows[indices]])
            if decisions:
                played.step(decisions)
        if not np.allclose(played.returns, best_returns, rtol=1e-4, atol=1e-6):
            raise ConfigError(
                "algorithm=self_labelling: an episode that was played again with the same actions has another return. "
                "The environment depends on something that `clone_from` and `seed` leave out."
            )
        self.stats.add_value("gain", float(weights.mean()))
        self.stats.add_value("simulated_decisions", first.n_decisions + second.n_decisions - done_before)

    # -- sampling --------------------------------------------------------------------------------------

    @in_simulation("a solution that algorithm=self_labelling samples")
    def _sample(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sample different solutions of the instances that have begun.

        :return: Actions `[n_decisions, n_instances, n_samples]` (indices in the product of the heads, -1 after the
            end), returns and whether there is a solution, `[n_instances, n_samples]` each.
        """
        n_instances, n_samples = self.config.instances, self.config.samples
        branches, following = self._beams
        rows = np.arange(n_instances * n_samples)  # the places of the branches in the results
        branches.fork(self._played.states(), rows // n_samples, np.zeros_like(rows), seed=0)
        log_probs, returns = np.zeros(len(rows)), np.zeros(len(rows))
        perturbed = np.full(len(rows), -np.inf)  # of places that are empty
        perturbed[::n_samples] = 0.0
        is_solution = np.isfinite(perturbed)
        history: list[tuple[np.ndarray, np.ndarray]] = []
        while groups := branches.observe(self._limit):
            children = self._children(branches, groups, np.isfinite(perturbed))
            of_children = log_probs[children.rows] + children.log_probs
            noisy = conditional_gumbel(of_children, children.rows, perturbed, self.rng)
            kept = best_of_each(noisy, children.rows // n_samples, len(rows) // n_samples, n_samples)
            is_empty = kept < 0
            kept = np.where(is_empty, np.repeat(kept[::n_samples], n_samples), kept)
            parents, actions = children.rows[kept], children.actions[kept]
            log_probs, perturbed = of_children[kept], np.where(is_empty, -np.inf, noisy[kept])
            following.continue_from(branches, parents)
            branches, following = following, branches
            branches.step([(group, self._decoded(group, actions[group.rows])) for group in branches.actors()])
            returns[rows], is_solution[rows] = branches.returns, np.isfinite(perturbed)
            of_all = np.arange(len(returns)), np.full(len(returns), -1)
            of_all[0][rows], of_all[1][rows] = rows[parents], actions
            history.append(of_all)
            runs = (~branches.done & is_solution[rows]).reshape(-1, n_samples).any(axis=1)
            if 0 < np.count_nonzero(runs) <= _SHARE_OF_ROWS * len(runs):  # do not step instances that are solved
                left = np.flatnonzero(np.repeat(runs, n_samples))
                following.continue_from(branches, left)
                branches, following = following, branches
                rows, log_probs, perturbed = rows[left], log_probs[left], perturbed[left]
        shape = (n_instances, n_samples)
        places, traced = np.arange(len(returns)), []  # the actions that led to the last branches
        for parents_of_all, actions_of_all in reversed(history):
            traced.append(actions_of_all[places])
            places = parents_of_all[places]
        return np.reshape(traced[::-1], (-1, *shape)), returns.reshape(shape), is_solution.reshape(shape)

    def _children(self, branches: Branches, groups: Sequence[Group], is_used: np.ndarray) -> Children:
        """Return the continuations of branches; ended branches stay unchanged."""
        ended = np.flatnonzero(branches.done & is_used)
        parts = [Children(ended, np.full(len(ended), -1), np.zeros(len(ended)))]
        for group in groups:
            of_group = np.flatnonzero((is_used & ~branches.done)[group.rows])
            if not len(of_group):
                continue
            observations = {key: array[of_group] for key, array in group.stacked().items()}
            with torch.inference_mode():
                output = self.policy.compute_substep_policy_output(observations, group.actor_id)
            joint = np.zeros((len(of_group), 1))
            for head in self.copies.action_spaces[group.actor_id.step_key]:
                of_head = log_softmax(output.action_logits[head].double().cpu().numpy(), axis=-1)
                joint = (joint[:, :, None] + of_head[:, None, :]).reshape(len(joint), -1)
            indices, actions = np.nonzero(joint > _IMPOSSIBLE)
            parts.append(Children(group.rows[of_group[indices]], actions, joint[indices, actions]))
        rows, actions, log_probs = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(rows, kind="stable")
        return Children(rows[order], actions[order], log_probs[order])

    def _decoded(self, group: Group, actions: np.ndarray) -> Mapping[str, np.ndarray]:
        """Return actions by head of indices in the product of the heads; those of ended branches do not count."""
        space: dict[str, Any] = dict(self.copies.action_spaces[group.actor_id.step_key].spaces)
        sizes = [int(part.n) for part in space.values()]
        choices = np.unravel_index(np.maximum(actions, 0) % np.prod(sizes), sizes)
        return {head: part.start + choice for (head, part), choice in zip(space.items(), choices, strict=True)}


def conditional_gumbel(
    log_probs: np.ndarray, rows: np.ndarray, of_parents: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Perturb log-probabilities by Gumbel noise under the condition that the largest of a parent's is the parent's own.

    The largest ones of all leaves are then a sample without replacement (Kool et al. 2019, appendix B.3).

    :param log_probs: Of children, `[n_children]`.
    :param rows: Their parents, ascending.
    :param of_parents: Perturbed log-probabilities of the parents, by row.
    :param rng: Draws the noise.
    """
    noisy = log_probs + rng.gumbel(size=len(log_probs))
    begins = np.flatnonzero(np.diff(rows, prepend=-1))
    largest = np.repeat(np.maximum.reduceat(noisy, begins), np.diff(np.append(begins, len(rows))))
    parent = of_parents[rows]
    with np.errstate(divide="ignore"):
        shifted = parent - noisy + np.log1p(-np.exp(noisy - largest))
    return np.asarray(parent - np.maximum(shifted, 0.0) - np.log1p(np.exp(-np.abs(shifted))))


def best_of_each(values: np.ndarray, groups: np.ndarray, n_groups: int, n_best: int) -> np.ndarray:
    """Return the indices of the largest values of each group, `[n_groups * n_best]`, best first; -1: there are fewer.

    :param values: `[n]`.
    :param groups: Group of each, `[n]`.
    :param n_groups: Number of groups.
    :param n_best: Number of values kept in each group.
    """
    order = np.lexsort((-values, groups))
    first = np.searchsorted(groups[order], np.arange(n_groups))
    rank = np.arange(len(order)) - first[groups[order]]
    is_kept = rank < n_best
    found = np.full(n_groups * n_best, -1)
    found[groups[order][is_kept] * n_best + rank[is_kept]] = order[is_kept]
    return found
