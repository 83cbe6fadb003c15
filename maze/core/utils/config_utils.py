"""Reading of configurations, and environments from configurations."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import numbers
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from maze.core.env.structured_env import StructuredEnv
from maze.core.errors import ConfigError, ConfigValueError, did_you_mean
from maze.core.utils import factory
from maze.core.utils.import_guard import current_guard, imports_guarded

if TYPE_CHECKING:
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import DictConfig

    from maze.core.env.maze_env import MazeEnv

# Target of the default configuration of environments.
_GYM_ENV = "maze.core.wrappers.maze_gym_env_wrapper.make_gym_maze_env"
_PETTINGZOO = "maze.interop.pettingzoo_env"  # module of a higher layer, which is only named here
_PETTINGZOO_NAME = re.compile(r"\w+/\w+_v\d+")
_BARE_TEXT = re.compile(r"[A-Za-z_/][\w./-]*", re.ASCII)
_KEYWORDS = ("null", "true", "false", "nan", "inf")
_USUAL_CONFIG_NAMES = ("config", "conf", "conf_rollout", "conf_train")


def read_config(path: Path | str) -> dict[Any, Any]:
    """Read a YAML file with resolved interpolations.

    :param path: The file.
    :raises ConfigError: There is no such file, or it holds no mapping in YAML.
    """
    from omegaconf import OmegaConf

    try:
        config: Any = factory.plain_container(OmegaConf.load(path), str(path))
    except FileNotFoundError as error:
        raise ConfigError(f"There is no configuration file `{path}`.") from error
    except Exception as error:
        if isinstance(error, ConfigError) or type(error).__module__.split(".")[0] not in ("yaml", "omegaconf"):
            raise
        raise ConfigError(f"`{path}` is not a valid YAML file: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"`{path}` must contain a mapping, but contains a {type(config).__name__}.")
    return config


def flag(key: str, value: Any) -> bool:
    """Check a truth value of a configuration, where `no` and `off` are texts.

    :param key: Its key.
    :param value: A boolean of Python or NumPy.
    :raises ConfigError: It is neither true nor false.
    """
    if not isinstance(value, bool | np.bool_):
        raise ConfigValueError(f"{key}: expected true or false, found {value!r}.")
    return bool(value)


def whole_number(key: str, value: Any, at_least: int) -> int:
    """Check a whole number of a configuration.

    :param key: Its key.
    :param value: The number.
    :param at_least: Smallest value allowed.
    :raises ConfigError: It is not a whole number, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < at_least:
        raise ConfigValueError(f"{key}: expected a whole number of at least {at_least}, found {value!r}.")
    return int(value)


def number(
    key: str,
    value: Any,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    *,
    above: bool = False,
    below: bool = False,
    infinite: bool = False,
) -> float:
    """Check a number of a configuration; NumPy's become Python's.

    :param key: Its key.
    :param value: The number.
    :param minimum: Smallest number allowed.
    :param maximum: Largest number allowed.
    :param above: Whether `minimum` itself is excluded.
    :param below: Whether `maximum` itself is excluded.
    :param infinite: Whether it may be infinite.
    :raises ConfigError: It is not a number, NaN, infinite, or outside the range.
    """
    is_number = not isinstance(value, bool) and isinstance(value, numbers.Real) and not math.isnan(value)
    is_high = is_number and (infinite or math.isfinite(value)) and (value > minimum if above else value >= minimum)
    if not is_high or not (value < maximum if below else value <= maximum):
        lower = "" if minimum == -math.inf else f" {'above' if above else 'of at least'} {minimum:g}"
        upper = "" if maximum == math.inf else f" and {'below' if below else 'at most'} {maximum:g}"
        raise ConfigValueError(f"{key}: expected a number{lower}{upper}, found {value!r}.")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


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
    return number(key, value, 0.0, above=True)


# Types of fields that state a range, which `CheckedConfig` checks.
Count = int
"""An integer of at least 1."""
Natural = int
"""An integer of at least 0."""
Amount = float
"""A number of at least 0."""
Positive = float
"""A number above 0."""
Share = float
"""A number from 0 to 1."""

