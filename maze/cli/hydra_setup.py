"""Setup of Hydra: search path, modules, defaults, overrides of wrappers, algorithms as options; errors of `maze-run`.

Keys of wrappers are paths of classes; an override names the path or the class alone. Messages of Hydra and OmegaConf
are translated: they state the place of the error and its remedy.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from maze.core.annotations import override
from maze.core.errors import ConfigError, GateNotPassedError, did_you_mean, first_line
from maze.core.utils.config_utils import value_text
from maze.core.utils.factory import Factory, is_module_name
from maze.core.utils.stored_config import is_importable
from maze.train.trainers.common.config_classes import AlgorithmConfig


class UsageError(ConfigError):
    """The command itself is wrong; nothing was started."""

    exit_status = 2


class FlagParser(argparse.ArgumentParser):
    """Parse the arguments of a flag of `maze-run`. Options that are not given are not attributes of the result.

    :param flag: The flag.
    :param description: Purpose of the flag.
    :param add_help: Whether `--help` describes it.
    """

    def __init__(self, flag: str, description: str, add_help: bool = True) -> None:
        super().__init__(f"maze-run {flag}", description=description, allow_abbrev=False, add_help=add_help)
        self.argument_default = argparse.SUPPRESS
        self._flag = flag

    @override(argparse.ArgumentParser)
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self._flag}: {message}. {' '.join(self.format_usage().split())}")


class RunFailedError(BaseException):
    """Carry an error, its cause, past Hydra, which would print it in another form, or continue."""


GATE = ("baseline", "candidate")
"""Keys of the policies that a gate compares."""


def is_gate(cfg: Container[str]) -> bool:
    """Return whether a configuration is that of a gate."""
    return all(name in cfg for name in GATE)


def set_gate_status(error: BaseException, cfg: Container[str]) -> None:
    """Set the exit status of a gate with an invalid configuration or a failure to 2; 1 means: candidate rejected.

    :param error: The error that ends the command.
    :param cfg: Its configuration.
    """
    if is_gate(cfg) and isinstance(error, Exception) and not isinstance(error, GateNotPassedError):
        vars(error)["exit_status"] = UsageError.exit_status


def translated(error: BaseException) -> ConfigError | None:
    """Return the error as one message for users of the command line; None: Hydra did not raise it."""
    message: str | None = None
    if isinstance(error, MissingConfigException):
        message = _missing_config(error)
    elif isinstance(error, OverrideParseException):
        message = (
            f"Cannot read the argument {error.override!r}. Arguments are <group>=<option> or <key>=<value>; put "
            f"values with brackets, commas or letters such as ä in quotes: 'key=\"a, b\"'. null stands for nothing."
        )
    elif isinstance(error, ConfigCompositionException):
        message = _composition(error)
    elif isinstance(error, OmegaConfBaseException):
        key = getattr(error, "full_key", None)
        message = f"{key}: {first_line(error).rstrip('.')}" if key else first_line(error).rstrip(".")
    elif isinstance(error, HydraException) or str(error).startswith("Only one of --run"):  # a ValueError of Hydra
        message = str(error).strip()
    elif isinstance(error, YAMLError):
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or first_line(error)
        place = (
            "A configuration file" if mark is None else f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}"
        )
        message = f"{place}: this is not valid YAML: {problem}."
    return None if message is None else UsageError(message)


def suggestion(wrong: str, known: Iterable[str], introduction: str = "Known") -> str:
    """Return a sentence with the most similar name, and another with all known names."""
    names = sorted(set(known))
    return did_you_mean(wrong, names) + (f" {introduction}: {', '.join(names)}." if names else "")


def config_groups(repository: Any, parent: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield the groups of a repository of configurations with the names of their options, without those of Hydra."""
    for name in sorted(repository.get_group_options(parent, ObjectType.GROUP)):
        group = f"{parent}/{name}" if parent else name
        if group != "hydra":
            if options := repository.get_group_options(group, ObjectType.CONFIG):
                yield group, sorted(options)
            yield from config_groups(repository, group)


# An entry of the search path, at the end of Hydra's message; its own entry holds the settings of Hydra.
_PLACE = re.compile(r"path=(pkg|file)://(?!hydra\.conf)(\S.*)")


