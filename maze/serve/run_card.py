"""What a training run's files tell about its policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maze.core.errors import MazeError
from maze.core.utils.files import read_json_object
from maze.report.progress import read_progress


def run_card(run_dir: Path) -> dict[str, Any]:
    """Algorithm, command, versions and evaluation results, in JSON; what cannot be read is left out.

    :param run_dir: The run's directory.
    """
    card: dict[str, Any] = {"run": run_dir.name}
    command = run_dir / "command.txt"
    if command.is_file():
        card["command"] = command.read_text().splitlines()[0].strip()
    card["versions"] = read_json_object(run_dir / "versions.json").get("versions") or {}
    training = read_json_object(run_dir / "run.json")
    card["training"] = {key: training[key] for key in ("epoch", "n_env_steps", "best_score") if key in training}
    card["evaluation"] = _evaluation(run_dir)
    return card


def _evaluation(run_dir: Path) -> dict[str, Any]:
    """The statistics of the evaluation whose mean reward was the best, and its epoch; empty where there was none."""
    try:
        progress = read_progress(run_dir)
    except MazeError:
        return {}
    evaluated = progress.paths.get("eval")
    rewards = None if evaluated is None else evaluated.columns.get("BaseEnvEvents/reward/mean")
    if evaluated is None or rewards is None or all(math.isnan(value) for value in rewards):
        return {}
    best = max((value, index) for index, value in enumerate(rewards) if not math.isnan(value))[1]
    statistics: Mapping[str, float] = {
        name: column[best] for name, column in evaluated.columns.items() if math.isfinite(column[best])
    }
    return {"epoch": int(evaluated.steps[best]), "statistics": dict(statistics)}
