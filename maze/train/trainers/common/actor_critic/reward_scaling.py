"""Reward scaling and reward centring.

They change the rewards of a rollout that is learned from, not those of statistics, KPIs and evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from maze.core.agent.returns import ReturnFunction, Returns, Trajectories
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.utils.stats_utils import CumulativeMovingMeanStd

if TYPE_CHECKING:
    from maze.core.rollout.rollout_columns import RolloutColumns

_EPSILON = 1e-8
# Scaled rewards are clipped to it.
_LARGEST = 10.0


class RewardScaling:
    """Divide the rewards that a trainer learns from by the standard deviation of the discounted return so far, and
    clips them to [-10, 10] (Engstrom et al. 2020, Implementation matters in deep policy gradients, "reward scaling").

    That return is the discounted sum of the rewards up to a step, from the beginning of its episode on (`R <- gamma * R
    + r`), and the standard deviation is that of all steps of all environments. A rollout counts before its own rewards
    are scaled, all of them by the same number. A return continues in the next rollout, in the environment with the same
    index; with IMPALA, and where a rollout does not wait for all environments, that may be another one.

    :param gamma: Discount for each environment step.
    :param at_ends: Whether all rewards come with the last steps of episodes. They are divided by their root mean square
        instead: the standard deviation of all steps is smaller by the root of the length, and all would be clipped.
    """

    def __init__(self, gamma: float, at_ends: bool = False) -> None:
        self._gamma, self._at_ends = gamma, at_ends
        self._statistics = CumulativeMovingMeanStd(epsilon=0.0)
        # `[n_envs]`: of the running episodes, already discounted for the step that comes.
        self._returns = np.zeros(0)

    @property
    def std(self) -> float:
        """Divisor of rewards; 1 where returns do not vary."""
        variance = float(self._statistics.var) if self._statistics.count else 0.0
        variance += float(self._statistics.mean) ** 2 if self._at_ends else 0.0
        return float(np.sqrt(variance + _EPSILON)) if variance > 0.0 else 1.0

    def scale(self, columns: RolloutColumns) -> None:
        """Learn from the rewards of a rollout, and scale them in place.

        :param columns: The rollout; of rewards that are not finite nothing is learned.
        """
        rewards = columns.rewards
        if np.isfinite(rewards.sum()):
            complete = columns.step_complete
            discounts, ended = np.where(complete, self._gamma, 1.0), columns.terminated | columns.truncated
            discounts[ended] = 0.0
            self._returns = columns.carried(self._returns)
            returns = rewards.astype(np.float64)  # up to each tick
            for tick, discount in enumerate(discounts):
                returns[tick] += self._returns
                self._returns = returns[tick] * discount
            self._statistics.update(returns[ended if self._at_ends else complete])
        for of_whom in (rewards, columns.actor_rewards):
            if of_whom is not None:
                np.multiply(of_whom, np.float32(1.0 / self.std), out=of_whom)
                np.clip(of_whom, -_LARGEST, _LARGEST, out=of_whom)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics, and the returns of the running episodes."""
        statistics = {name: float(getattr(self._statistics, name)) for name in ("count", "mean", "var")}
        return {**statistics, "returns": self._returns.copy()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
        for name in ("count", "mean", "var"):
            setattr(self._statistics, name, state_dict[name])
        self._returns = np.array(state_dict["returns"], np.float64)


class CentredReturns(ReturnFunction):
    """Returns of rewards minus their average: simple reward centring (Naik et al. 2024, Reward centering).

    Where a problem has no end and is judged by averages, values consist mostly of the average reward divided by `1 -
    gamma`, a constant that carries no information about actions and hides differences that do. Without it `gamma` may
    come close to 1. With `gamma` 1 values are those of average-reward reinforcement learning: defined up to a constant,
    which is chosen so that targets have mean 0 in each rollout (it drifts unless it is held: Ma et al. 2021, Average-
    reward reinforcement learning with trust region methods).

    Centred values have the scale of the differences between states: in a queue under heavy load hundreds, which a
    network with outputs around 1 learns slowly. `is_scaled` divides them by the standard deviation of the targets.

    :param returns: Estimates advantages and targets from the rewards that remain.
    :param rate: Step size of the running estimates of average and standard deviation for each rollout, in (0, 1].
    :param is_scaled: Whether values are learned in standard deviations of the targets.
    """

    def __init__(self, returns: ReturnFunction, rate: float, is_scaled: bool = False) -> None:
        self.gamma = returns.gamma
        self.is_off_policy = returns.is_off_policy
        self.averages: list[float] = []
        """Average reward of an environment step, by separately predicted entry of the trajectories' rewards."""
        self.std = 0.0 if is_scaled else 1.0
        """Divisor of centred rewards; 0 before the first rollout."""
        self._returns = returns
        self._rate = rate
        self._is_scaled = is_scaled

    @override(ReturnFunction)
    def __call__(self, trajectories: Trajectories) -> Returns:
        if trajectories.acts is not None or bool(trajectories.terminated.any()):
            reason = "actors come and go" if trajectories.acts is not None else "an episode ended by itself"
            raise ConfigError(
                f"algorithm.reward_centering: expected a problem without an end, but {reason}: rewards above their "
                "average would make long episodes better or worse than they are. Leave it at 0, or have episodes cut "
                "off only (`max_episode_steps`)."
            )
        rewards = trajectories.rewards if trajectories.has_own_rewards else [torch.stack(trajectories.rewards).sum(0)]
        n_steps = rewards[0].numel() if trajectories.step_complete is None else int(trajectories.step_complete.sum())
        found = [float(reward.sum()) / max(1, n_steps) for reward in rewards]
        known = self.averages or found
        self.averages = [old + self._rate * (new - old) for old, new in zip(known, found, strict=True)]
        is_first = self.std == 0.0
        returns = self._returns(centred(trajectories, self.averages, self.std or 1.0))
        if self._is_scaled:
            targets = torch.cat([_of_decisions(target, trajectories) for target in returns.targets])
            std = (self.std or 1.0) * float(targets.std(correction=0))
            self.std += (1.0 if is_first else self._rate) * (std - self.std)
            if is_first and self.std:  # values are still to be learned, in this unit
                returns = self._returns(centred(trajectories, self.averages, self.std))
        if self.gamma == 1.0:
            returns.targets = [target - _of_decisions(target, trajectories).mean() for target in returns.targets]
        return returns

    def state_dict(self) -> dict[str, Any]:
        """Return the estimates."""
        return {"averages": list(self.averages), "std": self.std}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore estimates of :meth:`state_dict`."""
        self.averages, self.std = list(state_dict["averages"]), float(state_dict.get("std", 1.0))


def _of_decisions(target: Tensor, trajectories: Trajectories) -> Tensor:
    """Return targets of decisions `[n]`, without entries of environments whose autoreset is pending."""
    places = [place for place in trajectories.places if place is not None]
    return torch.cat([target[place] for place in places]) if places else target.flatten()


def centred(trajectories: Trajectories, averages: Sequence[float], std: float = 1.0) -> Trajectories:
    """Return the trajectories with rewards above their average: it is subtracted where an environment step is complete.

    :param trajectories: The trajectories of a rollout.
    :param averages: Average reward of an environment step, for each separately predicted entry of the rewards.
    :param std: Divisor of the centred rewards.
    """
    complete = 1.0 if trajectories.step_complete is None else trajectories.step_complete.to(trajectories.rewards[0])
    if trajectories.has_own_rewards:
        pairs = zip(trajectories.rewards, averages, strict=True)
        rewards = [reward - average * complete for reward, average in pairs]
    else:  # the values predict the sum over all sub-steps
        rewards = [*trajectories.rewards[:-1], trajectories.rewards[-1] - averages[0] * complete]
    return replace(trajectories, rewards=rewards if std == 1.0 else [reward / std for reward in rewards])