def _missing_config(error: MissingConfigException) -> str:
    missing = (error.missing_cfg_file or "").removesuffix(".yaml")
    group, _, option = missing.rpartition("/")
    searched = (resources.files(path) if kind == "pkg" else Path(path) for kind, path in _PLACE.findall(str(error)))
    places = [place for place in (base.joinpath(group) for base in searched) if place.is_dir()]
    files = [entry.name for place in places for entry in place.iterdir()]
    options = error.options or [name.removesuffix(".yaml") for name in files if name.endswith(".yaml")]
    if not group:
        return f"-cn {missing}: there is no such root configuration." + suggestion(missing, options)
    run = missing.removeprefix("policy/")
    if run != missing and Path(run).is_dir():
        return f"policy={run}: this is no option. The policy of a training run is policy=torch_policy input_dir={run}."
    if not options:
        return f"{group}={option}: there is no group {group!r}, or it is empty."
    message = f"{group}={option}: there is no such option." + suggestion(option, options, f"Options of {group}")
    is_class = group in ("env", "policy") and "." in option and is_module_name(option)
    return message + (f" A class of your own: '{group}={{_target_: {option}}}'." if is_class else "")


def _composition(error: ConfigCompositionException) -> str:
    cause = error.__cause__
    if isinstance(cause, ConfigKeyError | AttributeError) and getattr(cause, "full_key", None):
        return _unknown_key(cause)
    message = str(error).strip()
    if isinstance(cause, OmegaConfBaseException):
        message = f"{message.splitlines()[0].rstrip('.')}: {first_line(cause).rstrip('.')}"
    return message


def _unknown_key(cause: Any) -> str:
    full_key, parent, wrong = str(cause.full_key), cause.parent_node, str(cause.key)
    siblings = [str(key) for key in parent] if isinstance(parent, DictConfig) else []
    hint = did_you_mean(wrong, siblings, f"{full_key.removesuffix(wrong)}{{}}")
    hint += suggestion("", siblings, "Known here")
    return f"{full_key}: unknown key.{hint} To add a new key, write +{full_key}=<value>."


_NAME = re.compile(r"(?<![\w./-])([^\W\d]\w*)")
_FIRST_OF_PATH = re.compile(_NAME.pattern + r"[.:][^\W\d]")
_NAMES_PACKAGES = re.compile(r"\+*(trusted_packages|env\.import)=")


def environment_configs() -> list[str]:
    """Return the packages with configurations of the shipped environments, and of the tutorial if it is importable.

    The tutorial's package lies beside that of a checkout.
    """
    tutorials = Path(__file__).resolve().parents[2] / "tutorials"
    if not is_importable("tutorial_maze_env") and (tutorials / "tutorial_maze_env").is_dir():
        sys.path.append(str(tutorials))
    packages = [package for package in ("maze_envs", "tutorial_maze_env") if is_importable(package)]
    roots = [Path(str(resources.files(package))) for package in packages]
    files = [(file.parent, root.parent) for root in roots for file in sorted(root.rglob("conf/__init__.py"))]
    return [".".join(directory.relative_to(parent).parts) for directory, parent in files]


@contextmanager
def project_importable(arguments: Sequence[str], trusted: Sequence[str] = ()) -> Iterator[None]:
    """Return a context in which modules of the working directory can be imported, if the command names or trusts one.

    Otherwise they are not importable: the working directory may come from an untrusted source.

    :param arguments: Arguments of the command.
    :param trusted: Packages that it trusts.
    """
    project = Path.cwd()
    named = (
        name
        for argument in arguments
        for pattern in (_FIRST_OF_PATH, *((_NAME,) if _NAMES_PACKAGES.match(argument) else ()))
        for name in pattern.findall(argument.partition("=")[2])
    )
    files = (project / file for name in (*trusted, *named) for file in (f"{name}.py", f"{name}/__init__.py"))
    if not any(map(Path.is_file, files)):
        yield
        return
    sys.path.append(str(project))  # last: installed packages take precedence
    try:
        yield
    finally:
        sys.path.remove(str(project))


@contextmanager
def hydra_config(config: DictConfig) -> Iterator[None]:
    """Return a context in which `HydraConfig` and the resolver `hydra` show a run's configuration."""
    previous = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = previous


DEFAULTS = {
    "job": {"chdir": True},
    "callbacks": {"run_directory": {"_target_": "maze.cli.run_directory.RunDirectoryCallback"}},
}
"""Defaults of Hydra's settings in Maze."""


@contextmanager
def defaults_of_maze() -> Iterator[None]:
    """Return a context in which Hydra has the defaults of Maze, also for root configurations that do not state them.

    Runs work in their output directory, which belongs to one run; sweeps are grid searches. A root configuration
    cannot choose these with `override hydra/sweeper`, which would take precedence over the choice of an experiment.
    Other applications in the same environment keep Hydra's defaults.
    """
    group = ConfigStore.instance().repo["hydra"]
    previous = group["config.yaml"]
    settings: Any = OmegaConf.merge(previous.node, DEFAULTS)
    settings.defaults = [{"sweeper": "grid"} if "sweeper" in each else each for each in settings.defaults]
    ConfigStore.instance().store(group="hydra", name="config", node=settings, provider="maze")
    try:
        yield
    finally:
        group["config.yaml"] = previous


