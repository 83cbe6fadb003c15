"""Makes gymnasium environments, with errors and warnings that say what to do."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
from gymnasium.envs.registration import parse_env_id, registry

from maze.core.errors import ConfigError, did_you_mean


def make_gymnasium_env(name: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """Makes the registered environment ``name``; a retired version gives the current one and a warning.

    :param name: Id such as ``CartPole-v1``, or ``module:id`` for one that a module registers when it is imported.
    :param kwargs: Passed to ``gymnasium.make``, ``render_mode`` for instance.
    """
    current = _successor(name)
    if current is not None:
        warnings.warn(f"Environment `{name}` is retired; `{current}` is used instead.", UserWarning, stacklevel=3)
        name = current
    try:
        return gymnasium.make(name, **kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        hint = ' Or: pip install "maze-rl[box2d]"' if "box2d" in str(error).lower() else ""
        raise ConfigError(f"Environment `{name}` needs a package that is not installed: {error}{hint}") from error
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ConfigError(f"Environment `{name}` cannot be made: {error}{did_you_mean(name, registry)}") from error
    except TypeError as error:
        if not kwargs or "argument" not in str(error):
            raise
        raise ConfigError(f"Environment `{name}` does not take the arguments {sorted(kwargs)}: {error}") from error


def newest_version(name: str) -> str | None:
    """The id of the newest registered version of an environment; None if there is none with a version."""
    namespace, base, _ = parse_env_id(name)
    versions = [
        (spec.version, spec.id)
        for spec in registry.values()
        if spec.namespace == namespace and spec.name == base and spec.version is not None
    ]
    return max(versions)[1] if versions else None


def _successor(name: str) -> str | None:
    """The newest version of an environment of which the named version is gone; None where nothing is retired.

    Asked beforehand, because gymnasium warns on its own before it raises.
    """
    try:
        version = parse_env_id(name)[2]
        newest = newest_version(name)
    except gymnasium.error.Error:
        return None  # not an id; `make` says so
    if name in registry or version is None or newest is None:
        return None
    return newest if version < (parse_env_id(newest)[2] or 0) else None
