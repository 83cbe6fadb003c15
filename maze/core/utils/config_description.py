"""Readable descriptions of configurations with objects."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maze.core.utils.factory import TARGET_KEY
from maze.core.utils.targets import path_of

LAYERS_KEY = "_layers_"
"""Key of the printed layers of a network."""

_SIMPLE = (numbers.Number, str, Path)
_MAX_DEPTH = 6
"""Largest depth of the description of an object; containers of the configuration have no limit."""
_MAX_ITEMS = 50
_NOTHING = object()


def config_to_yaml(config: Any, sort_keys: bool = False) -> str:
    """Format a configuration as YAML, without resolving interpolations; objects are described by class and arguments.

    :param config: Configuration of OmegaConf, or a mapping.
    :param sort_keys: Whether to sort keys.
    """
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(config) if OmegaConf.is_config(config) else config
    return OmegaConf.to_yaml(OmegaConf.create(describe(plain)), sort_keys=sort_keys)


def describe(value: Any) -> Any:
    """Describe any value as plain data: objects become mappings with `_target_` and the arguments that they store.

    An object can be built from its description if it stores all its arguments and its class can be imported.
    """
    return _described(value, _MAX_DEPTH, ())


def _described(value: Any, depth: int, parents: tuple[int, ...]) -> Any:
    if isinstance(value, type):
        return path_of(value)
    if value is None or isinstance(value, _SIMPLE):
        plain: Any = value
        plain = plain.item() if hasattr(plain, "item") else plain  # numbers of NumPy are subclasses of Python's
        return plain if plain is None or isinstance(plain, int | float | str) else str(plain)
    if depth == 0 or id(value) in parents:
        return f"<{path_of(type(value))}>"
    inner = (*parents, id(value))
    below = depth if depth == _MAX_DEPTH else depth - 1  # not inside of an object
    if isinstance(value, Mapping):
        entries = list(value.items())[:_MAX_ITEMS]
        return {_key(key): _described(entry, below, inner) for key, entry in entries}
    if isinstance(value, list | tuple | set | frozenset):
        return [_described(entry, below, inner) for entry in list(value)[:_MAX_ITEMS]]
    return {key: _described(entry, depth - 1, inner) for key, entry in _target_and_arguments(value).items()}


def _target_and_arguments(value: Any) -> dict[str, Any]:
    if isinstance(value, functools.partial):
        arguments = {"_args_": list(value.args)} if value.args else {}
        return {**_target_and_arguments(value.func), "_partial_": True, **arguments, **value.keywords}
    if inspect.isroutine(value):
        return {TARGET_KEY: path_of(value)}
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return {TARGET_KEY: path_of(type(value)), **fields}
    if any(base.__module__ == "torch.nn.modules.module" for base in type(value).__mro__):
        return {TARGET_KEY: path_of(type(value)), LAYERS_KEY: str(value).splitlines()}
    return {TARGET_KEY: path_of(type(value)), **_kept_arguments(value)}


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
    return path_of(key) if isinstance(key, type) else str(key)
