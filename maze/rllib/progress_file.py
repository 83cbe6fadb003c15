"""How far a training with RLlib is, for ``maze-run --info``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maze.core.utils.files import atomic_write

PROGRESS_FILE = "rllib_progress.json"


def write_progress(iteration: int, is_finished: bool, best_score: float, directory: str | Path = ".") -> None:
    """Writes the file.

    :param iteration: Number of iterations done.
    :param is_finished: Whether the training came to its end.
    :param best_score: Score of the best policy; infinite: there is none yet.
    :param directory: Directory of the run.
    """
    content = {
        "iteration": iteration,
        "is_finished": is_finished,
        "best_score": best_score if math.isfinite(best_score) else None,
    }
    text = json.dumps(content, indent=2) + "\n"
    atomic_write(Path(directory) / PROGRESS_FILE, lambda file: file.write(text.encode()))


def read_progress(directory: str | Path) -> Mapping[str, Any] | None:
    """What :func:`write_progress` wrote; ``None``: the file is missing or damaged."""
    try:
        content = json.loads((Path(directory) / PROGRESS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
