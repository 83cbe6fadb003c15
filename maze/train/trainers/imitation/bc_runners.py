"""Runners of behavioural cloning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from maze.core.annotations import override
from maze.core.utils.factory import ConfigType
from maze.train.parallelization.placement import placement_of
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
from maze.train.trainers.common.evaluators.evaluator import Evaluator
from maze.train.trainers.common.trainer import Trainer
from maze.train.trainers.common.training_runner import TrainingRunner


@dataclass
class BCRunner(TrainingRunner):
    """Train on recorded trajectories, a part of which is kept for validation.

    :param dataset: Configuration of the data set; it gets `conversion_env_factory`.
    """

    dataset: ConfigType = None

    evaluators: list[Evaluator] | None = field(default=None, init=False)
    """Evaluators of the policy: on validation data, and by rollouts."""

    default_algorithm: ClassVar[str] = "maze.train.trainers.imitation.bc_algorithm_config.BCAlgorithmConfig"
    trains: ClassVar[str] = "maze.train.trainers.imitation.bc_trainer.BCTrainer"
    replaced_arguments: ClassVar[Mapping[str, str]] = {"concurrency": "runner.eval_concurrency"}

    @override(TrainingRunner)
    def build_trainer(self) -> Trainer:
        trainer: Any = super().build_trainer()
        self.evaluators = trainer.run_evaluators
        return trainer  # type: ignore[no-any-return]

    @override(TrainingRunner)
    def run(
        self,
        n_epochs: int | None = None,
        evaluator: Evaluator | None = None,
        eval_every_k_iterations: int | None = None,
        **train_kwargs: Any,
    ) -> None:
        """Train.

        :param n_epochs: Number of epochs; `None` takes the configuration's.
        :param evaluator: Evaluates the policy; `None`: the configured evaluators.
        :param eval_every_k_iterations: Evaluate after every so many minibatches; `None` takes the configuration's.
        """
        super().run(n_epochs, evaluator=evaluator, eval_every_k_iterations=eval_every_k_iterations)

    @classmethod
    def create_distributed_eval_env(
        cls, env_factory: Callable[[], Any], eval_concurrency: int, logging_prefix: str
    ) -> StructuredVectorEnv:
        """Build the vector environment for evaluation rollouts.

        :param env_factory: Makes one environment.
        :param eval_concurrency: Number of environments.
        :param logging_prefix: Prefix of their statistics.
        """
        return placement_of(cls.default_placement).vector_env(env_factory, eval_concurrency, logging_prefix)

    @override(TrainingRunner)
    def create_distributed_env(
        self, env_factory: Callable[[], Any], concurrency: int, logging_prefix: str
    ) -> StructuredVectorEnv:
        """Build a vector environment with the execution backend, unless a subclass replaces the other method."""
        method, given = (cast(Any, each.create_distributed_eval_env) for each in (self, BCRunner))
        make = self.placement.vector_env if method.__func__ is given.__func__ else method
        env: StructuredVectorEnv = make(env_factory, concurrency, logging_prefix)
        return env


@dataclass
class BCDevRunner(BCRunner):
    """Evaluate in the training process."""


@dataclass
class BCLocalRunner(BCRunner):
    """Evaluate in worker processes."""

    default_placement: ClassVar[str] = "processes"
