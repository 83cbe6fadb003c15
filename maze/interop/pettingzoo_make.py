"""PettingZoo environments by name, and copies of them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import gymnasium

from maze.core.errors import ConfigError, ConfigImportError, did_you_mean
from maze.core.utils.targets import locate, named_module

_MPE = "mpe2"
"""Particle environments, which PettingZoo has given to a package of their own, and which are in no registry."""


def make_aec_env(name: str, **kwargs: Any) -> Any:
    """Makes a PettingZoo environment as an AEC environment.

    :param name: See :func:`make_pettingzoo_env`.
    :param kwargs: Its arguments.
    :raises ConfigError: There is no such environment, a package is missing, or an argument is not taken.
    """
    where = f"env.name={name}"
    require_pettingzoo(where)
    make = _named(name, where)
    try:
        return as_aec(make(**kwargs))
    except TypeError as error:
        if not kwargs or "argument" not in str(error):
            raise
        raise ConfigError(f"{where}: the environment does not take the arguments {sorted(kwargs)}: {error}") from error
    except Exception as error:
        if not isinstance(error, ImportError | gymnasium.error.DependencyNotInstalled) and not isinstance(
            error.__cause__, ImportError
        ):
            raise
        raise ConfigImportError(f"{where} needs a package that is not installed: {error}") from error


def as_aec(env: Any) -> Any:
    """A PettingZoo environment as an AEC environment, in which one agent acts at a time.

    :param env: AEC or parallel.
    :raises ConfigError: It is none.
    """
    require_pettingzoo("env")
    from pettingzoo import AECEnv, ParallelEnv
    from pettingzoo.utils.conversions import parallel_to_aec

    if isinstance(env, ParallelEnv):
        return parallel_to_aec(env)
    if isinstance(env, AECEnv):
        return env
    raise ConfigError(f"env: expected an AEC or parallel environment of PettingZoo, got {env!r}.")


def require_pettingzoo(where: str) -> None:
    """Raises a :class:`ConfigError` that names the extra where PettingZoo is not installed."""
    if importlib.util.find_spec("pettingzoo") is None:
        raise ConfigImportError(f'{where}: PettingZoo is not installed: pip install "maze-rl[pettingzoo]".')


def _named(name: str, where: str) -> Callable[..., Any]:
    """The function that makes an environment."""
    module, colon, function = name.partition(":")
    if colon:
        found: Callable[..., Any] = locate(f"{module}.{function}", where)
        return found
    if "." in name:
        return _maker_in(name, where)
    short = name.rpartition("/")[2]
    if name in (short, f"{_MPE}/{short}") and short in _modules_of(_MPE):
        return _maker_in(f"{_MPE}.{short}", where)
    import pettingzoo

    registered = {id.replace("-v", "_v"): id for id in pettingzoo.aec_registry}
    wanted = name.replace("-v", "_v")
    if (
        id := next((registered[key] for key in registered if wanted in (key, key.rpartition("/")[2])), None)
    ) is not None:
        return functools.partial(pettingzoo.make, "aec", id)
    known = [*registered, *(f"{_MPE}/{each}" for each in _modules_of(_MPE))]
    missing = "" if _modules_of(_MPE) else f' {_MPE} is not installed: pip install "maze-rl[pettingzoo]".'
    raise ConfigError(
        f"{where}: PettingZoo has no such environment.{did_you_mean(wanted, known)}{missing} Names are those of its "
        f"own, such as classic/tictactoe_v3, those of {_MPE}, such as {_MPE}/simple_spread_v3, or paths of others' "
        "modules and functions, such as my_package.my_env_v0, my_package.envs:make or, in a file my_env.py, "
        "my_env:parallel_env."
    )


def _maker_in(module_name: str, where: str) -> Callable[..., Any]:
    module = named_module(module_name, where)
    for maker in ("env", "parallel_env"):
        if callable(made := getattr(module, maker, None)):
            return made  # type: ignore[no-any-return]  # of a package without annotations
    raise ConfigError(
        f"{where}: `{module_name}` has neither a function `env` nor `parallel_env`. Name the function that makes the "
        f"environment, {module_name}:<function>."
    )


def _modules_of(package: str) -> list[str]:
    """The environments of a package, one module each; empty where it is not installed."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [module.name for module in pkgutil.iter_modules(places) if re.search(r"_v\d+$", module.name)]


class _WholePickler(cloudpickle.Pickler):  # type: ignore[misc]  # a package without annotations
    """Pickles environments as they stand; an `EzPickle` would otherwise be made anew, by its arguments."""

    def reducer_override(self, obj: Any) -> Any:
        """How an object is made again."""
        kind = type(obj)
        if any(base.__name__ == "EzPickle" for base in kind.__mro__):
            return object.__new__, (kind,), vars(obj), None, None, _filled
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name == "pygame.surface.Surface":
            pygame = importlib.import_module("pygame")
            return pygame.image.frombytes, (pygame.image.tobytes(obj, "RGBA"), obj.get_size(), "RGBA")
        if name == "pygame.freetype.Font":
            return kind, (obj.path, obj.size)
        return super().reducer_override(obj)


def _filled(made: Any, state: Mapping[str, Any]) -> None:
    vars(made).update(state)


def whole(env: Any) -> bytes:
    """An environment as a pickle, in the middle of its episode."""
    buffer = io.BytesIO()
    _WholePickler(buffer).dump(env)
    return buffer.getvalue()
