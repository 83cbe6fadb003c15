"""What makes a run repeatable: its command, its configuration, the versions of everything it ran with."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from maze.core.utils.config_description import config_to_yaml
from maze.utils.process import version_of

PACKAGES = ("maze-rl", "torch", "numpy", "gymnasium", "hydra-core", "omegaconf", "pandas", "tensorboard", "ray")

CONFIG_FILE = "hydra_config.yaml"
COMMAND_FILE = "command.txt"
VERSIONS_FILE = "versions.json"


def command_line(arguments: Sequence[str]) -> str:
    """The command as it can be pasted into a shell."""
    return shlex.join(["maze-run", *arguments])


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit, branch and whether files differ from the commit; None outside a repository or without git."""

    def git(*arguments: str) -> str | None:
        try:
            result = subprocess.run(
                ["git", "--no-optional-locks", *arguments],
                cwd=directory,
                capture_output=True,
                text=True,
                timeout=5,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() if result.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {
        "commit": commit,
        "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
    }


def installed_versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that influence results; None: not installed."""
    own = {"python": platform.python_version(), "platform": platform.platform()}
    return {**own, **{package: version_of(package) for package in PACKAGES}}


def config_as_yaml(cfg: DictConfig) -> str:
    """The configuration as it was composed, interpolations unresolved, in the order of its sections' names.

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
    """Writes configuration, command and versions into a run directory.

    :param project: Where the command was started; its git state is recorded.
    :param arguments: Arguments of the command; those of this process by default.
    :param taken_over: Sections that came from an earlier run, which Hydra knows nothing of.
    """
    from maze.core.utils.files import write_whole

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
    """Has what Hydra wrote, by which policy and environment are built again later, say what was used.

    That is what came from an earlier run, and the distributions that the algorithm wants.
    """
    from maze.core.utils.files import write_whole

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
    """What a text file holds, without blanks around it; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def stored_arguments(directory: Path) -> list[str]:
    """The arguments of the command that made a run; empty where they cannot be read."""
    try:
        return shlex.split(text_of(directory / COMMAND_FILE))[1:]
    except ValueError:
        return []


def shown_path(path: Path, project: Path) -> Path:
    """A path as it is written in the directory of the command: relative where it lies below."""
    path = path.absolute()
    return path.relative_to(project) if path.is_relative_to(project) else path
