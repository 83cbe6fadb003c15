"""The directory of a run: never shared with another run, and removed if the run had no results."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from maze.cli.hydra_setup import GATE, RunFailedError, apply_overrides, as_written, hydra_config, set_gate_status
from maze.cli.sweeps.results import has_study
from maze.core.errors import ConfigError
from maze.core.utils.config_utils import gym_env_defaults
from maze.core.utils.files import Store, Uploads, is_url, working_directory
from maze.core.utils.stored_config import STORED_CONFIG, chosen_options, read_plain_yaml

CLAIM = ".hydra"
"""Hydra's subdirectory, created exclusively: the run that creates it owns the directory around it."""

# Parts of the configuration that name runs.
_USES = ("input_dir", "policy", "policies", *GATE)

WORTHLESS = (
    "hydra_config.yaml",
    "model.yaml",
    "command.txt",
    "versions.json",
    "run.json",
    "progress.csv",
    "report.html",
    "maze_cli.log",
    "multirun.yaml",
    "spaces_config.pkl",
    "*.pdf",
    ".maze-unfinished-*",
    "events.out.tfevents.*",
)
"""Files that a run writes before it has results."""

_claimed: ContextVar[list[ClaimedDirectory] | None] = ContextVar("maze_claimed_directories", default=None)


@dataclass(frozen=True)
class ClaimedDirectory:
    """A directory that belongs to one run."""

    path: Path
    created: tuple[Path, ...] = ()
    """The directory and its parents, as far as the claim created them; innermost first."""
    store: Store | None = None
    """Shared storage to which its files are uploaded."""

    def remove_if_worthless(self) -> bool:
        """Remove a directory that the claim created, unless it holds results of its run.

        :return: Whether it was removed.
        """
        if not self.created or has_results(self.path):
            return False
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # they hold directories of other runs
            for path in self.created[1:]:
                path.rmdir()
        return True


def has_results(directory: Path) -> bool:
    """Return whether the directory of a run has files beyond those that it writes before it has results."""
    patterns = (f"{CLAIM}/*", *WORTHLESS)
    files = (path for path in directory.rglob("*") if not path.is_dir())
    return not all(any(path.match(pattern) for pattern in patterns) for path in files)


def claim_directory(requested: Path, continues: bool = False) -> ClaimedDirectory:
    """Create a directory that no other run uses or has used.

    :param requested: Used if it is free; else `_02`, `_03`, ... is appended, which keeps names sorted by time.
    :param continues: Use it even if an earlier run has used it, which is continued.
    :raises ConfigError: It holds a run already, is a file, or cannot be created.
    """
    requested = requested.absolute()
    for number in itertools.count(1):
        directory = requested if number == 1 else requested.with_name(f"{requested.name}_{number:02d}")
        created = tuple(path for path in (directory, *directory.parents) if not path.exists())
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / CLAIM).mkdir(exist_ok=continues)
        except FileExistsError:
            if Path.cwd().is_relative_to(directory):
                raise ConfigError(
                    f"hydra.run.dir: {directory} holds an earlier run (its {CLAIM} exists). "
                    f"Choose another directory, or remove hydra.run.dir."
                ) from None
            if not directory.is_dir():
                raise ConfigError(f"{directory} is a file, expected a directory for the run. Choose another.") from None
        except OSError as error:
            raise ConfigError(
                f"Cannot create the run directory {directory}: {error.strerror}. "
                f"Choose another directory with log_base_dir=<directory> or hydra.run.dir=<directory>."
            ) from error
        else:
            return ClaimedDirectory(directory, created)
    raise AssertionError("unreachable")


def uploads_of_run(directory: Path) -> Uploads | None:
    """Return the uploads of a run in a claimed directory; `None`: its files are not uploaded."""
    stores = [claimed.store for claimed in _claimed.get() or () if claimed.path == directory]
    return Uploads(directory, stores[0]) if stores and stores[0] is not None else None


@contextmanager
def claimed_directories() -> Iterator[list[ClaimedDirectory]]:
    """Return a context that records the directories claimed in it."""
    directories: list[ClaimedDirectory] = []
    token = _claimed.set(directories)
    try:
        yield directories
    finally:
        _claimed.reset(token)


