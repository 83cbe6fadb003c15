"""A helpful error where a Maze environment is given to stable-baselines3 as it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from maze.core.errors import ConfigError

_NAME = "_patch_env"
_PACKAGE = "stable_baselines3"


def explain_maze_environments() -> None:
    """Has stable-baselines3 name the export of a Maze environment, instead of asking for old gym to be installed.

    Replaces the function that stable-baselines3 accepts environments with by one that refuses Maze environments and
    otherwise calls it. Does nothing where that function is not loaded, or was replaced already.
    """
    module = sys.modules.get(f"{_PACKAGE}.common.vec_env.patch_gym")
    original = getattr(module, _NAME, None)
    if original is None or hasattr(original, "__wrapped__"):
        return
    explained = _explained(original)
    for name, loaded in list(sys.modules.items()):
        if name.startswith(f"{_PACKAGE}.") and vars(loaded).get(_NAME) is original:
            setattr(loaded, _NAME, explained)


def _explained(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(original)
    def patch_env(env: Any) -> Any:
        from maze.core.env.maze_env import MazeEnv

        if isinstance(env, MazeEnv):
            raise ConfigError(
                f"stable-baselines3 takes gymnasium environments, and {env!r} is a Maze environment. Export it:\n"
                f"    from maze.interop import to_gymnasium\n"
                f"    env = to_gymnasium(env)\n"
                f"For a single observation and action without dictionaries, wrap it with NoDictSpacesWrapper first."
            )
        return original(env)

    return patch_env
