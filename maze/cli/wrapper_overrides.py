"""Overrides of wrappers. Their keys are paths of classes; an override names the path or the class alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from maze.cli.errors import UsageError, suggestion
from maze.core.errors import ConfigError

SECTION = "wrappers"
_MARKS = {"": "$", "~": "$-", "+": "$$"}
"""Prefix of a packed key for each kind of override: change, remove, add."""
_OVERRIDE = re.compile(rf"^(?P<sign>[+~]*){SECTION}\.(?P<path>[\w.-]+)(?P<value>(=.*)?)$", re.DOTALL)
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
    """Return arguments in which the path below `wrappers` is one key.

    Hydra splits keys at their dots, and keys of wrappers have dots. :func:`apply_overrides` unpacks them.

    :param arguments: Overrides, and other arguments of a command.
    """
    return [_OVERRIDE.sub(_packed, argument) for argument in arguments]


def as_written(arguments: Iterable[str]) -> list[str]:
    """Return arguments as they were before :func:`for_hydra`."""
    return [_PACKED.sub(_unpacked, argument) for argument in arguments]


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
