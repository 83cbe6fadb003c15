"""Setup of Hydra: search path of configurations, importable modules, default sweeper, text of values."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

from maze.core.utils.stored_config import is_importable

_BARE_TEXT = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)
_NAME = re.compile(r"(?<![\w./-])([^\W\d]\w*)")
_FIRST_OF_PATH = re.compile(_NAME.pattern + r"\.[^\W\d]")
_NAMES_PACKAGES = re.compile(r"\+*(trusted_packages|env\.import)=")
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
    """Return the packages among them that can be imported."""
    _make_tutorial_importable()
    return [package for package in ENVIRONMENT_CONFIGS if is_importable(package)]


def _make_tutorial_importable() -> None:
    """In a checkout of the project, make the tutorial importable from `tutorials`, beside this package."""
    tutorials = Path(__file__).resolve().parents[2] / "tutorials"
    if not is_importable("tutorial_maze_env") and (tutorials / "tutorial_maze_env").is_dir():
        sys.path.append(str(tutorials))


@contextmanager
def project_importable(arguments: Sequence[str], trusted: Sequence[str] = ()) -> Iterator[None]:
    """Context in which modules of the working directory can be imported, if the command names or trusts one of them.

    Otherwise they are not importable: the working directory may come from an untrusted source.

    :param arguments: Arguments of the command.
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
    sys.path.append(str(project))  # last: installed packages take precedence
    try:
        yield
    finally:
        sys.path.remove(str(project))


GROUP, NAME = "hydra/sweeper", "basic"


@contextmanager
def grid_by_default() -> Iterator[None]:
    """Context in which `hydra/sweeper=basic`, Hydra's default, is the grid search of Maze.

    A root configuration cannot choose it with `override hydra/sweeper`, which would take precedence over the choice of
    an experiment. Other applications in the same environment keep Hydra's sweeper.
    """
    Plugins.instance()  # plugins are registered by the first search; before one is replaced
    group = ConfigStore.instance().repo["hydra"]["sweeper"]
    previous = group[f"{NAME}.yaml"]
    grid = resources.files("maze.conf") / "hydra" / "sweeper" / "grid.yaml"
    node = OmegaConf.create(grid.read_text(encoding="utf-8"))
    ConfigStore.instance().store(group=GROUP, name=NAME, node=node, provider="maze")
    try:
        yield
    finally:
        group[f"{NAME}.yaml"] = previous


def value_text(value: Any) -> str:
    """Return a value as written in an override: numbers, texts, paths, None, lists and mappings of these."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        text = str(value)
        return text if _is_bare(text) else QuotedString(text=text, quote=Quote.single).with_quotes()
    if isinstance(value, Mapping):
        items = (f"{key if _is_bare(str(key)) else value_text(str(key))}:{value_text(it)}" for key, it in value.items())
        return "{" + ",".join(items) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(map(value_text, value)) + "]"
    return "null" if value is None else str(value)


def _is_bare(text: str) -> bool:
    return _BARE_TEXT.fullmatch(text) is not None and text.lower() not in _KEYWORDS
