"""Checks of the arguments of a RunContext, and their insertion into composed configurations."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from hydra.plugins.launcher import Launcher
from omegaconf import AnyNode, DictConfig, ListConfig, OmegaConf, flag_override

from maze.api.utils import InvalidSpecificationError
from maze.cli.hydra_setup import ALGORITHM_TARGET, SECTION, option_of, short_name, split_wrapper_path, suggestion
from maze.core.errors import ConfigError
from maze.core.utils.config_utils import is_environment, is_vector_env, shown_value
from maze.core.utils.factory import TARGET_KEY
from maze.core.wrappers.wrapper import Wrapper
from maze.perception.models.critics.critic_composer_interface import CriticComposerInterface
from maze.perception.models.model_composer import BaseModelComposer
from maze.perception.models.policies.base_policy_composer import BasePolicyComposer
from maze.runner import Runner
from maze.train.trainers.common.config_classes import AlgorithmConfig, algorithm_class
from maze.train.trainers.common.training_runner import TrainingRunner

_OBJECTS: dict[str, type] = {
    "algorithm": AlgorithmConfig,
    "model": BaseModelComposer,
    "policy": BasePolicyComposer,
    "critic": CriticComposerInterface,
    "launcher": Launcher,
    "runner": Runner,
}


@dataclass
class ConfigurationAuditor:
    """Check the arguments of a RunContext for consistency, and prepare them for the composition.

    :param components: Arguments for the components by name; `None`: not given.
    :param values: Overrides by path.
    :param multirun: Whether lists stand for several runs.
    """

    components: Mapping[str, Any]
    values: Mapping[str, Any] | None = None
    multirun: bool = False

    kwargs: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """The components that were given."""
    overrides: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """Values and objects by their paths."""
    ephemeral_init_kwargs: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    """Names of modules for the composition of a configuration, which objects replace afterwards: the runner depends on
    the name of the algorithm."""

    def audit(self) -> None:
        """Check the arguments as far as possible without composing the configuration.

        :raises ConfigError: Names the argument, what was expected, what was found and what to do.
        """
        values: Any = {} if self.values is None else self.values
        if not isinstance(values, Mapping) or not all(isinstance(key, str) and key.strip("+~") for key in values):
            raise InvalidSpecificationError(
                f"overrides: expected a mapping from paths such as {{'algorithm.lr': 0.001}}, found {values!r}."
            )
        self.overrides = dict(values)
        self.kwargs = {name: value for name, value in self.components.items() if value is not None}
        if not isinstance(self.overrides.get("algorithm"), str | None) and "algorithm" not in self.kwargs:
            # The runner depends on it.
            self.kwargs["algorithm"] = self.overrides.pop("algorithm")
        if isinstance(self.overrides.get(ALGORITHM_TARGET), str) and "algorithm" not in self.kwargs:
            self.kwargs["algorithm"] = self.algorithm_name({TARGET_KEY: self.overrides.pop(ALGORITHM_TARGET)})
        for name, value in self.kwargs.items():
            for choice in self._choices(name, value):
                _check_component(name, choice)
        self._check_contradictions()
        algorithms = self._choices("algorithm", self.kwargs.get("algorithm"))
        names = [self.algorithm_name(one) for one in algorithms if one is not None and not isinstance(one, str)]
        self.ephemeral_init_kwargs = {"algorithm": names[-1]} if names else {}

    def _choices(self, name: str, value: Any) -> list[Any]:
        """Return the values of a component for all runs; one value unless `multirun`."""
        if not isinstance(value, list | tuple) or (name == "wrappers" and not self.multirun):
            return [value]
        if not self.multirun:
            raise InvalidSpecificationError(
                f"{name}: expected {_expected(name)}, found a list. Lists stand for several runs: pass multirun=True."
            )
        return list(value)

    def _check_contradictions(self) -> None:
        given = self.kwargs
        for name in given:
            paths = {name, f"model.{name}" if name in ("policy", "critic") else name}
            for key in self.overrides:
                if key.lstrip("+~") in paths:
                    raise InvalidSpecificationError(
                        f"{name}: given both as an argument and as overrides[{key!r}]. Leave one of them out."
                    )
        if "launcher" in given and not self.multirun:
            raise InvalidSpecificationError("launcher: expected multirun=True, because a launcher starts several runs.")
        if isinstance(given.get("wrappers"), Wrapper) and "env" in given:
            raise InvalidSpecificationError(
                f"wrappers: an instance of {type(given['wrappers']).__name__} has its own environment, which "
                "contradicts env. Pass the wrapper's class and arguments instead: wrappers={ThatWrapper: {...}}."
            )

    @property
    def objects(self) -> list[str]:
        """Paths whose values are not texts and numbers: Hydra cannot resolve paths below them."""
        paths = {"policy": ["model.policy"], "critic": ["critic", "model.critic"]}
        given = [name for name, value in self.kwargs.items() if not isinstance(value, str)]
        return [path for name in given for path in paths.get(name, [name])] + [
            path.lstrip("+") for path, value in self.overrides.items() if not is_plain(value)
        ]

    def algorithm_name(self, algorithm: Any) -> str:
        """Return the option of the group `algorithm` that fits an algorithm given as an object or a mapping."""
        try:
            config_class = _algorithm_class(algorithm)
            if isinstance(self.kwargs.get("runner"), str | None):
                TrainingRunner.trainer_for(config_class)  # raises an error if none is named
            return option_of(config_class)
        except ConfigError as error:
            raise InvalidSpecificationError(str(error)) from error


def _check_component(name: str, value: Any) -> None:
    if isinstance(value, Mapping) and name == "algorithm":
        _algorithm_class(value)
    if isinstance(value, str | Mapping):
        return
    if name == "env":
        is_fine = callable(value) or is_environment(value) or is_vector_env(value)
    elif name == "wrappers":
        is_fine = isinstance(value, Wrapper | list | tuple) or (isinstance(value, type) and issubclass(value, Wrapper))
    else:
        is_fine = isinstance(value, _OBJECTS[name])
    if not is_fine:
        hint = f" Instantiate it: {value.__name__}(...)." if isinstance(value, type) else ""
        raise InvalidSpecificationError(f"{name}: expected {_expected(name)}, found {shown_value(value)}.{hint}")


def _expected(name: str) -> str:
    if name == "env":
        return "the name of a module, a mapping, an environment, or a class or function that creates one"
    if name == "wrappers":
        return "the name of a module, or a mapping from wrappers to their arguments"
    return f"the name of a module, a mapping or an instance of {_OBJECTS[name].__name__}"


def _algorithm_class(algorithm: Any) -> type[AlgorithmConfig]:
    """Return the configuration class of an algorithm."""
    if (known := algorithm_class(algorithm)) is None:
        raise InvalidSpecificationError(
            f"algorithm: expected `{TARGET_KEY}`, the path of a configuration class, in the mapping, found the keys "
            f"{sorted(map(str, algorithm))}. Or pass a name, and overrides such as {{'algorithm.lr': 0.001}}."
        )
    return known


# Flags of OmegaConf's containers that prevent conversion and copies of objects.
_FLAGS = {"allow_objects": True, "no_deepcopy_set_nodes": True}


def is_plain(value: Any) -> bool:
    """Return whether the command line can state the value: numbers, texts, paths, None, and lists of these."""
    if isinstance(value, list | tuple):
        return all(is_plain(entry) for entry in value)
    return value is None or isinstance(value, bool | int | float | str | Path | np.integer | np.floating)


def to_node(value: Any) -> Any:
    """Return the value as a node of OmegaConf; objects are neither copied nor converted."""
    if isinstance(value, DictConfig | ListConfig):
        return copy.deepcopy(value)
    if isinstance(value, Mapping | list | tuple):
        is_list = not isinstance(value, Mapping)
        node: Any = ListConfig([None] * len(value), flags=_FLAGS) if is_list else DictConfig({}, flags=_FLAGS)
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            _insert(node, key, entry)
        return node
    if isinstance(value, np.generic):
        value = value.item()
    return AnyNode(str(value) if isinstance(value, Path) else value, flags={"allow_objects": True})


def _insert(node: DictConfig | ListConfig, key: Any, value: Any) -> None:
    """Set an entry of a container, existing or new."""
    with flag_override(node, ["struct", "readonly", "no_deepcopy_set_nodes"], [False, False, True]):
        node[key] = to_node(value)


def place(cfg: DictConfig, path: str, value: Any) -> None:
    """Set, in place, the value at a path such as `model.policy` or `algorithm.lr`.

    A mapping with `_target_` replaces the present value; one without is merged into it.

    :param cfg: Configuration, mapping or object tree to change.
    :param path: Keys with dots between them; keys may contain dots (class paths of wrappers). A leading `+` allows new
        keys.
    :param value: The value; objects are stored as they are.
    :raises InvalidSpecificationError: There is no such key.
    """
    _placed(cfg, path.lstrip("+").split("."), value, (), path)


def _placed(node: Any, keys: list[str], value: Any, before: tuple[str, ...], path: str) -> Any:
    """Set a value below a node.

    :param keys: Keys below the node.
    :param before: Keys above them.
    :param path: The path of the override.
    :return: The replacement of the node: the value if no keys are left, a changed data class, or the node.
    """
    if not keys:
        return value
    if isinstance(node, DictConfig | ListConfig):
        _place_in(node, keys, value, before, path)
        return node
    name, rest = keys[0], keys[1:]
    if is_dataclass(node) and not isinstance(node, type):
        names = [each.name for each in fields(node) if each.init]
        if name not in names:
            raise _unknown_key(name, names, before, path)
        return replace(node, **{name: _placed(getattr(node, name), rest, value, (*before, name), path)})
    where = ".".join(before)
    named = "empty" if node is None else repr(node) if is_plain(node) else f"a {type(node).__name__}"
    raise InvalidSpecificationError(
        f"overrides[{path.lstrip('+')!r}]: `{where}` is {named}, which has no `{name}` that could be overridden. "
        f"Change the object passed as `{where}`, or pass its configuration: a mapping with `{TARGET_KEY}`."
    )


def _place_in(node: DictConfig | ListConfig, keys: list[str], value: Any, before: tuple[str, ...], path: str) -> None:
    is_list = isinstance(node, ListConfig)
    known: dict[str, Any] = {str(key): key for key in (range(len(node)) if is_list else node)}
    if before == (SECTION,):
        keys = split_wrapper_path(keys, known)
    n_keys = next((number for number in range(len(keys), 0, -1) if ".".join(keys[:number]) in known), 0)
    name, rest = ".".join(keys[:n_keys]), keys[n_keys:]
    if not n_keys:
        if is_list or not path.startswith("+"):
            names = map(short_name, known) if before == (SECTION,) else known
            raise _unknown_key(keys[0], list(names), before, path)
        _insert(node, keys[0], reduce(lambda inner, key: {key: inner}, reversed(keys[1:]), value))
    elif not rest:
        _merge(node, known[name], value)
    else:
        found = node[known[name]]  # follows interpolations
        if (changed := _placed(found, rest, value, (*before, name), path)) is not found:
            _insert(node, known[name], changed)


def _merge(node: DictConfig | ListConfig, key: Any, value: Any) -> None:
    """Set an entry of a container; a mapping without `_target_` is merged into one that is there."""
    is_absent = isinstance(node, DictConfig) and key not in node
    is_referred = is_absent or OmegaConf.is_interpolation(node, key) or OmegaConf.is_missing(node, key)
    child = None if is_referred else node[key]
    if not isinstance(value, Mapping) or TARGET_KEY in value or not isinstance(child, DictConfig):
        _insert(node, key, value)
        return
    for name, entry in value.items():
        _merge(child, name, entry)


def _unknown_key(name: str, known: Sequence[str], before: tuple[str, ...], path: str) -> InvalidSpecificationError:
    where = f"`{'.'.join(before)}` has" if before else "the configuration has"
    path = path.lstrip("+")
    return InvalidSpecificationError(
        f"overrides[{path!r}]: {where} no key {name!r}.{suggestion(name, known)} To add a key, write {'+' + path!r}."
    )


def as_wrapper_configs(wrappers: Mapping[Any, Any]) -> Any:
    """Return wrappers as a configuration; classes as names need a list, since keys of configurations are texts."""
    if all(isinstance(name, str) for name in wrappers):
        return wrappers
    return [{TARGET_KEY: name, **(arguments or {})} for name, arguments in wrappers.items()]
