"""Actions that are repeated for several steps."""

from __future__ import annotations

from typing import Any

from maze.core.annotations import override
from maze.core.env.time_env_mixin import TimeEnvMixin
from maze.core.errors import ConfigValueError
from maze.core.wrappers.wrapper import Wrapper

_MODES = ("sticky", "noop")


class StepSkipWrapper(Wrapper[Any]):
    """Repeat the action of the agent for several environment steps; its reward is the sum over these steps.

    In the skipped steps all actors repeat their actions, or do nothing. Skipping ends with the episode, and at the turn
    of an actor that did not act in the agent's step. Skipped steps count for the environment time.

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

    CLONED = ("_actions",)

    def __init__(self, env: Any, n_steps: int, skip_mode: str = "sticky") -> None:
        if type(n_steps) is not int or n_steps < 1 or skip_mode not in _MODES:
            raise ConfigValueError(
                "StepSkipWrapper: expected a whole number `n_steps` above 0 and a `skip_mode` among "
                f"{', '.join(_MODES)}, found n_steps={n_steps!r}, skip_mode={skip_mode!r}."
            )
        super().__init__(env)
        self.n_steps = n_steps
        self.skip_mode = skip_mode
        self._actions: dict[Any, Any] = {}
        """Actions of the actors in the agent's environment step."""

    @override(Wrapper)
    def step(self, action: Any) -> Any:
        env = self.env
        knows_time = isinstance(env, TimeEnvMixin)
        time = env.get_env_time() if knows_time else 0
        self._actions = {**self._actions, env.actor_id(): action}
        observation, reward, done, info = self._env_step(action)
        if not done and knows_time and env.get_env_time() == time:
            return observation, reward, done, info  # the agent's step is not complete
        for _ in range(self.n_steps - 1):
            is_same_step = True
            while is_same_step and not done and (actor := env.actor_id()) in self._actions:
                time = env.get_env_time() if knows_time else 0
                repeated = self._actions[actor]
                if self.skip_mode == "noop":
                    repeated = env.action_conversion_dict[actor.step_key].noop_action()
                observation, own_reward, done, info = self._env_step(repeated)
                reward += own_reward
                is_same_step = knows_time and env.get_env_time() == time
            if is_same_step or done:
                break
        self._actions = {}
        return observation, reward, done, info

    @override(Wrapper)
    def reset(self, **kwargs: Any) -> Any:
        self._actions = {}
        return self._env_reset(**kwargs)
