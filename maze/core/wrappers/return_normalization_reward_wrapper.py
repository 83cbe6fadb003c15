"""Normalization of rewards by the standard deviation of returns; running statistics of wrappers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.errors import CheckpointError
from maze.core.utils.config_utils import number
from maze.core.wrappers.wrapper import RewardWrapper, Wrapper


def wrappers_with_statistics(env: Any) -> Iterator[ReturnNormalizationRewardWrapper]:
    """Yield the wrappers of an environment that have running statistics, outermost first."""
    while issubclass(type(env), Wrapper):
        if issubclass(type(env), ReturnNormalizationRewardWrapper):
            yield env
        env = env.env


def freeze_statistics(env: Any) -> None:
    """Freeze the running statistics of all wrappers of an environment."""
    for wrapper in wrappers_with_statistics(env):
        wrapper.freeze_statistics()


def statistics_states(env: Any) -> list[dict[str, float]]:
    """Return the running statistics of the wrappers of an environment, outermost first."""
    return [wrapper.statistics_state() for wrapper in wrappers_with_statistics(env)]


def load_statistics_states(env: Any, states: list[dict[str, float]]) -> None:
    """Restore the result of :func:`statistics_states`.

    :param env: Environment wrapped in the same way.
    :param states: The states.
    :raises CheckpointError: The environment has other wrappers with statistics.
    """
    wrappers = list(wrappers_with_statistics(env))
    if len(wrappers) != len(states):
        raise CheckpointError(
            f"The checkpoint has statistics of {len(states)} wrappers, the environment of {len(wrappers)}."
        )
    for wrapper, state in zip(wrappers, states, strict=True):
        wrapper.load_statistics_state(state)


class FrozenEnvFactory:
    """Picklable factory of environments for evaluation, with frozen running statistics.

    :param env_factory: Makes an environment.
    """

    def __init__(self, env_factory: Callable[[], Any]) -> None:
        self.env_factory = env_factory

    def __call__(self) -> Any:
        env = self.env_factory()
        freeze_statistics(env)
        return env


class ReturnNormalizationRewardWrapper(RewardWrapper[MazeEnv[Any]]):
    """Divide rewards by the standard deviation of the discounted returns of all steps so far.

    The return starts at zero in each episode; the standard deviation is that of all episodes. While the statistics are
    frozen, as in evaluation, they are applied and not updated; without statistics, rewards are passed on unchanged.
    Discounting is per environment step, sub-steps belong to the same time.

    :param env: The environment to wrap.
    :param gamma: Discounting factor of the return.
    :param epsilon: Added to the variance, against division by zero.
    :raises ConfigError: `gamma` is outside [0, 1], or `epsilon` negative.
    """

    CLONED = (*RewardWrapper.CLONED, "_count", "_mean", "_squares", "_return", "is_frozen")

    def __init__(self, env: MazeEnv[Any], gamma: float, epsilon: float) -> None:
        self.gamma = number("ReturnNormalizationRewardWrapper.gamma", gamma, 0.0, 1.0)
        self.epsilon = number("ReturnNormalizationRewardWrapper.epsilon", epsilon, 0.0)
        self.is_frozen = False
        self._return = 0.0
        # Number, mean and sum of squared deviations of the returns (Welford 1962).
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0
        super().__init__(env)

    @property
    def std(self) -> float:
        """Standard deviation of the returns; 1 before there are two of them."""
        if self._count < 2:
            return 1.0
        return math.sqrt(self._squares / self._count + self.epsilon) or 1.0

    @override(RewardWrapper)
    def reset(self, *args: Any, **kwargs: Any) -> Any:
        self._return = 0.0
        return super().reset(*args, **kwargs)

    @override(RewardWrapper)
    def step(self, action: Any) -> Any:
        observation, reward, done, info = super().step(action)
        if done:
            self._return = 0.0
        return observation, reward, done, info

    @override(RewardWrapper)
    def get_actor_rewards(self) -> np.ndarray | None:
        # Not in proportion to the step's reward: the shares of a zero-sum game add up to zero.
        shares = self.env.get_actor_rewards()
        return None if shares is None else np.asarray(shares) / self.std

    @override(RewardWrapper)
    def reward(self, reward: float) -> float:
        if not self.is_frozen and math.isfinite(reward):  # others are reported by the trainer
            self._return += reward
            if self._context.is_step_complete:
                self._count += 1
                shift = self._return - self._mean
                self._mean += shift / self._count
                self._squares += shift * (self._return - self._mean)
                self._return *= self.gamma
        return reward / self.std

    def freeze_statistics(self) -> None:
        """Stop updating the statistics, for evaluation and rollouts; they are still applied."""
        self.is_frozen = True

    def statistics_state(self) -> dict[str, float]:
        """Return the statistics, as plain numbers."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_statistics_state(self, state: Mapping[str, float]) -> None:
        """Restore a state of :meth:`statistics_state`.

        :param state: The statistics. The return of the running episode is no part of them.
        """
        self._count, self._mean, self._squares = int(state["count"]), state["mean"], state["squares"]
