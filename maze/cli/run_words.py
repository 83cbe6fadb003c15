"""What a run says when it begins and when it has ended."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from maze.cli.hydra_setup import value_text
from maze.cli.run_commands import resume_command
from maze.cli.run_info import CONFIG_FILE, shown_path, stored_arguments
from maze.core.log_stats.stats_format import significant
from maze.core.utils.stored_run import read_plain_yaml
from maze.train.utils.training_record import ENDED, read_record

_FILES = {
    "report.html": "for a browser",
    "state_dict.pt": "the best model",
    "latest.pt": "the latest state",
    "progress.csv": "every statistic",
    "maze_cli.log": "the same as a log",
    "trajectory_data": "trajectories",
    "trajectory_parquet": "episodes as tables",
    "event_logs": "tables of events",
    "episode_pages": "pages of episodes",
    "action_records": "actions",
    "comparison.csv": "the comparison",
    "gate.md": "the verdict",
}
"""Files that are worth looking for, and what they are."""


def beginning(directory: Path, project: Path) -> str:
    """Where a run writes.

    :param directory: Its directory.
    :param project: Directory that the command was given in.
    """
    return f"-> writing into {shown_path(directory, project)}"


def ending(directory: Path, project: Path, seconds: float, commands: Sequence[tuple[str, str]] | None = None) -> str:
    """What a run has reached, where everything lies, and how to go on.

    :param directory: Its directory.
    :param project: Directory that the command was given in.
    :param seconds: How long it took.
    :param commands: What can come next, with what it is for; `None`: commands, of a training.
    """
    shown = shown_path(directory, project)
    present = [f"{name} ({what})" for name, what in _FILES.items() if (directory / name).exists()]
    lines = [*_reached(directory, seconds), f"Everything is in {shown}{':' if present else '.'}"]
    lines += [f"  {', '.join(present)}"] if present else []
    if commands is None:
        commands = list(_next_commands(directory, shown)) if (directory / "state_dict.pt").is_file() else []
    if commands:
        lines += ["Next:", *(line for command, what in commands for line in (f"  # {what}", f"  {command}"))]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """A time in words."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{significant(seconds, 3 if seconds < 10 else 2)} s"


def _reached(directory: Path, seconds: float) -> Iterator[str]:
    from maze.rllib.statistics import read_progress

    record = read_record(directory)
    unit, word = "epoch", "Trained" if record and record.get("state") == ENDED else "Interrupted after"
    if record is None:
        progress = read_progress(directory)
        if progress is None:
            return
        unit, word = "iteration", "Trained" if progress.get("is_finished") else "Interrupted after"
        record = {"epoch": progress.get("iteration"), "best_score": progress.get("best_score")}
    epoch, n_steps, score = record.get("epoch"), record.get("n_env_steps"), record.get("best_score")
    steps = f", {n_steps:,} environment steps" if isinstance(n_steps, int) and n_steps else ""
    best = f"; best score {significant(score)}" if isinstance(score, float | int) else ""
    violation = record.get("violation")
    if best and violation:
        best += f" (constraints are broken by {violation:.5g})"
    yield f"{word} {epoch} {unit}{'' if epoch == 1 else 's'}{steps} in {duration(seconds)}{best}."


def _next_commands(directory: Path, shown: Path) -> Iterator[tuple[str, str]]:
    yield shlex.join(["maze-run", "--play", str(shown)]), "watch its best policy"
    compared = f"policies=[random,{value_text(shown)}]"
    yield shlex.join(["maze-run", "-cn", "conf_compare", compared]), "compare it with random decisions"
    cfg = read_plain_yaml(directory / CONFIG_FILE)
    record = read_record(directory)
    arguments = stored_arguments(directory)
    if record is None or not arguments:
        yield shlex.join(["maze-run", "--info", str(shown)]), "everything about its files"
        return
    is_ended = record.get("state") == ENDED
    n_epochs = record.get("epoch") if is_ended else None
    yield resume_command(arguments, cfg, shown, n_epochs), "train on" if is_ended else "go on where it stopped"
