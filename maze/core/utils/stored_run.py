"""Configurations of stored runs, which may come from untrusted sources, and the packages that the user trusts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from maze.core.errors import CheckpointError
from maze.core.utils.files import read_json_object, write_whole
from maze.core.utils.import_guard import current_guard
from maze.core.utils.stored_config import StoredConfig, read_stored_config, read_yaml, refuse_foreign_targets, texts_of

STORED_CONFIG = Path(".hydra") / "config.yaml"
_CHOICES = Path(".hydra") / "hydra.yaml"
SPACES_FILE = "spaces_config.pkl"


class DeployedParts(NamedTuple):
    """Configurations of a run's parts; file names in them are relative to the run directory."""

    env: Any
    wrappers: Any
    policy: Any


class StoredRun:
    """Reader of the configuration of a run, which builds nothing.

    The results of :meth:`sections` may be built in the context
    :func:`~maze.core.utils.import_guard.imports_guarded`.

    :param directory: The run directory.
    :param trusted_packages: Packages whose classes and functions the configuration may name, in addition to those that
        are trusted in the working directory.
    """

    def __init__(self, directory: str | Path, trusted_packages: Sequence[str] = ()) -> None:
        self.directory = Path(directory)
        self.path = self.directory / STORED_CONFIG
        self.trusted_packages = (*trusted_packages, *trusted_here())

    @cached_property
    def config(self) -> StoredConfig:
        """The whole configuration.

        :raises CheckpointError: It cannot be read.
        """
        return read_stored_config(self.path, "Name the model the policy was trained with: model=<option>.")

    def sections(self, names: Sequence[str], refer: str = "{0}=<option>") -> dict[str, Any]:
        """Return checked parts of the configuration as plain containers, which may be built.

        :param names: Their keys; missing ones are left out.
        :param refer: The option that replaces a section, with `{0}` for its key.
        :raises CheckpointError: The configuration cannot be read, or names code that is not trusted.
        """
        found = {}
        for name in names:
            way_out = f"name the {name} yourself, {refer.format(name)}"
            try:
                value = self.config.value(name)
            except CheckpointError as error:
                raise CheckpointError(f"{error} Otherwise {way_out}.") from error
            if value is None:
                continue
            refuse_foreign_targets(value, self.path, self.trusted_packages, way_out, name)
            if (guard := current_guard()) is not None:
                texts = ((f"{self.path}: {text.key}", text.value) for text in texts_of(value, name))
                guard.watch(self.directory, texts, self.trusted_packages)
            found[name] = value
        return found

    def deployed(self, device: str, state_dict_file: str) -> DeployedParts:
        """Return the configurations of environment, wrappers and policy.

        :param device: Device of the networks.
        :param state_dict_file: File of the weights.
        :raises CheckpointError: It is not a directory of a training run, or its configuration cannot be used.
        """
        for name in (str(STORED_CONFIG), state_dict_file, SPACES_FILE):
            if not (self.directory / name).is_file():
                raise CheckpointError(
                    f"{self.directory} is not the directory of a training run: there is no {name} in it. Runs of "
                    f"`maze-run -cn conf_train` write it."
                )
        parts = self.sections(("env", "wrappers", "model"))
        for key in ("env", "model"):
            if not parts.get(key):
                raise CheckpointError(
                    f"{self.path} is not the configuration of a training run: there is no `{key}` in it."
                )
        policy = {
            "_target_": "maze.core.agent.serialized_torch_policy.SerializedTorchPolicy",
            "model": parts["model"],
            "state_dict_file": state_dict_file,
            "spaces_dict_file": SPACES_FILE,
            "device": device,
        }
        return DeployedParts(parts["env"], parts.get("wrappers"), policy)


def read_plain_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of a run as plain containers, without resolving references; empty if it holds no mapping."""
    try:
        content = read_yaml(path)
    except CheckpointError:
        return {}
    return content if isinstance(content, dict) else {}


def chosen_options(directory: Path) -> dict[str, Any]:
    """Return the option of each group that a run was started with, as far as known."""
    found: Any = read_plain_yaml(directory / _CHOICES)
    for key in ("hydra", "runtime", "choices"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


# -- trusted packages --------------------------------------------------------------------------------------------------

_NAMED: ContextVar[tuple[str, ...]] = ContextVar("maze_trusted_packages", default=())


@contextmanager
def trusting(packages: Sequence[str]) -> Iterator[None]:
    """Return a context in which stored configurations may name classes and functions of packages.

    :param packages: The packages.
    """
    token = _NAMED.set((*_NAMED.get(), *packages))
    try:
        yield
    finally:
        _NAMED.reset(token)


def trusted_here() -> tuple[str, ...]:
    """Return the packages that are trusted in this context, or stored for the working directory."""
    return (*_NAMED.get(), *remembered(Path.cwd()))


def remembered(directory: Path) -> tuple[str, ...]:
    """Return the packages that are stored as trusted for a directory.

    They are stored in the user's configuration, not in the directory, whose files may come from others.

    :param directory: The working directory.
    """
    packages = read_json_object(memory_file()).get(str(directory.resolve()))
    return tuple(str(package) for package in packages) if isinstance(packages, list) else ()


def remember(directory: Path, packages: Sequence[str]) -> Path:
    """Store packages as trusted for a working directory.

    :param directory: The directory.
    :param packages: The packages, in addition to the stored ones.
    :return: The file that holds them.
    """
    file = memory_file()
    known = {**read_json_object(file), str(directory.resolve()): sorted({*remembered(directory), *packages})}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(known, indent=2) + "\n")
    return file


def memory_file() -> Path:
    """Return the file with the trusted packages of each directory."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "maze" / "trusted.json"
