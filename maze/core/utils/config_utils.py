"""Reading of configurations, and environments from configurations."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from maze.core.env.structured_env import StructuredEnv
from maze.core.errors import ConfigError, ConfigValueError, did_you_mean
from maze.core.utils.factory import TARGET_KEY, CollectionOfConfigType, ConfigType, Factory, plain_container
from maze.core.utils.import_guard import current_guard, imports_guarded
from maze.core.utils.targets import is_file_name, locate

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from maze.core.env.maze_env import MazeEnv

_GYM_ENV = "maze.core.wrappers.maze_gym_env_wrapper.make_gym_maze_env"
"""Target of the default configuration of environments."""
_PETTINGZOO = "maze.interop.pettingzoo_env"
"""Module of a higher layer, which is only named here."""
_PETTINGZOO_NAME = re.compile(r"\w+/\w+_v\d+")
_USUAL_CONFIG_NAMES = ("config", "conf", "conf_rollout", "conf_train")


def read_config(path: Path | str) -> dict[Any, Any]:
    """Read a YAML file with resolved interpolations.

    :param path: The file.
    :raises ConfigError: There is no such file, or it holds no mapping in YAML.
    """
    from omegaconf import OmegaConf

    try:
        config: Any = plain_container(OmegaConf.load(path), str(path))
    except FileNotFoundError as error:
        raise ConfigError(f"There is no configuration file `{path}`.") from error
    except Exception as error:
        if isinstance(error, ConfigError) or type(error).__module__.split(".")[0] not in ("yaml", "omegaconf"):
            raise
        raise ConfigError(f"`{path}` is not valid YAML file: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"`{path}` must contain a mapping, but contains a {type(config).__name__}.")
    return config


def whole_number(key: str, value: Any, at_least: int) -> int:
    """Check a whole number of a configuration.

    :param key: Its key.
    :param value: The number.
    :param at_least: Smallest value allowed.
    :raises ConfigError: It is not a whole number, or too small.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigValueError(f"{key}: expected a whole number of at least {at_least}, found {value!r}.")
    return value


def positive_number(key: str, value: Any) -> float:
    """Check a positive number of a configuration.

    :param key: Its key.
    :param value: The number.
    :raises ConfigError: It is not a number, or not above 0 and finite.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value < math.inf:
        raise ConfigValueError(f"{key}: expected a number above 0, found {value!r}.")
    return value


_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(rf"\s*(\d+\.?\d*)\s*({'|'.join(_SECONDS)})\s*")


def duration(key: str, value: Any) -> float:
    """Return a duration of a configuration in seconds.

    :param key: Its key.
    :param value: Seconds, or a text with a unit, such as `50ms`, `2s`, `10min` or `1h`.
    :raises ConfigError: It is neither, or not above 0.
    """
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is not None and float(match[1]) > 0:
        return float(match[1]) * _SECONDS[match[2]]
    if isinstance(value, str):
        raise ConfigValueError(f"{key}: expected seconds, or a time such as 50ms, 2s, 10min or 1h, found {value!r}.")
    return positive_number(key, value)


CheckedConfigType = TypeVar("CheckedConfigType", bound="CheckedConfig")


@dataclasses.dataclass
class CheckedConfig:
    """Base of dataclasses that are built from a section of a configuration; errors name the key of a field."""

    section: ClassVar[str] = ""
    """Key of the section."""

    @classmethod
    def from_config(cls: type[CheckedConfigType], config: CheckedConfigType | Mapping[str, Any]) -> CheckedConfigType:
        """Return the configuration itself, or build one from a mapping such as a section of a composed config.

        :param config: Field names and values; missing fields keep their defaults.
        :raises ConfigError: It is not a mapping, or has an unknown field.
        """
        if isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"{cls.section}: expected a {cls.__name__} or a mapping of its fields, found {type(config).__name__}."
            )
        values = {str(key): value for key, value in config.items() if key != TARGET_KEY}
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                hint = did_you_mean(key, known, f"{cls.section}.{{}}") or f" Known fields: {', '.join(known)}."
                raise ConfigError(f"{cls.section}.{key}: {cls.__name__} has no such field.{hint}")
        return cls(**values)

    def require_integer(self, *names: str, minimum: int) -> None:
        """Raise a `ConfigError` unless the fields are integers of at least `minimum`."""
        for name in names:
            whole_number(f"{self.section}.{name}", getattr(self, name), minimum)

    def require_number(
        self, name: str, minimum: float, maximum: float = math.inf, *, above: bool = False, below: bool = False
    ) -> None:
        """Raise a `ConfigError` unless the field is a finite number in the given range.

        :param name: Name of the field.
        :param minimum: Smallest number allowed.
        :param maximum: Largest number allowed.
        :param above: Whether `minimum` itself is excluded.
        :param below: Whether `maximum` itself is excluded.
        """
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if is_number:
            is_number = (value > minimum if above else value >= minimum) and (
                value < maximum if below else value <= maximum
            )
        if not is_number:
            lower = f"{'above' if above else 'of at least'} {minimum:g}"
            upper = "" if maximum == math.inf else f" and {'below' if below else 'at most'} {maximum:g}"
            raise ConfigValueError(f"{self.section}.{name}: expected a number {lower}{upper}, found {value!r}.")

    def require_choice(self, name: str, choices: Collection[Any]) -> None:
        """Raise a `ConfigError` unless the field is one of `choices`."""
        value = getattr(self, name)
        if value not in choices:
            known = ", ".join(map(str, choices))
            raise ConfigValueError(f"{self.section}.{name}: expected one of {known}, found {value!r}.")


def list_to_dict(list_or_dict: list[Any] | Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Convert a list to a mapping from indices; mappings are returned unchanged."""
    if isinstance(list_or_dict, Mapping):
        return list_or_dict
    return dict(enumerate(list_or_dict))


