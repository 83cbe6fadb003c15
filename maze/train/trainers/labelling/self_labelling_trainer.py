"""Self-labelling: imitation of the best of many sampled solutions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from scipy.special import log_softmax

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.env.faults import in_simulation
from maze.core.errors import ConfigError
from maze.planning.branches import Branches, Group
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.learning import require_end_of_schedule, scheduled_lr
from maze.train.trainers.common.trainer import EpochTrainer
from maze.train.trainers.labelling.labelling_configs import SelfLabellingConfig
from maze.train.trainers.labelling.labelling_trainer import Copies, LabellingTrainer

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
