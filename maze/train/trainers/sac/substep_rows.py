"""Which rows of a batch count for an actor: episodes may end in the middle of an environment step."""

from __future__ import annotations

import torch
from torch import Tensor

from maze.train.trainers.common.replay_buffer.transitions import TensorDict, TransitionBatch


def acted(batch: TransitionBatch, position: int) -> Tensor | None:
    """1 where the actor acted, 0 where the episode had ended before; None: it always did."""
    return None if batch.n_substeps is None or position == 0 else (batch.n_substeps > position).float()


def ended_at(batch: TransitionBatch, position: int) -> Tensor:
    """Whether the episode terminated with this sub-step (not the last one of a step)."""
    if batch.n_substeps is None:
        return torch.zeros_like(batch.terminated)
    return batch.terminated & (batch.n_substeps == position + 1)


def known_observations(batch: TransitionBatch, position: int) -> TensorDict:
    """What the actor saw; where it saw nothing, what it saw in another row, so that it is valid at least."""
    return _known(batch.observations[position], _observed(batch, position))


def known_next_observations(batch: TransitionBatch, position: int) -> TensorDict:
    """The same of the environment step after."""
    return _known(batch.next_observations[position], _observed_next(batch, position))


def _observed(batch: TransitionBatch, position: int) -> Tensor | None:
    """Where there is an observation of the actor: it acted, or the episode was cut off when it was to act."""
    if batch.n_substeps is None or position == 0:
        return None
    return (batch.n_substeps > position) | ((batch.n_substeps == position) & ~batch.terminated)


def _observed_next(batch: TransitionBatch, position: int) -> Tensor | None:
    """Where there is an observation of the actor in the next step, or at least in this one."""
    if batch.n_substeps is None or batch.has_next_step is None or position == 0:
        return None
    return batch.has_next_step | (batch.n_substeps > position)


def _known(observation: TensorDict, is_known: Tensor | None) -> TensorDict:
    if is_known is None or not bool(is_known.any()):
        return observation
    rows = torch.arange(len(is_known), device=is_known.device)
    rows = torch.where(is_known, rows, is_known.to(torch.uint8).argmax())
    return {key: tensor[rows] for key, tensor in observation.items()}
