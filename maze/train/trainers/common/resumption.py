"""Earlier runs that a run resumes or takes its weights from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maze.core.errors import ConfigError
from maze.core.utils.checkpoint import load_state
from maze.core.utils.files import clean_stale_temporaries
from maze.core.utils.seeding import MazeSeeding
from maze.core.utils.update_profile import PROFILE_FILE, UpdateProfile
from maze.perception.models.space_config import SpacesConfig
from maze.train.trainers.common.trainer import EpochTrainer, Trainer
from maze.train.trainers.common.warm_start import start_warm
from maze.train.utils.plain_state import STATE_FORMAT

if TYPE_CHECKING:
    from maze.train.trainers.common.training_runner import TrainingRunner

CHECKPOINT_FILE = "latest.pt"
"""File with the state of a run, in its directory."""

SEED_KEYS = ("env_base_seed", "agent_base_seed")


class StoredTraining(NamedTuple):
    """The saved state of an earlier run."""

    path: Path
    state: dict[str, Any]


def stored_training(cfg: Mapping[str, Any]) -> StoredTraining | None:
    """Return the run to resume; `None`: a new one begins.

    :param cfg: The whole configuration.
    :raises ConfigError: The state of the run is missing or cannot be read.
    """
    resume, input_dir = cfg.get("resume", False), cfg.get("input_dir")
    if resume is None or resume is False:
        return None
    if resume is not True:
        raise ConfigError(f"resume: expected true or false, got {resume!r}.")
    way_out = "Leave out `resume=true` to start a new run."
    if not input_dir:
        raise ConfigError(
            "resume: true resumes the run in `input_dir`, but no input_dir is given. Name the directory of "
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
            f"resume: expected the state of a run in {path}, found weights alone. {way_out} Its weights can be "
            "started from as `state_dict.pt`."
        )
    return StoredTraining(path, state)


def resumed_seeds(training: StoredTraining, seeding: Mapping[str, Any]) -> dict[str, int]:
    """Return the seeds of the resumed run.

    :param training: The resumed run.
    :param seeding: The configured seeds: the same, or `None` for each.
    :raises ConfigError: The configured seeds differ from those of the run.
    """
    stored = training.state.get("seeds") or {}
    for key in SEED_KEYS:
        given = seeding.get(key)
        if key in stored and given is not None and given != stored[key]:
            raise ConfigError(
                f"seeding.{key}: the run in {training.path} has the seed {stored[key]}, found {given}. Leave it "
                "out when resuming: seeds are taken over."
            )
    return {key: int(stored[key]) for key in SEED_KEYS if key in stored}


def seeding_of(cfg: Mapping[str, Any], resumed: StoredTraining | None) -> MazeSeeding:
    """Return the source of all seeds of a run.

    :param cfg: The whole configuration.
    :param resumed: The resumed run, whose seeds are used; `None`: a new one begins.
    """
    seeding = dict(cfg.get("seeding") or {})
    if resumed is not None:
        seeding.update(resumed_seeds(resumed, seeding))
    return MazeSeeding.configured(seeding)


def begin_where_configured(trainer: Trainer, run: TrainingRunner, resumed: StoredTraining | None) -> None:
    """Resume an earlier run or start from its best model, if that is configured.

    A run without an earlier one begins with cloning another policy, where `warm_start` configures one.

    :param trainer: The trainer, as it was built.
    :param run: Its runner; `input_dir` of its configuration is the directory of the earlier run.
    :param resumed: The run to resume; `None`: at most weights are loaded.
    :raises ConfigError: There is nothing to start from, or it was trained for other spaces.
    """
    if isinstance(trainer, EpochTrainer):
        trainer.session.profile = UpdateProfile(Path(PROFILE_FILE)) if run.profile else None
        trainer.session.run_seeds = {
            "env_base_seed": run.maze_seeding.env_global_seed,
            "agent_base_seed": run.maze_seeding.agent_global_seed,
        }
    input_dir = run.cfg.get("input_dir")
    if not input_dir:
        start_warm(trainer, run)
        return
    directory = Path(input_dir)
    trained_for = directory / Path(run.spaces_config_dump_file).name
    if trained_for.is_file():
        SpacesConfig.load(trained_for).require_same(run.spaces, f"input_dir={directory}")
    with suppress(OSError):  # a directory that cannot be written to has nothing of ours to clean up
        clean_stale_temporaries(directory, min_age=60.0)
    weights, checkpoint = directory / Path(run.state_dict_dump_file).name, directory / CHECKPOINT_FILE
    if resumed is not None:
        trainer.resume(resumed.state, resumed.path)
    elif weights.is_file():
        trainer.load_state(weights)
    elif isinstance(trainer, EpochTrainer) and checkpoint.is_file():  # nothing was evaluated
        state = load_state(checkpoint)
        trainer.load_state_dict(state.get("model", state), checkpoint)
    else:
        found = "is no directory" if not directory.is_dir() else f"has no {weights.name} in it"
        raise ConfigError(
            f"input_dir: {directory} {found}. Expected the directory of a training run; "
            "`maze-run -cn conf_train env=... algorithm=...` makes one below `outputs`."
        )