def _announce(config: DictConfig) -> None:
    """Print the chosen options before the imports and the checks of the run, which take seconds."""
    if config.get("verbose") == 0:
        return
    chosen = _named_options(config)
    groups = [f"{name}={chosen[name]}" for name in ("env", "algorithm", "policy", "runner") if chosen.get(name)]
    print(f"-> starting {' '.join(['-cn', str(config.hydra.job.config_name), *groups])}", flush=True)


class RunDirectoryCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Claim `hydra.run.dir` or `hydra.sweep.dir` before Hydra creates it, after the choices that it is named after."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._apply_overrides(config)
        _announce(config)
        if "algorithm" in config:
            from maze.cli.checks import choose_critic

            choose_critic(config)
        self._claim(config, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._apply_overrides(config)
        self._claim(config, "hydra.sweep.dir", is_resumable=has_study)

    @staticmethod
    def _apply_overrides(config: DictConfig) -> None:
        config.hydra.overrides.task = as_written(config.hydra.overrides.task)
        try:
            apply_overrides(config)
        except (ConfigError, HydraException) as error:
            raise RunFailedError from error

    @staticmethod
    def _claim(config: DictConfig, key: str, is_resumable: Callable[[Path], bool] | None = None) -> None:
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.runtime.choices.update(_named_options(config))
        try:
            with hydra_config(config):  # the names contain ${hydra:...}
                named = str(OmegaConf.select(config, key))
                base = Path(str(config.get("log_base_dir") or "outputs"))
            store = Store(named, key) if is_url(named) else None
            if store is not None and is_resumable is not None:
                raise ConfigError(f"{key}: expected a directory that all jobs of the sweep share, found {named}.")
            if store is not None:
                store.require_free()
            requested = (Path(named) if store is None else working_directory(named, base)).absolute()
            is_resumed = is_resumable is not None and is_resumable(requested)
            # a resumed sweep keeps its directory; its journal is locked as long as it runs
            directory = replace(claim_directory(requested, is_resumed), store=store)
        except ConfigError as error:
            set_gate_status(error, config)
            raise RunFailedError from error
        with read_write(config.hydra), open_dict(config.hydra):
            OmegaConf.update(config, key, str(directory.path))
        if (directories := _claimed.get()) is not None and not is_resumed:
            directories.append(directory)


def _named_options(config: DictConfig) -> dict[str, Any]:
    """Return the chosen options by group; the user's classes `env._target_` and `policy._target_` replace theirs.

    A command that names no environment has that of the first run that it uses.
    """
    chosen = dict(config.hydra.runtime.choices)
    texts = [text.lstrip("+") for text in config.hydra.overrides.task]
    is_own = any(text.startswith(("policy._target_=", "policy={")) for text in texts)
    own = {"policy": config.policy._target_.rpartition(".")[2]} if is_own else {}
    option = environment_option(chosen.get("env"), config.get("env"))
    if not any(text.startswith(("env=", "env@", "env._target_=", "env.name=", "experiment=")) for text in texts):
        places = [*_texts_in([config.get(key) for key in _USES])]
        for recorded in map(Path, _texts_in(config.get("trajectory_data"))):  # a rollout, or a directory or file in it
            places += map(str, (recorded, *recorded.parents[:2]))
        option = next(filter(None, map(_environment_of, places)), option)
    return {**chosen, "env": option, **own}


def _texts_in(node: Any) -> Iterator[str]:
    """Yield the texts in a configuration, at any depth."""
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node)
    if isinstance(node, str):
        yield node
    for entry in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _texts_in(entry)


def _environment_of(place: str) -> str | None:
    """Return the option or the class of the environment of a run; `None`: there is no such run, or it has no name."""
    config = Path(place) / STORED_CONFIG
    if not os.path.isfile(config):  # false for texts that cannot be paths
        return None
    name = str(environment_option(chosen_options(Path(place)).get("env"), read_plain_yaml(config).get("env")))
    return name if name.isidentifier() else None  # a stored text may be a path


def environment_option(option: Any, env: Any) -> Any:
    """Return the chosen option of the group `env`, or the name of the user's class `env._target_` that replaces it.

    :param option: The option.
    :param env: The section `env` of the configuration.
    """
    target = env.get("_target_") if isinstance(env, Mapping) else None
    is_own = option == "gym_env" and target not in (None, gym_env_defaults()["_target_"])
    return str(target).rpartition(".")[2] if is_own else option
