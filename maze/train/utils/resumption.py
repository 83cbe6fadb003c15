"""Finding the training that a run goes on with, and saying what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maze.core.errors import ConfigError
from maze.core.utils.checkpoint import load_state

STATE_FORMAT = "maze_training_state"
"""Key that tells the state of a training from plain weights; its value is the version of the format."""

CHECKPOINT_FILE = "latest.pt"
"""Where a run keeps the state of its training, in its directory."""

SEED_KEYS = ("env_base_seed", "agent_base_seed")


class StoredTraining(NamedTuple):
    """A training that another run has saved."""

    path: Path
    state: dict[str, Any]


def stored_training(cfg: Mapping[str, Any]) -> StoredTraining | None:
    """The training that is to be resumed; `None`: a new one begins.

    :param cfg: The whole configuration.
    :raises ConfigError: There is no state of a training where it should be, or it cannot be read.
    """
    resume, input_dir = cfg.get("resume", False), cfg.get("input_dir")
    if resume is None or resume is False:
        return None
    if resume is not True:
        raise ConfigError(f"resume: expected true or false, got {resume!r}.")
    way_out = "Leave out `resume=true` to begin a new training."
    if not input_dir:
        raise ConfigError(
            "resume: true goes on with the training in `input_dir`, but no input_dir is given. Name the directory of "
            f"that run, input_dir=outputs/<name>/<time>. {way_out}"
        )
    directory = Path(str(input_dir))
    path = directory / CHECKPOINT_FILE
    if not directory.is_dir():
        raise ConfigError(f"input_dir: {directory} is no directory; expected that of the run to resume. {way_out}")
    if not path.is_file():
        found = sorted(file.name for file in directory.glob("*.pt"))
        raise ConfigError(
            f"resume: expected {CHECKPOINT_FILE} in {directory}, found {', '.join(found) or 'no checkpoint'}. It is "
            "written when the first epoch ends; `resume=false` (the default) starts from the weights of "
            "state_dict.pt, where there is one."
        )
    state = load_state(path)
    if STATE_FORMAT not in state:
        raise ConfigError(
            f"resume: expected the state of a training in {path}, found weights alone. {way_out} Its weights can be "
            "started from as `state_dict.pt`."
        )
    return StoredTraining(path, state)


def resumed_seeds(training: StoredTraining, seeding: Mapping[str, Any]) -> dict[str, int]:
    """The seeds of the training that is resumed.

    :param training: That training.
    :param seeding: What is configured: the same seeds, or `None` for each.
    :raises ConfigError: Other seeds were given than the training began with.
    """
    stored = training.state.get("seeds") or {}
    for key in SEED_KEYS:
        given = seeding.get(key)
        if key in stored and given is not None and given != stored[key]:
            raise ConfigError(
                f"seeding.{key}: the training in {training.path} has the seed {stored[key]}, found {given}. Leave it "
                "out when resuming: seeds are taken over."
            )
    return {key: int(stored[key]) for key in SEED_KEYS if key in stored}
