"""Runners of behavioural cloning."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.utils.data import Dataset, random_split

from maze.core.agent.torch_model import resolve_device
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.utils.factory import ConfigType, Factory, plain_container
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.perception.models.space_config import SpacesConfig
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze.train.trainers.common.evaluators.evaluator import Evaluator
from maze.train.trainers.common.evaluators.multi_evaluator import MultiEvaluator
from maze.train.trainers.common.evaluators.rollout_evaluator import RolloutEvaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.common.resumption import CHECKPOINT_FILE
from maze.train.trainers.common.training_runner import TrainingRunner
from maze.train.trainers.imitation.bc_algorithm_config import BCAlgorithmConfig
from maze.train.trainers.imitation.bc_loss import BCLoss
from maze.train.trainers.imitation.bc_trainer import BCTrainer
from maze.train.trainers.imitation.bc_validation_evaluator import BCValidationEvaluator
from maze.train.trainers.imitation.step_batches import StepBatches, check_fits

if TYPE_CHECKING:
    from omegaconf import DictConfig

logger = logging.getLogger(__name__)

MIN_TRAJECTORIES_TO_SEPARATE = 10
"""From this number of episodes on, training and validation data have no episode in common."""


@dataclass
class BCRunner(TrainingRunner, ABC):
    """Loads the trajectories, splits off validation data, builds policy, evaluators and trainer, and trains.

    :param dataset: Configuration of the data set; it gets ``conversion_env_factory``.
    :param eval_concurrency: Number of environments for evaluation rollouts; 0: as many as episodes and CPU cores
        suggest.
    """

    dataset: ConfigType = None
    eval_concurrency: int = 0

    evaluators: list[Evaluator] | None = field(default=None, init=False)
    """What evaluates the policy: on validation data, and by rollouts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_concurrency < 0:
            raise ConfigError(f"runner.eval_concurrency: expected at least 0, got {self.eval_concurrency!r}.")

    @override(TrainingRunner)
    def setup(self, cfg: DictConfig) -> None:
        super().setup(cfg)
        config = BCAlgorithmConfig.from_config(cfg.algorithm)
        policy = self.model_composer.policy
        if policy is None:
            raise ConfigError("model.policy: behavioural cloning needs a model with a policy; try `model=vector_obs`.")
        spaces = SpacesConfig.load(self.spaces_config_dump_file)
        dataset = self._load_dataset()
        check_fits(dataset, spaces.observation_spaces_dict, spaces.action_spaces_dict)
        try:
            policy.to(resolve_device(config.device))
        except ConfigError as error:
            raise ConfigError(f"algorithm.{error}") from error
        policy.seed(self.maze_seeding.generate_agent_instance_seed())
        training_data, validation_data = self._split(dataset, config)
        model_selection = BestModelSelection(
            dump_file=self.state_dict_dump_file, model=policy, dump_interval=self.dump_interval
        )
        loss = BCLoss(action_spaces_dict=spaces.action_spaces_dict, entropy_coef=config.entropy_coef)
        self._trainer = BCTrainer(
            algorithm_config=config,
            data_loader=StepBatches(
                training_data,
                config.batch_size,
                shuffle=True,
                device=policy.device,
                seed=self.maze_seeding.generate_agent_instance_seed(),
                action_spaces_dict=spaces.action_spaces_dict,
            ),
            policy=policy,
            optimizer=Factory(Optimizer).instantiate(
                config.optimizer, config_path="algorithm.optimizer", params=policy.parameters()
            ),
            loss=loss,
            model_selection=model_selection,
            checkpoint_file=CHECKPOINT_FILE,
        )
        self._init_trainer_from_input_dir(self._trainer, self.state_dict_dump_file, cfg.get("input_dir"))
        self.evaluators = []
        if len(validation_data) > 0:
            batches = StepBatches(
                validation_data,
                config.batch_size,
                device=policy.device,
                action_spaces_dict=spaces.action_spaces_dict,
            )
            self.evaluators.append(BCValidationEvaluator(loss, model_selection, batches, logging_prefix="eval"))
        if config.n_eval_episodes > 0:
            selection = None if self.evaluators else model_selection
            env = self._build_eval_env(config)
            self.evaluators.append(RolloutEvaluator(env, config.n_eval_episodes, selection, deterministic=True))

    @override(TrainingRunner)
    def run(  # type: ignore[override]  # documented
        self,
        n_epochs: int | None = None,
        evaluator: Evaluator | None = None,
        eval_every_k_iterations: int | None = None,
    ) -> None:
        """Trains.

        :param n_epochs: Number of epochs; ``None`` takes the configuration's.
        :param evaluator: Evaluates the policy; ``None``: what was configured.
        :param eval_every_k_iterations: Evaluate after every so many minibatches; ``None`` takes the configuration's.
        """
        if evaluator is None and self.evaluators:
            evaluator = MultiEvaluator(self.evaluators)
        super().run(n_epochs=n_epochs, evaluator=evaluator, eval_every_k_iterations=eval_every_k_iterations)

    @classmethod
    @abstractmethod
    def create_distributed_eval_env(
        cls, env_factory: Callable[[], Any], eval_concurrency: int, logging_prefix: str
    ) -> StructuredVectorEnv:
        """Builds the vector environment for evaluation rollouts.

        :param env_factory: Makes one environment.
        :param eval_concurrency: Number of environments.
        :param logging_prefix: Where their statistics are logged.
        """

    def _load_dataset(self) -> Any:
        config = plain_container(self.dataset, "runner.dataset")
        if config is None:
            raise ConfigError("runner.dataset: expected the configuration of a data set, found nothing.")
        if isinstance(config, dict):
            config = {
                key: _from_working_directory(value) if key in ("input_data", "dir_or_file") else value
                for key, value in config.items()
            }
        return Factory(Dataset).instantiate(
            config, config_path="runner.dataset", conversion_env_factory=self.env_factory
        )

    def _split(self, dataset: Any, config: BCAlgorithmConfig) -> tuple[Any, Any]:
        """Training and validation data: whole episodes where there are enough of them, else single steps.

        Of a handful of episodes, half would show too little of the task to learn it.
        """
        n_validation = round(len(dataset) * config.validation_percentage / 100)
        if n_validation == 0:
            return dataset, []
        generator = torch.Generator()
        generator.manual_seed(self.maze_seeding.generate_agent_instance_seed())
        lengths = [len(dataset) - n_validation, n_validation]
        n_trajectories = len(getattr(dataset, "trajectory_references", ()))
        is_few = config.validation_split == "auto" and n_trajectories < MIN_TRAJECTORIES_TO_SEPARATE
        if config.validation_split != "steps" and not is_few:
            training, validation = dataset.random_split(lengths, generator=generator)
            return training, validation
        if is_few:
            logger.info(
                "Validation steps come from the episodes that are trained on, as there are only %d; accuracy on new "
                "episodes may be lower (`algorithm.validation_split=episodes` measures it).",
                n_trajectories,
            )
        training, validation = random_split(dataset, lengths, generator)
        return training, validation

    def _build_eval_env(self, config: BCAlgorithmConfig) -> StructuredVectorEnv:
        factory = self.env_factory
        assert factory is not None
        if config.max_episode_steps > 0:
            factory = _TimeLimitedEnvFactory(factory, config.max_episode_steps)
        concurrency = config.n_eval_workers or self.eval_concurrency
        concurrency = concurrency or max(1, min(config.n_eval_episodes, os.cpu_count() or 1))
        return self._evaluation_env(self.create_distributed_eval_env, concurrency, config.n_eval_episodes, factory)


