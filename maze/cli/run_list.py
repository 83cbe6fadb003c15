"""`maze-run --runs [directory]`: the trainings that lie in a directory, a line for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from maze.cli.errors import UsageError
from maze.cli.run_info import CONFIG_FILE
from maze.core.utils.files import read_json_object
from maze.core.utils.stored_run import chosen_options, read_plain_yaml
from maze.train.utils.training_record import ENDED, INTERRUPTED, read_record

_DEPTHS = ("", "*/", "*/*/", "*/*/*/")
_CLASS_SUFFIX = "AlgorithmConfig"
_STARTING = "starting"
"""No epoch has begun yet, or none ever did."""


class ListedRun(NamedTuple):
    """A training, as it is listed."""

    run: str
    environment: str
    algorithm: str
    steps: str
    best_score: str
    state: str
    date: str


def print_runs(argument: str) -> int:
    """Prints a table of the trainings below a directory, the newest last; checkpoints are not read.

    :return: Exit status.
    :raises UsageError: It is no directory.
    """
    directory = Path(argument)
    if not directory.is_dir():
        raise UsageError(f"--runs: {directory} is no directory. Name the one that runs are written to: outputs.")
    found = sorted(_configs(directory), key=lambda entry: entry[1].stat().st_mtime)
    runs = [_listed(path.parent, path, cfg) for cfg, path in found if "algorithm" in cfg]
    if runs:
        print("\n".join(_table([ListedRun(*(name.replace("_", " ") for name in ListedRun._fields)), *runs])))
    else:
        print(f"No trainings in {directory}; maze-run -cn conf_train makes one.")
    if others := len(found) - len(runs):
        print(f"Not shown: {others} rollout{'s' if others > 1 else ''} or other jobs.")
    if runs:
        print("maze-run --info <run> says more about one, and how to go on with it.")
    return 0


def _configs(directory: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    for depth in _DEPTHS:
        for path in directory.glob(f"{depth}{CONFIG_FILE}"):
            yield read_plain_yaml(path), path


def _listed(run: Path, config: Path, cfg: Mapping[str, Any]) -> ListedRun:
    record = record_of(run) or {"state": _STARTING}
    steps, score = record.get("n_env_steps"), record.get("best_score")
    broken = f" (broken by {record['violation']:.3g})" if record.get("violation") else ""
    return ListedRun(
        run=str(run),
        environment=environment_name(cfg.get("env")),
        algorithm=algorithm_name(cfg["algorithm"], run),
        steps=f"{steps:,}" if isinstance(steps, int) and steps else "-",
        best_score=f"{score:.5g}{broken}" if isinstance(score, int | float) else "-",
        state=str(record.get("state")),
        date=datetime.fromtimestamp(config.stat().st_mtime).strftime("%Y-%m-%d %H:%M"),
    )


def environment_name(env: Any) -> str:
    """The name of the environment that a section of a configuration describes."""
    from maze.core.utils.config_utils import gym_env_defaults

    section = env if isinstance(env, Mapping) else {}
    name, target, defaults = section.get("name"), section.get("_target_", env), gym_env_defaults()
    # Where only `env._target_` was changed, the default environment's name is still there.
    is_left_over = target != defaults["_target_"] and name == defaults["name"]
    return name if isinstance(name, str) and not is_left_over else str(target).rpartition(".")[2]


def algorithm_name(algorithm: Any, run: Path) -> str:
    """The name of the algorithm that a section of a run's configuration describes.

    :param algorithm: The section.
    :param run: Directory of the run.
    """
    target = algorithm.get("_target_") if isinstance(algorithm, Mapping) else None
    name = str(target).rpartition(".")[2]
    if target and name.endswith(_CLASS_SUFFIX):
        return name.removesuffix(_CLASS_SUFFIX).lower()
    choices = chosen_options(run)
    return str(choices.get("algorithm") or choices.get("rllib/algorithm") or target or "?")


def record_of(run: Path) -> Mapping[str, Any] | None:
    """What a training has noted of its state, RLlib's as well; `None`: nothing yet."""
    record = read_record(run)
    if record is None and (progress := read_json_object(run / "rllib_progress.json")):
        state = ENDED if progress.get("is_finished") else INTERRUPTED
        return {"state": state, "best_score": progress.get("best_score")}
    return record


def _table(rows: Sequence[ListedRun]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(ListedRun._fields))]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
