"""The directory of a run: never shared with another run, and gone again when the run came to nothing."""

from __future__ import annotations

import itertools
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from maze.core.errors import ConfigError

CLAIM = ".hydra"
"""Hydra's subdirectory, created exclusively: whoever creates it owns the directory around it."""

WORTHLESS = (
    "hydra_config.yaml",
    "command.txt",
    "versions.json",
    "spaces_config.pkl",
    "*.pdf",
    "*.tmp",
    "events.out.tfevents.*",
)
"""What a run writes before it has achieved anything."""

_claimed: ContextVar[list[Path] | None] = ContextVar("maze_claimed_directories", default=None)


def claim_directory(requested: Path) -> Path:
    """Creates a directory that no other run uses or has used, and returns it.

    :param requested: Taken if it is free; else ``_02``, ``_03``, ... is appended, which keeps names sorted by time.
    """
    requested = requested.absolute()
    for number in itertools.count(1):
        directory = requested if number == 1 else requested.with_name(f"{requested.name}_{number:02d}")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / CLAIM).mkdir()
        except FileNotFoundError:
            # A failing run removed the directory in between; the same name is free now.
            return claim_directory(requested)
        except FileExistsError:
            if Path.cwd().is_relative_to(requested):
                raise ConfigError(
                    f"hydra.run.dir: {requested} holds an earlier run already (its {CLAIM} exists). "
                    f"Name another directory, or leave hydra.run.dir out."
                ) from None
            if not directory.is_dir():
                raise ConfigError(f"hydra.run.dir: {directory} is a file; name a directory.") from None
        except OSError as error:
            raise ConfigError(
                f"Cannot create the run directory {directory}: {error.strerror}. "
                f"Choose another place with log_base_dir=<directory>."
            ) from error
        else:
            return directory
    raise AssertionError("unreachable")


def remove_if_worthless(directory: Path) -> bool:
    """Removes a run directory, and parents it leaves empty, unless it holds something that its run achieved.

    :return: Whether it was removed.
    """
    if not directory.is_dir():
        return False
    own = directory / CLAIM
    files = [path for path in directory.rglob("*") if not path.is_dir() and own not in path.parents]
    if any(not _is_worthless(path, directory) for path in files):
        return False
    for path in files:
        path.unlink(missing_ok=True)
    # The claim goes last: as long as it is there, nobody else moves in.
    for path in sorted(directory.rglob("*"), key=lambda path: (own == path, -len(path.parts))):
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    for path in (directory, directory.parent, directory.parent.parent):
        try:
            path.rmdir()
        except OSError:
            break  # somebody else's files are in it
    return True


def _is_worthless(path: Path, directory: Path) -> bool:
    # In the directory itself or, for the jobs of a sweep, in one of its numbered subdirectories.
    return len(path.relative_to(directory).parts) <= 3 and (
        any(path.match(pattern) for pattern in WORTHLESS) or path.parent.name == CLAIM
    )


class ClaimedDirectories:
    """Context that knows which directories were claimed in it."""

    def __init__(self) -> None:
        self.directories: list[Path] = []

    def __enter__(self) -> ClaimedDirectories:
        self._token = _claimed.set(self.directories)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _claimed.reset(self._token)

    def remove_worthless(self) -> None:
        """Removes those in which nothing was achieved."""
        for directory in self.directories:
            remove_if_worthless(directory)


class RunDirectoryCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Claims ``hydra.run.dir`` or ``hydra.sweep.dir`` before Hydra creates it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._claim(config, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._claim(config, "hydra.sweep.dir")

    @staticmethod
    def _claim(config: DictConfig, key: str) -> None:
        hydra_config = HydraConfig.instance()
        previous = hydra_config.cfg
        hydra_config.set_config(config)  # the names contain ${hydra:...}
        try:
            directory = claim_directory(Path(str(OmegaConf.select(config, key))))
        finally:
            hydra_config.cfg = previous
        with read_write(config.hydra), open_dict(config.hydra):
            OmegaConf.update(config, key, str(directory))
        directories = _claimed.get()
        if directories is not None:
            directories.append(directory)
