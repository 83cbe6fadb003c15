"""A file to reproduce what made a training stop at a number that is not finite."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maze.core.errors import CheckpointError
from maze.train.checkpoint import save_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maze.core.rollout.rollout_columns import RolloutColumns

logger = logging.getLogger(__name__)


def write_reproduction_file(
    directory: Path, training_state: Mapping[str, Any], columns: RolloutColumns | None
) -> Path | None:
    """Writes state and rollout next to the checkpoints, where that is possible.

    :param directory: Where to write.
    :param training_state: Weights, random generators and progress before the step that was not taken.
    :param columns: The latest rollout.
    :return: The file; ``None`` if it could not be written.
    """
    file = directory / f"non_finite_{time.strftime('%Y-%m-%d_%H-%M-%S')}.pt"
    try:
        save_state(file, {"training_state": dict(training_state), "rollout": _rollout(columns)})
    except CheckpointError as error:
        logger.warning("No reproduction file was written: %s", error)
        return None
    return file


def _rollout(columns: RolloutColumns | None) -> dict[str, Any]:
    if columns is None:
        return {}
    substeps = {
        key: {
            "observations": _tensors(substep.observations),
            "actions": _tensors(substep.actions),
            "agent_ids": torch.from_numpy(substep.agent_ids.copy()),
            "ticks": torch.from_numpy(substep.ticks.copy()),
        }
        for key, substep in columns.substeps.items()
    }
    flags = ("rewards", "terminated", "truncated", "step_complete")
    return {"substeps": substeps, **{name: torch.from_numpy(getattr(columns, name).copy()) for name in flags}}


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(array.copy()) for key, array in arrays.items()}