SECTION = "wrappers"
# Prefix of a packed key for each kind of override: change, remove, add.
_MARKS = {"": "$", "~": "$-", "+": "$$"}
_OVERRIDE = re.compile(rf"^(?P<sign>[+~]*){SECTION}\.(?P<path>[\w.-]+)(?P<value>(=.*)?)$", re.DOTALL)
_BUNDLE = re.compile(r"^(?P<choice>policy(@(?P<package>[\w.]+))?)='?(?P<name>shelf:\w+|[^'{}\[\]]+\.maze)'?$")
_CLASS = re.compile(r"^(\+\+)?(policy@)?(?=[\w.]+=\{[^{}]*\b_target_:)")
_PACKED = re.compile(rf"^\+\+{SECTION}\.(?P<mark>\$[$-]?)(?P<path>[\w$-]+)(?P<value>=.*)$", re.DOTALL)


def split_wrapper_path(keys: Sequence[str], configured: Iterable[str]) -> list[str]:
    """Return the key of a wrapper, and the keys within its arguments.

    :param keys: The path of an override below `wrappers`, split at its dots.
    :param configured: Keys of the configured wrappers. The name of a class refers to the key that ends with it.
    :raises ConfigError: The name fits several keys.
    """
    configured = list(configured)
    for n_keys in range(len(keys), 0, -1):
        if ".".join(keys[:n_keys]) in configured:
            return [".".join(keys[:n_keys]), *keys[n_keys:]]
    n_keys = next((number for number, key in enumerate(keys, start=1) if key[:1].isupper()), 1)
    named = [key for key in configured if n_keys == 1 and short_name(key) == keys[0]]
    if len(named) > 1:
        raise ConfigError(f"{SECTION}.{keys[0]}: the name fits {', '.join(named)}; write the path.")
    return [*(named or [".".join(keys[:n_keys])]), *keys[n_keys:]]


def short_name(key: str) -> str:
    """Return the name of a wrapper on the command line: its class."""
    return key.rpartition(".")[2]


def changed_wrappers(wrappers: Any, changes: Mapping[str, Any]) -> Any:
    """Return wrappers with changed arguments, and further wrappers behind them.

    :param wrappers: A mapping from class to arguments, or a list of such mappings.
    :param changes: Arguments by the class or its name.
    """
    if not isinstance(wrappers, Mapping):
        return [*wrappers, dict(changes)]
    result = dict(wrappers)
    for name, arguments in changes.items():
        key = split_wrapper_path(str(name).split("."), wrappers)[0]
        result[key] = OmegaConf.to_container(OmegaConf.merge(result.get(key) or {}, arguments or {}))
    return result


def for_hydra(arguments: Iterable[str]) -> list[str]:
    """Return arguments in Hydra's grammar.

    Hydra splits keys at their dots, and keys of wrappers have dots: the path below `wrappers` becomes one key, which
    :func:`apply_overrides` unpacks. `policy=shelf:<name>` and `policy=<file>.maze` become the option `bundle` with its
    argument.

    :param arguments: Overrides, and other arguments of a command.
    """
    readable: list[str] = []
    arguments = list(arguments)
    cloned = "warm_start.policy."  # has no default whose values could be changed
    is_class = any(argument.startswith(f"{cloned}_target_=") for argument in arguments)
    for argument in (f"++{each}" if is_class and each.startswith(cloned) else each for each in arguments):
        if (bundle := _BUNDLE.match(argument)) is None:
            readable.append(_OVERRIDE.sub(_packed, _CLASS.sub("++", argument)))  # a class has arguments of its own
        else:
            package = bundle["package"] or "policy"
            readable += [f"{bundle['choice']}=bundle", f"{package}.bundle={value_text(bundle['name'])}"]
    return readable


def as_written(arguments: Iterable[str]) -> list[str]:
    """Return arguments as they were before :func:`for_hydra`."""
    return [_CLASS.sub("", _PACKED.sub(_unpacked, argument)) for argument in arguments]


