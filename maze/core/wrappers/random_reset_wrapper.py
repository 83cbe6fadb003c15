"""Random steps at the beginning of episodes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.action_conversion import drawn_value, masks_of_heads
from maze.core.env.simulated_env_mixin import Future
from maze.core.env.time_env_mixin import TimeEnvMixin
from maze.core.utils.config_utils import whole_number
from maze.core.wrappers.wrapper import Wrapper


class RandomResetWrapper(Wrapper[Any]):
    """Take a random number of random environment steps at the beginning of each episode.

    Actions are sampled from those that masks among the observations allow.

    Skipped steps count for the environment time. If the episode ends meanwhile, skipping continues in the next one.

    :param env: The environment to wrap.
    :param min_skip_steps: Smallest number of steps to skip.
    :param max_skip_steps: Largest number of steps to skip.
    :raises ConfigError: The range is empty or negative, or not of whole numbers.
    """

    keeps_observations_and_actions = True

    def __init__(self, env: Any, min_skip_steps: int, max_skip_steps: int) -> None:
        self.min_skip_steps = whole_number("RandomResetWrapper.min_skip_steps", min_skip_steps, at_least=0)
        key = f"RandomResetWrapper.max_skip_steps (beside min_skip_steps={min_skip_steps})"
        self.max_skip_steps = whole_number(key, max_skip_steps, at_least=min_skip_steps)
        super().__init__(env)
        self._rng = np.random.RandomState()
        # Copies: samples drawn elsewhere from the environment's spaces do not influence the actions taken here.
        self._action_spaces = copy.deepcopy(dict(env.action_spaces_dict))

    def seed(self, seed: int) -> None:
        """Seed the environment and the random steps.

        :param seed: From 0 to 2**32 - 1; `None`: random, if the environment accepts it.
        """
        self._rng = np.random.RandomState(seed)
        for space in self._action_spaces.values():
            space.seed(int(self._rng.randint(2**31 - 1)))
        self.env.seed(seed)

    @override(Wrapper)
    def reset(self) -> Any:
        observation = self._env_reset()
        get_time = self.env.get_env_time if isinstance(self.env, TimeEnvMixin) else None
        for _ in range(self._rng.randint(self.min_skip_steps, self.max_skip_steps + 1)):
            time_before = None if get_time is None else get_time()
            is_complete = done = False
            while not is_complete:
                observation, _, done, _ = self._env_step(self._sampled(observation))
                is_complete = done or get_time is None or get_time() != time_before
            if done:
                observation = self._env_reset()
        return observation

    def _sampled(self, observation: Any) -> Any:
        """Return a random action that the masks of an observation allow."""
        space = self._action_spaces[self.env.actor_id().step_key]
        action = space.sample()
        if isinstance(space, spaces.Dict) and isinstance(observation, Mapping):
            for head, mask in masks_of_heads(observation, space).items():
                action[head] = drawn_value(space[head], observation[mask], self._rng.randint)
        return action

    @override(Wrapper)
    def clone_from(self, env: RandomResetWrapper, future: Future = "same") -> None:
        super().clone_from(env, future)
        self._rng.set_state(env._rng.get_state())
        self._action_spaces = copy.deepcopy(env._action_spaces)
