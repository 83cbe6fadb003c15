"""Commands that go on with what a run has left behind."""

from __future__ import annotations

import re
import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from maze.cli.hydra_setup import value_text
from maze.cli.wrapper_overrides import SECTION
from maze.core.errors import ConfigError
from maze.core.utils.config_utils import read_hydra_config

_DIRECTORY_FLAGS = ("-cd", "--config-dir")
_ADDRESSABLE = re.compile(r"^[\w-]+$")
_CLASS_PATH = re.compile(r"^([a-z_]\w*\.)*[A-Z]\w*$")
"""What an override of wrappers takes for one key, dots and all."""


def again_command(arguments: Sequence[str]) -> str:
    """Does the same in another directory.

    :param arguments: Of the command that wrote into this one.
    """
    return shlex.join(["maze-run", *(each for each in arguments if not each.startswith("hydra.run.dir="))])


def resume_command(
    arguments: Sequence[str], cfg: Container[str], directory: Path, n_finished_epochs: int | None = None
) -> str:
    """Goes on with a training where it stopped.

    :param arguments: Of the command that started it.
    :param cfg: Its configuration.
    :param directory: Its directory.
    :param n_finished_epochs: Length of a training that came to its end, which goes on for as many epochs again.
    """
    dropped = ["hydra.run.dir=", "input_dir=", "resume=", "+resume=", "seeding."]
    added = [f"input_dir={directory}", "resume=true" if "resume" in cfg else "+resume=true"]
    if n_finished_epochs:
        dropped.append("algorithm.n_epochs=")
        added.append(f"algorithm.n_epochs={2 * n_finished_epochs}")
    kept = [argument for argument in arguments if not argument.startswith(tuple(dropped))]
    return shlex.join(["maze-run", *kept, *added])


def rollout_command(
    arguments: Sequence[str], cfg: DictConfig, choices: Mapping[str, Any], directory: Path
) -> tuple[str, str | None]:
    """Rolls the trained policy out in the environment it was trained in.

    :param arguments: Of the command that started the training.
    :param cfg: Its configuration.
    :param choices: The chosen option of each group.
    :param directory: Its directory.
    :return: The command, and what it does not cover.
    """
    chosen = {group: choices[group] for group in ("env", "wrappers") if choices.get(group)}
    flags = list(_config_directories(arguments))
    default = _default_configuration(chosen)
    parts = ["maze-run", *flags]
    note = None
    for group in ("env", "wrappers"):
        section = _plain(cfg, group)
        if group in chosen:
            parts.append(f"{group}={chosen[group]}")
        overrides = list(_overrides(group, section, None if default is None else _plain(default, group)))
        parts += [text for text in overrides if text is not None]
        if None in overrides:
            note = f"its {group} differ from {group}={chosen.get(group)}: see {group} in its hydra_config.yaml"
    return shlex.join([*parts, "policy=torch_policy", f"input_dir={directory}"]), note


def _config_directories(arguments: Sequence[str]) -> Iterator[str]:
    for position, argument in enumerate(arguments):
        if argument in _DIRECTORY_FLAGS and position + 1 < len(arguments):
            yield from (argument, str(Path(arguments[position + 1])))
        elif argument.startswith(tuple(f"{flag}=" for flag in _DIRECTORY_FLAGS)):
            yield argument


def _default_configuration(chosen: Mapping[str, Any]) -> DictConfig | None:
    """What a rollout with these choices starts from; None: it cannot be composed here."""
    try:
        return read_hydra_config("maze.conf", "conf_rollout", **chosen)
    except (ConfigError, OmegaConfBaseException):
        return None


def _plain(cfg: DictConfig, key: str) -> Any:
    node = OmegaConf.select(cfg, key)
    if not OmegaConf.is_config(node):
        return node
    try:
        return OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException:
        return OmegaConf.to_container(node, resolve=False)


def _overrides(prefix: str, value: Any, default: Any) -> Iterator[str | None]:
    """Overrides that turn the default into the value; None stands for what no override can express."""
    if value == default:
        return
    if isinstance(value, Mapping) and (default is None or isinstance(default, Mapping)):
        known = default or {}
        for key in value:
            if key in known and value[key] == known[key]:
                continue
            if key == "_target_" and default is None:
                continue  # comes with the choice of the group
            if not _is_addressable(prefix, str(key)):
                yield None
                continue
            sign = "" if key in known or default is None else "+"
            if isinstance(value[key], Mapping) and isinstance(known.get(key), Mapping):
                yield from _overrides(f"{prefix}.{key}", value[key], known[key])
            else:
                yield f"{sign}{prefix}.{key}={value_text(value[key])}"
        yield from (
            f"~{prefix}.{key}" if _is_addressable(prefix, str(key)) else None for key in known if key not in value
        )
    else:
        yield None


def _is_addressable(prefix: str, key: str) -> bool:
    return bool(_ADDRESSABLE.match(key) or (prefix == SECTION and _CLASS_PATH.match(key)))
