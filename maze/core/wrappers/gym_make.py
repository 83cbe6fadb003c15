"""Creation of gymnasium environments."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from importlib import metadata
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator, parse_env_id, registry

from maze.core.errors import ConfigError, did_you_mean
from maze.core.utils.targets import is_module_name, locate, named_module
from maze.core.wrappers.gym_adapters import in_current_api, takes_seed

_GYMNASIUM = re.compile(r"gym(nasium)?\b")


def make_gymnasium_env(name: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """Make the registered environment `name`; for a retired version the current one, with a warning.

    :param name: Id such as `CartPole-v1`, or `module:id` for one that a module registers when it is imported.
    :param kwargs: Passed to `gymnasium.make`, `render_mode` for instance.
    :raises ConfigError: There is no such environment, a package is missing, or it does not take the arguments.
    """
    module, colon, rest = name.partition(":")
    try:
        if (colon and not is_module_name(module)) or ":" in rest:
            raise gymnasium.error.UnregisteredEnv("expected an id, or <module>:<id>.")
        if not colon and newest_version(name) is None and name not in registry:
            _register_from_installed_packages(name)
        if (current := _successor(name)) is not None:
            warnings.warn(f"Environment `{name}` is retired; `{current}` is used instead.", UserWarning, stacklevel=3)
            name = current
        env = gymnasium.make(name, **kwargs)
        if env.spec is None or takes_seed(env.unwrapped):
            return env
        env.close()
        spec = copy(env.spec)
        # applied by the entry point, because the wrappers that `gymnasium.make` adds require the current API
        spec.entry_point = functools.partial(_made_in_current_api, spec.entry_point)
        return gymnasium.make(spec)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        others = [other for other in registry if other != name]
        raise ConfigError(
            f"Environment `{name}` cannot be made: {error}{did_you_mean(name, others)} If another package provides it, "
            f"install that package, and name the module that registers it: env.import=[<module>] or "
            f"env.name=<module>:{rest or name}. Environments of PettingZoo: env=pettingzoo env.name={name}."
        ) from error
    except TypeError as error:
        if "gymnasium.Env" in str(error):  # the entry point returns something else
            raise ConfigError(
                f"Environment `{name}` is not registered in gymnasium. Environments of the older package `gym` need "
                "gymnasium's "
                "compatibility package shimmy."
            ) from error
        if not kwargs or "argument" not in str(error):
            raise
        raise ConfigError(f"Environment `{name}` does not take the arguments {sorted(kwargs)}: {error}") from error


def import_modules(names: str | Sequence[str]) -> None:
    """Import modules that register environments.

    :param names: Dotted names, or a single one.
    :raises ConfigError: A module cannot be imported.
    """
    for name in [names] if isinstance(names, str) else names:
        module = named_module(name, "env.import")
        if hasattr(module, "register_envs"):  # required by some packages
            gymnasium.register_envs(module)


def gym_wrapped(env: gymnasium.Env[Any, Any], wrappers: Sequence[str | Mapping[str, Any]]) -> gymnasium.Env[Any, Any]:
    """Apply wrappers for gymnasium environments, the first one innermost.

    :param env: The environment.
    :param wrappers: For each the path of a class or function, a name in `gymnasium.wrappers`, or one of both mapped
        to its arguments, of which lists are given as tuples.
    :raises ConfigError: An entry is not a wrapper with its arguments, or cannot wrap the environment.
    """
    for index, entry in enumerate(wrappers):
        where = f"env.gym_wrappers[{index}]"
        if isinstance(entry, Mapping) and len(entry) != 1:
            raise ConfigError(f"{where}: expected one wrapper mapped to its arguments, found {dict(entry)!r}.")
        path, arguments = next(iter(entry.items())) if isinstance(entry, Mapping) else (entry, None)
        wrapper = locate(path if "." in path else f"gymnasium.wrappers.{path}", where)
        try:
            # configurations have lists, and shapes have to be tuples
            given = {
                key: tuple(value) if isinstance(value, list) else value for key, value in (arguments or {}).items()
            }
            env = wrapper(env, **given)
        except Exception as error:
            raise ConfigError(f"{where}: {path} cannot wrap {env}: {error}") from error
    return env


def newest_version(name: str) -> str | None:
    """Return the id of the newest registered version of an environment; None if there is none with a version."""
    namespace, base, _ = parse_env_id(name)
    versions = [
        (spec.version, spec.id)
        for spec in registry.values()
        if spec.namespace == namespace and spec.name == base and spec.version is not None
    ]
    return max(versions)[1] if versions else None


def _register_from_installed_packages(name: str) -> None:
    """Import installed packages that depend on gymnasium until one of them registers the environment."""
    for package, distributions in metadata.packages_distributions().items():
        requirements = [each for distribution in distributions for each in metadata.requires(distribution) or ()]
        if package in sys.modules or not any(_GYMNASIUM.match(requirement.lower()) for requirement in requirements):
            continue
        with contextlib.suppress(Exception):
            importlib.import_module(package)
        if name in registry or newest_version(name) is not None:
            return


def _made_in_current_api(entry_point: Any, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    creator: Callable[..., Any] = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    env: gymnasium.Env[Any, Any] = in_current_api(creator(**kwargs))
    return env


def _successor(name: str) -> str | None:
    """Return the newest version of an environment whose named version is retired; `None`: it is not retired.

    Checked beforehand, because gymnasium warns before it raises.
    """
    try:
        version = parse_env_id(name)[2]
        newest = newest_version(name)
    except gymnasium.error.Error:
        return None  # no id; reported by `make`
    if name in registry or version is None or newest is None:
        return None
    return newest if version < (parse_env_id(newest)[2] or 0) else None