def apply_overrides(cfg: DictConfig) -> bool:
    """Apply, in place, the overrides of wrappers in a configuration that Hydra has composed.

    :param cfg: The configuration.
    :return: Whether there were any.
    :raises UsageError: A wrapper that is not configured is changed or removed.
    :raises ConfigCompositionException: An argument that is not configured is changed.
    """
    wrappers = cfg.get(SECTION)
    packed = [str(key) for key in wrappers if str(key).startswith("$")] if isinstance(wrappers, DictConfig) else []
    if not packed:
        return False
    values: Any = OmegaConf.to_container(wrappers)
    with open_dict(cfg):
        for key in packed:
            del wrappers[key]
    for key in packed:
        sign = next(sign for sign, mark in reversed(_MARKS.items()) if key.startswith(mark))
        _apply(cfg, sign, key.removeprefix(_MARKS[sign]).replace("$", "."), values[key])
    return True


def _apply(cfg: DictConfig, sign: str, path: str, value: Any) -> None:
    wrappers = cfg[SECTION]
    key, *inner = split_wrapper_path(path.split("."), map(str, wrappers))
    if key not in wrappers and sign != "+":
        names = [short_name(str(known)) for known in wrappers]
        addition = "" if sign == "~" else f" To add a wrapper, write +{SECTION}.{path}=<value>."
        raise UsageError(
            f"{SECTION}.{key}: no such wrapper is configured.{suggestion(short_name(key), names)}{addition}"
        )
    place = ".".join([f"{SECTION}[{key}]", *inner])
    try:
        if sign == "~":
            parent = OmegaConf.select(cfg, ".".join([f"{SECTION}[{key}]", *inner[:-1]])) if inner else wrappers
            with open_dict(parent):
                del parent[[key, *inner][-1]]
        else:
            OmegaConf.update(cfg, place, value, merge=True, force_add=sign == "+")
    except OmegaConfBaseException as error:
        raise ConfigCompositionException(f"Could not override '{SECTION}.{path}'.") from error


def _packed(match: re.Match[str]) -> str:
    sign, path, value = match["sign"][:1], match["path"].replace(".", "$"), match["value"]
    return f"++{SECTION}.{_MARKS[sign]}{path}{'=null' if sign == '~' else value}"


def _unpacked(match: re.Match[str]) -> str:
    sign = next(sign for sign, mark in _MARKS.items() if mark == match["mark"])
    return f"{sign}{SECTION}.{match['path'].replace('$', '.')}{'' if sign == '~' else match['value']}"


# -- algorithms --------------------------------------------------------------------------------------------------------

# Hyperparameters and their defaults are stated once, in the dataclass of an algorithm, and registered from there in
# Hydra's `ConfigStore`.
ALGORITHM_TARGET = "algorithm._target_"
_TRAINERS = "maze.train.trainers"
_DATASETS = "maze.core.trajectory_recording.datasets"

SHIPPED_ALGORITHMS = {
    "a2c": f"{_TRAINERS}.a2c.a2c_algorithm_config.A2CAlgorithmConfig",
    "bc": f"{_TRAINERS}.imitation.bc_algorithm_config.BCAlgorithmConfig",
    "cql": f"{_TRAINERS}.offline.offline_algorithm_configs.CQLConfig",
    "dcl": f"{_TRAINERS}.labelling.labelling_configs.DCLConfig",
    "dqn": f"{_TRAINERS}.dqn.dqn_algorithm_config.DQNAlgorithmConfig",
    "es": f"{_TRAINERS}.es.es_algorithm_config.ESAlgorithmConfig",
    "impala": f"{_TRAINERS}.impala.impala_algorithm_config.ImpalaAlgorithmConfig",
    "iql": f"{_TRAINERS}.offline.offline_algorithm_configs.IQLConfig",
    "ppo": f"{_TRAINERS}.ppo.ppo_algorithm_config.PPOAlgorithmConfig",
    "ppo_auto": f"{_TRAINERS}.ppo.ppo_algorithm_config.PPOAutoAlgorithmConfig",
    "sac": f"{_TRAINERS}.sac.sac_algorithm_config.SACAlgorithmConfig",
    "sacfd": f"{_TRAINERS}.sac.sac_algorithm_config.SACAlgorithmConfig",
    "self_labelling": f"{_TRAINERS}.labelling.labelling_configs.SelfLabellingConfig",
    "td3_bc": f"{_TRAINERS}.offline.offline_algorithm_configs.TD3BCConfig",
}
"""Path of the configuration class of each shipped algorithm, by name."""


@functools.cache  # Hydra calls it for each composition
def register_algorithms() -> None:
    """Register the shipped algorithms, and arguments of their runners, as options of Hydra's configuration groups."""
    for name, path in SHIPPED_ALGORITHMS.items():
        module, _, class_name = path.rpartition(".")
        _store("algorithm", name, {"_target_": path, **_defaults(getattr(importlib.import_module(module), class_name))})
        for kind in ("dev", "local", "ray"):
            if runner := _runner_of(name, kind):
                _store("algorithm_runner", f"{name}-{kind}", runner, package="runner")


