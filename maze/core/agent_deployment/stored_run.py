"""What a training run left behind, as configurations of a deployment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maze.core.errors import CheckpointError, ConfigError
from maze.core.utils.factory import plain_container
from maze.core.utils.stored_config import read_stored_config, refuse_foreign_targets

STORED_CONFIG = Path(".hydra") / "config.yaml"
SPACES_FILE = "spaces_config.pkl"


class StoredRun(NamedTuple):
    """Configurations of a run's parts. File names in them refer to the run's directory."""

    env: Any
    wrappers: Any
    policy: Any


def read_stored_run(run_dir: Path, device: str, state_dict_file: str, trusted_packages: Sequence[str]) -> StoredRun:
    """Reads a run's configuration; nothing in it is built yet.

    :param run_dir: The run's directory.
    :param device: Where the networks are to run.
    :param state_dict_file: The weights to load.
    :param trusted_packages: Further packages whose classes the configuration may name.
    :raises CheckpointError: The directory is none of a training run, or its configuration cannot be read.
    """
    for name in (str(STORED_CONFIG), state_dict_file, SPACES_FILE):
        if not (run_dir / name).is_file():
            raise CheckpointError(
                f"{run_dir} is not the directory of a training run: there is no {name} in it. Runs of "
                f"`maze-run -cn conf_train` write it."
            )
    path = run_dir / STORED_CONFIG
    try:
        config: Any = plain_container(read_stored_config(path), str(path))
    except ConfigError as error:
        raise CheckpointError(f"{path} cannot be read as the configuration of a training run: {error}") from error
    missing = [key for key in ("env", "model") if not config.get(key)]
    if missing:
        raise CheckpointError(f"{path} is not the configuration of a training run: there is no `{missing[0]}` in it.")
    parts = {key: config.get(key) for key in ("env", "wrappers", "model")}
    refuse_foreign_targets(parts, path, trusted_packages)
    policy = {
        "_target_": "maze.core.agent.serialized_torch_policy.SerializedTorchPolicy",
        "model": parts["model"],
        "state_dict_file": state_dict_file,
        "spaces_dict_file": SPACES_FILE,
        "device": device,
    }
    return StoredRun(parts["env"], parts["wrappers"], policy)
