"""What a RunContext is built with to pick up an earlier training."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from maze.api.utils import InvalidSpecificationError
from maze.cli.run_info import chosen_options
from maze.cli.stored_model import STORED_CONFIG, stored_sections
from maze.core.errors import CheckpointError
from maze.core.utils.factory import TARGET_KEY
from maze.core.utils.stored_config import read_stored_config

_SECTIONS = ("env", "wrappers", "model")
_WEIGHTS = ("state_dict.pt", "latest.pt")
_OPTION = re.compile(r"[\w-]+(/[\w-]+)*")


def stored_arguments(run: Path, trusted_packages: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a RunContext that goes on from a training.

    :param run: Directory of the training.
    :param trusted_packages: Packages whose classes the run may name.
    :param given: Arguments that take the place of what the run was configured with.
    :raises InvalidSpecificationError: It is no directory of a training, or names what cannot be built again.
    """
    directory = run.absolute()
    if not (directory / STORED_CONFIG).is_file() or not any((directory / name).is_file() for name in _WEIGHTS):
        raise InvalidSpecificationError(
            f"load: {run} is not the directory of a training: expected {STORED_CONFIG.as_posix()} and "
            f"{_WEIGHTS[0]} in it. maze-run --runs lists the runs below outputs."
        )
    arguments = dict(given)
    wanted = [section for section in _SECTIONS if section not in given]
    if {"policy", "critic"} & set(given):
        wanted = [section for section in wanted if section != "model"]
    refer = "{0}=... as an argument of load; or name its package, "
    try:
        for section in wanted:
            arguments |= stored_sections(directory, [section], trusted_packages, refer.format(section))
        config = read_stored_config(directory / STORED_CONFIG)
    except CheckpointError as error:
        raise InvalidSpecificationError(f"load: {error}") from error
    values: dict[str, Any] = {"input_dir": str(directory)}
    if "algorithm" not in given:
        arguments["algorithm"] = _algorithm(directory)
        values |= _numbers(config, "algorithm")
    if "seeding" in config:
        values |= _numbers(config, "seeding")
    return {**arguments, "overrides": values}


def _algorithm(directory: Path) -> str:
    """The chosen option of the group; a file of a stranger may say anything else."""
    choice = chosen_options(directory).get("algorithm")
    if not isinstance(choice, str) or not _OPTION.fullmatch(choice):
        raise InvalidSpecificationError(
            f"load: {directory} does not say which algorithm it was trained with. Name it: load(..., algorithm='ppo')."
        )
    return choice


def _numbers(config: DictConfig, section: str) -> dict[str, Any]:
    """The plain values of a section by their paths: numbers and texts, nothing that is built."""
    values = OmegaConf.to_container(config[section], resolve=True) if section in config else {}
    plain = values.items() if isinstance(values, dict) else ()
    return {
        f"{section}.{key!s}": value
        for key, value in plain
        if key != TARGET_KEY and isinstance(value, bool | int | float | str)
    }