@dataclass
class BCDevRunner(BCRunner):
    """Evaluates in the process of the training."""

    @classmethod
    @override(BCRunner)
    def create_distributed_eval_env(
        cls, env_factory: Callable[[], Any], eval_concurrency: int, logging_prefix: str
    ) -> SequentialVectorEnv:
        return SequentialVectorEnv([env_factory] * eval_concurrency, logging_prefix=logging_prefix)


@dataclass
class BCLocalRunner(BCRunner):
    """Evaluates in worker processes."""

    @classmethod
    @override(BCRunner)
    def create_distributed_eval_env(
        cls, env_factory: Callable[[], Any], eval_concurrency: int, logging_prefix: str
    ) -> SubprocVectorEnv:
        return SubprocVectorEnv([env_factory] * eval_concurrency, logging_prefix=logging_prefix)


class _TimeLimitedEnvFactory:
    """Makes environments whose episodes are cut off."""

    def __init__(self, env_factory: Callable[[], Any], max_episode_steps: int) -> None:
        self.env_factory = env_factory
        self.max_episode_steps = max_episode_steps

    def __call__(self) -> Any:
        return TimeLimitWrapper.wrap(self.env_factory(), max_episode_steps=self.max_episode_steps)


def _from_working_directory(path: Any) -> Any:
    """Relative paths, one or a list, as seen from where the command was started; runs work in their own directories."""
    if isinstance(path, list):
        return [_from_working_directory(each) for each in path]
    if not isinstance(path, str) or Path(path).exists():
        return path
    from hydra.core.hydra_config import HydraConfig

    return str(Path(HydraConfig.get().runtime.cwd) / path) if HydraConfig.initialized() else path
