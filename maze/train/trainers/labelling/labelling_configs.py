"""Hyperparameters of the algorithms that label decisions by simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from maze.core.utils.config_utils import Amount, Count, Positive, Share
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.evaluators.evaluator import default_rollout_evaluator


@dataclass
class LabellingConfig(AlgorithmConfig):
    """Hyperparameters of a :class:`~maze.train.trainers.labelling.labelling_trainer.LabellingTrainer`."""

    device: str = "cpu"
    """Device of the networks: `cpu`, `cuda`, or `cuda:<index>`."""

    patience: int = 0
    """Number of evaluations without improvement that end the run; 0: any number."""

    batch_size: Count = 64
    """Number of labelled decisions in a minibatch."""

    lr: Positive = 0.002
    """Learning rate of Adam."""

    max_grad_norm: Amount = 1.0
    """Gradients are scaled down to this norm where they are larger; 0 leaves them alone."""

    entropy_coef: Amount = 0.0
    """Weight of the entropy bonus."""

    rollout_evaluator: Any = field(default_factory=default_rollout_evaluator)
    """Evaluator between epochs (or its configuration), which selects the best model; `None`: none."""


@dataclass
class DCLConfig(LabellingConfig):
    """Hyperparameters of :class:`~maze.train.trainers.labelling.labelling_algorithms.DCL`."""

    trainer = "maze.train.trainers.labelling.labelling_algorithms.DCL"

    n_epochs: int = 0
    """Number of epochs, each of which is a generation; 0: `generations`."""

    generations: Count = 2
    """Number of policies that are learned, each from simulations of the one before."""

    states: Count = 20_000
    """Number of decisions that are labelled in a generation; fewer where episodes end early."""

    scenarios: int = 1024
    """Scenarios of a candidate action at most; sequential halving gives them to the best."""

    horizon: Count | None = 20
    """Environment steps that are simulated; `null`: to the end of the episode."""

    gamma: float = 1.0
    """Discount factor of the simulated returns."""

    value: Any = None
    """Estimate of the return after the horizon: a function of observations `[n, ...]` and the actor, or its
    configuration; `null`: 0."""

    confidence: float = 0.8
    """Confidence of the intervals that end the comparison of a candidate with the action of the current policy."""

    candidates: int = 64
    """Candidate actions of a decision at most."""

    base: Any = None
    """The policy of the first generation, a heuristic for instance, or its configuration
    (`+policy@algorithm.base=<option of the group policy>`); `null`: the policy that is trained."""

    exploration: Share = 0.1
    """Share of random actions on the way to the labelled decisions."""

    states_per_update: Count = 100
    """Number of simultaneous episodes in which decisions are collected, one decision from each."""

    n_passes: Count = 40
    """Number of passes over the labelled decisions, with a learning rate that decays to zero."""

    batch_size: Count = 256
    """Number of labelled decisions in a minibatch."""

    generation_seconds: Positive | None = None
    """Wall time of a generation at most: three quarters for labels, the rest for passes. Results then depend on the
    machine. `null`: any."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_integer("scenarios", "candidates", minimum=2)
        self.require_number("gamma", 0.0, 1.0, above=True)
        self.require_number("confidence", 0.0, 1.0, above=True, below=True)


@dataclass
class SelfLabellingConfig(LabellingConfig):
    """Hyperparameters of :class:`~maze.train.trainers.labelling.labelling_algorithms.SelfLabelling`."""

    name = "self_labelling"
    trainer = "maze.train.trainers.labelling.labelling_algorithms.SelfLabelling"

    n_epochs: int = 20
    """Number of epochs; 0: until early stopping."""

    epoch_length: int = 20
    """Number of updates per epoch."""

    instances: Count = 16
    """Number of instances (episodes with different seeds) in an update."""

    samples: int = 32
    """Number of different solutions that are sampled of each instance."""

    n_passes: Count = 1
    """Number of passes over the best solutions of an update."""

    lr_schedule: str = "constant"
    """Schedule of the learning rate: `constant`, or `linear` or `cosine` to zero at the end of `n_epochs`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_choice("lr_schedule", ("constant", "linear", "cosine"))
        self.require_integer("samples", minimum=2)