CheckedConfigType = TypeVar("CheckedConfigType", bound="CheckedConfig")


@dataclasses.dataclass
class CheckedConfig:
    """Base of dataclasses that are built from a section of a configuration; errors name the key of a field.

    Fields with the types :data:`Count`, :data:`Natural`, :data:`Amount`, :data:`Positive`, :data:`Share` and `bool`,
    also those that may be `None`, are checked (in modules with `from __future__ import annotations`).

    :param section: Key of the section.
    """

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            kind, _, other = str(each.type).partition(" | ")
            if other == "None" and getattr(self, each.name) is None:
                continue
            if kind in ("Count", "Natural"):
                self.require_integer(each.name, minimum=int(kind == "Count"))
            elif kind in ("Amount", "Positive", "Share"):
                self.require_number(each.name, 0.0, 1.0 if kind == "Share" else math.inf, above=kind == "Positive")
            elif kind == "bool":
                self.require_choice(each.name, (True, False))

    @classmethod
    def from_config(cls: type[CheckedConfigType], config: CheckedConfigType | Mapping[str, Any]) -> CheckedConfigType:
        """Return the configuration itself, or build one from a mapping such as a section of a composed config.

        :param config: Field names and values; missing fields keep their defaults.
        :raises ConfigError: It is not a mapping, or has an unknown field.
        """
        if isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            found = type(config).__name__
            raise ConfigError(f"{cls.section}: expected a {cls.__name__} or a mapping of its fields, found {found}.")
        values = {str(key): value for key, value in config.items() if key != factory.TARGET_KEY}
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                hint = did_you_mean(key, known, f"{cls.section}.{{}}") or f" Known fields: {', '.join(known)}."
                raise ConfigError(f"{cls.section}.{key}: {cls.__name__} has no such field.{hint}")
        return cls(**values)

    def require_integer(self, *names: str, minimum: int) -> None:
        """Check that fields are integers of at least `minimum`; NumPy's become Python's.

        :param names: Names of the fields.
        :param minimum: Smallest number allowed.
        :raises ConfigError: A field is no integer, or too small.
        """
        for name in names:
            setattr(self, name, whole_number(f"{self.section}.{name}", getattr(self, name), minimum))

    def require_number(
        self, name: str, minimum: float, maximum: float = math.inf, *, above: bool = False, below: bool = False
    ) -> None:
        """Check that a field is a finite number in the given range; NumPy's become Python's.

        :param name: Name of the field.
        :param minimum: Smallest number allowed.
        :param maximum: Largest number allowed.
        :param above: Whether `minimum` itself is excluded.
        :param below: Whether `maximum` itself is excluded.
        :raises ConfigError: It is no number, NaN, infinite, or outside the range.
        """
        key = f"{self.section}.{name}"
        setattr(self, name, number(key, getattr(self, name), minimum, maximum, above=above, below=below))

    def require_choice(self, name: str, choices: Collection[Any]) -> None:
        """Check that a field is one of several values.

        :param name: Name of the field.
        :param choices: The values allowed.
        :raises ConfigError: It is none of them.
        """
        value = getattr(self, name)
        if value not in choices:
            known = ", ".join(map(str, choices))
            raise ConfigValueError(f"{self.section}.{name}: expected one of {known}, found {value!r}.")


