"""What all training runs have in common: environments, spaces, model, logging, resumption."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.utils.checkpoint import load_state
from maze.core.utils.config_utils import EnvFactory
from maze.core.utils.factory import Factory
from maze.core.utils.files import clean_stale_temporaries
from maze.core.utils.seeding import MazeSeeding, set_seeds_globally
from maze.core.wrappers.observation_normalization.observation_normalization_utils import (
    make_normalized_env_factory,
    obtain_normalization_statistics,
)
from maze.core.wrappers.observation_normalization.observation_normalization_wrapper import (
    ObservationNormalizationWrapper,
)
from maze.core.wrappers.observation_normalization.statistics_file import StructuredStatisticsType
from maze.core.wrappers.running_statistics import FrozenEnvFactory
from maze.perception.models.model_composer import BaseModelComposer
from maze.perception.models.space_config import SpacesConfig
from maze.runner import Runner
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
from maze.train.trainers.common.epoch_trainer import EpochTrainer
from maze.train.trainers.common.evaluators.evaluator import Evaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.common.resumption import CHECKPOINT_FILE, StoredTraining, resumed_seeds, stored_training
from maze.train.trainers.common.trainer import Trainer
from maze.utils.log_stats_utils import setup_logging

ComponentType = TypeVar("ComponentType")

if TYPE_CHECKING:
    from omegaconf import DictConfig

MIN_CONCURRENCY = 8
"""Number of environments where neither the user nor the number of CPU cores asks for more."""


@dataclass
class TrainingRunner(Runner):
    """Builds what a training needs from its configuration, and runs it.

    :param state_dict_dump_file: File for the weights of the best model.
    :param dump_interval: Additionally keep the weights after every so many epochs; ``None``: only the best ones.
    :param spaces_config_dump_file: File for the action and observation spaces the model was built for.
    :param normalization_samples: Number of observations from which normalization statistics are estimated.
    """

    state_dict_dump_file: str = "state_dict.pt"
    dump_interval: int | None = None
    spaces_config_dump_file: str = "spaces_config.pkl"
    normalization_samples: int = 10000

    env_factory: Callable[[], Any] | None = field(default=None, init=False)
    """Makes one environment with all its wrappers."""

    def __post_init__(self) -> None:
        self._cfg: DictConfig | None = None
        self._model_composer: BaseModelComposer | None = None
        self._trainer: Trainer | None = None
        self._normalization_statistics: StructuredStatisticsType | None = None
        self._resumed: StoredTraining | None = None
        self._closing: list[Callable[[], None]] = []

    @override(Runner)
    def setup(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self._resumed = stored_training(cfg)
        seeding = dict(cfg.get("seeding") or {})
        if self._resumed is not None:
            seeding.update(resumed_seeds(self._resumed, seeding))
        self.maze_seeding = MazeSeeding(
            seeding.get("env_base_seed"), seeding.get("agent_base_seed"), bool(seeding.get("cudnn_determinism_flag"))
        )
        # networks draw their initial weights from torch's global generator
        set_seeds_globally(
            self.maze_seeding.agent_global_seed, self.maze_seeding.cudnn_determinism_flag, "of the training run"
        )
        self.env_factory = EnvFactory(cfg.env, cfg.get("wrappers") or {})
        env = self.env_factory()
        try:
            env.seed(self.maze_seeding.generate_env_instance_seed())
            self._normalization_statistics = self._estimate_normalization_statistics(env)
            spaces = {
                "action_spaces_dict": env.action_spaces_dict,
                "observation_spaces_dict": env.observation_spaces_dict,
                "agent_counts_dict": env.agent_counts_dict,
            }
        finally:
            env.close()
        SpacesConfig(**spaces).save(self.spaces_config_dump_file)
        setup_logging(job_config=cfg)
        self._model_composer = Factory(BaseModelComposer).instantiate(  # type: ignore[type-abstract]  # built from a subclass
            cfg.model, **spaces
        )
        self._model_composer.save_models()

    @override(Runner)
    def run(self, n_epochs: int | None = None, **train_kwargs: Any) -> None:
        try:
            self.trainer.train(n_epochs=n_epochs, **train_kwargs)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes all environments and ends their worker processes."""
        for close in self._closing:
            close()
        self._closing.clear()

    @property
    def model_composer(self) -> BaseModelComposer:
        """Builds policies and critics; available after :meth:`setup`."""
        return self._after_setup(self._model_composer)

    @property
    def cfg(self) -> DictConfig:
        """The whole configuration; available after :meth:`setup`."""
        return self._after_setup(self._cfg)

    @property
    def trainer(self) -> Trainer:
        """The trainer; available after :meth:`setup`."""
        return self._after_setup(self._trainer)

    def _after_setup(self, component: ComponentType | None) -> ComponentType:
        if component is None:
            raise ConfigError(f"The {type(self).__name__} was not set up: call setup(cfg) before using it.")
        return component

    def _init_trainer_from_input_dir(self, trainer: Trainer, state_dict_dump_file: str, input_dir: str | None) -> None:
        """Starts the training from an earlier one, if that is configured: from its best model, or where it stopped.

        :param trainer: The trainer.
        :param state_dict_dump_file: Name of the file with the best model's weights in that run's directory.
        :param input_dir: Directory of the earlier run; empty: none.
        """
        if isinstance(trainer, EpochTrainer):
            trainer.run_seeds = {
                "env_base_seed": self.maze_seeding.env_global_seed,
                "agent_base_seed": self.maze_seeding.agent_global_seed,
            }
        if not input_dir:
            return
        directory = Path(input_dir)
        with suppress(OSError):  # a directory that cannot be written to has nothing of ours to clean up
            clean_stale_temporaries(directory, min_age=60.0)
        if self._resumed is not None:
            trainer.resume(self._resumed.state, self._resumed.path)
            self._resumed = StoredTraining(self._resumed.path, {})  # it may be large
            return
        path = directory / Path(state_dict_dump_file).name
        if path.is_file():
            trainer.load_state(path)
        elif isinstance(trainer, EpochTrainer) and (directory / CHECKPOINT_FILE).is_file():  # nothing was evaluated
            path = directory / CHECKPOINT_FILE
            state = load_state(path)
            trainer.load_state_dict(state.get("model", state), path)
        else:
            found = "is no directory" if not directory.is_dir() else f"has no {path.name} in it"
            raise ConfigError(
                f"input_dir: {directory} {found}. Expected the directory of a training run; "
                "`maze-run -cn conf_train env=... algorithm=...` makes one below `outputs`."
            )

    def _evaluation_env(
        self,
        create: Callable[[Callable[[], Any], int, str], StructuredVectorEnv],
        concurrency: int,
        n_episodes: int,
        env_factory: Callable[[], Any] | None = None,
    ) -> StructuredVectorEnv:
        """Environments for evaluation; they learn no statistics, so that evaluations of different epochs compare.

        :param create: Makes a vector environment of a factory, a number and a logging prefix.
        :param concurrency: Number of environments; 0: as many as episodes and CPU cores suggest.
        :param n_episodes: Number of episodes of an evaluation.
        :param env_factory: Makes one environment; ``None``: that of the training.
        """
        factory = self.env_factory if env_factory is None else env_factory
        assert factory is not None, "setup comes first"
        concurrency = concurrency or max(1, min(n_episodes, default_concurrency()))
        env = create(FrozenEnvFactory(factory), concurrency, "eval")
        self._closing.append(env.close)
        env.seed(self._env_seeds(concurrency))
        return env

    def _rollout_evaluator(
        self,
        config: Any,
        model_selection: BestModelSelection,
        create: Callable[[Callable[[], Any], int, str], StructuredVectorEnv],
        concurrency: int,
    ) -> Evaluator | None:
        """The configured evaluator, with environments of its own.

        :param config: Its configuration; an evaluator, or ``None``, stays what it is.
        :param model_selection: What it reports to.
        :param create: See :meth:`_evaluation_env`.
        :param concurrency: Number of environments; 0: as many as episodes and CPU cores suggest.
        """
        if config is None or isinstance(config, Evaluator):
            return config
        n_episodes = config.get("n_episodes", MIN_CONCURRENCY) if isinstance(config, Mapping) else MIN_CONCURRENCY
        return Factory(Evaluator).instantiate(  # type: ignore[type-abstract]  # a subclass
            config,
            config_path="algorithm.rollout_evaluator",
            eval_env=self._evaluation_env(create, concurrency, n_episodes),
            model_selection=model_selection,
        )

    def _build_actor_critic(self, algorithm: str, device: str, critic_of: str = "state") -> TorchActorCritic:
        """Policy and critic as configured, the policy with a seed of its own.

        :param algorithm: Who needs them.
        :param device: Where they go.
        :param critic_of: What the critic values: ``state`` or ``state-action``.
        """
        policy, critic = self.model_composer.policy, self.model_composer.critic
        if policy is None or critic is None:
            missing = "policy" if policy is None else "critic"
            example = "flatten_concat_shared" if critic_of == "state" else "flatten_concat_state_action"
            raise ConfigError(
                f"model.{missing}: {algorithm} needs a model with a policy and a {critic_of} critic, but no {missing} "
                f"is configured. Choose one, for instance with `model=flatten_concat` and `critic={example}`."
            )
        policy.seed(self.maze_seeding.generate_agent_instance_seed())
        return TorchActorCritic(policy=policy, critic=critic, device=device)

    def _env_seeds(self, n_seeds: int) -> list[int]:
        return [self.maze_seeding.generate_env_instance_seed() for _ in range(n_seeds)]

    def _estimate_normalization_statistics(self, env: Any) -> StructuredStatisticsType | None:
        """Statistics for observation normalization, where the environment asks for it.

        A run that continues another one takes over its statistics: its model was trained with them.
        """
        assert self.env_factory is not None
        statistics, self.env_factory = estimated_statistics(
            env, self.env_factory, self.normalization_samples, self.cfg.get("input_dir")
        )
        return statistics


def estimated_statistics(
    env: Any, env_factory: Callable[[], Any], n_samples: int, input_dir: str | None
) -> tuple[StructuredStatisticsType | None, Callable[[], Any]]:
    """Statistics for observation normalization where an environment asks for it, and a factory that uses them.

    :param env: One environment, seeded.
    :param env_factory: Makes such environments.
    :param n_samples: Number of observations to estimate from.
    :param input_dir: Directory of the run that is continued, whose statistics are taken over; empty: none.
    :return: The statistics (``None``: nothing is normalized), and the factory.
    """
    if not isinstance(env, ObservationNormalizationWrapper):
        return None, env_factory
    if input_dir and env.names_to_estimate():
        file = env.statistics_dump or Path("statistics.pkl")
        env.load_statistics(Path(input_dir) / file.name)
        env.dump_statistics()
        statistics: StructuredStatisticsType | None = env.get_statistics()
    else:
        statistics = obtain_normalization_statistics(env, n_samples=n_samples)
    return statistics, make_normalized_env_factory(env_factory, statistics)


def default_concurrency() -> int:
    """Number of environments where nobody says how many."""
    return max(MIN_CONCURRENCY, os.cpu_count() or 1)
