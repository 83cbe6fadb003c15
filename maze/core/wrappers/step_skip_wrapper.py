"""Actions that are repeated for several steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.env.structured_env import ACTORS_DONE_KEY
from maze.core.env.time_env_mixin import TimeEnvMixin
from maze.core.errors import ConfigValueError
from maze.core.wrappers.wrapper import Wrapper

_MODES = ("sticky", "noop")


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
        if type(n_steps) is not int or n_steps < 1 or skip_mode not in _MODES:
            raise ConfigValueError(
                "StepSkipWrapper: expected a whole number `n_steps` above 0 and a `skip_mode` among "
                f"{', '.join(_MODES)}, found n_steps={n_steps!r}, skip_mode={skip_mode!r}."
            )
        super().__init__(env)
        self.n_steps = n_steps
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
