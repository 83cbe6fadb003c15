"""Algorithms as options of the group `algorithm`: shipped ones, and anybody's own by its configuration's class."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from maze.core.errors import ConfigError

if TYPE_CHECKING:
    from maze.train.trainers.common.config_classes import AlgorithmConfig

TARGET = "algorithm._target_"


@cache
def shipped_algorithms() -> Mapping[str, str]:
    """The path of the configuration's class, by the names of the algorithms that come with Maze."""
    import yaml

    directory = files("maze.conf") / "algorithm"
    found = sorted(file.name for file in directory.iterdir() if file.name.endswith(".yaml"))
    return {name.removesuffix(".yaml"): yaml.safe_load((directory / name).read_text())["_target_"] for name in found}


def option_of(config_class: type[AlgorithmConfig]) -> str:
    """The option of the group `algorithm` that holds the defaults of a class; there is one for every class then.

    :param config_class: Class of an algorithm's configuration.
    """
    path = f"{config_class.__module__}.{config_class.__qualname__}"
    for name, target in shipped_algorithms().items():
        if target == path:
            return name
    name = config_class.name
    if name in shipped_algorithms():
        raise ConfigError(
            f"algorithm: {config_class.__name__}.name is {name!r}, as another algorithm is called already."
        )
    from hydra.core.config_store import ConfigStore

    node = {"_target_": path, **_defaults(config_class)}
    ConfigStore.instance().store(group="algorithm", name=name, node=node, package="algorithm", provider="maze")
    return name


def with_own_algorithm(arguments: Sequence[str]) -> list[str]:
    """Arguments of a command in which an own algorithm is chosen as well, where only `algorithm._target_` names it.

    :param arguments: Overrides and flags.
    """
    targets = [text.partition("=")[2] for text in arguments if text.lstrip("+").startswith(f"{TARGET}=")]
    if not targets or "," in targets[-1]:
        return list(arguments)
    from maze.core.utils.factory import Factory
    from maze.train.trainers.common.config_classes import AlgorithmConfig

    option = option_of(Factory(AlgorithmConfig).type_from_name(targets[-1].strip("'\""), config_path=TARGET))
    is_chosen = any(text.startswith("algorithm=") for text in arguments)
    return list(arguments) if is_chosen else [*arguments, f"algorithm={option}"]


def _defaults(config_class: type[AlgorithmConfig]) -> dict[str, Any]:
    """The default of each field; `???` where there is none, `None` where no configuration can state it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

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
