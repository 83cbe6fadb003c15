"""Rewards on the scale of returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.utils.stats_utils import CumulativeMovingMeanStd

if TYPE_CHECKING:
    from maze.core.rollout.rollout_columns import RolloutColumns

_EPSILON = 1e-8
_LARGEST = 10.0
"""Scaled rewards are clipped to it."""


class RewardScaling:
    """Divides the rewards that a trainer learns from by the standard deviation of the discounted return so far, and
    clips them to [-10, 10] (Engstrom et al. 2020, Implementation matters in deep policy gradients, "reward scaling").

    That return is the discounted sum of the rewards up to a step, from the beginning of its episode on (`R <- gamma * R
    + r`), and the standard deviation is that of all steps of all environments. A rollout counts before its own rewards
    are scaled, all of them by the same number. Rewards in statistics, KPIs and evaluations stay what they are, because
    nothing but the rollout that is learned from is changed. A return goes on with the next rollout, in the environment
    at the same place; with IMPALA, and where a rollout does not wait for all environments, that may be another one.

    :param gamma: Discount for each environment step.
    """

    def __init__(self, gamma: float) -> None:
        self._gamma = gamma
        self._statistics = CumulativeMovingMeanStd(epsilon=0.0)
        self._returns = np.zeros(0)
        """`[n_envs]`: of the running episodes, already discounted for the step that comes."""

    @property
    def std(self) -> float:
        """What rewards are divided by; 1 where returns do not vary."""
        variance = float(self._statistics.var) if self._statistics.count else 0.0
        return float(np.sqrt(variance + _EPSILON)) if variance > 0.0 else 1.0

    def scale(self, columns: RolloutColumns) -> None:
        """Learns from the rewards of a rollout, and scales them in place.

        :param columns: The rollout; of rewards that are not finite nothing is learned.
        """
        rewards = columns.rewards
        if np.isfinite(rewards.sum()):
            self._statistics.update(self._discounted_returns(columns))
        for of_whom in (rewards, columns.actor_rewards):
            if of_whom is not None:
                np.multiply(of_whom, np.float32(1.0 / self.std), out=of_whom)
                np.clip(of_whom, -_LARGEST, _LARGEST, out=of_whom)

    def _discounted_returns(self, columns: RolloutColumns) -> np.ndarray:
        """The return up to each environment step that was completed, `[n_steps]` of all environments."""
        rewards, complete = columns.rewards.astype(np.float64), columns.step_complete
        discounts = np.where(complete, self._gamma, 1.0)
        discounts[columns.terminated | columns.truncated] = 0.0
        if len(self._returns) != columns.n_envs:
            self._returns = np.zeros(columns.n_envs)
        current = self._returns
        for tick in range(columns.n_ticks):
            rewards[tick] += current
            current = rewards[tick] * discounts[tick]
        self._returns = current
        returns: np.ndarray = rewards[complete]
        return returns

    def state_dict(self) -> dict[str, Any]:
        """The statistics, and the returns of the running episodes."""
        known = self._statistics
        return {
            "count": float(known.count),
            "mean": float(known.mean),
            "var": float(known.var),
            "returns": self._returns.copy(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on with a state of :meth:`state_dict`."""
        known = self._statistics
        known.count, known.mean, known.var = (state_dict[name] for name in ("count", "mean", "var"))
        self._returns = np.array(state_dict["returns"], np.float64)
