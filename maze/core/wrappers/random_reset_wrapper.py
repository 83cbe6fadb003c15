"""Environment steps that the agent does not decide on: random ones at the beginning of episodes, repeated actions."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.action_conversion import drawn_value, masks_of_heads
from maze.core.env.simulated_env_mixin import Future
from maze.core.env.structured_env import ACTORS_DONE_KEY
from maze.core.env.time_env_mixin import TimeEnvMixin
from maze.core.errors import ConfigValueError
from maze.core.utils.config_utils import whole_number
from maze.core.wrappers.wrapper import Wrapper

_MODES = ("sticky", "noop")


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


class StepSkipWrapper(Wrapper[Any]):
    """Repeat the action of the agent for several environment steps; its reward is the sum over these steps.

    In the skipped steps all actors repeat their actions, or do nothing. Skipping ends with the episode, and at the turn
    of an actor that did not act in the agent's step. Skipped steps count for the environment time. Per-actor rewards of
    a repeated action belong to the decision that is repeated.

    >>> from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
    >>> env = StepSkipWrapper.wrap(GymMazeEnv("CartPole-v1"), n_steps=3)
    >>> env.seed(1)
    >>> _ = env.reset()
    >>> env.step({"action": 0})[1], env.get_env_time()
    (3.0, 3)

    :param env: The environment to wrap.
    :param n_steps: Environment steps per action of the agent, at least 1.
    :param skip_mode: `sticky` repeats the actions, `noop` takes the `noop_action` of the action conversion.
    :raises ConfigError: An argument is out of its range.
    """

    keeps_observations_and_actions = True

    CLONED = ("_actions", "_decisions", "_earned", "_left", "_n_decisions", "_is_step_over")

    def __init__(self, env: Any, n_steps: int, skip_mode: str = "sticky") -> None:
        self.n_steps = whole_number("StepSkipWrapper.n_steps", n_steps, at_least=1)
        if skip_mode not in _MODES:
            raise ConfigValueError(f"StepSkipWrapper.skip_mode: expected one of {_MODES}, found {skip_mode!r}.")
        super().__init__(env)
        self.skip_mode = skip_mode
        self._begin_episode()

    def _begin_episode(self) -> None:
        # Decisions (numbers) and actions of the actors in the agent's environment step.
        self._actions: dict[Any, tuple[int, Any]] = {}
        # The decision that each sub-step of the environment follows from.
        self._decisions: list[int] = []
        # Per-actor rewards by decision since the agent's last complete step.
        self._earned: dict[int, float] = {}
        # Last decisions of actors that left in the agent's sub-step.
        self._left: set[int] = set()
        self._n_decisions = 0
        self._is_step_over = True

    @override(Wrapper)
    def step(self, action: Any) -> Any:
        env = self.env
        if self._is_step_over:
            self._earned = {}
        self._left = set()
        self._actions = {**self._actions, env.actor_id(): (self._n_decisions, action)}
        self._n_decisions += 1
        observation, reward, done, info = self._take(action, self._n_decisions - 1)
        if not done and not self._is_step_over:
            return observation, reward, done, self._with_left(info)  # the agent's step is not complete
        for _ in range(self.n_steps - 1):
            self._is_step_over = done
            while not self._is_step_over and (actor := env.actor_id()) in self._actions:
                decision, repeated = self._actions[actor]
                if self.skip_mode == "noop":
                    repeated = env.action_conversion_dict[actor.step_key].noop_action()
                observation, own_reward, done, info = self._take(repeated, decision)
                reward += own_reward
            if done or not self._is_step_over:
                break
        self._actions = {}
        return observation, reward, done, self._with_left(info)

    def _take(self, action: Any, decision: int) -> Any:
        """Take a sub-step of the environment.

        :param action: The action.
        :param decision: The decision that it follows from.
        """
        env: Any = self.env
        knows_time = isinstance(env, TimeEnvMixin)
        time = env.get_env_time() if knows_time else 0
        result = self._env_step(action)
        _, _, done, info = result
        self._decisions.append(decision)
        self._is_step_over = done or not knows_time or env.get_env_time() != time
        get_rewards = getattr(env, "get_actor_rewards", None)
        if self._is_step_over and get_rewards is not None and (rewards := get_rewards()) is not None:
            for earlier, earned in zip(reversed(self._decisions), reversed(rewards), strict=False):
                self._earned[earlier] = self._earned.get(earlier, 0.0) + float(earned)
        if getattr(env, "is_actor_done", bool)():
            self._left.add(decision)
        for n_ago in (info or {}).get(ACTORS_DONE_KEY, ()):
            if n_ago < len(self._decisions):
                self._left.add(self._decisions[-1 - n_ago])
        return result

    def _with_left(self, info: dict[Any, Any]) -> dict[Any, Any]:
        """Return the info with the actors that left in all sub-steps of the environment."""
        if not self._left:
            return info
        return {**(info or {}), ACTORS_DONE_KEY: sorted(self._n_decisions - 1 - decision for decision in self._left)}

    def is_actor_done(self) -> bool:
        """Return whether the actor of the agent's last decision left, in any of its steps."""
        return self._n_decisions - 1 in self._left

    def get_actor_rewards(self) -> np.ndarray | None:
        """Return the rewards of the agent's decisions in its last step, `[n_actors]`; `None`: there are none."""
        if not self._earned:
            return None
        return np.array([self._earned.get(number, 0.0) for number in range(min(self._earned), self._n_decisions)])

    @override(Wrapper)
    def reset(self, **kwargs: Any) -> Any:
        self._begin_episode()
        return self._env_reset(**kwargs)
