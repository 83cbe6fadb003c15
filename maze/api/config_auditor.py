"""Checks of the arguments of a RunContext before its configuration is composed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra.plugins.launcher import Launcher

from maze.api.placing import is_plain
from maze.api.utils import InvalidSpecificationError
from maze.cli.algorithms import TARGET, option_of
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
        if isinstance(self.overrides.get(TARGET), str) and "algorithm" not in self.kwargs:
            self.kwargs["algorithm"] = self.algorithm_name({TARGET_KEY: self.overrides.pop(TARGET)})
        for name, value in self.kwargs.items():
            for choice in self._choices(name, value):
                _check_component(name, choice)
        self._check_contradictions()
        algorithms = self._choices("algorithm", self.kwargs.get("algorithm"))
        names = [self.algorithm_name(one) for one in algorithms if one is not None and not isinstance(one, str)]
        self.ephemeral_init_kwargs = {"algorithm": names[-1]} if names else {}

    def _choices(self, name: str, value: Any) -> list[Any]:
        """Return the values of a component for all runs; one value unless `multirun`."""
        is_list = isinstance(value, list | tuple)
        if not is_list or (name == "wrappers" and not self.multirun):
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
            raise InvalidSpecificationError("launcher: starts the runs of a multirun. Pass multirun=True.")
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
    if isinstance(value, str):
        return
    if isinstance(value, Mapping):
        if name == "algorithm":
            _algorithm_class(value)
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
    known = algorithm_class(algorithm)
    if known is None:
        raise InvalidSpecificationError(
            f"algorithm: expected `{TARGET_KEY}`, the path of a configuration class, in the mapping, found the keys "
            f"{sorted(map(str, algorithm))}. Or pass a name, and overrides such as {{'algorithm.lr': 0.001}}."
        )
    return known
