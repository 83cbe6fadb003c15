"""Runs as their directories describe them: files that may come from untrusted sources."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from maze.core.errors import CheckpointError
from maze.core.utils.import_guard import current_guard
from maze.core.utils.stored_config import StoredConfig, read_stored_config, read_yaml, refuse_foreign_targets, texts_of
from maze.core.utils.trust import trusted_here

STORED_CONFIG = Path(".hydra") / "config.yaml"
_CHOICES = Path(".hydra") / "hydra.yaml"
SPACES_FILE = "spaces_config.pkl"


class DeployedParts(NamedTuple):
    """Configurations of a run's parts. File names in them refer to the run's directory."""

    env: Any
    wrappers: Any
    policy: Any


class StoredRun:
    """Reads the configuration of a run; nothing in it is built.

    What :meth:`sections` returns may be built, in the context of an
    :func:`~maze.core.utils.import_guard.imports_guarded`.

    :param directory: The run's directory.
    :param trusted_packages: Packages whose classes and functions the configuration may name, beside those that are
        trusted in the working directory.
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
        """Parts of the configuration as plain containers, judged: what they name may be built.

        :param names: Their keys; those that the configuration lacks are left out.
        :param refer: How the user names a section instead, with `{0}` for its key.
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
        """The configurations of environment, wrappers and policy.

        :param device: Device of the networks.
        :param state_dict_file: File of the weights.
        :raises CheckpointError: The directory is none of a training run, or its configuration cannot be used.
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
    """A YAML file of a run as plain containers, references in it unresolved; empty where it holds no mapping."""
    try:
        content = read_yaml(path)
    except CheckpointError:
        return {}
    return content if isinstance(content, dict) else {}


def chosen_options(directory: Path) -> dict[str, Any]:
    """The option of each group that a run was started with, as far as it is known."""
    found: Any = read_plain_yaml(directory / _CHOICES)
    for key in ("hydra", "runtime", "choices"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}
