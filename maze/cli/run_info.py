"""Files that make a run repeatable: command, configuration, versions. Writing, reading, and finding runs."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from maze.cli.errors import UsageError
from maze.cli.hydra_setup import as_written
from maze.core.utils.config_utils import config_to_yaml
from maze.core.utils.files import write_whole
from maze.utils.process import version_of

PACKAGES = ("maze-rl", "torch", "numpy", "gymnasium", "hydra-core", "omegaconf", "pandas", "tensorboard", "ray")

CONFIG_FILE = "hydra_config.yaml"
COMMAND_FILE = "command.txt"
VERSIONS_FILE = "versions.json"
HYDRA_CONFIG = Path(".hydra") / "config.yaml"
_RUN_FILES = (HYDRA_CONFIG.as_posix(), CONFIG_FILE, COMMAND_FILE)


def command_line(arguments: Sequence[str]) -> str:
    """Return the command as text for a shell."""
    return shlex.join(["maze-run", *as_written(arguments)])


def git_state(directory: Path) -> dict[str, Any] | None:
    """Return commit, branch and whether files differ from the commit; None outside a repository or without git."""
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        result = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = result.stdout.splitlines()
    facts = dict(line.split()[1:3] for line in lines if line.startswith("#"))
    is_dirty = any(not line.startswith("#") for line in lines)
    return {"commit": facts.get("branch.oid"), "branch": facts.get("branch.head"), "dirty": is_dirty}


def installed_versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that influence results; None: not installed."""
    own = {"python": platform.python_version(), "platform": platform.platform()}
    return {**own, **{package: version_of(package) for package in PACKAGES}}


def config_as_yaml(cfg: DictConfig) -> str:
    """Return the composed configuration as YAML, interpolations unresolved, sorted by keys.

    Objects among its values are described by class and arguments.
    """
    return config_to_yaml(cfg, sort_keys=True)


def write_run_info(
    directory: Path,
    cfg: DictConfig,
    project: Path,
    arguments: Sequence[str] | None = None,
    taken_over: Sequence[str] = (),
) -> None:
    """Write configuration, command and versions into a run directory.

    :param project: Working directory of the command; its git state is recorded.
    :param arguments: Arguments of the command; those of this process by default.
    :param taken_over: Sections from an earlier run, which differ from Hydra's composition.
    """
    command = command_line(sys.argv[1:] if arguments is None else arguments)
    versions = {"versions": installed_versions(), "git": git_state(project)}
    for name, text in (
        (CONFIG_FILE, config_as_yaml(cfg)),
        (COMMAND_FILE, command + "\n"),
        (VERSIONS_FILE, json.dumps(versions, indent=2) + "\n"),
    ):
        write_whole(directory / name, text)
    _correct(directory / ".hydra" / "config.yaml", cfg, taken_over)


def _correct(file: Path, cfg: DictConfig, taken_over: Sequence[str]) -> None:
    """Correct Hydra's files, from which policy and environment are built again.

    They receive the sections of an earlier run, the distributions of the algorithm, and the overrides as written.
    """
    overrides = file.with_name("overrides.yaml")
    if overrides.is_file() and "$" in (text := overrides.read_text(encoding="utf-8")):
        write_whole(overrides, OmegaConf.to_yaml(as_written(yaml.safe_load(text))))
    stored = OmegaConf.load(file) if file.is_file() else None
    if not isinstance(stored, DictConfig):
        return
    is_right = not taken_over
    for section in taken_over:
        stored[section] = cfg[section]
    if stored.get("model") and isinstance(cfg.get("model"), DictConfig):
        wanted = cfg.model.get("distribution_mapper_config")
        is_right &= stored.model.get("distribution_mapper_config") == wanted
        stored.model.distribution_mapper_config = wanted
    if not is_right:
        write_whole(file, OmegaConf.to_yaml(stored))


def text_of(path: Path) -> str:
    """Return the stripped content of a text file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def stored_arguments(directory: Path) -> list[str]:
    """Return the arguments of a run's command; empty if they cannot be read."""
    try:
        return shlex.split(text_of(directory / COMMAND_FILE))[1:]
    except ValueError:
        return []


def shown_path(path: Path, project: Path) -> Path:
    """Return a path relative to the working directory of the command, if it lies below it."""
    path = path.absolute()
    return path.relative_to(project) if path.is_relative_to(project) else path


# -- finding a run -----------------------------------------------------------------------------------------------------


def find_run(path: Path, flag: str = "--info") -> Path:
    """Return the directory of a run.

    :raises UsageError: It is not a directory of a run.
    """
    if is_run(path):
        return path
    raise UsageError(
        f"{flag}: {path} is not the directory of a run. Expected a directory written by maze-run, with "
        f"{', '.join(_RUN_FILES)}, such as outputs/<name>/<time>; maze-run --runs lists them."
    )


def is_run(directory: Path) -> bool:
    """Return whether it is the directory of a training run, a rollout or another job."""
    return directory.is_dir() and any((directory / name).is_file() for name in _RUN_FILES)