def with_files_of(directory: str | Path, config: Any, key: str) -> Any:
    """Resolve the relative file names in a configuration against a directory.

    File names are texts with the suffix of a file, and texts that name a file or directory there.

    :param directory: The directory.
    :param config: The configuration; objects in it stay unchanged.
    :param key: Its key, for messages.
    :raises ConfigError: There is no such directory.
    """
    place = Path(directory).absolute()
    if not place.is_dir():
        raise ConfigError(f"input_dir: there is no directory {directory}.")

    def completed(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {name: completed(value) for name, value in node.items()}
        if type(node) in (list, tuple):
            return type(node)(map(completed, node))
        if isinstance(node, Path):
            return place / node
        if not isinstance(node, str) or not node.strip(".") or "\0" in node or "://" in node or len(node) > 255:
            return node
        return str(place / node) if is_file_name(node) or (place / node).exists() else node

    return completed(plain_container(config, key))


class EnvFactory:
    """Factory of environments with wrappers, which can be sent to other processes.

    :param env: Configuration of the environment, the id of a gymnasium environment, the name of a PettingZoo
        environment with its family, or a class or function without arguments that makes an environment of Maze or of
        one of these. An environment object is copied by every call. A vector environment of gymnasium, or a function
        that makes one for `num_envs` members, becomes a :class:`~maze.core.wrappers.gym_vector_env.GymVectorMazeEnv`.
    :param wrappers: Wrappers to apply, the first one innermost.
    :param timeout: Time limit of a step or reset in seconds; `None`: none.
    """

    def __init__(
        self,
        env: ConfigType | Callable[[], Any],
        wrappers: CollectionOfConfigType | None = None,
        timeout: float | None = None,
    ) -> None:
        self.env = plain_container(env, "env")
        self.wrappers = plain_container(wrappers, "wrappers")
        self.timeout = timeout
        self._guard = current_guard()

    def __call__(self) -> Any:
        """Make an environment."""
        from maze.core.wrappers.time_limit_wrapper import CallTimeLimitWrapper
        from maze.core.wrappers.wrapper_factory import WrapperFactory

        with imports_guarded(self._guard):
            env = self._make_env()
            if self.wrappers:
                env = WrapperFactory.wrap_from_config(env, self.wrappers)
        return env if self.timeout is None else CallTimeLimitWrapper.wrap(env, seconds=self.timeout)

    def _make_env(self) -> Any:
        env = self.env
        adaptations: dict[str, Any] = {}
        if is_vector_env(env):
            return _adopted(env, None)
        if isinstance(env, Mapping) or (callable(env) and not is_environment(env)):
            target = self.env.get(TARGET_KEY) if isinstance(self.env, Mapping) else self.env
            is_required = "num_envs" in _required_arguments(target)
            env = self._called(**({"num_envs": 1} if is_required else {}))
            adaptations = self._adaptations()
            if is_vector_env(env) and not adaptations:
                return _adopted(env, self._called if is_required or _takes(target, "num_envs") else None)
        elif is_environment(env):
            env = _copy_of(env)
        elif isinstance(env, str):
            target = f"{_PETTINGZOO}.make_pettingzoo_env" if is_pettingzoo_name(env) else _GYM_ENV
            env = Factory(object).instantiate({TARGET_KEY: target, "name": env}, config_path="env")
        if _is_pettingzoo_env(env):
            env = Factory(object).instantiate({TARGET_KEY: f"{_PETTINGZOO}.PettingZooEnv"}, env=env)
        elif not isinstance(env, StructuredEnv) and is_environment(env):
            from maze.core.wrappers.maze_gym_env_wrapper import adapted_gym_maze_env

            return adapted_gym_maze_env(env, **adaptations)
        if adaptations:
            raise ConfigError(
                f"env: settings of single gymnasium environments ({', '.join(f'`{key}`' for key in adaptations)}), but "
                f"{self.env.get(TARGET_KEY)} made {shown_value(env)}. Remove these settings."
            )
        if not isinstance(env, StructuredEnv):
            raise ConfigError(
                f"env: expected a mapping with `{TARGET_KEY}`, the id of a gymnasium environment, or a class or "
                f"function that makes a Maze or gymnasium environment; {self.env!r} gave {shown_value(env)}."
            )
        return env

    def _called(self, **arguments: Any) -> Any:
        """Call the configured class or function.

        :param arguments: Further arguments.
        """
        if callable(self.env):
            return self.env(**arguments)
        config = {**_without_foreign_defaults(self.env), **arguments}
        return Factory(object).instantiate(
            {key: value for key, value in config.items() if key not in self._adaptations()}, config_path="env"
        )

    def _adaptations(self) -> dict[str, Any]:
        """Return the entries of the configuration that adapt the environment and that its target does not take."""
        if not isinstance(self.env, Mapping):
            return {}
        from maze.core.wrappers.maze_gym_env_wrapper import ADAPTATIONS

        config = _without_foreign_defaults(self.env)
        target = config.get(TARGET_KEY)
        return {key: config[key] for key in ADAPTATIONS if key in config and not _takes(target, key)}


def _adopted(env: Any, make: Callable[..., Any] | None) -> MazeEnv[Any]:
    """Adapt a vector environment.

    :param make: Makes it for another number of members (`num_envs`); `None`: only its own number.
    """
    from maze.core.wrappers.gym_vector_env import GymVectorMazeEnv, maker_of

    if make is None:
        return GymVectorMazeEnv(maker_of(env), env.num_envs)
    env.close()
    return GymVectorMazeEnv(make)


def _parameters(target: Any) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(locate(target, "env") if isinstance(target, str) else target).parameters
    except (TypeError, ValueError):
        return None


def _takes(target: Any, name: str) -> bool:
    """Return whether a class or function takes an argument; True without a signature."""
    parameters = _parameters(target)
    return parameters is None or name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _without_foreign_defaults(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an environment without those of the default configuration.

    If only `env._target_` is overridden, the configuration still holds the other defaults of `env`. Required arguments
    of the target, such as the `name` of a gymnasium environment, are kept.
    """
    if env.get(TARGET_KEY) == _GYM_ENV:
        return dict(env)
    defaults = gym_env_defaults()
    needed = {TARGET_KEY, *_required_arguments(env.get(TARGET_KEY))}
    return {key: value for key, value in env.items() if key in needed or key not in defaults or value != defaults[key]}


def gym_env_defaults() -> Mapping[str, Any]:
    """Return the default configuration of `env`, a gymnasium environment."""
    from importlib.resources import files

    defaults: Mapping[str, Any] = read_config(Path(str(files("maze.conf"))) / "env" / "gym_env.yaml")
    return defaults


def _required_arguments(target: Any) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = (_parameters(target) or {}).values()
    return [each.name for each in parameters if each.default is each.empty and each.kind in kinds]


def is_environment(value: Any) -> bool:
    """Return whether a value is an environment of Maze, gymnasium or PettingZoo, not a factory of one."""
    import gymnasium

    return isinstance(value, StructuredEnv | gymnasium.Env) or _is_pettingzoo_env(value)


def is_pettingzoo_name(name: str) -> bool:
    """Return whether a name is one of PettingZoo's with its family, such as `mpe2/simple_spread_v3`."""
    return _PETTINGZOO_NAME.fullmatch(name) is not None


def _is_pettingzoo_env(value: Any) -> bool:
    pettingzoo: Any = sys.modules.get("pettingzoo")  # if it is not imported, there are no such environments
    return pettingzoo is not None and isinstance(value, pettingzoo.AECEnv | pettingzoo.ParallelEnv)


def is_vector_env(value: Any) -> bool:
    """Return whether a value is a vector environment of gymnasium."""
    from gymnasium.vector import VectorEnv

    return isinstance(value, VectorEnv)


def _copy_of(env: Any) -> Any:
    try:
        return copy.deepcopy(env)
    except Exception as error:
        raise ConfigError(
            f"env: several environments are needed, but this {type(env).__name__} cannot be copied: {error}. Pass a "
            "class or function that makes one, such as env=lambda: ..."
        ) from error


def shown_value(value: Any) -> str:
    """Describe a value for messages."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"{value!r} ({type(value).__name__})"


def read_hydra_config(config_module: str, config_name: str | None = None, **hydra_overrides: Any) -> DictConfig:
    """Compose a configuration as `maze-run` does.

    :param config_module: Python package that holds the configuration files, such as `maze.conf`.
    :param config_name: Root file without its ending; by default the only one, or the first of config, conf,
        conf_rollout and conf_train.
    :param hydra_overrides: Overrides, such as `env="gym_env"` or `**{"env.name": "CartPole-v1"}`.
    :raises ConfigError: The configuration cannot be composed.
    """
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.singleton import Singleton
    from hydra.errors import HydraException
    from yaml import YAMLError

    overrides = [f"{key}={_override_value(value)}" for key, value in hydra_overrides.items()]
    state_of_caller = Singleton.get_state()
    try:
        GlobalHydra.instance().clear()
        with initialize_config_module(config_module, version_base="1.3"):
            return compose(config_name or _root_config_name(config_module), overrides=overrides)
    except (HydraException, YAMLError) as error:
        raise ConfigError(f"Configuration of `{config_module}` cannot be composed: {error}") from error
    finally:
        Singleton.set_state(state_of_caller)


def make_env_from_hydra(config_module: str, config_name: str | None = None, **hydra_overrides: Any) -> MazeEnv[Any]:
    """Make the environment of a Hydra configuration, with its wrappers.

    :param config_module: Python package that holds the configuration files.
    :param config_name: Root file without its ending; see :func:`read_hydra_config`.
    :param hydra_overrides: Overrides.
    :raises ConfigError: The configuration has no environment, or cannot be composed.
    """
    config = read_hydra_config(config_module, config_name, **hydra_overrides)
    if config.get("env") is None:
        raise ConfigError(f"The configuration of `{config_module}` has no key `env`; its keys are {list(config)}.")
    env: MazeEnv[Any] = EnvFactory(config.env, config.get("wrappers"))()
    return env


def _override_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_override_value(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_override_value(entry) for entry in value) + "]"
    return str(value)


def _root_config_name(config_module: str) -> str:
    from importlib.resources import files

    names = sorted(entry.name[:-5] for entry in files(config_module).iterdir() if entry.name.endswith(".yaml"))
    for name in _USUAL_CONFIG_NAMES:
        if name in names:
            return name
    if len(names) == 1:
        return names[0]
    raise ConfigError(f"`{config_module}` has several root configurations; give `config_name`, one of {names}.")


def count_instances(env: Any) -> int:
    """Return the number of instances of an environment or its configuration; 0: it has no set.

    :param env: An environment, or a configuration, which is built if its key `instances` is set.
    """
    if isinstance(env, Mapping):
        if not env.get("instances"):
            return 0
        built = EnvFactory(env)()
        try:
            return count_instances(built)
        finally:
            built.close()
    return int(getattr(env, "n_instances", 0))
