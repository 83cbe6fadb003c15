"""Overrides of wrappers, whose keys are paths of classes: by the path, or by the name of the class alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from maze.cli.errors import UsageError, suggestion
from maze.core.errors import ConfigError

SECTION = "wrappers"


def split_wrapper_path(keys: Sequence[str], configured: Iterable[str]) -> list[str]:
    """The key of a wrapper, and the keys within its arguments.

    :param keys: What follows `wrappers` in the path of an override, split at its dots.
    :param configured: Keys of the wrappers that are configured. The name of a class stands for the one whose path ends
        with it.
    :raises ConfigError: The name stands for several of them.
    """
    configured = list(configured)
    for n_keys in range(len(keys), 0, -1):
        if ".".join(keys[:n_keys]) in configured:
            return [".".join(keys[:n_keys]), *keys[n_keys:]]
    n_keys = next((number for number, key in enumerate(keys, start=1) if key[:1].isupper()), 1)
    named = [key for key in configured if n_keys == 1 and short_name(key) == keys[0]]
    if len(named) > 1:
        raise ConfigError(f"{SECTION}.{keys[0]}: may be any of {', '.join(named)}; write the path.")
    return [*(named or [".".join(keys[:n_keys])]), *keys[n_keys:]]


def short_name(key: str) -> str:
    """What a wrapper is called on the command line: its class."""
    return key.rpartition(".")[2]


def changed_wrappers(wrappers: Any, changes: Mapping[str, Any]) -> Any:
    """Wrappers with other arguments, and further ones behind them.

    :param wrappers: A mapping from class to arguments, or a list of such.
    :param changes: Arguments by the class or its name.
    """
    if not isinstance(wrappers, Mapping):
        return [*wrappers, dict(changes)]
    result = dict(wrappers)
    for name, arguments in changes.items():
        key = split_wrapper_path(str(name).split("."), wrappers)[0]
        result[key] = OmegaConf.to_container(OmegaConf.merge(result.get(key) or {}, arguments or {}))
    return result


@contextmanager
def wrappers_by_name() -> Iterator[None]:
    """Context in which Hydra's overrides find wrappers by their class.

    Hydra splits the path of an override at its dots; that it calls a function of its own for applying overrides is the
    only place where keys with dots can be told apart.
    """
    applied_by_hydra = ConfigLoaderImpl._apply_overrides_to_config

    def apply(overrides: list[Override], cfg: DictConfig) -> None:
        for override in overrides:
            if not _apply_to_wrappers(override, cfg):
                applied_by_hydra([override], cfg)

    def _apply_to_wrappers(override: Override, cfg: DictConfig) -> bool:
        section, _, path = override.key_or_group.partition(".")
        wrappers = cfg.get(section) if section == SECTION else None
        if not path or not isinstance(wrappers, DictConfig):
            return False
        key, *inner = split_wrapper_path(path.split("."), map(str, wrappers))
        if key not in wrappers and not (override.is_add() or override.is_force_add()):
            names = [short_name(str(known)) for known in wrappers]
            addition = "" if override.is_delete() else f" To add a wrapper, write +{SECTION}.{path}=<value>."
            raise UsageError(
                f"{SECTION}.{key}: no such wrapper is configured.{suggestion(short_name(key), names)}{addition}"
            )
        if override.is_delete() and not inner:
            with open_dict(wrappers):
                del wrappers[key]
            return True
        bracketed = ".".join([f"{SECTION}[{key}]", *inner])
        applied_by_hydra([dataclasses.replace(override, key_or_group=bracketed)], cfg)
        return True

    ConfigLoaderImpl._apply_overrides_to_config = staticmethod(apply)  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConfigLoaderImpl._apply_overrides_to_config = staticmethod(applied_by_hydra)  # type: ignore[method-assign]