def list_to_dict(list_or_dict: list[Any] | Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Convert a list to a mapping from indices; mappings are returned unchanged."""
    return list_or_dict if isinstance(list_or_dict, Mapping) else dict(enumerate(list_or_dict))


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
        return str(place / node) if factory.is_file_name(node) or (place / node).exists() else node

    return completed(factory.plain_container(config, key))


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
        env: factory.ConfigType | Callable[[], Any],
        wrappers: factory.CollectionOfConfigType | None = None,
        timeout: float | None = None,
    ) -> None:
        self.env = factory.plain_container(env, "env")
        self.wrappers = factory.plain_container(wrappers, "wrappers")
        self.timeout = timeout
        self._guard = current_guard()

    def __call__(self) -> Any:
        """Make an environment."""
        from maze.core.wrappers.wrapper_factory import WrapperFactory

        with imports_guarded(self._guard):
            env = self._make_env()
            if self.wrappers:
                env = WrapperFactory.wrap_from_config(env, self.wrappers)
            if self.timeout is not None:
                limit = "maze.core.wrappers.time_limit_wrapper.CallTimeLimitWrapper"
                env = WrapperFactory.wrap_from_config(env, {limit: {"seconds": self.timeout}})
        return env

    def _make_env(self) -> Any:
        env = self.env
        adaptations: dict[str, Any] = {}
        if is_vector_env(env):
            return _adopted(env, None)
        if isinstance(env, Mapping) or (callable(env) and not is_environment(env)):
            target = self.env.get(factory.TARGET_KEY) if isinstance(self.env, Mapping) else self.env
            is_required = "num_envs" in _required_arguments(target)
            env = self._called(**({"num_envs": 1} if is_required else {}))
            adaptations = self._adaptations()
            if is_vector_env(env) and not adaptations:
                return _adopted(env, self._called if is_required or _takes(target, "num_envs") else None)
        elif is_environment(env):
            env = _copy_of(env)
        elif isinstance(env, str):
            target = f"{_PETTINGZOO}.make_pettingzoo_env" if is_pettingzoo_name(env) else _GYM_ENV
            env = factory.Factory(object).instantiate({factory.TARGET_KEY: target, "name": env}, config_path="env")
        if _is_pettingzoo_env(env):
            env = factory.Factory(object).instantiate({factory.TARGET_KEY: f"{_PETTINGZOO}.PettingZooEnv"}, env=env)
        elif not isinstance(env, StructuredEnv) and is_environment(env):
            from maze.core.wrappers.maze_gym_env_wrapper import adapted_gym_maze_env

            return adapted_gym_maze_env(env, **adaptations)
        if adaptations:
            named, made = ", ".join(f"`{key}`" for key in adaptations), shown_value(env)
            raise ConfigError(
                f"env: settings of single gymnasium environments ({named}), but "
                f"{self.env.get(factory.TARGET_KEY)} made {made}."
            )
        if not isinstance(env, StructuredEnv):
            raise ConfigError(
                f"env: expected a mapping with `{factory.TARGET_KEY}`, the id of a gymnasium environment, or a class "
                f"or function that makes a Maze or gymnasium environment; {self.env!r} gave {shown_value(env)}."
            )
        return env

    def _called(self, **arguments: Any) -> Any:
        """Call the configured class or function.

        :param arguments: Further arguments.
        """
        if callable(self.env):
            return self.env(**arguments)
        config = {**_without_foreign_defaults(self.env), **arguments}
        left_out = {"_partial_", *self._adaptations()}  # runs store a `functools.partial` that makes environments
        return factory.Factory(object).instantiate(
            {key: value for key, value in config.items() if key not in left_out}, config_path="env"
        )

    def _adaptations(self) -> dict[str, Any]:
        """Return the entries of the configuration that adapt the environment and that its target does not take."""
        if not isinstance(self.env, Mapping):
            return {}
        from maze.core.wrappers.maze_gym_env_wrapper import ADAPTATIONS

        config = _without_foreign_defaults(self.env)
        target = config.get(factory.TARGET_KEY)
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
        return inspect.signature(factory.locate(target, "env") if isinstance(target, str) else target).parameters
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
    if env.get(factory.TARGET_KEY) == _GYM_ENV:
        return dict(env)
    defaults = gym_env_defaults()
    needed = {factory.TARGET_KEY, *_required_arguments(env.get(factory.TARGET_KEY))}
    return {key: value for key, value in env.items() if key in needed or key not in defaults or value != defaults[key]}


@functools.cache  # read several times for each environment that is made
def gym_env_defaults() -> Mapping[str, Any]:
    """Return the default configuration of `env`, a gymnasium environment."""
    from importlib.resources import files

    return read_config(Path(str(files("maze.conf"))) / "env" / "gym_env.yaml")


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
        reason = f"this {type(env).__name__} cannot be copied: {error}"
        raise ConfigError(f"env: several are needed, but {reason}. Pass a function, env=lambda: ...") from error


def shown_value(value: Any) -> str:
    """Describe a value for messages."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"{value!r} ({type(value).__name__})"


@contextmanager
def hydra_syntax() -> Iterator[str]:
    """Return a context without Hydra's warning of the `version_base` that it yields.

    Files may have the documented syntax of Hydra 1.0, `# @package _group_` and `optional: true`, before Hydra 1.4.
    """
    from hydra import __version__

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*version_base=")
        yield "1.1" if tuple(map(int, __version__.split(".")[:2])) < (1, 4) else "1.3"


@contextmanager
def hydra_session(config_module: str, job_name: str = "app") -> Iterator[GlobalHydra]:
    """Return a context in which configurations can be composed, also within a run of Hydra.

    :param config_module: Python package that holds the configuration files.
    :param job_name: Name of the job in Hydra's settings.
    """
    from hydra import initialize_config_module, version
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    version_base = version.VersionBase.instance()
    outer = GlobalHydra.instance().hydra, HydraConfig.instance().cfg, version_base.version_base
    GlobalHydra.instance().hydra = None
    try:
        with hydra_syntax() as base:
            session = initialize_config_module(config_module, job_name=job_name, version_base=base)
        with session:
            yield GlobalHydra.instance()
    finally:
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg, version_base.version_base = outer


def read_hydra_config(config_module: str, config_name: str | None = None, **hydra_overrides: Any) -> DictConfig:
    """Compose a configuration as `maze-run` does.

    :param config_module: Python package that holds the configuration files, such as `maze.conf`.
    :param config_name: Root file without its ending; by default the only one, or the first of config, conf,
        conf_rollout and conf_train.
    :param hydra_overrides: Overrides, such as `env="gym_env"` or `**{"env.name": "CartPole-v1"}`.
    :raises ConfigError: The configuration cannot be composed.
    """
    from hydra import compose
    from hydra.errors import HydraException
    from yaml import YAMLError

    overrides = [f"{key}={value_text(value)}" for key, value in hydra_overrides.items()]
    try:
        with hydra_session(config_module):
            return compose(config_name or _root_config_name(config_module), overrides=overrides)
    except (HydraException, YAMLError) as error:
        raise ConfigError(f"Configuration of `{config_module}` cannot be composed: {error}") from error


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


def value_text(value: Any) -> str:
    """Return a value as written in an override.

    :param value: A number, a truth value, a text, a path, `None`, or a list or mapping of these. Texts that the grammar
        of overrides would read otherwise are quoted.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        from hydra.core.override_parser.types import Quote, QuotedString

        text = str(value)
        return text if _is_bare(text) else QuotedString(text=text, quote=Quote.single).with_quotes()
    if isinstance(value, Mapping):
        items = (f"{key if _is_bare(str(key)) else value_text(str(key))}:{value_text(it)}" for key, it in value.items())
        return "{" + ",".join(items) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(map(value_text, value)) + "]"
    return "null" if value is None else str(value)


def _is_bare(text: str) -> bool:
    return _BARE_TEXT.fullmatch(text) is not None and text.lower() not in _KEYWORDS


def _root_config_name(config_module: str) -> str:
    from importlib.resources import files

    names = sorted(entry.name[:-5] for entry in files(config_module).iterdir() if entry.name.endswith(".yaml"))
    usual = [name for name in _USUAL_CONFIG_NAMES if name in names]
    if not usual and len(names) != 1:
        raise ConfigError(f"`{config_module}` has several root configurations; give `config_name`, one of {names}.")
    return (usual or names)[0]


def count_instances(env: Any) -> int:
    """Return the number of instances of an environment or its configuration; 0: it has no set.

    :param env: An environment, or its configuration or factory, which is built if its key `instances` is set.
    """
    env = env.env if isinstance(env, EnvFactory) else env
    if isinstance(env, Mapping):
        if not env.get("instances"):
            return 0
        built = EnvFactory(env)()
        try:
            return count_instances(built)
        finally:
            built.close()
    return int(getattr(env, "n_instances", 0))


# -- descriptions ------------------------------------------------------------------------------------------------------

LAYERS_KEY = "_layers_"
"""Key of the printed layers of a network."""

_SIMPLE = (numbers.Number, str, Path)
_MAX_DEPTH = 6  # largest depth of the description of an object; containers of the configuration have no limit
_MAX_ITEMS = 50
_NOTHING = object()


def config_to_yaml(config: Any, sort_keys: bool = False) -> str:
    """Format a configuration as YAML, without resolving interpolations; objects are described by class and arguments.

    :param config: Configuration of OmegaConf, or a mapping.
    :param sort_keys: Whether to sort keys.
    """
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(described_config(config), sort_keys=sort_keys)


def described_config(config: Any) -> Any:
    """Return a configuration without resolving interpolations; objects are described by class and arguments."""
    from omegaconf import OmegaConf

    return OmegaConf.create(describe(OmegaConf.to_container(config) if OmegaConf.is_config(config) else config))


def describe(value: Any) -> Any:
    """Describe any value as plain data: objects become mappings with `_target_` and the arguments that they store.

    An object can be built from its description if it stores all its arguments and its class can be imported.
    """
    return _described(value, _MAX_DEPTH, ())


def _described(value: Any, depth: int, parents: tuple[int, ...]) -> Any:
    if isinstance(value, type):
        return factory.path_of(value)
    if value is None or isinstance(value, _SIMPLE):
        plain: Any = value
        plain = plain.item() if hasattr(plain, "item") else plain  # numbers of NumPy are subclasses of Python's
        return plain if plain is None or isinstance(plain, int | float | str) else str(plain)
    is_container = isinstance(value, Mapping | list | tuple | set | frozenset)
    is_long = is_container and depth < _MAX_DEPTH and len(value) > _MAX_ITEMS  # such as the data of an object
    if depth == 0 or is_long or id(value) in parents:
        return f"<{factory.path_of(type(value))}>"
    inner = (*parents, id(value))
    below = depth if depth == _MAX_DEPTH else depth - 1  # not inside of an object
    if isinstance(value, Mapping):
        return {_key(key): _described(entry, below, inner) for key, entry in value.items()}
    if is_container:
        return [_described(entry, below, inner) for entry in value]
    return {key: _described(entry, depth - 1, inner) for key, entry in _target_and_arguments(value).items()}


def _target_and_arguments(value: Any) -> dict[str, Any]:
    if isinstance(value, functools.partial):
        arguments = {"_args_": list(value.args)} if value.args else {}
        return {**_target_and_arguments(value.func), "_partial_": True, **arguments, **value.keywords}
    if inspect.isroutine(value) or isinstance(value, type):  # the class: that of a `functools.partial`
        return {factory.TARGET_KEY: factory.path_of(value)}
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return {factory.TARGET_KEY: factory.path_of(type(value)), **fields}
    if any(base.__module__ == "torch.nn.modules.module" for base in type(value).__mro__):
        return {factory.TARGET_KEY: factory.path_of(type(value)), LAYERS_KEY: str(value).splitlines()}
    return {factory.TARGET_KEY: factory.path_of(type(value)), **_kept_arguments(value)}


def _kept_arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of the constructor that the object stores under their names, without running its code."""
    try:
        parameters = inspect.signature(type(value)).parameters.values()
    except (TypeError, ValueError):
        return {}
    attributes = getattr(value, "__dict__", {})
    kept = {}
    for parameter in parameters:
        found = attributes.get(parameter.name, attributes.get(f"_{parameter.name}", _NOTHING))
        if found is not _NOTHING and not _is_space(found):
            kept[parameter.name] = found
        elif parameter.name == "networks":
            # composers store the built networks
            made = [vars(part).get("networks") for part in attributes.values() if hasattr(part, "__dict__")]
            kept["networks"] = next(filter(None, made), None)
    return kept


def _is_space(value: Any) -> bool:
    """Return whether it is a space or a dictionary of spaces, which the environment determines."""
    sample = next(iter(value.values()), None) if isinstance(value, dict) else value
    return any(base.__name__ == "Space" for base in type(sample).__mro__)


def _key(key: Any) -> Any:
    if isinstance(key, str | int | float | bool):
        return key
    return factory.path_of(key) if isinstance(key, type) else str(key)
