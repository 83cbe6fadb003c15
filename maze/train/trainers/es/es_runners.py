"""Runners of evolution strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from maze.console.runs import print_header
from maze.core.annotations import override
from maze.core.utils.config_utils import whole_number
from maze.train.trainers.common.trainer import Trainer
from maze.train.trainers.common.training_runner import TrainingRunner
from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable
from maze.train.trainers.es.es_trainer import NOISE_TABLE_SIZE, ESTrainer, make_distributed_rollouts

if TYPE_CHECKING:
    from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase
    from maze.train.trainers.es.distributed.es_distributed_rollouts import ESDistributedRollouts


@dataclass
class ESMasterRunner(TrainingRunner):
    """Trains by evaluating perturbed policies.

    :param shared_noise_table_size: Number of random numbers that perturbations are cut out of.
    :param n_eval_rollouts: Number of episodes per evaluation of the policy; there is one before each update.
    :param concurrency: Number of episodes that a process plays side by side, each in an environment of its own; 0: as
        many as there are, up to 64.
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
        for name, minimum in (("shared_noise_table_size", 1), ("n_eval_rollouts", 0)):
            whole_number(f"runner.{name}", getattr(self, name), minimum)

    @override(TrainingRunner)
    def build_trainer(self) -> Trainer:
        print_header("Init Shared Noise Table")
        self.shared_noise = SharedNoiseTable(count=self.shared_noise_table_size)
        print_header("Trainer Setup")
        return ESTrainer.build(self, self.shared_noise, self._new_rollouts)

    @override(TrainingRunner)
    def run(
        self,
        n_epochs: int | None = None,
        distributed_rollouts: ESDistributedRollouts | None = None,
        model_selection: ModelSelectionBase | None = None,
        **train_kwargs: Any,
    ) -> None:
        """Trains.

        :param n_epochs: Number of epochs; `None` takes the configuration's.
        :param distributed_rollouts: Evaluates perturbed policies; `None`: what the runner makes.
        :param model_selection: Receives the evaluation results; `None`: the one that writes the best model.
        """
        print_header("Run Trainer")
        super().run(n_epochs, distributed_rollouts=distributed_rollouts, model_selection=model_selection)

    def create_distributed_rollouts(
        self, env: Any, shared_noise: SharedNoiseTable, agent_instance_seed: int
    ) -> ESDistributedRollouts:
        """Makes what evaluates perturbed policies.

        :param env: An environment.
        :param shared_noise: The noise table.
        :param agent_instance_seed: Seed of the perturbations.
        """
        return make_distributed_rollouts(
            self,
            shared_noise,
            env=env,
            agent_instance_seed=agent_instance_seed,
            n_eval_rollouts=self.n_eval_rollouts,
            concurrency=self.concurrency,
            **self._worker_arguments(),
        )

    def _new_rollouts(self) -> ESDistributedRollouts:
        assert self.env_factory is not None, "setup comes first"
        assert self.shared_noise is not None, "setup comes first"
        env = self.env_factory()
        env.seed(self.env_seeds(1)[0])
        return self.create_distributed_rollouts(env, self.shared_noise, self.agent_seed())

    def _worker_arguments(self) -> dict[str, Any]:
        return {}


@dataclass
class ESDevRunner(ESMasterRunner):
    """Evaluates the perturbed policies in the process of the training: the fastest choice for cheap environments."""


@dataclass
class ESLocalRunner(ESMasterRunner):
    """Evaluates the perturbed policies in worker processes; with the same seeds the results are those of `dev`.

    :param n_train_workers: Number of processes for perturbed policies; 0: one for each CPU core.
    :param n_eval_workers: Number of processes for the policy itself; 0: the others evaluate it as well.
    :param start_method: `forkserver`, `spawn` or `fork`; `None`: `forkserver` where there is one.
    """

    n_train_workers: int = 0
    n_eval_workers: int = 0
    start_method: str | None = None
    default_placement: ClassVar[str] = "processes"

    @override(ESMasterRunner)
    def _worker_arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("n_train_workers", "n_eval_workers", "start_method")}
