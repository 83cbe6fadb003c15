"""Hyperparameters of self-labelling."""

from __future__ import annotations

from dataclasses import dataclass

from maze.train.trainers.imitation.labelling import LabellingConfig


@dataclass
class SelfLabellingConfig(LabellingConfig):
    """Hyperparameters of :class:`~maze.train.trainers.self_labelling.self_labelling_trainer.SelfLabelling`."""

    name = "self_labelling"
    trainer = "maze.train.trainers.self_labelling.self_labelling_trainer.SelfLabelling"

    n_epochs: int = 20
    """Number of epochs; 0: until early stopping."""

    epoch_length: int = 20
    """Number of updates per epoch."""

    instances: int = 16
    """Number of instances (episodes with different seeds) in an update."""

    samples: int = 32
    """Number of different solutions that are sampled of each instance."""

    n_passes: int = 1
    """Number of passes over the best solutions of an update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("instances", "n_passes"):
            self.require_integer(field, minimum=1)
        self.require_integer("samples", minimum=2)
