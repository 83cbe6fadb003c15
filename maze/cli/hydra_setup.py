"""What Hydra is told: where configurations of environments are found, and what `--multirun` does."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from maze.core.utils.stored_config import is_importable

_BARE_TEXT = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)
_NAME = re.compile(r"(?<![\w./-])([^\W\d]\w*)")
_FIRST_OF_PATH = re.compile(_NAME.pattern + r"\.[^\W\d]")
_NAMES_PACKAGES = re.compile(r"\+*(trusted_packages|env\.import)=")
_IS_RUN = "hydra.mode=RUN"
"""What Hydra adds to the overrides of a command that is no sweep."""
_KEYWORDS = ("null", "true", "false", "nan", "inf")

ENVIRONMENT_CONFIGS = (
    "maze_envs.inventory.conf",
    "maze_envs.logistics.cutting_2d.conf",
    "maze_envs.logistics.dispatching.conf",
    "maze_envs.memory.conf",
    "maze_envs.packing.conf",
    "maze_envs.queueing.conf",
    "maze_envs.robotics.pick_and_place.conf",
    "maze_envs.scheduling.conf",
    "tutorial_maze_env.part03_maze_env.conf",
    "tutorial_maze_env.part04_events.conf",
    "tutorial_maze_env.part06_struct_env.conf",
)


def environment_configs() -> list[str]:
    """The packages among them that can be imported."""
    _make_tutorial_importable()
    return [package for package in ENVIRONMENT_CONFIGS if is_importable(package)]


def _make_tutorial_importable() -> None:
    """In a checkout of the project, has the tutorial found where it lies: beside this package, in `tutorials`."""
    tutorials = Path(__file__).resolve().parents[2] / "tutorials"
    if not is_importable("tutorial_maze_env") and (tutorials / "tutorial_maze_env").is_dir():
        sys.path.append(str(tutorials))


@contextmanager
def project_importable(arguments: Sequence[str], trusted: Sequence[str] = ()) -> Iterator[None]:
    """Context in which modules of the working directory can be imported, if the command names or trusts one.

    Otherwise they cannot: the working directory may come from an untrusted source.

    :param arguments: The command's.
    :param trusted: Packages that it trusts.
    """
    project = Path.cwd()
    named = (
        name
        for argument in arguments
        for pattern in (_FIRST_OF_PATH, *((_NAME,) if _NAMES_PACKAGES.match(argument) else ()))
        for name in pattern.findall(argument.partition("=")[2])
    )
    lies_here = (
        (project / f"{name}.py").is_file() or (project / name / "__init__.py").is_file() for name in (*trusted, *named)
    )
    if not any(lies_here):
        yield
        return
    sys.path.append(str(project))  # last: what is installed is found first
    try:
        yield
    finally:
        sys.path.remove(str(project))


GROUP, NAME = "hydra/sweeper", "basic"


@contextmanager
def grid_by_default() -> Iterator[None]:
    """Has `hydra/sweeper=basic`, Hydra's default, mean the grid search of Maze.

    A root configuration cannot choose it with `override hydra/sweeper`: that would win over the choice of an
    experiment. Only the command of Maze is concerned; other applications in the same environment keep Hydra's.
    """
    Plugins.instance()  # plugins register themselves when they are first looked for; here, before one is replaced
    group = ConfigStore.instance().repo["hydra"]["sweeper"]
    previous = group[f"{NAME}.yaml"]
    grid = resources.files("maze.conf") / "hydra" / "sweeper" / "grid.yaml"
    node = OmegaConf.create(grid.read_text(encoding="utf-8"))
    ConfigStore.instance().store(group=GROUP, name=NAME, node=node, provider="maze")
    try:
        yield
    finally:
        group[f"{NAME}.yaml"] = previous


@contextmanager
def composed_once() -> Iterator[None]:
    """Has Hydra compose the configuration of a run once.

    It composes to find out whether the command is a sweep, throws that away, and composes the same again. Here it
    composes for a run at once, and only where the command turns out to be something else a second time.
    """
    composed_by_hydra = ConfigLoaderImpl.load_configuration
    of_run: list[tuple[str | None, list[str], DictConfig | Exception]] = []

    def load(
        loader: ConfigLoaderImpl,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        if not validate_sweep_overrides:  # only where it looks for the mode
            try:
                found = composed_by_hydra(loader, config_name, overrides, RunMode.RUN, from_shell)
            except Exception as error:
                of_run[:] = [(config_name, list(overrides), error)]
            else:
                of_run[:] = [(config_name, list(overrides), found)]
                return found
        elif run_mode == RunMode.RUN and of_run:
            name, command, composed = of_run.pop()
            added = overrides[len(command) :]
            if name == config_name and overrides == command + added and added in ([], [_IS_RUN]):
                if isinstance(composed, Exception):
                    raise composed
                with read_write(composed.hydra):
                    composed.hydra.mode = RunMode.RUN
                    composed.hydra.overrides.hydra += added
                return composed
        return composed_by_hydra(loader, config_name, overrides, run_mode, from_shell, validate_sweep_overrides)

    ConfigLoaderImpl.load_configuration = load  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        ConfigLoaderImpl.load_configuration = composed_by_hydra  # type: ignore[method-assign]


def value_text(value: Any) -> str:
    """Returns a value as written in an override: numbers, texts, paths, nothing, lists and mappings of them."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        text = str(value)
        value = text if _is_bare(text) else QuotedString(text=text, quote=Quote.single)
    elif isinstance(value, Mapping):
        items = (f"{key if _is_bare(str(key)) else value_text(str(key))}:{value_text(it)}" for key, it in value.items())
        return "{" + ",".join(items) + "}"
    elif isinstance(value, Sequence):
        return "[" + ",".join(map(value_text, value)) + "]"
    return str(Override._get_value_element_as_str(value))


def _is_bare(text: str) -> bool:
    return _BARE_TEXT.fullmatch(text) is not None and text.lower() not in _KEYWORDS
