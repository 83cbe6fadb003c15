"""Creation of gymnasium environments."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from difflib import SequenceMatcher
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator, parse_env_id, registry

from maze.core.errors import ConfigError, did_you_mean
from maze.core.utils.targets import is_module_name, locate, named_module
from maze.core.wrappers.gym_adapters import in_current_api, takes_seed


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
        return gymnasium.make(_spec_in_current_api(env.spec))
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
                f"Environment `{name}` is none of gymnasium. Environments of the older package `gym` need gymnasium's "
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
    :raises ConfigError: An entry is no wrapper with its arguments, or cannot wrap the environment.
    """
    for index, entry in enumerate(wrappers):
        where = f"env.gym_wrappers[{index}]"
        if isinstance(entry, Mapping) and len(entry) != 1:
            raise ConfigError(f"{where}: expected one wrapper mapped to its arguments, got {dict(entry)!r}.")
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
    """Import installed packages that register environments, those with similar names first, until the id is known."""
    modules = [module for module in _registering_modules() if module not in sys.modules]
    for module in sorted(modules, key=lambda module: -SequenceMatcher(None, module, name.lower()).ratio()):
        # errors, output and warnings of packages that do not register the id are irrelevant
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(Exception))
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            importlib.import_module(module)
        if name in registry or newest_version(name) is not None:
            return


def _registering_modules() -> list[str]:
    """Return packages that depend on gymnasium and register environments in their `__init__`."""
    from importlib import metadata, util

    modules: list[str] = []
    for distribution in metadata.distributions():
        if not any(re.match(r"gym(nasium)?\b", requirement.lower()) for requirement in distribution.requires or ()):
            continue
        for file in distribution.files or ():
            packages = file.parts[:-1]
            if file.name != "__init__.py" or len(packages) not in (1, 2, 3) or not packages[0].isidentifier():
                continue
            if util.find_spec(packages[0]) is None:
                continue
            text = file.read_text(encoding="utf-8")
            if "register" in text if len(packages) == 1 else "register(" in text and "gym" in text:
                modules.append(".".join(packages))
    return list(dict.fromkeys(modules))


def _spec_in_current_api(spec: EnvSpec) -> EnvSpec:
    """Return the specification with an entry point whose environments have gymnasium's current API.

    Applied by the entry point, because the wrappers that `gymnasium.make` adds require it.
    """
    spec = copy(spec)
    spec.entry_point = functools.partial(_made_in_current_api, spec.entry_point)
    return spec


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