def option_of(config_class: type[AlgorithmConfig]) -> str:
    """Return the option of the group `algorithm` with the defaults of a class; register it if there is none.

    :param config_class: Configuration class of an algorithm.
    """
    path = f"{config_class.__module__}.{config_class.__qualname__}"
    for name, target in SHIPPED_ALGORITHMS.items():
        if target == path:
            return name
    name = config_class.name
    if name in SHIPPED_ALGORITHMS:
        raise ConfigError(
            f"algorithm: {config_class.__name__}.name is {name!r}, the name of another algorithm. Rename it."
        )
    _store("algorithm", name, {"_target_": path, **_defaults(config_class)})
    return name


def with_own_algorithm(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command; add `algorithm=` if only `algorithm._target_` names the user's algorithm.

    :param arguments: Overrides and flags.
    """
    targets = [text.partition("=")[2] for text in arguments if text.lstrip("+").startswith(f"{ALGORITHM_TARGET}=")]
    if not targets or "," in targets[-1]:
        return list(arguments)
    option = option_of(Factory(AlgorithmConfig).type_from_name(targets[-1].strip("'\""), config_path=ALGORITHM_TARGET))
    is_chosen = any(text.startswith("algorithm=") for text in arguments)
    return list(arguments) if is_chosen else [*arguments, f"algorithm={option}"]


def _store(group: str, name: str, node: dict[str, Any], package: str = "") -> None:
    ConfigStore.instance().store(group=group, name=name, node=node, package=package or group, provider="maze")


def _runner_of(algorithm: str, kind: str) -> dict[str, Any]:
    """Return the arguments of an algorithm's runner besides those in `runner/<kind>`; empty: none.

    :param algorithm: Name of a shipped algorithm.
    :param kind: `dev`, `local` or `ray`.
    """
    arguments: dict[str, Any]
    prefix = {"dev": "Dev", "local": "Local", "ray": ""}[kind]
    if algorithm in ("a2c", "ppo", "ppo_auto"):
        runner = f"common.actor_critic.actor_critic_runners.AC{prefix}Runner"
        name = algorithm.removesuffix("_auto")
        trainer = f"{_TRAINERS}.{name}.{name}_trainer.{name.upper()}"
        arguments = {"trainer_class": trainer, "eval_repeats": None, "critic_burn_in_epochs": None}
    elif algorithm == "bc":
        runner = f"imitation.bc_runners.BC{prefix}Runner"
        arguments = {"dataset": {**_dataset(kind, "Identity"), "dir_or_file": None}}
    elif algorithm in ("cql", "iql", "td3_bc"):
        runner = "offline.offline_trainers.OfflineRunner"
        arguments = {"dataset": {**_dataset(kind, "IdentityWithNextObservation"), "dir_or_file": None}}
    elif algorithm == "es":
        runner = f"es.ES{prefix or 'Master'}Runner"
        arguments = {"n_eval_rollouts": 10, "shared_noise_table_size": 100_000_000}
        if kind == "local":
            arguments |= {"n_train_workers": 0, "n_eval_workers": 0, "start_method": None}
    elif algorithm == "impala":
        runner = f"impala.impala_runners.Impala{prefix}Runner"
        arguments = {"start_method": "forkserver"} if kind == "local" else {}
    elif algorithm in ("sac", "sacfd"):
        runner = f"sac.sac_runners.SAC{prefix}Runner"
        demonstrations = _dataset(kind, "IdentityWithNextObservation") if algorithm == "sacfd" else None
        arguments = {"initial_demonstration_trajectories": demonstrations}
    else:
        return {}
    return {"_target_": f"{_TRAINERS}.{runner}", **arguments}


def _dataset(kind: str, processor: str) -> dict[str, Any]:
    """Return the configuration of the data set with recorded trajectories."""
    return {
        "_target_": f"{_DATASETS}.in_memory_dataset.InMemoryDataset",
        "input_data": "trajectory_data",
        "n_workers": 1 if kind == "dev" else 5,
        "deserialize_in_main_thread": False,
        "trajectory_processor": {"_target_": f"{_DATASETS}.trajectory_processor.{processor}TrajectoryProcessor"},
    }


def _defaults(config_class: type[AlgorithmConfig]) -> dict[str, Any]:
    """Return the default of each field; `???`: no default, `None`: a default that no configuration can state."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        value: Any = "???"
        if field.default is not dataclasses.MISSING:
            value = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        try:
            OmegaConf.create({"value": value})
        except OmegaConfBaseException:
            value = None
        values[field.name] = value
    return values
