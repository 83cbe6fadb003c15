"""Runners of evolution strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from maze.console.runs import print_header
from maze.core.annotations import override
from maze.core.utils.config_utils import whole_number
from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase
from maze.train.trainers.common.trainer import Trainer
from maze.train.trainers.common.training_runner import TrainingRunner
from maze.train.trainers.es.distributed.es_distributed_rollouts import ESDistributedRollouts
from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable
from maze.train.trainers.es.es_trainer import NOISE_TABLE_SIZE, make_distributed_rollouts


@dataclass
class ESMasterRunner(TrainingRunner):
    """Train by evaluating perturbed policies.

    :param shared_noise_table_size: Size of the noise table; perturbations are slices of it.
    :param n_eval_rollouts: Number of episodes of the evaluation of the policy before each update.
    :param concurrency: Number of parallel episodes of a process, each in its own environment; 0: at most 64.
    """

    shared_noise_table_size: int = NOISE_TABLE_SIZE
    n_eval_rollouts: int = 10
    concurrency: int = 0

    shared_noise: SharedNoiseTable | None = field(default=None, init=False)

    default_algorithm: ClassVar[str] = "maze.train.trainers.es.es_algorithm_config.ESAlgorithmConfig"
    trains: ClassVar[str] = "maze.train.trainers.es.es_trainer.ESTrainer"
    replaced_arguments: ClassVar[Mapping[str, str]] = {"eval_concurrency": "runner.concurrency"}

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("runner.n_eval_rollouts", self.n_eval_rollouts, at_least=0)

    @override(TrainingRunner)
    def build_trainer(self) -> Trainer:
        print_header("Init Shared Noise Table")
        self.shared_noise = SharedNoiseTable(count=self.shared_noise_table_size)
        print_header("Trainer Setup")
        return super().build_trainer()

    @override(TrainingRunner)
    def run(
        self,
        n_epochs: int | None = None,
        distributed_rollouts: ESDistributedRollouts | None = None,
        model_selection: ModelSelectionBase | None = None,
        **train_kwargs: Any,
    ) -> None:
        """Train.

        :param n_epochs: Number of epochs; `None`: as configured.
        :param distributed_rollouts: Evaluates perturbed policies; `None`: :meth:`create_distributed_rollouts`.
        :param model_selection: Receives the evaluation results; `None`: the selection that writes the best model.
        """
        print_header("Run Trainer")
        super().run(n_epochs, distributed_rollouts=distributed_rollouts, model_selection=model_selection)

    def create_distributed_rollouts(
        self, env: Any, shared_noise: SharedNoiseTable, agent_instance_seed: int
    ) -> ESDistributedRollouts:
        """Make the rollouts of perturbed policies with the execution backend of the run.

        :param env: An environment, which the rollouts use and close.
        :param shared_noise: The noise table.
        :param agent_instance_seed: Seed of the perturbations.
        """
        return make_distributed_rollouts(self, env, shared_noise, agent_instance_seed)


@dataclass
class ESDevRunner(ESMasterRunner):
    """Evaluate the perturbed policies in the training process: the fastest choice for cheap environments."""


@dataclass
class ESLocalRunner(ESMasterRunner):
    """Evaluate the perturbed policies in worker processes; results equal those of `dev` with the same seeds.

    :param n_train_workers: Number of processes; 0: one for each CPU core.
    :param n_eval_workers: Number of further processes; all processes play episodes of all kinds.
    :param start_method: `forkserver`, `spawn` or `fork`; `None`: `forkserver` if available.
    """

    n_train_workers: int = 0
    n_eval_workers: int = 0
    start_method: str | None = None
    default_placement: ClassVar[str] = "processes"
