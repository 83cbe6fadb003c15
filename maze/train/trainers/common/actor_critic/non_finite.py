"""Saying which number was not finite, and what it takes to reproduce it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from maze.train.trainers.common.actor_critic.actor_critic_events import SubstepKey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maze.core.rollout.rollout_columns import RolloutColumns


def describe_non_finite(terms: list[tuple[str, SubstepKey, Tensor]], norms: dict[Any, Tensor]) -> str:
    """Names the first term of the loss, or else the gradient, that is not finite."""
    explained = "the step was not applied. Look for extreme rewards or observations, or lower `algorithm.lr`."
    for event, key, value in terms:
        if not math.isfinite(value.item()):
            kind = "critic" if event.startswith("critic") else "sub-step"
            return f"{event} of {kind} {key!r} is {value.item()}; {explained}"
    for (event, key), norm in norms.items():
        if not math.isfinite(norm.item()):
            kind = "critic" if event.startswith("critic") else "sub-step"
            name = event.removesuffix("_grad_norm")
            return f"the gradient of the {name} network of {kind} {key!r} is not finite; {explained}"
    return f"the sum of the terms of the loss is not finite; {explained}"


def columns_as_tensors(columns: RolloutColumns) -> dict[str, Any]:
    """A rollout in a form that files hold without pickled objects."""
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
