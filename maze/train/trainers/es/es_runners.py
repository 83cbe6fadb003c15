"""Runners of evolution strategies."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maze.core.agent.policy import Policy
from maze.core.agent.torch_model import TorchModel
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.utils.config_utils import whole_number
from maze.core.utils.factory import Factory
from maze.core.wrappers.running_statistics import FrozenEnvFactory
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.common.resumption import CHECKPOINT_FILE
from maze.train.trainers.common.training_runner import TrainingRunner
from maze.train.trainers.es.distributed.es_dummy_distributed_rollouts import ESDummyDistributedRollouts
from maze.train.trainers.es.distributed.es_subproc_distributed_rollouts import ESSubprocDistributedRollouts
from maze.train.trainers.es.es_algorithm_config import ESAlgorithmConfig
from maze.train.trainers.es.es_shared_noise_table import SharedNoiseTable
from maze.train.trainers.es.es_trainer import ESTrainer

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase
    from maze.train.trainers.es.distributed.es_distributed_rollouts import ESDistributedRollouts


@dataclass
class ESMasterRunner(TrainingRunner, ABC):
    """Builds policy, noise table and trainer, and trains.

    :param shared_noise_table_size: Number of random numbers that perturbations are cut out of.
    :param n_eval_rollouts: Number of episodes per evaluation of the policy; there is one before each update.
    :param concurrency: Number of episodes that a process plays side by side, each in an environment of its own; 0: as
        many as there are, up to 64.
    """

    shared_noise_table_size: int = 100000000
    n_eval_rollouts: int = 10
    concurrency: int = 0

    shared_noise: SharedNoiseTable | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._model_selection: BestModelSelection | None = None
        for name, minimum in (("shared_noise_table_size", 1), ("n_eval_rollouts", 0), ("concurrency", 0)):
            whole_number(f"runner.{name}", getattr(self, name), minimum)

    @override(TrainingRunner)
    def setup(self, cfg: DictConfig) -> None:
        super().setup(cfg)
        assert self.env_factory is not None
        # Returns of the episodes of an update are compared with one another: none may change how the next is rewarded.
        self.env_factory = FrozenEnvFactory(self.env_factory)
        config = ESAlgorithmConfig.from_config(cfg.algorithm)
        self.shared_noise = SharedNoiseTable(count=self.shared_noise_table_size)
        policy = self._build_policy(config)
        self._model_selection = BestModelSelection(
            dump_file=self.state_dict_dump_file, model=policy, dump_interval=self.dump_interval
        )
        self._trainer = ESTrainer(
            algorithm_config=config,
            torch_policy=policy,
            shared_noise=self.shared_noise,
            normalization_stats=self._normalization_statistics,
            checkpoint_file=CHECKPOINT_FILE,
        )
        self._init_trainer_from_input_dir(self._trainer, self.state_dict_dump_file, cfg.get("input_dir"))

    @override(TrainingRunner)
    def run(  # type: ignore[override]  # documented
        self,
        n_epochs: int | None = None,
        distributed_rollouts: ESDistributedRollouts | None = None,
        model_selection: ModelSelectionBase | None = None,
    ) -> None:
        """Trains.

        :param n_epochs: Number of epochs; ``None`` takes the configuration's.
        :param distributed_rollouts: Evaluates perturbed policies; ``None``: what the runner makes.
        :param model_selection: Receives the evaluation results; ``None``: the one that writes the best model.
        """
        own_rollouts = distributed_rollouts is None
        if distributed_rollouts is None:
            distributed_rollouts = self._new_distributed_rollouts()
        try:
            self.trainer.train(
                n_epochs=n_epochs,
                distributed_rollouts=distributed_rollouts,
                model_selection=self._model_selection if model_selection is None else model_selection,
            )
        finally:
            if own_rollouts:
                distributed_rollouts.close()

    @abstractmethod
    def create_distributed_rollouts(
        self, env: Any, shared_noise: SharedNoiseTable, agent_instance_seed: int
    ) -> ESDistributedRollouts:
        """Makes what evaluates perturbed policies.

        :param env: An environment.
        :param shared_noise: The noise table.
        :param agent_instance_seed: Seed of the perturbations.
        """

    def _new_distributed_rollouts(self) -> ESDistributedRollouts:
        assert self.env_factory is not None, "setup comes first"
        assert self.shared_noise is not None, "setup comes first"
        env = self.env_factory()
        env.seed(self.maze_seeding.generate_env_instance_seed())
        return self.create_distributed_rollouts(
            env=env,
            shared_noise=self.shared_noise,
            agent_instance_seed=self.maze_seeding.generate_agent_instance_seed(),
        )

    def _build_policy(self, config: ESAlgorithmConfig) -> Any:
        built = self.model_composer.policy
        if built is None:
            raise ConfigError(
                "model.policy: evolution strategies need a model with a policy; try `model=flatten_concat`."
            )
        torch_policy = TorchPolicy(
            networks=built.networks,
            distribution_mapper=self.model_composer.distribution_mapper,
            device="cpu",
            substeps_with_separate_agent_nets=built.substeps_with_separate_agent_nets,
        )
        torch_policy.seed(self.maze_seeding.agent_global_seed)
        if config.policy_wrapper is None:
            return torch_policy
        policy = Factory(Policy).instantiate(  # type: ignore[type-abstract]  # a subclass
            config.policy_wrapper, config_path="algorithm.policy_wrapper", torch_policy=torch_policy
        )
        if not isinstance(policy, TorchModel):
            raise ConfigError(
                f"algorithm.policy_wrapper: {type(policy).__name__} has no parameters to train; expected a Policy that "
                "is a TorchModel as well and passes the parameters of `torch_policy` on."
            )
        return policy


@dataclass
class ESDevRunner(ESMasterRunner):
    """Evaluates the perturbed policies in the process of the training: the fastest choice for cheap environments."""

    @override(ESMasterRunner)
    def create_distributed_rollouts(
        self, env: Any, shared_noise: SharedNoiseTable, agent_instance_seed: int
    ) -> ESDummyDistributedRollouts:
        return ESDummyDistributedRollouts(
            env=env,
            n_eval_rollouts=self.n_eval_rollouts,
            shared_noise=shared_noise,
            agent_instance_seed=agent_instance_seed,
            env_factory=self.env_factory,
            env_seed=self.maze_seeding.generate_env_instance_seed(),
            concurrency=self.concurrency,
        )


@dataclass
class ESLocalRunner(ESMasterRunner):
    """Evaluates the perturbed policies in worker processes; with the same seeds the results are those of ``dev``.

    :param n_train_workers: Number of processes for perturbed policies; 0: one for each CPU core.
    :param n_eval_workers: Number of processes for the policy itself; 0: the others evaluate it as well.
    :param start_method: `forkserver`, `spawn` or `fork`; ``None``: `forkserver` where there is one.
    """

    n_train_workers: int = 0
    n_eval_workers: int = 0
    start_method: str | None = None

    @override(ESMasterRunner)
    def create_distributed_rollouts(
        self, env: Any, shared_noise: SharedNoiseTable, agent_instance_seed: int
    ) -> ESSubprocDistributedRollouts:
        assert self.env_factory is not None
        env.close()  # the workers make their own
        n_workers = (self.n_train_workers or n_available_cores()) + self.n_eval_workers
        return ESSubprocDistributedRollouts(
            env_factory=self.env_factory,
            n_training_workers=self.n_train_workers or n_available_cores(),
            n_eval_workers=self.n_eval_workers,
            shared_noise=shared_noise,
            env_seeds=[self.maze_seeding.generate_env_instance_seed() for _ in range(n_workers)],
            agent_seed=agent_instance_seed,
            start_method=self.start_method,
            n_eval_rollouts=self.n_eval_rollouts,
            concurrency=self.concurrency,
        )


def n_available_cores() -> int:
    """Number of CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
